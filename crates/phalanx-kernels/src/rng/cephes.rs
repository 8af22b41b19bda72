//! Logarithm, sine and cosine as PyTorch's vectorised normal numbers take them.
//!
//! Altered from `avx_mathfun.h` (AVX implementation of sin, cos, sincos, exp
//! and log), which is based on the Cephes library: one number at a time, with
//! the fused multiply-adds that a compiler makes of it, for the arguments that
//! Box and Muller's method has.
//!
//! Copyright (C) 2012 Giovanni Garberoglio, Interdisciplinary Laboratory for
//! Computational Science (LISC), Fondazione Bruno Kessler and University of
//! Trento, via Sommarive, 18, I-38123 Trento (Italy)
//!
//! This software is provided 'as-is', without any express or implied warranty.
//! In no event will the authors be held liable for any damages arising from the
//! use of this software.
//!
//! Permission is granted to anyone to use this software for any purpose,
//! including commercial applications, and to alter it and redistribute it
//! freely, subject to the following restrictions:
//!
//! 1. The origin of this software must not be misrepresented; you must not claim
//!    that you wrote the original software. If you use this software in a
//!    product, an acknowledgment in the product documentation would be
//!    appreciated but is not required.
//! 2. Altered source versions must be plainly marked as such, and must not be
//!    misrepresented as being the original software.
//! 3. This notice may not be removed or altered from any source distribution.
//!
//! (this is the zlib license)

/// Of the logarithm around 1, highest power first.
const LOG: [f32; 9] = [
    7.037_683_6e-2,
    -1.151_461e-1,
    1.167_699_84e-1,
    -1.242_014_1e-1,
    1.424_932_3e-1,
    -1.666_805_7e-1,
    2.000_071_4e-1,
    -2.499_999_4e-1,
    3.333_333e-1,
];
/// ln 2 in two parts, so that multiples of the larger are exact.
const LN_2_LOW: f32 = -2.121_944_4e-4;
const LN_2_HIGH: f32 = 0.693_359_4;

/// pi / 4 in three parts, negative.
const QUARTER: [f32; 3] = [-0.785_156_25, -2.418_756_5e-4, -3.774_895e-8];
const SINE: [f32; 3] = [-1.951_529_6e-4, 8.332_161e-3, -1.666_665_5e-1];
const COSINE: [f32; 3] = [2.443_315_7e-5, -1.388_731_6e-3, 4.166_664_6e-2];

/// A polynomial, highest power first.
#[inline(always)]
pub(crate) fn polynomial<const N: usize>(x: f32, coefficients: [f32; N]) -> f32 {
    let mut sum = coefficients[0];
    for c in &coefficients[1..] {
        sum = sum.mul_add(x, *c);
    }
    sum
}

/// Natural logarithm of `x` in (0, 1].
#[inline(always)] // so that a caller's instruction set counts
pub fn ln(x: f32) -> f32 {
    let bits = x.max(f32::MIN_POSITIVE).to_bits();
    let mut exponent = (bits >> 23) as f32 - 126.0;
    // The fraction, in [0.5, 1).
    let mut x = f32::from_bits((bits & 0x007F_FFFF) | 0x3F00_0000);
    if x < std::f32::consts::FRAC_1_SQRT_2 {
        exponent -= 1.0;
        x = (x - 1.0) + x;
    } else {
        x -= 1.0;
    }
    let square = x * x;
    let y = polynomial(x, LOG) * x;
    let y = y.mul_add(square, exponent * LN_2_LOW);
    let y = (-square).mul_add(0.5, y);
    exponent.mul_add(LN_2_HIGH, x + y)
}

/// Sine and cosine of `x` in [0, 2 pi).
#[inline(always)]
pub fn sin_cos(x: f32) -> (f32, f32) {
    // The octant, made even: 0, 2, 4, 6 or 8.
    let octant = ((x * std::f32::consts::FRAC_2_PI * 2.0) as i32 + 1) & !1;
    let mut x = x;
    for part in QUARTER {
        x = (octant as f32).mul_add(part, x);
    }
    let square = x * x;
    let cosine = (polynomial(square, COSINE) * square).mul_add(square, -(square * 0.5)) + 1.0;
    let sine = (polynomial(square, SINE) * square).mul_add(x, x);
    let (sine, cosine) = if octant & 2 == 0 {
        (sine, cosine)
    } else {
        (cosine, sine)
    };
    (
        if octant & 4 == 0 { sine } else { -sine },
        if (octant - 2) & 4 == 0 {
            -cosine
        } else {
            cosine
        },
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn close_to_the_true_functions_everywhere() {
        for i in 1..=10_000 {
            let x = i as f32 / 10_000.0;
            let want = f64::from(x).ln();
            assert!((f64::from(ln(x)) - want).abs() <= 1e-7 * want.abs().max(1.0));
            let angle = x * std::f32::consts::TAU * 0.999_999;
            let (sine, cosine) = sin_cos(angle);
            assert!((f64::from(sine) - f64::from(angle).sin()).abs() < 2e-7);
            assert!((f64::from(cosine) - f64::from(angle).cos()).abs() < 2e-7);
        }
        assert_eq!(ln(1.0), 0.0);
        assert_eq!(sin_cos(0.0), (0.0, 1.0));
    }
}
