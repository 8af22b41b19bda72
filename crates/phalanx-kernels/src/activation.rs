//! Functions of one number and their derivatives, element by element.

use super::element::{Bf16, convert_piece};
use super::math::{erf, exp, ln, power, sigmoid, tanh};
use crate::par::{PIECE, ThreadPool, scratch};

/// A function applied to every element.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub enum Activation {
    /// `relu`
    Relu,
    /// `relu6`
    Relu6,
    /// `leaky_relu` with this slope
    LeakyRelu(f32),
    /// `gelu`
    Gelu,
    /// `gelu_tanh`
    GeluTanh,
    /// `silu`
    Silu,
    /// `hardswish`
    Hardswish,
    /// `hardsigmoid`
    Hardsigmoid,
    /// `sigmoid`
    Sigmoid,
    /// `tanh`
    Tanh,
    /// `exp`
    Exp,
    /// `log`
    Log,
    /// `sqrt`
    Sqrt,
    /// `abs`
    Abs,
    /// `pow` with this exponent
    Pow(f32),
    /// `clamp` with these bounds
    Clamp(f32, f32),
}

impl Activation {
    /// Its name in graphs and profiles.
    pub fn name(self) -> &'static str {
        match self {
            Activation::Relu => "Relu",
            Activation::Relu6 => "Relu6",
            Activation::LeakyRelu(_) => "LeakyRelu",
            Activation::Gelu => "Gelu",
            Activation::GeluTanh => "GeluTanh",
            Activation::Silu => "Silu",
            Activation::Hardswish => "Hardswish",
            Activation::Hardsigmoid => "Hardsigmoid",
            Activation::Sigmoid => "Sigmoid",
            Activation::Tanh => "Tanh",
            Activation::Exp => "Exp",
            Activation::Log => "Log",
            Activation::Sqrt => "Sqrt",
            Activation::Abs => "Abs",
            Activation::Pow(_) => "Pow",
            Activation::Clamp(..) => "Clamp",
        }
    }

    /// Whether bf16 inputs give bf16 outputs; others are computed in f32, as their results need f32 precision.
    pub fn keeps_bf16(self) -> bool {
        use Activation::{Exp, Hardsigmoid, Log, Pow, Sigmoid, Sqrt, Tanh};
        !matches!(
            self,
            Sigmoid | Hardsigmoid | Tanh | Exp | Log | Sqrt | Pow(_)
        )
    }

    /// Whether the derivative is computed from the output; from the input otherwise.
    pub fn by_output(self) -> bool {
        use Activation::{Exp, Relu, Sigmoid, Sqrt, Tanh};
        matches!(self, Relu | Sigmoid | Tanh | Exp | Sqrt)
    }
}

/// 2 sqrt(2 / pi) and the cubic's coefficient of the tanh form of GELU.
const ROOT: f32 = 1.595_769_2;
const CUBIC: f32 = 0.044_715;

#[inline(always)]
fn clip6(x: f32) -> f32 {
    let x = if x < 0.0 { 0.0 } else { x };
    if x > 6.0 { 6.0 } else { x }
}

#[inline(always)]
fn phi(x: f32) -> f32 {
    0.5 * (1.0 + erf(x * std::f32::consts::FRAC_1_SQRT_2))
}

/// `(1 + tanh(u)) / 2` of the tanh form of GELU, as `sigmoid(2 u)`.
#[inline(always)]
fn bent(x: f32) -> f32 {
    sigmoid(ROOT * (CUBIC * x * x).mul_add(x, x))
}

#[inline(always)]
fn each(y: &mut [f32], f: impl Fn(f32) -> f32) {
    for v in y {
        *v = f(*v);
    }
}

simd! {
    fn forward_piece(f: Activation, y: &mut [f32]) {
        match f {
            // relu(-0) = -0; NaN stays NaN.
            Activation::Relu => each(y, |x| if x < 0.0 { 0.0 } else { x }),
            Activation::Relu6 => each(y, clip6),
            Activation::LeakyRelu(slope) => each(y, |x| if x > 0.0 { x } else { x * slope }),
            Activation::Gelu => each(y, |x| x * phi(x)),
            Activation::GeluTanh => each(y, |x| x * bent(x)),
            Activation::Silu => each(y, |x| x * sigmoid(x)),
            Activation::Hardswish => each(y, |x| x * clip6(x + 3.0) / 6.0),
            Activation::Hardsigmoid => each(y, |x| clip6(x + 3.0) / 6.0),
            Activation::Sigmoid => each(y, sigmoid),
            Activation::Tanh => each(y, tanh),
            Activation::Exp => each(y, exp),
            Activation::Log => each(y, ln),
            Activation::Sqrt => each(y, f32::sqrt),
            Activation::Abs => each(y, f32::abs),
            Activation::Pow(2.0) => each(y, |x| x * x),
            Activation::Pow(p) => each(y, |x| power(x, p)),
            // NaN stays.
            Activation::Clamp(low, high) => each(y, |x| {
                let x = if x < low { low } else { x };
                if x > high { high } else { x }
            }),
        }
    }
}

#[inline(always)]
fn times(saved: &[f32], dy: &mut [f32], slope: impl Fn(f32) -> f32) {
    for (d, &v) in dy.iter_mut().zip(saved) {
        *d *= slope(v);
    }
}

/// As [`times`] where the slope is 1 or 0: an infinite gradient must not become NaN.
#[inline(always)]
fn pass(saved: &[f32], dy: &mut [f32], closed: impl Fn(f32) -> bool) {
    for (d, &v) in dy.iter_mut().zip(saved) {
        *d = if closed(v) { 0.0 } else { *d };
    }
}

simd! {
    fn backward_piece(f: Activation, saved: &[f32], dy: &mut [f32]) {
        match f {
            // relu'(0) = 0, relu'(NaN) = 1.
            Activation::Relu => pass(saved, dy, |y| y <= 0.0),
            Activation::Relu6 => pass(saved, dy, |x| (x <= 0.0) | (x >= 6.0)),
            Activation::LeakyRelu(slope) => times(saved, dy, |x| if x > 0.0 { 1.0 } else { slope }),
            Activation::Gelu => times(saved, dy, |x| {
                /// 1 / sqrt(2 pi).
                const HEIGHT: f32 = 0.398_942_3;
                (x * HEIGHT).mul_add(exp(-0.5 * x * x), phi(x))
            }),
            Activation::GeluTanh => times(saved, dy, |x| {
                let s = bent(x);
                let slope = (3.0 * ROOT * CUBIC * x).mul_add(x, ROOT);
                // The factor that becomes 0 first: the cubic may be infinite.
                (x * (-s).mul_add(s, s)).mul_add(slope, s)
            }),
            Activation::Silu => times(saved, dy, |x| {
                let s = sigmoid(x);
                s * x.mul_add(1.0 - s, 1.0)
            }),
            Activation::Hardswish => times(saved, dy, |x| {
                let inner = if x < 3.0 { x / 3.0 + 0.5 } else { 1.0 };
                if x <= -3.0 { 0.0 } else { inner }
            }),
            Activation::Hardsigmoid => {
                times(saved, dy, |x| if (x > -3.0) & (x < 3.0) { 1.0 / 6.0 } else { 0.0 });
            }
            Activation::Sigmoid => times(saved, dy, |y| y * (1.0 - y)),
            Activation::Tanh => times(saved, dy, |y| (-y).mul_add(y, 1.0)),
            Activation::Exp => times(saved, dy, |y| y),
            Activation::Log => times(saved, dy, |x| 1.0 / x),
            Activation::Sqrt => times(saved, dy, |y| 0.5 / y),
            Activation::Abs => {
                times(saved, dy, |x| if x > 0.0 { 1.0 } else if x < 0.0 { -1.0 } else { x });
            }
            Activation::Pow(2.0) => times(saved, dy, |x| 2.0 * x),
            Activation::Pow(0.0) => dy.fill(0.0),
            Activation::Pow(p) => times(saved, dy, |x| p * power(x, p - 1.0)),
            Activation::Clamp(low, high) => pass(saved, dy, |x| (x < low) | (x > high)),
        }
    }
}

/// Elements that are in the nearest cache while they are copied and changed.
const NEAR: usize = 4096;

/// In place.
pub fn forward(threads: &ThreadPool, f: Activation, y: &mut [f32]) {
    threads.split(y, PIECE, |_, p| forward_piece(f, p));
}

/// Of `x`, of equal length.
pub fn forward_of(threads: &ThreadPool, f: Activation, x: &[f32], y: &mut [f32]) {
    threads.split(y, PIECE, |at, p| {
        for (i, p) in p.chunks_mut(NEAR).enumerate() {
            p.copy_from_slice(&x[at + i * NEAR..][..p.len()]);
            forward_piece(f, p);
        }
    });
}

/// The same for bf16: computed in f32, then rounded.
pub fn forward_of_bf16(threads: &ThreadPool, f: Activation, x: &[Bf16], y: &mut [Bf16]) {
    threads.split(y, PIECE, |at, p| {
        scratch(NEAR, |wide| {
            for (i, p) in p.chunks_mut(NEAR).enumerate() {
                let wide = &mut wide[..p.len()];
                convert_piece(&x[at + i * NEAR..][..p.len()], wide);
                forward_piece(f, wide);
                convert_piece(wide, p);
            }
        });
    });
}

/// [`backward`] for bf16: computed in f32, then rounded.
pub fn backward_bf16(threads: &ThreadPool, f: Activation, saved: &[Bf16], dy: &mut [Bf16]) {
    threads.split(dy, PIECE, |at, p| {
        scratch(2 * NEAR, |wide| {
            let (wide_saved, wide) = wide.split_at_mut(NEAR);
            for (i, p) in p.chunks_mut(NEAR).enumerate() {
                let (saved, to) = (&saved[at + i * NEAR..], wide_saved.split_at_mut(p.len()).0);
                convert_piece(&saved[..to.len()], to);
                let wide = &mut wide[..p.len()];
                convert_piece(p, wide);
                backward_piece(f, to, wide);
                convert_piece(wide, p);
            }
        });
    });
}

/// `dy` times the derivative; `saved` is the output or the input
/// ([`Activation::by_output`]).
pub fn backward(threads: &ThreadPool, f: Activation, saved: &[f32], dy: &mut [f32]) {
    threads.split(dy, PIECE, |at, p| {
        backward_piece(f, &saved[at..at + p.len()], p);
    });
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::element::Element;
    use crate::isa::on_each_isa;
    use crate::par::Threads;

    #[test]
    fn bf16_is_the_rounded_f32() {
        let threads = ThreadPool::new(Threads(2));
        let wide = |v: &[Bf16]| v.iter().map(|v| v.wide()).collect::<Vec<f32>>();
        let len = PIECE + NEAR + 77;
        let x: Vec<Bf16> = (0..len)
            .map(|i| Bf16::of((i as f32 - 1e4) * 1.3e-3))
            .collect();
        let d: Vec<Bf16> = x.iter().rev().copied().collect();
        for f in [Activation::Relu, Activation::Gelu, Activation::Hardswish] {
            on_each_isa(|isa| {
                let mut y = vec![Bf16::default(); len];
                forward_of_bf16(&threads, f, &x, &mut y);
                let mut want = wide(&x);
                forward(&threads, f, &mut want);
                assert!(
                    y.iter().zip(&want).all(|(y, w)| *y == Bf16::of(*w)),
                    "{f:?} {isa:?}"
                );
                let saved = if f.by_output() { &y } else { &x };
                let (mut dx, mut want) = (d.clone(), wide(&d));
                backward_bf16(&threads, f, saved, &mut dx);
                backward(&threads, f, &wide(saved), &mut want);
                assert!(
                    dx.iter().zip(&want).all(|(y, w)| *y == Bf16::of(*w)),
                    "{f:?} {isa:?}"
                );
            });
        }
    }

    #[test]
    fn relu_at_its_kink() {
        let threads = ThreadPool::new(Threads(1));
        let mut y = [-1.0, -0.0, 0.0, 2.0, f32::NAN];
        forward(&threads, Activation::Relu, &mut y);
        assert_eq!(
            y[..4].iter().map(|v| v.to_bits()).collect::<Vec<_>>(),
            [0.0f32, -0.0, 0.0, 2.0].map(f32::to_bits)
        );
        let mut d = [1.0; 5];
        backward(&threads, Activation::Relu, &y, &mut d);
        assert_eq!(d, [0.0, 0.0, 0.0, 1.0, 1.0]);
    }
}
