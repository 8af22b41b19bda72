//! Recurrent layers, images in another size, norms and losses of pairs against PyTorch (`fixtures/recurrent.json`, made by
//! `make_recurrent.py`).

use phalanx_nn::layers::{Gru, InstanceNorm, Interpolation, Lstm, RnnOptions, RnnState};
use phalanx_nn::{
    GradView, Grads, Params, Reduction, Result, Scope, Seed, StepKey, Tape, Tensor, Threads,
    Value as _,
};
use serde_json::Value;

fn fixture() -> Value {
    serde_json::from_str(include_str!("../fixtures/recurrent.json")).unwrap()
}

fn floats(v: &Value) -> Vec<f32> {
    let all = v.as_array().unwrap().iter();
    all.map(|v| v.as_f64().unwrap() as f32).collect()
}

fn sizes(v: &Value) -> Vec<usize> {
    let all = v.as_array().unwrap().iter();
    all.map(|v| v.as_u64().unwrap() as usize).collect()
}

fn weights(len: usize) -> Vec<f32> {
    (0..len).map(|i| 0.5 + 0.25 * i as f32).collect()
}

fn near(what: &str, got: &[f32], want: &[f32]) {
    assert_eq!(got.len(), want.len(), "{what}");
    let scale = want.iter().fold(1.0f32, |most, v| most.max(v.abs()));
    for (i, (got, want)) in got.iter().zip(want).enumerate() {
        assert!(
            (got - want).abs() <= 2e-6 * scale,
            "{what} [{i}]: {got}, not {want}"
        );
    }
}

enum Net {
    Lstm(Lstm),
    Gru(Gru),
}

impl Net {
    fn forward<'s>(
        &self,
        x: Tensor<'s>,
        state: Option<&RnnState<Tensor<'s>>>,
    ) -> Result<(Tensor<'s>, RnnState<Tensor<'s>>)> {
        match self {
            Net::Lstm(net) => net.forward(x, state),
            Net::Gru(net) => net.forward(x, state),
        }
    }
}

fn build(case: &Value) -> (Net, Params) {
    let mut scope = Scope::new(Seed(5));
    let options = RnnOptions {
        layers: case["layers"].as_u64().unwrap() as usize,
        bidirectional: case["bidirectional"].as_bool().unwrap(),
        dropout: 0.0,
    };
    let net = match case["kind"].as_str().unwrap() {
        "LSTM" => Net::Lstm(Lstm::with(scope.enter("rnn"), 3, 4, options)),
        _ => Net::Gru(Gru::with(scope.enter("rnn"), 3, 4, options)),
    };
    (net, scope.build().unwrap())
}

#[test]
fn recurrent_layers_are_pytorchs() {
    for case in fixture()["layers"].as_array().unwrap() {
        let name = format!("{} {}", case["kind"], case["layers"]);
        let (net, params) = build(case);
        let names: Vec<_> = params.infos().iter().map(|info| &info.name[4..]).collect();
        let given = case["parameters"].as_array().unwrap();
        let theirs: Vec<_> = given.iter().map(|p| p[0].as_str().unwrap()).collect();
        assert_eq!(names, theirs);
        for (id, p) in params.ids().zip(given) {
            // The bits that PyTorch draws.
            assert_eq!(params.export(id), floats(&p[1]), "{name} {}", p[0]);
        }
        let mut tape = Tape::new(Threads(2));
        let mut grads = Grads::like(&params);
        let step = tape.step(&params, StepKey::new(0, 0));
        let x = step.variable(&floats(&case["x"]), &[2, 5, 3]).unwrap();
        let state = case["state"].as_array().map(|state| {
            let parts = |v: &Value| {
                let all = floats(v);
                let part = |part: &[f32]| step.input(part, &[2, 4]).unwrap();
                all.chunks(8).map(part).collect::<Vec<_>>()
            };
            RnnState {
                hidden: parts(&state[0]),
                cell: parts(&state[1]),
            }
        });
        let (out, end) = net.forward(x.share(), state.as_ref()).unwrap();
        near(&name, out.data(), &floats(&case["out"]));
        for (part, want) in [&end.hidden, &end.cell]
            .into_iter()
            .zip(case["end"].as_array().unwrap())
        {
            let got: Vec<f32> = part.iter().flat_map(Tensor::to_vec).collect();
            near(&name, &got, &floats(want));
        }
        drop((state, end));
        let of = weights(out.numel());
        out.backward_with(&of, &mut grads).unwrap();
        near(&name, &x.grad().unwrap(), &floats(&case["grad"]));
        for (id, p) in params.ids().zip(given) {
            near(&format!("{name} {}", p[0]), grads.grad(id), &floats(&p[2]));
        }
    }
}

#[test]
fn recurrent_layers_refuse_other_shapes() {
    let (net, params) = build(&fixture()["layers"][0]);
    let mut tape = Tape::new(Threads(1));
    let step = tape.step(&params, StepKey::new(0, 0));
    for shape in [&[2, 3][..], &[2, 0, 3], &[2, 5, 4]] {
        let x = step
            .input(&vec![0.0; shape.iter().product()], shape)
            .unwrap();
        assert!(net.forward(x, None).is_err(), "{shape:?}");
    }
    let x = step.input(&[0.0; 6], &[1, 2, 3]).unwrap();
    let none = RnnState {
        hidden: Vec::new(),
        cell: Vec::new(),
    };
    let error = net.forward(x, Some(&none)).unwrap_err();
    assert!(error.to_string().contains("no layer 0"), "{error}");
}

fn apply<'s>(case: &Value, x: &[Tensor<'s>]) -> Result<Tensor<'s>> {
    let o = &case["options"];
    let reduction = match o["reduction"].as_str() {
        Some("sum") => Reduction::Sum,
        Some("mean") => Reduction::Mean,
        _ => Reduction::None,
    };
    let at = |i: usize| x[i].share();
    match case["op"].as_str().unwrap() {
        "norm" => at(0).norm(1, false),
        "normalize" => at(0).normalize(1, 1e-12),
        "cosine_similarity" => at(0).cosine_similarity(at(1), 1),
        "add_scalar" => at(0).add_scalar(1.5),
        "topk" => {
            let dim = o["dim"].as_u64().unwrap() as usize;
            let shape = sizes(&case["shape"]);
            let (values, index) = at(0).topk(shape[dim], dim)?;
            let index: Vec<usize> = index.into_iter().map(|i| i as usize).collect();
            assert_eq!(index, sizes(&o["index"]));
            Ok(values)
        }
        "cosine_embedding" => {
            let alike: Vec<bool> = o["alike"]
                .as_array()
                .unwrap()
                .iter()
                .map(|v| v.as_bool().unwrap())
                .collect();
            at(0).cosine_embedding_loss(at(1), &alike, 0.1, reduction)
        }
        "triplet" => at(0).triplet_margin_loss(at(1), at(2), 1.0, reduction),
        "kl_div" => at(0)
            .log_softmax()?
            .kl_div(&floats(&o["target"]), reduction),
        "interpolate" => {
            let mode = match o["mode"].as_str() {
                Some("nearest") => Interpolation::Nearest,
                _ => Interpolation::Bilinear,
            };
            let size = sizes(&o["size"]);
            at(0).interpolate(size[0], size[1], mode)
        }
        "instance_norm" => InstanceNorm::new(3).forward(at(0)),
        other => panic!("{other}"),
    }
}

#[test]
fn operations_are_pytorchs() {
    let params = Scope::new(Seed(0)).build().unwrap();
    for case in fixture()["ops"].as_array().unwrap() {
        for threads in [1, 2] {
            let name = format!("{} {}", case["op"], case["options"]);
            let mut tape = Tape::new(Threads(threads));
            let mut grads = Grads::like(&params);
            let step = tape.step(&params, StepKey::new(0, 0));
            let inputs = case["inputs"]
                .as_array()
                .unwrap()
                .iter()
                .zip(case["shapes"].as_array().unwrap());
            let inputs: Vec<_> = inputs
                .map(|(v, shape)| step.variable(&floats(v), &sizes(shape)).unwrap())
                .collect();
            let out = apply(case, &inputs).unwrap();
            assert_eq!(out.shape(), sizes(&case["shape"]), "{name}");
            near(&name, out.data(), &floats(&case["out"]));
            let of = weights(out.numel());
            out.backward_with(&of, &mut grads).unwrap();
            for (x, want) in inputs.iter().zip(case["grads"].as_array().unwrap()) {
                near(&name, &x.grad().unwrap(), &floats(want));
            }
        }
    }
}

#[test]
fn wrong_arguments_are_refused() {
    let params = Scope::new(Seed(0)).build().unwrap();
    let mut tape = Tape::new(Threads(1));
    let step = tape.step(&params, StepKey::new(0, 0));
    let x = || step.input(&[3.0, f32::NAN, 1.0, 3.0], &[1, 4]).unwrap();
    assert!(x().topk(5, 1).is_err() && x().topk(1, 2).is_err());
    // NaN is the greatest, the first of equal ones comes first.
    assert_eq!(x().topk(4, 1).unwrap().1, [1, 0, 3, 2]);
    assert!(x().interpolate(2, 2, Interpolation::Nearest).is_err());
    let image = step.input(&[1.0; 4], &[1, 2, 2, 1]).unwrap();
    assert!(
        image
            .share()
            .interpolate(0, 2, Interpolation::Nearest)
            .is_err()
    );
    assert!(x().norm(2, false).is_err());
    assert!(
        x().cosine_embedding_loss(x(), &[true; 2], 0.0, 1usize)
            .is_err()
    );
    assert!(x().kl_div(&[0.0; 3], Reduction::Sum).is_err());
}
