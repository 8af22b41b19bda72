//! The variables of MPI's launchers: Open MPI, and those that speak PMI (MPICH, Intel MPI, Flux).

use super::{Env, Process, number};
use crate::error::{Result, refuse};

/// The number of PMI's inherited socket.
pub const PMI_SOCKET: &str = "PMI_FD";

/// Number of processes, a process's number, its number on its host, number of processes there.
const VARIABLES: [(&str, [&str; 4]); 2] = [
    (
        "Open MPI",
        [
            "OMPI_COMM_WORLD_SIZE",
            "OMPI_COMM_WORLD_RANK",
            "OMPI_COMM_WORLD_LOCAL_RANK",
            "OMPI_COMM_WORLD_LOCAL_SIZE",
        ],
    ),
    (
        "PMI",
        ["PMI_SIZE", "PMI_RANK", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"],
    ),
];

/// This process, if one of them started it. `first_host` is the first of the Slurm job around it.
pub fn process(env: &Env, first_host: &Option<String>) -> Result<Option<Process>> {
    for (engine, [size, rank, local_rank, local_size]) in VARIABLES {
        let Some(world) = number(env, size)? else {
            continue;
        };
        let Some(rank) = number(env, rank)? else {
            refuse!("the environment sets {size} but not {rank}");
        };
        let local = number(env, local_rank)?.zip(number(env, local_size)?);
        return Process::of_engine(engine, rank, world, local, first_host.clone()).map(Some);
    }
    Ok(None)
}
