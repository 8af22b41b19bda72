//! The processor's peak: independent chains of fused multiply-adds in registers.

use std::time::{Duration, Instant};

use super::vector::{LANES, Vector};

/// Chains, enough to fill the pipelines of two units and few enough for registers.
const CHAINS: usize = 10;
const ROUNDS: usize = 10_000;

#[inline(always)]
unsafe fn body<V: Vector>(out: &mut [f32; LANES]) {
    // SAFETY: `out` holds sixteen floats; the rest stays in registers.
    unsafe {
        let (a, b) = (V::load(out.as_ptr()), V::splat(1e-3));
        let mut sums = [a; CHAINS];
        for _ in 0..ROUNDS {
            for s in &mut sums {
                *s = s.fma(b, a);
            }
        }
        let mut total = a;
        for s in sums {
            total = total.add(s);
        }
        total.store(out.as_mut_ptr());
    }
}

vectorised! {
    unsafe fn chains(out: &mut [f32; LANES]) = body
}

/// GFLOP/s of one core, the best of many short runs.
pub(crate) fn measure(time: Duration) -> f64 {
    let began = Instant::now();
    let mut best = 0.0f64;
    let mut out = [0.5; LANES];
    while began.elapsed() < time || best == 0.0 {
        let start = Instant::now();
        // SAFETY: nothing is asked of the caller but a valid `out`.
        unsafe { chains(&mut out) };
        let flops = (2 * CHAINS * ROUNDS * LANES) as f64;
        best = best.max(flops / start.elapsed().as_secs_f64() / 1e9);
        out = std::hint::black_box(out).map(|v| v.min(1.0));
    }
    best
}
