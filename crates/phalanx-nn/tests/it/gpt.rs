//! The GPT against a plain one in f64: logits, and every gradient by central differences.

use std::collections::BTreeMap;

use crate::common::{Recorder, noise};
use phalanx_nn::models::{Gpt, GptConfig};
use phalanx_nn::optim::{Adam, step_clipped};
use phalanx_nn::{
    ErrorKind, Grads, Params, Precision, Reduction, Scope, Seed, StepKey, Tape, Threads,
};
use serde_json::Value;

const TINY: GptConfig = GptConfig {
    vocab: 7,
    context: 5,
    layers: 2,
    heads: 2,
    width: 8,
    dropout: 0.0,
};
const BATCH: usize = 2;
const LENGTH: usize = 4;
const TOKENS: [u32; BATCH * LENGTH] = [3, 0, 6, 2, 5, 5, 1, 4];

type Weights = BTreeMap<String, Vec<f64>>;

fn build(config: &GptConfig) -> (Gpt, Params) {
    let mut scope = Scope::new(Seed(3));
    let gpt = Gpt::new(&mut scope, config);
    (gpt, scope.build().unwrap())
}

fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

/// `rows` of `inputs` numbers times a weight (outputs, inputs), with its bias if there is one.
fn linear(w: &Weights, name: &str, x: &[Vec<f64>]) -> Vec<Vec<f64>> {
    let weight = &w[&format!("{name}.weight")];
    let bias = w.get(&format!("{name}.bias"));
    let row = |x: &Vec<f64>| {
        let each = weight.chunks_exact(x.len()).enumerate();
        each.map(|(o, row)| dot(row, x) + bias.map_or(0.0, |b| b[o]))
            .collect()
    };
    x.iter().map(row).collect()
}

fn layer_norm(w: &Weights, name: &str, x: &[Vec<f64>]) -> Vec<Vec<f64>> {
    let (g, b) = (&w[&format!("{name}.weight")], &w[&format!("{name}.bias")]);
    let row = |x: &Vec<f64>| {
        let n = x.len() as f64;
        let mean = x.iter().sum::<f64>() / n;
        let var = x.iter().map(|v| (v - mean) * (v - mean)).sum::<f64>() / n;
        let each = x.iter().zip(g).zip(b);
        each.map(|((v, g), b)| (v - mean) / (var + 1e-5).sqrt() * g + b)
            .collect()
    };
    x.iter().map(row).collect()
}

fn attention(w: &Weights, name: &str, x: &[Vec<f64>], heads: usize) -> Vec<Vec<f64>> {
    let [q, k, v] = ["q", "k", "v"].map(|part| linear(w, &format!("{name}.{part}"), x));
    let each = x[0].len() / heads;
    let mut y = vec![vec![0.0; x[0].len()]; x.len()];
    for head in 0..heads {
        let at = head * each..(head + 1) * each;
        for i in 0..x.len() {
            let score = |j: usize| dot(&q[i][at.clone()], &k[j][at.clone()]);
            let weights = (0..=i).map(|j| (score(j) / (each as f64).sqrt()).exp());
            let weights: Vec<f64> = weights.collect();
            let sum: f64 = weights.iter().sum();
            for (j, weight) in weights.iter().enumerate() {
                for c in at.clone() {
                    y[i][c] += weight / sum * v[j][c];
                }
            }
        }
    }
    linear(w, &format!("{name}.proj"), &y)
}

fn gelu(x: f64) -> f64 {
    let root = (2.0 / std::f64::consts::PI).sqrt();
    0.5 * x * (1.0 + (root * (x + 0.044_715 * x * x * x)).tanh())
}

/// Logits of one sequence after the other.
fn reference(w: &Weights, config: &GptConfig) -> Vec<f64> {
    let add = |x: &mut [Vec<f64>], y: &[Vec<f64>]| {
        for (x, y) in x.iter_mut().flatten().zip(y.iter().flatten()) {
            *x += y;
        }
    };
    let row = |name: &str, i: usize| {
        let weight = &w[&format!("transformer.{name}.weight")];
        weight[i * config.width..(i + 1) * config.width].to_vec()
    };
    let mut all = vec![];
    for tokens in TOKENS.chunks_exact(LENGTH) {
        let mut x: Vec<_> = tokens.iter().map(|t| row("wte", *t as usize)).collect();
        let positions: Vec<_> = (0..LENGTH).map(|i| row("wpe", i)).collect();
        add(&mut x, &positions);
        for i in 0..config.layers {
            let name = |part: &str| format!("transformer.h.{i}.{part}");
            let y = layer_norm(w, &name("ln_1"), &x);
            add(&mut x, &attention(w, &name("attn"), &y, config.heads));
            let y = layer_norm(w, &name("ln_2"), &x);
            let mut y = linear(w, &name("mlp.fc"), &y);
            y.iter_mut().flatten().for_each(|v| *v = gelu(*v));
            add(&mut x, &linear(w, &name("mlp.proj"), &y));
        }
        let x = layer_norm(w, "transformer.ln_f", &x);
        all.extend(linear(w, "lm_head", &x).into_iter().flatten());
    }
    all
}

fn compare(what: &str, got: &[f32], want: &[f64]) {
    assert_eq!(got.len(), want.len(), "{what}");
    let largest = want.iter().fold(1e-3f64, |a, v| a.max(v.abs()));
    for (i, (&got, &want)) in got.iter().zip(want).enumerate() {
        let error = (f64::from(got) - want).abs();
        assert!(error < 2e-5 * largest, "{what}[{i}]: {got}, not {want}");
    }
}

#[test]
fn logits_and_gradients_are_those_of_a_plain_transformer() {
    let (gpt, mut params) = build(&TINY);
    let mut weights = Weights::new();
    for (i, id) in params.ids().enumerate() {
        // Larger than the initial ones, whose softmax is nearly even.
        let (len, name) = (params.infos()[i].len, params.infos()[i].name.clone());
        let values: Vec<f32> = noise(len, i as u64).iter().map(|v| 0.6 * v).collect();
        params.import(id, &values).unwrap();
        weights.insert(name, values.iter().map(|v| f64::from(*v)).collect());
    }
    let mut sink = Recorder::like(&params);
    let mut tape = Tape::new(Threads(2));
    tape.poison(true);
    let step = tape.step(&params, StepKey::new(0, 0));
    let logits = gpt.forward(&step, &TOKENS, (BATCH, LENGTH)).unwrap();
    assert_eq!(logits.shape(), [BATCH, LENGTH, TINY.vocab]);
    compare("logits", logits.data(), &reference(&weights, &TINY));
    let r = noise(BATCH * LENGTH * TINY.vocab, 99);
    logits.backward_with(&r, &mut sink).unwrap();
    let r: Vec<f64> = r.iter().map(|v| f64::from(*v)).collect();
    let names: Vec<String> = weights.keys().cloned().collect();
    for name in names {
        let h = 1e-5;
        let mut differences = vec![];
        for i in 0..weights[&name].len() {
            let before = weights[&name][i];
            let mut at = |value: f64| {
                weights.get_mut(&name).unwrap()[i] = value;
                dot(&reference(&weights, &TINY), &r)
            };
            differences.push((at(before + h) - at(before - h)) / (2.0 * h));
            at(before);
        }
        let id = params.find(&name).unwrap();
        compare(&name, &sink.grads.export(id), &differences);
    }
}

/// `fixtures/gpt.json`, made by `make_gpt.py`.
#[test]
fn ten_losses_of_nanogpts_cpu_setting_are_pytorchs() {
    let config = GptConfig {
        vocab: 65,
        context: 64,
        layers: 4,
        heads: 4,
        width: 128,
        dropout: 0.0,
    };
    let (batch, length) = (12, 64);
    let fixture: Value = serde_json::from_str(include_str!("../fixtures/gpt.json")).unwrap();
    let (gpt, mut params) = build(&config);
    let mut stream = 0;
    let mut fill = |params: &mut Params, name: &str| {
        let id = params.find(name).unwrap_or_else(|| panic!("no {name}"));
        stream += 1;
        let is_norm = name.contains("ln_") && name.ends_with("weight");
        let mut values = noise(params.export(id).len(), stream);
        for v in &mut values {
            *v = if is_norm { 1.0 + 0.1 * *v } else { 0.05 * *v };
        }
        params.import(id, &values).unwrap();
    };
    fill(&mut params, "transformer.wte.weight");
    fill(&mut params, "transformer.wpe.weight");
    for layer in 0..config.layers {
        for part in [
            "ln_1",
            "attn.q",
            "attn.k",
            "attn.v",
            "attn.proj",
            "ln_2",
            "mlp.fc",
            "mlp.proj",
        ] {
            fill(&mut params, &format!("transformer.h.{layer}.{part}.weight"));
            fill(&mut params, &format!("transformer.h.{layer}.{part}.bias"));
        }
    }
    fill(&mut params, "transformer.ln_f.weight");
    fill(&mut params, "transformer.ln_f.bias");
    fill(&mut params, "lm_head.weight");
    let mut adam = Adam::adamw(&params, 1e-3)
        .betas(0.9, 0.99)
        .weight_decay(0.1);
    let (mut tape, mut grads) = (Tape::new(Threads(2)), Grads::like(&params));
    for (i, want) in fixture["losses"].as_array().unwrap().iter().enumerate() {
        let token = |at: usize| {
            let at = at as u64 + 1000 * i as u64;
            ((at * at / 7 + 3 * at) % 65) as u32
        };
        let places =
            || (0..batch).flat_map(|row| (0..length).map(move |at| row * (length + 1) + at));
        let x: Vec<u32> = places().map(token).collect();
        let y: Vec<u32> = places().map(|at| token(at + 1)).collect();
        let step = tape.step(&params, StepKey::new(0, i as u64));
        let logits = gpt.forward(&step, &x, (batch, length)).unwrap();
        let logits = logits.reshape(&[batch * length, config.vocab]).unwrap();
        let loss = logits.cross_entropy(&y, Reduction::Mean).unwrap();
        let got = f64::from(loss.item().unwrap());
        loss.backward(&mut grads).unwrap();
        let want = want.as_f64().unwrap();
        assert!((got - want).abs() < 1e-5, "step {i}: {got}, not {want}");
        drop(step);
        step_clipped(&mut adam, &mut params, &grads, 1.0).unwrap();
    }
}

#[test]
fn names_sizes_and_initial_weights_are_those_of_nanogpt() {
    let config = GptConfig {
        vocab: 65,
        context: 64,
        layers: 2,
        heads: 4,
        width: 64,
        dropout: 0.1,
    };
    let (_, params) = build(&config);
    let of_block: usize = 4 * (64 * 64 + 64) + 2 * 4 * 64 * 64 + 5 * 64 + 4 * 64;
    let expected = 2 * of_block + (65 + 64 + 65) * 64 + 2 * 64;
    assert_eq!(params.numel(), expected);
    let std = |name: &str| {
        let values = params.export(params.find(name).unwrap_or_else(|| panic!("no {name}")));
        let squares = values.iter().map(|v| f64::from(v * v)).sum::<f64>();
        (squares / values.len() as f64).sqrt()
    };
    for (name, want) in [
        ("transformer.wte.weight", 0.02),
        ("transformer.wpe.weight", 0.02),
        ("transformer.h.0.ln_1.weight", 1.0),
        ("transformer.h.0.attn.q.weight", 0.02),
        ("transformer.h.0.attn.k.bias", 0.0),
        ("transformer.h.0.attn.v.weight", 0.02),
        ("transformer.h.0.attn.proj.weight", 0.01),
        ("transformer.h.1.ln_2.bias", 0.0),
        ("transformer.h.1.mlp.fc.weight", 0.02),
        ("transformer.h.1.mlp.proj.weight", 0.01),
        ("transformer.h.1.mlp.proj.bias", 0.0),
        ("transformer.ln_f.bias", 0.0),
        ("lm_head.weight", 0.02),
    ] {
        assert!((std(name) - want).abs() <= 0.05 * want, "{name}");
    }
    assert!(params.find("lm_head.bias").is_none());
}

#[test]
fn dropout_is_for_training_and_recomputing_changes_no_bit() {
    let (gpt, params) = build(&GptConfig {
        dropout: 0.5,
        ..TINY
    });
    let mut tape = Tape::new(Threads(1));
    let logits = |tape: &mut Tape, trains: bool| {
        let step = match trains {
            true => tape.step(&params, StepKey::new(0, 0).seed(1)),
            false => tape.inference(&params),
        };
        let logits = gpt.forward(&step, &TOKENS, (BATCH, LENGTH));
        logits.unwrap().to_vec()
    };
    let (dropped, whole) = (logits(&mut tape, true), logits(&mut tape, false));
    assert_ne!(dropped, whole);
    let weights = params.ids().zip(params.infos());
    let weights = weights.map(|(id, info)| {
        let values = params.export(id).into_iter().map(f64::from).collect();
        (info.name.clone(), values)
    });
    compare("logits", &whole, &reference(&weights.collect(), &TINY));
    let gradients = |gpt: &Gpt| {
        let (mut grads, mut tape) = (Grads::like(&params), Tape::new(Threads(1)));
        let step = tape.step(&params, StepKey::new(0, 0).seed(1));
        let rows = [BATCH * LENGTH, TINY.vocab];
        let logits = gpt.forward(&step, &TOKENS, (BATCH, LENGTH)).unwrap();
        let loss = logits.reshape(&rows).unwrap();
        let loss = loss.cross_entropy(&TOKENS, Reduction::Mean).unwrap();
        loss.backward(&mut grads).unwrap();
        grads.flat().iter().map(|v| v.to_bits()).collect::<Vec<_>>()
    };
    assert_eq!(gradients(&gpt), gradients(&gpt.clone().recompute(true)));
}

#[test]
fn with_caches_the_next_logits_have_the_bits_of_all_at_once() {
    let config = GptConfig {
        vocab: 11,
        context: 80,
        layers: 3,
        heads: 4,
        width: 64,
        dropout: 0.1,
    };
    let (gpt, params) = build(&config);
    let (_, of_other) = build(&TINY);
    let tokens: Vec<u32> = (0..80).map(|i| (i * i / 7 + 3 * i) % 11).collect();
    for precision in [Precision::F32, Precision::Bf16] {
        let mut tape = Tape::new(Threads(2));
        tape.set_precision(precision);
        let step = tape.inference(&params);
        let want = gpt.forward(&step, &tokens, (1, 80)).unwrap();
        let (mut caches, mut at) = (Vec::new(), 0);
        // A prompt, some tokens together, then one by one.
        for n in [60, 3].into_iter().chain([1; 17]) {
            let part = &tokens[at..at + n];
            let logits = gpt.forward_cached(&step, part, (1, n), &mut caches);
            let logits = logits.unwrap();
            assert_eq!(logits.shape(), [1, n, 11]);
            let want = &want.data()[at * 11..][..n * 11];
            assert_eq!(logits.data(), want, "{precision:?} from {at}");
            at += n;
            assert!(caches.iter().all(|cache| cache.len() == at));
        }
        let error = gpt.forward_cached(&step, &[0], (1, 1), &mut caches);
        let error = error.unwrap_err().to_string();
        assert!(error.contains("81 tokens exceeds"), "{error}");
        caches.pop();
        let error = gpt.forward_cached(&step, &[0], (1, 1), &mut caches);
        let error = error.unwrap_err().to_string();
        assert!(error.contains("2 caches for a model of 3"), "{error}");
        let mut caches = Vec::new();
        gpt.forward_cached(&step, &[0; 4], (2, 2), &mut caches)
            .unwrap();
        assert!(
            gpt.forward_cached(&step, &[0], (1, 1), &mut caches)
                .is_err()
        );
    }
    let mut tape = Tape::new(Threads(1));
    let step = tape.inference(&of_other);
    assert!(
        gpt.forward_cached(&step, &[0], (1, 1), &mut Vec::new())
            .is_err()
    );
}

#[test]
fn what_does_not_fit_is_an_error() {
    let (gpt, params) = build(&TINY);
    let (uneven, other) = build(&GptConfig { heads: 3, ..TINY });
    let mut tape = Tape::new(Threads(1));
    let step = tape.step(&params, StepKey::new(0, 0));
    for (tokens, sizes, words) in [
        (&[0; 6][..], (1, 6), "exceeds the model's context of 5"),
        (&[0, 7], (1, 2), "no row 7"),
        (&[0, 1, 2], (2, 2), "3 numbers"),
    ] {
        let error = gpt.forward(&step, tokens, sizes).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Usage);
        assert!(error.to_string().contains(words), "{error}");
    }
    drop(step);
    let step = tape.step(&other, StepKey::new(0, 0));
    let error = uneven.forward(&step, &TOKENS, (BATCH, LENGTH)).unwrap_err();
    assert!(error.to_string().contains("3 heads"), "{error}");
}
