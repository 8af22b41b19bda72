//! Engines that start one process on each node and number it by variables: operators of Kubernetes, and clouds. What is
//! complete and consistent is followed; what shows several nodes but cannot be followed is refused with the command
//! to use, so that a job of several nodes never runs as several jobs of one node.

use super::{Env, Process, is_set, not_a_number, slurm};
use crate::error::{Error, Result};

/// The variables of an engine that starts one process on each node.
pub struct Engine {
    pub name: &'static str,
    /// Variables with the number of nodes. Where a `*` fits several names, theirs are added.
    pub counts: &'static [&'static str],
    /// Variables with a host for each node, separated by commas or white space.
    pub hosts: &'static [&'static str],
    /// Variables with the host of the first node.
    pub leader: &'static [&'static str],
    /// Variables with this node's number.
    pub indices: &'static [&'static str],
    /// If one of these is set, the others do not describe this process.
    pub unless: &'static [&'static str],
    /// If none of these is set, the others are leftovers of another tool; empty: they never are.
    pub only_with: &'static [&'static str],
    /// Whether a command that becomes ranks reads its variables as those of a node without
    /// `--nnodes`, too.
    pub for_ranks: bool,
    /// The flags to type instead; `None`: `srun` starts the processes.
    pub flags: Option<&'static str>,
}

/// Set where `RANK` and `WORLD_SIZE` count nodes (DLC): the number of ranks on each.
pub(super) const RANKS_PER_NODE: &str = "NPROC_PER_NODE";

/// The first that has several nodes is followed or named. Kubeflow's `PET_*` variables stand for flags.
const ENGINES: [Engine; 7] = [
    Engine {
        name: "PyTorchJob or DLC (RANK and WORLD_SIZE count nodes)",
        counts: &["WORLD_SIZE"],
        indices: &["RANK"],
        // Set for each rank.
        unless: &["LOCAL_RANK"],
        only_with: &["RANK", "MASTER_ADDR"],
        for_ranks: false,
        flags: Some(r#"--nnodes "$WORLD_SIZE" --node-rank "$RANK" "#),
        ..Engine::NONE
    },
    Engine {
        name: "SkyPilot",
        counts: &["SKYPILOT_NUM_NODES"],
        hosts: &["SKYPILOT_NODE_IPS"],
        indices: &["SKYPILOT_NODE_RANK"],
        flags: Some(
            r#"--nnodes "$SKYPILOT_NUM_NODES" --node-rank "$SKYPILOT_NODE_RANK" --master-addr "$(echo "$SKYPILOT_NODE_IPS" | head -n1)" "#,
        ),
        ..Engine::NONE
    },
    Engine {
        name: "ModelArts or Volcano",
        counts: &["VC_*_NUM", "MA_NUM_HOSTS"],
        hosts: &["VC_*_HOSTS"],
        indices: &["VC_TASK_INDEX"],
        flags: Some(
            r#"--nnodes "$VC_WORKER_NUM" --node-rank "$VC_TASK_INDEX" --master-addr "${VC_WORKER_HOSTS%%,*}" "#,
        ),
        ..Engine::NONE
    },
    Engine {
        name: "dstack",
        counts: &["DSTACK_NODES_NUM"],
        hosts: &["DSTACK_NODES_IPS"],
        leader: &["DSTACK_MASTER_NODE_IP"],
        indices: &["DSTACK_NODE_RANK"],
        flags: Some(
            r#"--nnodes "$DSTACK_NODES_NUM" --node-rank "$DSTACK_NODE_RANK" --master-addr "$DSTACK_MASTER_NODE_IP" "#,
        ),
        ..Engine::NONE
    },
    Engine {
        name: "LeaderWorkerSet",
        counts: &["LWS_GROUP_SIZE"],
        leader: &["LWS_LEADER_ADDRESS"],
        indices: &["LWS_WORKER_INDEX"],
        flags: Some(
            r#"--nnodes "$LWS_GROUP_SIZE" --node-rank "$LWS_WORKER_INDEX" --master-addr "$LWS_LEADER_ADDRESS" "#,
        ),
        ..Engine::NONE
    },
    slurm::SHELL,
    Engine {
        name: "Kubernetes",
        // Without counts: an Indexed Job does not set its number of pods, and number 0 may be
        // one of several, too.
        indices: &["JOB_COMPLETION_INDEX"],
        flags: Some(
            r#"--nnodes PODS --node-rank "$JOB_COMPLETION_INDEX" --master-addr JOB-0.SERVICE "#,
        ),
        ..Engine::NONE
    },
];

/// Whether ModelArts has started this process. It appends flags of its own to a command.
pub fn is_on_modelarts(env: &Env) -> bool {
    !set(
        env,
        &["VC_TASK_INDEX", "VC_*_NUM", "VC_*_HOSTS", "MA_NUM_*"],
    )
    .is_empty()
}

/// This node among those of an engine that starts one process on each. `nodes` is their number
/// from the command line, `has_host` whether node 0's host is given; `command` is
/// `phalanx train`, or the name of a user's program; `None`: `phalanx launch`.
/// `None`: there is no such engine, or only one node.
///
/// # Errors
///
/// Usage, for variables that show several nodes but are incomplete or contradict each other, unless
/// the number of nodes was typed: then flags say the rest. Usage, for a variable that is no number.
pub fn node(
    env: &Env,
    command: Option<&str>,
    nodes: Option<usize>,
    has_host: bool,
) -> Result<Option<Process>> {
    let mut is_counted = false;
    for engine in &ENGINES {
        let any_set = |names: &[&str]| names.iter().any(|name| is_set(env, name));
        let is_about_others =
            any_set(engine.unless) || !engine.only_with.is_empty() && !any_set(engine.only_with);
        let is_node = engine.for_ranks || is_set(env, RANKS_PER_NODE);
        let is_for_us = is_node || command.is_none() || nodes.is_some();
        if is_about_others || !is_for_us {
            continue;
        }
        match engine.follow(env, nodes)? {
            Some(node) if node.world == 1 => {
                is_counted = true;
                continue;
            }
            Some(node) if has_host || nodes.is_some() || node.master_addr.is_some() => {
                return Ok(Some(node));
            }
            _ => {}
        }
        if nodes.is_some() {
            continue;
        }
        let count = engine.nodes(env)?;
        let names = [engine.counts, engine.indices, engine.hosts, engine.leader];
        let found = set(env, &names.concat());
        let are_several = match engine.counts {
            // It cannot show that there is one node only.
            [] => !found.is_empty() && !is_counted,
            _ => count > 1,
        };
        if are_several {
            return Err(engine.error(&found, count, command));
        }
        is_counted |= count > 0;
    }
    Ok(None)
}

/// The variables that are set of those that fit `patterns`.
fn set<'a>(env: &'a Env, patterns: &[&str]) -> Vec<(&'a str, &'a str)> {
    let fits = |name: &str, pattern: &str| match pattern.split_once('*') {
        None => name == pattern,
        Some((start, end)) => {
            name.len() > start.len() + end.len() && name.starts_with(start) && name.ends_with(end)
        }
    };
    patterns
        .iter()
        .flat_map(|pattern| env.iter().filter(move |(name, _)| fits(name, pattern)))
        .map(|(name, text)| (name.as_str(), text.trim()))
        .filter(|(_, text)| !text.is_empty())
        .collect()
}

/// Hosts that commas or white space separate.
fn hosts_in(text: &str) -> impl Iterator<Item = &str> {
    let is_between = |c: char| c == ',' || c.is_whitespace();
    text.split(is_between).filter(|host| !host.is_empty())
}

fn number(name: &str, text: &str) -> Result<usize> {
    text.parse().map_err(|_| not_a_number(name, text))
}

impl Engine {
    /// No variables.
    pub const NONE: Engine = Engine {
        name: "",
        counts: &[],
        hosts: &[],
        leader: &[],
        indices: &[],
        unless: &[],
        only_with: &[],
        for_ranks: true,
        flags: None,
    };

    /// This node, if the variables are complete and agree.
    fn follow(&self, env: &Env, nodes: Option<usize>) -> Result<Option<Process>> {
        let mut counts = Vec::from_iter(nodes);
        for pattern in self.counts {
            // Several tasks of one job (`VC_PS_NUM`, `VC_WORKER_NUM`) count their processes apart.
            match set(env, &[pattern])[..] {
                [] => {}
                [(name, text)] => counts.push(number(name, text)?),
                _ => return Ok(None),
            }
        }
        let hosts: Vec<&str> = match set(env, self.hosts)[..] {
            [] => Vec::new(),
            [(_, text)] => hosts_in(text).collect(),
            _ => return Ok(None),
        };
        if !hosts.is_empty() {
            counts.push(hosts.len());
        }
        let [(name, index)] = set(env, self.indices)[..] else {
            return Ok(None);
        };
        let leader = set(env, self.leader);
        let first = leader.first().map(|(_, host)| host).or(hosts.first());
        let index = number(name, index)?;
        let is_equal = counts.windows(2).all(|pair| pair[0] == pair[1]);
        let count = counts.first().filter(|count| is_equal && index < **count);
        Ok(count.map(|count| Process {
            local_world: Some(1),
            master_addr: first.map(|host| (*host).to_owned()),
            ..Process::new(self.name, index, *count)
        }))
    }

    /// The number of nodes, or a lower bound of it; 0: unknown.
    fn nodes(&self, env: &Env) -> Result<usize> {
        let mut nodes = 0;
        for pattern in self.counts {
            let mut sum = 0usize;
            for (name, text) in set(env, &[pattern]) {
                sum = sum.saturating_add(number(name, text)?);
            }
            nodes = nodes.max(sum);
        }
        let hosts = set(env, self.hosts);
        nodes = nodes.max(hosts.iter().flat_map(|(_, text)| hosts_in(text)).count());
        for (name, text) in set(env, self.indices) {
            let index = number(name, text)?;
            if index > 0 {
                nodes = nodes.max(index.saturating_add(1));
            }
        }
        Ok(nodes)
    }

    fn error(&self, found: &[(&str, &str)], nodes: usize, command: Option<&str>) -> Error {
        let found: Vec<String> = found
            .iter()
            .map(|(name, text)| {
                let start: String = text.chars().take(60).collect();
                let dots = if start.len() < text.len() { "..." } else { "" };
                format!("{name}={}{dots}", start.escape_debug())
            })
            .collect();
        let (name, found) = (self.name, found.join(", "));
        let message = match (self.flags, self.counts) {
            (None, _) => format!(
                "{name} gave this job {nodes} nodes ({found}), but srun did not start this process: it would run alone on one of them"
            ),
            (_, []) => format!(
                "{name} started this process in a pod of an Indexed Job ({found}), which does not say how many pods it has: each would run alone"
            ),
            _ => format!(
                "{name} started this process on one of {nodes} nodes, but its variables are incomplete or disagree ({found}): each node would run alone"
            ),
        };
        let line = match (self.flags, command) {
            (None, None) => "srun --ntasks-per-node=1 phalanx launch ...".to_owned(),
            (None, Some(command)) => format!("srun {command} ...   (each task is a rank)"),
            (Some(flags), None) => format!("phalanx launch {flags}--token-file job.token ..."),
            (Some(flags), Some(command)) => {
                format!("{command} ... {flags}--token-file job.token")
            }
        };
        let alone = match command {
            None => "--standalone, if this node is to run alone",
            Some(_) => "--world-size 1, if this process is to run alone",
        };
        Error::usage(message)
            .note("type", line)
            .note("or add", alone)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// As [`env`](super::super::tests::env); `_` in a value is a line break.
    fn env(text: &str) -> Env {
        let mut env = super::super::tests::env(text);
        env.values_mut()
            .for_each(|value| *value = value.replace('_', "\n"));
        env
    }

    /// What a table expects of an environment.
    #[derive(Debug)]
    enum Want {
        /// One node, or no engine.
        Alone,
        /// This node of this many, with node 0 on this host.
        Node(usize, usize, Option<&'static str>),
        /// Exit code 2 and these words.
        Refused(&'static [&'static str]),
    }

    #[test]
    fn several_nodes_are_followed_or_refused_and_never_alone() {
        use Want::{Alone, Node, Refused};
        type Command = Option<&'static str>;
        const LAUNCH: Command = None;
        const RANKS: Command = Some("phalanx train");
        const BOTH: &[Command] = &[LAUNCH, RANKS];
        let table: &[(&str, &[Command], Option<usize>, Want)] = &[
            ("", BOTH, None, Alone),
            ("HOME=/root LOCAL_RANK=1", BOTH, None, Alone),
            // PyTorchJob, Alibaba DLC: the numbers are those of nodes
            (
                "RANK=1 WORLD_SIZE=2 MASTER_ADDR=a MASTER_PORT=1",
                &[LAUNCH],
                None,
                Node(1, 2, None),
            ),
            (
                "RANK=1 WORLD_SIZE=2 MASTER_ADDR=a",
                &[RANKS],
                Some(2),
                Node(1, 2, None),
            ),
            (
                "RANK=1 WORLD_SIZE=2 MASTER_ADDR=a",
                &[RANKS],
                Some(3),
                Alone,
            ),
            (
                "WORLD_SIZE=2 MASTER_ADDR=a",
                &[LAUNCH],
                None,
                Refused(&["WORLD_SIZE=2", "--node-rank \"$RANK\""]),
            ),
            ("RANK=1", &[LAUNCH], None, Refused(&["2 nodes", "(RANK=1)"])),
            (
                "RANK=2 WORLD_SIZE=2 MASTER_ADDR=a",
                &[LAUNCH],
                None,
                Refused(&["WORLD_SIZE=2, RANK=2"]),
            ),
            ("RANK=0 WORLD_SIZE=1 MASTER_ADDR=a", &[LAUNCH], None, Alone),
            ("RANK=1 WORLD_SIZE=2 LOCAL_RANK=1", &[LAUNCH], None, Alone),
            ("WORLD_SIZE=2", BOTH, None, Alone),
            (
                "SKYPILOT_NUM_NODES=2 SKYPILOT_NODE_RANK=1 SKYPILOT_NODE_IPS=10.0.0.1_10.0.0.2",
                BOTH,
                None,
                Node(1, 2, Some("10.0.0.1")),
            ),
            (
                "SKYPILOT_NODE_RANK=0 SKYPILOT_NODE_IPS=10.0.0.1_10.0.0.2",
                BOTH,
                None,
                Node(0, 2, Some("10.0.0.1")),
            ),
            (
                "SKYPILOT_NUM_NODES=3 SKYPILOT_NODE_RANK=0 SKYPILOT_NODE_IPS=10.0.0.1_10.0.0.2",
                BOTH,
                None,
                Refused(&[
                    "SkyPilot",
                    "SKYPILOT_NUM_NODES=3",
                    "10.0.0.1\\n10.0.0.2",
                    "head -n1",
                ]),
            ),
            (
                "SKYPILOT_NODE_IPS=10.0.0.1_10.0.0.2",
                BOTH,
                None,
                Refused(&["2 nodes"]),
            ),
            (
                "SKYPILOT_NUM_NODES=2",
                BOTH,
                None,
                Refused(&["SKYPILOT_NUM_NODES=2"]),
            ),
            (
                "SKYPILOT_NUM_NODES=2 SKYPILOT_NODE_RANK=2 SKYPILOT_NODE_IPS=a_b",
                BOTH,
                None,
                Refused(&["3 nodes"]),
            ),
            (
                "SKYPILOT_NUM_NODES=1 SKYPILOT_NODE_RANK=0 SKYPILOT_NODE_IPS=10.0.0.1",
                BOTH,
                None,
                Alone,
            ),
            (
                "VC_TASK_INDEX=1 VC_WORKER_NUM=2 VC_WORKER_HOSTS=a,b MA_NUM_GPUS=8 MA_NUM_HOSTS=2 MA_CURRENT_IP=1.2.3.4",
                BOTH,
                None,
                Node(1, 2, Some("a")),
            ),
            (
                "VC_TASK_INDEX=1 MA_NUM_HOSTS=2",
                BOTH,
                None,
                Refused(&["MA_NUM_HOSTS=2"]),
            ),
            (
                "VC_TASK_INDEX=1 MA_NUM_HOSTS=2 MASTER_ADDR=h",
                BOTH,
                None,
                Node(1, 2, None),
            ),
            (
                "VC_TASK_INDEX=0 VC_WORKER_NUM=2 VC_WORKER_HOSTS=a,b MA_NUM_HOSTS=3",
                BOTH,
                None,
                Refused(&[
                    "ModelArts",
                    "VC_WORKER_NUM=2",
                    "VC_WORKER_HOSTS=a,b",
                    "${VC_WORKER_HOSTS%%,*}",
                ]),
            ),
            (
                "VC_TASK_INDEX=0 VC_WORKER_NUM=1 VC_WORKER_HOSTS=a MA_NUM_HOSTS=1",
                BOTH,
                None,
                Alone,
            ),
            (
                "VC_TASK_INDEX=0 VC_MASTER_NUM=1 VC_WORKER_NUM=1 VC_MASTER_HOSTS=a VC_WORKER_HOSTS=b",
                BOTH,
                None,
                Refused(&["2 nodes"]),
            ),
            (
                "VC_TASK_INDEX=2",
                BOTH,
                None,
                Refused(&["3 nodes", "(VC_TASK_INDEX=2)"]),
            ),
            ("VC_TASK_INDEX=0", BOTH, None, Alone),
            (
                "RANK=1 WORLD_SIZE=2 MASTER_ADDR=a NPROC_PER_NODE=8",
                BOTH,
                None,
                Node(1, 2, None),
            ),
            (
                "DSTACK_NODES_NUM=2 DSTACK_NODE_RANK=1 DSTACK_MASTER_NODE_IP=10.0.0.1 DSTACK_NODES_IPS=10.0.0.1_10.0.0.2 DSTACK_GPUS_PER_NODE=0",
                BOTH,
                None,
                Node(1, 2, Some("10.0.0.1")),
            ),
            (
                "DSTACK_NODES_NUM=2 DSTACK_NODE_RANK=0 DSTACK_MASTER_NODE_IP=b",
                BOTH,
                None,
                Node(0, 2, Some("b")),
            ),
            (
                "DSTACK_NODES_NUM=3 DSTACK_NODE_RANK=1 DSTACK_MASTER_NODE_IP=a DSTACK_NODES_IPS=a_b",
                BOTH,
                None,
                Refused(&["dstack", "DSTACK_NODES_NUM=3", "$DSTACK_MASTER_NODE_IP"]),
            ),
            (
                "DSTACK_NODES_NUM=1 DSTACK_NODE_RANK=0 DSTACK_MASTER_NODE_IP=a DSTACK_NODES_IPS=a",
                BOTH,
                None,
                Alone,
            ),
            (
                "LWS_GROUP_SIZE=4 LWS_WORKER_INDEX=2 LWS_LEADER_ADDRESS=mnist-0.mnist.default",
                BOTH,
                None,
                Node(2, 4, Some("mnist-0.mnist.default")),
            ),
            (
                "LWS_GROUP_SIZE=2 LWS_WORKER_INDEX=2 LWS_LEADER_ADDRESS=h",
                BOTH,
                None,
                Refused(&["LeaderWorkerSet", "3 nodes", "LWS_LEADER_ADDRESS=h"]),
            ),
            (
                "LWS_GROUP_SIZE=2 LWS_WORKER_INDEX=1",
                BOTH,
                None,
                Refused(&["--node-rank \"$LWS_WORKER_INDEX\""]),
            ),
            (
                "LWS_GROUP_SIZE=1 LWS_WORKER_INDEX=0 LWS_LEADER_ADDRESS=h",
                BOTH,
                None,
                Alone,
            ),
            // the shell of sbatch, which runs once, and of salloc
            (
                "SLURM_JOB_NUM_NODES=2 SLURM_NNODES=2 SLURM_PROCID=0 SLURM_NODEID=0 SLURM_NTASKS=2",
                BOTH,
                None,
                Refused(&["SLURM_JOB_NUM_NODES=2", "srun "]),
            ),
            ("SLURM_NNODES=2", BOTH, None, Refused(&["srun "])),
            (
                "SLURM_JOB_NUM_NODES=1 SLURM_NNODES=1 SLURM_PROCID=0 SLURM_NTASKS=4",
                BOTH,
                None,
                Alone,
            ),
            (
                "SLURM_JOB_NUM_NODES=2 SLURM_STEP_ID=0 SLURM_STEP_NUM_TASKS=1 SLURM_PROCID=0",
                BOTH,
                None,
                Alone,
            ),
            (
                "SLURM_JOB_NUM_NODES=2 OMPI_COMM_WORLD_SIZE=1 OMPI_COMM_WORLD_RANK=0",
                BOTH,
                None,
                Alone,
            ),
            (
                "JOB_COMPLETION_INDEX=0",
                BOTH,
                None,
                Refused(&[
                    "does not say how many pods",
                    "JOB_COMPLETION_INDEX=0",
                    "--nnodes PODS",
                ]),
            ),
            (
                "JOB_COMPLETION_INDEX=3",
                BOTH,
                None,
                Refused(&["JOB_COMPLETION_INDEX=3"]),
            ),
            ("JOB_COMPLETION_INDEX=3", BOTH, Some(4), Node(3, 4, None)),
            ("JOB_COMPLETION_INDEX=3", BOTH, Some(2), Alone),
            (
                "JOB_COMPLETION_INDEX=0 SKYPILOT_NUM_NODES=1",
                BOTH,
                None,
                Alone,
            ),
            ("JOB_COMPLETION_INDEX=", BOTH, None, Alone),
        ];
        for (text, all, typed, want) in table {
            for command in *all {
                let got = {
                    let env = env(text);
                    let has_host = env.contains_key("MASTER_ADDR");
                    node(&env, *command, *typed, has_host)
                };
                match (got, want) {
                    (Ok(None), Alone) => {}
                    (Ok(Some(place)), Node(index, count, host)) => {
                        assert_eq!((place.rank, place.world), (*index, *count), "{text}");
                        assert_eq!(place.master_addr.as_deref(), *host, "{text}");
                    }
                    (Err(error), Refused(words)) => {
                        assert_eq!(error.exit_code(), 2);
                        let said = error.render();
                        let way_out = match *command {
                            LAUNCH => ["--standalone", "phalanx launch "],
                            _ => ["--world-size 1", "phalanx train "],
                        };
                        for word in words.iter().chain(&["alone"]).chain(&way_out) {
                            assert!(said.contains(word), "{command:?} {text}: {said}");
                        }
                    }
                    (got, want) => panic!("{command:?} {text}: {got:?}, expected {want:?}"),
                }
            }
        }
        let error = node(&env("SKYPILOT_NUM_NODES=x"), RANKS, None, false);
        let error = error.unwrap_err();
        assert!(
            error.chain().contains("SKYPILOT_NUM_NODES=x"),
            "{}",
            error.chain()
        );
    }
}
