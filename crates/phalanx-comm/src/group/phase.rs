//! A phase in which a rank works alone while the others wait for it.

use std::sync::Arc;
use std::time::Duration;

use crate::recorder::{Earlier, Recorder};

/// A rank is in a declared phase until this is dropped; see [`ProcessGroup::phase`](super::ProcessGroup::phase).
#[must_use = "the phase ends when this is dropped"]
pub struct PhaseGuard {
    recorder: Arc<Recorder>,
    earlier: Earlier,
}

impl PhaseGuard {
    pub(super) fn begin(recorder: &Arc<Recorder>, name: &str, limit: Duration) -> PhaseGuard {
        PhaseGuard {
            recorder: Arc::clone(recorder),
            earlier: recorder.begin_phase(name, limit),
        }
    }
}

impl Drop for PhaseGuard {
    fn drop(&mut self) {
        self.recorder.end_phase(&self.earlier);
    }
}

impl std::fmt::Debug for PhaseGuard {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("PhaseGuard").finish_non_exhaustive()
    }
}
