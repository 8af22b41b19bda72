//! Simple reference implementations with which the kernels are compared.

use crate::rng::mt19937::Mt19937;
use crate::rng::numbers::uniform;

/// Values in (-1, 1) that look random, from a seed.
pub(crate) fn noise(len: usize, seed: u64) -> Vec<f32> {
    let mut words = Mt19937::new(seed as u32);
    (0..len).map(|_| uniform(words.word(), -1.0, 1.0)).collect()
}

/// `m x n` product in f64.
pub(crate) fn product(
    m: usize,
    n: usize,
    k: usize,
    a: impl Fn(usize, usize) -> f32,
    b: impl Fn(usize, usize) -> f32,
) -> Vec<f64> {
    let mut c = Vec::with_capacity(m * n);
    for i in 0..m {
        for j in 0..n {
            c.push(
                (0..k)
                    .map(|p| f64::from(a(i, p)) * f64::from(b(p, j)))
                    .sum(),
            );
        }
    }
    c
}
