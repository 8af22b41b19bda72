//! Steps whose products are made in bf16.

use crate::common::{hashed, noise};
use phalanx_nn::layers::{Act, BatchNorm, Conv2d, Conv2dOptions, Linear};
use phalanx_nn::models::{CifarResNet, MnistCnn, ResNet9};
use phalanx_nn::optim::Sgd;
use phalanx_nn::{
    Family, GradView, Grads, Layout, Precision, Scope, Seed, StepKey, Tape, Tensor, Threads,
    param::Init,
};

/// What a value becomes in a product.
fn bf16(v: f32) -> f64 {
    let bits = v.to_bits();
    f64::from(f32::from_bits(
        (bits + 0x7fff + (bits >> 16 & 1)) & 0xffff_0000,
    ))
}

/// What an operand in f32 becomes in a product.
fn factor(v: f32) -> f64 {
    match Family::here() {
        Family::Other => f64::from(v),
        _ => bf16(v),
    }
}

/// Losses, weights and statistics after some steps of a small ResNet; allocations after each step, then bytes in all.
fn resnet(
    precision: Precision,
    threads: usize,
    poison: bool,
) -> (Vec<f32>, Vec<f32>, Vec<f32>, Vec<u64>) {
    let mut scope = Scope::new(Seed(7));
    let model = CifarResNet::new(&mut scope, &[32, 64], 2, 10);
    let mut params = scope.build().unwrap();
    let mut grads = Grads::like(&params);
    let mut sgd = Sgd::new(&params, 0.01).momentum(0.9);
    let mut tape = Tape::new(Threads(threads));
    tape.set_precision(precision);
    tape.poison(poison);
    let shape = [5, 16, 16, 3];
    let (mut losses, mut counts) = (vec![], vec![]);
    for i in 0..6 {
        let images = hashed(shape.iter().product(), 200 + i % 3, 8, 1.0);
        let step = tape.step(&params, StepKey::new(0, i));
        let x = step.input(&images, &shape).unwrap();
        let loss = model.forward(x).unwrap();
        let loss = loss.cross_entropy(&[0, 1, 2, 3, 4], 5.0).unwrap();
        losses.push(loss.item().unwrap());
        loss.backward(&mut grads).unwrap();
        drop(step);
        tape.update_buffers(&mut params).unwrap();
        sgd.step(&mut params, &grads).unwrap();
        counts.push(tape.allocations());
    }
    counts.push(tape.pool_bytes());
    (
        losses,
        params.flat().to_vec(),
        params.buffers_flat().to_vec(),
        counts,
    )
}

#[test]
fn bits_do_not_depend_on_threads_or_old_contents_and_allocations_stand_still() {
    let one = resnet(Precision::Bf16, 1, false);
    assert!(one.0.iter().all(|l| l.is_finite()));
    assert!(one.3[1..6].iter().all(|&c| c == one.3[1]), "{:?}", one.3);
    for (threads, poison) in [(1, true), (2, false), (4, false)] {
        let other = resnet(Precision::Bf16, threads, poison);
        assert!(
            (&other.0, &other.1, &other.2) == (&one.0, &one.1, &one.2),
            "{threads} threads, poison {poison}"
        );
    }
}

#[test]
fn training_follows_f32() {
    let (f32s, bf16s) = (
        resnet(Precision::F32, 2, false),
        resnet(Precision::Bf16, 2, false),
    );
    assert_ne!(f32s.0, bf16s.0, "bf16 must not be f32");
    assert!(
        10 * bf16s.3[6] < 9 * f32s.3[6],
        "{:?} {:?}",
        bf16s.3,
        f32s.3
    );
    for (i, (a, b)) in f32s.0.iter().zip(&bf16s.0).enumerate() {
        assert!((a - b).abs() < 0.02 * a.abs().max(1.0), "loss {i}: {a} {b}");
    }
}

/// ResNet-9 has pools and activations whose elements stay bf16.
#[test]
fn resnet9s_bits_do_not_depend_on_threads() {
    let run = |precision, threads| {
        let mut scope = Scope::new(Seed(5));
        let model = ResNet9::with_widths(&mut scope, [32, 48, 32], 10);
        let params = scope.build().unwrap();
        let mut grads = Grads::like(&params);
        let mut tape = Tape::new(Threads(threads));
        tape.set_precision(precision);
        let images = noise(10 * 32 * 32 * 3, 7);
        let labels: Vec<u32> = (0..10).collect();
        let step = tape.step(&params, StepKey::new(0, 0));
        let x = step.input(&images, &[10, 32, 32, 3]).unwrap();
        let scores = model.forward(x).unwrap().scale(32.0).unwrap();
        let loss = scores.cross_entropy(&labels, 10.0).unwrap();
        let value = loss.item().unwrap();
        loss.backward(&mut grads).unwrap();
        (value, grads.flat().to_vec())
    };
    let (want, got) = (run(Precision::F32, 1), run(Precision::Bf16, 1));
    assert!((want.0 - got.0).abs() < 0.02, "{} {}", want.0, got.0);
    assert_ne!(want.0, got.0, "bf16 must not be f32");
    assert!(run(Precision::Bf16, 2) == got && run(Precision::Bf16, 4) == got);
}

/// Against the same operations in f32 on rounded values, and a product in f64.
#[test]
fn pools_and_activations_round_what_f32_gives() {
    if Family::here() == Family::Other {
        return; // 1x1 convolutions are those of f32
    }
    let (channels, pixels) = (32, 3 * 7 * 7);
    let (x, weights) = (noise(pixels * channels, 1), noise(3 * 9 * channels, 2));
    let mut scope = Scope::new(Seed(3));
    let one = Conv2dOptions::new(1).no_bias();
    let conv = Conv2d::new(scope.enter("conv"), channels, channels, one);
    let params = scope.build().unwrap();
    let mut grads = Grads::like(&params);
    let mut tape = Tape::new(Threads(1));
    tape.set_precision(Precision::Bf16);
    let step = tape.step(&params, StepKey::new(0, 0));
    let y = step.input(&x, &[3, 7, 7, channels]).unwrap();
    let y = conv.forward(y).unwrap();
    let values = y.share().to_vec();
    let y = y.max_pool2d(2).unwrap().gelu().unwrap();
    let got = y.share().to_vec();
    y.backward_with(&weights, &mut grads).unwrap();

    let round = |v: &f32| bf16(*v) as f32;
    assert!(values.iter().all(|v| round(v) == *v), "values in bf16");
    let none = Scope::new(Seed(0)).build().unwrap();
    let mut tape = Tape::new(Threads(1));
    let step = tape.step(&none, StepKey::new(0, 0));
    let input = step.variable(&values, &[3, 7, 7, channels]).unwrap();
    let pooled = input.share().max_pool2d(2).unwrap();
    let want = pooled.gelu().unwrap();
    let rounded: Vec<f32> = want.share().to_vec().iter().map(round).collect();
    assert_eq!(got, rounded);
    let weights: Vec<f32> = weights.iter().map(round).collect();
    let mut no_grads = Grads::like(&none);
    want.backward_with(&weights, &mut no_grads).unwrap();
    let d: Vec<f64> = input.grad().unwrap().iter().map(|v| bf16(*v)).collect();
    let gradient = grads.export(params.find("conv.weight").unwrap());
    for (at, got) in gradient.iter().enumerate() {
        let (o, i) = (at / channels, at % channels);
        let products = (0..pixels).map(|p| factor(x[p * channels + i]) * d[p * channels + o]);
        let want: f64 = products.sum();
        assert!((f64::from(*got) - want).abs() < 1e-4, "{at}: {got} {want}");
    }
}

#[test]
fn the_mnist_cnn_follows_f32() {
    let run = |precision, threads| {
        let mut scope = Scope::new(Seed(5));
        let model = MnistCnn::new(&mut scope);
        let params = scope.build().unwrap();
        let mut grads = Grads::like(&params);
        let mut tape = Tape::new(Threads(threads));
        tape.set_precision(precision);
        let images = noise(10 * 784, 7);
        let labels: Vec<u32> = (0..10).collect();
        let step = tape.step(&params, StepKey::new(0, 0));
        let x = step.input(&images, &[10, 28, 28, 1]).unwrap();
        let loss = model.forward(x).unwrap().nll_loss(&labels, 10.0).unwrap();
        let value = loss.item().unwrap();
        loss.backward(&mut grads).unwrap();
        (value, grads.flat().to_vec())
    };
    let (want, got) = (run(Precision::F32, 1), run(Precision::Bf16, 1));
    assert!((want.0 - got.0).abs() < 0.01, "{} {}", want.0, got.0);
    let norm = |v: &mut dyn Iterator<Item = f32>| v.map(|v| f64::from(v * v)).sum::<f64>().sqrt();
    let off = norm(&mut want.1.iter().zip(&got.1).map(|(a, b)| a - b));
    // Eight bits of each factor, and a few max-pooling windows that choose another pixel.
    let whole = norm(&mut want.1.iter().copied());
    assert!(off < 0.05 * whole, "{off} of {whole}");
    assert!(run(Precision::Bf16, 2) == got && run(Precision::Bf16, 4) == got);
}

#[test]
fn linear_layers_and_matrices_multiply_rounded_values() {
    let (rows, inp, out) = (37, 45, 50);
    let (x, d) = (noise(rows * inp, 1), noise(rows * out, 2));
    let mut scope = Scope::new(Seed(3));
    let layer = Linear::without_bias(scope.enter("linear"), inp, out);
    let matrix = scope.param(
        "matrix",
        &[inp, out],
        Layout::Same,
        Init::KaimingUniform { fan_in: inp },
    );
    let params = scope.build().unwrap();
    for (id, turned) in [(layer.weight, true), (matrix, false)] {
        let mut tape = Tape::new(Threads(2));
        tape.set_precision(Precision::Bf16);
        let mut grads = Grads::like(&params);
        let step = tape.step(&params, StepKey::new(0, 0));
        let input = step.variable(&x, &[rows, inp]).unwrap();
        let y = match turned {
            true => input.share().linear(id, None, Act::None),
            false => input.share().matmul(id),
        }
        .unwrap();
        let w = params.get(id);
        let weight = |i: usize, o: usize| factor(w[if turned { o * inp + i } else { i * out + o }]);
        for (n, got) in y.to_vec().iter().enumerate() {
            let (r, o) = (n / out, n % out);
            let want: f64 = (0..inp)
                .map(|i| factor(x[r * inp + i]) * weight(i, o))
                .sum();
            assert!((f64::from(*got) - want).abs() < 1e-5, "y {n}: {got} {want}");
        }
        y.backward_with(&d, &mut grads).unwrap();
        for (n, got) in input.grad().unwrap().iter().enumerate() {
            let (r, i) = (n / inp, n % inp);
            let want: f64 = (0..out)
                .map(|o| factor(d[r * out + o]) * weight(i, o))
                .sum();
            assert!(
                (f64::from(*got) - want).abs() < 1e-5,
                "dx {n}: {got} {want}"
            );
        }
        for (n, got) in grads.grad(id).iter().enumerate() {
            let (i, o) = if turned {
                (n % inp, n / inp)
            } else {
                (n / out, n % out)
            };
            let sum = |r: usize| factor(x[r * inp + i]) * factor(d[r * out + o]);
            let want: f64 = (0..rows).map(sum).sum();
            assert!(
                (f64::from(*got) - want).abs() < 1e-5,
                "dw {n}: {got} {want}"
            );
        }
    }
}

/// What the activations of [`mixed`] do to each element, in the order they are met: the
/// factor (0 or 1) and the offset (0, or the upper bound).
type Open = Vec<(Vec<f32>, Vec<f32>)>;

/// How a step through all that values in bf16 can meet is computed.
#[derive(Clone, Copy)]
struct Mixed<'a> {
    precision: Precision,
    threads: usize,
    recompute: bool,
    /// Lets this through instead of what an activation's own input says.
    forced: Option<&'a Open>,
}

/// What readers saw and the gradients, of a step through residuals of either kind, other
/// operations, two readers, recomputation; and what its activations let through.
fn mixed(how: Mixed<'_>) -> (Vec<Vec<f32>>, Open) {
    let mut scope = Scope::new(Seed(11));
    let conv = |scope: &mut Scope, name: &str, inp, out| {
        let options = Conv2dOptions::new(3).padding(1).no_bias();
        Conv2d::new(scope.enter(name), inp, out, options)
    };
    let first = conv(&mut scope, "first", 3, 33);
    let norm = BatchNorm::new(scope.enter("norm"), 33);
    let second = conv(&mut scope, "second", 33, 33);
    let norm2 = BatchNorm::new(scope.enter("norm2"), 33);
    let params = scope.build().unwrap();
    let mut grads = Grads::like(&params);
    let mut tape = Tape::new(Threads(how.threads));
    tape.set_precision(how.precision);
    tape.poison(true);
    let step = tape.step(&params, StepKey::new(0, 0));
    let shape = [3, 5, 7, 33];
    let x = step.variable(&noise(3 * 35 * 3, 1), &[3, 5, 7, 3]).unwrap();
    let wide = step.variable(&noise(3 * 35 * 33, 2), &shape).unwrap();
    let open = std::cell::RefCell::new(Open::new());
    // A normalisation with a residual and an activation between 0 and `high`.
    let gated = |norm: &BatchNorm, x, residual, act, high: f32| {
        let Some(forced) = how.forced else {
            let y: Tensor<'_> = norm.forward_residual(x, residual, act)?;
            let flag = |on: bool| f32::from(u8::from(on));
            let values = y.share().to_vec();
            let factors = values.iter().map(|&v| flag(v > 0.0 && v < high)).collect();
            let offsets = values.iter().map(|&v| if v < high { 0.0 } else { high });
            open.borrow_mut().push((factors, offsets.collect()));
            return Ok(y);
        };
        let (factors, offsets) = &forced[open.borrow().len()];
        open.borrow_mut().push((factors.clone(), offsets.clone()));
        norm.forward_residual(x, residual, Act::None)?
            .mul(step.input(factors, &shape)?)?
            .add(step.input(offsets, &shape)?)
    };
    let body = |x| {
        // A residual in f32 beside a value in bf16, then the other way round.
        let y = gated(
            &norm,
            first.forward(x)?,
            wide.share(),
            Act::Relu,
            f32::INFINITY,
        )?;
        let z = second.forward(y.share())?;
        let z = norm2.forward_residual(z, y.share(), Act::None)?;
        let both = gated(&norm2, wide.share().relu()?, z.share(), Act::Relu6, 6.0)?;
        z.add(y)?.add(both)
    };
    let out = if how.recompute {
        x.share().recompute(body)
    } else {
        body(x.share())
    };
    let out = out.unwrap();
    let seen = out.to_vec();
    let weights = noise(3 * 35 * 33, 4);
    out.backward_with(&weights, &mut grads).unwrap();
    let results = vec![
        seen,
        x.grad().unwrap(),
        wide.grad().unwrap(),
        grads.flat().to_vec(),
    ];
    (results, open.into_inner())
}

#[test]
fn values_in_bf16_meet_other_operations() {
    let run = |precision, threads, recompute| Mixed {
        precision,
        threads,
        recompute,
        forced: None,
    };
    let (got, open) = mixed(run(Precision::Bf16, 1, false));
    let (free, free_open) = mixed(run(Precision::F32, 1, false));
    // Rounding moves a few sums across an activation's bound, where its derivative jumps: their
    // whole gradient appears or disappears. What bf16 itself does to gradients shows only where
    // f32 lets the same elements through.
    let (want, _) = mixed(Mixed {
        forced: Some(&open),
        ..run(Precision::F32, 1, false)
    });
    let norm = |v: &mut dyn Iterator<Item = f32>| v.map(|v| f64::from(v * v)).sum::<f64>().sqrt();
    let off = |want: &[f32], got: &[f32]| {
        norm(&mut want.iter().zip(got).map(|(a, b)| a - b)) / norm(&mut want.iter().copied())
    };
    for (i, (want, got)) in want.iter().zip(&got).enumerate() {
        let off = off(want, got);
        assert!(off > 0.0 && off < 0.01, "{i}: {off}");
    }
    // What readers see does not jump, and few elements cross (6 of 6930 here, which make 4 % of a gradient).
    assert!(off(&free[0], &got[0]) < 0.01);
    for (a, b) in open.iter().zip(&free_open) {
        let crossed = a.0.iter().zip(&b.0).filter(|(a, b)| a != b).count();
        assert!(crossed * 200 < a.0.len(), "{crossed}");
    }
    // Forcing as such changes nothing.
    let (own, _) = mixed(Mixed {
        forced: Some(&free_open),
        ..run(Precision::F32, 1, false)
    });
    assert!(own == free);
    for threads in [1, 2, 4] {
        assert!(
            mixed(run(Precision::Bf16, threads, false)).0 == got,
            "{threads} threads"
        );
        assert!(
            mixed(run(Precision::Bf16, threads, true)).0 == got,
            "{threads} threads again"
        );
    }
}

#[test]
fn a_convolution_rounds_once_and_readers_see_its_values() {
    if Family::here() == Family::Other {
        return; // 1x1 convolutions are those of f32
    }
    let mut scope = Scope::new(Seed(2));
    let options = Conv2dOptions::new(1).no_bias();
    let layer = Conv2d::new(scope.enter("conv"), 40, 24, options);
    let params = scope.build().unwrap();
    let mut tape = Tape::new(Threads(1));
    tape.set_precision(Precision::Bf16);
    let images = noise(4 * 40, 3);
    for training in [true, false] {
        let step = match training {
            true => tape.step(&params, StepKey::new(0, 0)),
            false => tape.inference(&params),
        };
        let x = step.input(&images, &[1, 2, 2, 40]).unwrap();
        let y = layer.forward(x).unwrap();
        let other = y.share();
        assert_eq!(y.data(), other.data());
        let w = params.get(layer.weight);
        for (n, &got) in y.data().iter().enumerate() {
            let (p, o) = (n / 24, n % 24);
            let sum: f64 = (0..40)
                .map(|i| factor(images[p * 40 + i]) * factor(w[i * 24 + o]))
                .sum();
            assert_eq!(f64::from(got), bf16(got), "{n} is not bf16");
            // Half a unit in the eighth bit, and f32's own rounding.
            assert!(
                (f64::from(got) - sum).abs() <= sum.abs() / 256.0 + 1e-6,
                "{n}: {got} {sum}"
            );
        }
        assert_eq!(
            y.relu().unwrap().to_vec(),
            other.data().iter().map(|v| v.max(0.0)).collect::<Vec<_>>()
        );
    }
}

/// A rank may have none of a layer's inputs or outputs.
#[test]
fn layers_without_inputs_or_outputs_give_their_bias_or_nothing() {
    for (inputs, outputs) in [(0, 3), (3, 0)] {
        let mut scope = Scope::new(Seed(1));
        let layer = Linear::new(scope.enter("layer"), inputs, outputs);
        let mut params = scope.build().unwrap();
        params.get_mut(layer.bias.unwrap()).fill(0.5);
        let mut grads = Grads::like(&params);
        let mut tape = Tape::new(Threads(1));
        tape.set_precision(Precision::Bf16);
        let step = tape.step(&params, StepKey::new(0, 0));
        let x = step.input(&vec![1.0; 2 * inputs], &[2, inputs]).unwrap();
        let y = layer.forward(x).unwrap();
        assert_eq!(y.to_vec(), vec![0.5; 2 * outputs]);
        y.sum(&[], false).unwrap().backward(&mut grads).unwrap();
        drop(step);
        assert_eq!(grads.grad(layer.bias.unwrap()), vec![2.0; outputs]);
    }
}
