//! Every method against the plain definition in f64.

use super::*;
use crate::Family;
use crate::element::{Bf16, Element, Values, ValuesMut};
use crate::isa::on_each_isa;
use crate::par::Threads;
use crate::scalar::noise;

#[allow(clippy::too_many_arguments)] // one line a case
pub(crate) fn shape(
    input: [usize; 2],
    inp: usize,
    out: usize,
    kernel: [usize; 2],
    stride: [usize; 2],
    padding: [usize; 2],
    dilation: [usize; 2],
    groups: usize,
) -> ConvShape {
    let size =
        |d| ConvShape::out_size(input[d], kernel[d], stride[d], padding[d], dilation[d]).unwrap();
    ConvShape {
        images: 3,
        input,
        output: [size(0), size(1)],
        inp,
        out,
        kernel,
        stride,
        padding,
        dilation,
        groups,
        precision: Precision::F32,
    }
}

fn shapes() -> Vec<ConvShape> {
    let one = [1, 1];
    vec![
        shape([8, 7], 8, 6, [3, 3], one, [0, 0], one, 1),
        shape([8, 7], 16, 5, [3, 3], one, one, one, 1),
        shape([6, 9], 16, 32, [1, 1], one, [0, 0], one, 1),
        shape([9, 6], 8, 4, [5, 2], one, [3, 1], one, 1),
        shape([4, 5], 8, 4, [3, 3], one, [3, 4], one, 1),
        shape([28, 28], 1, 32, [3, 3], one, [0, 0], one, 1),
        shape([9, 7], 4, 6, [3, 3], [2, 2], one, one, 2),
        shape([9, 7], 4, 4, [3, 3], one, one, one, 4),
        shape([11, 10], 3, 2, [3, 2], [2, 1], [0, 2], [2, 3], 1),
        shape([3, 3], 1, 2, [3, 3], one, [3, 3], one, 1),
        // One pixel; one output; a kernel larger than the image; stride beyond
        // the kernel, with a remainder; one row, one column.
        shape([1, 1], 16, 3, [1, 1], one, [0, 0], one, 1),
        shape([1, 1], 8, 4, [3, 3], one, one, one, 1),
        shape([1, 1], 2, 1, [1, 1], [3, 3], [0, 0], one, 1),
        shape([3, 3], 8, 4, [3, 3], one, [0, 0], one, 1),
        shape([2, 1], 8, 2, [5, 4], one, [2, 3], one, 1),
        shape([8, 9], 3, 4, [2, 2], [4, 5], [0, 0], one, 1),
        shape([1, 9], 8, 4, [1, 3], one, [0, 0], one, 1),
        shape([9, 1], 16, 4, [3, 1], one, [0, 0], one, 1),
        // Channels in multiples of sixteen.
        shape([9, 8], 16, 32, [3, 3], [2, 2], one, one, 1),
        shape([8, 8], 32, 80, [3, 3], [2, 2], one, one, 1),
        shape([7, 8], 16, 64, [1, 1], [2, 2], [0, 0], one, 1),
        shape([7, 6], 48, 16, [1, 1], one, [0, 0], one, 1),
        shape([9, 10], 16, 16, [3, 2], [3, 1], [0, 2], [2, 3], 1),
        shape([3, 2], 16, 16, [2, 2], [4, 5], [2, 3], one, 1),
        shape([12, 11], 16, 16, [7, 7], [2, 2], [3, 3], one, 1),
        // A kernel for each channel, and 1x1 with channels that are no sixteens.
        shape([9, 8], 32, 32, [3, 3], one, one, one, 32),
        shape([8, 9], 96, 96, [3, 3], [2, 2], one, one, 96),
        shape([2, 2], 16, 16, [3, 3], one, one, one, 16),
        shape([1, 1], 16, 16, [3, 3], one, one, one, 16),
        shape([9, 11], 16, 16, [3, 3], [1, 2], [2, 0], [2, 3], 16),
        shape([9, 11], 21, 21, [5, 4], [2, 3], [2, 1], one, 21),
        shape([6, 5], 80, 80, [5, 5], one, [2, 2], one, 80),
        shape([3, 4], 16, 16, [3, 3], one, [5, 4], one, 16),
        shape([2, 9], 16, 16, [1, 3], [3, 2], [1, 0], one, 16),
        shape([5, 6], 24, 40, [1, 1], one, [0, 0], one, 1),
    ]
}

/// For every product of the convolution: (output, input, weight) indices.
pub(crate) fn each(s: &ConvShape, mut f: impl FnMut(usize, usize, usize)) {
    let (gi, go) = (s.group_in(), s.group_out());
    for i in 0..s.images {
        for oy in 0..s.output[0] {
            for ox in 0..s.output[1] {
                for ky in 0..s.kernel[0] {
                    for kx in 0..s.kernel[1] {
                        let y = (oy * s.stride[0] + ky * s.dilation[0]) as isize
                            - s.padding[0] as isize;
                        let x = (ox * s.stride[1] + kx * s.dilation[1]) as isize
                            - s.padding[1] as isize;
                        if y < 0 || x < 0 || y >= s.input[0] as isize || x >= s.input[1] as isize {
                            continue;
                        }
                        let (y, x) = (y as usize, x as usize);
                        for o in 0..s.out {
                            for c in 0..gi {
                                f(
                                    ((i * s.output[0] + oy) * s.output[1] + ox) * s.out + o,
                                    ((i * s.input[0] + y) * s.input[1] + x) * s.inp
                                        + o / go * gi
                                        + c,
                                    ((ky * s.kernel[1] + kx) * gi + c) * s.out + o,
                                );
                            }
                        }
                    }
                }
            }
        }
    }
}

pub(super) struct Case {
    pub x: Vec<f32>,
    pub w: Vec<f32>,
    pub dy: Vec<f32>,
    pub b: Vec<f32>,
}

pub(super) fn case(s: &ConvShape) -> Case {
    Case {
        x: noise(s.images * s.in_len(), 1),
        w: noise(s.weight_len(), 2),
        dy: noise(s.images * s.out_len(), 3),
        b: noise(s.out, 4),
    }
}

/// y, dw, db, dx of one run.
pub(super) fn run(s: &ConvShape, c: &Case, threads: usize) -> [Vec<f32>; 4] {
    let threads = ThreadPool::new(Threads(threads));
    let mut y = vec![f32::NAN; c.dy.len()];
    let mut work = vec![f32::NAN; work_len(s)];
    let (x, d) = (Values::F32(&c.x), Values::F32(&c.dy));
    let (b, to) = ((Some(&c.b[..]), false), ValuesMut::F32(&mut y));
    forward(&threads, s, x, &c.w, b, &mut work, to);
    let mut dw = vec![f32::NAN; c.w.len()];
    weight_gradient(&threads, s, x, d, &mut work, &mut dw, Mode::Write);
    let mut db = vec![1.0; s.out];
    bias_gradient(&threads, s, &c.dy, &mut work, &mut db, Mode::Add);
    let mut dx = vec![f32::NAN; c.x.len()];
    let memory = (&mut work[..], ValuesMut::F32(&mut dx));
    input_gradient(&threads, s, &c.w, d, memory, Mode::Write);
    let mut twice = dx.clone();
    let memory = (&mut work[..], ValuesMut::F32(&mut twice));
    input_gradient(&threads, s, &c.w, d, memory, Mode::Add);
    assert!(dx.iter().zip(&twice).all(|(a, b)| a + a == *b), "{s:?}");
    [y, dw, db, dx]
}

fn close(got: &[f32], want: &[f64], what: &str) {
    let largest = want.iter().fold(1.0f64, |a, v| a.max(v.abs()));
    for (g, w) in got.iter().zip(want) {
        assert!(
            (f64::from(*g) - w).abs() < 3e-6 * largest,
            "{what}: {g} {w}"
        );
    }
}

#[test]
fn all_passes_agree_with_the_definition() {
    for s in shapes() {
        let c = case(&s);
        let mut y: Vec<f64> = (0..c.dy.len()).map(|i| f64::from(c.b[i % s.out])).collect();
        let (mut dw, mut dx) = (vec![0.0; c.w.len()], vec![0.0; c.x.len()]);
        each(&s, |o, i, w| {
            y[o] += f64::from(c.x[i]) * f64::from(c.w[w]);
            dw[w] += f64::from(c.x[i]) * f64::from(c.dy[o]);
            dx[i] += f64::from(c.w[w]) * f64::from(c.dy[o]);
        });
        let mut db = vec![1.0; s.out];
        c.dy.iter()
            .enumerate()
            .for_each(|(i, &d)| db[i % s.out] += f64::from(d));
        let got = run(&s, &c, 1);
        for ((g, w), what) in got
            .iter()
            .zip([&y, &dw, &db, &dx])
            .zip(["y", "dw", "db", "dx"])
        {
            close(g, w, &format!("{s:?} {what}"));
        }
    }
}

#[test]
fn threads_and_vectors_do_not_change_a_bit() {
    for s in shapes() {
        let c = case(&s);
        let one = run(&s, &c, 1);
        if matches!(Method::of(&s), Method::Direct | Method::Depthwise) {
            on_each_isa(|isa| assert_eq!(one, run(&s, &c, 1), "{s:?} {isa:?}"));
        }
        assert_eq!(one, run(&s, &c, 2), "{s:?}");
        assert_eq!(one, run(&s, &c, 4), "{s:?}");
    }
}

#[test]
fn both_methods_are_used_and_no_images_are_fine() {
    let methods: Vec<Method> = shapes().iter().map(Method::of).collect();
    assert!(methods.contains(&Method::Gather) && methods.contains(&Method::Pointwise));
    assert!(methods.contains(&Method::Direct) && methods.contains(&Method::Depthwise));
    for mut s in shapes() {
        s.images = 0;
        let [y, dw, db, dx] = run(&s, &case(&s), 2);
        assert!(y.is_empty() && dx.is_empty());
        assert!(dw.iter().all(|&v| v == 0.0) && db.iter().all(|&v| v == 1.0));
    }
}

/// A batch of none, which a rank without samples has: nothing is written but a weight gradient of zeros.
#[test]
fn no_images_have_no_outputs_and_gradients_of_zeros() {
    let one = [1, 1];
    let mut all = shapes();
    // Winograd's, with its weights whole and by panels.
    all.push(shape([8, 8], 64, 128, [3, 3], one, one, one, 1));
    all.push(shape([4, 4], 512, 512, [3, 3], one, one, one, 1));
    let threads = ThreadPool::new(Threads(2));
    for mut s in all {
        s.images = 0;
        for precision in [Precision::F32, Precision::Bf16] {
            s.precision = precision;
            let stored = match may_be_bf16(&s) {
                true => Precision::Bf16,
                false => Precision::F32,
            };
            let (w, bias) = (vec![1.0; s.weight_len()], vec![1.0; s.out]);
            let mut work = vec![f32::NAN; work_len(&s)];
            let bias = (stored == Precision::F32).then_some(&bias[..]);
            let (x, dy) = (Values::of(&[], stored, 0), Values::of(&[], stored, 0));
            let none = ValuesMut::of(&mut [], stored, 0);
            forward(&threads, &s, x, &w, (bias, false), &mut work, none);
            for (mode, want) in [(Mode::Write, 0.0), (Mode::Add, 7.0)] {
                let mut dw = vec![7.0; s.weight_len()];
                weight_gradient(&threads, &s, x, dy, &mut work, &mut dw, mode);
                assert!(dw.iter().all(|g| *g == want), "{s:?}");
                let none = ValuesMut::of(&mut [], stored, 0);
                input_gradient(&threads, &s, &w, dy, (&mut work, none), mode);
            }
        }
    }
}

/// y, dw, dx and the sum of dx and x, of values stored as bf16.
fn run_stored(s: &ConvShape, c: &Case, threads: usize) -> [Vec<f32>; 4] {
    let threads = ThreadPool::new(Threads(threads));
    let narrow = |v: &[f32]| v.iter().map(|v| Bf16::of(*v)).collect::<Vec<_>>();
    let wide = |v: &[Bf16]| v.iter().map(|v| v.wide()).collect::<Vec<_>>();
    let (x, dy) = (narrow(&c.x), narrow(&c.dy));
    let (from, d) = (Values::Bf16(&x), Values::Bf16(&dy));
    let mut work = vec![f32::NAN; work_len(s)];
    let mut y = narrow(&vec![f32::NAN; dy.len()]);
    let to = ValuesMut::Bf16(&mut y);
    forward(&threads, s, from, &c.w, (None, false), &mut work, to);
    let mut dw = vec![f32::NAN; c.w.len()];
    weight_gradient(&threads, s, from, d, &mut work, &mut dw, Mode::Write);
    let mut dx = narrow(&vec![f32::NAN; x.len()]);
    let mut sum = x.clone();
    for (to, mode) in [(&mut dx, Mode::Write), (&mut sum, Mode::Add)] {
        let memory = (&mut work[..], ValuesMut::Bf16(to));
        input_gradient(&threads, s, &c.w, d, memory, mode);
    }
    [wide(&y), dw, wide(&dx), wide(&sum)]
}

/// Against f64 sums of what is stored, to half a unit of bf16; and equal bits for all threads, and for all instruction
/// sets of a family.
#[test]
fn values_stored_as_bf16_are_rounded_once_in_every_family() {
    let (one, three) = ([1, 1], [3, 3]);
    let mut all = shapes();
    all.push(shape([8, 9], 32, 48, three, one, one, one, 1));
    all.push(shape([4, 4], 288, 272, three, one, one, one, 1));
    for mut s in all {
        s.precision = Precision::Bf16;
        if !may_be_bf16(&s) {
            continue;
        }
        let mut c = case(&s);
        for v in c.x.iter_mut().chain(&mut c.dy).chain(&mut c.w) {
            *v = Bf16::of(*v).wide();
        }
        let (mut y, mut dw) = (vec![0.0; c.dy.len()], vec![0.0; c.w.len()]);
        let mut dx = vec![0.0; c.x.len()];
        each(&s, |o, i, w| {
            y[o] += f64::from(c.x[i]) * f64::from(c.w[w]);
            dw[w] += f64::from(c.x[i]) * f64::from(c.dy[o]);
            dx[i] += f64::from(c.w[w]) * f64::from(c.dy[o]);
        });
        let sum = c.x.iter().zip(&dx).map(|(x, d)| f64::from(*x) + d);
        let sum: Vec<f64> = sum.collect();
        let mut known: Vec<(Family, [Vec<f32>; 4])> = Vec::new();
        on_each_isa(|isa| {
            let got = run_stored(&s, &c, 1);
            let family = Family::here();
            if let Some((_, want)) = known.iter().find(|(other, _)| *other == family) {
                return assert!(*want == got, "{s:?} {isa:?}");
            }
            let wants = [(&y, 1.0), (&dw, 0.0), (&dx, 1.0), (&sum, 2.0)];
            for ((got, (want, roundings)), what) in
                got.iter().zip(wants).zip(["y", "dw", "dx", "sum"])
            {
                let largest = want.iter().fold(1.0f64, |a, v| a.max(v.abs()));
                for (g, w) in got.iter().zip(want) {
                    let bound = roundings * w.abs() / 256.0 + 2e-5 * largest;
                    assert!(
                        (f64::from(*g) - w).abs() <= bound,
                        "{s:?} {isa:?} {what}: {g} {w}"
                    );
                }
            }
            known.push((family, got));
        });
        let here = run_stored(&s, &c, 1);
        assert!(known.contains(&(Family::here(), here.clone())), "{s:?}");
        for threads in [2, 4] {
            assert!(run_stored(&s, &c, threads) == here, "{s:?} {threads}");
        }
    }
}
