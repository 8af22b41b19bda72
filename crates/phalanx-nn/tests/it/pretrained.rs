//! torchvision's networks: its names, shapes and outputs (`fixtures/make_pretrained.py`); frozen parameters; adapters.

use crate::common::{Recorder, noise};
use phalanx_nn::layers::{BatchNorm, Conv2d, Conv2dOptions, Linear, MultiHeadAttention};
use phalanx_nn::models::{ResNet, Vit, VitConfig};
use phalanx_nn::optim::Sgd;
use phalanx_nn::{
    Grads, LoraConfig, Params, Reduction, Result, Scope, Seed, StepKey, Tape, Tensor, Threads,
};
use serde_json::Value;

fn fixture() -> Value {
    serde_json::from_str(include_str!("../fixtures/pretrained.json")).unwrap()
}

/// Values by a formula of the names, as the script has it.
fn fill(params: &mut Params) {
    let made = |name: &str, shape: &[usize]| -> Vec<f32> {
        let stream = (name.bytes()).fold(0u64, |h, byte| (h * 31 + u64::from(byte)) & 0xFFFF);
        let each: usize = shape.iter().skip(1).product();
        let (last, matrix) = (name.rsplit('.').next().unwrap(), shape.len() >= 2);
        let change = |v: f32| match last {
            "running_var" => 1.0 + 0.5 * v.abs(),
            _ if matrix => (f64::from(v) * (3.0 / each as f64).sqrt()) as f32,
            "weight" => 1.0 + 0.2 * v,
            _ => 0.1 * v,
        };
        let values = noise(shape.iter().product(), stream);
        values.into_iter().map(change).collect()
    };
    for id in params.ids() {
        let info = params.infos()[id.index()].clone();
        let values = made(&info.name, &info.shape);
        params.import(id, &values).unwrap();
    }
    for id in params.buffer_ids() {
        let info = params.buffer_infos()[id.index()].clone();
        if !info.name.ends_with("num_batches_tracked") {
            let values = made(&info.name, &info.shape);
            params.buffer_mut(id).copy_from_slice(&values);
        }
    }
}

fn compare(
    name: &str,
    forward: impl for<'s> Fn(Tensor<'s>) -> Result<Tensor<'s>>,
    mut params: Params,
) {
    let expected = &fixture()[name];
    let count = params.len() + params.buffer_ids().count();
    assert_eq!(expected["tensors"], count, "{name}");
    fill(&mut params);
    let size = expected["size"].as_u64().unwrap() as usize;
    let mut tape = Tape::new(Threads(2));
    let step = tape.inference(&params);
    let images = noise(2 * size * size * 3, 77);
    let logits = forward(step.input(&images, &[2, size, size, 3]).unwrap()).unwrap();
    let logits = logits.to_vec();
    assert_eq!(logits.len(), 14);
    for (i, (got, want)) in logits
        .iter()
        .zip(expected["logits"].as_array().unwrap())
        .enumerate()
    {
        let want = want.as_f64().unwrap();
        let off = (f64::from(*got) - want).abs();
        assert!(off < 1e-4 * want.abs().max(1.0), "{name} {i}: {got} {want}");
    }
}

#[test]
fn resnets_have_torchvisions_outputs() {
    let mut scope = Scope::new(Seed(1));
    let net = ResNet::resnet18(&mut scope, 7);
    compare("resnet18", |x| net.forward(x), scope.build().unwrap());
    let mut scope = Scope::new(Seed(1));
    let net = ResNet::resnet50(&mut scope, 7);
    compare("resnet50", |x| net.forward(x), scope.build().unwrap());
}

#[test]
fn a_vision_transformer_has_torchvisions_outputs() {
    let mut scope = Scope::new(Seed(1));
    let config = VitConfig {
        image: 32,
        patch: 8,
        layers: 2,
        heads: 4,
        width: 32,
        mlp: 48,
        classes: 7,
        dropout: 0.0,
    };
    let net = Vit::new(&mut scope, &config);
    let params = scope.build().unwrap();
    let mut tape = Tape::new(Threads(1));
    let step = tape.inference(&params);
    // The second has as many patches as the model's images.
    for [height, width] in [[24, 24], [16, 64]] {
        let pixels = vec![0.0; height * width * 3];
        let other = step.input(&pixels, &[1, height, width, 3]).unwrap();
        let error = net.forward(other).unwrap_err().to_string();
        assert!(error.contains("for images of 32 x 32 pixels"), "{error}");
    }
    drop(step);
    compare("vit", |x| net.forward(x), params);
}

#[test]
fn vit_b_16_has_torchvisions_names_and_shapes() {
    let mut scope = Scope::new(Seed(1));
    Vit::new(&mut scope, &VitConfig::b_16(1000));
    let params = scope.build().unwrap();
    let expected = &fixture()["vit_b_16"];
    assert_eq!(expected["numel"], params.numel());
    let names = expected["names"].as_object().unwrap();
    for (name, shape) in names {
        let id = params.find(name).expect(name);
        assert_eq!(
            *shape,
            serde_json::json!(params.infos()[id.index()].shape),
            "{name}"
        );
    }
    // 12 blocks of as many tensors as the last, and those outside.
    let (blocks, others): (Vec<_>, Vec<_>) = names.keys().partition(|n| n.contains("layer_11"));
    assert_eq!(params.len(), 12 * blocks.len() + others.len());
}

struct Net {
    conv: [Conv2d; 2],
    norm: [BatchNorm; 2],
    head: Linear,
}

impl Net {
    fn new(scope: &mut Scope) -> Net {
        let three = || Conv2dOptions::new(3).padding(1);
        let mut conv = |name: &str, inp, out| Conv2d::new(scope.enter(name), inp, out, three());
        let conv = [conv("conv1", 3, 4), conv("conv2", 4, 4)];
        Net {
            conv,
            norm: ["norm1", "norm2"].map(|name| BatchNorm::new(scope.enter(name), 4)),
            head: Linear::new(scope.enter("head"), 4, 3),
        }
    }

    fn forward<'s>(&self, x: Tensor<'s>, recompute: bool) -> Result<Tensor<'s>> {
        let body = |x: Tensor<'s>| {
            let x = self.norm[0].forward(self.conv[0].forward(x)?)?.relu()?;
            let y = self.conv[1].forward(x.share())?;
            self.norm[1].forward_residual(y, x, phalanx_nn::layers::Act::Relu)
        };
        let x = match recompute {
            true => x.recompute(body)?,
            false => body(x)?,
        };
        self.head.forward(x.global_avg_pool()?)
    }
}

/// The names in the order in which gradients became final, all gradients, operations recorded, and the running mean.
fn trained(frozen: &[&str], recompute: bool) -> (Vec<String>, Vec<Vec<f32>>, usize, Vec<f32>) {
    let mut scope = Scope::new(Seed(4));
    let net = Net::new(&mut scope);
    let mut params = scope.build().unwrap();
    for id in params.ids() {
        let name = &params.infos()[id.index()].name;
        if frozen.iter().any(|front| name.starts_with(front)) {
            params.freeze(id);
        }
    }
    let mut tape = Tape::new(Threads(1));
    let mut sink = Recorder::like(&params);
    let step = tape.step(&params, StepKey::new(0, 0));
    let x = step.input(&noise(2 * 5 * 5 * 3, 9), &[2, 5, 5, 3]).unwrap();
    let loss = net.forward(x, recompute).unwrap();
    let recorded = step.graph().len();
    let loss = loss.cross_entropy(&[0, 2], 2.0).unwrap();
    loss.backward(&mut sink).unwrap();
    drop(step);
    tape.update_buffers(&mut params).unwrap();
    let names = sink.names(&params);
    let names = names.iter().map(|n| (*n).to_owned()).collect();
    let grads = params
        .ids()
        .map(|id| phalanx_nn::GradView::grad(&sink.grads, id).to_vec());
    let mean = params.find_buffer("norm1.running_mean").unwrap();
    (
        names,
        grads.collect(),
        recorded,
        params.buffer(mean).to_vec(),
    )
}

#[test]
fn frozen_parameters_get_no_gradient_and_change_no_others() {
    for recompute in [false, true] {
        let (all, grads, recorded, mean) = trained(&[], recompute);
        assert_eq!(all.len(), 10);
        // In the middle: what lies before needs the gradient that goes through.
        for frozen in [
            &["conv2", "norm2"][..],
            &["conv1", "norm1", "conv2", "norm2"],
            &["head"],
        ] {
            let (names, some, ops, statistics) = trained(frozen, recompute);
            let is_frozen = |name: &&String| frozen.iter().any(|front| name.starts_with(front));
            let left: Vec<_> = all
                .iter()
                .filter(|name| !is_frozen(name))
                .cloned()
                .collect();
            let names: Vec<_> = names
                .iter()
                .filter(|name| !is_frozen(name))
                .cloned()
                .collect();
            assert_eq!(names, left, "{frozen:?}");
            let order = [
                "conv1", "conv1", "conv2", "conv2", "norm1", "norm1", "norm2", "norm2", "head",
                "head",
            ];
            for ((layer, some), all) in order.iter().zip(&some).zip(&grads) {
                match frozen.contains(layer) {
                    true => assert!(some.iter().all(|g| *g == 0.0), "{layer}"),
                    false => assert_eq!(some, all, "{layer} without {frozen:?}"),
                }
            }
            // As in PyTorch, statistics are of the layers' mode.
            assert_eq!(statistics, mean);
            // Nothing is recorded up to the first parameter that is trained.
            assert_eq!(ops < recorded, frozen.len() == 4, "{ops} of {recorded}");
        }
    }
}

#[test]
fn a_loss_of_frozen_parameters_only_is_refused() {
    let mut scope = Scope::new(Seed(4));
    let layer = Linear::new(scope.enter("fc"), 2, 1);
    let mut params = scope.build().unwrap();
    params.ids().for_each(|id| params.freeze(id));
    let mut tape = Tape::new(Threads(1));
    let step = tape.step(&params, StepKey::new(0, 0));
    let x = step.input(&[1.0, 2.0], &[1, 2]).unwrap();
    let loss = layer
        .forward(x)
        .unwrap()
        .mse_loss(&[1.0], Reduction::Sum)
        .unwrap();
    let error = loss.backward(&mut Grads::like(&params)).unwrap_err();
    assert!(error.to_string().contains("no parameter"), "{error}");
}

fn lora(targets: &[&str]) -> LoraConfig {
    LoraConfig {
        rank: 2,
        alpha: 3.0,
        dropout: 0.0,
        targets: targets.iter().map(|t| (*t).to_owned()).collect(),
    }
}

#[test]
fn adapters_begin_without_effect_and_are_all_that_is_trained() {
    let build = |targets: Option<&[&str]>| {
        let mut scope = Scope::new(Seed(6));
        if let Some(targets) = targets {
            scope.lora(lora(targets));
        }
        let attention = MultiHeadAttention::new(scope.enter("attn"), 8, 2);
        let fc = Linear::new(scope.enter("fc"), 8, 3);
        ((attention, fc), scope.build().unwrap())
    };
    let run = |net: &(MultiHeadAttention, Linear), params: &Params, grads: &mut Grads| {
        let mut tape = Tape::new(Threads(1));
        let step = tape.step(params, StepKey::new(0, 0));
        let x = step.input(&noise(2 * 4 * 8, 3), &[2, 4, 8]).unwrap();
        let y = net.1.forward(net.0.forward(x, true).unwrap()).unwrap();
        let out = y.to_vec();
        let loss = y.mse_loss(&noise(24, 5), Reduction::Mean).unwrap();
        let value = loss.to_vec()[0];
        loss.backward(grads).unwrap();
        (out, value)
    };
    let (plain, plain_params) = build(None);
    let (expected, loss) = run(&plain, &plain_params, &mut Grads::like(&plain_params));
    for (targets, count) in [
        (&["all-linear"][..], 6),
        (&["fc"], 2),
        (&["attn"], 4),
        (&["attn", "fc"], 6),
    ] {
        let (net, mut params) = build(Some(targets));
        assert_eq!(params.len(), plain_params.len() + count, "{targets:?}");
        for (id, info) in plain_params.ids().zip(plain_params.infos()) {
            let same = params.find(&info.name).unwrap();
            assert_eq!(plain_params.get(id), params.get(same), "{}", info.name);
            assert!(params.is_frozen(same));
        }
        let mut grads = Grads::like(&params);
        assert_eq!(
            run(&net, &params, &mut grads),
            (expected.clone(), loss),
            "{targets:?}"
        );
        let before = params.clone();
        let mut sgd = Sgd::new(&params, 0.5);
        for _ in 0..20 {
            run(&net, &params, &mut grads);
            phalanx_nn::optim::Optimizer::step(&mut sgd, &mut params, &grads).unwrap();
        }
        for id in params.ids() {
            let stays = params.get(id) == before.get(id);
            assert_eq!(
                stays,
                params.is_frozen(id),
                "{}",
                params.infos()[id.index()].name
            );
        }
        assert!(
            run(&net, &params, &mut grads).1 < 0.99 * loss,
            "{targets:?}"
        );
    }
    let mut scope = Scope::new(Seed(6));
    scope.lora(lora(&["c_attn"]));
    Linear::new(scope.enter("fc"), 8, 3);
    let error = scope.build().unwrap_err().to_string();
    assert!(
        error.contains("no linear layer or attention is called c_attn"),
        "{error}"
    );
}
