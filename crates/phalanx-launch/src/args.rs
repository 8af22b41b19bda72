//! The arguments of `phalanx launch`, checked; no files, names or sockets are used here.
//!
//! [`LaunchCli`] is the command line. [`LaunchArgs`] has the settings: flags, else
//! `PET_*` variables, else those of a cluster engine, else defaults; every value is
//! checked. Resolving names, opening files and ports is `plan.rs`.

use std::ffi::OsString;
use std::path::PathBuf;
use std::time::Duration;

use phalanx_comm::PortRange;
use phalanx_live::Address;

use super::alone::{Asking, node_place};
use super::cluster::{self, Env, Place, RankPlace};
use super::contract::PORTS_VARIABLE;
use super::engine;
use super::numa::Binding;
use super::streams::{StreamChoice, Streams};
use super::torchrun::{self, Interpretation, Program, TorchrunOptions, VisibleDevices};
use crate::error::{Error, Result};
use crate::stop;

/// The most ranks one launcher starts: far above any host, so that a typing error
/// does not become a fork bomb.
const MAX_LOCAL_RANKS: usize = phalanx_comm::MAX_LOCAL_RANKS;

/// The most launchers in one job (the store serves 4096 clients).
const MAX_NODES: usize = 1024;

/// Where torchrun's c10d nodes meet, unless told otherwise.
pub const C10D_PORT: u16 = 29400;

/// The nodes of a job, as typed: `phalanx launch` and commands that start ranks of their own.
#[derive(clap::Args, Clone, Debug, Default)]
pub struct NodeFlags {
    /// Number of nodes; run the same command on each [default: 1, or set by the cluster engine]
    #[arg(long, value_name = "N")]
    pub(crate) nnodes: Option<String>,
    /// Number of this node, from 0 [default: set by the cluster engine]
    #[arg(long, value_name = "R")]
    pub(crate) node_rank: Option<String>,
    /// Host of node 0; required with several nodes, unless MASTER_ADDR or the cluster engine sets it
    #[arg(long, value_name = "HOST")]
    pub(crate) master_addr: Option<String>,
    /// Port of node 0 where the nodes meet [default: MASTER_PORT, or 29500]; on one node, MASTER_PORT of the ranks
    /// [default: a free one]
    #[arg(long, value_name = "PORT")]
    pub(crate) master_port: Option<String>,
    /// Ports for everything that other hosts connect to (the store, ranks, MASTER_PORT), for firewalls [default: PHALANX_PORT_RANGE, else 29500 for the store and any free ports]
    #[arg(long, value_name = "FIRST-LAST")]
    pub(crate) port_range: Option<String>,
}

impl NodeFlags {
    /// A flag that says something about several nodes only.
    pub(crate) fn beside_nnodes(&self) -> Option<&'static str> {
        let typed = [
            (&self.node_rank, "--node-rank"),
            (&self.master_addr, "--master-addr"),
            (&self.master_port, "--master-port"),
        ];
        let first = typed.iter().find(|(text, _)| text.is_some());
        first.map(|(_, flag)| *flag)
    }

    /// Checks them for a process that another program has started as the rank at `place`: they are those of a
    /// launcher, and may only repeat what the rank knows.
    ///
    /// # Errors
    /// `Usage`, naming the flag and what contradicts it.
    pub(crate) fn check_of_rank(&self, place: &RankPlace) -> Result<()> {
        let port = place.master_port.to_string();
        let typed = [
            (&self.node_rank, "--node-rank", None),
            (
                &self.master_addr,
                "--master-addr",
                place.master_addr.as_deref(),
            ),
            (&self.master_port, "--master-port", Some(port.as_str())),
        ];
        for (text, flag, known) in typed {
            let Some(text) = text.as_deref().filter(|text| Some(*text) != known) else {
                continue;
            };
            let error = Error::usage(format!(
                "{flag} {text} contradicts {}: this process is one of {} ranks, and {flag} is for one launcher on each node",
                place.starter(),
                place.world
            ));
            return Err(match flag {
                "--node-rank" => error.note("fix", "leave it out"),
                _ => error
                    .note(
                        "fix",
                        format!(
                            "leave it out, or set {}={text} in all ranks instead",
                            &flag[2..].replace('-', "_").to_uppercase()
                        ),
                    )
                    .note("or", "start one process on each node, and add --nnodes"),
            });
        }
        Ok(())
    }
}

/// `phalanx launch`, as typed. Numbers stay text so that the same checks
/// and messages serve flags and `PET_*` variables.
#[derive(clap::Args, Clone, Debug, Default)]
pub struct LaunchCli {
    #[command(flatten)]
    pub(crate) nodes: NodeFlags,
    /// Number of ranks on this node; auto and cpu mean one per core [default: 1].
    #[arg(long, value_name = "N|auto|cpu")]
    pub nproc_per_node: Option<String>,
    /// HOST[:PORT]; torchrun's alternative to --master-addr and --master-port. HOST may be an IPv6 address in brackets.
    #[arg(long, value_name = "HOST[:PORT]")]
    pub(crate) rdzv_endpoint: Option<String>,
    /// static, or c10d: --node-rank may be left out, the launcher on HOST of --rdzv-endpoint is node 0 and the others are numbered in order of arrival [default: static].
    #[arg(long, value_name = "NAME")]
    pub(crate) rdzv_backend: Option<String>,
    /// Name of the job; launchers with different names do not join.
    #[arg(long, value_name = "ID")]
    pub(crate) rdzv_id: Option<String>,
    /// Settings of the rendezvous, separated by commas: timeout or join_timeout (seconds, as --rdzv-timeout); is_host (true or false: this launcher is node 0 with --rdzv-backend c10d); torchrun's other keys have no effect.
    #[arg(long, value_name = "KEY=VALUE,...")]
    pub(crate) rdzv_conf: Option<String>,
    /// Accepted for compatibility with torchrun; no effect (the exit of a rank is noticed at once).
    #[arg(long, value_name = "S")]
    pub(crate) monitor_interval: Option<String>,
    /// Accepted for compatibility with torchrun; no effect (every rank is a new process).
    #[arg(long, value_name = "spawn|fork|forkserver")]
    pub(crate) start_method: Option<String>,
    /// Seconds to wait for all nodes [default: 300].
    #[arg(long, value_name = "S")]
    pub(crate) rdzv_timeout: Option<String>,
    /// Run on this node only, on a free port, ignoring cluster variables.
    #[arg(long)]
    pub(crate) standalone: bool,
    /// Number of restarts after a failure (one node only) [default: 0].
    #[arg(long, value_name = "K")]
    pub(crate) max_restarts: Option<String>,
    /// Folder for the ranks' output and error files; each run makes a new folder in it.
    #[arg(long, value_name = "DIR")]
    pub(crate) log_dir: Option<String>,
    /// Streams written to files only: 0 (none), 1 (stdout), 2 (stderr), 3 (both), or per rank, as in 0:1,1:2. Without --log-dir the files are in a new temporary folder, which is printed.
    #[arg(short = 'r', long, value_name = "SPEC")]
    pub(crate) redirects: Option<String>,
    /// Streams written to files and to the terminal, as in --redirects [default with --log-dir: 3].
    #[arg(short = 't', long, value_name = "SPEC")]
    pub(crate) tee: Option<String>,
    /// Local ranks whose output is shown on the terminal, as in 0,2 [default: all]. Files have the output of all.
    #[arg(long, value_name = "RANKS")]
    pub(crate) local_ranks_filter: Option<String>,
    /// Copy lines of stdout that contain one of these texts to filtered_stdout.log in the log folder; two commas are one comma of a text.
    #[arg(long, value_name = "TEXT,...")]
    pub(crate) duplicate_stdout_filters: Option<String>,
    /// The same for stderr and filtered_stderr.log.
    #[arg(long, value_name = "TEXT,...")]
    pub(crate) duplicate_stderr_filters: Option<String>,
    /// Accepted for compatibility with torchrun; only default.
    #[arg(long, value_name = "NAME")]
    pub(crate) logs_specs: Option<String>,
    /// Accepted for compatibility with torchrun; only null.
    #[arg(long, value_name = "NAME")]
    pub(crate) event_log_handler: Option<String>,
    /// File with the job token (see `phalanx token`) [default: PHALANX_TOKEN_FILE].
    #[arg(long, value_name = "FILE")]
    pub(crate) token_file: Option<String>,
    /// Address or host name on which the store and this node's ranks listen.
    #[arg(long, value_name = "ADDR", alias = "local-addr")]
    pub(crate) bind: Option<String>,
    /// Seconds between SIGTERM and SIGKILL when the ranks are stopped [default: 1.5; after Ctrl-C or SIGTERM 30, if a rank or a process of its group handles SIGTERM, as with `train --save-every`, and more if a rank announces more, as `train` does after a checkpoint that took long].
    #[arg(long, value_name = "S")]
    pub(crate) stop_grace_s: Option<String>,
    /// torchrun's name for --stop-grace-s.
    #[arg(long, value_name = "S", conflicts_with = "stop_grace_s")]
    pub(crate) shutdown_timeout: Option<String>,
    /// Signals that end the job. One of SIGUSR1 and SIGUSR2 is sent to the ranks itself, the others as SIGTERM [default: SIGTERM,SIGINT,SIGHUP,SIGQUIT].
    #[arg(long, value_name = "NAMES")]
    pub(crate) signals_to_handle: Option<String>,
    /// Bind each rank to processors; local ranks are spread over the NUMA nodes in order. node, socket, exclusive (cores of its own) or core-complex (one last-level cache).
    #[arg(long, value_name = "MODE")]
    pub(crate) numa_binding: Option<String>,
    /// Set LOCAL_RANK to 0 in every rank, and CUDA_VISIBLE_DEVICES to the one device of its local rank.
    #[arg(long)]
    pub(crate) virtual_local_rank: bool,
    /// Show the job on a web page while it runs, at PORT, HOST:PORT or [IPV6]:PORT [default with --live: a free port of 127.0.0.1].
    #[arg(long, value_name = "ADDR")]
    pub(crate) live: Option<Option<Address>>,
    /// Value of ROLE_NAME in the ranks [default: default].
    #[arg(long, value_name = "NAME")]
    pub(crate) role: Option<String>,
    /// Do not prefix output lines with `[rank N]`.
    #[arg(long)]
    pub(crate) no_prefix: bool,
    /// Prefix of output lines; ${rank}, ${local_rank}, ${role_name} and ${hostname} are filled in [default: `[rank ${rank}] `, and none with one rank].
    #[arg(long, value_name = "TEXT")]
    pub(crate) log_line_prefix_template: Option<String>,
    /// PROGRAM is a Python module: run `python3 -u -m PROGRAM`.
    #[arg(short = 'm', long)]
    pub(crate) module: bool,
    /// Run PROGRAM as it is, also if its name ends in .py. The same as `--` before PROGRAM.
    #[arg(long)]
    pub(crate) no_python: bool,
    /// PROGRAM is a Python script, whatever its name: run `python3 -u PROGRAM`.
    #[arg(long)]
    pub(crate) run_path: bool,
    /// The program and its arguments. `python3 -u` (or PYTHON_EXEC) runs a PROGRAM whose name ends in .py, unless --no-python or `--` comes before it. If the job fails or is interrupted, all processes that it has started are ended. If all ranks succeed, processes in sessions of their own (daemons) live on.
    #[arg(last = true, required = true, value_name = "PROGRAM")]
    pub program: Vec<OsString>,
}

/// Where several nodes meet.
#[derive(Clone, Debug, PartialEq)]
pub struct Meeting {
    /// Number of launchers, two or more.
    pub nodes: usize,
    /// The number of this one; `None`: by arrival.
    pub node_rank: Option<usize>,
    /// Without a number: whether this launcher is node 0, where it was given.
    pub is_host: Option<bool>,
    /// Host of node 0; empty until the engine has settled it.
    pub host: String,
    /// The store's port there.
    pub port: u16,
    /// Ports for everything that other hosts connect to; `None`: any.
    pub ports: Option<PortRange>,
    /// The engine that gave this node its number.
    pub engine: Option<&'static str>,
    /// What that engine may still settle: see [`engine::settle`](super::engine::settle).
    pub unsettled: Option<Unsettled>,
}

/// A meeting whose token, host and port the engine carries to all nodes, where they were not given.
#[derive(Clone, Debug, PartialEq)]
pub struct Unsettled {
    /// This launcher among those that the engine started.
    pub(crate) place: Place,
    /// What the user gave.
    pub(crate) given: engine::Given,
}

/// The settings of a launch, checked.
#[derive(Clone, Debug, PartialEq)]
pub struct LaunchArgs {
    /// `None`: one node.
    pub meeting: Option<Meeting>,
    /// The ranks' MASTER_PORT on one node, where it was given.
    pub master_port: Option<u16>,
    /// Ranks on this node.
    pub local_ranks: usize,
    /// Name of the job, where it was given.
    pub run_id: Option<String>,
    /// How long to wait for the other nodes.
    pub meeting_timeout: Duration,
    /// Restarts allowed.
    pub max_restarts: u32,
    /// Where logs go.
    pub log_dir: Option<PathBuf>,
    /// Streams that go to files only.
    pub redirects: StreamChoice,
    /// Streams that go to files and on.
    pub tee: StreamChoice,
    /// Token file.
    pub token_file: Option<PathBuf>,
    /// Listen address, or a name for it.
    pub bind: Option<String>,
    /// From SIGTERM to SIGKILL.
    pub stop_grace: Duration,
    /// The same where a rank has a handler for SIGTERM and nothing failed.
    pub handler_grace: Duration,
    /// It was given on the command line, so ranks cannot ask for more.
    pub grace_is_typed: bool,
    /// Where the job is shown.
    pub live: Option<Address>,
    /// ROLE_NAME.
    pub role: String,
    /// Prefix lines with their rank.
    pub prefix: bool,
    /// What only torchrun's flags say.
    pub torchrun: TorchrunOptions,
    /// What to run.
    pub run: Program,
}

/// The text of a setting, and the flag or variable that it came from, for messages.
struct Given<'a> {
    text: &'a str,
    name: String,
}

impl Given<'_> {
    fn wrong(&self, why: &str) -> Error {
        Error::usage(format!("{} cannot be \"{}\": {why}", self.name, self.text))
    }

    fn number<T: std::str::FromStr>(&self, what: &str) -> Result<T> {
        self.text.trim().parse().map_err(|_| self.wrong(what))
    }

    fn seconds(&self, most: f64) -> Result<Duration> {
        let seconds: f64 = self.number("not a number of seconds")?;
        if (0.0..=most).contains(&seconds) {
            Ok(Duration::from_secs_f64(seconds))
        } else {
            Err(self.wrong(&format!("not between 0 and {most} seconds")))
        }
    }

    /// As [`port`](Self::port); on one node 0 is whichever is free.
    fn port_or_free(&self, alone: bool) -> Result<Option<u16>> {
        match alone && self.text.trim() == "0" {
            true => Ok(None),
            false => self.port().map(Some),
        }
    }

    fn port(&self) -> Result<u16> {
        let port: u16 = self.number("not a port (1 to 65535)")?;
        if port == 0 {
            return Err(self.wrong("not a port (1 to 65535)"));
        }
        Ok(port)
    }
}

impl LaunchArgs {
    /// Merges and checks. `cores` is what `auto` means.
    ///
    /// # Errors
    /// `Usage`, naming the flag or variable.
    pub fn resolve(cli: &LaunchCli, env: &Env, cores: usize) -> Result<Self> {
        let switch = |flag: &str, typed: bool| {
            typed || pick(env, flag, &None).is_some_and(|g| !matches!(g.text, "0" | "false"))
        };
        let run = Interpretation {
            module: switch("module", cli.module),
            no_python: switch("no-python", cli.no_python),
            run_path: switch("run-path", cli.run_path),
        };
        let run = run.command(&cli.program, env)?;
        let standalone = switch("standalone", cli.standalone);

        let local_ranks = match pick(env, "nproc-per-node", &cli.nproc_per_node) {
            None => 1,
            Some(given) => ranks(&given, cores)?,
        };
        let backend = pick(env, "rdzv-backend", &cli.rdzv_backend);
        let is_c10d = backend.as_ref().is_some_and(|given| given.text == "c10d");
        let default_port = if is_c10d {
            C10D_PORT
        } else {
            super::DEFAULT_PORT
        };
        let nodes = WhichNodes {
            flags: &cli.nodes,
            endpoint: &cli.rdzv_endpoint,
            standalone,
            default_port,
            by_arrival: is_c10d,
            asking: Asking::Launch,
            command: "launch",
        };
        let (mut meeting, port) = nodes.resolve(env)?;
        let conf = match pick(env, "rdzv-conf", &cli.rdzv_conf) {
            None => torchrun::RendezvousConf::default(),
            Some(given) => {
                torchrun::rendezvous_conf(given.text).map_err(|why| given.wrong(&why))?
            }
        };
        if let Some(meeting) = &mut meeting {
            meeting.is_host = conf.is_host;
        }

        let max_restarts = match pick(env, "max-restarts", &cli.max_restarts) {
            None => 0,
            Some(given) => given.number::<u32>("not a number of restarts")?,
        };
        if max_restarts > 0 && meeting.is_some() {
            return Err(Error::usage("--max-restarts works on one node only")
                .note(
                    "since",
                    "restarting a job of several nodes is not supported yet",
                )
                .note("fix", "leave it out, or set it to 0"));
        }

        let log_dir = pick(env, "log-dir", &cli.log_dir).map(|given| PathBuf::from(given.text));
        let streams = |flag: &str, typed: &Option<String>| -> Result<Option<StreamChoice>> {
            match pick(env, flag, typed) {
                None => Ok(None),
                Some(given) => match given.text.parse::<StreamChoice>() {
                    Ok(choice) => match choice.beyond(local_ranks) {
                        Some(rank) => Err(given.wrong(&format!(
                            "there is no rank {rank} on this node; its {} from 0",
                            match local_ranks {
                                1 => "only rank counts".to_owned(),
                                ranks => format!("{ranks} ranks count"),
                            }
                        ))),
                        None => Ok(Some(choice)),
                    },
                    Err(why) => Err(given.wrong(&why)),
                },
            }
        };
        let redirects = streams("redirects", &cli.redirects)?;
        let tee = streams("tee", &cli.tee)?;
        let tee = match (&log_dir, &redirects, tee) {
            (_, _, Some(tee)) => tee,
            (Some(_), None, None) => StreamChoice::all(Streams::ALL),
            _ => StreamChoice::default(),
        };

        let bind = pick(env, "bind", &cli.bind).map(|given| given.text.to_owned());
        let grace = match cli.shutdown_timeout {
            None => pick(env, "stop-grace-s", &cli.stop_grace_s),
            Some(_) => None,
        };
        let grace = grace
            .or_else(|| pick(env, "shutdown-timeout", &cli.shutdown_timeout))
            .or_else(|| variable(env, "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"));
        let (stop_grace, handler_grace, grace_is_typed) = match grace {
            None => (super::STOP_GRACE, stop::GRACE, false),
            Some(given) => {
                let typed = given.seconds(86_400.0)?;
                (typed, typed, true)
            }
        };
        let meeting_timeout = match pick(env, "rdzv-timeout", &cli.rdzv_timeout) {
            None => conf.timeout.unwrap_or(Duration::from_secs(300)),
            Some(given) => given.seconds(86_400.0)?,
        };
        if let Some(given) = backend
            && !matches!(given.text, "static" | "c10d")
        {
            return Err(given.wrong(
                "only static and c10d are accepted, and both use Phalanx's own store; leave it out",
            ));
        }
        if let Some(given) = pick(env, "monitor-interval", &cli.monitor_interval) {
            given.seconds(86_400.0)?;
        }
        if let Some(given) = pick(env, "start-method", &cli.start_method)
            && !matches!(given.text, "spawn" | "fork" | "forkserver")
        {
            return Err(given.wrong("not spawn, fork or forkserver"));
        }
        if let Some(given) = pick(env, "logs-specs", &cli.logs_specs)
            && given.text != "default"
        {
            return Err(given.wrong("it would name a Python class; only default is accepted"));
        }
        if let Some(given) = pick(env, "event-log-handler", &cli.event_log_handler)
            && given.text != "null"
        {
            return Err(
                given.wrong("the launcher writes no events of torchelastic; only null is accepted")
            );
        }
        let torchrun = torchrun_options(cli, env, local_ranks, switch)?;
        let role = pick(env, "role", &cli.role).map_or("default".to_owned(), |g| g.text.to_owned());
        let run_id = pick(env, "rdzv-id", &cli.rdzv_id).map(|given| given.text.to_owned());
        for (name, text) in [("--role", Some(&role)), ("--rdzv-id", run_id.as_ref())] {
            if text.is_some_and(|t| t.is_empty() || t.len() > 200 || t.contains(['/', '\0', '\n']))
            {
                return Err(Error::usage(format!(
                    "{name} must be 1 to 200 characters without / and line breaks"
                )));
            }
        }
        Ok(LaunchArgs {
            master_port: if meeting.is_none() && !standalone {
                port
            } else {
                None
            },
            meeting,
            local_ranks,
            run_id,
            meeting_timeout,
            max_restarts,
            log_dir,
            redirects: redirects.unwrap_or_default(),
            tee,
            token_file: pick(env, "token-file", &cli.token_file).map(|g| PathBuf::from(g.text)),
            bind,
            stop_grace,
            handler_grace,
            grace_is_typed,
            live: cli.live.clone().map(Option::unwrap_or_default),
            role,
            prefix: !cli.no_prefix,
            torchrun,
            run,
        })
    }
}

fn torchrun_options(
    cli: &LaunchCli,
    env: &Env,
    local_ranks: usize,
    switch: impl Fn(&str, bool) -> bool,
) -> Result<TorchrunOptions> {
    let mut options = TorchrunOptions::default();
    if let Some(given) = pick(env, "signals-to-handle", &cli.signals_to_handle) {
        options.signals = torchrun::signals(given.text).map_err(|why| given.wrong(&why))?;
    }
    if let Some(given) = pick(env, "local-ranks-filter", &cli.local_ranks_filter) {
        let shown = torchrun::ranks_filter(given.text, local_ranks);
        options.shown = Some(shown.map_err(|why| given.wrong(&why))?);
    }
    let template = pick(
        env,
        "log-line-prefix-template",
        &cli.log_line_prefix_template,
    )
    .or_else(|| variable(env, "TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE"));
    options.prefix_template = template.map(|given| given.text.to_owned());
    let filters = |flag: &str, typed: &Option<String>| {
        let given = pick(env, flag, typed);
        given.map_or(Vec::new(), |given| torchrun::line_filters(given.text))
    };
    options.out_filters = filters("duplicate-stdout-filters", &cli.duplicate_stdout_filters);
    options.err_filters = filters("duplicate-stderr-filters", &cli.duplicate_stderr_filters);
    if let Some(given) = pick(env, "numa-binding", &cli.numa_binding) {
        let binding = Binding::named(given.text);
        options.numa = Some(
            binding.ok_or_else(|| given.wrong("not node, socket, exclusive or core-complex"))?,
        );
    }
    if switch("virtual-local-rank", cli.virtual_local_rank) {
        options.devices = Some(VisibleDevices::new(env, local_ranks)?);
    }
    Ok(options)
}

/// Decides which of how many nodes this is, from flags, `PET_*` variables and those of engines.
pub struct WhichNodes<'a> {
    /// As typed.
    pub flags: &'a NodeFlags,
    /// As typed: torchrun's other form of an address.
    pub endpoint: &'a Option<String>,
    /// One node, whatever variables say.
    pub standalone: bool,
    /// Where several nodes meet unless told otherwise.
    pub default_port: u16,
    /// Nodes without a number get one in order of arrival.
    pub by_arrival: bool,
    /// Which kind of command wants to know, and its name.
    pub asking: Asking,
    /// See `asking`.
    pub command: &'a str,
}

impl WhichNodes<'_> {
    /// Where the nodes meet, or `None` for a single node; and the port that was given.
    ///
    /// # Errors
    /// `Usage`, naming the flag or variable.
    pub fn resolve(&self, env: &Env) -> Result<(Option<Meeting>, Option<u16>)> {
        let (flags, standalone) = (self.flags, self.standalone);
        let ports = flags.port_range(env)?;
        let given = pick(env, "nnodes", &flags.nnodes);
        let nodes = given.as_ref().map(node_count).transpose()?;
        let nnodes = given.map_or(String::new(), |given| match given.name.strip_prefix("--") {
            Some(_) => format!("{} {}", given.name, given.text),
            None => format!("{}={}", given.name, given.text),
        });
        let node_rank = match pick(env, "node-rank", &flags.node_rank) {
            None => None,
            Some(given) => Some(given.number::<usize>("not a node's number")?),
        };
        if standalone && nodes.is_some_and(|n| n > 1) {
            return Err(Error::usage(
                "--standalone runs one node; it cannot be combined with --nnodes above 1",
            ));
        }
        // Variables of a cluster engine count only where no flag was given.
        let place = if standalone || nodes == Some(1) {
            None
        } else {
            match cluster::detect(env)?.filter(|place| place.count > 1) {
                Some(place) => Some(place),
                None => {
                    let has_host = pick(env, "master-addr", &flags.master_addr)
                        .or(pick(env, "rdzv-endpoint", self.endpoint))
                        .is_some()
                        || cluster::is_set(env, "MASTER_ADDR");
                    node_place(env, self.asking, nodes, has_host, self.command)?
                }
            }
        };
        let nodes_wanted = match (nodes, &place) {
            (Some(nodes), _) => nodes,
            (None, Some(place)) => place.count,
            (None, None) => 1,
        };
        let is_numbered = node_rank.is_none();
        let node_rank = match (node_rank, &place) {
            _ if standalone => Some(0),
            (Some(rank), _) => Some(rank),
            (None, Some(place)) if place.count == nodes_wanted => Some(place.index),
            (None, Some(place)) => {
                return Err(Error::usage(format!(
                    "--nnodes is {nodes_wanted}, but {} started {} processes",
                    place.engine, place.count
                ))
                .note("fix", "start one process a node, or give --node-rank too"));
            }
            (None, None) if nodes_wanted == 1 => Some(0),
            (None, None) if self.by_arrival => None,
            (None, None) => {
                let error = Error::usage(format!(
                    "{nnodes} requires --node-rank, the number of this node"
                ))
                .note(
                    "fix",
                    format!(
                        "add --node-rank 0 on the first node, ... {} on the last",
                        nodes_wanted - 1
                    ),
                );
                return Err(match self.asking {
                    Asking::Ranks => error,
                    Asking::Launch => error.note(
                        "or",
                        "--rdzv-backend c10d --rdzv-endpoint HOST:PORT, the same on all nodes, HOST being one of them",
                    ),
                });
            }
        };
        if let Some(node_rank) = node_rank.filter(|rank| *rank >= nodes_wanted) {
            return Err(Error::usage(format!(
                "--node-rank {node_rank} is outside --nnodes {nodes_wanted} (nodes count from 0)"
            )));
        }
        let (host, port) = address(flags, self.endpoint, env, nodes_wanted == 1)?;
        if nodes_wanted == 1 {
            return Ok((None, port));
        }
        // MASTER_ADDR and MASTER_PORT without a prefix also name node 0.
        let given_host = host.or_else(|| cluster::text(env, "MASTER_ADDR").map(str::to_owned));
        // Only where the launchers are numbered as the engine numbers them.
        let carrier = place.as_ref().filter(|place| {
            let is_same = place.count == nodes_wanted && Some(place.index) == node_rank;
            is_same && engine::has_channel(env, place.engine)
        });
        let host = given_host
            .clone()
            .or_else(|| place.as_ref().and_then(|p| p.first_host.clone()))
            .or_else(|| carrier.map(|_| String::new()));
        let Some(host) = host else {
            let who = match &place {
                Some(place) => format!(
                    "{} does not say on which host the first of the {nodes_wanted} nodes is",
                    place.engine
                ),
                None => {
                    format!("{nnodes} requires --master-addr, the host of node 0")
                }
            };
            return Err(Error::usage(who).note(
                "fix",
                "add --master-addr HOST, the same on all nodes (127.0.0.1 if all run on this host), or set MASTER_ADDR",
            ));
        };
        let given = cluster::text(env, "MASTER_PORT");
        let given_port = match (port, given) {
            (Some(port), _) => Some(port),
            (None, Some(text)) => {
                let name = "MASTER_PORT".to_owned();
                Some(Given { text, name }.port()?)
            }
            (None, None) => None,
        };
        let meets_at = given_port.unwrap_or(ports.map_or(self.default_port, PortRange::first));
        if let Some(ports) = ports.filter(|ports| !ports.contains(meets_at)) {
            return Err(Error::usage(format!(
                "the nodes would meet at port {meets_at}, which is outside --port-range {ports}"
            ))
            .note(
                "fix",
                "leave --master-port and MASTER_PORT out, or choose one of these",
            ));
        }
        let unsettled = carrier.cloned().map(|place| Unsettled {
            given: engine::Given {
                token: None,
                host: given_host.or_else(|| place.is_on_one_host().then(|| host.clone())),
                port: given_port,
                ports,
            },
            place,
        });
        let meeting = Meeting {
            nodes: nodes_wanted,
            node_rank,
            is_host: None,
            host,
            port: meets_at,
            ports,
            engine: place.filter(|_| is_numbered).map(|place| place.engine),
            unsettled,
        };
        Ok((Some(meeting), port))
    }
}

impl WhichNodes<'_> {
    /// Where the nodes meet, from what says only that: of a command line that is wrong otherwise. An unknown number of
    /// nodes is 0.
    ///
    /// # Errors
    /// `Usage`, where host or port are missing or wrong.
    pub fn address_alone(&self, env: &Env) -> Result<Meeting> {
        let (host, port) = address(self.flags, self.endpoint, env, false)?;
        let host = host.or_else(|| cluster::text(env, "MASTER_ADDR").map(str::to_owned));
        let host = host.ok_or_else(|| Error::usage("--master-addr is missing"))?;
        let port = match (port, variable(env, "MASTER_PORT")) {
            (Some(port), _) => port,
            (None, Some(given)) => given.port()?,
            (None, None) => {
                let ports = self.flags.port_range(env)?;
                ports.map_or(self.default_port, PortRange::first)
            }
        };
        let number = |flag: &str, typed| pick(env, flag, typed)?.number::<usize>("").ok();
        Ok(Meeting {
            nodes: number("nnodes", &self.flags.nnodes).unwrap_or(0),
            node_rank: number("node-rank", &self.flags.node_rank),
            is_host: None,
            host,
            port,
            ports: None,
            engine: None,
            unsettled: None,
        })
    }
}

/// The flag's text, else its `PET_*` variable's.
fn pick<'a>(env: &'a Env, flag: &str, typed: &'a Option<String>) -> Option<Given<'a>> {
    if let Some(text) = typed {
        let name = format!("--{flag}");
        return Some(Given { text, name });
    }
    variable(
        env,
        &format!("PET_{}", flag.replace('-', "_").to_uppercase()),
    )
}

/// A variable's text.
fn variable<'a>(env: &'a Env, name: &str) -> Option<Given<'a>> {
    let text = cluster::text(env, name)?;
    Some(Given {
        text,
        name: name.to_owned(),
    })
}

/// Number of ranks to start on this node without --nproc-per-node: `PET_NPROC_PER_NODE`, or one.
pub fn untyped_ranks(env: &Env) -> Result<usize> {
    match pick(env, "nproc-per-node", &None) {
        None => Ok(1),
        Some(given) => ranks(&given, super::cores()),
    }
}

fn ranks(given: &Given<'_>, cores: usize) -> Result<usize> {
    let count = count_with(given.text, cores).map_err(|why| given.wrong(why))?;
    if (1..=MAX_LOCAL_RANKS).contains(&count) {
        Ok(count)
    } else {
        Err(given.wrong(&format!("not between 1 and {MAX_LOCAL_RANKS}")))
    }
}

/// Parses the value of `--nproc-per-node`.
///
/// # Errors
/// The reason why it is not a number of ranks.
pub fn count_of_ranks(text: &str) -> std::result::Result<usize, &'static str> {
    count_with(text, super::cores())
}

fn count_with(text: &str, cores: usize) -> std::result::Result<usize, &'static str> {
    match text.trim() {
        "auto" | "cpu" => Ok(cores),
        "gpu" | "cuda" | "xpu" => {
            Err("ranks compute on CPUs; use cpu (one rank per core) or a number")
        }
        number => number
            .parse()
            .map_err(|_| "a whole number, auto or cpu is expected"),
    }
}

fn node_count(given: &Given<'_>) -> Result<usize> {
    let what = "not a number of nodes";
    let (low, high) = match given.text.split_once(':') {
        None => {
            let count: usize = given.number(what)?;
            (count, count)
        }
        Some((low, high)) => match (low.trim().parse(), high.trim().parse()) {
            (Ok(low), Ok(high)) => (low, high),
            _ => return Err(given.wrong(what)),
        },
    };
    if low > high || low == 0 || high > MAX_NODES {
        return Err(given.wrong(&format!(
            "not between 1 and {MAX_NODES}, the smaller one first"
        )));
    }
    if low != high {
        return Err(given
            .wrong("a range of nodes (an elastic run) is not supported yet")
            .note(
                "fix",
                format!("give one number, for instance --nnodes {high}"),
            ));
    }
    Ok(low)
}

impl NodeFlags {
    /// The ports for other hosts, if they are limited.
    ///
    /// # Errors
    /// `Usage`, naming the flag or variable.
    pub fn port_range(&self, env: &Env) -> Result<Option<PortRange>> {
        let given = pick(env, "port-range", &self.port_range).or_else(|| {
            let text = cluster::text(env, PORTS_VARIABLE)?;
            let name = PORTS_VARIABLE.to_owned();
            Some(Given { text, name })
        });
        let Some(given) = given else { return Ok(None) };
        match given.text.parse::<PortRange>() {
            Ok(range) => Ok(Some(range)),
            Err(_) => Err(given.wrong("not FIRST-LAST, as in 20000-20031")),
        }
    }
}

/// Host and port from `--master-addr`, `--master-port` and `--rdzv-endpoint`.
fn address(
    flags: &NodeFlags,
    endpoint: &Option<String>,
    env: &Env,
    alone: bool,
) -> Result<(Option<String>, Option<u16>)> {
    // An IPv6 address may be in brackets.
    let bare = |host: &str| host.trim_matches(['[', ']']).to_owned();
    let mut host = pick(env, "master-addr", &flags.master_addr).map(|g| bare(g.text));
    let mut port = match pick(env, "master-port", &flags.master_port) {
        None => None,
        Some(given) => given.port_or_free(alone)?,
    };
    if let Some(given) = pick(env, "rdzv-endpoint", endpoint) {
        let (name, number) = match given.text.rsplit_once(':') {
            // A bare IPv6 address is full of colons.
            Some((name, _)) if name.contains(':') && !name.ends_with(']') => (given.text, None),
            Some((name, number)) => (name, Some(number)),
            None => (given.text, None),
        };
        if let Some(text) = number {
            let name = given.name.clone();
            port = port.or(Given { text, name }.port_or_free(alone)?);
            if let (Some(typed), Some(_)) = (&flags.master_port, endpoint)
                && typed != text
            {
                return Err(Error::usage(format!(
                    "--master-port {typed} and --rdzv-endpoint {} contradict each other; give one of them",
                    given.text
                )));
            }
        }
        let name = bare(name);
        if let (Some(typed), Some(_)) = (&flags.master_addr, endpoint)
            && bare(typed) != name
        {
            return Err(Error::usage(format!(
                "--master-addr {typed} and --rdzv-endpoint {} contradict each other; give one of them",
                given.text
            )));
        }
        host.get_or_insert(name);
    }
    if host
        .as_ref()
        .is_some_and(|h| h.is_empty() || h.contains(char::is_whitespace))
    {
        return Err(Error::usage("--master-addr is not a host name"));
    }
    Ok((host, port))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cluster::tests::env;

    /// `flags` as "name=value" pairs, so that tables stay readable.
    fn resolve(flags: &str, variables: &str) -> Result<LaunchArgs> {
        let mut cli = LaunchCli {
            program: vec!["prog".into(), "--x".into()],
            ..LaunchCli::default()
        };
        for pair in flags.split_whitespace() {
            let (name, value) = pair.split_once('=').unwrap_or((pair, ""));
            let value = Some(value.to_owned());
            match name {
                "nnodes" => cli.nodes.nnodes = value,
                "nproc" => cli.nproc_per_node = value,
                "node-rank" => cli.nodes.node_rank = value,
                "addr" => cli.nodes.master_addr = value,
                "port" => cli.nodes.master_port = value,
                "ports" => cli.nodes.port_range = value,
                "endpoint" => cli.rdzv_endpoint = value,
                "backend" => cli.rdzv_backend = value,
                "restarts" => cli.max_restarts = value,
                "log-dir" => cli.log_dir = value,
                "tee" => cli.tee = value,
                "redirects" => cli.redirects = value,
                "grace" => cli.stop_grace_s = value,
                "bind" => cli.bind = value,
                "id" => cli.rdzv_id = value,
                "interval" => cli.monitor_interval = value,
                "method" => cli.start_method = value,
                "standalone" => cli.standalone = true,
                "conf" => cli.rdzv_conf = value,
                "shutdown" => cli.shutdown_timeout = value,
                "signals" => cli.signals_to_handle = value,
                "filter" => cli.local_ranks_filter = value,
                "specs" => cli.logs_specs = value,
                "events" => cli.event_log_handler = value,
                "numa" => cli.numa_binding = value,
                other => panic!("no such flag in this test: {other}"),
            }
        }
        LaunchArgs::resolve(&cli, &env(variables), 6)
    }

    /// They are a launcher's, and a rank would ignore them.
    #[test]
    fn a_rank_takes_no_address_from_the_command_line() {
        let place = RankPlace {
            source: "Slurm",
            rank: 1,
            world: 4,
            local_rank: 1,
            local_world: Some(2),
            master_addr: Some("a".to_owned()),
            master_port: 7,
        };
        let flags = |node_rank: Option<&str>, host: Option<&str>, port: Option<&str>| NodeFlags {
            node_rank: node_rank.map(str::to_owned),
            master_addr: host.map(str::to_owned),
            master_port: port.map(str::to_owned),
            ..NodeFlags::default()
        };
        flags(None, Some("a"), Some("7"))
            .check_of_rank(&place)
            .unwrap();
        for (typed, want) in [
            (
                flags(None, Some("b"), None),
                "--master-addr b contradicts Slurm: this process is one of 4 ranks",
            ),
            (
                flags(None, None, Some("8")),
                "--master-port 8 contradicts Slurm: ",
            ),
            (
                flags(Some("1"), None, None),
                "--node-rank 1 contradicts Slurm: ",
            ),
        ] {
            let error = typed.check_of_rank(&place).unwrap_err();
            assert!(error.chain().starts_with(want), "{}", error.chain());
            assert_eq!(error.exit_code(), 2);
        }
        let error = flags(None, Some("b"), None)
            .check_of_rank(&place)
            .unwrap_err();
        assert!(
            error.render().contains("MASTER_ADDR=b"),
            "{}",
            error.render()
        );
    }

    #[test]
    fn defaults_are_one_rank_on_one_node() {
        let args = resolve("interval=0.1 method=spawn", "HOME=/root").unwrap();
        assert_eq!(args.meeting, None);
        assert_eq!(
            (args.local_ranks, args.master_port, args.max_restarts),
            (1, None, 0)
        );
        assert_eq!(args.stop_grace, Duration::from_millis(1500));
        assert!(args.prefix);
        assert_eq!(args.run.program, "prog");
        assert_eq!(args.run.args, ["--x"]);
        assert_eq!(args.torchrun, TorchrunOptions::default());
    }

    #[test]
    fn one_node_by_environment() {
        for (flags, variables, ranks, port) in [
            ("nproc=2", "", 2, None),
            ("nproc=auto", "", 6, None),
            ("nproc=cpu", "PET_NPROC_PER_NODE=3", 6, None),
            ("", "PET_NPROC_PER_NODE=3", 3, None),
            ("", "PET_NPROC_PER_NODE=auto PET_NNODES=1:1", 6, None),
            ("port=1234", "", 1, Some(1234)),
            ("", "PET_MASTER_PORT=1235", 1, Some(1235)),
            ("endpoint=localhost:77", "", 1, Some(77)),
            ("port=1", "PET_RDZV_ENDPOINT=localhost:77", 1, Some(1)),
            ("endpoint=localhost:0", "", 1, None),
            ("port=0", "", 1, None),
            ("standalone port=9", "", 1, None),
            // left over from an outer job: not ours
            (
                "",
                "MASTER_ADDR=x MASTER_PORT=5 RANK=1 WORLD_SIZE=9 LOCAL_RANK=1",
                1,
                None,
            ),
            (
                "standalone",
                "SLURM_PROCID=1 SLURM_NTASKS=2 SLURM_NNODES=2 SLURM_NODELIST=a[1-2]",
                1,
                None,
            ),
            (
                "nnodes=1",
                "SLURM_PROCID=1 SLURM_NTASKS=2 SLURM_NNODES=2 SLURM_NODELIST=a[1-2]",
                1,
                None,
            ),
            (
                "",
                "PET_STANDALONE=1 OMPI_COMM_WORLD_RANK=0 OMPI_COMM_WORLD_SIZE=4",
                1,
                None,
            ),
            (
                "",
                "SLURM_PROCID=0 SLURM_NTASKS=1 SLURM_NNODES=1 SLURM_NODELIST=a1",
                1,
                None,
            ),
        ] {
            let args = resolve(flags, variables).unwrap();
            assert_eq!(args.meeting, None, "{flags} {variables}");
            assert_eq!(
                (args.local_ranks, args.master_port),
                (ranks, port),
                "{flags} {variables}"
            );
        }
    }

    #[test]
    fn several_nodes_by_environment() {
        let slurm = "SLURM_PROCID=1 SLURM_NODEID=1 SLURM_NTASKS=2 SLURM_NNODES=2 SLURM_JOB_NODELIST=gnode[10,20,25-37]";
        for (flags, variables, want) in [
            ("nnodes=2 node-rank=1 addr=h port=7", "", (2, 1, "h", 7)),
            ("nnodes=2:2 node-rank=0 addr=h", "", (2, 0, "h", 29500)),
            (
                "nnodes=2 node-rank=0",
                "MASTER_ADDR=m MASTER_PORT=12",
                (2, 0, "m", 12),
            ),
            (
                "nnodes=2 node-rank=0 addr=f port=3",
                "MASTER_ADDR=m MASTER_PORT=12",
                (2, 0, "f", 3),
            ),
            (
                "",
                "PET_NNODES=3 PET_NODE_RANK=2 PET_MASTER_ADDR=p PET_MASTER_PORT=8",
                (3, 2, "p", 8),
            ),
            (
                "node-rank=0",
                "PET_NNODES=3 PET_NODE_RANK=2 PET_MASTER_ADDR=p",
                (3, 0, "p", 29500),
            ),
            (
                "nnodes=2 node-rank=1 endpoint=e:99 backend=c10d",
                "",
                (2, 1, "e", 99),
            ),
            ("nnodes=2 node-rank=1 endpoint=e", "", (2, 1, "e", 29500)),
            (
                "nnodes=2 node-rank=1 addr=e ports=20000-20009",
                "PHALANX_PORT_RANGE=1-2",
                (2, 1, "e", 20000),
            ),
            (
                "nnodes=2 node-rank=1 addr=e port=30009",
                "PHALANX_PORT_RANGE=30000-30009",
                (2, 1, "e", 30009),
            ),
            (
                "nnodes=2 node-rank=1 endpoint=e backend=c10d",
                "",
                (2, 1, "e", 29400),
            ),
            (
                "nnodes=2 node-rank=1 endpoint=[fe80::1]:99",
                "",
                (2, 1, "fe80::1", 99),
            ),
            (
                "nnodes=2 node-rank=1 endpoint=fe80::1",
                "",
                (2, 1, "fe80::1", 29500),
            ),
            ("", slurm, (2, 1, "gnode10", 29500)),
            ("addr=x", slurm, (2, 1, "x", 29500)),
            ("nnodes=2", slurm, (2, 1, "gnode10", 29500)),
            ("nnodes=4 node-rank=3", slurm, (4, 3, "gnode10", 29500)),
            (
                "addr=x",
                "OMPI_COMM_WORLD_RANK=2 OMPI_COMM_WORLD_SIZE=4",
                (4, 2, "x", 29500),
            ),
            (
                "",
                "PMI_RANK=1 PMI_SIZE=2 MASTER_ADDR=q",
                (2, 1, "q", 29500),
            ),
            (
                "",
                "OMPI_COMM_WORLD_RANK=1 OMPI_COMM_WORLD_SIZE=2 OMPI_COMM_WORLD_LOCAL_RANK=1 OMPI_COMM_WORLD_LOCAL_SIZE=2",
                (2, 1, "127.0.0.1", 29500),
            ),
        ] {
            let meeting = resolve(flags, variables).unwrap().meeting.unwrap();
            let got = (
                meeting.nodes,
                meeting.node_rank.unwrap(),
                meeting.host.as_str(),
                meeting.port,
            );
            assert_eq!(got, want, "{flags} {variables}");
        }
    }

    #[test]
    fn what_an_engine_can_carry_is_left_to_it() {
        let mpi = "OMPI_COMM_WORLD_RANK=2 OMPI_COMM_WORLD_SIZE=4";
        let here = "OMPI_COMM_WORLD_RANK=1 OMPI_COMM_WORLD_SIZE=2 OMPI_COMM_WORLD_LOCAL_RANK=1 OMPI_COMM_WORLD_LOCAL_SIZE=2";
        for (flags, variables, want) in [
            ("", mpi, Some((None, None))),
            ("addr=h", mpi, Some((Some("h"), None))),
            ("port=7", mpi, Some((None, Some(7)))),
            ("", "PMI_RANK=1 PMI_SIZE=2 PMI_FD=9", Some((None, None))),
            ("", here, Some((Some("127.0.0.1"), None))),
            // No channel, or other nodes than the engine's.
            ("addr=h", "PMI_RANK=1 PMI_SIZE=2", None),
            ("nnodes=2 node-rank=0 addr=h", mpi, None),
            ("nnodes=2 node-rank=0 addr=h", "", None),
        ] {
            let meeting = resolve(flags, variables).unwrap().meeting.unwrap();
            let got = meeting.unsettled.as_ref();
            let got = got.map(|u| (u.given.host.as_deref(), u.given.port));
            assert_eq!(got, want, "{flags} {variables}");
        }
    }

    #[test]
    fn mistakes_are_usage_errors_that_name_the_culprit() {
        for (flags, variables, want) in [
            ("nnodes=1:2", "", "elastic"),
            ("nnodes=0", "", "--nnodes"),
            ("nnodes=2:1", "", "--nnodes"),
            ("nnodes=x", "", "--nnodes"),
            ("nnodes=2", "", "--nnodes 2 requires --node-rank"),
            (
                "nnodes=2 node-rank=1",
                "",
                "--nnodes 2 requires --master-addr",
            ),
            ("", "SKYPILOT_NUM_NODES=2", "one of 2 nodes"),
            ("", "SLURM_NNODES=2 SLURM_PROCID=0 SLURM_NTASKS=2", "srun"),
            ("nnodes=2 node-rank=2", "", "outside --nnodes 2"),
            ("ports=20000", "", "--port-range cannot be \"20000\""),
            ("", "PHALANX_PORT_RANGE=9-1", "PHALANX_PORT_RANGE cannot be"),
            (
                "nnodes=2 node-rank=0 addr=h port=77 ports=80-90",
                "",
                "port 77, which is outside --port-range 80-90",
            ),
            ("node-rank=1", "", "outside --nnodes 1"),
            ("", "PET_NNODES=none", "PET_NNODES"),
            ("nproc=0", "", "--nproc-per-node"),
            ("nproc=gpu", "", "CPUs"),
            ("nproc=9999", "", "between 1 and 1024"),
            ("nproc=-1", "", "--nproc-per-node"),
            ("port=0 nnodes=2 node-rank=0 addr=h", "", "--master-port"),
            ("port=1 endpoint=localhost:77", "", "contradict each other"),
            ("addr=k endpoint=h:77", "", "contradict each other"),
            ("addr=k endpoint=h", "", "contradict each other"),
            ("port=70000", "", "--master-port"),
            ("endpoint=h:x nnodes=2 node-rank=0", "", "--rdzv-endpoint"),
            ("backend=etcd", "", "--rdzv-backend"),
            ("standalone nnodes=2 node-rank=0", "", "--standalone"),
            (
                "nnodes=2 node-rank=0 addr=h restarts=1",
                "",
                "one node only",
            ),
            ("restarts=-1", "", "--max-restarts"),
            ("tee=7 log-dir=x", "", "--tee"),
            ("nproc=2 tee=5:1 log-dir=x", "", "no rank 5 on this node"),
            (
                "nproc=2 redirects=0:3,2:1 log-dir=x",
                "",
                "no rank 2 on this node; its 2 ranks count from 0",
            ),
            ("redirects=1:3 log-dir=x", "", "its only rank counts from 0"),
            ("grace=-1", "", "--stop-grace-s"),
            ("interval=often", "", "--monitor-interval"),
            ("method=thread", "", "--start-method"),
            ("grace=NaN", "", "--stop-grace-s"),
            ("id=a/b", "", "--rdzv-id"),
            ("", "PMI_RANK=1 PMI_SIZE=2", "does not say on which host"),
            ("conf=is_hots=1", "", "there is no key is_hots"),
            ("", "PET_RDZV_CONF=timeout", "PET_RDZV_CONF"),
            ("signals=SIGNONE", "", "--signals-to-handle"),
            ("nproc=2 filter=2", "", "--local-ranks-filter"),
            ("specs=mine", "", "--logs-specs"),
            ("events=console", "", "--event-log-handler"),
            ("numa=far", "", "--numa-binding"),
            ("shutdown=soon", "", "--shutdown-timeout"),
            ("", "PET_SHUTDOWN_TIMEOUT=-1", "PET_SHUTDOWN_TIMEOUT"),
            ("nnodes=2 backend=c10d", "", "--master-addr"),
            ("nnodes=3", "PMI_RANK=1 PMI_SIZE=2", "PMI started 2"),
        ] {
            let error = resolve(flags, variables).unwrap_err();
            assert!(
                error.chain().contains(want),
                "{flags} {variables}: {}",
                error.chain()
            );
            assert_eq!(error.exit_code(), 2, "{flags} {variables}");
        }
    }

    #[test]
    fn nodes_without_a_number_are_numbered_by_arrival() {
        for (flags, variables, want) in [
            (
                "nnodes=2 backend=c10d endpoint=h:9",
                "",
                (None, None, "h", 9),
            ),
            (
                "nnodes=2 backend=c10d endpoint=[::1]",
                "",
                (None, None, "::1", 29400),
            ),
            (
                "nnodes=2 backend=c10d addr=[::1] port=4",
                "",
                (None, None, "::1", 4),
            ),
            (
                "nnodes=2 conf=is_host=1",
                "PET_RDZV_BACKEND=c10d PET_RDZV_ENDPOINT=h",
                (None, Some(true), "h", 29400),
            ),
            (
                "nnodes=2 backend=c10d endpoint=h node-rank=1",
                "",
                (Some(1), None, "h", 29400),
            ),
            // Slurm numbers them, in the order of its node list.
            (
                "backend=c10d endpoint=h",
                "SLURM_PROCID=1 SLURM_NTASKS=2 SLURM_NNODES=2 SLURM_NODELIST=a[1-2] SLURM_STEP_ID=0",
                (Some(1), None, "h", 29400),
            ),
        ] {
            let meeting = resolve(flags, variables).unwrap().meeting.unwrap();
            let got = (
                meeting.node_rank,
                meeting.is_host,
                &*meeting.host,
                meeting.port,
            );
            assert_eq!(got, want, "{flags} {variables}");
        }
        let args = resolve("nnodes=2 node-rank=0 addr=h conf=timeout=9", "").unwrap();
        assert_eq!(args.meeting_timeout, Duration::from_secs(9));
    }

    #[test]
    fn torchruns_timeout_of_a_stop_is_ours() {
        for (flags, variables, seconds) in [
            ("shutdown=7", "PET_STOP_GRACE_S=9", 7),
            ("grace=8", "PET_SHUTDOWN_TIMEOUT=9", 8),
            (
                "",
                "PET_SHUTDOWN_TIMEOUT=9 TORCH_ELASTIC_SHUTDOWN_TIMEOUT=3",
                9,
            ),
            ("", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT=3", 3),
        ] {
            let args = resolve(flags, variables).unwrap();
            let want = Duration::from_secs(seconds);
            assert_eq!(
                (args.stop_grace, args.handler_grace),
                (want, want),
                "{flags} {variables}"
            );
            assert!(args.grace_is_typed);
        }
    }

    #[test]
    fn logs_are_shown_too_unless_redirected() {
        let args = resolve("tee=3", "").unwrap();
        assert_eq!((args.log_dir, args.tee.of(0)), (None, Streams::ALL));
        let args = resolve("log-dir=d", "").unwrap();
        assert_eq!(args.tee.of(0), Streams::ALL);
        let args = resolve("log-dir=d redirects=3", "").unwrap();
        assert_eq!(args.tee.of(0), Streams::default());
        assert_eq!(args.redirects.of(1), Streams::ALL);
        let args = resolve("nproc=2 log-dir=d redirects=1:3", "").unwrap();
        assert_eq!(args.redirects.of(1), Streams::ALL);
    }
}
