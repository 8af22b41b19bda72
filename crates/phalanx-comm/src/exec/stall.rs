//! Finds ranks in different operations that all only wait.
//!
//! A frame tells its receiver what the sender is doing, so most mistakes are
//! found by the first one. But when two ranks both wait to receive (each took
//! another for the root of a broadcast), no frame is ever sent. So a rank
//! that has waited without a byte moving for [`AFTER`] leaves in the store
//! which operation it is in, and looks what those say for whom it waits. The
//! same number of an operation with another content is a desync for certain,
//! however late either of them is; anything else may just be slow.
//!
//! Asking is the business of a thread of its own, started at the first stall:
//! a store whose host is gone must not hold up an operation's deadline.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, TrySendError, sync_channel};
use std::time::{Duration, Instant};

use phalanx_store::Store;
use phalanx_wire::frame::Header;

use super::signature::{Signature, Theirs};
use crate::plan::Collective;
use crate::transport::{AbortHandle, Poison};

/// Waiting without progress before anybody is asked. Slow networks and late
/// ranks cause more than this; it only costs a question then.
const AFTER: Duration = Duration::from_millis(150);
/// Distance between two questions.
const AGAIN: Duration = Duration::from_millis(250);
/// Ranks asked about at once. Those in another operation wait for each other,
/// so one of a few is enough.
const ASKED: usize = 8;

/// Where the ranks of a group say what they wait in.
pub(crate) struct Board {
    desk: Option<Desk>,
    tell: Option<SyncSender<Report>>,
    told: Option<Instant>,
    found: Arc<AtomicBool>,
}

/// What the asking thread needs.
struct Desk {
    store: Arc<dyn Store>,
    prefix: String,
    rank: usize,
    abort: AbortHandle,
    found: Arc<AtomicBool>,
}

struct Report {
    signature: Signature,
    header: Header,
    waits_for: Vec<usize>,
}

impl Board {
    /// `job` tells this job from others that used the same store.
    pub(crate) fn new(
        store: Arc<dyn Store>,
        (epoch, group, job): (u32, u32, u64),
        rank: usize,
        abort: AbortHandle,
    ) -> Board {
        let found = Arc::new(AtomicBool::new(false));
        Board {
            desk: Some(Desk {
                store,
                prefix: format!("stall/{epoch}/{group}/{job:016x}"),
                rank,
                abort,
                found: Arc::clone(&found),
            }),
            tell: None,
            told: None,
            found,
        }
    }

    /// Nothing has moved `since` then. Never blocks.
    pub(super) fn stalled(
        &mut self,
        signature: &Signature,
        header: impl FnOnce() -> Header,
        waits_for: impl Iterator<Item = usize>,
        (since, now): (Instant, Instant),
    ) {
        // Messages between two ranks are counted by those two alone.
        if signature.collective == Collective::SendRecv
            || now.duration_since(since) < AFTER
            || self
                .told
                .is_some_and(|told| now.duration_since(told) < AGAIN)
        {
            return;
        }
        self.told = Some(now);
        if let Some(desk) = self.desk.take() {
            let (tell, told) = sync_channel(1);
            let started = std::thread::Builder::new()
                .name("phalanx-stall".to_owned())
                .stack_size(128 << 10)
                .spawn(move || desk.serve(&told));
            match started {
                Ok(_) => self.tell = Some(tell),
                Err(e) => tracing::debug!("cannot start a thread to look for a desync: {e}"),
            }
        }
        let Some(tell) = &self.tell else { return };
        let report = Report {
            signature: *signature,
            header: header(),
            waits_for: waits_for.take(ASKED).collect(),
        };
        match tell.try_send(report) {
            // Full: the store is slow, and the question before this one open.
            Ok(()) | Err(TrySendError::Full(_)) => {}
            Err(TrySendError::Disconnected(_)) => self.tell = None,
        }
    }

    /// Whether it was us who found the ranks in different operations.
    pub(super) fn found(&self) -> bool {
        self.found.load(Ordering::Acquire)
    }
}

impl Desk {
    /// Until the group ends.
    fn serve(&self, reports: &Receiver<Report>) {
        let mine = format!("{}/{}", self.prefix, self.rank);
        while let Ok(report) = reports.recv() {
            if let Err(e) = self.compare(&mine, &report) {
                tracing::debug!("cannot look for a desync: {e}");
            }
        }
        let _ = self.store.delete(&mine);
    }

    fn compare(&self, mine: &str, report: &Report) -> phalanx_store::Result<()> {
        self.store.set(mine, &report.header.encode())?;
        for peer in &report.waits_for {
            let Some(bytes) = self.store.try_get(&format!("{}/{peer}", self.prefix))? else {
                continue;
            };
            let Some(theirs) = bytes.first_chunk().and_then(|b| Header::decode(b).ok()) else {
                continue;
            };
            if theirs.seq == report.signature.seq && !report.signature.matches(&theirs) {
                let cause =
                    super::signature::desync(self.rank, &report.signature, *peer, &Theirs(&theirs));
                self.found.store(true, Ordering::Release);
                self.abort.poison(&Poison::new(self.rank, cause));
                break;
            }
        }
        Ok(())
    }
}
