//! The speed that products of matrices reach on these threads.

use std::time::{Duration, Instant};

use super::Mode;
use super::conv::{self, ConvShape};
use super::element::{Values, ValuesMut};
use super::product::{Mat, product};
use crate::Precision;
use crate::par::ThreadPool;

/// Columns, and inner size, of a product.
const SIDE: usize = 256;
/// Rows of a thread's first product, and most rows.
const ROWS: [usize; 2] = [8, 1024];
/// No product begins later.
const TIME: Duration = Duration::from_millis(8);

/// Floating-point operations per second of `threads`, each with products of its own: the best of several.
pub fn measure(threads: &ThreadPool, precision: Precision) -> f64 {
    let [mut rows, most] = ROWS;
    let a = vec![0.5; threads.count() * most * SIDE];
    let b = vec![0.5; SIDE * SIDE];
    let mut c = vec![0.0; a.len()];
    let mut work = Vec::new();
    let (began, mut best) = (Instant::now(), 0.0_f64);
    loop {
        let s = ConvShape::product(threads.count() * rows, [SIDE; 2], precision);
        let len = s.in_len();
        let (a, c) = (&a[..len], &mut c[..len]);
        let is_rounded = conv::multiplies_bf16(&s);
        if is_rounded {
            work.resize(conv::work_len(&s), 0.0);
        }
        let start = Instant::now();
        match is_rounded {
            false => threads.split(c, rows * SIDE, |from, c| {
                let a = Mat::rows(&a[from..], rows, SIDE, SIDE);
                product(c, SIDE, a, Mat::rows(&b, SIDE, SIDE, SIDE), Mode::Write);
            }),
            true => {
                let (a, c) = (Values::F32(a), ValuesMut::F32(c));
                conv::forward(threads, &s, a, &b, (None, false), &mut work, c);
            }
        }
        best = best.max(s.flops() as f64 / start.elapsed().as_secs_f64().max(1e-9));
        rows = most.min(2 * rows);
        if began.elapsed() >= TIME {
            return best;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::par::Threads;

    #[test]
    fn every_precision_and_number_of_threads_has_a_peak() {
        for precision in [Precision::F32, Precision::Bf16] {
            for threads in [1, 3] {
                let peak = measure(&ThreadPool::new(Threads(threads)), precision);
                assert!(peak > 1e6 && peak < 1e15, "{precision:?} {threads}: {peak}");
            }
        }
    }
}
