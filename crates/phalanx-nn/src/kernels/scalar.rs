//! Simple reference implementations with which the kernels are compared.

/// Values in (-1, 1) that look random, from a seed.
pub(crate) fn noise(len: usize, seed: u64) -> Vec<f32> {
    let mut g = crate::rng::torch::Generator::new(seed);
    (0..len).map(|_| g.uniform_f32(-1.0, 1.0)).collect()
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
