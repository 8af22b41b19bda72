//! Steps of LAMB.

use super::adam;

/// Everything that is the same for all elements of a parameter in a step.
#[derive(Clone, Copy, Debug)]
pub struct Scalars {
    /// Adam's, with a learning rate of -1.
    pub adam: adam::Scalars,
    /// Weight decay.
    pub decay: f32,
    /// Learning rate.
    pub lr: f64,
}

simd! {
    /// Updates both running averages; writes the updates before they are scaled.
    pub fn updates(
        s: Scalars,
        u: &mut [f32],
        p: &[f32],
        g: &[f32],
        factor: f32,
        m: &mut [f32],
        v: &mut [f32],
    ) {
        for ((((u, &p), &g), m), v) in u.iter_mut().zip(p).zip(g).zip(m).zip(v) {
            s.adam.moments(p, g * factor, m, v);
            *u = p.mul_add(s.decay, s.adam.apply(0.0, *m, *v));
        }
    }
}

simd! {
    /// Adds updates, multiplied by the negative learning rate.
    pub fn step(p: &mut [f32], u: &[f32], neg_lr: f32) {
        for (p, &u) in p.iter_mut().zip(u) {
            *p = u.mul_add(neg_lr, *p);
        }
    }
}
