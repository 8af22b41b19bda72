//! The changes that the ranks of an elastic job are asked for. Rank 0 looks for them; the others learn of them from it.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::time::{Duration, Instant};

use phalanx_base::error::Result;
use phalanx_store::ErrorKind;

use crate::context::RankContext;
use crate::log::Log;
use crate::state::RequestedChange;

/// How often rank 0 checks whether processes ask to join or ranks are to leave.
const ASK_EVERY: Duration = Duration::from_millis(100);

/// How often ranks that wait agree that they still do.
const WAIT_EVERY: Duration = Duration::from_secs(5);

/// Asks the store in a thread of its own, until it is dropped.
pub struct Requests {
    any: Arc<AtomicBool>,
    _stop: Sender<()>,
}

impl Requests {
    /// Watches what `log` asks of the ranks with the numbers `members`.
    pub fn watch(mut log: Log, members: Vec<usize>) -> Requests {
        let any = Arc::new(AtomicBool::new(false));
        let (stop, stopped) = channel::<()>();
        let found = Arc::clone(&any);
        let watching = std::thread::Builder::new().name("phalanx-joins".to_owned());
        // Without the thread no process joins.
        let _ = watching.spawn(move || {
            while stopped.recv_timeout(ASK_EVERY) == Err(RecvTimeoutError::Timeout) {
                let state = log.read();
                let asked = state.is_ok_and(|state| !state.requested(&members).is_none());
                found.store(asked, Relaxed);
            }
        });
        Requests { any, _stop: stop }
    }

    /// Whether a change is asked for.
    pub fn any(&self) -> bool {
        self.any.load(Relaxed)
    }
}

impl RankContext {
    /// What is asked of the ranks, for rank 0. While the ranks wait already (`waits`), *blocks* for up to 5 s until something
    /// new is asked or `stops` returns true.
    ///
    /// # Errors
    ///
    /// The store is gone.
    pub fn requested(&self, waits: bool, stops: impl Fn() -> bool) -> Result<RequestedChange> {
        let group = self.group();
        let mut log = self.log();
        let began = Instant::now();
        loop {
            let asked = match log
                .read()
                .map(|state| state.requested(group.global_ranks()))
            {
                // It may answer later.
                Err(error) if error.kind() == ErrorKind::NoAnswer => RequestedChange {
                    hold: waits.then(|| "the store does not answer".to_owned()),
                    ..RequestedChange::default()
                },
                asked => asked.map_err(phalanx_comm::Error::from)?,
            };
            let is_new = !asked.joining.is_empty() || !asked.leaving.is_empty();
            let is_same = asked.hold.is_some() && !is_new && !stops();
            if !(waits && is_same) || began.elapsed() >= WAIT_EVERY {
                return Ok(asked);
            }
            std::thread::sleep(ASK_EVERY);
        }
    }
}
