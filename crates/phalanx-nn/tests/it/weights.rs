//! Weights that are tensors: the bits of parameters with the same values, however the
//! tensors were made.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use crate::common::{Recorder, noise};
use phalanx_nn::layers::{Act, BatchNormOptions, Conv2dOptions, RunningStats};
use phalanx_nn::{
    CustomOp, Error, ErrorKind, GradView, Init, Layout, ParamId, Precision, Result, Scope, Seed,
    Step, StepKey, Tape, Tensor, Threads, Weight,
};

/// The identity; counts its forward passes, and may fail.
#[derive(Clone, Default)]
struct Copied {
    forwards: Arc<AtomicUsize>,
    saves: bool,
    fails: Option<&'static str>,
}

impl Copied {
    fn refused(&self, pass: &str) -> phalanx_base::Result<()> {
        match self.fails {
            Some(fails) if fails == pass => Err(phalanx_base::Error::new(
                ErrorKind::PeerLost,
                "a rank is gone",
            )),
            _ => Ok(()),
        }
    }
}

impl CustomOp for Copied {
    fn forward(&self, inputs: &[&[f32]], output: &mut [f32]) -> phalanx_base::Result<()> {
        self.forwards.fetch_add(1, Ordering::Relaxed);
        output.copy_from_slice(inputs[0]);
        self.refused("forward")
    }

    fn backward(
        &self,
        inputs: &[&[f32]],
        output: &[f32],
        d_output: &[f32],
        d_inputs: &mut [&mut [f32]],
    ) -> phalanx_base::Result<()> {
        let kept = if self.saves { d_output.len() } else { 0 };
        assert_eq!([inputs[0].len(), output.len()], [kept; 2]);
        d_inputs[0].copy_from_slice(d_output);
        self.refused("backward")
    }

    fn name(&self) -> &'static str {
        "Copied"
    }

    fn saves_inputs(&self) -> bool {
        self.saves
    }

    fn saves_output(&self) -> bool {
        self.saves
    }

    fn can_recompute(&self) -> bool {
        true
    }
}

/// What a weight of an operation is.
#[derive(Clone, Copy, Debug, PartialEq)]
enum As {
    Param,
    /// [`Step::parameter`], made once.
    Parameter,
    /// The first use is a tensor, the second the parameter.
    Mixed,
    /// A copy of [`Step::parameter`] by a user's operation, in a part that frees it.
    Remade,
    Variable,
    /// A tensor that wants no gradient.
    Input,
}

const ALL: [As; 6] = [
    As::Param,
    As::Parameter,
    As::Mixed,
    As::Remade,
    As::Variable,
    As::Input,
];

/// A closure's type, which the compiler does not find alone.
fn part<'s, F: FnOnce(Tensor<'s>) -> Result<Tensor<'s>>>(part: F) -> F {
    part
}

fn again<'s>(w: &Weight<'s>) -> Weight<'s> {
    match w {
        Weight::Param(id) => Weight::Param(*id),
        Weight::Tensor(t) => Weight::Tensor(t.share()),
    }
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|v| v.to_bits()).collect()
}

/// Output, gradient of the input, gradient of each weight (empty if not wanted), as bits.
type Outcome = [Vec<Vec<u32>>; 3];

/// Uses an operation twice with the same weights, which are such tensors.
fn outcome(
    way: As,
    precision: Precision,
    x_shape: &[usize],
    weights: &[(Vec<usize>, Layout)],
    net: &impl for<'s> Fn(&'s Step<'s>, Tensor<'s>, Vec<Weight<'s>>) -> Result<Tensor<'s>>,
) -> Outcome {
    let mut scope = Scope::new(Seed(3));
    let ids: Vec<ParamId> = (weights.iter().enumerate())
        .map(|(i, (shape, layout))| {
            let init = Init::Uniform {
                low: -1.0,
                high: 1.0,
            };
            scope.param(&format!("w{i}"), shape, *layout, init)
        })
        .collect();
    let params = scope.build().unwrap();
    let mut sink = Recorder::like(&params);
    let mut tape = Tape::new(Threads(2));
    tape.poison(true);
    tape.set_precision(precision);
    let step = tape.step(&params, StepKey::new(0, 0));
    let step = &step;
    let x = noise(x_shape.iter().product(), 5);
    let x = step.variable(&x, x_shape).unwrap();
    let made = |way: As| -> Vec<Weight<'_>> {
        let one = |&id: &ParamId| -> Result<Weight<'_>> {
            let shape = params.infos()[id.index()].engine_shape();
            let values = params.get(id);
            Ok(match way {
                As::Param => id.into(),
                As::Parameter | As::Mixed => step.parameter(id)?.into(),
                As::Remade => {
                    let own = vec![step.parameter(id)?];
                    let op = Box::new(Copied::default());
                    step.custom(op, own, &shape)?.into()
                }
                As::Variable => step.variable(values, &shape)?.into(),
                As::Input => step.input(values, &shape)?.into(),
            })
        };
        ids.iter().map(|id| one(id).unwrap()).collect()
    };
    let mut seen = vec![];
    let both = part(|x| {
        let first = made(way);
        let second = match way {
            As::Mixed => made(As::Param),
            _ => first.iter().map(again).collect(),
        };
        if way == As::Variable {
            seen = first.iter().map(again).collect();
        }
        let y = net(step, x.share(), first)?;
        let z = net(step, x, second)?;
        y.scale(0.5)?.add(z)
    });
    let y = match way {
        As::Remade => x.share().recompute(both),
        _ => both(x.share()),
    };
    let y = y.unwrap();
    let out = y.to_vec();
    y.backward_with(&noise(out.len(), 9), &mut sink).unwrap();
    assert_eq!(sink.order.len(), params.len());
    let gradients = ids.iter().enumerate().map(|(i, &id)| match &way {
        As::Variable => match &seen[i] {
            Weight::Tensor(t) => bits(&t.grad().unwrap()),
            Weight::Param(_) => unreachable!(),
        },
        As::Input => vec![],
        _ => bits(sink.grads.grad(id)),
    });
    let dx = x.grad().map(|g| bits(&g));
    [
        vec![bits(&out)],
        dx.into_iter().collect(),
        gradients.collect(),
    ]
}

fn same_bits(
    name: &str,
    x: &[usize],
    weights: &[(Vec<usize>, Layout)],
    net: impl for<'s> Fn(&'s Step<'s>, Tensor<'s>, Vec<Weight<'s>>) -> Result<Tensor<'s>>,
) {
    for precision in [Precision::F32, Precision::Bf16] {
        let of = |way| outcome(way, precision, x, weights, &net);
        let want = of(As::Param);
        assert!(want[2].iter().all(|g| g.iter().any(|&b| b != 0)), "{name}");
        for way in ALL {
            let mut got = of(way);
            if way == As::Input {
                got[2].clone_from(&want[2]);
            } else if way == As::Mixed {
                // A sum of other terms: each use's gradient is rounded.
                for (got, want) in got[2].iter_mut().zip(&want[2]) {
                    close(name, got, want);
                    got.clone_from(want);
                }
            }
            assert!(got == want, "{name}: bits differ as {way:?}, {precision:?}");
        }
    }
}

fn close(name: &str, got: &[u32], want: &[u32]) {
    assert_eq!(got.len(), want.len(), "{name}");
    let values = |bits: &[u32]| bits.iter().map(|&b| f32::from_bits(b)).collect::<Vec<_>>();
    let (got, want) = (values(got), values(want));
    let largest = want.iter().fold(0f32, |a, v| a.max(v.abs()));
    for (g, w) in got.iter().zip(&want) {
        assert!((g - w).abs() <= 1e-5 * largest, "{name}: {g} for {w}");
    }
}

/// The weight and bias of some operation.
fn two<'s>(weights: Vec<Weight<'s>>) -> (Weight<'s>, Option<Weight<'s>>) {
    let mut weights = weights.into_iter();
    (weights.next().unwrap(), weights.next())
}

fn matrix(a: usize, b: usize) -> (Vec<usize>, Layout) {
    (vec![a, b], Layout::Same)
}

fn vector(n: usize) -> (Vec<usize>, Layout) {
    (vec![n], Layout::Same)
}

#[test]
fn products_have_the_bits_of_parameters() {
    for act in [Act::None, Act::Relu] {
        same_bits(
            "linear",
            &[4, 3, 32],
            &[matrix(16, 32), vector(16)],
            |_, x, w| {
                let (w, b) = two(w);
                x.linear_with(w, b, act)
            },
        );
        same_bits(
            "matmul",
            &[5, 32],
            &[matrix(32, 16), vector(16)],
            |_, x, w| {
                let (w, b) = two(w);
                x.matmul_with(w, b, act)
            },
        );
    }
    same_bits("no bias", &[5, 7], &[matrix(3, 7)], |_, x, w| {
        let (w, b) = two(w);
        x.linear_with(w, b, Act::Relu6)
    });
}

#[test]
fn convolutions_have_the_bits_of_parameters() {
    let o = Conv2dOptions::new(3).padding(1);
    for (kernel, o) in [
        ([5, 3, 3, 3], o),
        ([32, 32, 3, 3], o),
        ([32, 16, 3, 3], o.stride(2)),
        ([8, 1, 3, 3], o.groups(8)),
        ([16, 16, 1, 1], Conv2dOptions::new(1)),
    ] {
        let out = kernel[0];
        let inp = if kernel[1] == 1 { out } else { kernel[1] };
        for bias in [false, true] {
            let weights = [(kernel.to_vec(), Layout::Conv), vector(out)];
            let weights = &weights[..1 + usize::from(bias)];
            same_bits("conv2d", &[2, 6, 5, inp], weights, |_, x, w| {
                let (w, b) = two(w);
                x.conv2d_with(w, b, o, Act::None)
            });
        }
    }
    let weights = [(vec![6, 4, 3], Layout::Conv1d), vector(6)];
    same_bits("conv1d", &[2, 9, 4], &weights, |_, x, w| {
        let (w, b) = two(w);
        x.conv1d_with(w, b, o, Act::Relu)
    });
    let weights = [(vec![4, 3, 3, 3], Layout::Conv), vector(6)];
    same_bits("transposed", &[2, 4, 5, 4], &weights, |_, x, w| {
        let (w, b) = two(w);
        x.conv_transpose2d_with(w, b, o.stride(2).groups(2), [1, 1])
    });
}

#[test]
fn norms_and_embeddings_have_the_bits_of_parameters() {
    same_bits(
        "layer norm",
        &[3, 4, 8],
        &[vector(8), vector(8)],
        |_, x, w| {
            let (w, b) = two(w);
            x.layer_norm_with(&[8], (Some(w), b), 1e-5)
        },
    );
    same_bits(
        "group norm",
        &[2, 5, 8],
        &[vector(8), vector(8)],
        |_, x, w| {
            let (w, b) = two(w);
            x.group_norm_with(2, (Some(w), b), 1e-5)
        },
    );
    let options = BatchNormOptions {
        weight: None,
        bias: None,
        running: None,
        momentum: None,
        eps: 1e-5,
    };
    same_bits("batch norm", &[6, 8], &[vector(8), vector(8)], |_, x, w| {
        let (w, b) = two(w);
        let r = x.share();
        x.batch_norm_with(&options, (Some(w), b), Some(r), Act::Relu)
    });
    same_bits("embedding", &[4, 3], &[matrix(5, 3)], |step, x, w| {
        let (w, _) = two(w);
        step.embedding(w, &[4, 0, 2, 4], &[4], Some(2))?.mul(x)
    });
}

#[test]
fn running_statistics_stay_buffers() {
    let mut scope = Scope::new(Seed(0));
    let running = RunningStats {
        mean: scope.buffer("mean", &[2], 0.0),
        var: scope.buffer("var", &[2], 1.0),
        batches: scope.buffer("batches", &[], 0.0),
    };
    let mut params = scope.build().unwrap();
    let options = BatchNormOptions {
        weight: None,
        bias: None,
        running: Some(running),
        momentum: Some(1.0),
        eps: 0.0,
    };
    let mut tape = Tape::new(Threads(1));
    let run = |step: &Step<'_>| {
        let x = step.input(&[1.0, 2.0, 3.0, 6.0], &[2, 2])?;
        let w = step.input(&[2.0, 3.0], &[2])?;
        let y = x.batch_norm_with(&options, (Some(w.into()), None), None, Act::None)?;
        Ok::<_, Error>(y.to_vec())
    };
    let step = tape.step(&params, StepKey::new(0, 0));
    assert_eq!(run(&step).unwrap(), [-2.0, -3.0, 2.0, 3.0]);
    drop(step);
    tape.update_buffers(&mut params).unwrap();
    assert_eq!(params.buffer(running.mean), [2.0, 4.0]);
    assert_eq!(params.buffer(running.var), [2.0, 8.0]);
    let step = tape.inference(&params);
    let want = [-1.0 / 2f32.sqrt() * 2.0, 2.0 / 8f32.sqrt() * 3.0];
    let got = run(&step).unwrap();
    assert!((got[0] - want[0]).abs() < 1e-6 && (got[3] - want[1]).abs() < 1e-6);
}

/// Runs `layers` products whose weights a user's operation makes, each in a part of its own
/// or not: gradients, forward passes of the operation, bytes of the pool.
fn chain(parts: bool, layers: usize, wide: usize) -> (Vec<u32>, usize, u64) {
    let mut scope = Scope::new(Seed(1));
    let ids: Vec<ParamId> = (0..layers)
        .map(|i| {
            let init = Init::KaimingUniform { fan_in: wide };
            scope.param(&format!("w{i}"), &[wide, wide], Layout::Same, init)
        })
        .collect();
    let params = scope.build().unwrap();
    let mut sink = Recorder::like(&params);
    let mut tape = Tape::new(Threads(1));
    tape.poison(true);
    let op = Copied::default();
    let step = tape.step(&params, StepKey::new(0, 0));
    let mut x = step.input(&noise(2 * wide, 4), &[2, wide]).unwrap();
    for &id in &ids {
        let layer = part(|x| {
            let own = vec![step.parameter(id)?];
            let w = step.custom(Box::new(op.clone()), own, &[wide, wide])?;
            x.linear_with(w, None, Act::Relu)
        });
        x = if parts {
            x.recompute(layer).unwrap()
        } else {
            layer(x).unwrap()
        };
    }
    let r = noise(2 * wide, 6);
    x.backward_with(&r, &mut sink).unwrap();
    drop(step);
    let forwards = op.forwards.load(Ordering::Relaxed);
    (bits(sink.grads.flat()), forwards, tape.pool_bytes())
}

#[test]
fn a_part_frees_a_weight_and_makes_it_again() {
    let (layers, wide) = (12, 160);
    let (want, once, kept) = chain(false, layers, wide);
    let (got, twice, freed) = chain(true, layers, wide);
    assert!(got == want, "bits differ");
    assert_eq!([once, twice], [layers, 2 * layers]);
    let weight = (wide * wide * 4) as u64;
    assert!(kept > layers as u64 * weight, "{kept}");
    // A copy of the parameter, the weight, its gradient, and some.
    assert!(
        freed < 6 * weight,
        "{freed} bytes with parts, {kept} without"
    );
}

#[test]
fn what_a_part_does_not_read_again_is_not_made_again() {
    let mut scope = Scope::new(Seed(1));
    let norm = scope.param("norm", &[3], Layout::Same, Init::Constant(1.5));
    let table = scope.param("table", &[4, 3], Layout::Same, Init::Constant(0.5));
    let params = scope.build().unwrap();
    let mut sink = Recorder::like(&params);
    let mut tape = Tape::new(Threads(1));
    tape.poison(true);
    let op = Copied::default();
    let options = BatchNormOptions {
        weight: None,
        bias: None,
        running: None,
        momentum: None,
        eps: 1e-5,
    };
    let step = tape.step(&params, StepKey::new(0, 0));
    let x = step.variable(&noise(6, 1), &[2, 3]).unwrap();
    let made = |id, shape: &[usize]| {
        let own = vec![step.parameter(id)?];
        step.custom(Box::new(op.clone()), own, shape)
    };
    let y = x.recompute(|x| {
        let rows = step.embedding(made(table, &[4, 3])?, &[1, 3], &[2], None)?;
        let x = x.scale(2.0)?.mul(rows)?;
        let weights = (Some(made(norm, &[3])?.into()), None);
        x.batch_norm_with(&options, weights, None, Act::None)?
            .tanh()
    });
    y.unwrap().backward_with(&noise(6, 2), &mut sink).unwrap();
    assert_eq!(op.forwards.load(Ordering::Relaxed), 2);
    assert_eq!(sink.names(&params), ["norm", "table"]);
}

#[test]
fn a_failing_operation_is_named_and_the_tape_goes_on() {
    let params = Scope::new(Seed(0)).build().unwrap();
    let mut sink = Recorder::like(&params);
    let mut tape = Tape::new(Threads(1));
    let mut run = |tape: &mut Tape, fails| -> Result<Vec<f32>> {
        let op = Copied {
            fails,
            saves: true,
            ..Copied::default()
        };
        let step = tape.step(&params, StepKey::new(0, 0));
        let x = step.variable(&[1.0, -2.0], &[2])?;
        let y = step.custom(Box::new(op), vec![x.share()], &[2])?;
        assert_eq!(step.graph()[0].operation, "Copied");
        y.scale(3.0)?.backward_with(&[1.0, 2.0], &mut sink)?;
        Ok(x.grad().unwrap())
    };
    for pass in ["forward", "backward"] {
        let e = run(&mut tape, Some(pass)).unwrap_err();
        assert_eq!(e.kind(), ErrorKind::PeerLost);
        let said = e.to_string();
        assert!(said.contains("Copied") && said.contains(pass), "{said}");
        let source = std::error::Error::source(&e).unwrap();
        assert_eq!(source.to_string(), "a rank is gone");
        assert_eq!(run(&mut tape, None).unwrap(), [3.0, 6.0]);
    }
}

#[test]
fn weights_that_do_not_fit_are_named() {
    let mut scope = Scope::new(Seed(0));
    let id = scope.param("w", &[2, 3, 1, 2], Layout::Conv, Init::Constant(1.0));
    let params = scope.build().unwrap();
    let (mut tape, mut other) = (Tape::new(Threads(1)), Tape::new(Threads(1)));
    let (step, far) = (tape.inference(&params), other.inference(&params));
    assert_eq!(step.parameter(id).unwrap().shape(), [1, 2, 3, 2]);
    let given = |shape: &[usize]| {
        let len = shape.iter().product();
        step.input(&noise(len, 1), shape).unwrap()
    };
    let says = |r: Result<Tensor<'_>>, part: &str| {
        let e = r.unwrap_err();
        assert_eq!(e.kind(), ErrorKind::Usage);
        assert!(e.to_string().contains(part), "{e}");
    };
    let x = || given(&[2, 3]);
    says(
        x().linear_with(given(&[3]), None, Act::None),
        "weight tensor",
    );
    says(x().linear_with(given(&[3, 2]), None, Act::None), "takes 2");
    let bias = || Some(Weight::from(given(&[4])));
    says(
        x().matmul_with(given(&[3, 2]), bias(), Act::None),
        "4 values",
    );
    says(x().layer_norm_with(&[3], (None, bias()), 0.0), "4 values");
    let images = || given(&[1, 4, 4, 3]);
    let o = Conv2dOptions::rect(1, 2);
    says(
        images().conv2d_with(given(&[2, 3, 1, 2]), None, o, Act::None),
        "does not fit",
    );
    says(
        images().conv_transpose2d_with(given(&[2, 3, 2]), None, o, [0, 0]),
        "does not fit",
    );
    says(step.embedding(given(&[2, 3]), &[2], &[1], None), "no row 2");
    let foreign = far.input(&[1.0; 6], &[2, 3]).unwrap();
    says(x().linear_with(foreign, None, Act::None), "another step");
}
