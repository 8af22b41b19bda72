//! One of the processes that were started alike: by a launcher, which sets `RANK`, or by a cluster engine.

use std::path::PathBuf;

use phalanx_comm::PortRange;
use phalanx_comm::transport::machine;
use phalanx_process::proc_stat::starter;
use rustix::process::geteuid;
use sha2::{Digest, Sha256};

use super::{Address, Env, is_set, mpi, number, slurm, text};
use crate::contract::STORE_VARIABLE;
use crate::error::{Error, Result, refuse};
use crate::flags::NodeFlags;

/// The `source` of a process that `RANK` and `WORLD_SIZE` describe.
const BY_RANK: &str = "RANK";

/// Variables that differ between the ranks of a job. The process that started the ranks has other values, or none.
pub const OF_A_RANK: [&str; 7] = [
    "RANK",
    "OMPI_COMM_WORLD_RANK",
    "PMI_RANK",
    "PMIX_NAMESPACE",
    "SLURM_PROCID",
    "SLURM_JOB_ID",
    "SLURM_STEP_ID",
];

/// One of the processes that were started alike: a rank, or the launcher of a node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Process {
    /// Where this comes from: `RANK`, `--rank`, or the engine's name.
    pub source: &'static str,
    /// Its number.
    pub rank: usize,
    /// Number of processes.
    pub world: usize,
    /// Its number on this host.
    pub local_rank: usize,
    /// Number of processes on this host, where known.
    pub local_world: Option<usize>,
    /// Where process 0 (or its launcher) listens, where known.
    pub master_addr: Option<String>,
    /// The port there.
    pub master_port: u16,
}

/// What can carry a token and an address from process 0 to all others.
pub enum Channel {
    /// The MPI library.
    Mpi,
    /// The socket of PMI-1.
    Pmi,
    /// `sbcast`.
    Slurm,
}

/// This process among those that a cluster engine started. An MPI launcher wins over Slurm, as
/// `mpirun` inside a Slurm job inherits the batch script's variables.
pub fn detect(env: &Env) -> Result<Option<Process>> {
    let first_host = slurm::first_host_of_job(env)?;
    match mpi::process(env, &first_host)? {
        Some(process) => Ok(Some(process)),
        None => slurm::process(env, first_host),
    }
}

/// The rank that this process is, if it was started as one: by a launcher
/// (`RANK`, `WORLD_SIZE`), or directly by `srun` or `mpirun`. `None`: it was not, so a
/// command that needs ranks starts its own.
pub fn rank_place(env: &Env) -> Result<Option<Process>> {
    let mut found = match (number(env, "RANK")?, number(env, "WORLD_SIZE")?) {
        (Some(rank), Some(world)) if rank >= world => {
            refuse!("RANK={rank} is not below WORLD_SIZE={world}; ranks count from 0");
        }
        (Some(rank), Some(world)) => Process {
            local_rank: number(env, "LOCAL_RANK")?.unwrap_or(0),
            local_world: number(env, "LOCAL_WORLD_SIZE")?,
            ..Process::new(BY_RANK, rank, world)
        },
        (Some(_), None) => {
            return Err(Error::usage("the environment sets RANK but not WORLD_SIZE")
                .note("fix", "unset RANK, or start through `phalanx launch`"));
        }
        // WORLD_SIZE alone is left behind by many tools; it names no rank.
        (None, _) => match detect(env)? {
            Some(process) if process.world > 1 => process,
            _ => return Ok(None),
        },
    };
    if let Some(host) = text(env, "MASTER_ADDR") {
        found.master_addr = Some(host.to_owned());
    }
    if let Some(port) = number(env, "MASTER_PORT")? {
        // 0 is up to the group: a rank 0 that hosts the store may take any.
        found.master_port = u16::try_from(port)
            .map_err(|_| Error::usage(format!("MASTER_PORT={port} is not a port number")))?;
    }
    Ok(Some(found))
}

/// Whether our launcher has started this process or an ancestor of it.
pub fn is_under_launcher(env: &Env) -> bool {
    env.contains_key(STORE_VARIABLE)
}

/// The error of an environment that describes one rank of several without its number: `WORLD_SIZE`
/// above 1 and `LOCAL_RANK` or `MASTER_ADDR`, but no `RANK`. PyTorch refuses that too; a training
/// of one rank would go unnoticed for hours. `WORLD_SIZE` alone is left behind by many tools and
/// describes no rank.
pub fn check_rank_variables(env: &Env) -> Result<()> {
    let world = number(env, "WORLD_SIZE")?.unwrap_or(0);
    let other = ["LOCAL_RANK", "MASTER_ADDR"].into_iter();
    match (other.clone().find(|name| is_set(env, name)), number(env, "RANK")?) {
        (Some(other), None) if world > 1 => Err(Error::usage(format!(
            "the environment sets WORLD_SIZE={world} and {other} but not RANK: one of {world} ranks would train alone"
        ))
        .note("set", format!("RANK to this process's number, 0 to {}", world - 1))
        .note(
            "or",
            "start through `phalanx launch` or torchrun; unset WORLD_SIZE for a training of its own",
        )),
        _ => Ok(()),
    }
}

impl Process {
    /// Process `rank` of `world`; where it runs is not known.
    pub(super) fn new(source: &'static str, rank: usize, world: usize) -> Process {
        Process {
            source,
            rank,
            world,
            local_rank: 0,
            local_world: None,
            master_addr: None,
            master_port: crate::DEFAULT_PORT,
        }
    }

    /// A process that `engine` started; `local` is its number on its host, and the number of processes there.
    pub(super) fn of_engine(
        engine: &'static str,
        rank: usize,
        world: usize,
        local: Option<(usize, usize)>,
        first_host: Option<String>,
    ) -> Result<Process> {
        if rank >= world {
            return Err(Error::usage(format!(
                "{engine} numbers this process {rank} of {world}; numbers count from 0"
            ))
            .note("fix", "unset its variables, or start through it again"));
        }
        let (local_rank, local_world) = local.unzip();
        Ok(Process {
            local_rank: local_rank.unwrap_or(0),
            local_world,
            // All on one host needs no host name.
            master_addr: match local_world == Some(world) {
                true => Some("127.0.0.1".to_owned()),
                false => first_host,
            },
            ..Process::new(engine, rank, world)
        })
    }

    /// Whether it comes from `RANK` and `WORLD_SIZE`, and not from an engine's own variables.
    pub fn is_by_variables(&self) -> bool {
        self.source == BY_RANK
    }

    /// Whether all processes are known to run on this host.
    pub fn is_on_one_host(&self) -> bool {
        self.local_world == Some(self.world)
    }

    /// The channel of the engine that started it.
    pub fn channel(&self, env: &Env) -> Option<Channel> {
        match self.source {
            "Open MPI" => Some(Channel::Mpi),
            "Slurm" | "PMI" if is_set(env, mpi::PMI_SOCKET) => Some(Channel::Pmi),
            "Slurm" => Some(Channel::Slurm),
            _ => None,
        }
    }

    /// Whether an engine or torchrun started it, and not the user.
    pub fn is_by_engine(&self, env: &Env) -> bool {
        !self.is_by_variables() || env.contains_key("TORCHELASTIC_RUN_ID")
    }

    /// The file in which ranks of this host that an engine started find each other. Its name is made from what identifies the
    /// job. `None`: that is not known.
    pub fn address_file(&self, env: &Env) -> Option<PathBuf> {
        let variables: &[&str] = match self.source {
            "Open MPI" => &["PMIX_NAMESPACE"],
            "Slurm" => &["SLURM_JOB_ID", "SLURM_STEP_ID"],
            BY_RANK => &["TORCHELASTIC_RUN_ID", "MASTER_ADDR", "MASTER_PORT"],
            _ => &[],
        };
        let values: Option<Vec<&str>> = variables.iter().map(|name| text(env, name)).collect();
        let job = match values.filter(|values| !values.is_empty()) {
            Some(values) => values.join(" "),
            None => {
                let (pid, process) = starter(&OF_A_RANK)?;
                format!("{pid} {}", process.started)
            }
        };
        let job = Sha256::digest(format!("{} {job}", machine()));
        let (user, job) = (geteuid().as_raw(), hex::encode(&job[..8]));
        Some(std::env::temp_dir().join(format!("phalanx-{user}-{job}")))
    }

    /// The address that `MASTER_ADDR` and `MASTER_PORT` give; `ports` are those for other hosts.
    pub fn given_address(&self, env: &Env, ports: Option<PortRange>) -> Address {
        let port = Some(self.master_port).filter(|port| *port > 0);
        Address {
            host: text(env, "MASTER_ADDR").map(str::to_owned),
            port: port.filter(|_| is_set(env, "MASTER_PORT")),
            ports,
        }
    }

    /// The error of `flag`, which says something else than what this rank was started with.
    fn contradicted_by(&self, flag: &str, ranks: &str) -> Error {
        let who = match self.is_by_variables() {
            true => format!(
                "the environment (RANK={}, WORLD_SIZE={})",
                self.rank, self.world
            ),
            false => self.source.to_owned(),
        };
        Error::usage(format!("{flag} contradicts {who}: this process is {ranks}"))
    }

    /// Checks the numbers of ranks on the command line against those that this rank was started with:
    /// `here` on this host, and `world` in all. `has_nodes`: the command line has `--nnodes`.
    ///
    /// # Errors
    ///
    /// Usage, when they contradict each other.
    pub fn check(&self, here: Option<usize>, world: Option<usize>, has_nodes: bool) -> Result<()> {
        let one_of_all = format!("one of {} ranks", self.world);
        if let Some(typed) = world.filter(|typed| *typed != self.world) {
            let error = self.contradicted_by(&format!("--world-size {typed}"), &one_of_all);
            return Err(error.note("fix", "leave it out"));
        }
        if has_nodes {
            let error = self.contradicted_by("--nnodes", &one_of_all);
            return Err(error.note("fix", "leave it out, or start one process on each node"));
        }
        let Some(typed) = here.filter(|typed| *typed != self.local_world.unwrap_or(1)) else {
            return Ok(());
        };
        let one_here = match self.local_world {
            Some(1) => "one rank, the only one on this host".to_owned(),
            Some(ranks) => format!("one rank of {ranks} on this host"),
            None => "one rank".to_owned(),
        };
        let fix = match (self.local_world, self.source) {
            (None, BY_RANK) => {
                "leave it out; or, if RANK and WORLD_SIZE count nodes, add --nnodes \"$WORLD_SIZE\""
                    .to_owned()
            }
            (_, "Slurm") => format!(
                "leave it out; `srun --ntasks-per-node={typed}` starts {typed} ranks on each node"
            ),
            _ => "leave it out; the program that started this process sets the number of ranks"
                .to_owned(),
        };
        let flag = format!("--nproc-per-node {typed}");
        Err(self.contradicted_by(&flag, &one_here).note("fix", fix))
    }

    /// Checks the flags of a node, which are those of a launcher: this rank's command line may only repeat what it knows.
    ///
    /// # Errors
    /// `Usage`, naming the flag and what contradicts it.
    pub(super) fn check_node_flags(&self, flags: &NodeFlags) -> Result<()> {
        let port = self.master_port.to_string();
        let (host, port) = (self.master_addr.as_deref(), Some(port.as_str()));
        for (text, flag, known) in [
            (&flags.node_rank, "--node-rank", None),
            (&flags.master_addr, "--master-addr", host),
            (&flags.master_port, "--master-port", port),
        ] {
            let Some(text) = text.as_deref().filter(|text| Some(*text) != known) else {
                continue;
            };
            let ranks = format!(
                "one of {} ranks, and {flag} is for one launcher on each node",
                self.world
            );
            let error = self.contradicted_by(&format!("{flag} {text}"), &ranks);
            let name = flag[2..].replace('-', "_").to_uppercase();
            return Err(match flag {
                "--node-rank" => error.note("fix", "leave it out"),
                _ => error
                    .note(
                        "fix",
                        format!("leave it out, or set {name}={text} in all ranks instead"),
                    )
                    .note("or", "start one process on each node, and add --nnodes"),
            });
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::env;
    use super::*;

    #[test]
    fn each_job_has_an_address_file_of_its_own() {
        let file = |text: &str| {
            let env = env(text);
            let rank = rank_place(&env).unwrap().unwrap();
            rank.address_file(&env).unwrap()
        };
        let slurm = |job, rank| {
            file(&format!(
                "SLURM_JOB_ID={job} SLURM_STEP_ID=0 SLURM_PROCID={rank} SLURM_LOCALID={rank} SLURM_NNODES=1 SLURM_NTASKS=2"
            ))
        };
        let torchrun = |port, rank| {
            file(&format!(
                "RANK={rank} WORLD_SIZE=2 TORCHELASTIC_RUN_ID=none MASTER_ADDR=a MASTER_PORT={port}"
            ))
        };
        let mpirun = |job, rank| {
            file(&format!(
                "OMPI_COMM_WORLD_RANK={rank} OMPI_COMM_WORLD_SIZE=2 PMIX_NAMESPACE={job}"
            ))
        };
        let hydra = |rank| file(&format!("PMI_RANK={rank} PMI_SIZE=2"));
        let all: std::collections::BTreeSet<PathBuf> = (0..2)
            .flat_map(|rank| {
                let two = |job| [slurm(job, rank), torchrun(job, rank), mpirun(job, rank)];
                [&two(1)[..], &two(2), &[hydra(rank)]].concat()
            })
            .collect();
        assert_eq!(all.len(), 7);
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
                .map(|p| (p.source, p.world, p.rank, p.master_addr.as_deref()));
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
            // No variable says on which host rank 0 runs, unless all run on one.
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
            let half = check_rank_variables(&env(text));
            assert_eq!(half.is_err(), is_half, "{text}");
            assert!(half.err().is_none_or(|error| error.exit_code() == 2));
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

    /// They are a launcher's, and a rank would ignore them.
    #[test]
    fn a_rank_takes_no_address_from_the_command_line() {
        let place = Process {
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
        place
            .check_node_flags(&flags(None, Some("a"), Some("7")))
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
            let error = place.check_node_flags(&typed).unwrap_err();
            assert!(error.chain().starts_with(want), "{}", error.chain());
            assert_eq!(error.exit_code(), 2);
        }
        let error = place
            .check_node_flags(&flags(None, Some("b"), None))
            .unwrap_err();
        assert!(
            error.render().contains("MASTER_ADDR=b"),
            "{}",
            error.render()
        );
    }
}
