//! The last phase of a wait (README.md, "protocol to sleep").

use std::time::Duration;

use super::Bell;

/// Why a wait ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Wake {
    /// The condition holds.
    Ready,
    /// The bell was rung (or a spurious wake-up).
    Rung,
    /// The timeout passed.
    Elapsed,
}

/// Sleeps at most `timeout` unless `ready`, which is read with sequentially
/// consistent loads.
pub(crate) fn sleep_unless(
    bell: Bell<'_>,
    timeout: Duration,
    mut ready: impl FnMut() -> bool,
) -> Wake {
    #[cfg(test)]
    super::jitter::step();
    let announced = bell.announce();
    #[cfg(test)]
    super::jitter::step();
    if ready() {
        return Wake::Ready;
    }
    if announced.sleep(timeout) {
        Wake::Rung
    } else {
        Wake::Elapsed
    }
}
