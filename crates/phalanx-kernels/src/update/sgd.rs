//! Steps of stochastic gradient descent.

/// Hyperparameters, rounded to float32 once.
#[derive(Clone, Copy, Debug)]
pub struct Scalars {
    /// Weight decay.
    pub decay: f32,
    /// Momentum.
    pub momentum: f32,
    /// 1 - dampening.
    pub keep: f32,
    /// The learning rate, negative.
    pub neg_lr: f32,
    /// Whether the momentum is Nesterov's.
    pub nesterov: bool,
    /// What happens to the momentum buffer.
    pub mode: Mode,
}

/// What happens to the momentum buffer in this step.
#[derive(Clone, Copy, Debug)]
pub enum Mode {
    /// There is none.
    Plain,
    /// It begins with the gradient.
    First,
    /// It continues.
    Later,
}

simd! {
    /// The step of one parameter. `buf` is empty without momentum.
    pub fn update(s: Scalars, p: &mut [f32], g: &[f32], factor: f32, buf: &mut [f32]) {
        let decayed = |p: f32, g: f32| super::decayed(p, g * factor, s.decay);
        let ahead = |d: f32, b: f32| if s.nesterov { b.mul_add(s.momentum, d) } else { b };
        let elements = p.iter_mut().zip(g);
        match s.mode {
            Mode::Plain => {
                for (p, &g) in elements {
                    *p = decayed(*p, g).mul_add(s.neg_lr, *p);
                }
            }
            Mode::First => {
                for ((p, &g), b) in elements.zip(buf) {
                    let d = decayed(*p, g);
                    *b = d;
                    *p = ahead(d, d).mul_add(s.neg_lr, *p);
                }
            }
            Mode::Later => {
                for ((p, &g), b) in elements.zip(buf) {
                    let d = decayed(*p, g);
                    *b = d.mul_add(s.keep, *b * s.momentum);
                    *p = ahead(d, *b).mul_add(s.neg_lr, *p);
                }
            }
        }
    }
}
