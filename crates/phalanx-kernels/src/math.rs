//! Exponential, hyperbolic tangent and error function in f32, and sums in f64, written so that
//! loops over them become vectors: no branches, no calls, fused multiply-adds.
//!
//! *Source*: polynomials of Cephes (Moshier), as PyTorch's own vector kernels
//! descend from, but for the error function's; powers are the system library's. Errors: `exp` 2 units in the last place, `ln` 1e-7 relative, the others 3e-7 absolute.

pub(crate) use super::vector::LANES;
use crate::rng::cephes::{ln as normal_ln, polynomial};

/// Coefficients of `exp`.
const EXP: [f32; 6] = [
    1.987_569_1e-4,
    1.398_199_9e-3,
    8.333_452e-3,
    4.166_579_6e-2,
    1.666_666_6e-1,
    0.5,
];

/// Coefficients of `tanh` near 0.
const TANH: [f32; 5] = [
    -5.704_988_7e-3,
    2.063_908_8e-2,
    -5.373_971_6e-2,
    1.333_144_2e-1,
    -3.333_328e-1,
];

/// Coefficients of `erf` near 0.
const ERF_NEAR: [f32; 6] = [
    -6.111_285e-4,
    5.016_227e-3,
    -2.678_195_6e-2,
    1.128_223e-1,
    -3.761_253_4e-1,
    std::f32::consts::FRAC_2_SQRT_PI,
];

/// Coefficients of the logarithm of `1 - erf` far from 0.
const ERF_LOG: [f32; 7] = [
    1.982_238e-4,
    -3.065_528e-3,
    2.231_535_1e-2,
    -1.041_139_4e-1,
    -6.369_758e-1,
    -1.127_797_4,
    -1.664_136_2e-4,
];

/// `e^r` and `n` with `e^x = e^r 2^n`, of an `x` that is kept between `least` and `most`.
#[inline(always)]
fn exp_parts(x: f32, least: f32, most: f32) -> (f32, i32) {
    /// Adding it leaves the nearest whole number in the low bits.
    const MAGIC: f32 = 12_582_912.0;
    // A comparison with NaN is false: it stays.
    let c = if x < least { least } else { x };
    let c = if c > most { most } else { c };
    let shifted = c.mul_add(std::f32::consts::LOG2_E, MAGIC);
    let n = shifted - MAGIC;
    // ln 2 in two parts: the first product is exact.
    let r = n.mul_add(-0.693_359_4, c);
    let r = n.mul_add(2.121_944_4e-4, r);
    let p = polynomial(r, EXP);
    let e = p.mul_add(r * r, r) + 1.0;
    let n = (shifted.to_bits() as i32).wrapping_sub(MAGIC.to_bits() as i32);
    (e, n)
}

/// 2^n for -126 to 127; 0 for -127, infinity for 128.
#[inline(always)]
fn power_of_two(n: i32) -> f32 {
    f32::from_bits((n.wrapping_add(127) as u32) << 23)
}

/// `e^x`; 0 below -104, infinity above 88.8.
#[inline(always)]
pub(crate) fn exp(x: f32) -> f32 {
    let (e, n) = exp_parts(x, -104.0, 90.0);
    // 2^n in two factors, so that results below the normal range come out.
    let half = n >> 1;
    e * power_of_two(half) * power_of_two(n.wrapping_sub(half))
}

/// As [`exp`] in fewer instructions: 0 below -87.7 and infinity above 88.37.
#[inline(always)]
pub(crate) fn exp_normal(x: f32) -> f32 {
    let (e, n) = exp_parts(x, -88.0, 88.7);
    e * power_of_two(n)
}

/// The natural logarithm: -infinity of 0, NaN below.
#[inline(always)]
pub(crate) fn ln(x: f32) -> f32 {
    /// Brings subnormal numbers into the normal range.
    const UP: f32 = 8_388_608.0;
    let is_small = x < f32::MIN_POSITIVE;
    let y = normal_ln(if is_small { x * UP } else { x });
    let y = if is_small { y - 15.942_385 } else { y };
    let y = if x == f32::INFINITY { x } else { y };
    let y = if x == 0.0 { f32::NEG_INFINITY } else { y };
    // Of NaN too.
    if x >= 0.0 { y } else { f32::NAN }
}

/// `x` to the power of `p`: rounded from f64, so that bits do not depend on the system's library (in all but very rare cases).
#[inline(always)]
pub(crate) fn power(x: f32, p: f32) -> f32 {
    f64::from(x).powf(f64::from(p)) as f32
}

/// `1 / (1 + e^-x)`.
#[inline(always)]
pub(crate) fn sigmoid(x: f32) -> f32 {
    1.0 / (1.0 + exp_normal(-x))
}

/// Hyperbolic tangent.
#[inline(always)]
pub(crate) fn tanh(x: f32) -> f32 {
    let z = x * x;
    let small = polynomial(z, TANH);
    let small = (small * z).mul_add(x, x);
    let large = 1.0 - 2.0 / (exp_normal(2.0 * x.abs()) + 1.0);
    if x.abs() < 0.625 {
        small
    } else {
        large.copysign(x)
    }
}

/// The error function: an odd polynomial near 0, and beyond `1 - e^p(|x|)`. The polynomials are minimax fits; with coefficients
/// rounded to f32 their errors are 7e-8 and 5e-9.
#[inline(always)]
pub(crate) fn erf(x: f32) -> f32 {
    let near = x * polynomial(x * x, ERF_NEAR);
    let a = x.abs();
    // A comparison with NaN is false: it stays. Beyond 4 the result is 1.
    let c = if a > 4.0 { 4.0 } else { a };
    let log = polynomial(c, ERF_LOG);
    if a < 0.9 {
        near
    } else {
        (1.0 - exp_normal(log)).copysign(x)
    }
}

/// The sum of the terms of a row: in sixteen lanes, which are then added in pairs.
#[inline(always)]
pub(crate) fn sum_of(x: &[f32], term: impl Fn(f32) -> f64) -> f64 {
    let add = |mut sums: [f64; LANES], x: &[f32]| {
        // All terms first: so both loops become vectors. Adding -0 changes nothing.
        let mut terms = [-0.0f64; LANES];
        terms.iter_mut().zip(x).for_each(|(t, &x)| *t = term(x));
        sums.iter_mut().zip(&terms).for_each(|(s, t)| *s += t);
        sums
    };
    let (blocks, rest) = x.as_chunks::<LANES>();
    let sums = blocks.iter().fold([0.0; LANES], |sums, x| add(sums, x));
    let rest = Some(rest).filter(|rest| !rest.is_empty());
    fold_lanes(rest.into_iter().fold(sums, add), |a, b| a + b)
}

/// As [`sum_of`] of two rows of equal length, 64 terms at a time: these sums are added in order.
#[inline(always)]
pub(crate) fn sum_of_pairs(a: &[f32], b: &[f32], term: impl Fn(f32, f32) -> f32) -> f64 {
    const TERMS: usize = 64;
    let mut terms = [0.0f32; TERMS];
    let mut sum = 0.0;
    for (a, b) in a.chunks(TERMS).zip(b.chunks(TERMS)) {
        let terms = &mut terms[..a.len()];
        for ((t, &a), &b) in terms.iter_mut().zip(a).zip(b) {
            *t = term(a, b);
        }
        sum += sum_of(terms, f64::from);
    }
    sum
}

/// One of all lanes: the halves are joined, then the halves of those.
#[inline(always)]
pub(crate) fn fold_lanes<T: Copy>(mut lanes: [T; LANES], join: impl Fn(T, T) -> T) -> T {
    for i in 0..8 {
        lanes[i] = join(lanes[i], lanes[i + 8]);
    }
    for i in 0..4 {
        lanes[i] = join(lanes[i], lanes[i + 4]);
    }
    join(join(lanes[0], lanes[2]), join(lanes[1], lanes[3]))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_short_exponential_is_the_long_one_but_at_the_ends() {
        for i in -8_730..=8_830 {
            let x = i as f32 / 100.0;
            assert_eq!(exp_normal(x).to_bits(), exp(x).to_bits(), "{x}");
        }
        for (x, want) in [
            (88.5, f32::INFINITY),
            (89.0, f32::INFINITY),
            (f32::INFINITY, f32::INFINITY),
            (-87.8, 0.0),
            (-89.0, 0.0),
            (f32::NEG_INFINITY, 0.0),
        ] {
            assert_eq!(exp_normal(x), want, "{x}");
        }
        assert!(exp_normal(f32::NAN).is_nan());
    }

    #[test]
    fn sums_are_right_for_every_length() {
        for len in [0usize, 1, 15, 16, 17, 63, 64, 65, 300] {
            let (a, b): (Vec<f32>, Vec<f32>) = (0..len).map(|i| (i as f32, 2.0)).unzip();
            let want = (len * len.saturating_sub(1) / 2) as f64;
            assert_eq!(sum_of(&a, f64::from), want);
            assert_eq!(sum_of_pairs(&a, &b, |a, b| a * b), 2.0 * want);
        }
    }

    #[test]
    fn functions_agree_with_the_system_library_in_double() {
        for i in -9_000..=9_000 {
            let x = i as f32 / 100.0;
            let (got, want) = (f64::from(exp(x)), f64::from(x).exp());
            if want < f64::from(f32::MAX) {
                assert!(
                    (got - want).abs() <= 2.5e-7 * want + 1.5e-45,
                    "exp {x}: {got}"
                );
            }
            let near = |got: f32, want: f64, what: &str| {
                let bound = 3e-7 * want.abs().clamp(1e-3, 1.0);
                assert!(
                    (f64::from(got) - want).abs() <= bound,
                    "{what} {x}: {got} {want}"
                );
            };
            near(tanh(x / 10.0), f64::from(x / 10.0).tanh(), "tanh");
            near(sigmoid(x), 1.0 / (1.0 + f64::from(-x).exp()), "sigmoid");
        }
        assert_eq!(exp(100.0), f32::INFINITY);
        assert_eq!(exp(f32::NEG_INFINITY), 0.0);
        assert_eq!(exp(f32::INFINITY), f32::INFINITY);
        assert_eq!((tanh(0.0), tanh(50.0), tanh(-50.0)), (0.0, 1.0, -1.0));
        for f in [exp, tanh, sigmoid, erf] {
            assert!(f(f32::NAN).is_nan());
        }
        // Values of Abramowitz and Stegun, table 7.1.
        for (x, want) in [
            (0.0, 0.0),
            (0.1, 0.112_462_916),
            (0.5, 0.520_499_878),
            (1.0, 0.842_700_793),
            (1.5, 0.966_105_146),
            (2.0, 0.995_322_265),
            (3.0, 0.999_977_910),
            (8.0, 1.0),
        ] {
            assert!(
                (f64::from(erf(x)) - want).abs() < 2e-7,
                "erf {x}: {}",
                erf(x)
            );
            assert_eq!(erf(-x), -erf(x));
        }
        // The integral of its derivative, by Simpson's rule.
        let (mut want, slope) = (0.0, |x: f64| {
            std::f64::consts::FRAC_2_SQRT_PI * (-x * x).exp()
        });
        for i in 0..5000 {
            let (from, to) = (f64::from(i) / 1e3, f64::from(i + 1) / 1e3);
            let middle = (from + to) / 2.0;
            want += (slope(from) + 4.0 * slope(middle) + slope(to)) / 6e3;
            let got = f64::from(erf(to as f32));
            assert!((got - want).abs() < 2e-7, "erf {to}: {got} {want}");
        }
    }
}
