//! Whole steps: the golden linear run, PyTorch's MNIST losses, equal bits,
//! memory, order of readiness.

use std::error::Error as _;
use std::io::Read;
use std::path::Path;

use crate::common::{Recorder, hashed, noise};
use phalanx_nn::layers::Linear;
use phalanx_nn::models::{LinearToy, MnistCnn};
use phalanx_nn::optim::{Adam, Optimizer, Sgd, step_clipped};
use phalanx_nn::{
    ErrorKind, GradSink, GradView, Grads, Init, Layout, ParamId, Params, Reduction, Scope, Seed,
    StepKey, Tape, Tensor, Threads,
};
use serde_json::Value;
use sha2::Digest;

/// The OneFlow document's program: two ranks, gradients averaged, 500 steps of
/// SGD. Its printed losses are the expected ones, to the last digit.
#[test]
fn golden_linear_run() {
    let mut scope = Scope::new(Seed(0));
    let model = LinearToy::new(&mut scope);
    let mut params = scope.build().unwrap();
    let mut sgd = Sgd::new(&params, 0.01);
    let mut tape = Tape::new(Threads(1));
    let ranks = [
        ([1.0, 2.0, 2.0, 3.0], [8.0, 13.0]),
        ([4.0, 6.0, 3.0, 1.0], [26.0, 9.0]),
    ];
    let mut printed = Vec::new();
    for i in 0..500 {
        let mut mean = [0.0f32; 2];
        for (x, y) in &ranks {
            let mut grads = Grads::like(&params);
            let step = tape.step(&params, StepKey::new(0, i));
            let x = step.input(x, &[2, 2]).unwrap();
            let loss = model
                .forward(x)
                .unwrap()
                .mse_loss(y, Reduction::Sum)
                .unwrap();
            if i == 49 || i == 499 {
                printed.push(f64::from(loss.item().unwrap()));
            }
            loss.backward(&mut grads).unwrap();
            for (m, g) in mean.iter_mut().zip(grads.grad(model.w)) {
                *m += g * 0.5;
            }
        }
        let mut grads = Grads::like(&params);
        grads.slot(model.w).copy_from_slice(&mean);
        sgd.step(&mut params, &grads).unwrap();
    }
    #[allow(clippy::excessive_precision)] // as the document prints them
    let document = [
        0.00025336415274068713,
        0.004111831542104483,
        4.547473508864641e-12,
        6.184563972055912e-11,
    ];
    assert_eq!(printed, document);
    let w = params.get(model.w);
    assert!(
        (w[0] - 2.0).abs() < 1e-5 && (w[1] - 3.0).abs() < 1e-5,
        "{w:?}"
    );
}

struct Batch {
    images: Vec<f32>,
    labels: Vec<u32>,
}

/// Five batches of formula images (parity/README.md).
fn made() -> Vec<Batch> {
    (0..5)
        .map(|t| {
            let mut images = hashed(16 * 784, 100 + t, 8, 1.0);
            let labels: Vec<u32> = (0..16).map(|i| i % 10).collect();
            for (i, &l) in labels.iter().enumerate() {
                let row = i * 784 + (2 * l as usize + 4) * 28;
                images[row..row + 28].fill(2.0);
            }
            Batch { images, labels }
        })
        .collect()
}

/// The first 320 training images of MNIST, if the data is at hand.
fn real() -> Option<Vec<Batch>> {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../../shared/data/mnist");
    let read = |name: &str, header: usize, len: usize| {
        let file = std::fs::File::open(dir.join(name)).ok()?;
        let mut bytes = vec![0; header + len];
        flate2::read::GzDecoder::new(file)
            .read_exact(&mut bytes)
            .ok()?;
        Some(bytes.split_off(header))
    };
    let pixels = read("train-images-idx3-ubyte.gz", 16, 320 * 784)?;
    let labels = read("train-labels-idx1-ubyte.gz", 8, 320)?;
    let scaled: Vec<f32> = pixels
        .iter()
        .map(|&p| (f32::from(p) / 255.0 - 0.1307) / 0.3081)
        .collect();
    Some(
        scaled
            .chunks(64 * 784)
            .zip(labels.chunks(64))
            .map(|(i, l)| Batch {
                images: i.to_vec(),
                labels: l.iter().map(|&l| u32::from(l)).collect(),
            })
            .collect(),
    )
}

/// The network without dropout, weights by formula.
fn formula_mnist(scale: &Value) -> (MnistCnn, Params) {
    let mut scope = Scope::new(Seed(0));
    let model = MnistCnn::with_dropout(&mut scope, 0.0, 0.0);
    let mut params = scope.build().unwrap();
    for id in params.ids() {
        let info = params.infos()[id.index()].clone();
        let values = hashed(
            info.len,
            id.index() as u64,
            16,
            scale[&info.name].as_f64().unwrap(),
        );
        params.import(id, &values).unwrap();
    }
    (model, params)
}

fn l2(values: &[f32]) -> f64 {
    values
        .iter()
        .map(|&v| f64::from(v) * f64::from(v))
        .sum::<f64>()
        .sqrt()
}

fn assert_close(what: &str, got: f64, want: f64, relative: f64) {
    assert!(
        (got - want).abs() <= relative * want.abs(),
        "{what}: {got}, PyTorch has {want}"
    );
}

fn five_steps(fixture: &Value, run: &Value, batches: &[Batch]) {
    let (model, mut params) = formula_mnist(&fixture["scale"]);
    let mut tape = Tape::new(Threads(2));
    let mut grads = Grads::like(&params);
    let optimizer = run["optimizer"].as_str().unwrap();
    let mut sgd = Sgd::new(&params, 0.02).momentum(0.9);
    let mut adam = Adam::new(&params, 1e-3);
    for (i, b) in batches.iter().enumerate() {
        let n = b.labels.len();
        let step = tape.step(&params, StepKey::new(0, i as u64));
        let x = step.input(&b.images, &[n, 28, 28, 1]).unwrap();
        let loss = model
            .forward(x)
            .unwrap()
            .nll_loss(&b.labels, n as f32)
            .unwrap();
        let want = run["losses_f64"][i].as_f64().unwrap();
        assert_close(
            &format!("{optimizer}, loss {i}"),
            f64::from(loss.item().unwrap()),
            want,
            1e-5,
        );
        loss.backward(&mut grads).unwrap();
        drop(step);
        if i == 0 {
            for id in params.ids() {
                let name = &params.infos()[id.index()].name;
                assert_close(
                    name,
                    l2(grads.grad(id)),
                    run["first_gradient_l2"][name].as_f64().unwrap(),
                    1e-5,
                );
            }
        }
        if optimizer.starts_with("sgd") {
            sgd.step(&mut params, &grads).unwrap();
        } else {
            adam.step(&mut params, &grads).unwrap();
        }
    }
    for id in params.ids() {
        let name = &params.infos()[id.index()].name;
        assert_close(
            name,
            l2(params.get(id)),
            run["final_parameter_l2"][name].as_f64().unwrap(),
            1e-4,
        );
    }
    assert!(params_gaps_are_zero(&params));
}

fn params_gaps_are_zero(params: &Params) -> bool {
    let mut inside = vec![false; params.flat().len()];
    for i in params.infos() {
        inside[i.offset..i.offset + i.len].fill(true);
    }
    params
        .flat()
        .iter()
        .zip(inside)
        .all(|(v, inside)| inside || v.to_bits() == 0)
}

#[test]
fn mnist_losses_are_pytorchs() {
    let fixture: Value = serde_json::from_str(include_str!("../fixtures/mnist_cnn.json")).unwrap();
    let real = real();
    if real.is_none() {
        eprintln!("skipped: the runs on real images, for want of ../shared/data/mnist");
    }
    let made = made();
    let mut runs = 0;
    for run in fixture["runs"].as_array().unwrap() {
        match (run["data"].as_str().unwrap(), &real) {
            ("made", _) => five_steps(&fixture, run, &made),
            (_, Some(batches)) => five_steps(&fixture, run, batches),
            (_, None) => continue,
        }
        runs += 1;
    }
    assert!(runs >= 2);
}

/// Two steps of the network with dropout: losses and all gradients.
fn two_steps(tape: &mut Tape, batch: usize) -> (Vec<f32>, Vec<f32>) {
    let mut scope = Scope::new(Seed(5));
    let model = MnistCnn::new(&mut scope);
    let mut params = scope.build().unwrap();
    let mut grads = Grads::like(&params);
    let mut sgd = Sgd::new(&params, 0.05);
    let images = noise(batch * 784, 7);
    let labels: Vec<u32> = (0..batch as u32).map(|i| i % 10).collect();
    let mut losses = vec![];
    for i in 0..2 {
        let step = tape.step(&params, StepKey::new(0, i).seed(3));
        let x = step.input(&images, &[batch, 28, 28, 1]).unwrap();
        let loss = model
            .forward(x)
            .unwrap()
            .nll_loss(&labels, batch.max(1) as f32)
            .unwrap();
        losses.push(loss.item().unwrap());
        loss.backward(&mut grads).unwrap();
        drop(step);
        sgd.step(&mut params, &grads).unwrap();
    }
    (losses, grads.flat().to_vec())
}

#[test]
fn bits_do_not_depend_on_threads_or_on_old_contents_of_buffers() {
    let one = two_steps(&mut Tape::new(Threads(1)), 10);
    assert!(one.0.iter().all(|l| l.is_finite()));
    for threads in [2, 4] {
        assert_eq!(
            two_steps(&mut Tape::new(Threads(threads)), 10),
            one,
            "{threads} threads"
        );
    }
    let mut poisoned = Tape::new(Threads(1));
    poisoned.poison(true);
    assert_eq!(two_steps(&mut poisoned, 10), one, "poisoned buffers");
    assert_eq!(two_steps(&mut poisoned, 10), one, "a used tape");
}

#[test]
fn allocations_stand_still_after_the_second_step() {
    let mut scope = Scope::new(Seed(5));
    let model = MnistCnn::new(&mut scope);
    let params = scope.build().unwrap();
    let mut grads = Grads::like(&params);
    let mut tape = Tape::new(Threads(1));
    let images = noise(4 * 784, 7);
    let mut counts = vec![];
    for i in 0..6 {
        let step = tape.step(&params, StepKey::new(0, i));
        let x = step.input(&images, &[4, 28, 28, 1]).unwrap();
        let loss = model
            .forward(x)
            .unwrap()
            .nll_loss(&[0, 1, 2, 3], 4.0)
            .unwrap();
        loss.backward(&mut grads).unwrap();
        drop(step);
        let step = tape.inference(&params);
        model
            .forward(step.input(&images, &[4, 28, 28, 1]).unwrap())
            .unwrap();
        drop(step);
        counts.push(tape.allocations());
    }
    assert!(counts[0] > 0);
    assert!(counts[1..].iter().all(|&c| c == counts[1]), "{counts:?}");
}

#[test]
fn an_empty_batch_gives_zero_gradients() {
    let (losses, grads) = two_steps(&mut Tape::new(Threads(2)), 0);
    assert!(losses.iter().all(|l| l.to_bits() == 0), "{losses:?}");
    assert!(grads.iter().all(|g| *g == 0.0));
}

#[test]
fn gradients_become_ready_in_true_backward_order_in_the_sinks_memory() {
    let mut scope = Scope::new(Seed(5));
    let unused = Linear::new(scope.enter("unused"), 3, 2);
    let model = MnistCnn::new(&mut scope);
    let params = scope.build().unwrap();
    let mut sink = Recorder::like(&params);
    sink.grads.flat_mut().fill(f32::NAN); // a first use overwrites
    let mut tape = Tape::new(Threads(1));
    let step = tape.step(&params, StepKey::new(0, 0));
    let x = step.input(&noise(2 * 784, 1), &[2, 28, 28, 1]).unwrap();
    model
        .forward(x)
        .unwrap()
        .nll_loss(&[1, 2], 2.0)
        .unwrap()
        .backward(&mut sink)
        .unwrap();
    drop(step);
    assert_eq!(
        sink.names(&params),
        [
            "unused.weight",
            "unused.bias",
            "fc2.bias",
            "fc2.weight",
            "fc1.bias",
            "fc1.weight",
            "conv2.weight",
            "conv2.bias",
            "conv1.weight",
            "conv1.bias"
        ]
    );
    assert!(sink.grads.grad(unused.weight).iter().all(|&g| g == 0.0));
    for id in params.ids() {
        let info = &params.infos()[id.index()];
        assert_eq!(
            sink.written_at[id.index()],
            Some(sink.grads.flat()[info.offset..].as_ptr())
        );
        assert!(
            sink.grads.grad(id).iter().all(|g| g.is_finite()),
            "{}",
            info.name
        );
    }
    // Gaps were not touched.
    assert!(sink.grads.flat().iter().any(|g| g.is_nan()));
}

/// A layer that has seen all of its weight's gradient says so, and never of one that is not finite.
#[test]
fn linear_layers_say_whether_their_gradients_are_finite() {
    let mut scope = Scope::new(Seed(5));
    let a = Linear::new(scope.enter("a"), 70, 33);
    let b = Linear::new(scope.enter("b"), 33, 5);
    let params = scope.build().unwrap();
    let mut tape = Tape::new(Threads(2));
    let mut finite = |values: &[f32], rows: usize, accumulate: bool| {
        let mut sink = Recorder::like(&params);
        sink.accumulate = accumulate;
        sink.grads.flat_mut().fill(f32::MAX); // overwritten, or added to
        let step = tape.step(&params, StepKey::new(0, 0));
        let x = step.input(values, &[rows, 70]).unwrap();
        let y = b.forward(a.forward(x).unwrap()).unwrap();
        let loss = y.mse_loss(&vec![0.0; rows * 5], Reduction::Sum);
        loss.unwrap().backward(&mut sink).unwrap();
        for id in &sink.finite {
            assert!(sink.grads.grad(*id).iter().all(|g| g.is_finite()));
        }
        sink.finite
    };
    let mut x = noise(600 * 70, 1);
    for rows in [1, 40, 600] {
        let all = finite(&x[..rows * 70], rows, false);
        assert_eq!(all, [b.weight, a.weight], "{rows} rows");
    }
    // Finite, but so large that sums of them over ranks may not be.
    let large: Vec<f32> = x.iter().map(|x| x * 1e13).collect();
    assert_eq!(finite(&large[..70 * 40], 40, false), []);
    // Gradients of some 1e38 more than the largest number.
    x.iter_mut().for_each(|x| *x *= 1e38);
    assert_eq!(finite(&x[..70 * 40], 40, true), []);
    x[7] = f32::INFINITY;
    assert_eq!(finite(&x[..70 * 40], 40, false), []);
}

#[test]
fn a_refused_gradient_ends_the_pass_and_the_tape_goes_on() {
    let mut scope = Scope::new(Seed(5));
    let a = Linear::new(scope.enter("a"), 3, 3);
    let b = Linear::new(scope.enter("b"), 3, 1);
    let params = scope.build().unwrap();
    let mut tape = Tape::new(Threads(1));
    let go = |tape: &mut Tape, sink: &mut Recorder| {
        let step = tape.step(&params, StepKey::new(0, 0));
        let x = step.input(&[1.0, 2.0, 3.0], &[1, 3]).unwrap();
        let y = b.forward(a.forward(x).unwrap().relu().unwrap()).unwrap();
        y.mse_loss(&[1.0], Reduction::Sum).unwrap().backward(sink)
    };
    let mut bad = Recorder::like(&params);
    bad.refuse = b.bias;
    let e = go(&mut tape, &mut bad).unwrap_err();
    assert_eq!(e.kind(), ErrorKind::PeerLost);
    assert!(e.to_string().contains("b.bias"), "{e}");
    assert_eq!(e.source().unwrap().to_string(), "no more");
    assert_eq!(bad.names(&params), ["b.bias"]);
    let before = {
        go(&mut tape, &mut Recorder::like(&params)).unwrap();
        tape.allocations()
    };
    for _ in 0..3 {
        let mut again = Recorder::like(&params);
        again.refuse = a.bias;
        go(&mut tape, &mut again).unwrap_err();
        go(&mut tape, &mut Recorder::like(&params)).unwrap();
    }
    assert_eq!(
        tape.allocations(),
        before,
        "memory was lost on the error path"
    );
}

#[test]
fn initial_weights_are_pytorchs() {
    let fixture: Value = serde_json::from_str(include_str!("../fixtures/rng.json")).unwrap();
    let mut compared = 0;
    for case in fixture["init"].as_array().unwrap() {
        if !case["model"]
            .as_str()
            .unwrap()
            .to_lowercase()
            .contains("mnist")
        {
            continue;
        }
        let mut scope = Scope::new(Seed(case["seed"].as_u64().unwrap()));
        MnistCnn::new(&mut scope);
        let params = scope.build().unwrap();
        for id in params.ids() {
            let name = &params.infos()[id.index()].name;
            let bytes: Vec<u8> = params
                .export(id)
                .iter()
                .flat_map(|v| v.to_le_bytes())
                .collect();
            let hash = hex::encode(sha2::Sha256::digest(&bytes));
            assert_eq!(hash, case["sha256_f32le"][name].as_str().unwrap(), "{name}");
            compared += 1;
        }
    }
    assert_eq!(compared, 16);
}

/// Ranks may be threads: a tape and its parameters move between them.
#[test]
fn engine_state_can_move_to_another_thread() {
    fn sendable<T: Send>() {}
    fn shareable<T: Sync>() {}
    sendable::<Tape>();
    sendable::<Params>();
    sendable::<Grads>();
    shareable::<Params>();
    let one = two_steps(&mut Tape::new(Threads(1)), 3);
    let other = std::thread::spawn(|| two_steps(&mut Tape::new(Threads(1)), 3))
        .join()
        .unwrap();
    assert_eq!(one, other);
}

/// A head of one weight: its forward is `w * x`.
fn head(scope: &mut Scope, name: &str) -> ParamId {
    scope.param(name, &[1, 1], Layout::Same, Init::Constant(0.5))
}

/// PyTorch's rule, in f64: a parameter whose `grad` is None keeps its value and its state, and counts no step.
/// `zero_grad` before each step, then the backward passes of the heads of `used`, one each.
struct Serial {
    adamw: bool,
    /// Weight, two states, updates.
    heads: Vec<(f64, f64, f64, i32)>,
}

impl Serial {
    fn step(&mut self, gradients: &[Option<f64>], limit: f64) {
        let norm = gradients.iter().flatten().map(|g| g * g).sum::<f64>();
        let factor = (limit / (norm.sqrt() + 1e-6)).min(1.0);
        for ((w, m, v, t), g) in self.heads.iter_mut().zip(gradients) {
            let Some(g) = g.map(|g| g * factor) else {
                continue;
            };
            *t += 1;
            if self.adamw {
                *w *= 1.0 - 0.1 * 0.3;
                *m = 0.9 * *m + 0.1 * g;
                *v = 0.999 * *v + 0.001 * g * g;
                let (m, v) = (*m / (1.0 - 0.9f64.powi(*t)), *v / (1.0 - 0.999f64.powi(*t)));
                *w -= 0.1 * m / (v.sqrt() + 1e-8);
            } else {
                let d = g + 0.3 * *w;
                *m = if *t == 1 { d } else { 0.9 * *m + d };
                *w -= 0.1 * *m;
            }
        }
    }
}

#[test]
fn parameters_that_no_backward_of_a_step_used_are_left_alone() {
    let mut scope = Scope::new(Seed(0));
    let heads: Vec<ParamId> = (0..4).map(|h| head(&mut scope, &format!("h{h}"))).collect();
    let start = scope.build().unwrap();
    // Heads of each backward pass of each step. The last head's gradient is zero, but is one.
    let steps: [&[&[usize]]; 9] = [
        &[&[0]],
        &[&[1]],
        &[&[0, 3]],
        &[&[0], &[1]],
        &[&[1], &[0], &[1]],
        &[],
        &[&[3]],
        &[&[1, 3], &[3]],
        &[&[0]],
    ];
    type Make = fn(&Params) -> Box<dyn Optimizer>;
    let makes: [(bool, Make); 2] = [
        (true, |p| Box::new(Adam::adamw(p, 0.1).weight_decay(0.3))),
        (false, |p| {
            Box::new(Sgd::new(p, 0.1).momentum(0.9).weight_decay(0.3))
        }),
    ];
    for (adamw, make) in makes {
        for limit in [f64::INFINITY, 0.7] {
            let mut params = start.clone();
            let mut optimizer = make(&params);
            let mut grads = Grads::like(&params);
            let mut tape = Tape::new(Threads(1));
            let mut serial = Serial {
                adamw,
                heads: vec![(0.5, 0.0, 0.0, 0); heads.len()],
            };
            for (index, passes) in steps.iter().enumerate() {
                let mut wanted: Vec<Option<f64>> = vec![None; heads.len()];
                grads.zero();
                // One pass overwrites, several are added.
                grads.set_accumulate(passes.len() > 1);
                for (pass, used) in passes.iter().enumerate() {
                    let step = tape.step(&params, StepKey::new(0, index as u64));
                    let mut sum: Option<Tensor<'_>> = None;
                    for &h in *used {
                        let x = if h == 3 {
                            0.0
                        } else {
                            (index + 2 * pass + h) as f32 * 0.3 - 1.0
                        };
                        let w = serial.heads[h].0;
                        *wanted[h].get_or_insert(0.0) +=
                            2.0 * (w * f64::from(x) - 1.0) * f64::from(x);
                        let y = step.input(&[x], &[1, 1]).unwrap().matmul(heads[h]).unwrap();
                        let loss = y.mse_loss(&[1.0], Reduction::Sum).unwrap();
                        sum = Some(match sum {
                            Some(sum) => sum.add(loss).unwrap(),
                            None => loss,
                        });
                    }
                    sum.unwrap().backward(&mut grads).unwrap();
                }
                for (id, wanted) in heads.iter().zip(&wanted) {
                    assert_eq!(grads.untouched(*id), wanted.is_none(), "step {index}");
                }
                serial.step(&wanted, limit);
                step_clipped(optimizer.as_mut(), &mut params, &grads, limit).unwrap();
                for (h, id) in heads.iter().enumerate() {
                    let (w, _, _, updates) = serial.heads[h];
                    let got = f64::from(params.get(*id)[0]);
                    assert!(
                        (got - w).abs() < 1e-5,
                        "head {h}, step {index}: {got}, not {w}"
                    );
                    assert_eq!(
                        optimizer.updates()[h],
                        updates as u64,
                        "head {h}, step {index}"
                    );
                }
            }
            assert_eq!(params.get(heads[2]), [0.5], "never used");
        }
    }
}

/// What a program writes itself is a gradient, whatever backward said before.
#[test]
fn gradients_that_are_written_by_hand_count() {
    let mut scope = Scope::new(Seed(0));
    let (a, b) = (head(&mut scope, "a"), head(&mut scope, "b"));
    let mut params = scope.build().unwrap();
    let mut sgd = Sgd::new(&params, 1.0);
    let mut grads = Grads::like(&params);
    sgd.step(&mut params, &grads).unwrap();
    assert_eq!((sgd.updates(), params.get(a)), (&[0, 0][..], &[0.5][..]));
    grads.slot(a).fill(1.0);
    sgd.step(&mut params, &grads).unwrap();
    assert_eq!((sgd.updates(), params.get(a)), (&[1, 0][..], &[-0.5][..]));
    grads.flat_mut().fill(0.0);
    sgd.step(&mut params, &grads).unwrap();
    assert_eq!((sgd.updates(), params.get(b)), (&[2, 1][..], &[0.5][..]));
}
