//! What this process is in its job: one [`Place`], from the command line and the environment.
//!
//! Functions of flags and a map of variables; no files, names or sockets.
//!
//! | file | reads |
//! |---|---|
//! | `process.rs` | `RANK` and `WORLD_SIZE`, else a cluster engine's numbers |
//! | `node.rs` | which of how many nodes a launcher is, and where they meet |
//! | `torchrun.rs` | torchrun's flags and the `PET_*` variables that stand for them |
//! | `slurm.rs`, `mpi.rs` | engines that start one process for each rank |
//! | `kubernetes.rs` | engines that start one process on each node |

mod kubernetes;
mod mpi;
mod node;
mod process;
mod slurm;
pub mod torchrun;

use kubernetes::RANKS_PER_NODE;
pub use kubernetes::is_on_modelarts;
pub use mpi::PMI_SOCKET;
pub use node::{Address, LOST_AFTER, Meeting, Node, NodeQuery};
pub use phalanx_base::env::{Env, not_a_number, number, real_env};
pub use process::{Channel, OF_A_RANK, Process, detect, is_under_launcher, rank_place};
pub use slurm::cores as slurm_cores;
#[cfg(any(test, fuzzing))]
pub use {kubernetes::node as among_nodes, slurm::first_host};

use phalanx_comm::PortRange;

use crate::contract::{PORTS_VARIABLE, STARTED_VARIABLE};
use crate::error::{Error, Result, refuse};
use crate::flags::{LaunchCli, RankArgs};

/// What a process is in its job.
#[derive(Clone, Debug, PartialEq)]
pub enum Place {
    /// One rank, which another program has started.
    Rank(Process),
    /// The launcher of one node, which starts its ranks.
    Node(Box<Node>),
}

/// The text of a variable; an empty one counts as unset.
pub fn text<'a>(env: &'a Env, name: &str) -> Option<&'a str> {
    let text = env.get(name).map(String::as_str);
    text.filter(|text| !text.is_empty())
}

/// Whether the variable has more than white space.
pub fn is_set(env: &Env, name: &str) -> bool {
    env.get(name).is_some_and(|text| !text.trim().is_empty())
}

impl Place {
    /// The place of a command that becomes ranks: from a launcher's or cluster's variables, else from `--rank` and
    /// `--world-size`, else from `--nnodes`. `command` is `phalanx train`, or the name of a user's program.
    ///
    /// # Errors
    /// `Usage`, naming the flag or variable.
    pub fn of_ranks(args: &RankArgs, env: &Env, command: &str) -> Result<Place> {
        if let Some(rank) = started_rank(args, env)? {
            return Ok(Place::Rank(rank));
        }
        let here = local_ranks(args, env)?;
        if let Some(rank) = typed_rank(args, here)? {
            return Ok(Place::Rank(rank));
        }
        if args.world_size.is_some() {
            return Ok(Place::Node(Box::new(Node::alone(here))));
        }
        // With --nproc-per-node above 1 the ranks are started here.
        if here == 1 && !has_nodes(args, env) {
            process::check_rank_variables(env)?;
        }
        let cli = &LaunchCli {
            nodes: args.nodes.clone(),
            ..LaunchCli::default()
        };
        let command = Some(command);
        let mut node = NodeQuery { env, cli, command }.node(here)?;
        let flags = [
            (&args.nodes.node_rank, "--node-rank"),
            (&args.nodes.master_addr, "--master-addr"),
            (&args.nodes.master_port, "--master-port"),
        ];
        let typed = flags.iter().find(|(text, _)| text.is_some());
        if let (None, None, Some((_, flag))) = (&node.meeting, &args.nodes.nnodes, typed) {
            refuse!("{flag} requires --nnodes, the number of nodes");
        }
        // Ranks of our own need none.
        node.master_port = None;
        Ok(Place::Node(Box::new(node)))
    }
}

/// Number of ranks that a command starts on this node.
pub fn local_ranks(args: &RankArgs, env: &Env) -> Result<usize> {
    let typed = args.nproc_per_node;
    typed.map_or_else(|| torchrun::local_ranks(env, &None, crate::cores()), Ok)
}

/// The ports of a rank for other hosts. A launcher of ours has left out those that its ranks may not use.
pub fn ports_of_rank(args: &RankArgs, env: &Env) -> Result<Option<PortRange>> {
    match is_under_launcher(env) && is_set(env, PORTS_VARIABLE) {
        true => Ok(None),
        false => args.nodes.port_range(env),
    }
}

/// Whether `--nnodes` is typed for this process. Ranks that this command started have its arguments too.
fn has_nodes(args: &RankArgs, env: &Env) -> bool {
    args.nodes.nnodes.is_some() && !env.contains_key(STARTED_VARIABLE)
}

/// The rank that another program has started, checked against the command line.
fn started_rank(args: &RankArgs, env: &Env) -> Result<Option<Process>> {
    let is_ours = env.contains_key(STARTED_VARIABLE);
    let world_size = args.world_size.filter(|_| !is_ours);
    let has_nodes = has_nodes(args, env);
    // The only process of its node, which starts the ranks there: `RANK` and `WORLD_SIZE` without `LOCAL_RANK`
    // may count nodes, too.
    let is_node = |rank: &Process| match rank.is_by_variables() {
        true => (has_nodes || is_set(env, RANKS_PER_NODE)) && !is_set(env, "LOCAL_RANK"),
        false => rank.local_world == Some(1) && (has_nodes || args.nproc_per_node > Some(1)),
    };
    let Some(rank) = rank_place(env)?.filter(|rank| !is_node(rank)) else {
        return Ok(None);
    };
    rank.check(args.nproc_per_node, world_size, has_nodes)?;
    if !is_ours {
        rank.check_node_flags(&args.nodes)?;
    }
    let is_found = rank.is_by_variables() || rank.master_addr.is_some();
    if args.init_method == "env://" && !is_found && rank.channel(env).is_none() {
        return Err(Error::usage(format!(
            "{} started {} ranks, and does not say on which host rank 0 runs",
            rank.source, rank.world
        ))
        .note("fix", "set MASTER_ADDR to that host in all ranks (mpirun -x MASTER_ADDR=HOST), or add --init-method tcp://HOST:PORT"));
    }
    Ok(Some(rank))
}

/// The rank of `--rank`, one of several that the user starts; `here` ranks would be started on this node.
fn typed_rank(args: &RankArgs, here: usize) -> Result<Option<Process>> {
    let (rank, world_size) = (args.rank.unwrap_or(0), args.world_size.unwrap_or(1));
    let is_by_environment = args.init_method == "env://";
    let wrong = if rank >= world_size {
        format!("--rank {rank} is not below --world-size {world_size}; ranks count from 0")
    } else if let (Some(nodes), true) = (
        &args.nodes.nnodes,
        args.world_size.is_some() || args.rank.is_some(),
    ) {
        format!(
            "--nnodes {nodes} cannot be combined with --rank and --world-size: with --nnodes, this command starts the ranks of its node"
        )
    } else if args.world_size.is_none() && !is_by_environment && here == 1 {
        // Ranks that are started here get the init method themselves.
        format!(
            "--init-method {} requires --world-size N, the number of ranks that you start",
            args.init_method
        )
    } else if args.world_size.is_none() && args.rank.is_some() {
        format!("--rank {rank} requires --world-size N, the number of ranks that you start")
    } else if world_size == 1 {
        return Ok(None);
    } else if here > 1 {
        "--world-size cannot be combined with --nproc-per-node: each process that you start is one rank; use --nnodes for several ranks per node".to_owned()
    } else if is_by_environment {
        format!(
            "--world-size {world_size} requires --init-method tcp://HOST:PORT, the same for all ranks"
        )
    } else {
        return Ok(Some(Process::new("--rank", rank, world_size)));
    };
    Err(Error::usage(wrong))
}

#[cfg(test)]
pub(crate) mod tests {
    use clap::{Args as _, FromArgMatches as _};

    use super::*;

    /// Pairs `NAME=value`, separated by blanks.
    pub fn env(text: &str) -> Env {
        let pairs = text.split_whitespace();
        let pairs = pairs.map(|pair| pair.split_once('=').unwrap());
        env_of(&pairs.collect::<Vec<_>>())
    }

    /// Names and values.
    pub fn env_of(pairs: &[(&str, &str)]) -> Env {
        let owned = |(name, text): &(&str, &str)| ((*name).to_owned(), (*text).to_owned());
        pairs.iter().map(owned).collect()
    }

    /// As an elastic PyTorchJob sets them.
    #[test]
    fn a_range_of_nodes_by_variables() {
        let variables = "PET_NNODES=2:4 PET_NPROC_PER_NODE=2 PET_RDZV_BACKEND=c10d PET_RDZV_ENDPOINT=h:7 PET_NODE_RANK=1";
        let command = RankArgs::augment_args(clap::Command::new("phalanx"));
        let args = RankArgs::from_arg_matches(&command.get_matches_from(["phalanx"])).unwrap();
        let place = Place::of_ranks(&args, &env(variables), "phalanx train").unwrap();
        let Place::Node(node) = place else {
            panic!("{place:?}");
        };
        assert!(node.comes_and_goes());
        assert_eq!(node.local_ranks, 2);
        let meeting = node.meeting.unwrap();
        assert_eq!((meeting.least, meeting.nodes), (Some(2), 4));
        assert_eq!((meeting.host.as_str(), meeting.port), ("h", 7));
        assert_eq!((meeting.node_rank, meeting.is_host), (None, Some(false)));
    }

    /// The place of a command with these flags: `rank R of WORLD`, or `N ranks`, perhaps `on node R of NODES at HOST:PORT`.
    fn place(flags: &str, variables: &str) -> Result<String> {
        let command = RankArgs::augment_args(clap::Command::new("phalanx"));
        let words = ["phalanx"].into_iter().chain(flags.split_whitespace());
        let args = RankArgs::from_arg_matches(&command.get_matches_from(words)).unwrap();
        Ok(
            match Place::of_ranks(&args, &env(variables), "phalanx train")? {
                Place::Rank(rank) => format!("rank {} of {}", rank.rank, rank.world),
                Place::Node(node) => {
                    let ranks = format!("{} ranks", node.local_ranks);
                    node.meeting.map_or(ranks.clone(), |m| {
                        let number = m.node_rank.unwrap();
                        format!(
                            "{ranks} on node {number} of {} at {}:{}",
                            m.nodes, m.host, m.port
                        )
                    })
                }
            },
        )
    }

    #[test]
    fn places_by_flags_and_variables() {
        let slurm = "SLURM_STEP_ID=0 SLURM_PROCID=1 SLURM_NODEID=1 SLURM_NTASKS=2 SLURM_NNODES=2 SLURM_LOCALID=0 SLURM_JOB_NODELIST=a[1-2]";
        let nodes = "--nnodes 2 --node-rank 0 --master-addr h";
        for (flags, variables, want) in [
            ("", "", "1 ranks"),
            ("", "PET_NPROC_PER_NODE=3", "3 ranks"),
            ("--nproc-per-node 2", "PET_NPROC_PER_NODE=3", "2 ranks"),
            ("", "NPROC_PER_NODE=3", "3 ranks"),
            ("", "PET_NPROC_PER_NODE=2 NPROC_PER_NODE=3", "2 ranks"),
            ("", "NPROC_PER_NODE=0 DSTACK_GPUS_PER_NODE=4", "4 ranks"),
            ("", "DSTACK_GPUS_PER_NODE=0", "1 ranks"),
            (
                "",
                "NPROC_PER_NODE=8 RANK=1 WORLD_SIZE=2 MASTER_ADDR=h MASTER_PORT=7",
                "8 ranks on node 1 of 2 at h:7",
            ),
            (
                "",
                "NPROC_PER_NODE=8 RANK=1 WORLD_SIZE=2 LOCAL_RANK=1 MASTER_ADDR=h",
                "rank 1 of 2",
            ),
            (
                "--nproc-per-node 2",
                "LWS_GROUP_SIZE=2 LWS_WORKER_INDEX=1 LWS_LEADER_ADDRESS=h",
                "2 ranks on node 1 of 2 at h:29500",
            ),
            ("--nproc-per-node 2 --init-method tcp://h:1", "", "2 ranks"),
            (nodes, "", "1 ranks on node 0 of 2 at h:29500"),
            (
                "--rank 1 --world-size 2 --init-method tcp://h:1",
                "",
                "rank 1 of 2",
            ),
            ("", "RANK=1 WORLD_SIZE=2 LOCAL_RANK=1", "rank 1 of 2"),
            // They count nodes.
            (
                "--nnodes 2",
                "RANK=1 WORLD_SIZE=2 MASTER_ADDR=h",
                "1 ranks on node 1 of 2 at h:29500",
            ),
            ("", slurm, "rank 1 of 2"),
            (
                "--nproc-per-node 2",
                slurm,
                "2 ranks on node 1 of 2 at a1:29500",
            ),
            (
                "--nnodes 2 --master-port 7",
                slurm,
                "1 ranks on node 1 of 2 at a1:7",
            ),
            (
                "",
                "OMPI_COMM_WORLD_RANK=1 OMPI_COMM_WORLD_SIZE=2",
                "rank 1 of 2",
            ),
            // A rank that the command itself has started, with its own arguments.
            (
                nodes,
                "RANK=1 WORLD_SIZE=2 LOCAL_RANK=1 PHALANX_STARTED_NS=1",
                "rank 1 of 2",
            ),
        ] {
            assert_eq!(
                place(flags, variables).unwrap(),
                want,
                "{flags} {variables}"
            );
        }
        // Alone, even on a cluster.
        let alone = "SLURM_JOB_NUM_NODES=2";
        assert_eq!(place("--world-size 1", alone).unwrap(), "1 ranks");
        for (flags, variables, want) in [
            ("", alone, "srun did not start this process"),
            (
                "--rank 2 --world-size 2",
                "",
                "--rank 2 is not below --world-size 2",
            ),
            ("--rank 0", "", "--rank 0 requires --world-size N"),
            ("--init-method tcp://h:1", "", "requires --world-size N"),
            (
                "--world-size 2",
                "",
                "requires --init-method tcp://HOST:PORT",
            ),
            (
                "--world-size 2 --nproc-per-node 2 --init-method tcp://h:1",
                "",
                "cannot be combined with --nproc-per-node",
            ),
            ("--nnodes 2 --rank 0", "", "cannot be combined with --rank"),
            ("--node-rank 0", "", "--node-rank requires --nnodes"),
            ("", "WORLD_SIZE=2 LOCAL_RANK=0", "but not RANK"),
            (
                "--nnodes 2",
                "RANK=0 WORLD_SIZE=2 LOCAL_RANK=0",
                "--nnodes contradicts",
            ),
            ("--world-size 3", slurm, "--world-size 3 contradicts Slurm"),
            (
                "",
                "PMI_RANK=1 PMI_SIZE=2",
                "does not say on which host rank 0 runs",
            ),
        ] {
            let error = place(flags, variables).unwrap_err();
            assert!(
                error.chain().contains(want),
                "{flags} {variables}: {}",
                error.chain()
            );
            assert_eq!(error.exit_code(), 2, "{flags} {variables}");
        }
    }
}
