//! Finds a rank that waits in a collective for us while we wait for a message
//! of it, or for room for one of ours.
//!
//! In shared memory a collective sends no frame that would tell: its ranks
//! meet in their cells, and one that is in a send or a receive does not look
//! there by itself. So it looks here whenever nothing moves. A rank that has
//! entered a collective which we have not begun cannot leave it without us,
//! and what it sent before was in its ring before it entered; so if after
//! that was seen a look at the rings still finds nothing, we wait for each
//! other for ever.

use std::time::Duration;

use crate::Result;
use crate::operation::Signature;
use crate::shm::Shm;
use crate::transport::Interest;

/// Longest time between two looks: who enters a collective does not wake who
/// waits for a message.
pub(super) const LOOK: Duration = Duration::from_millis(20);

/// The looks of one send, receive or batch of them.
#[derive(Default)]
pub(super) struct Elsewhere {
    suspect: Option<usize>,
}

impl Elsewhere {
    /// To be asked when nothing moved. True if the rings must be looked at
    /// once more before waiting.
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
