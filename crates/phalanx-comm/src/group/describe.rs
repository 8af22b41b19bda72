//! A one-line description of a group.

use std::fmt::Write as _;

use super::ProcessGroup;
use crate::TransportKind;

impl ProcessGroup {
    /// This rank's membership in one line, for logs: rank and world, group
    /// and generation, how the others are reached, and how this rank waits for
    /// them. *Not guaranteed:* the wording.
    ///
    /// ```
    /// use phalanx_comm::{GroupOptions, ProcessGroup};
    /// let group = ProcessGroup::threads(3, GroupOptions::default()).remove(1);
    /// let text = group.describe();
    /// assert!(text.starts_with("rank 1 of 3 (group 0, generation 0), thread to 0, 2; "), "{text}");
    /// ```
    pub fn describe(&self) -> String {
        let core = &self.core;
        let mut text = format!(
            "rank {} of {} (group {:#x}, generation {})",
            core.rank,
            core.world,
            core.id,
            self.generation()
        )
        .replace("group 0x0,", "group 0,");
        for kind in [
            TransportKind::Thread,
            TransportKind::Shm,
            TransportKind::Tcp,
        ] {
            let peers: Vec<usize> = core
                .transports
                .iter()
                .filter(|(_, k)| *k == kind)
                .map(|(peer, _)| *peer)
                .collect();
            if !peers.is_empty() {
                let _ = write!(text, ", {kind} to {}", super::rank_list(&peers));
            }
        }
        let _ = write!(text, "; {}", core.budgets);
        text
    }

    /// How many times the job had been re-formed when this group was formed.
    pub fn generation(&self) -> u32 {
        self.core.generation
    }
}
