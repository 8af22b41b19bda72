//! Slurm's variables: those of the tasks that `srun` starts, and those of the shell of `sbatch` and `salloc`.

use super::kubernetes::Engine;
use super::{Env, Process, is_set, number, text};
use crate::error::{Error, Result};

/// Set for the tasks that `srun` starts, not in the shell of `sbatch` or `salloc`.
const STEP: [&str; 3] = ["SLURM_STEP_ID", "SLURM_STEPID", "SLURM_STEP_NUM_TASKS"];

/// The shell of a job: one process, on the first of its nodes.
pub(super) const SHELL: Engine = Engine {
    name: "Slurm",
    counts: &["SLURM_JOB_NUM_NODES", "SLURM_NNODES"],
    // `srun` and `mpirun` set the number of processes.
    unless: &[
        STEP[0],
        STEP[1],
        STEP[2],
        "OMPI_COMM_WORLD_SIZE",
        "PMI_SIZE",
    ],
    flags: None,
    ..Engine::NONE
};

/// Whether `srun` started this process. The shell of `sbatch` has most of a task's
/// variables too, but is one process, with the number 0, on the first of its nodes.
fn is_task(env: &Env) -> Result<bool> {
    let in_step = STEP.iter().any(|name| is_set(env, name));
    Ok(in_step || number(env, "SLURM_PROCID")?.unwrap_or(0) > 0)
}

/// The first of these variables that is set.
fn first_number(env: &Env, names: [&str; 2]) -> Result<Option<usize>> {
    match number(env, names[0])? {
        Some(number) => Ok(Some(number)),
        None => number(env, names[1]),
    }
}

/// The number of tasks of the step, else of the job.
fn tasks(env: &Env) -> Result<Option<usize>> {
    first_number(env, ["SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"])
}

/// This process, if it is a task: one for each task of the step, or for each node where Slurm gives no number of tasks.
pub(super) fn process(env: &Env, first_host: Option<String>) -> Result<Option<Process>> {
    if !is_task(env)? {
        return Ok(None);
    }
    let nodes = first_number(env, ["SLURM_NNODES", "SLURM_JOB_NUM_NODES"])?;
    let task = number(env, "SLURM_PROCID")?;
    let node = number(env, "SLURM_NODEID")?;
    let (count, index) = match (tasks(env)?, task, nodes, node) {
        (Some(tasks), Some(task), ..) => (tasks, task),
        (None, _, Some(nodes), Some(node)) => (nodes, node),
        (None, Some(task), Some(nodes), None) => (nodes, task),
        _ => return Ok(None),
    };
    let listed = match (env.get("SLURM_STEP_TASKS_PER_NODE"), node) {
        (Some(list), Some(node)) => tasks_on_node(list, node),
        _ => None,
    };
    let here = match (listed, nodes) {
        (Some(here), _) => Some(here),
        (None, Some(nodes)) if nodes > 0 && count.is_multiple_of(nodes) => Some(count / nodes),
        _ => None,
    };
    let local = number(env, "SLURM_LOCALID")?.zip(here);
    Process::of_engine("Slurm", index, count, local, first_host).map(Some)
}

/// The cores of `SLURM_CPUS_PER_TASK`, where it is set, and the ranks that share them. `rank`: the rank that this process
/// is, unless it runs all `ranks` of this host.
pub fn cores(env: &Env, rank: Option<&Process>, ranks: usize) -> Result<Option<(usize, usize)>> {
    let Some(each) = number(env, "SLURM_CPUS_PER_TASK")?.filter(|each| *each > 0) else {
        return Ok(None);
    };
    let is_task = is_task(env)?;
    // Not one of several ranks that a launcher has started in a task.
    let is_own_task = match rank {
        Some(rank) if rank.is_by_variables() => {
            let task = number(env, "SLURM_PROCID")?;
            is_task && task == Some(rank.rank) && tasks(env)? == Some(rank.world)
        }
        rank => rank.is_some(),
    };
    let (tasks, ranks) = match (is_own_task, is_task) {
        (true, _) => (1, 1),
        (_, true) => (1, ranks),
        // The shell of a job, whose ranks have the cores of all of the first node's tasks.
        _ => {
            let list = env.get("SLURM_TASKS_PER_NODE");
            let tasks = list.and_then(|list| tasks_on_node(list, 0));
            (tasks.unwrap_or(1).max(1), ranks)
        }
    };
    Ok(Some((each.saturating_mul(tasks), ranks)))
}

/// The number of tasks on node `node` of Slurm's `2(x3),1`: three nodes with two, then one with one.
fn tasks_on_node(list: &str, mut node: usize) -> Option<usize> {
    for part in list.split(',') {
        let (tasks, nodes) = match part.trim().split_once("(x") {
            None => (part.trim(), 1),
            Some((tasks, nodes)) => (tasks, nodes.strip_suffix(')')?.parse().ok()?),
        };
        match node.checked_sub(nodes) {
            None => return tasks.parse().ok(),
            Some(rest) => node = rest,
        }
    }
    None
}

/// The first host of the step, else of the job.
pub(super) fn first_host_of_job(env: &Env) -> Result<Option<String>> {
    let names = [
        "SLURM_STEP_NODELIST",
        "SLURM_JOB_NODELIST",
        "SLURM_NODELIST",
    ];
    let lists = names.iter().map(|name| (name, text(env, name)));
    let Some((name, list)) = lists
        .into_iter()
        .find_map(|(name, list)| Some((name, list?)))
    else {
        return Ok(None);
    };
    match first_host(list) {
        Some(host) => Ok(Some(host)),
        None => Err(
            Error::usage(format!("{name} is not a list of hosts: \"{list}\""))
                .note("expected", "something like gnode[10,20,25-37],big1"),
        ),
    }
}

/// The first host of a Slurm node list: `gnode[10,20,25-37],x` is `gnode10`,
/// `r[1-2]n[001-9]` is `r1n001`. `None` for what is no node list.
pub fn first_host(list: &str) -> Option<String> {
    let mut host = String::new();
    let mut rest = list.trim();
    while let Some(at) = rest.find(['[', ',', ']']) {
        host.push_str(&rest[..at]);
        match rest.as_bytes()[at] {
            b',' => {
                rest = "";
                break;
            }
            b']' => return None,
            _ => {}
        }
        let (inside, after) = rest[at + 1..].split_once(']')?;
        let first = inside.split([',', '-']).next()?;
        if first.is_empty() || !first.bytes().all(|b| b.is_ascii_digit()) {
            return None;
        }
        host.push_str(first);
        rest = after;
    }
    host.push_str(rest);
    let sound = |b: u8| b.is_ascii_alphanumeric() || matches!(b, b'-' | b'.' | b'_');
    (!host.is_empty() && host.bytes().all(sound)).then_some(host)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn first_hosts_of_node_lists() {
        for (list, want) in [
            ("gnode[10,20,25-37]", Some("gnode10")),
            ("gnode[25-37,40]", Some("gnode25")),
            ("a", Some("a")),
            ("a1,b[2-3]", Some("a1")),
            ("n[001-003]-ib,x", Some("n001-ib")),
            ("r[1-2]n[07,9]", Some("r1n07")),
            ("node-a.example.org,node-b", Some("node-a.example.org")),
            (" tux[3] ", Some("tux3")),
            ("", None),
            ("n[1-2", None),
            ("n1]", None),
            ("n[]", None),
            ("n[a-b]", None),
            (",a", None),
            ("a b", None),
        ] {
            assert_eq!(first_host(list).as_deref(), want, "{list}");
        }
    }

    #[test]
    fn tasks_of_a_node_by_slurms_list() {
        for (list, node, want) in [
            ("2(x3),1", 0, Some(2)),
            ("2(x3),1", 2, Some(2)),
            ("2(x3),1", 3, Some(1)),
            ("2(x3),1", 4, None),
            ("4", 0, Some(4)),
            ("1,3(x2)", 1, Some(3)),
            ("", 0, None),
            ("2(x", 0, None),
            ("2(x18446744073709551616)", 0, None),
        ] {
            assert_eq!(tasks_on_node(list, node), want, "{list} {node}");
        }
    }
}
