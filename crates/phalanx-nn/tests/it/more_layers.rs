//! More operations and the layers over them against PyTorch
//! (`fixtures/more_layers.json`: another extract of the project's parity fixtures).

use crate::common::{Array, channels_first};
use phalanx_nn::layers::{
    BatchNorm1d, Conv1d, Conv2dOptions, ConvTranspose2d, GroupNorm, LayerNorm, MultiHeadAttention,
};
use phalanx_nn::losses::{CrossEntropyOptions, IGNORE_LABEL};
use phalanx_nn::{
    Grads, Init, Layout, Params, Reduction, Result, Scope, Seed, Step, StepKey, Tape, Tensor,
    Threads,
};
use serde_json::Value;

/// A layer with its parameters, or an operation without.
enum Layer {
    Conv1d(Conv1d),
    ConvTranspose2d(ConvTranspose2d),
    BatchNorm(BatchNorm1d),
    LayerNorm(LayerNorm),
    GroupNorm(GroupNorm),
    Attention(MultiHeadAttention),
    Other,
}

impl Layer {
    fn new(case: &Value, scope: &mut Scope) -> Layer {
        let (o, inputs) = (&case["options"], &case["inputs"]);
        let n = |name: &str, default: u64| o[name].as_u64().unwrap_or(default) as usize;
        let weight = || Array::parse(&inputs["weight"]).shape;
        fn at<'s>(scope: &'s mut Scope<'_>) -> Scope<'s> {
            scope.enter("layer")
        }
        match case["layer"].as_str().unwrap() {
            "conv1d" => {
                let w = weight();
                let options = Conv2dOptions::rect(1, w[2])
                    .stride(n("stride", 1))
                    .padding(n("padding", 0));
                Layer::Conv1d(Conv1d::new(at(scope), w[1], w[0], options))
            }
            "conv_transpose2d" => {
                let (w, groups) = (weight(), n("groups", 1));
                let options = Conv2dOptions::rect(w[2], w[3])
                    .stride(n("stride", 1))
                    .padding(n("padding", 0))
                    .groups(groups);
                let extra = n("output_padding", 0);
                let layer = ConvTranspose2d::new(at(scope), w[0], w[1] * groups, options);
                Layer::ConvTranspose2d(layer.output_padding(extra, extra))
            }
            "batch_norm" => Layer::BatchNorm(BatchNorm1d::new(at(scope), weight()[0])),
            "layer_norm" => Layer::LayerNorm(LayerNorm::new(at(scope), &weight())),
            "group_norm" => {
                Layer::GroupNorm(GroupNorm::new(at(scope), n("groups", 1), weight()[0]))
            }
            "multi_head_attention" => {
                let width = Array::parse(&inputs["x"]).shape[2];
                Layer::Attention(MultiHeadAttention::new(at(scope), width, n("heads", 1)))
            }
            "embedding" => {
                let zero = Init::Constant(0.0);
                at(scope).param("weight", &weight(), Layout::Same, zero);
                Layer::Other
            }
            _ => Layer::Other,
        }
    }

    fn run<'s>(
        &self,
        case: &Value,
        params: &Params,
        step: &'s Step<'s>,
        x: Option<Tensor<'s>>,
    ) -> Result<Tensor<'s>> {
        let (o, inputs) = (&case["options"], &case["inputs"]);
        let Some(x) = x else {
            let index = Array::parse(&inputs["index"]);
            let numbers: Vec<u32> = index.data.iter().map(|&v| v as u32).collect();
            let padding = o["padding_idx"].as_u64().map(|p| p as u32);
            let weight = params.find("layer.weight").unwrap();
            return step.embedding(weight, &numbers, &index.shape, padding);
        };
        let target = || Array::parse(&inputs["target"]).data;
        let dim = || {
            let rank = x.shape().len() as i64;
            o["dim"].as_i64().unwrap().rem_euclid(rank) as usize
        };
        let reduction = match o["reduction"].as_str() {
            Some("sum") => Reduction::Sum,
            _ => Reduction::Mean,
        };
        let tanh = case["name"].as_str().unwrap().ends_with("tanh");
        match (self, case["layer"].as_str().unwrap()) {
            (Layer::Conv1d(l), _) => l.forward(x),
            (Layer::ConvTranspose2d(l), _) => l.forward(x),
            (Layer::BatchNorm(l), _) => l.forward(x),
            (Layer::LayerNorm(l), _) => l.forward(x),
            (Layer::GroupNorm(l), _) => l.forward(x),
            (Layer::Attention(l), _) => l.forward(x, o["causal"].as_bool().unwrap()),
            (_, "relu6") => x.relu6(),
            (_, "leaky_relu") => x.leaky_relu(0.01),
            (_, "gelu") if tanh => x.gelu_tanh(),
            (_, "gelu") => x.gelu(),
            (_, "silu") => x.silu(),
            (_, "hardswish") => x.hardswish(),
            (_, "hardsigmoid") => x.hardsigmoid(),
            (_, "sigmoid") => x.sigmoid(),
            (_, "tanh") => x.tanh(),
            (_, "exp") => x.exp(),
            (_, "softmax") => {
                let d = dim();
                x.softmax(d)
            }
            (_, "log_softmax") => {
                let d = dim();
                x.log_softmax_dim(d)
            }
            (_, "l1_loss") => x.l1_loss(&target(), reduction),
            (_, "bce_with_logits") => {
                let positive = inputs["pos_weight"]
                    .is_object()
                    .then(|| Array::parse(&inputs["pos_weight"]).data);
                x.bce_with_logits(&target(), positive.as_deref(), reduction)
            }
            (_, "cross_entropy") => {
                let labels: Vec<u32> = inputs["target"]["data"]
                    .as_array()
                    .unwrap()
                    .iter()
                    .map(|l| u32::try_from(l.as_i64().unwrap()).unwrap_or(IGNORE_LABEL))
                    .collect();
                let weights = inputs["class_weight"]
                    .is_object()
                    .then(|| Array::parse(&inputs["class_weight"]).data);
                let options = CrossEntropyOptions {
                    label_smoothing: o["label_smoothing"].as_f64().unwrap_or(0.0),
                    class_weights: weights.as_deref(),
                    reduction,
                };
                x.cross_entropy_with(&labels, options)
            }
            (_, other) => panic!("no such layer: {other}"),
        }
    }
}

/// N, C, L to N, L, C and back.
fn turned(a: &Array) -> Array {
    let &[n, c, l] = &*a.shape else {
        return a.clone();
    };
    let at = |i: usize| a.data[(i / (c * l) * c + i % c) * l + i / c % l];
    Array {
        shape: vec![n, l, c],
        data: (0..n * c * l).map(at).collect(),
    }
}

fn check(name: &str, what: &str, got: &[f32], want: &[f32], torch_error: f64) {
    assert_eq!(got.len(), want.len(), "{name}: {what}");
    let largest = want.iter().fold(0.0f64, |a, v| a.max(f64::from(v.abs())));
    let bound = (4.0 * torch_error).max(2e-6 * largest);
    for (i, (&g, &w)) in got.iter().zip(want).enumerate() {
        let same = g == w || (g.is_nan() && w.is_nan());
        assert!(
            same || (f64::from(g) - f64::from(w)).abs() <= bound,
            "{name}: {what}[{i}] is {g}, PyTorch has {w}"
        );
    }
}

#[test]
fn every_case_agrees_with_pytorch() {
    let cases: Vec<Value> =
        serde_json::from_str(include_str!("../fixtures/more_layers.json")).unwrap();
    for case in &cases {
        let mut tape = Tape::new(Threads(2));
        tape.poison(true);
        let (name, inputs) = (case["name"].as_str().unwrap(), &case["inputs"]);
        let error = case["torch_f32_error"].as_f64().unwrap();
        let sequence = case["layer"] == "conv1d" || case["layer"] == "batch_norm";
        let inside = |a: Array| {
            if sequence {
                turned(&a)
            } else {
                a.channels_last()
            }
        };
        let outside = |data: &[f32], shape: &[usize]| {
            if sequence {
                let shape = shape.to_vec();
                let a = Array {
                    shape,
                    data: data.to_vec(),
                };
                turned(&a).data
            } else {
                channels_first(data, shape)
            }
        };
        let mut scope = Scope::new(Seed(0));
        let layer = Layer::new(case, &mut scope);
        let mut params = scope.build().unwrap();
        for id in params.ids() {
            let full = params.infos()[id.index()].name.clone();
            let short = full.strip_prefix("layer.").unwrap();
            params
                .import(id, &Array::parse(&inputs[short]).data)
                .unwrap();
        }
        let mut grads = Grads::like(&params);
        let step = tape.step(&params, StepKey::new(0, 0));
        let x = inputs["x"].is_object().then(|| {
            let a = inside(Array::parse(&inputs["x"]));
            step.variable(&a.data, &a.shape).unwrap()
        });
        let seen = x.as_ref().map(Tensor::share);
        let out = layer.run(case, &params, &step, x).unwrap();
        let shape = out.shape();
        let want = Array::parse(&case["out"]).data;
        check(name, "out", &outside(out.data(), &shape), &want, error);
        let dout = match case["dout"].is_object() {
            true => inside(Array::parse(&case["dout"])).data,
            false => vec![1.0],
        };
        out.backward_with(&dout, &mut grads).unwrap();
        if let Some(seen) = seen {
            let dx = outside(&seen.grad().unwrap(), &seen.shape());
            let want = Array::parse(&case["grads"]["x"]).data;
            check(name, "grad of x", &dx, &want, error);
        }
        for id in params.ids() {
            let full = &params.infos()[id.index()].name;
            let want = Array::parse(&case["grads"][full.strip_prefix("layer.").unwrap()]).data;
            check(name, full, &grads.export(id), &want, error);
        }
    }
    assert_eq!(cases.len(), 38);
}

#[test]
fn attention_drops_weights_in_training_only() {
    let mut scope = Scope::new(Seed(1));
    let attention = MultiHeadAttention::new(scope.enter("a"), 8, 2);
    let params = scope.build().unwrap();
    let x: Vec<f32> = (0..2 * 5 * 8).map(|i| (i * 7 % 11) as f32 - 5.0).collect();
    let run = |attention: MultiHeadAttention, trains: bool| -> Vec<f32> {
        let mut tape = Tape::new(Threads(1));
        let step = match trains {
            true => tape.step(&params, StepKey::new(0, 0).samples(&[4, 5])),
            false => tape.inference(&params),
        };
        let x = step.input(&x, &[2, 5, 8]).unwrap();
        let open = attention.forward(x.share(), false).unwrap().to_vec();
        let cross = attention.forward_cross(x.share(), x.share(), x.share(), None);
        let causal = attention.forward(x, true).unwrap().to_vec();
        [open, causal, cross.unwrap().to_vec()].concat()
    };
    let plain = run(attention, true);
    assert_eq!(run(attention.dropout(0.5), false), plain);
    assert_eq!(run(attention.dropout(0.0), true), plain);
    // Nothing is left but the output's bias, which begins with 0.
    assert!(run(attention.dropout(1.0), true).iter().all(|y| *y == 0.0));
    let half = run(attention.dropout(0.5), true);
    assert!(half.iter().zip(&plain).filter(|(a, b)| a != b).count() > plain.len() / 2);
}

/// `fixtures/make_more_init.py` wrote the bits.
#[test]
fn layers_start_from_pytorchs_weights() {
    let mut scope = Scope::new(Seed(1));
    ConvTranspose2d::new(scope.enter("t"), 3, 4, 3);
    Conv1d::new(scope.enter("c"), 4, 6, Conv2dOptions::rect(1, 5).groups(2));
    MultiHeadAttention::new(scope.enter("a"), 8, 2);
    let params = scope.build().unwrap();
    let want: Value = serde_json::from_str(include_str!("../fixtures/more_init.json")).unwrap();
    assert_eq!(params.len(), want.as_object().unwrap().len());
    for id in params.ids() {
        let name = &params.infos()[id.index()].name;
        let want: Vec<u32> = want[name]
            .as_array()
            .unwrap()
            .iter()
            .map(|v| v.as_i64().unwrap() as u32)
            .collect();
        let got: Vec<u32> = params.export(id).iter().map(|v| v.to_bits()).collect();
        assert_eq!(got, want, "{name}");
    }
}
