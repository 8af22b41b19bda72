//! One first cause for the ranks of all hosts.
//!
//! Shared memory has one first cause per host. When ranks of two hosts fail at the same
//! time, each host would keep its own, and ranks would blame different ones. So a rank
//! that poisons a group on several hosts first writes the cause to the store, by
//! compare-and-set: the first one stays, and all ranks use it. Only then is memory
//! poisoned and the cause sent over the control connections.
//!
//! The store itself may have just died. After [`PATIENCE`] without an answer each host
//! uses the cause that it knows.

use std::sync::Arc;
use std::sync::mpsc::channel;
use std::time::Duration;

use phalanx_store::Store;

use super::poison::Poison;

/// How long an abort waits for the store. Part of the 100 ms within which all ranks
/// must learn of it.
const PATIENCE: Duration = Duration::from_millis(40);

/// Agreement of the ranks of one group on the first cause.
pub(super) struct FirstCause {
    store: Arc<dyn Store>,
    key: String,
}

impl FirstCause {
    /// `instance` distinguishes this forming from others with the same generation and
    /// group, as in a store file that outlived its job.
    pub(super) fn new(
        store: Arc<dyn Store>,
        generation: u32,
        group: u32,
        instance: u64,
    ) -> FirstCause {
        FirstCause {
            store,
            key: format!("abort/{generation}/{group}/{instance:016x}"),
        }
    }

    /// Records `cause` unless there is one already; returns the recorded one.
    pub(super) fn agree(&self, cause: &Poison) -> Poison {
        let (sender, receiver) = channel();
        let (store, key) = (Arc::clone(&self.store), self.key.clone());
        let mine = encode(cause);
        // On a separate thread: a store whose host vanished may take much longer to
        // fail than an abort may take.
        let asked = std::thread::Builder::new()
            .name("phalanx-abort".to_owned())
            .stack_size(128 << 10)
            .spawn(move || {
                let stored = store.compare_set(&key, None, &mine);
                drop(store);
                let _ = sender.send(stored);
            });
        let answer = match asked {
            Ok(_) => receiver.recv_timeout(PATIENCE),
            Err(e) => {
                tracing::debug!("cannot start a thread to record the cause: {e}");
                return cause.clone();
            }
        };
        match answer {
            Ok(Ok(stored)) => decode(&stored).unwrap_or_else(|| cause.clone()),
            Ok(Err(e)) => {
                tracing::debug!("the store did not record the cause: {e}");
                cause.clone()
            }
            Err(_) => {
                tracing::debug!("the store did not record the cause within {PATIENCE:?}");
                cause.clone()
            }
        }
    }
}

pub(super) fn encode(poison: &Poison) -> Vec<u8> {
    format!("{}\n{}", poison.origin_rank, poison.cause).into_bytes()
}

/// Parses what another rank wrote; `None` if it is invalid.
pub(super) fn decode(bytes: &[u8]) -> Option<Poison> {
    let text = String::from_utf8_lossy(bytes);
    let (rank, cause) = text.split_once('\n')?;
    Some(Poison::new(rank.parse().ok()?, cause))
}

#[cfg(test)]
mod tests {
    use super::*;
    use phalanx_store::MemStore;

    #[test]
    fn the_first_of_many_wins_for_all() {
        let store: Arc<dyn Store> = Arc::new(MemStore::new());
        let first = |instance| FirstCause::new(Arc::clone(&store), 3, 0, instance);
        let agreed: Vec<Poison> = std::thread::scope(|scope| {
            let ranks: Vec<_> = (0..8)
                .map(|rank| {
                    let first = first(7);
                    let cause = Poison::new(rank, format!("cause\nof {rank}"));
                    scope.spawn(move || first.agree(&cause))
                })
                .collect();
            ranks.into_iter().map(|r| r.join().unwrap()).collect()
        });
        assert!(agreed.iter().all(|a| *a == agreed[0]), "{agreed:?}");
        assert_eq!(
            agreed[0].cause,
            format!("cause\nof {}", agreed[0].origin_rank)
        );
        // Another forming has its own cause.
        let other = Poison::new(1, "other");
        assert_eq!(first(8).agree(&other), other);
    }

    #[test]
    fn garbage_in_the_store_does_not_hide_the_cause() {
        let store = Arc::new(MemStore::new());
        let first = FirstCause::new(store.clone(), 0, 0, 0);
        for garbage in [&b"x"[..], b"\n", b"-1\nx", b"\xff\xff"] {
            store.set(&first.key, garbage).unwrap();
            let mine = Poison::new(2, "mine");
            assert_eq!(first.agree(&mine), mine);
        }
    }
}
