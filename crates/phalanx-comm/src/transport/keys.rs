//! The keys of a group's ranks in the store while it lives, and their removal.
//!
//! A store holds at most 128 Ki keys, and a job may make groups as long as it runs. A
//! rank removes its keys when it leaves the group. A rank that died cannot, so a rank
//! that leaves a poisoned group removes those of all its ranks: no rank needs them
//! then.

use std::sync::mpsc::channel;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use phalanx_store::Store;

use super::AbortHandle;
use crate::sync::lock;

/// How long leaving a group waits for the store: its host may have vanished.
const PATIENCE: Duration = Duration::from_millis(500);

/// The topics of a group's keys while it lives.
const TOPICS: [&str; 3] = ["flight", "stall", "monitored"];

/// The keys of one rank in one group. All code that may write one holds this; dropping
/// the last handle removes them.
pub(crate) struct GroupKeys {
    store: Arc<dyn Store>,
    abort: AbortHandle,
    /// Generation, job and group as part of a key.
    place: String,
    mine: Mutex<Mine>,
}

/// The keys that this rank has to remove.
#[derive(Default)]
struct Mine {
    keys: Vec<String>,
    prefixes: Vec<String>,
}

impl GroupKeys {
    /// `job` distinguishes this job from others that used the same store.
    pub(crate) fn new(
        store: Arc<dyn Store>,
        (generation, group, job): (u32, u32, u64),
        abort: AbortHandle,
    ) -> GroupKeys {
        GroupKeys {
            store,
            abort,
            place: format!("{generation}/{job:016x}/{group}"),
            mine: Mutex::default(),
        }
    }

    pub(crate) fn store(&self) -> &dyn Store {
        &*self.store
    }

    /// The key of this group for one of the [`TOPICS`].
    pub(crate) fn key(&self, topic: &str, name: impl std::fmt::Display) -> String {
        debug_assert!(TOPICS.contains(&topic));
        format!("{topic}/{}/{name}", self.place)
    }

    /// Stores a value until this rank leaves the group.
    pub(crate) fn set(&self, key: &str, value: &[u8]) -> phalanx_store::Result<()> {
        self.note(key);
        self.store.set(key, value)
    }

    /// Increments a number that is kept until this rank leaves the group.
    pub(crate) fn count_up(&self, key: &str) -> phalanx_store::Result<()> {
        self.note(key);
        self.store.add(key, 1).map(drop)
    }

    fn note(&self, key: &str) {
        let mut mine = lock(&self.mine);
        if !mine.keys.iter().any(|known| known == key) {
            mine.keys.push(key.to_owned());
        }
    }

    /// Removes all keys below `prefix` when this rank leaves the group.
    pub(crate) fn remove_at_end(&self, prefix: String) {
        let mut mine = lock(&self.mine);
        mine.prefixes.push(prefix);
    }
}

/// Removes all keys of all groups of a generation that is over.
pub(crate) fn remove_generation(store: &dyn Store, generation: u32, job: u64) {
    for topic in TOPICS {
        if let Err(e) = store.delete_prefix(&format!("{topic}/{generation}/{job:016x}/")) {
            tracing::debug!(
                "cannot remove the keys of generation {generation} from the store: {e}"
            );
            return;
        }
    }
}

impl Drop for GroupKeys {
    fn drop(&mut self) {
        let mine = self.mine.get_mut().unwrap_or_else(PoisonError::into_inner);
        let mut mine = std::mem::take(mine);
        if self.abort.poisoned().is_some() {
            mine.keys.clear();
            mine.prefixes = TOPICS.map(|topic| self.key(topic, "")).into();
        }
        if mine.keys.is_empty() && mine.prefixes.is_empty() {
            return;
        }
        let store = Arc::clone(&self.store);
        let (done, removed) = channel::<()>();
        let removing = std::thread::Builder::new()
            .name("phalanx-keys".to_owned())
            .stack_size(128 << 10)
            .spawn(move || {
                let keys = mine.keys.iter().map(|key| store.delete(key).map(drop));
                let prefixes = mine.prefixes.iter();
                let prefixes = prefixes.map(|prefix| store.delete_prefix(prefix).map(drop));
                if let Err(e) = keys.chain(prefixes).collect::<Result<(), _>>() {
                    tracing::debug!("cannot remove keys of a group from the store: {e}");
                }
                // The rank that waits is the last one that has the store, and closes it.
                drop(store);
                drop(done);
            });
        match removing {
            // The thread sends nothing; the wait ends with it.
            Ok(_) => drop(removed.recv_timeout(PATIENCE)),
            Err(e) => tracing::debug!("cannot start a thread to remove keys: {e}"),
        }
    }
}
