//! Ranks as threads of this process, like `torch.multiprocessing.spawn`.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;

use phalanx_base::panic_text;
use phalanx_comm::{GroupOptions, MAX_LOCAL_RANKS, ProcessGroup};

/// The error of a rank's function.
pub type Cause = Box<dyn std::error::Error + Send + Sync>;

/// Why [`spawn`] failed: the rank that failed first, and its error.
#[derive(Debug, thiserror::Error)]
#[error("rank {rank} {}: {cause}", if *.panicked { "panicked" } else { "failed" })]
pub struct SpawnError {
    rank: usize,
    panicked: bool,
    #[source]
    cause: Cause,
}

impl SpawnError {
    /// The rank that failed first; the others were ended because of it.
    pub fn rank(&self) -> usize {
        self.rank
    }

    /// Whether it panicked instead of returning an error.
    pub fn panicked(&self) -> bool {
        self.panicked
    }
}

type First = Arc<Mutex<Option<SpawnError>>>;

/// Ranks that [`spawn`] did not wait for.
#[derive(Debug)]
#[must_use = "without `join`, ranks may be cut off when the program ends, and their errors are lost"]
pub struct Spawned {
    threads: Vec<JoinHandle<()>>,
    first: First,
}

impl Spawned {
    /// Waits for all ranks.
    ///
    /// *Blocks until* each has returned. A collective that lacks a rank ends
    /// by its own deadline or by the failed rank's abort.
    ///
    /// # Errors
    ///
    /// That of the rank that failed first.
    pub fn join(self) -> Result<(), SpawnError> {
        for thread in self.threads {
            // Panics of the function are caught inside.
            let _ = thread.join();
        }
        let mut first = self.first.lock().unwrap_or_else(PoisonError::into_inner);
        first.take().map_or(Ok(()), Err)
    }
}

/// Runs `rank(group, &args)` on `nprocs` ranks, each a thread of its own with
/// its handle of one process group, which knows `rank()` and `world_size()`.
///
/// With `join` it returns when all ranks have; without, at once, and
/// [`Spawned::join`] waits. When a rank fails or panics, the group is aborted,
/// so that the others leave their collectives with that cause.
///
/// Unlike in Python, the ranks share this process: nothing is pickled, and all borrow
/// `args`. `phalanx launch` starts ranks as processes.
///
/// ```
/// use phalanx::comm::{ProcessGroup, ReduceOp};
///
/// fn demo(group: ProcessGroup, add: &f32) -> Result<(), Box<dyn std::error::Error + Send + Sync>> {
///     let mut value = [group.rank() as f32 + add];
///     group.all_reduce(&mut value, ReduceOp::Sum)?;
///     assert_eq!(value, [10.0 + 11.0]);
///     Ok(())
/// }
///
/// # fn main() -> Result<(), phalanx::SpawnError> {
/// phalanx::spawn(demo, 10.0, 2, true)?.join()
/// # }
/// ```
///
/// # Errors
///
/// With `join`, that of the rank that failed first; also when the system
/// refuses a thread, or there are to be no ranks or more than
/// [`MAX_LOCAL_RANKS`].
pub fn spawn<A>(
    rank: impl Fn(ProcessGroup, &A) -> Result<(), Cause> + Send + Sync + 'static,
    args: A,
    nprocs: usize,
    join: bool,
) -> Result<Spawned, SpawnError>
where
    A: Send + Sync + 'static,
{
    if !(1..=MAX_LOCAL_RANKS).contains(&nprocs) {
        return Err(SpawnError {
            rank: 0,
            panicked: false,
            cause: format!("{nprocs} ranks cannot be spawned; 1 to {MAX_LOCAL_RANKS} can").into(),
        });
    }
    let shared = Arc::new((rank, args));
    let first = First::default();
    let mut spawned = Spawned {
        threads: Vec::with_capacity(nprocs),
        first: Arc::clone(&first),
    };
    let mut groups = ProcessGroup::threads(nprocs, GroupOptions::default()).into_iter();
    while let Some(group) = groups.next() {
        let number = group.rank();
        let (shared, first) = (Arc::clone(&shared), Arc::clone(&first));
        let thread = std::thread::Builder::new()
            .name(format!("phalanx-rank-{number}"))
            .spawn(move || run(group, &shared.0, &shared.1, &first));
        match thread {
            Ok(thread) => spawned.threads.push(thread),
            Err(refused) => {
                // The ranks that run already must not wait for this one.
                keep(&spawned.first, number, false, Box::new(refused));
                groups
                    .by_ref()
                    .for_each(|group| group.abort("a rank could not be started"));
            }
        }
    }
    if join {
        let first = Arc::clone(&spawned.first);
        spawned.join()?;
        return Ok(Spawned {
            threads: Vec::new(),
            first,
        });
    }
    Ok(spawned)
}

/// A rank's life.
fn run<A>(
    group: ProcessGroup,
    rank: &impl Fn(ProcessGroup, &A) -> Result<(), Cause>,
    args: &A,
    first: &First,
) {
    let own = group.clone();
    let number = own.rank();
    let outcome = catch_unwind(AssertUnwindSafe(|| rank(group, args)));
    let (panicked, cause) = match outcome {
        Ok(Ok(())) => return,
        Ok(Err(cause)) => (false, cause),
        Err(panic) => (true, panic_text(&*panic).into()),
    };
    let text = cause.to_string();
    // Kept before the others hear of it: what they fail with then comes later.
    keep(first, number, panicked, cause);
    own.abort(&text);
}

fn keep(first: &First, rank: usize, panicked: bool, cause: Cause) {
    first
        .lock()
        .unwrap_or_else(PoisonError::into_inner)
        .get_or_insert(SpawnError {
            rank,
            panicked,
            cause,
        });
}

#[cfg(test)]
mod tests {
    use super::*;
    use phalanx_comm::ReduceOp;

    #[test]
    fn the_first_failure_ends_all_and_is_reported() {
        for panics in [false, true] {
            let outcome = spawn(
                |group, panics| {
                    if group.rank() == 1 {
                        assert!(!panics, "on purpose");
                        return Err("on purpose".into());
                    }
                    // Without the abort this would wait for its whole deadline.
                    group.barrier()?;
                    Ok(())
                },
                panics,
                3,
                true,
            );
            let error = outcome.expect_err("rank 1 fails");
            assert_eq!((error.rank(), error.panicked()), (1, panics));
            assert!(error.to_string().contains("on purpose"), "{error}");
        }
    }

    #[test]
    fn without_join_the_ranks_run_on() {
        let (send, sums) = std::sync::mpsc::channel();
        let (go, wait) = std::sync::mpsc::channel::<()>();
        let wait = Mutex::new(wait);
        let spawned = spawn(
            move |group, send: &Mutex<std::sync::mpsc::Sender<usize>>| {
                if group.rank() == 0 {
                    // Until the caller has come back from spawn.
                    wait.lock().map_err(|_| "poisoned")?.recv()?;
                }
                let mut sum = [1.0f32];
                group.all_reduce(&mut sum, ReduceOp::Sum)?;
                send.lock().map_err(|_| "poisoned")?.send(sum[0] as usize)?;
                Ok(())
            },
            Mutex::new(send),
            2,
            false,
        )
        .expect("started");
        go.send(()).expect("rank 0 waits");
        spawned.join().expect("both succeed");
        assert_eq!(sums.iter().collect::<Vec<_>>(), [2, 2]);
    }

    #[test]
    fn impossible_numbers_of_ranks_are_refused() {
        for ranks in [0, MAX_LOCAL_RANKS + 1] {
            let error = spawn(|_, ()| Ok(()), (), ranks, true).expect_err("refused");
            assert!(error.to_string().contains("1 to 1024"), "{error}");
        }
    }
}
