//! Finds a rank that waits for us in a collective while we wait for a message from it,
//! or for room to send it one.
//!
//! In shared memory a collective sends no frames: its ranks meet in their cells, which
//! a send or receive does not read. So a send or receive checks the cells here whenever
//! nothing moves. A rank that has entered a collective which we have not begun cannot
//! leave it without us, and what it sent before was in its ring before it entered. So
//! if the rings are still empty after its entry was seen, both ranks wait for each
//! other forever.

use std::time::Duration;

use crate::Result;
use crate::operation::Signature;
use crate::shm::Shm;
use crate::transport::Interest;

/// Longest time between two checks: a rank that enters a collective does not wake one
/// that waits for a message.
pub(super) const LOOK: Duration = Duration::from_millis(20);

/// The state of these checks for one send, receive or batch of them.
#[derive(Default)]
pub(super) struct Elsewhere {
    suspect: Option<usize>,
}

impl Elsewhere {
    /// To be called when nothing moved. True if the rings must be checked once more
    /// before waiting.
    ///
    /// # Errors
    ///
    /// `Desync` naming both sides when an awaited rank is in a collective
    /// that this rank has not begun.
    pub(super) fn look(
        &mut self,
        shm: Option<&Shm>,
        want: &[Interest],
        (rank, mine): (usize, &Signature),
    ) -> Result<bool> {
        let Some(shm) = shm else { return Ok(false) };
        let found = (0..shm.world())
            .filter(|&peer| peer != rank)
            .filter(|&peer| want[peer].any())
            .find_map(|peer| Some((peer, shm.ahead(peer)?)));
        match found {
            // Never the same: ours is a message.
            Some((peer, theirs)) if self.suspect == Some(peer) => {
                mine.compare(rank, peer, &theirs).map(|()| false)
            }
            Some((peer, _)) => {
                self.suspect = Some(peer);
                Ok(true)
            }
            None => Ok(false),
        }
    }

    /// Something moved.
    pub(super) fn forget(&mut self) {
        self.suspect = None;
    }
}
