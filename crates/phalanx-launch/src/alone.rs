//! Refuses to run a job of several nodes as several jobs of one node. Engines that start one
//! process on each node set variables; those that are not followed automatically are refused
//! here, with the command to use instead.

use super::cluster::{Env, SLURM_STEP, is_set, not_a_number};
use crate::error::{Error, Result};

/// Which command asks whether it would run alone by mistake.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Asking {
    /// `phalanx launch`, one process a node.
    Launch,
    /// A command that becomes ranks.
    Ranks,
}

/// The variables of an engine that starts one process on each node.
struct Engine {
    name: &'static str,
    /// Variables with the number of nodes. Where a `*` fits several names, theirs are added.
    counts: &'static [&'static str],
    /// Variables with a host for each node, separated by commas or white space.
    hosts: &'static [&'static str],
    /// Variables with this node's number.
    indices: &'static [&'static str],
    /// If one of these is set, the others do not describe this process.
    unless: &'static [&'static str],
    /// If none of these is set, the others are leftovers of another tool; empty: they never are.
    only_with: &'static [&'static str],
    /// Whether `phalanx launch` would run alone; it follows the other engines.
    for_launch: bool,
    /// Whether a command that becomes ranks would.
    for_ranks: bool,
    /// What to type instead.
    instead: Instead,
}

enum Instead {
    /// `phalanx launch` with these flags.
    Launch(&'static str),
    Srun,
}

const ENGINE: Engine = Engine {
    name: "",
    counts: &[],
    hosts: &[],
    indices: &[],
    unless: &[],
    only_with: &[],
    for_launch: true,
    for_ranks: true,
    instead: Instead::Launch(""),
};

/// The first that has several nodes is named.
const ENGINES: [Engine; 6] = [
    Engine {
        name: "Kubeflow or torchrun",
        counts: &["PET_NNODES"],
        indices: &["PET_NODE_RANK"],
        for_launch: false,
        instead: Instead::Launch(""),
        ..ENGINE
    },
    Engine {
        name: "an engine that sets RANK for each node",
        counts: &["WORLD_SIZE"],
        indices: &["RANK"],
        // Set for each rank.
        unless: &["LOCAL_RANK"],
        only_with: &["RANK", "MASTER_ADDR"],
        for_ranks: false,
        instead: Instead::Launch(r#"--nnodes "$WORLD_SIZE" --node-rank "$RANK" "#),
        ..ENGINE
    },
    Engine {
        name: "SkyPilot",
        counts: &["SKYPILOT_NUM_NODES"],
        hosts: &["SKYPILOT_NODE_IPS"],
        indices: &["SKYPILOT_NODE_RANK"],
        instead: Instead::Launch(
            r#"--nnodes "$SKYPILOT_NUM_NODES" --node-rank "$SKYPILOT_NODE_RANK" --master-addr "$(echo "$SKYPILOT_NODE_IPS" | head -n1)" "#,
        ),
        ..ENGINE
    },
    Engine {
        name: "ModelArts or Volcano",
        counts: &["VC_*_NUM", "MA_NUM_HOSTS"],
        hosts: &["VC_*_HOSTS"],
        indices: &["VC_TASK_INDEX"],
        instead: Instead::Launch(
            r#"--nnodes "$VC_WORKER_NUM" --node-rank "$VC_TASK_INDEX" --master-addr "${VC_WORKER_HOSTS%%,*}" "#,
        ),
        ..ENGINE
    },
    Engine {
        name: "Slurm",
        counts: &["SLURM_JOB_NUM_NODES", "SLURM_NNODES"],
        // `srun` and `mpirun` set the number of processes.
        unless: &[
            SLURM_STEP[0],
            SLURM_STEP[1],
            SLURM_STEP[2],
            "OMPI_COMM_WORLD_SIZE",
            "PMI_SIZE",
        ],
        instead: Instead::Srun,
        ..ENGINE
    },
    Engine {
        name: "Kubernetes",
        // Without counts: an Indexed Job does not set its number of pods, and number 0 may be
        // one of several, too.
        indices: &["JOB_COMPLETION_INDEX"],
        instead: Instead::Launch(
            r#"--nnodes PODS --node-rank "$JOB_COMPLETION_INDEX" --master-addr JOB-0.SERVICE "#,
        ),
        ..ENGINE
    },
];

/// The error of a command that would run alone on one of several nodes, as an engine's variables
/// show, where the command line has no number of nodes. `command` is `phalanx train`, or the name of
/// a user's program.
///
/// # Errors
///
/// Usage, of a variable that is no number.
pub fn alone_by_mistake(env: &Env, asking: Asking, command: &str) -> Result<Option<Error>> {
    let mut is_counted = false;
    for engine in &ENGINES {
        let any_set = |names: &[&str]| names.iter().any(|name| is_set(env, name));
        let is_about_others =
            any_set(engine.unless) || !engine.only_with.is_empty() && !any_set(engine.only_with);
        if is_about_others || asking == Asking::Ranks && !engine.for_ranks {
            continue;
        }
        let nodes = engine.nodes(env)?;
        let found = engine.found(env);
        let are_several = match engine.counts {
            // It cannot show that there is one node only.
            [] => !found.is_empty() && !is_counted,
            _ => nodes > 1,
        };
        let is_followed = asking == Asking::Launch && !engine.for_launch;
        if are_several && !is_followed {
            return Ok(Some(engine.error(&found, nodes, asking, command)));
        }
        is_counted |= nodes > 0;
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

impl Engine {
    /// The number of nodes, or a lower bound of it; 0: unknown.
    fn nodes(&self, env: &Env) -> Result<usize> {
        let number = |name: &str, text: &str| -> Result<usize> {
            text.parse().map_err(|_| not_a_number(name, text))
        };
        let mut nodes = 0;
        for pattern in self.counts {
            let mut sum = 0usize;
            for (name, text) in set(env, &[pattern]) {
                // torchrun's MIN:MAX.
                let most = text.rsplit(':').next().unwrap_or(text);
                sum = sum.saturating_add(number(name, most)?);
            }
            nodes = nodes.max(sum);
        }
        let is_between = |c: char| c == ',' || c.is_whitespace();
        let hosts = set(env, self.hosts);
        let hosts = hosts.iter().flat_map(|(_, text)| text.split(is_between));
        nodes = nodes.max(hosts.filter(|host| !host.is_empty()).count());
        for (name, text) in set(env, self.indices) {
            let index = number(name, text)?;
            if index > 0 {
                nodes = nodes.max(index.saturating_add(1));
            }
        }
        Ok(nodes)
    }

    fn found<'a>(&self, env: &'a Env) -> Vec<(&'a str, &'a str)> {
        set(env, &[self.counts, self.indices, self.hosts].concat())
    }

    fn error(&self, found: &[(&str, &str)], nodes: usize, asking: Asking, command: &str) -> Error {
        let found: Vec<String> = found
            .iter()
            .map(|(name, text)| {
                let start: String = text.chars().take(60).collect();
                let dots = if start.len() < text.len() { "..." } else { "" };
                format!("{name}={}{dots}", start.escape_debug())
            })
            .collect();
        let (name, found) = (self.name, found.join(", "));
        let message = match self {
            Engine {
                instead: Instead::Srun,
                ..
            } => format!(
                "{name} gave this job {nodes} nodes ({found}), but srun did not start this process: it would run alone on one of them"
            ),
            Engine { counts: [], .. } => format!(
                "{name} started this process in a pod of an Indexed Job ({found}), which does not say how many pods it has: each would run alone"
            ),
            _ => format!(
                "{name} started this process on one of {nodes} nodes ({found}): each would run alone"
            ),
        };
        let line = match (&self.instead, asking) {
            (Instead::Srun, Asking::Launch) => {
                "srun --ntasks-per-node=1 phalanx launch --token-file job.token ...".to_owned()
            }
            (Instead::Srun, Asking::Ranks) => {
                format!("srun {command} ...   (one rank a task)")
            }
            (Instead::Launch(flags), Asking::Launch) => {
                format!("phalanx launch {flags}--token-file job.token ...")
            }
            (Instead::Launch(flags), Asking::Ranks) => {
                format!("phalanx launch {flags}--token-file job.token -- {command} ...")
            }
        };
        let alone = match asking {
            Asking::Launch => "--standalone, if this node is to run alone",
            Asking::Ranks => "--world-size 1, if this process is to run alone",
        };
        Error::usage(message)
            .note("type", line)
            .note("or add", alone)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Pairs `NAME=value`, separated by blanks; `_` in a value is a line break.
    fn env(text: &str) -> Env {
        let pairs = text.split_whitespace().map(|pair| {
            let (name, value) = pair.split_once('=').unwrap();
            (name.to_owned(), value.replace('_', "\n"))
        });
        pairs.collect()
    }

    #[test]
    fn several_nodes_are_refused_and_one_is_not() {
        use Asking::{Launch, Ranks};
        const BOTH: &[Asking] = &[Launch, Ranks];
        let table: &[(&str, &[Asking], &[&str])] = &[
            ("", &[], &[]),
            ("HOME=/root LOCAL_RANK=1", &[], &[]),
            // Kubeflow Trainer; `launch` follows it
            (
                "PET_NNODES=2 PET_NODE_RANK=1 PET_MASTER_ADDR=a JOB_COMPLETION_INDEX=1",
                &[Ranks],
                &[
                    "on one of 2 nodes (PET_NNODES=2, PET_NODE_RANK=1)",
                    "type    phalanx launch --token-file job.token -- phalanx train ...",
                ],
            ),
            ("PET_NNODES=1:4", &[Ranks], &["PET_NNODES=1:4"]),
            (
                "PET_NNODES=1 PET_NODE_RANK=0 JOB_COMPLETION_INDEX=0",
                &[],
                &[],
            ),
            ("PET_NNODES=1:1 PET_NPROC_PER_NODE=4", &[], &[]),
            // PyTorchJob, Alibaba DLC: the numbers are those of nodes
            (
                "RANK=0 WORLD_SIZE=2 MASTER_ADDR=a MASTER_PORT=1",
                &[Launch],
                &[
                    "WORLD_SIZE=2, RANK=0",
                    "--nnodes \"$WORLD_SIZE\" --node-rank \"$RANK\" --token-file",
                ],
            ),
            ("RANK=0 WORLD_SIZE=1 MASTER_ADDR=a", &[], &[]),
            ("RANK=1 WORLD_SIZE=2 LOCAL_RANK=1", &[], &[]),
            ("WORLD_SIZE=2", &[], &[]),
            (
                "SKYPILOT_NUM_NODES=2 SKYPILOT_NODE_RANK=0 SKYPILOT_NODE_IPS=10.0.0.1_10.0.0.2",
                BOTH,
                &[
                    "SkyPilot",
                    "SKYPILOT_NUM_NODES=2",
                    "10.0.0.1\\n10.0.0.2",
                    "head -n1",
                ],
            ),
            ("SKYPILOT_NODE_IPS=10.0.0.1_10.0.0.2", BOTH, &["2 nodes"]),
            (
                "SKYPILOT_NUM_NODES=1 SKYPILOT_NODE_RANK=0 SKYPILOT_NODE_IPS=10.0.0.1",
                &[],
                &[],
            ),
            (
                "VC_TASK_INDEX=0 VC_WORKER_NUM=2 VC_WORKER_HOSTS=a,b MA_NUM_GPUS=8 MA_NUM_HOSTS=2",
                BOTH,
                &[
                    "ModelArts",
                    "VC_WORKER_NUM=2",
                    "VC_WORKER_HOSTS=a,b",
                    "${VC_WORKER_HOSTS%%,*}",
                ],
            ),
            (
                "VC_TASK_INDEX=0 VC_WORKER_NUM=1 VC_WORKER_HOSTS=a MA_NUM_HOSTS=1",
                &[],
                &[],
            ),
            (
                "VC_TASK_INDEX=0 VC_MASTER_NUM=1 VC_WORKER_NUM=1",
                BOTH,
                &["2 nodes"],
            ),
            ("VC_TASK_INDEX=2", BOTH, &["3 nodes (VC_TASK_INDEX=2)"]),
            ("VC_TASK_INDEX=0", &[], &[]),
            // the shell of sbatch, which runs once, and of salloc
            (
                "SLURM_JOB_NUM_NODES=2 SLURM_NNODES=2 SLURM_PROCID=0 SLURM_NODEID=0 SLURM_NTASKS=2",
                BOTH,
                &["SLURM_JOB_NUM_NODES=2", "srun "],
            ),
            ("SLURM_NNODES=2", BOTH, &["srun "]),
            (
                "SLURM_JOB_NUM_NODES=1 SLURM_NNODES=1 SLURM_PROCID=0 SLURM_NTASKS=4",
                &[],
                &[],
            ),
            (
                "SLURM_JOB_NUM_NODES=2 SLURM_STEP_ID=0 SLURM_STEP_NUM_TASKS=1 SLURM_PROCID=0",
                &[],
                &[],
            ),
            (
                "SLURM_JOB_NUM_NODES=2 OMPI_COMM_WORLD_SIZE=1 OMPI_COMM_WORLD_RANK=0",
                &[],
                &[],
            ),
            (
                "JOB_COMPLETION_INDEX=0",
                BOTH,
                &[
                    "does not say how many pods",
                    "JOB_COMPLETION_INDEX=0",
                    "--nnodes PODS",
                ],
            ),
            ("JOB_COMPLETION_INDEX=3", BOTH, &["JOB_COMPLETION_INDEX=3"]),
            ("JOB_COMPLETION_INDEX=0 SKYPILOT_NUM_NODES=1", &[], &[]),
            ("JOB_COMPLETION_INDEX=", &[], &[]),
        ];
        for (text, refused, words) in table {
            for asking in BOTH {
                let error = alone_by_mistake(&env(text), *asking, "phalanx train").unwrap();
                let is_refused = refused.contains(asking);
                assert_eq!(error.is_some(), is_refused, "{asking:?} {text}");
                let Some(error) = error else { continue };
                assert_eq!(error.exit_code(), 2);
                let said = error.render();
                let words = words
                    .iter()
                    .filter(|word| !word.contains("-- phalanx") || *asking == Ranks);
                for word in words.copied().chain(["alone"]) {
                    assert!(said.contains(word), "{asking:?} {text}: {said}");
                }
                let flag = match asking {
                    Launch => "--standalone",
                    Ranks => "--world-size 1",
                };
                assert!(said.contains(flag), "{said}");
            }
        }
        let error =
            alone_by_mistake(&env("SKYPILOT_NUM_NODES=x"), Ranks, "phalanx train").unwrap_err();
        assert!(
            error.chain().contains("SKYPILOT_NUM_NODES=x"),
            "{}",
            error.chain()
        );
    }
}
