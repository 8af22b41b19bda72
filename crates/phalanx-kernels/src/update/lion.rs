//! Steps of Lion.

/// Everything that is the same for all elements of a parameter in a step.
#[derive(Clone, Copy, Debug)]
pub struct Scalars {
    /// Decay rates of the running mean: in the direction, and of the mean itself.
    pub betas: [f32; 2],
    /// 1 - `betas`.
    pub weights: [f32; 2],
    /// Factor of the weights.
    pub shrink: f32,
    /// The learning rate, negative.
    pub neg_lr: f32,
}

simd! {
    /// The step of one parameter.
    pub fn update(s: Scalars, p: &mut [f32], g: &[f32], factor: f32, mean: &mut [f32]) {
        for ((p, &g), mean) in p.iter_mut().zip(g).zip(mean) {
            let g = g * factor;
            let c = g.mul_add(s.weights[0], s.betas[0] * *mean);
            *mean = g.mul_add(s.weights[1], s.betas[1] * *mean);
            // Zeros and NaN are their own signs.
            let sign = if c.abs() > 0.0 { 1f32.copysign(c) } else { c };
            *p = sign.mul_add(s.neg_lr, *p * s.shrink);
        }
    }
}
