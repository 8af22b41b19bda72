//! With how many threads a rank computes, and why.
//!
//! | first that is known | threads |
//! |---|---|
//! | `--threads` | that many |
//! | `SLURM_CPUS_PER_TASK` | the task's cores, divided by the ranks that share the task |
//! | `OMP_NUM_THREADS`, unless it is a launcher's default | that many |
//! | the cores that the ranks of this host may use | an equal part of them |

use std::fmt;

use phalanx_process::proc_stat::starter;
use rustix::process::Pid;
use rustix::thread::sched_getaffinity;

use crate::error::Result;
use crate::format::plural;
use crate::place::{Env, OF_A_RANK, Process, slurm_cores};

/// The cores of this host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cores {
    /// Those that this process may use: its affinity mask, or its cgroup's quota where that is less.
    pub usable: usize,
    /// Those that all ranks of this host may use together: where an engine has given each rank a mask of its own, more
    /// than [`Cores::usable`].
    pub shared: usize,
}

impl Cores {
    /// Those of this process.
    pub fn here() -> Cores {
        let usable = crate::cores();
        let mask = |pid| sched_getaffinity(pid).map_or(0, |set| set.count() as usize);
        // A quota is that of a container around all ranks.
        let has_quota = usable < mask(None);
        let parent =
            starter(&OF_A_RANK).and_then(|(pid, _)| Pid::from_raw(i32::try_from(pid).ok()?));
        let shared = match parent {
            Some(parent) if !has_quota => mask(Some(parent)).max(usable),
            _ => usable,
        };
        Cores { usable, shared }
    }
}

/// A number of compute threads, and where it comes from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Threads {
    /// For each rank.
    pub count: usize,
    /// Where the number comes from.
    pub source: ThreadSource,
}

/// Where a number of compute threads comes from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ThreadSource {
    /// `--threads`.
    Typed,
    /// `SLURM_CPUS_PER_TASK`.
    SlurmTask {
        /// Those of the task, or of all tasks of this host.
        cores: usize,
        /// The ranks that share them.
        ranks: usize,
    },
    /// `OMP_NUM_THREADS`.
    OpenMp,
    /// The cores of this host.
    Cores {
        /// Those that its ranks may use.
        cores: usize,
        /// The ranks that share them.
        ranks: usize,
    },
    /// The cores of the affinity mask that this rank has for itself.
    Mask,
}

impl fmt::Display for ThreadSource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let share = |f: &mut fmt::Formatter<'_>, what: &str, cores: usize, ranks: usize| {
            let cores = plural(cores, "core");
            write!(f, "{cores}{what}, {}", plural(ranks, "rank"))
        };
        match *self {
            ThreadSource::Typed => f.write_str("--threads"),
            ThreadSource::SlurmTask { cores, ranks } => {
                share(f, " of SLURM_CPUS_PER_TASK", cores, ranks)
            }
            ThreadSource::OpenMp => f.write_str("OMP_NUM_THREADS"),
            ThreadSource::Cores { cores, ranks } => share(f, "", cores, ranks),
            ThreadSource::Mask => f.write_str("the affinity mask of this rank"),
        }
    }
}

/// The most threads that a rank may have.
pub fn most(usable: usize) -> usize {
    (4 * usable).max(16)
}

/// The number of threads of each of `ranks` ranks of this host. `place`: the rank that this process is, unless it runs
/// all of them.
///
/// # Errors
///
/// Usage, of a variable of Slurm that is not a number.
pub fn decide(
    typed: Option<usize>,
    env: &Env,
    place: Option<&Process>,
    ranks: usize,
    cores: Cores,
) -> Result<Threads> {
    let ranks = ranks.max(1);
    let made = |count: usize, source| Threads {
        count: count.clamp(1, most(cores.usable)),
        source,
    };
    if let Some(typed) = typed {
        return Ok(made(typed, ThreadSource::Typed));
    }
    if let Some((all, ranks)) = slurm_cores(env, place, ranks)? {
        let source = ThreadSource::SlurmTask { cores: all, ranks };
        return Ok(made((all / ranks).min(cores.usable), source));
    }
    if let Some(threads) = openmp(env) {
        return Ok(made(threads, ThreadSource::OpenMp));
    }
    let part = cores.shared / ranks;
    Ok(match cores.usable <= part && cores.usable < cores.shared {
        true => made(cores.usable, ThreadSource::Mask),
        false => {
            let source = ThreadSource::Cores {
                cores: cores.shared,
                ranks,
            };
            made(part.min(cores.usable), source)
        }
    })
}

/// What `OMP_NUM_THREADS` says, if a user or an engine has set it: torchrun and `phalanx launch` set 1 for several ranks
/// unless it is set, which is about programs that would otherwise use all cores in each rank.
fn openmp(env: &Env) -> Option<usize> {
    // One number a level; nonsense is left to OpenMP.
    let first = env.get("OMP_NUM_THREADS")?.split(',').next()?;
    let threads: usize = first.trim().parse().ok().filter(|threads| *threads > 0)?;
    let is_of_several = env
        .get("LOCAL_WORLD_SIZE")
        .is_some_and(|ranks| ranks.trim() != "1");
    let is_default = threads == 1 && is_of_several && env.contains_key("TORCHELASTIC_RUN_ID");
    (!is_default).then_some(threads)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::place::{rank_place, tests::env};

    /// Variables; `--threads`; ranks of this host; cores of this process and of all ranks; threads and why.
    type Row = (
        &'static str,
        Option<usize>,
        usize,
        (usize, usize),
        usize,
        &'static str,
    );

    #[test]
    fn threads_by_environment() {
        let launched = "RANK=1 WORLD_SIZE=4 LOCAL_RANK=1 LOCAL_WORLD_SIZE=4 TORCHELASTIC_RUN_ID=x";
        let table: &[Row] = &[
            ("", None, 1, (8, 8), 8, "8 cores, 1 rank"),
            ("", None, 4, (8, 8), 2, "8 cores, 4 ranks"),
            ("", None, 3, (8, 8), 2, "8 cores, 3 ranks"),
            // more ranks than cores
            ("", None, 4, (1, 1), 1, "1 core, 4 ranks"),
            // masks: one of its own, one shared by two of four ranks, one of a container around all
            ("", None, 4, (2, 8), 2, "the affinity mask of this rank"),
            ("", None, 4, (1, 8), 1, "the affinity mask of this rank"),
            ("", None, 4, (4, 8), 2, "8 cores, 4 ranks"),
            ("", None, 4, (2, 2), 1, "2 cores, 4 ranks"),
            // typed wins over all
            (
                "SLURM_CPUS_PER_TASK=2 OMP_NUM_THREADS=3",
                Some(5),
                2,
                (8, 8),
                5,
                "--threads",
            ),
            // srun: one rank a task
            (
                "SLURM_STEP_ID=0 SLURM_PROCID=1 SLURM_STEP_NUM_TASKS=4 SLURM_NTASKS=4 SLURM_NNODES=2 SLURM_LOCALID=1 SLURM_CPUS_PER_TASK=3 OMP_NUM_THREADS=9",
                None,
                2,
                (8, 8),
                3,
                "3 cores of SLURM_CPUS_PER_TASK, 1 rank",
            ),
            // the mask is smaller than what is asked for
            (
                "SLURM_STEP_ID=0 SLURM_PROCID=1 SLURM_NTASKS=4 SLURM_CPUS_PER_TASK=6",
                None,
                2,
                (4, 8),
                4,
                "6 cores of SLURM_CPUS_PER_TASK, 1 rank",
            ),
            // the same task, which names itself RANK
            (
                "RANK=1 WORLD_SIZE=4 LOCAL_WORLD_SIZE=2 SLURM_STEP_ID=0 SLURM_PROCID=1 SLURM_NTASKS=4 SLURM_CPUS_PER_TASK=3",
                None,
                2,
                (8, 8),
                3,
                "3 cores of SLURM_CPUS_PER_TASK, 1 rank",
            ),
            // four ranks of a launcher in one task of 8 cores
            (
                "RANK=5 WORLD_SIZE=8 LOCAL_RANK=1 LOCAL_WORLD_SIZE=4 TORCHELASTIC_RUN_ID=x OMP_NUM_THREADS=1 SLURM_STEP_ID=0 SLURM_PROCID=1 SLURM_STEP_NUM_TASKS=2 SLURM_CPUS_PER_TASK=8",
                None,
                4,
                (8, 8),
                2,
                "8 cores of SLURM_CPUS_PER_TASK, 4 ranks",
            ),
            // the shell of sbatch: 2 tasks of 4 cores on this node
            (
                "SLURM_PROCID=0 SLURM_CPUS_PER_TASK=4 SLURM_TASKS_PER_NODE=2(x2),1",
                None,
                2,
                (8, 8),
                4,
                "8 cores of SLURM_CPUS_PER_TASK, 2 ranks",
            ),
            (
                "SLURM_CPUS_PER_TASK=4",
                None,
                2,
                (8, 8),
                2,
                "4 cores of SLURM_CPUS_PER_TASK, 2 ranks",
            ),
            // mpirun in such a job: each rank is a task
            (
                "OMPI_COMM_WORLD_SIZE=4 OMPI_COMM_WORLD_RANK=1 OMPI_COMM_WORLD_LOCAL_RANK=1 OMPI_COMM_WORLD_LOCAL_SIZE=2 SLURM_CPUS_PER_TASK=4 SLURM_TASKS_PER_NODE=2(x2)",
                None,
                2,
                (8, 8),
                4,
                "4 cores of SLURM_CPUS_PER_TASK, 1 rank",
            ),
            (
                "SLURM_CPUS_PER_TASK=",
                None,
                2,
                (8, 8),
                4,
                "8 cores, 2 ranks",
            ),
            // set by a user or an engine
            ("OMP_NUM_THREADS=3", None, 2, (8, 8), 3, "OMP_NUM_THREADS"),
            ("OMP_NUM_THREADS=1", None, 2, (8, 8), 1, "OMP_NUM_THREADS"),
            ("OMP_NUM_THREADS=4,2", None, 2, (8, 8), 4, "OMP_NUM_THREADS"),
            (
                "OMP_NUM_THREADS=1000",
                None,
                2,
                (8, 8),
                32,
                "OMP_NUM_THREADS",
            ),
            (
                "OMP_NUM_THREADS=many",
                None,
                2,
                (8, 8),
                4,
                "8 cores, 2 ranks",
            ),
            ("OMP_NUM_THREADS=0", None, 2, (8, 8), 4, "8 cores, 2 ranks"),
            ("OMP_NUM_THREADS=", None, 2, (8, 8), 4, "8 cores, 2 ranks"),
        ];
        let by_launcher = [
            // torchrun's default and ours
            ("OMP_NUM_THREADS=1", 2, "8 cores, 4 ranks"),
            ("OMP_NUM_THREADS=6", 6, "OMP_NUM_THREADS"),
        ];
        let by_launcher: Vec<(String, usize, &str)> = by_launcher
            .map(|(text, count, why)| (format!("{launched} {text}"), count, why))
            .into();
        let more = by_launcher
            .iter()
            .map(|(text, count, why)| (text.as_str(), None, 4, (8, 8), *count, *why));
        for (text, typed, ranks, (usable, shared), count, why) in table.iter().copied().chain(more)
        {
            let env = env(text);
            let place = rank_place(&env).unwrap();
            let cores = Cores { usable, shared };
            let found = decide(typed, &env, place.as_ref(), ranks, cores).unwrap();
            let said = (found.count, found.source.to_string());
            assert_eq!(
                said,
                (count, why.to_owned()),
                "{text} {typed:?} {ranks} {cores:?}"
            );
        }
    }

    #[test]
    fn a_task_without_a_number_of_cores_is_refused() {
        let env = env("SLURM_CPUS_PER_TASK=some");
        let cores = Cores {
            usable: 1,
            shared: 1,
        };
        let error = decide(None, &env, None, 1, cores).unwrap_err();
        assert_eq!(error.exit_code(), 2);
        assert!(
            error.chain().contains("SLURM_CPUS_PER_TASK=some"),
            "{}",
            error.chain()
        );
    }

    /// The oracle is the kernel, by `taskset` where there is one: a mask that a parent has too is not this process's own.
    #[test]
    fn cores_of_this_process() {
        let cores = Cores::here();
        let usable = std::thread::available_parallelism().unwrap().get();
        assert_eq!(cores.usable, usable);
        assert!(cores.shared >= usable);
    }
}
