//! Which of how many nodes this is, and where they meet.

use std::time::Duration;

use phalanx_comm::PortRange;

use super::torchrun::{self, RendezvousConf, setting, switch, variable};
use super::{Env, Process, detect, is_set, kubernetes, text};
use crate::error::{Error, Result, refuse};
use crate::flags::LaunchCli;

/// Where torchrun's c10d nodes meet, unless a port is given.
const C10D_PORT: u16 = 29400;

/// torchrun's time-outs of a job with a range of nodes.
const JOIN: Duration = Duration::from_secs(600);
const LAST_CALL: Duration = Duration::from_secs(30);
/// The same where a node that comes later joins the others.
const LAST_CALL_IN_PLACE: Duration = Duration::from_secs(3);

/// The launcher of the ranks of one node.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Node {
    /// Ranks on this node.
    pub local_ranks: usize,
    /// Where it meets the others; `None`: one node.
    pub meeting: Option<Meeting>,
    /// The ranks' MASTER_PORT on one node, where it was given.
    pub master_port: Option<u16>,
}

/// Where several nodes meet.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Meeting {
    /// Number of launchers, two or more; the most, where they may come and go.
    pub nodes: usize,
    /// The fewest launchers, where they may come and go.
    pub least: Option<usize>,
    /// The number of this one; `None`: by arrival.
    pub node_rank: Option<usize>,
    /// Without a number: whether this launcher is node 0, where it was given.
    pub is_host: Option<bool>,
    /// Host of node 0; empty until the engine has carried it.
    pub host: String,
    /// The store's port there.
    pub port: u16,
    /// What was given of them.
    pub given: Address,
    /// The engine that gave this node its number.
    pub engine: Option<&'static str>,
    /// This launcher among those that an engine started which can carry token, host and port to all of them: see
    /// [`engine::settle`](crate::engine::settle).
    pub carrier: Option<Process>,
    /// How long to wait for the other nodes.
    pub timeout: Duration,
    /// How long to wait for more than the fewest.
    pub last_call: Duration,
    /// The silence after which another node is lost.
    pub lost_after: Duration,
}

/// Default of `--lost-after`: a pause of 1.5 s is no loss.
pub const LOST_AFTER: Duration = Duration::from_secs(2);

/// Where processes meet, as far as it is given.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Address {
    /// Host of process 0.
    pub host: Option<String>,
    /// The store's port there.
    pub port: Option<u16>,
    /// Ports for everything that other hosts connect to; `None`: any.
    pub ports: Option<PortRange>,
}

/// The flags and variables from which a launcher knows its node.
pub struct NodeQuery<'a> {
    pub env: &'a Env,
    /// Those of `phalanx launch`; only the nodes' ones of a command that starts ranks of its own.
    pub cli: &'a LaunchCli,
    /// That command, as typed: `phalanx train`, or the name of a user's program. `None`: `phalanx launch`.
    pub command: Option<&'a str>,
}

impl Node {
    /// One node with this many ranks.
    pub fn alone(local_ranks: usize) -> Node {
        Node {
            local_ranks,
            ..Node::default()
        }
    }

    /// Whether the nodes of the job come and go.
    pub fn comes_and_goes(&self) -> bool {
        let meeting = self.meeting.as_ref();
        meeting.is_some_and(|meeting| meeting.least.is_some())
    }

    /// Whether rank 0 runs here.
    pub fn is_first(&self) -> bool {
        let meeting = self.meeting.as_ref();
        meeting.is_none_or(|meeting| meeting.node_rank == Some(0))
    }

    /// The node of `phalanx launch`; `cores` is what `auto` means.
    ///
    /// # Errors
    /// `Usage`, naming the flag or variable.
    pub fn of_launch(cli: &LaunchCli, env: &Env, cores: usize) -> Result<Node> {
        let local_ranks = torchrun::local_ranks(env, &cli.nproc_per_node, cores)?;
        let command = None;
        let mut node = NodeQuery { env, cli, command }.node(local_ranks)?;
        let conf = match setting(env, "rdzv-conf", &cli.rdzv_conf) {
            None => RendezvousConf::default(),
            Some(given) => {
                torchrun::rendezvous_conf(given.text).map_err(|why| given.wrong(&why))?
            }
        };
        let timeout = setting(env, "rdzv-timeout", &cli.rdzv_timeout);
        let timeout = timeout.map(|given| given.seconds(86_400.0)).transpose()?;
        if let Some(meeting) = &mut node.meeting {
            let default = match meeting.least {
                Some(_) => JOIN,
                None => Duration::from_secs(300),
            };
            meeting.is_host = conf.is_host.or(meeting.is_host);
            meeting.timeout = timeout.or(conf.timeout).unwrap_or(default);
            meeting.last_call = conf.last_call.unwrap_or(LAST_CALL);
        }
        Ok(node)
    }
}

impl NodeQuery<'_> {
    fn is_standalone(&self) -> bool {
        self.command.is_none() && switch(self.env, "standalone", self.cli.standalone)
    }

    /// Nodes without a number get one in order of arrival.
    fn is_c10d(&self) -> bool {
        let backend = setting(self.env, "rdzv-backend", &self.cli.rdzv_backend);
        self.command.is_none() && backend.is_some_and(|given| given.text == "c10d")
    }

    fn default_port(&self, ports: Option<PortRange>) -> u16 {
        match (ports, self.is_c10d()) {
            (Some(ports), _) => ports.first(),
            (None, true) => C10D_PORT,
            (None, false) => crate::DEFAULT_PORT,
        }
    }

    /// The node, which starts this many ranks.
    ///
    /// # Errors
    /// `Usage`, naming the flag or variable.
    pub fn node(&self, local_ranks: usize) -> Result<Node> {
        let (env, is_standalone) = (self.env, self.is_standalone());
        let ports = self.cli.nodes.port_range(env)?;
        let typed = setting(env, "nnodes", &self.cli.nodes.nnodes);
        let range = typed.as_ref().map(|given| given.nodes()).transpose()?;
        let least = range.filter(|(least, most)| least < most);
        let least = least.map(|(least, _)| least);
        let typed = range.map(|(_, most)| most);
        let typed_rank = setting(env, "node-rank", &self.cli.nodes.node_rank);
        let typed_rank = typed_rank.map(|given| given.number("not a node's number"));
        let typed_rank: Option<usize> = typed_rank.transpose()?;
        if is_standalone && typed.is_some_and(|nodes| nodes > 1) {
            refuse!("--standalone runs one node; it cannot be combined with --nnodes above 1");
        }
        // Nodes that come and go are not those that an engine has numbered.
        let engine = match is_standalone || typed == Some(1) || least.is_some() {
            true => None,
            false => self.among_nodes(typed)?,
        };
        let started = engine.as_ref().map(|engine| engine.world);
        let nodes = typed.or(started).unwrap_or(1);
        let node_rank = match typed_rank {
            _ if is_standalone => Some(0),
            _ if least.is_some() => None,
            Some(rank) => Some(rank),
            None => self.number_of_node(nodes, engine.as_ref())?,
        };
        if let Some(node_rank) = node_rank.filter(|rank| *rank >= nodes) {
            refuse!("--node-rank {node_rank} is outside --nnodes {nodes} (nodes count from 0)");
        }
        if nodes == 1 {
            let given = self.cli.nodes.address(&self.cli.rdzv_endpoint, env, true)?;
            return Ok(Node {
                master_port: given.port.filter(|_| !is_standalone),
                ..Node::alone(local_ranks)
            });
        }
        let by_engine = engine.as_ref().filter(|_| typed_rank.is_none());
        let by_engine = by_engine.map(|engine| engine.source);
        let mut meeting = self.meeting(nodes, node_rank, engine, ports)?;
        meeting.engine = by_engine;
        meeting.least = least;
        meeting.last_call = LAST_CALL_IN_PLACE;
        if least.is_some() {
            meeting.is_host = typed_rank.map(|rank| rank == 0);
        }
        Ok(Node {
            meeting: Some(meeting),
            ..Node::alone(local_ranks)
        })
    }

    /// This launcher among several that an engine started. `typed`: the number of nodes that was given.
    fn among_nodes(&self, typed: Option<usize>) -> Result<Option<Process>> {
        let env = self.env;
        if let Some(process) = detect(env)?.filter(|process| process.world > 1) {
            return Ok(Some(process));
        }
        let has_host = setting(env, "master-addr", &self.cli.nodes.master_addr).is_some()
            || setting(env, "rdzv-endpoint", &self.cli.rdzv_endpoint).is_some()
            || is_set(env, "MASTER_ADDR");
        kubernetes::node(env, self.command, typed, has_host)
    }

    /// The number of this node, which was not given; `None`: by arrival.
    fn number_of_node(&self, nodes: usize, engine: Option<&Process>) -> Result<Option<usize>> {
        match engine {
            Some(engine) if engine.world == nodes => return Ok(Some(engine.rank)),
            Some(engine) => {
                return Err(Error::usage(format!(
                    "--nnodes is {nodes}, but {} started {} processes",
                    engine.source, engine.world
                ))
                .note("fix", "start one process a node, or give --node-rank too"));
            }
            None if nodes == 1 => return Ok(Some(0)),
            None if self.is_c10d() => return Ok(None),
            None => {}
        }
        let error = Error::usage(format!(
            "{} requires --node-rank, the number of this node",
            self.nnodes_as_typed()
        ))
        .note(
            "fix",
            format!(
                "add --node-rank 0 on the first node, ... {} on the last",
                nodes - 1
            ),
        );
        Err(match self.command {
            Some(_) => error,
            None => error.note(
                "or",
                "--rdzv-backend c10d --rdzv-endpoint HOST:PORT, the same on all nodes, HOST being one of them",
            ),
        })
    }

    /// Host and port of the meeting, and what carries them.
    fn meeting(
        &self,
        nodes: usize,
        node_rank: Option<usize>,
        engine: Option<Process>,
        ports: Option<PortRange>,
    ) -> Result<Meeting> {
        let mut given = self.given_address()?;
        given.ports = ports;
        let lost_after = setting(self.env, "lost-after", &self.cli.nodes.lost_after);
        let lost_after = lost_after.map(|given| given.lost_after()).transpose()?;
        let who = match &engine {
            Some(engine) => format!(
                "{} does not say on which host the first of the {nodes} nodes is",
                engine.source
            ),
            None => format!(
                "{} requires --master-addr, the host of node 0",
                self.nnodes_as_typed()
            ),
        };
        let first_host = engine.as_ref().and_then(|e| e.master_addr.clone());
        // Only where the launchers are numbered as the engine numbers them.
        let carrier = engine.filter(|engine| {
            let is_same = engine.world == nodes && Some(engine.rank) == node_rank;
            is_same && engine.channel(self.env).is_some()
        });
        let host = given.host.clone().or(first_host);
        let Some(host) = host.or_else(|| carrier.as_ref().map(|_| String::new())) else {
            return Err(Error::usage(who).note(
                "fix",
                "add --master-addr HOST, the same on all nodes (127.0.0.1 if all run on this host), or set MASTER_ADDR",
            ));
        };
        let port = given.port.unwrap_or_else(|| self.default_port(ports));
        if let Some(ports) = ports.filter(|ports| !ports.contains(port)) {
            return Err(Error::usage(format!(
                "the nodes would meet at port {port}, which is outside --port-range {ports}"
            ))
            .note(
                "fix",
                "leave --master-port and MASTER_PORT out, or choose one of these",
            ));
        }
        if carrier.as_ref().is_some_and(Process::is_on_one_host) {
            given.host.get_or_insert(host.clone());
        }
        Ok(Meeting {
            nodes,
            node_rank,
            host,
            port,
            given,
            carrier,
            lost_after: lost_after.unwrap_or(LOST_AFTER),
            ..Meeting::default()
        })
    }

    /// Node 0's address: flags, else `PET_*`, else MASTER_ADDR and MASTER_PORT, which name node 0 too.
    fn given_address(&self) -> Result<Address> {
        let mut given = self
            .cli
            .nodes
            .address(&self.cli.rdzv_endpoint, self.env, false)?;
        if given.host.is_none() {
            given.host = text(self.env, "MASTER_ADDR").map(str::to_owned);
        }
        if let (None, Some(port)) = (given.port, variable(self.env, "MASTER_PORT")) {
            given.port = port.port(false)?;
        }
        Ok(given)
    }

    /// `--nnodes 2` or `PET_NNODES=2`.
    fn nnodes_as_typed(&self) -> String {
        let given = setting(self.env, "nnodes", &self.cli.nodes.nnodes);
        given.map_or(String::new(), |given| {
            let equals = if given.name.starts_with("--") {
                ' '
            } else {
                '='
            };
            format!("{}{equals}{}", given.name, given.text)
        })
    }
}
