//! Random delays between the steps of the protocol, for stress tests.
//!
//! The windows in which a wake-up could be lost are a few nanoseconds wide;
//! a stress test that does not widen them proves nothing (without the delays it passed
//! with the re-check removed).

use std::cell::Cell;

thread_local! {
    /// State of the generator; 0: no delays on this thread.
    static STATE: Cell<u64> = const { Cell::new(0) };
}

/// From now on this thread is delayed; `seed` is not 0.
pub(super) fn start(seed: u64) {
    STATE.set(seed);
}

/// One step: mostly nothing, sometimes a few hundred nanoseconds, rarely a
/// yield.
pub(super) fn step() {
    let state = STATE.get();
    if state == 0 {
        return;
    }
    let state = state
        .wrapping_mul(6_364_136_223_846_793_005)
        .wrapping_add(1_442_695_040_888_963_407);
    STATE.set(state.max(1));
    match state >> 56 {
        0..128 => {}
        128..250 => (0..(state >> 50) & 63).for_each(|_| std::hint::spin_loop()),
        _ => std::thread::yield_now(),
    }
}
