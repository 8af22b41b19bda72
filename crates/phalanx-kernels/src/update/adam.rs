//! Steps of Adam and AdamW.

use super::{decayed, lerp};

/// Everything that is the same for all elements of a parameter in a step.
#[derive(Clone, Copy, Debug)]
pub struct Scalars {
    /// AdamW's factor on the weights; 1 otherwise.
    pub shrink: f32,
    /// Adam's weight decay; 0 otherwise.
    pub decay: f32,
    /// 1 - beta1.
    pub weight: f32,
    /// Decay rate of the running square.
    pub beta2: f32,
    /// 1 - beta2.
    pub keep2: f32,
    /// sqrt(1 - beta2^t).
    pub root2: f32,
    /// Added to the denominator.
    pub eps: f32,
    /// -lr / (1 - beta1^t).
    pub neg_step: f32,
}

simd! {
    /// The step of one parameter. `largest` is empty without AMSGrad.
    pub fn update(
        s: Scalars,
        p: &mut [f32],
        g: &[f32],
        factor: f32,
        m: &mut [f32],
        v: &mut [f32],
        largest: &mut [f32],
    ) {
        let elements = p.iter_mut().zip(g).zip(m).zip(v);
        if largest.is_empty() {
            for (((p, &g), m), v) in elements {
                let moved = s.moments(*p, g * factor, m, v);
                *p = s.apply(moved, *m, *v);
            }
        } else {
            for ((((p, &g), m), v), largest) in elements.zip(largest) {
                let moved = s.moments(*p, g * factor, m, v);
                // torch.maximum: a NaN stays.
                if *v > *largest || v.is_nan() {
                    *largest = *v;
                }
                *p = s.apply(moved, *m, *largest);
            }
        }
    }
}

impl Scalars {
    /// Updates both running averages; returns the weight after AdamW's decay.
    #[inline(always)]
    pub(super) fn moments(&self, p: f32, g: f32, m: &mut f32, v: &mut f32) -> f32 {
        let g = decayed(p, g, self.decay);
        *m = lerp(*m, g, self.weight);
        *v = (self.keep2 * g).mul_add(g, self.beta2 * *v);
        p * self.shrink
    }

    #[inline(always)]
    pub(super) fn apply(&self, p: f32, m: f32, square: f32) -> f32 {
        let den = square.sqrt() / self.root2 + self.eps;
        p + self.neg_step * m / den
    }
}
