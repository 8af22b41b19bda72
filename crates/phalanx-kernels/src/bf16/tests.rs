//! Blocks and passes against f64 sums of rounded values, and bits on every number of
//! threads. Processors that do not multiply bf16 have nothing to test here.

use super::*;
use crate::conv::tests::{each, shape};
use crate::element::{Bf16, Element, Values, ValuesMut};
use crate::par::{ThreadPool, Threads};
use crate::scalar::noise;
use crate::{Family, Mode, Precision};

/// What a value becomes in a product.
fn rounded(v: f32) -> f32 {
    Bf16::of(v).wide()
}

fn shapes() -> Vec<ConvShape> {
    if Family::here() == Family::Other {
        return Vec::new();
    }
    let one = [1, 1];
    let mut all = vec![
        // The layouts: rows of whole tiles, units of whole tiles, neither; gathered.
        shape([6, 16], 32, 32, [3, 3], one, one, one, 1),
        shape([5, 32], 32, 64, [3, 3], one, one, one, 1),
        shape([8, 8], 64, 32, [3, 3], one, one, one, 1),
        shape([4, 4], 32, 96, [3, 3], one, one, one, 1),
        shape([7, 5], 64, 48, [3, 3], one, one, one, 1),
        shape([9, 8], 3, 64, [3, 3], one, one, one, 1),
        shape([10, 9], 1, 32, [3, 3], one, [0, 0], one, 1),
        shape([6, 5], 24, 40, [3, 2], one, [1, 0], one, 1),
        // 1x1: pixels of all images in one row.
        shape([5, 7], 32, 64, [1, 1], one, [0, 0], one, 1),
        shape([13, 9], 40, 24, [1, 1], one, [0, 0], one, 1),
        shape([1, 1], 10, 3, [1, 1], one, [0, 0], one, 1),
        // Strides, dilation, padding beyond the kernel's reach, uneven kernels.
        shape([16, 16], 32, 64, [3, 3], [2, 2], one, one, 1),
        shape([9, 8], 32, 32, [3, 3], [2, 2], one, one, 1),
        shape([32, 32], 32, 32, [1, 1], [2, 2], [0, 0], one, 1),
        shape([7, 8], 64, 16, [1, 1], [3, 3], [0, 0], one, 1),
        shape([11, 10], 32, 32, [3, 2], [2, 1], [0, 2], [2, 3], 1),
        shape([3, 3], 32, 32, [3, 3], one, [3, 4], one, 1),
        shape([12, 11], 3, 16, [7, 7], [2, 2], [3, 3], one, 1),
        shape([2, 1], 32, 32, [5, 4], one, [2, 3], one, 1),
        // Weight gradients by channels; bands of a large image.
        shape([4, 4], 256, 256, [3, 3], one, one, one, 1),
        shape([4, 4], 30, 10000, [1, 1], one, [0, 0], one, 1),
        shape([4, 4], 10010, 30, [1, 1], one, [0, 0], one, 1),
        shape([5, 4], 3003, 100, [1, 1], [2, 2], one, one, 1),
        shape([40, 64], 32, 32, [3, 3], one, one, one, 1),
        shape([59, 40], 32, 32, [3, 3], one, one, one, 1),
    ];
    for s in &mut all {
        s.precision = Precision::Bf16;
    }
    all
}

struct Case {
    x: Vec<f32>,
    w: Vec<f32>,
    dy: Vec<f32>,
    b: Vec<f32>,
}

fn case(s: &ConvShape) -> Case {
    Case {
        x: noise(s.images * s.in_len(), 1),
        w: noise(s.weight_len(), 2),
        dy: noise(s.images * s.out_len(), 3),
        b: noise(s.out, 4),
    }
}

/// y, dw, dx, each also added to itself.
fn run(s: &ConvShape, c: &Case, threads: usize) -> [Vec<f32>; 3] {
    let threads = ThreadPool::new(Threads(threads));
    let mut work = vec![f32::NAN; work_len(s)];
    let mut y = vec![f32::NAN; c.dy.len()];
    let (x, d) = (Values::F32(&c.x), Values::F32(&c.dy));
    let to = ValuesMut::F32(&mut y);
    forward(&threads, s, x, &c.w, (&c.b, false), &mut work, to);
    work.fill(f32::NAN);
    let mut dw = vec![f32::NAN; c.w.len()];
    weight_gradient(&threads, s, x, d, &mut work, &mut dw, Mode::Write);
    let mut twice = dw.clone();
    weight_gradient(&threads, s, x, d, &mut work, &mut twice, Mode::Add);
    assert!(dw.iter().zip(&twice).all(|(a, b)| a + a == *b), "{s:?}");
    work.fill(f32::NAN);
    let mut dx = vec![f32::NAN; c.x.len()];
    let to = ValuesMut::F32(&mut dx);
    input_gradient(&threads, s, &c.w, d, &mut work, to, Mode::Write);
    let mut twice = dx.clone();
    let to = ValuesMut::F32(&mut twice);
    input_gradient(&threads, s, &c.w, d, &mut work, to, Mode::Add);
    assert!(dx.iter().zip(&twice).all(|(a, b)| a + a == *b), "{s:?}");
    [y, dw, dx]
}

#[test]
fn all_passes_agree_with_sums_of_rounded_values() {
    for s in shapes() {
        assert!(fits(&s));
        let c = case(&s);
        let round = |v: &[f32]| {
            v.iter()
                .map(|v| f64::from(rounded(*v)))
                .collect::<Vec<f64>>()
        };
        let (x, w, dy) = (round(&c.x), round(&c.w), round(&c.dy));
        let mut want = [
            (0..dy.len()).map(|i| f64::from(c.b[i % s.out])).collect(),
            vec![0.0; w.len()],
            vec![0.0; x.len()],
        ];
        each(&s, |o, i, k| {
            want[0][o] += x[i] * w[k];
            want[1][k] += x[i] * dy[o];
            want[2][i] += w[k] * dy[o];
        });
        let got = run(&s, &c, 1);
        for ((got, want), what) in got.iter().zip(&want).zip(["y", "dw", "dx"]) {
            let largest = want.iter().fold(1.0f64, |a, v| a.max(v.abs()));
            for (i, (g, w)) in got.iter().zip(want).enumerate() {
                let error = (f64::from(*g) - w).abs() / largest;
                assert!(error < 4e-6, "{s:?} {what}[{i}]: {g} {w}");
            }
        }
    }
}

/// Intel's definition of `vdpbf16ps`: one chain of fused multiply-adds, of each pair the odd place first.
#[test]
fn sums_without_tiles_are_chains_over_pairs() {
    let s = ConvShape::product(5, [70, 33], Precision::Bf16);
    if Family::here() != Family::Avx512Bf16 {
        return;
    }
    let mut c = case(&s);
    c.b.fill(0.0);
    let [y, ..] = run(&s, &c, 1);
    for (at, y) in y.iter().enumerate() {
        let (row, column) = (at / s.out, at % s.out);
        let chain = |sum: f32, k: usize| {
            let (x, w) = (
                rounded(c.x[row * s.inp + k]),
                rounded(c.w[k * s.out + column]),
            );
            x.mul_add(w, sum)
        };
        let want = (0..s.inp)
            .step_by(2)
            .fold(0.0, |sum, k| chain(chain(sum, k + 1), k));
        assert_eq!(*y, want, "{at}");
    }
}

#[test]
fn threads_do_not_change_a_bit() {
    for s in shapes() {
        let c = case(&s);
        let one = run(&s, &c, 1);
        assert!(one == run(&s, &c, 2), "{s:?}");
        assert!(one == run(&s, &c, 4), "{s:?}");
    }
}

/// Values in bf16.
fn narrow(v: &[f32]) -> Vec<Bf16> {
    v.iter().map(|v| Bf16::of(*v)).collect()
}

#[test]
fn values_in_bf16_give_what_rounded_values_do_and_results_are_rounded_once() {
    for s in shapes() {
        let c = case(&s);
        let threads = ThreadPool::new(Threads(2));
        let mut work = vec![f32::NAN; work_len(&s)];
        let (x, dy) = (narrow(&c.x), narrow(&c.dy));
        let w = &c.w;
        let mut wide = vec![f32::NAN; c.dy.len()];
        let to = ValuesMut::F32(&mut wide);
        let from = Values::F32(&c.x);
        forward(&threads, &s, from, w, (&[], false), &mut work, to);
        let mut y = vec![Bf16::of(f32::NAN); c.dy.len()];
        let to = ValuesMut::Bf16(&mut y);
        let from = Values::Bf16(&x);
        forward(&threads, &s, from, w, (&[], false), &mut work, to);
        assert!(y == narrow(&wide), "y {s:?}");

        let (mut want, mut dw) = (vec![f32::NAN; w.len()], vec![f32::NAN; w.len()]);
        let (a, b) = (Values::F32(&c.x), Values::F32(&c.dy));
        weight_gradient(&threads, &s, a, b, &mut work, &mut want, Mode::Write);
        let (a, b) = (Values::Bf16(&x), Values::Bf16(&dy));
        weight_gradient(&threads, &s, a, b, &mut work, &mut dw, Mode::Write);
        assert!(dw == want, "dw {s:?}");

        let mut wide = vec![f32::NAN; c.x.len()];
        let (from, to) = (Values::F32(&c.dy), ValuesMut::F32(&mut wide));
        input_gradient(&threads, &s, w, from, &mut work, to, Mode::Write);
        let mut dx = vec![Bf16::of(f32::NAN); c.x.len()];
        let (from, to) = (Values::Bf16(&dy), ValuesMut::Bf16(&mut dx));
        input_gradient(&threads, &s, w, from, &mut work, to, Mode::Write);
        assert!(dx == narrow(&wide), "dx {s:?}");
        let sums: Vec<Bf16> = x
            .iter()
            .zip(&wide)
            .map(|(x, d)| Bf16::of(x.wide() + d))
            .collect();
        let mut dx = x.clone();
        let (from, to) = (Values::Bf16(&dy), ValuesMut::Bf16(&mut dx));
        input_gradient(&threads, &s, w, from, &mut work, to, Mode::Add);
        assert!(dx == sums, "dx added {s:?}");
    }
}

#[test]
fn no_images_give_no_gradient() {
    for mut s in shapes() {
        s.images = 0;
        let [y, dw, dx] = run(&s, &case(&s), 2);
        assert!(y.is_empty() && dx.is_empty() && dw.iter().all(|&v| v == 0.0));
    }
}

#[test]
fn rounding_is_to_nearest_even() {
    let odd = [
        0.0,
        -0.0,
        1.0,
        f32::from_bits(0x3f80_8000), // ties: down to even, up to even
        f32::from_bits(0x3f81_8000),
        f32::from_bits(0x3f80_8001),
        f32::MAX, // to infinity
        f32::INFINITY,
        f32::NEG_INFINITY,
        f32::MIN_POSITIVE,
        f32::MIN_POSITIVE / 2.0, // subnormal: to zero
        -1e-40,
    ];
    let expect = [
        0.0,
        -0.0,
        1.0,
        1.0,
        f32::from_bits(0x3f82_0000),
        f32::from_bits(0x3f81_0000),
        f32::INFINITY,
        f32::INFINITY,
        f32::NEG_INFINITY,
        f32::MIN_POSITIVE,
        0.0,
        -0.0,
    ];
    for (v, e) in odd.iter().zip(expect) {
        assert_eq!(rounded(*v).to_bits(), e.to_bits(), "{v:e}");
    }
    assert!(rounded(f32::NAN).is_nan() && rounded(f32::from_bits(0x7f80_0001)).is_nan());
    let mut rows = noise(4 * 32 * 32, 5);
    rows[..odd.len()].copy_from_slice(&odd);
    let want: Vec<u16> = rows.iter().map(|v| Bf16::of(*v).bits()).collect();
    if Family::here() == Family::Other {
        return;
    }
    let mut to = vec![0u32; 2 * 4 * 256];
    // SAFETY: two panels of four blocks.
    unsafe { pack::rows(&rows, 32, 4, to.as_mut_ptr()) };
    for (i, &w) in want.iter().enumerate() {
        let (row, column) = (i / 32, i % 32);
        let dword = to[column / 16 * 1024 + row / 2 * 16 + column % 16];
        assert_eq!((dword >> (row % 2 * 16)) as u16, w, "{i}");
    }
}
