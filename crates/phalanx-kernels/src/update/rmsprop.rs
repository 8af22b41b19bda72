//! Steps of RMSprop.

use super::{decayed, lerp};

/// Everything that is the same for all elements of a parameter in a step.
#[derive(Clone, Copy, Debug)]
pub struct Scalars {
    /// Weight decay.
    pub decay: f32,
    /// Decay rate of the running averages.
    pub alpha: f32,
    /// 1 - alpha.
    pub weight: f32,
    /// Added to the denominator.
    pub eps: f32,
    /// Momentum; 0 for none.
    pub momentum: f32,
    /// The learning rate, negative.
    pub neg_lr: f32,
    /// Whether the running mean is subtracted.
    pub centered: bool,
}

simd! {
    /// The step of one parameter. `mean` is empty unless centered, `buf` without momentum.
    pub fn update(
        s: Scalars,
        p: &mut [f32],
        g: &[f32],
        factor: f32,
        square: &mut [f32],
        mean: &mut [f32],
        buf: &mut [f32],
    ) {
        let elements = p.iter_mut().zip(g).zip(square);
        match (mean.is_empty(), buf.is_empty()) {
            (true, true) => {
                for ((p, &g), square) in elements {
                    let g = s.averages(*p, g * factor, square);
                    *p += s.neg_lr * g / (square.sqrt() + s.eps);
                }
            }
            (true, false) => {
                for (((p, &g), square), buf) in elements.zip(buf) {
                    let g = s.averages(*p, g * factor, square);
                    s.momentum(p, buf, g / (square.sqrt() + s.eps));
                }
            }
            (false, true) => {
                for (((p, &g), square), mean) in elements.zip(mean) {
                    let g = s.averages(*p, g * factor, square);
                    *p += s.neg_lr * g / s.deviation(g, mean, *square);
                }
            }
            (false, false) => {
                for ((((p, &g), square), mean), buf) in elements.zip(mean).zip(buf) {
                    let g = s.averages(*p, g * factor, square);
                    s.momentum(p, buf, g / s.deviation(g, mean, *square));
                }
            }
        }
    }
}

impl Scalars {
    /// Updates the running square; returns the gradient with the decay's.
    #[inline(always)]
    fn averages(&self, p: f32, g: f32, square: &mut f32) -> f32 {
        let g = decayed(p, g, self.decay);
        *square = (self.weight * g).mul_add(g, self.alpha * *square);
        g
    }

    /// Updates the running mean; returns the denominator.
    #[inline(always)]
    fn deviation(&self, g: f32, mean: &mut f32, square: f32) -> f32 {
        *mean = lerp(*mean, g, self.weight);
        (-*mean).mul_add(*mean, square).sqrt() + self.eps
    }

    #[inline(always)]
    fn momentum(&self, p: &mut f32, buf: &mut f32, step: f32) {
        *buf = *buf * self.momentum + step;
        *p = buf.mul_add(self.neg_lr, *p);
    }
}
