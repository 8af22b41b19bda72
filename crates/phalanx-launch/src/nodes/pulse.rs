//! Heartbeats between the launchers, through the store. Its host watches the heartbeats of the others, and the others watch its
//! answers. `silence.rs` decides when a launcher is lost.
//!
//! | thread    | on          | does                                                         |
//! |-----------|-------------|--------------------------------------------------------------|
//! | `nodes`   | all nodes   | waits for the verdict                                        |
//! | `beat`    | node 0      | checks which nodes have sent heartbeats, and how long the others have been silent |
//! | `beat`    | other nodes | sends heartbeats, each until the store has answered          |
//! | `silence` | other nodes | checks how long no answer has come                           |

use std::collections::{BTreeSet, HashSet};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::sleep;
use std::time::{Duration, Instant};

use phalanx_store::{ErrorKind as StoreKind, Store, Will};
use rustix::process::setpriority_process;

use super::silence::{BEAT, LOOK, Silence};
use crate::lock;
use crate::place::LOST_AFTER;

/// If a node has been silent for this long, errors of ranks that lost its ranks are blamed on the node.
pub(super) const SILENT: Duration = Duration::from_secs(1);
/// Heartbeats between two checks of [`gone_key`].
const CHECK_EVERY: u32 = 5;
/// The value of [`gone_key`] of a node whose connection ended.
const CLOSED: &[u8] = b"closed";
/// See [`gone_key`].
pub(super) const GONE: &str = "launch/gone/";
/// Keys of the nodes that have sent a heartbeat since the last check.
pub(super) const BEATEN: &str = "launch/beat/";

/// The key that says that the node is silent: see the table in `mod.rs`.
pub(super) fn gone_key(node: usize) -> String {
    format!("{GONE}{node}")
}

pub(super) fn beat_key(node: usize) -> String {
    format!("{BEATEN}{node}")
}

/// How long the others have been silent, shared by this launcher's threads.
pub(super) struct Heartbeats {
    pub(super) silence: Mutex<Silence>,
    start: Instant,
}

impl Heartbeats {
    pub(super) fn new(nodes: usize) -> Heartbeats {
        Heartbeats {
            silence: Mutex::new(Silence::new(nodes, LOST_AFTER, Duration::ZERO)),
            start: Instant::now(),
        }
    }

    /// Starts again with the same limit.
    pub(super) fn watch_again(&self, nodes: usize) {
        let mut silence = lock(&self.silence);
        *silence = Silence::new(nodes, silence.limit(), self.start.elapsed());
    }

    /// Starts to watch this many nodes.
    pub(super) fn watch(&self, nodes: usize, limit: Duration) {
        *lock(&self.silence) = Silence::new(nodes, limit, self.start.elapsed());
    }

    pub(super) fn silent(&self, node: usize) -> Duration {
        lock(&self.silence).of(node)
    }

    /// Watches this many nodes, the new ones from now on.
    pub(super) fn extend(&self, nodes: usize) {
        lock(&self.silence).extend(nodes, self.start.elapsed());
    }

    /// How long a node may be silent before it is lost.
    pub(super) fn limit(&self) -> Duration {
        lock(&self.silence).limit()
    }

    pub(super) fn is_lost(&self, node: usize) -> bool {
        lock(&self.silence).is_lost(node)
    }

    /// Records a heartbeat of `node` if `has_beaten`, and returns whether the node is lost.
    pub(super) fn update(&self, node: usize, has_beaten: bool) -> bool {
        let mut silence = lock(&self.silence);
        // Taken under the lock, so that the times of two threads are in order.
        let now = self.start.elapsed();
        match has_beaten {
            true => silence.beat(node, now),
            false => silence.advance(now),
        }
        silence.is_lost(node)
    }
}

/// What the threads of the heartbeats share.
pub(super) struct Pulse<S> {
    pub(super) store: Arc<S>,
    /// The silence of all nodes, on the host of the store.
    pub(super) beats: Arc<Heartbeats>,
    /// The silence of the host of the store, on the others.
    pub(super) host: Arc<Heartbeats>,
    /// The will for [`gone_key`]; it outlives the threads of an attempt.
    pub(super) gone: Arc<Mutex<Option<Will>>>,
    /// The job has ended.
    pub(super) stop: Arc<AtomicBool>,
    /// False: other threads have taken over.
    pub(super) is_watched: Arc<AtomicBool>,
    /// The number of this launcher, and those of all by node rank, for their keys.
    pub(super) id: usize,
    pub(super) ids: Vec<usize>,
    /// Launchers that are already lost.
    pub(super) lost: BTreeSet<usize>,
}

impl<S: Store> Pulse<S> {
    pub(super) fn is_running(&self) -> bool {
        !self.stop.load(Ordering::Relaxed) && self.is_watched.load(Ordering::Relaxed)
    }

    /// On the host of the store: watches the others until the end, and calls `lost` with each node that is lost, again while
    /// it returns false. After that the node is not watched any more.
    pub(super) fn watch(&self, mut lost: impl FnMut(usize) -> bool) {
        raise_priority();
        let others = self.ids.iter().enumerate();
        let others = others.filter(|(_, id)| **id != self.id && !self.lost.contains(id));
        let mut others: Vec<(usize, usize, String)> = others
            .map(|(node, id)| (node, *id, beat_key(*id)))
            .collect();
        while self.is_running() && !others.is_empty() {
            let keys: Vec<&str> = others.iter().map(|(.., key)| key.as_str()).collect();
            let missing: HashSet<String> = match self.store.wait(&keys, Duration::ZERO) {
                Ok(()) => HashSet::new(),
                Err(error) if error.kind() == StoreKind::Timeout => {
                    error.missing_keys().iter().cloned().collect()
                }
                // The store, which is in this process, has not answered: nothing was checked.
                Err(_) => {
                    sleep(LOOK);
                    continue;
                }
            };
            if missing.len() < keys.len() {
                // A heartbeat that comes in between is dropped, which does not matter.
                let _ = self.store.delete_prefix(BEATEN);
            }
            others.retain(|(node, id, key)| {
                let is_lost = self.beats.update(*node, !missing.contains(key));
                let silent = self.beats.silent(*node);
                if silent >= SILENT {
                    let silent = silent.as_secs_f64().to_string();
                    let _ = self.store.set(&gone_key(*id), silent.as_bytes());
                }
                !(is_lost && lost(*node))
            });
            sleep(LOOK);
        }
    }

    /// On another node: sends heartbeats until the end, and ignores failures. The thread `silence` notices that the host does
    /// not answer, and the thread that waits for the verdict that the store has ended.
    pub(super) fn beat(&self) {
        raise_priority();
        let beat = beat_key(self.id);
        let mut count = 0_u32;
        while self.is_running() {
            let began = Instant::now();
            if count.is_multiple_of(CHECK_EVERY) {
                let _ = self.check_will();
            }
            count = count.wrapping_add(1);
            if self.store.set(&beat, b"").is_ok() {
                self.host.update(0, true);
            }
            sleep(BEAT.saturating_sub(began.elapsed()));
        }
    }

    fn check_will(&self) -> phalanx_store::Result<()> {
        let gone = gone_key(self.id);
        let mut will = lock(&self.gone);
        if self.store.try_get(&gone)?.is_some() {
            // This node is alive: a connection broke, or its heartbeats were late.
            *will = None;
            self.store.delete(&gone)?;
        }
        if will.is_none() {
            *will = self.store.leave_will(&gone, CLOSED)?;
        }
        Ok(())
    }

    /// On another node: whether the host of the store is lost before the end.
    pub(super) fn is_host_lost(&self) -> bool {
        raise_priority();
        while self.is_running() {
            if self.host.update(0, false) {
                return true;
            }
            sleep(LOOK);
        }
        false
    }
}

/// Gives this thread priority over those that compute, where that is permitted.
pub(super) fn raise_priority() {
    let _ = setpriority_process(None, -20);
}

#[cfg(test)]
mod tests {
    use phalanx_store::MemStore;

    use super::*;

    /// The threads of launcher `id`.
    fn pulse(store: &Arc<MemStore>, id: usize, ids: &[usize]) -> Pulse<MemStore> {
        Pulse {
            store: Arc::clone(store),
            beats: Arc::new(Heartbeats::new(ids.len())),
            host: Arc::new(Heartbeats::new(1)),
            gone: Arc::default(),
            stop: Arc::default(),
            is_watched: Arc::new(AtomicBool::new(true)),
            id,
            ids: ids.to_vec(),
            lost: BTreeSet::new(),
        }
    }

    #[test]
    fn a_node_that_beats_is_not_lost_and_one_that_stops_is() {
        let store = Arc::new(MemStore::new());
        let [node_0, node_1] = [0, 4].map(|id| pulse(&store, id, &[0, 4]));
        let (stop_0, stop_1) = (node_0.stop.clone(), node_1.is_watched.clone());
        let mut lost = Vec::new();
        std::thread::scope(|scope| {
            let hears = scope.spawn(|| {
                node_0.watch(|node| {
                    lost.push(node);
                    true
                });
            });
            scope.spawn(|| node_1.beat());
            let beat = beat_key(4);
            store.wait(&[&beat], Duration::from_secs(60)).unwrap();
            // Node 0 removes heartbeats that it has seen.
            while store.try_get(&beat).unwrap().is_some() {
                sleep(LOOK);
            }
            // Here the test ends in time even if it is not noticed.
            stop_1.store(false, Ordering::Relaxed);
            let until = Instant::now() + Duration::from_secs(60);
            while !hears.is_finished() && Instant::now() < until {
                sleep(LOOK);
            }
            stop_0.store(true, Ordering::Relaxed);
        });
        assert_eq!(lost, [1]);
        assert!(node_0.beats.is_lost(1));
        // Launchers whose ranks have lost node 1 sooner learn why.
        let silent = store.try_get(&gone_key(4)).unwrap().unwrap();
        let silent: f64 = String::from_utf8(silent).unwrap().parse().unwrap();
        assert!(silent >= SILENT.as_secs_f64(), "{silent}");
        // Node 1 is alive after all.
        node_1.check_will().unwrap();
        assert_eq!(store.try_get(&gone_key(4)).unwrap(), None);
    }

    /// Two nodes are lost at once: each is reported, again after a failure, and the living one is not.
    #[test]
    fn each_of_several_lost_nodes_is_reported() {
        let store = Arc::new(MemStore::new());
        let ids = [0, 3, 5, 8];
        let node_0 = pulse(&store, 0, &ids);
        let (stop, over) = (node_0.stop.clone(), AtomicBool::new(false));
        let reported = Mutex::new(Vec::new());
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while !over.load(Ordering::Relaxed) {
                    store.set(&beat_key(5), b"").unwrap();
                    sleep(BEAT / 2);
                }
            });
            for id in [3, 8] {
                store.set(&beat_key(id), b"").unwrap();
            }
            scope.spawn(|| {
                node_0.watch(|node| {
                    let mut reported = lock(&reported);
                    reported.push(node);
                    reported.len() > 1
                });
            });
            let until = Instant::now() + Duration::from_secs(60);
            while lock(&reported).len() < 3 && Instant::now() < until {
                sleep(LOOK);
            }
            sleep(4 * LOOK);
            stop.store(true, Ordering::Relaxed);
            over.store(true, Ordering::Relaxed);
        });
        let mut reported = reported.into_inner().unwrap();
        reported.sort_unstable();
        assert_eq!(reported, [1, 1, 3]);
    }
}
