//! One thread per process that checks all its groups twice a second.
//!
//! It only reads what ranks have recorded, so it costs the ranks nothing. It runs while
//! they are busy, so a late rank can report what it is doing. A stopped process reports
//! nothing.

use std::sync::{Arc, Mutex, Weak};
use std::thread::Thread;
use std::time::Duration;

use super::watch::Watched;
use crate::sync::lock;

const INTERVAL: Duration = Duration::from_millis(500);

struct Groups {
    watched: Vec<Weak<Watched>>,
    thread: Option<Thread>,
}

static GROUPS: Mutex<Groups> = Mutex::new(Groups {
    watched: Vec::new(),
    thread: None,
});

/// Checks this group from now on, as long as it exists.
pub(crate) fn watch(group: Weak<Watched>) {
    let mut groups = lock(&GROUPS);
    groups.watched.push(group);
    if let Some(thread) = &groups.thread {
        // At once: a rank that is stopped soon could not publish its identity later.
        thread.unpark();
        return;
    }
    let started = std::thread::Builder::new()
        .name("phalanx-watch".into())
        .stack_size(256 << 10)
        .spawn(run);
    match started {
        Ok(handle) => groups.thread = Some(handle.thread().clone()),
        Err(e) => tracing::warn!(
            "late ranks will not be reported, nor waited for in their phases: no thread: {e}"
        ),
    }
}

fn run() {
    loop {
        let mut groups = lock(&GROUPS);
        groups.watched.retain(|group| group.strong_count() > 0);
        if groups.watched.is_empty() {
            groups.thread = None;
            return;
        }
        let watched = groups.watched.clone();
        drop(groups);
        let watched: Vec<_> = watched.iter().filter_map(Weak::upgrade).collect();
        let others = |group: &Arc<Watched>| {
            let group = Arc::clone(group);
            let others = watched.iter().map(Arc::as_ref);
            others.filter(move |other| other.is_same_rank_as(&group))
        };
        // A rank that waits itself delays no other rank by its phase.
        let is_busy = |group: &Arc<Watched>| {
            group.recorder.is_busy()
                && !group.is_in_operation()
                && !others(group).any(Watched::is_in_operation)
        };
        let busy: Vec<bool> = watched.iter().map(is_busy).collect();
        // Before any call that may wait for the store.
        for (group, _) in watched.iter().zip(&busy).filter(|(_, busy)| **busy) {
            group.beat();
        }
        for (group, busy) in watched.iter().zip(busy) {
            group.check(others(group), busy);
        }
        // A thread that leaves its group meanwhile is the last to hold it.
        drop(watched);
        std::thread::park_timeout(INTERVAL);
    }
}
