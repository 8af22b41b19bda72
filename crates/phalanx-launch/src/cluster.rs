//! The variables by which cluster engines number their processes: Slurm, Open MPI, PMI.
//!
//! Pure functions over a map of variables, so that each engine is a row in a test
//! table. `PET_*`, torchrun's own input, stands for flags and is read in `args.rs`.

pub use phalanx_base::env::{Env, not_a_number, number, real_env};

use crate::error::{Error, Result};

/// Our place among processes that a cluster engine started alike.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Place {
    /// The engine's name, for messages.
    pub engine: &'static str,
    /// How many processes it started.
    pub count: usize,
    /// Which one we are.
    pub index: usize,
    /// Our number on this host, and how many there are, where known.
    pub local: Option<(usize, usize)>,
    /// The host of process 0, where known.
    pub first_host: Option<String>,
}

impl Place {
    /// Whether all processes are known to run on this host.
    pub fn is_on_one_host(&self) -> bool {
        self.local.is_some_and(|(_, here)| here == self.count)
    }
}

/// Reads the place from the environment. An MPI launcher wins over Slurm, as
/// `mpirun` inside a Slurm job inherits the batch script's variables.
pub fn detect(env: &Env) -> Result<Option<Place>> {
    let slurm_host = first_slurm_host(env)?;
    if let Some(count) = number(env, "OMPI_COMM_WORLD_SIZE")? {
        let index = needed(env, "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE")?;
        let local = match (
            number(env, "OMPI_COMM_WORLD_LOCAL_RANK")?,
            number(env, "OMPI_COMM_WORLD_LOCAL_SIZE")?,
        ) {
            (Some(rank), Some(size)) => Some((rank, size)),
            _ => None,
        };
        return place("Open MPI", count, index, local, slurm_host);
    }
    if let Some(count) = number(env, "PMI_SIZE")? {
        let index = needed(env, "PMI_RANK", "PMI_SIZE")?;
        let local = match (
            number(env, "MPI_LOCALRANKID")?,
            number(env, "MPI_LOCALNRANKS")?,
        ) {
            (Some(rank), Some(size)) => Some((rank, size)),
            _ => None,
        };
        return place("PMI", count, index, local, slurm_host);
    }
    if is_slurm_task(env)? {
        return slurm(env, slurm_host);
    }
    Ok(None)
}

/// Set for the tasks that `srun` starts, not in the shell of `sbatch` or `salloc`.
pub(super) const SLURM_STEP: [&str; 3] = ["SLURM_STEP_ID", "SLURM_STEPID", "SLURM_STEP_NUM_TASKS"];

/// Whether `srun` started this process. The shell of `sbatch` has most of a task's
/// variables too, but is one process, with the number 0, on the first of its nodes.
pub(super) fn is_slurm_task(env: &Env) -> Result<bool> {
    let in_step = SLURM_STEP.iter().any(|name| is_set(env, name));
    Ok(in_step || number(env, "SLURM_PROCID")?.unwrap_or(0) > 0)
}

/// The text of a variable; an empty one counts as unset.
pub(super) fn text<'a>(env: &'a Env, name: &str) -> Option<&'a str> {
    let text = env.get(name).map(String::as_str);
    text.filter(|text| !text.is_empty())
}

pub(super) fn is_set(env: &Env, name: &str) -> bool {
    env.get(name).is_some_and(|text| !text.trim().is_empty())
}

/// The number of tasks of the step, else of the job.
pub(super) fn slurm_tasks(env: &Env) -> Result<Option<usize>> {
    match number(env, "SLURM_STEP_NUM_TASKS")? {
        Some(tasks) => Ok(Some(tasks)),
        None => number(env, "SLURM_NTASKS"),
    }
}

/// Slurm: one process for each task of the step, or for each node where it gives no
/// number of tasks.
fn slurm(env: &Env, first_host: Option<String>) -> Result<Option<Place>> {
    let nodes = match number(env, "SLURM_NNODES")? {
        Some(nodes) => Some(nodes),
        None => number(env, "SLURM_JOB_NUM_NODES")?,
    };
    let tasks = slurm_tasks(env)?;
    let task = number(env, "SLURM_PROCID")?;
    let node = number(env, "SLURM_NODEID")?;
    let (count, index) = match (tasks, task, nodes, node) {
        (Some(tasks), Some(task), ..) => (tasks, task),
        (None, _, Some(nodes), Some(node)) => (nodes, node),
        (None, Some(task), Some(nodes), None) => (nodes, task),
        _ => return Ok(None),
    };
    let listed = match (env.get("SLURM_STEP_TASKS_PER_NODE"), node) {
        (Some(list), Some(node)) => tasks_on_node(list, node),
        _ => None,
    };
    let local = match (number(env, "SLURM_LOCALID")?, listed, nodes) {
        (Some(id), Some(here), _) => Some((id, here)),
        (Some(id), None, Some(1)) => Some((id, count)),
        (Some(id), None, Some(nodes)) if nodes > 0 && count.is_multiple_of(nodes) => {
            Some((id, count / nodes))
        }
        _ => None,
    };
    place("Slurm", count, index, local, first_host)
}

/// The number of tasks on node `node` of Slurm's `2(x3),1`: three nodes with two, then one with one.
pub(super) fn tasks_on_node(list: &str, mut node: usize) -> Option<usize> {
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

fn place(
    engine: &'static str,
    count: usize,
    index: usize,
    local: Option<(usize, usize)>,
    first_host: Option<String>,
) -> Result<Option<Place>> {
    if index >= count {
        return Err(Error::usage(format!(
            "{engine} numbers this process {index} of {count}; numbers count from 0"
        ))
        .note("fix", "unset its variables, or start through it again"));
    }
    // All on one host needs no host name.
    let first_host = match local {
        Some((_, size)) if size == count => Some("127.0.0.1".to_owned()),
        _ => first_host,
    };
    Ok(Some(Place {
        engine,
        count,
        index,
        local,
        first_host,
    }))
}

fn first_slurm_host(env: &Env) -> Result<Option<String>> {
    for name in [
        "SLURM_STEP_NODELIST",
        "SLURM_JOB_NODELIST",
        "SLURM_NODELIST",
    ] {
        if let Some(list) = text(env, name) {
            return match first_host(list) {
                Some(host) => Ok(Some(host)),
                None => Err(
                    Error::usage(format!("{name} is not a list of hosts: \"{list}\""))
                        .note("expected", "something like gnode[10,20,25-37],big1"),
                ),
            };
        }
    }
    Ok(None)
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

fn needed(env: &Env, name: &str, because: &str) -> Result<usize> {
    number(env, name)?
        .ok_or_else(|| Error::usage(format!("the environment sets {because} but not {name}")))
}

/// The rank that this process is, from the environment.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RankPlace {
    /// Where this comes from: `RANK` or the engine's name.
    pub source: &'static str,
    /// Global rank.
    pub rank: usize,
    /// Number of ranks.
    pub world: usize,
    /// Rank on this host.
    pub local_rank: usize,
    /// Number of ranks on this host, where known.
    pub local_world: Option<usize>,
    /// Where rank 0 (or its launcher) listens, where known.
    pub master_addr: Option<String>,
    /// The port there.
    pub master_port: u16,
}

/// The rank that this process is, if it was started as one: by a launcher
/// (`RANK`, `WORLD_SIZE`), or directly by `srun` or `mpirun`. `None`: it was not, so a
/// command that needs ranks starts its own.
pub fn rank_place(env: &Env) -> Result<Option<RankPlace>> {
    let (source, rank, world, local, host) =
        match (number(env, "RANK")?, number(env, "WORLD_SIZE")?) {
            (Some(rank), Some(world)) => {
                if rank >= world {
                    return Err(Error::usage(format!(
                        "RANK={rank} is not below WORLD_SIZE={world}; ranks count from 0"
                    )));
                }
                let local = (number(env, "LOCAL_RANK")?, number(env, "LOCAL_WORLD_SIZE")?);
                (RANK_SOURCE, rank, world, local, None)
            }
            (Some(_), None) => {
                return Err(Error::usage("the environment sets RANK but not WORLD_SIZE")
                    .note("fix", "unset RANK, or start through `phalanx launch`"));
            }
            // WORLD_SIZE alone is left behind by many tools; it names no rank.
            (None, _) => match detect(env)? {
                Some(place) if place.count > 1 => (
                    place.engine,
                    place.index,
                    place.count,
                    (place.local.map(|l| l.0), place.local.map(|l| l.1)),
                    place.first_host,
                ),
                _ => return Ok(None),
            },
        };
    let master_addr = text(env, "MASTER_ADDR").map(str::to_owned);
    let master_port = match number(env, "MASTER_PORT")? {
        None => super::DEFAULT_PORT,
        // 0 is up to the group: a rank 0 that hosts the store may take any.
        Some(port) => u16::try_from(port)
            .map_err(|_| Error::usage(format!("MASTER_PORT={port} is not a port number")))?,
    };
    Ok(Some(RankPlace {
        source,
        rank,
        world,
        local_rank: local.0.unwrap_or(0),
        local_world: local.1,
        master_addr: master_addr.or(host),
        master_port,
    }))
}

impl RankPlace {
    /// Whether it comes from `RANK` and `WORLD_SIZE`, and not from an engine's own variables.
    pub fn is_by_rank(&self) -> bool {
        self.source == RANK_SOURCE
    }

    /// Whether all ranks are known to run on this host.
    pub fn is_on_one_host(&self) -> bool {
        self.local_world == Some(self.world)
    }

    /// What says that this is a rank.
    pub(crate) fn starter(&self) -> String {
        match self.is_by_rank() {
            true => format!(
                "the environment (RANK={}, WORLD_SIZE={})",
                self.rank, self.world
            ),
            false => self.source.to_owned(),
        }
    }

    /// Checks the numbers of ranks on the command line against those that this rank was started with:
    /// `here` on this host, and `world` in all. `has_nodes`: the command line has `--nnodes`.
    ///
    /// # Errors
    ///
    /// Usage, when they contradict each other.
    pub fn check(&self, here: Option<usize>, world: Option<usize>, has_nodes: bool) -> Result<()> {
        let who = self.starter();
        if let Some(typed) = world.filter(|typed| *typed != self.world) {
            return Err(Error::usage(format!(
                "--world-size {typed} contradicts {who}: this process is one of {} ranks",
                self.world
            ))
            .note("fix", "leave it out"));
        }
        if has_nodes {
            return Err(Error::usage(format!(
                "--nnodes contradicts {who}: this process is one of {} ranks",
                self.world
            ))
            .note("fix", "leave it out, or start one process on each node"));
        }
        let Some(typed) = here.filter(|typed| *typed != self.local_world.unwrap_or(1)) else {
            return Ok(());
        };
        let error = Error::usage(format!(
            "--nproc-per-node {typed} contradicts {who}: this process is one rank{}",
            match self.local_world {
                Some(1) => ", the only one on this host".to_owned(),
                Some(ranks) => format!(" of {ranks} on this host"),
                None => String::new(),
            }
        ));
        Err(match (self.local_world, self.source) {
            (None, RANK_SOURCE) => error
                .note(
                    "fix",
                    "leave it out; or, if RANK and WORLD_SIZE count nodes, add --nnodes \"$WORLD_SIZE\"",
                ),
            (_, "Slurm") => error.note(
                "fix",
                format!("leave it out; `srun --ntasks-per-node={typed}` starts {typed} ranks on each node"),
            ),
            _ => error.note("fix", "leave it out; the program that started this process sets the number of ranks"),
        })
    }
}

/// The `source` of a place that comes from `RANK` and `WORLD_SIZE`.
const RANK_SOURCE: &str = "RANK";

/// The error of an environment that describes one rank of several without its number: `WORLD_SIZE`
/// above 1 and `LOCAL_RANK` or `MASTER_ADDR`, but no `RANK`. PyTorch refuses that too; a training
/// of one rank would go unnoticed for hours. `WORLD_SIZE` alone is left behind by many tools and
/// describes no rank.
pub fn half_a_rank(env: &Env) -> Result<Option<Error>> {
    let world = number(env, "WORLD_SIZE")?.unwrap_or(0);
    let beside = ["LOCAL_RANK", "MASTER_ADDR"]
        .into_iter()
        .find(|name| is_set(env, name));
    Ok(match (beside, number(env, "RANK")?) {
        (Some(beside), None) if world > 1 => {
            let error = Error::usage(format!(
                "the environment sets WORLD_SIZE={world} and {beside} but not RANK: one of {world} ranks would train alone"
            ));
            Some(error.note("set", format!("RANK to this process's number, 0 to {}", world - 1)).note(
                "or",
                "start through `phalanx launch` or torchrun; unset WORLD_SIZE for a training of its own",
            ))
        }
        _ => None,
    })
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    pub fn env(text: &str) -> Env {
        text.split_whitespace()
            .map(|pair| {
                let (name, value) = pair.split_once('=').unwrap();
                (name.to_owned(), value.to_owned())
            })
            .collect()
    }

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

    #[test]
    fn places_by_engine() {
        type Want = Option<(&'static str, usize, usize, Option<&'static str>)>;
        let table: &[(&str, Want)] = &[
            ("", None),
            ("RANK=1 WORLD_SIZE=4", None),
            // srun, one task a node
            (
                "SLURM_PROCID=1 SLURM_NODEID=1 SLURM_NNODES=2 SLURM_NTASKS=2 SLURM_LOCALID=0 SLURM_JOB_NODELIST=gnode[10,20] SLURM_STEP_ID=0",
                Some(("Slurm", 2, 1, Some("gnode10"))),
            ),
            // several tasks a node
            (
                "SLURM_PROCID=5 SLURM_NODEID=1 SLURM_NNODES=2 SLURM_NTASKS=8 SLURM_LOCALID=1 SLURM_STEP_NODELIST=b[7-8] SLURM_JOB_NODELIST=a,b[7-8]",
                Some(("Slurm", 8, 5, Some("b7"))),
            ),
            // the step's count wins over the job's
            (
                "SLURM_PROCID=0 SLURM_NNODES=2 SLURM_NTASKS=16 SLURM_STEP_NUM_TASKS=2 SLURM_NODELIST=a[1-2]",
                Some(("Slurm", 2, 0, Some("a1"))),
            ),
            // a step without a task count
            (
                "SLURM_NODEID=0 SLURM_PROCID=0 SLURM_JOB_NUM_NODES=3 SLURM_JOB_NODELIST=a[1-3] SLURM_STEPID=0",
                Some(("Slurm", 3, 0, Some("a1"))),
            ),
            // the shell of sbatch
            (
                "SLURM_NODEID=0 SLURM_PROCID=0 SLURM_NNODES=1 SLURM_NTASKS=4 SLURM_JOB_NODELIST=a1",
                None,
            ),
            // everything on one host
            (
                "SLURM_PROCID=3 SLURM_LOCALID=3 SLURM_NNODES=1 SLURM_NTASKS=4 SLURM_JOB_NODELIST=a9",
                Some(("Slurm", 4, 3, Some("127.0.0.1"))),
            ),
            (
                "OMPI_COMM_WORLD_RANK=2 OMPI_COMM_WORLD_SIZE=4 OMPI_COMM_WORLD_LOCAL_RANK=0 OMPI_COMM_WORLD_LOCAL_SIZE=2",
                Some(("Open MPI", 4, 2, None)),
            ),
            (
                "OMPI_COMM_WORLD_RANK=1 OMPI_COMM_WORLD_SIZE=2 OMPI_COMM_WORLD_LOCAL_RANK=1 OMPI_COMM_WORLD_LOCAL_SIZE=2",
                Some(("Open MPI", 2, 1, Some("127.0.0.1"))),
            ),
            // mpirun inside a Slurm job
            (
                "OMPI_COMM_WORLD_RANK=1 OMPI_COMM_WORLD_SIZE=2 SLURM_PROCID=0 SLURM_NTASKS=1 SLURM_JOB_NODELIST=n[4-5]",
                Some(("Open MPI", 2, 1, Some("n4"))),
            ),
            ("PMI_RANK=0 PMI_SIZE=3", Some(("PMI", 3, 0, None))),
        ];
        for (text, want) in table {
            let got = detect(&env(text)).unwrap();
            let got = got
                .as_ref()
                .map(|p| (p.engine, p.count, p.index, p.first_host.as_deref()));
            assert_eq!(got, *want, "{text}");
        }
    }

    #[test]
    fn half_and_wrong_environments_are_named() {
        for (text, want) in [
            ("OMPI_COMM_WORLD_SIZE=2", "OMPI_COMM_WORLD_RANK"),
            ("PMI_SIZE=2", "PMI_RANK"),
            ("PMI_SIZE=two PMI_RANK=0", "PMI_SIZE=two"),
            ("PMI_SIZE=2 PMI_RANK=2", "process 2 of 2"),
            (
                "SLURM_PROCID=1 SLURM_NTASKS=2 SLURM_NODELIST=n[",
                "SLURM_NODELIST",
            ),
        ] {
            let error = detect(&env(text)).unwrap_err();
            assert!(error.chain().contains(want), "{text}: {}", error.chain());
            assert_eq!(error.exit_code(), 2);
        }
    }

    #[test]
    fn ranks_by_environment() {
        type Want = Option<(usize, usize, usize, Option<&'static str>, u16)>;
        let table: &[(&str, Want)] = &[
            ("", None),
            ("WORLD_SIZE=4", None),
            (
                "RANK=3 WORLD_SIZE=4 LOCAL_RANK=1 MASTER_ADDR=h MASTER_PORT=1234",
                Some((3, 4, 1, Some("h"), 1234)),
            ),
            ("RANK=0 WORLD_SIZE=1", Some((0, 1, 0, None, 29500))),
            // RANK wins over the engine that started the launcher
            (
                "RANK=1 WORLD_SIZE=2 LOCAL_RANK=1 SLURM_PROCID=0 SLURM_NTASKS=1 SLURM_STEP_ID=0",
                Some((1, 2, 1, None, 29500)),
            ),
            (
                "SLURM_PROCID=3 SLURM_NTASKS=4 SLURM_NNODES=2 SLURM_LOCALID=1 SLURM_STEP_ID=0 SLURM_JOB_NODELIST=a[1-2]",
                Some((3, 4, 1, Some("a1"), 29500)),
            ),
            // a batch script is no rank
            (
                "SLURM_PROCID=0 SLURM_NTASKS=4 SLURM_JOB_NODELIST=a[1-2]",
                None,
            ),
            ("PMI_RANK=0 PMI_SIZE=1", None),
            // Nobody says on which host rank 0 runs, unless all run on one.
            (
                "OMPI_COMM_WORLD_RANK=1 OMPI_COMM_WORLD_SIZE=2 OMPI_COMM_WORLD_LOCAL_RANK=0 OMPI_COMM_WORLD_LOCAL_SIZE=1",
                Some((1, 2, 0, None, 29500)),
            ),
            (
                "OMPI_COMM_WORLD_RANK=1 OMPI_COMM_WORLD_SIZE=2 OMPI_COMM_WORLD_LOCAL_RANK=1 OMPI_COMM_WORLD_LOCAL_SIZE=2",
                Some((1, 2, 1, Some("127.0.0.1"), 29500)),
            ),
            (
                "PMI_RANK=1 PMI_SIZE=2 MASTER_ADDR=x",
                Some((1, 2, 0, Some("x"), 29500)),
            ),
        ];
        for (text, want) in table {
            let got = rank_place(&env(text)).unwrap();
            let got = got.as_ref().map(|p| {
                (
                    p.rank,
                    p.world,
                    p.local_rank,
                    p.master_addr.as_deref(),
                    p.master_port,
                )
            });
            assert_eq!(got, *want, "{text}");
        }
        assert!(rank_place(&env("RANK=1")).is_err());
        for (text, is_half) in [
            ("WORLD_SIZE=4", false),
            ("WORLD_SIZE=1 LOCAL_RANK=0 MASTER_ADDR=h", false),
            ("LOCAL_RANK=1 MASTER_ADDR=h MASTER_PORT=1", false),
            ("RANK=1 WORLD_SIZE=4 LOCAL_RANK=1 MASTER_ADDR=h", false),
            ("WORLD_SIZE=4 LOCAL_RANK=1", true),
            ("WORLD_SIZE=4 MASTER_ADDR=h MASTER_PORT=1", true),
        ] {
            let half = half_a_rank(&env(text)).unwrap();
            assert_eq!(half.is_some(), is_half, "{text}");
            assert!(half.is_none_or(|error| error.exit_code() == 2));
        }
        assert!(rank_place(&env("RANK=2 WORLD_SIZE=2")).is_err());
        assert!(rank_place(&env("RANK=0 WORLD_SIZE=2 MASTER_PORT=70000")).is_err());
    }

    #[test]
    fn typed_numbers_must_agree_with_the_launcher() {
        let place = |text: &str| rank_place(&env(text)).unwrap().unwrap();
        for (text, here, world, wrong) in [
            (
                "RANK=0 WORLD_SIZE=4 LOCAL_WORLD_SIZE=2",
                Some(2),
                Some(4),
                None,
            ),
            ("RANK=0 WORLD_SIZE=4 LOCAL_WORLD_SIZE=2", None, None, None),
            ("RANK=0 WORLD_SIZE=4", Some(1), None, None),
            (
                "RANK=0 WORLD_SIZE=4 LOCAL_WORLD_SIZE=2",
                Some(3),
                None,
                Some("one rank of 2 on this host"),
            ),
            (
                "RANK=0 WORLD_SIZE=4",
                Some(2),
                None,
                Some("add --nnodes \"$WORLD_SIZE\""),
            ),
            ("RANK=0 WORLD_SIZE=4", None, Some(1), Some("one of 4 ranks")),
            (
                "SLURM_PROCID=1 SLURM_NTASKS=2 SLURM_NNODES=2 SLURM_LOCALID=0 SLURM_STEP_ID=0",
                Some(2),
                None,
                Some("srun --ntasks-per-node=2"),
            ),
            (
                "SLURM_PROCID=2 SLURM_NTASKS=3 SLURM_NNODES=2 SLURM_NODEID=1 SLURM_LOCALID=0 SLURM_STEP_ID=0 SLURM_STEP_TASKS_PER_NODE=2,1",
                Some(1),
                None,
                None,
            ),
            (
                "OMPI_COMM_WORLD_RANK=1 OMPI_COMM_WORLD_SIZE=2 OMPI_COMM_WORLD_LOCAL_RANK=1 OMPI_COMM_WORLD_LOCAL_SIZE=2",
                Some(4),
                None,
                Some("contradicts Open MPI"),
            ),
        ] {
            let checked = place(text).check(here, world, false);
            match (checked, wrong) {
                (Ok(()), None) => {}
                (Err(error), Some(words)) => {
                    assert_eq!(error.exit_code(), 2);
                    assert!(error.render().contains(words), "{text}: {}", error.render());
                }
                (got, _) => panic!("{text}: {got:?}"),
            }
        }
    }
}
