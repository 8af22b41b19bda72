//! The tiles' peak: products of registers, nothing loaded.

use std::time::{Duration, Instant};

use super::tile::{Tiles, has_tiles};
use crate::kernels::fma_peak;

/// Products of one run: some tenths of a millisecond.
const ROUNDS: usize = 20_000;

/// GFLOP/s of one core, the best of many short runs: of tiles, or where there are none
/// of f32's multiply-adds, which take their place.
pub(crate) fn measure(time: Duration) -> f64 {
    if !has_tiles() {
        return fma_peak::measure(time);
    }
    let tiles = Tiles::new();
    let (began, mut best) = (Instant::now(), 0.0f64);
    while began.elapsed() < time || best == 0.0 {
        let start = Instant::now();
        let flops = tiles.spin(ROUNDS) as f64;
        best = best.max(flops / start.elapsed().as_secs_f64() / 1e9);
    }
    best
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_peak_is_a_number() {
        let peak = measure(Duration::ZERO);
        assert!(peak.is_finite() && peak > 0.0, "{peak}");
    }
}
