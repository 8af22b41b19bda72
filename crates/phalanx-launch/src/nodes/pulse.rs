//! Heartbeats between the launchers, through the store of node 0: its host hears those of all others, which hear its
//! answers. `silence.rs` decides what they mean.
//!
//! | thread    | on          | does                                                         |
//! |-----------|-------------|--------------------------------------------------------------|
//! | `nodes`   | all nodes   | waits for the verdict                                        |
//! | `beat`    | node 0      | looks which nodes have beaten, and for how long others have not |
//! | `beat`    | other nodes | beats; waits for the answer as long as it takes              |
//! | `silence` | other nodes | looks for how long no answer has come                        |

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

/// A node that did not beat for this long is the reason why ranks have lost those of that node.
pub(super) const SILENT: Duration = Duration::from_secs(1);
/// How many beats there are to one check of [`gone_key`].
const CHECK_EVERY: u32 = 5;
/// The value of [`gone_key`] of a node whose connection ended.
const CLOSED: &[u8] = b"closed";
/// See [`gone_key`].
pub(super) const GONE: &str = "launch/gone/";
/// The nodes that have beaten since the host looked last.
pub(super) const BEATEN: &str = "launch/beat/";

/// Says that nothing comes from the node: see the table in `mod.rs`.
pub(super) fn gone_key(node: usize) -> String {
    format!("{GONE}{node}")
}

pub(super) fn beat_key(node: usize) -> String {
    format!("{BEATEN}{node}")
}

/// How long the others have been silent, as this launcher's threads know it.
pub(super) struct Heard {
    pub(super) silence: Mutex<Silence>,
    start: Instant,
}

impl Heard {
    pub(super) fn new(nodes: usize) -> Heard {
        Heard {
            silence: Mutex::new(Silence::new(nodes, LOST_AFTER, Duration::ZERO)),
            start: Instant::now(),
        }
    }

    /// From now on, with the same limit.
    pub(super) fn watch_again(&self, nodes: usize) {
        let mut silence = lock(&self.silence);
        *silence = Silence::new(nodes, silence.limit(), self.start.elapsed());
    }

    /// From now on.
    pub(super) fn watch(&self, nodes: usize, limit: Duration) {
        *lock(&self.silence) = Silence::new(nodes, limit, self.start.elapsed());
    }

    pub(super) fn silent(&self, node: usize) -> Duration {
        lock(&self.silence).of(node)
    }

    /// As many nodes as that, the new ones from now on.
    pub(super) fn extend(&self, nodes: usize) {
        lock(&self.silence).extend(nodes, self.start.elapsed());
    }

    /// After which silence every node is lost.
    pub(super) fn limit(&self) -> Duration {
        lock(&self.silence).limit()
    }

    pub(super) fn is_lost(&self, node: usize) -> bool {
        lock(&self.silence).is_lost(node)
    }

    /// Whether `node` is lost, unless it has beaten.
    pub(super) fn look(&self, node: usize, has_beaten: bool) -> bool {
        let mut silence = lock(&self.silence);
        // Under the lock: the times of two threads are in order.
        let now = self.start.elapsed();
        match has_beaten {
            true => silence.heard(node, now),
            false => silence.look(now),
        }
        silence.is_lost(node)
    }
}

/// The threads' common ground.
pub(super) struct Pulse<S> {
    pub(super) store: Arc<S>,
    /// The silence of all nodes, as the host of the store knows it.
    pub(super) heard: Arc<Heard>,
    /// That of the host of the store.
    pub(super) host: Arc<Heard>,
    /// The will for [`gone_key`]; it outlives the threads of an attempt.
    pub(super) gone: Arc<Mutex<Option<Will>>>,
    /// The end of the job.
    pub(super) stop: Arc<AtomicBool>,
    /// False: other threads watch the next attempt.
    pub(super) is_watched: Arc<AtomicBool>,
    /// The number of this launcher, and those of all, by node: their keys have it.
    pub(super) id: usize,
    pub(super) ids: Vec<usize>,
    /// Those of them that are lost already.
    pub(super) lost: BTreeSet<usize>,
}

impl<S: Store> Pulse<S> {
    pub(super) fn goes_on(&self) -> bool {
        !self.stop.load(Ordering::Relaxed) && self.is_watched.load(Ordering::Relaxed)
    }

    /// On the host of the store: watches the others until the end, and calls `lost` with each node that is lost, again if
    /// it gives false. One that is told of is watched no more.
    pub(super) fn hear(&self, mut lost: impl FnMut(usize) -> bool) {
        raise_priority();
        let others = self.ids.iter().enumerate();
        let others = others.filter(|(_, id)| **id != self.id && !self.lost.contains(id));
        let mut others: Vec<(usize, usize, String)> = others
            .map(|(node, id)| (node, *id, beat_key(*id)))
            .collect();
        while self.goes_on() && !others.is_empty() {
            let keys: Vec<&str> = others.iter().map(|(.., key)| key.as_str()).collect();
            let missing: HashSet<String> = match self.store.wait(&keys, Duration::ZERO) {
                Ok(()) => HashSet::new(),
                Err(error) if error.kind() == StoreKind::Timeout => {
                    error.missing_keys().iter().cloned().collect()
                }
                // Without an answer of the store, which is in this process, this was no look.
                Err(_) => {
                    sleep(LOOK);
                    continue;
                }
            };
            if missing.len() < keys.len() {
                // A beat that comes in between is lost, which does not matter.
                let _ = self.store.delete_prefix(BEATEN);
            }
            others.retain(|(node, id, key)| {
                let is_lost = self.heard.look(*node, !missing.contains(key));
                let silent = self.heard.silent(*node);
                if silent >= SILENT {
                    let silent = silent.as_secs_f64().to_string();
                    let _ = self.store.set(&gone_key(*id), silent.as_bytes());
                }
                !(is_lost && lost(*node))
            });
            sleep(LOOK);
        }
    }

    /// On another node: beats until the end. Each beat is an attempt of its own; that node 0 does not answer is noticed by
    /// its silence, and that its store has ended by the thread that waits for the verdict, after it has read it.
    pub(super) fn beat(&self) {
        raise_priority();
        let beat = beat_key(self.id);
        let mut count = 0_u32;
        while self.goes_on() {
            let began = Instant::now();
            if count.is_multiple_of(CHECK_EVERY) {
                let _ = self.check_will();
            }
            count = count.wrapping_add(1);
            if self.store.set(&beat, b"").is_ok() {
                self.host.look(0, true);
            }
            sleep(BEAT.saturating_sub(began.elapsed()));
        }
    }

    fn check_will(&self) -> phalanx_store::Result<()> {
        let gone = gone_key(self.id);
        let mut will = lock(&self.gone);
        if self.store.try_get(&gone)?.is_some() {
            // This node is alive: a connection broke, or its beats were late.
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
        while self.goes_on() {
            if self.host.look(0, false) {
                return true;
            }
            sleep(LOOK);
        }
        false
    }
}

/// Puts this thread before those that compute, where that is permitted.
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
            heard: Arc::new(Heard::new(ids.len())),
            host: Arc::new(Heard::new(1)),
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
                node_0.hear(|node| {
                    lost.push(node);
                    true
                });
            });
            scope.spawn(|| node_1.beat());
            let beat = beat_key(4);
            store.wait(&[&beat], Duration::from_secs(60)).unwrap();
            // Node 0 removes what it has seen.
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
        assert!(node_0.heard.is_lost(1));
        // Those whose ranks have lost node 1 sooner learn why.
        let silent = store.try_get(&gone_key(4)).unwrap().unwrap();
        let silent: f64 = String::from_utf8(silent).unwrap().parse().unwrap();
        assert!(silent >= SILENT.as_secs_f64(), "{silent}");
        // It is heard again.
        node_1.check_will().unwrap();
        assert_eq!(store.try_get(&gone_key(4)).unwrap(), None);
    }

    /// Two of them at once, each told of once and again where that has failed, and not those that beat on.
    #[test]
    fn each_of_several_lost_nodes_is_told_of() {
        let store = Arc::new(MemStore::new());
        let ids = [0, 3, 5, 8];
        let node_0 = pulse(&store, 0, &ids);
        let (stop, over) = (node_0.stop.clone(), AtomicBool::new(false));
        let told = Mutex::new(Vec::new());
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
                node_0.hear(|node| {
                    let mut told = lock(&told);
                    told.push(node);
                    told.len() > 1
                });
            });
            let until = Instant::now() + Duration::from_secs(60);
            while lock(&told).len() < 3 && Instant::now() < until {
                sleep(LOOK);
            }
            sleep(4 * LOOK);
            stop.store(true, Ordering::Relaxed);
            over.store(true, Ordering::Relaxed);
        });
        let mut told = told.into_inner().unwrap();
        told.sort_unstable();
        assert_eq!(told, [1, 1, 3]);
    }
}
