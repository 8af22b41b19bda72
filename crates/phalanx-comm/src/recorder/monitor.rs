//! One thread a process that looks at all its groups twice a second.
//!
//! It only reads what ranks have noted, so it costs the ranks nothing, and it
//! runs while they are busy: a late rank can say what it is doing.

use std::sync::{Mutex, PoisonError, Weak};
use std::time::Duration;

use super::watch::Watched;

const TURN: Duration = Duration::from_millis(500);

struct Groups {
    watched: Vec<Weak<Watched>>,
    is_running: bool,
}

static GROUPS: Mutex<Groups> = Mutex::new(Groups {
    watched: Vec::new(),
    is_running: false,
});

/// Looks at this group from now on, as long as it exists.
pub(crate) fn watch(group: Weak<Watched>) {
    let mut groups = GROUPS.lock().unwrap_or_else(PoisonError::into_inner);
    groups.watched.push(group);
    if groups.is_running {
        return;
    }
    let started = std::thread::Builder::new()
        .name("phalanx-watch".into())
        .stack_size(256 << 10)
        .spawn(run);
    match started {
        Ok(_) => groups.is_running = true,
        Err(e) => tracing::warn!("late ranks will not be reported: no thread: {e}"),
    }
}

fn run() {
    loop {
        std::thread::sleep(TURN);
        let mut groups = GROUPS.lock().unwrap_or_else(PoisonError::into_inner);
        groups.watched.retain(|group| group.strong_count() > 0);
        if groups.watched.is_empty() {
            groups.is_running = false;
            return;
        }
        let watched = groups.watched.clone();
        drop(groups);
        for group in watched.iter().filter_map(Weak::upgrade) {
            group.look();
        }
    }
}
