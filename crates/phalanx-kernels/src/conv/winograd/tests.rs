//! Errors against exact sums, and equal bits whatever computes.

use super::super::tests::{case, each, run, shape};
use super::*;
use crate::isa::on_each_isa;
use crate::scalar::noise;

fn shapes() -> Vec<ConvShape> {
    let (one, three) = ([1, 1], [3, 3]);
    let mut all = vec![
        shape([8, 8], 32, 48, three, one, one, one, 1),
        shape([9, 6], 48, 32, three, one, [0, 0], one, 1),
        shape([5, 7], 32, 32, three, one, [2, 2], one, 1),
        shape([4, 4], 144, 80, three, one, one, one, 1),
        shape([13, 14], 64, 64, three, one, one, one, 1),
        // Few tiles and large weights: all three passes keep their tiles.
        shape([3, 4], 288, 272, three, one, one, one, 1),
    ];
    let two = [2, 2];
    all.extend([
        shape([8, 8], 32, 48, three, two, one, one, 1),
        shape([7, 7], 48, 32, three, two, one, one, 1),
        shape([29, 14], 64, 64, three, two, one, one, 1),
        // Blocks of inputs and of outputs that lie in two phases; all tiles are kept.
        shape([7, 8], 80, 208, three, two, one, one, 1),
        shape([8, 7], 144, 112, three, two, one, one, 1),
    ]);
    // More than one block of tiles.
    for stride in [one, two] {
        all.push(ConvShape {
            images: 30,
            ..shape(
                [7, 8].map(|n| n * stride[0]),
                32,
                32,
                three,
                stride,
                one,
                one,
                1,
            )
        });
    }
    // Weight gradients in two partial sums, the second over fewer tiles.
    all.push(ConvShape {
        images: 15,
        ..shape([24, 23], 32, 32, three, one, one, one, 1)
    });
    all.push(ConvShape {
        images: 40,
        ..shape([33, 40], 32, 32, three, two, one, one, 1)
    });
    all
}

#[test]
fn weight_gradients_come_in_all_ways() {
    let ways: Vec<_> = shapes()
        .iter()
        .map(|s| (Grid::forward(s), s.stride[0]))
        .map(|(g, stride)| (stride, g.keeps_tiles(), partials(&g)))
        .collect();
    for stride in [1, 2] {
        for (keeps, parts) in [(true, 1), (false, 1), (false, 2)] {
            let way = (stride, keeps, parts);
            assert!(ways.contains(&way), "{way:?}");
        }
    }
}

/// Relative L2 and largest error over largest value.
fn errors(got: &[f32], want: &[f64]) -> (f64, f64) {
    let (mut error, mut norm, mut worst, mut largest) = (0.0f64, 0.0f64, 0.0f64, 0.0f64);
    for (&g, &w) in got.iter().zip(want) {
        let e = f64::from(g) - w;
        error += e * e;
        norm += w * w;
        worst = worst.max(e.abs());
        largest = largest.max(w.abs());
    }
    ((error / norm).sqrt(), worst / largest)
}

#[test]
fn errors_stay_within_the_stated_bound() {
    for s in shapes() {
        assert!(fits(&s), "{s:?}");
        let c = case(&s);
        let mut y: Vec<f64> = (0..c.dy.len()).map(|i| f64::from(c.b[i % s.out])).collect();
        let (mut dw, mut dx) = (vec![0.0; c.w.len()], vec![0.0; c.x.len()]);
        each(&s, |o, i, w| {
            y[o] += f64::from(c.x[i]) * f64::from(c.w[w]);
            dw[w] += f64::from(c.x[i]) * f64::from(c.dy[o]);
            dx[i] += f64::from(c.w[w]) * f64::from(c.dy[o]);
        });
        let [gy, gdw, _, gdx] = run(&s, &c, 1);
        for (got, want, what) in [(&gy, &y, "y"), (&gdw, &dw, "dw"), (&gdx, &dx, "dx")] {
            let (l2, worst) = errors(got, want);
            assert!(l2 < 5e-6 && worst < 2e-5, "{s:?} {what}: {l2:e} {worst:e}");
        }
    }
}

#[test]
fn bits_are_those_of_one_thread_and_no_vectors() {
    for s in shapes() {
        let c = case(&s);
        let mut first = None;
        on_each_isa(|isa| {
            let now = run(&s, &c, 1);
            assert!(
                first.get_or_insert_with(|| now.clone()) == &now,
                "{s:?} {isa:?}"
            );
        });
        for threads in [2, 4] {
            assert!(
                first.as_ref() == Some(&run(&s, &c, threads)),
                "{s:?} {threads} threads"
            );
        }
    }
}

#[test]
fn adding_adds_the_same_bits() {
    let threads = ThreadPool::new(crate::par::Threads(2));
    for s in shapes() {
        let c = case(&s);
        let [_, dw, _, dx] = run(&s, &c, 1);
        let mut work = vec![f32::NAN; work_len(&s)];
        let sum = |before: &[f32], v: &[f32]| -> Vec<f32> {
            before.iter().zip(v).map(|(a, b)| a + b).collect()
        };
        let before = noise(dw.len(), 9);
        let mut got = before.clone();
        let (x, dy) = (Values::F32(&c.x), Values::F32(&c.dy));
        weight_gradient(&threads, &s, x, dy, &mut work, &mut got, Mode::Add);
        assert!(got == sum(&before, &dw));
        let before = noise(dx.len(), 9);
        let mut got = before.clone();
        let to = ValuesMut::F32(&mut got);
        input_gradient(&threads, &s, &c.w, dy, &mut work, to, Mode::Add);
        assert!(got == sum(&before, &dx));
    }
}
