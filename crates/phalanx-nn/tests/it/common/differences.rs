//! Operations against central differences of a plain forward in f64.

use super::{Recorder, noise};
use phalanx_nn::{
    Init, Layout, ParamId, Params, Result, Scope, Seed, Step, StepKey, Tape, Tensor, Threads,
};

/// One thing that is differentiated: a parameter (PyTorch's order) or an input.
#[derive(Clone)]
pub struct Leaf {
    pub shape: Vec<usize>,
    pub layout: Option<Layout>,
    pub values: Vec<f32>,
}

pub fn input(shape: &[usize], stream: u64) -> Leaf {
    Leaf {
        shape: shape.to_vec(),
        layout: None,
        values: noise(shape.iter().product(), stream),
    }
}

pub fn param(shape: &[usize], layout: Layout, stream: u64) -> Leaf {
    Leaf {
        layout: Some(layout),
        ..input(shape, stream)
    }
}

/// Leaves of a step: parameters by place, inputs as tensors, `None` for the others.
pub struct Given<'s> {
    pub params: Vec<Option<ParamId>>,
    pub inputs: Vec<Option<Tensor<'s>>>,
}

impl<'s> Given<'s> {
    pub fn p(&self, i: usize) -> ParamId {
        self.params[i].unwrap()
    }
    pub fn x(&mut self, i: usize) -> Tensor<'s> {
        self.inputs[i].take().unwrap()
    }
}

/// Runs `net` and compares its output with `oracle` and its gradients (of
/// `sum(out * r)`, r fixed) with central differences of it. The gradient of
/// every element of every leaf is checked.
pub fn check(
    name: &str,
    leaves: &[Leaf],
    net: impl for<'s> Fn(&mut Given<'s>, &'s Step<'s>) -> Result<Tensor<'s>>,
    oracle: impl Fn(&[Vec<f64>]) -> Vec<f64>,
) {
    let mut scope = Scope::new(Seed(0));
    let ids: Vec<Option<ParamId>> = leaves
        .iter()
        .enumerate()
        .map(|(i, l)| {
            l.layout
                .map(|layout| scope.param(&format!("p{i}"), &l.shape, layout, Init::Constant(0.0)))
        })
        .collect();
    let mut params = scope.build().unwrap();
    for (l, id) in leaves.iter().zip(&ids) {
        if let Some(id) = id {
            params.import(*id, &l.values).unwrap();
        }
    }
    let mut sink = Recorder::like(&params);
    let mut tape = Tape::new(Threads(2));
    tape.poison(true);
    let (out, grads) = run(&mut tape, &params, leaves, &ids, &net, &mut sink);

    let at: Vec<Vec<f64>> = leaves
        .iter()
        .map(|l| l.values.iter().map(|&v| f64::from(v)).collect())
        .collect();
    let want = oracle(&at);
    let r: Vec<f64> = noise(want.len(), 99)
        .iter()
        .map(|&v| f64::from(v))
        .collect();
    compare(name, "output", &out, &want);
    let value = |at: &[Vec<f64>]| oracle(at).iter().zip(&r).map(|(o, r)| o * r).sum::<f64>();
    for (i, got) in grads.iter().enumerate() {
        let h = 1e-5;
        let differences: Vec<f64> = (0..at[i].len())
            .map(|j| {
                let mut moved = at.clone();
                moved[i][j] += h;
                let up = value(&moved);
                moved[i][j] -= 2.0 * h;
                (up - value(&moved)) / (2.0 * h)
            })
            .collect();
        compare(name, &format!("gradient of leaf {i}"), got, &differences);
    }
}

fn run(
    tape: &mut Tape,
    params: &Params,
    leaves: &[Leaf],
    ids: &[Option<ParamId>],
    net: &impl for<'s> Fn(&mut Given<'s>, &'s Step<'s>) -> Result<Tensor<'s>>,
    sink: &mut Recorder,
) -> (Vec<f32>, Vec<Vec<f32>>) {
    let step = tape.step(params, StepKey::new(1, 2).seed(3));
    run_in(&step, leaves, ids, net, sink)
}

fn run_in<'s>(
    step: &'s Step<'s>,
    leaves: &[Leaf],
    ids: &[Option<ParamId>],
    net: &impl Fn(&mut Given<'s>, &'s Step<'s>) -> Result<Tensor<'s>>,
    sink: &mut Recorder,
) -> (Vec<f32>, Vec<Vec<f32>>) {
    let inputs: Vec<Option<Tensor<'s>>> = leaves
        .iter()
        .map(|l| {
            l.layout
                .is_none()
                .then(|| step.variable(&l.values, &l.shape).unwrap())
        })
        .collect();
    let seen: Vec<Option<Tensor<'s>>> = inputs
        .iter()
        .map(|t| t.as_ref().map(Tensor::share))
        .collect();
    let out = net(
        &mut Given {
            params: ids.to_vec(),
            inputs,
        },
        step,
    )
    .unwrap();
    let values = out.to_vec();
    let r = noise(values.len(), 99);
    out.backward_with(&r, sink).unwrap();
    let grads = seen
        .iter()
        .zip(ids)
        .map(|(t, id)| match (t, id) {
            (Some(t), _) => t.grad().unwrap(),
            (None, Some(id)) => sink.grads.export(*id),
            (None, None) => unreachable!(),
        })
        .collect();
    (values, grads)
}

fn compare(name: &str, what: &str, got: &[f32], want: &[f64]) {
    assert_eq!(got.len(), want.len(), "{name}: {what}");
    let largest = want.iter().fold(1e-3f64, |a, v| a.max(v.abs()));
    for (i, (&g, &w)) in got.iter().zip(want).enumerate() {
        assert!(
            (f64::from(g) - w).abs() < 1e-5 * largest,
            "{name}: {what}[{i}] is {g}, should be {w}"
        );
    }
}
