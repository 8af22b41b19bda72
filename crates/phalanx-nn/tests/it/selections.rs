//! Operations that choose, add up or turn elements, and losses with a threshold, against PyTorch
//! (`fixtures/selections.json`, made by `make_selections.py`) and central differences.

use crate::common::differences::{check, input};
use crate::common::{Recorder, noise};
use phalanx_nn::layers::{BatchNorm, Dropout, KvCache, LayerNorm, Linear, MultiHeadAttention};
use phalanx_nn::rng::torch::Generator;
use phalanx_nn::{
    Grads, Init, Reduction, Result, Scope, Seed, StepKey, Tape, Tensor, Threads, Value as _,
};
use serde_json::Value;

fn fixture() -> Value {
    serde_json::from_str(include_str!("../fixtures/selections.json")).unwrap()
}

fn list<T>(v: &Value, f: impl Fn(&Value) -> T) -> Vec<T> {
    v.as_array()
        .map_or(&[][..], Vec::as_slice)
        .iter()
        .map(f)
        .collect()
}

fn floats(v: &Value) -> Vec<f32> {
    list(v, |v| v.as_f64().unwrap() as f32)
}

fn sizes(v: &Value) -> Vec<usize> {
    list(v, |v| v.as_u64().unwrap() as usize)
}

/// The operation of a case, on its input.
fn apply<'s>(case: &Value, x: Tensor<'s>, other: Tensor<'s>) -> Result<Tensor<'s>> {
    let o = &case["options"];
    let dim = o["dim"].as_u64().unwrap_or(0) as usize;
    let mask = list(&o["mask"], |v| v.as_bool().unwrap());
    match case["op"].as_str().unwrap() {
        "masked_fill" => x.masked_fill(&mask, o["value"].as_f64().unwrap() as f32),
        "select_where" => x.select_where(&mask, other),
        "gather" => {
            let index = list(&o["index"], |v| v.as_u64().unwrap() as u32);
            x.gather(dim, &index, &sizes(&o["to"]))
        }
        "cumsum" => x.cumsum(dim),
        "stack" => {
            let twice = x.share().scale(2.0)?;
            Tensor::stack(vec![x, twice], dim)
        }
        "chunk" => {
            let parts = x.chunk(o["parts"].as_u64().unwrap() as usize, dim)?;
            Ok(parts.into_iter().last().unwrap())
        }
        "rotary" => {
            let first = o["first"].as_u64().unwrap() as usize;
            x.rotary(1, o["base"].as_f64().unwrap(), first)
        }
        op @ ("huber" | "smooth_l1") => {
            let (target, threshold) = (floats(&o["target"]), o["threshold"].as_f64().unwrap());
            let reduction = match o["reduction"].as_str().unwrap() {
                "none" => Reduction::None,
                "sum" => Reduction::Sum,
                _ => Reduction::Mean,
            };
            // Targets may be those of a tensor.
            let target = x.constant(&target, &x.shape())?;
            match op {
                "huber" => x.huber_loss(target.data(), threshold, reduction),
                _ => x.smooth_l1_loss(target.data(), threshold, reduction),
            }
        }
        other => panic!("fixture with an unknown operation: {other}"),
    }
}

#[test]
fn outputs_and_gradients_are_pytorchs() {
    let fixture = fixture();
    let params = Scope::new(Seed(0)).build().unwrap();
    for threads in [1, 3] {
        let mut tape = Tape::new(Threads(threads));
        tape.poison(true);
        for case in fixture["cases"].as_array().unwrap() {
            let name = format!("{} {}", case["op"], case["options"]);
            let mut sink = Recorder::like(&params);
            let step = tape.step(&params, StepKey::new(0, 0));
            let shape = sizes(&case["shape"]);
            let x = step.variable(&floats(&case["x"]), &shape).unwrap();
            let mut other = floats(&case["options"]["other"]);
            other.resize(x.numel(), 0.0);
            let other = step.input(&other, &shape).unwrap();
            let seen = x.share();
            let out = apply(case, x, other).unwrap();
            assert_eq!(out.shape(), sizes(&case["out_shape"]), "{name}");
            let values = out.to_vec();
            let r: Vec<f32> = (0..values.len()).map(|i| 0.5 + 0.25 * i as f32).collect();
            out.backward_with(&r, &mut sink).unwrap();
            for (what, got, want) in [
                ("output", values, floats(&case["out"])),
                ("gradient", seen.grad().unwrap(), floats(&case["grad"])),
            ] {
                assert_eq!(got.len(), want.len(), "{name}: {what}");
                let largest = want.iter().fold(1e-3f32, |a, v| a.max(v.abs()));
                // The reference's angles are f32.
                let most = if name.contains("rotary") { 2e-5 } else { 2e-6 };
                for (g, w) in got.iter().zip(&want) {
                    let near = (g - w).abs() <= most * largest;
                    assert!(near, "{name}: {what}: {g} for {w}");
                }
            }
        }
    }
}

#[test]
fn gradients_are_those_of_differences() {
    let mask: Vec<bool> = (0..12).map(|i| i % 5 == 1).collect();
    check(
        "masked_fill",
        &[input(&[2, 3, 4], 1)],
        |g, _| g.x(0).masked_fill(&mask, 3.0),
        |v| {
            let each = v[0].iter().enumerate();
            each.map(|(i, &x)| if mask[i % 12] { 3.0 } else { x })
                .collect()
        },
    );
    check(
        "select_where",
        &[input(&[2, 3, 4], 1), input(&[2, 3, 4], 2)],
        |g, _| g.x(0).select_where(&mask, g.x(1)),
        |v| (0..24).map(|i| v[usize::from(!mask[i % 12])][i]).collect(),
    );
    check(
        "gather",
        &[input(&[3, 4], 1)],
        |g, _| g.x(0).gather(1, &[3, 3, 0, 2, 2, 2], &[2, 3]),
        |v| [3, 3, 0, 6, 6, 6].map(|i: usize| v[0][i]).to_vec(),
    );
    check(
        "cumsum",
        &[input(&[3, 2], 1)],
        |g, _| g.x(0).cumsum(0),
        |v| {
            let x = &v[0];
            vec![
                x[0],
                x[1],
                x[0] + x[2],
                x[1] + x[3],
                x[0] + x[2] + x[4],
                x[1] + x[3] + x[5],
            ]
        },
    );
    check(
        "split and stack",
        &[input(&[2, 5], 1)],
        |g, _| {
            let parts = g.x(0).split(&[2, 1, 2], 1)?;
            let [a, _, c] = <[Tensor<'_>; 3]>::try_from(parts).unwrap();
            Tensor::stack(vec![c, a], 2)
        },
        |v| [3, 0, 4, 1, 8, 5, 9, 6].map(|i: usize| v[0][i]).to_vec(),
    );
    check(
        "rotary",
        &[input(&[2, 3, 12], 1)],
        |g, _| g.x(0).rotary(3, 50.0, 4),
        |v| {
            let mut y = v[0].clone();
            for (i, y) in y.chunks_mut(4).enumerate() {
                let position = (4 + i / 3 % 3) as f64;
                for k in 0..2 {
                    let angle = position / 50f64.powf(k as f64 / 2.0);
                    let (s, c) = angle.sin_cos();
                    let (a, b) = (y[k], y[k + 2]);
                    (y[k], y[k + 2]) = (a * c - b * s, b * c + a * s);
                }
            }
            y
        },
    );
}

fn part(x: Tensor<'_>) -> Result<Tensor<'_>> {
    let mask: Vec<bool> = (0..24).map(|i| i % 3 == 0).collect();
    let index = [0, 1, 1, 0, 2, 2, 2, 2];
    let y = x.share().rotary(2, 100.0, 1)?.sigmoid()?;
    let y = y.select_where(&mask, x)?.cumsum(2)?.exp()?;
    let y = y.masked_fill(&mask[..12], 0.5)?.sigmoid()?;
    y.gather(1, &index, &[2, 1, 4])?.exp()
}

#[test]
fn what_is_recomputed_has_the_same_bits() {
    let params = Scope::new(Seed(0)).build().unwrap();
    let run = |recomputes: bool| {
        let mut tape = Tape::new(Threads(2));
        tape.poison(true);
        let step = tape.step(&params, StepKey::new(0, 0));
        let x = step.variable(&noise(24, 1), &[2, 3, 4]).unwrap();
        let seen = x.share();
        let y = match recomputes {
            true => x.recompute(part),
            false => part(x),
        };
        let loss = y.unwrap().mean(&[], false).unwrap();
        loss.backward(&mut Grads::like(&params)).unwrap();
        seen.grad().unwrap()
    };
    assert_eq!(run(true), run(false));
}

#[test]
fn what_is_detached_gets_no_gradient() {
    let params = Scope::new(Seed(0)).build().unwrap();
    let mut tape = Tape::new(Threads(1));
    let step = tape.step(&params, StepKey::new(0, 0));
    let x = step.variable(&[1.0, 2.0], &[2]).unwrap();
    let seen = x.share();
    let fixed = x.share().detach().unwrap();
    assert_eq!(fixed.data(), [1.0, 2.0]);
    let y = x.mul(fixed.share()).unwrap().sum(&[], false).unwrap();
    y.backward(&mut Grads::like(&params)).unwrap();
    assert_eq!((seen.grad().unwrap(), fixed.grad()), (vec![1.0, 2.0], None));
}

/// More than a block of a product's sums.
const WIDTH: usize = 640;

/// A decoder of one block.
struct Decoder {
    attention: MultiHeadAttention,
    norm: LayerNorm,
    head: Linear,
}

impl Decoder {
    fn new(rotary: bool) -> (Self, phalanx_nn::Params) {
        let mut scope = Scope::new(Seed(5));
        let attention = MultiHeadAttention::new(scope.enter("a"), WIDTH, 4);
        let decoder = Decoder {
            attention: match rotary {
                true => attention.rotary(10000.0),
                false => attention,
            },
            norm: LayerNorm::new(scope.enter("n"), &[WIDTH]),
            head: Linear::new(scope.enter("h"), WIDTH, 11),
        };
        (decoder, scope.build().unwrap())
    }

    fn forward<'s>(
        &self,
        x: Tensor<'s>,
        cache: Option<&mut KvCache<Tensor<'s>>>,
    ) -> Result<Tensor<'s>> {
        let y = match cache {
            Some(cache) => self.attention.forward_cached(x.share(), cache)?,
            None => self.attention.forward(x.share(), true)?,
        };
        self.head.forward(self.norm.forward(x.add(y)?)?)
    }
}

#[test]
fn with_a_cache_the_next_positions_have_the_bits_of_all_at_once() {
    const LENGTH: usize = 71;
    for rotary in [false, true] {
        let (decoder, params) = Decoder::new(rotary);
        let mut tape = Tape::new(Threads(2));
        let step = tape.inference(&params);
        let x = step
            .input(&noise(2 * LENGTH * WIDTH, 3), &[2, LENGTH, WIDTH])
            .unwrap();
        let want = decoder.forward(x.share(), None).unwrap();
        let mut cache = KvCache::new();
        assert!(cache.is_empty());
        let mut parts = Vec::new();
        // A prompt, a few positions together, then one by one.
        let mut at = 0;
        for n in [65, 3, 1, 1, 1] {
            let part = x.share().slice(1, at..at + n).unwrap();
            parts.push(decoder.forward(part, Some(&mut cache)).unwrap());
            at += n;
            assert_eq!(cache.len(), at);
        }
        let got = step.concat(parts, 1).unwrap();
        assert_eq!(got.data(), want.data(), "rotary: {rotary}");
        let one = step.input(&[0.0; WIDTH], &[1, 1, WIDTH]).unwrap();
        assert!(decoder.forward(one, Some(&mut cache)).is_err());
        assert_eq!(cache.len(), LENGTH);
    }
}

#[test]
fn rotary_attention_is_that_of_turned_queries_and_keys() {
    let (decoder, params) = Decoder::new(true);
    let a = &decoder.attention;
    let mut tape = Tape::new(Threads(1));
    let step = tape.step(&params, StepKey::new(0, 0));
    let x = step
        .variable(&noise(2 * 7 * WIDTH, 3), &[2, 7, WIDTH])
        .unwrap();
    let all = x.share().linear(a.in_weight, a.in_bias, Default::default());
    let parts = all.unwrap().chunk(3, 2).unwrap();
    let [q, k, v] = <[Tensor<'_>; 3]>::try_from(parts).unwrap();
    let [q, k] = [q, k].map(|x| x.rotary(4, 10000.0, 0).unwrap());
    let y = q.attention(k, v, 4, false, None).unwrap();
    let want = a.out.forward(y).unwrap();
    let crossed = a.forward_cross(x.share(), x.share(), x.share(), None);
    assert_eq!(crossed.unwrap().data(), want.data());
    assert_eq!(a.forward(x, false).unwrap().data(), want.data());
}

/// Gradients of queries that are the last of the positions.
#[test]
fn causal_attention_of_the_last_positions() {
    let (queries, keys, width) = (2, 5, 4);
    let at = |row: usize, c: usize| row * width + c;
    check(
        "causal attention of the last positions",
        &[
            input(&[1, queries, width], 1),
            input(&[1, keys, width], 2),
            input(&[1, keys, width], 3),
        ],
        |g, _| g.x(0).attention(g.x(1), g.x(2), 1, true, None),
        |v| {
            let mut y = Vec::new();
            for i in 0..queries {
                let score = |j: usize| -> f64 {
                    let term = |c| v[0][at(i, c)] * v[1][at(j, c)];
                    ((0..width).map(term).sum::<f64>() / (width as f64).sqrt()).exp()
                };
                let seen = keys - queries + i + 1;
                let sum: f64 = (0..seen).map(score).sum();
                for c in 0..width {
                    let term = |j| score(j) / sum * v[2][at(j, c)];
                    y.push((0..seen).map(term).sum());
                }
            }
            y
        },
    );
}

#[test]
fn mistakes_are_named() {
    let params = Scope::new(Seed(0)).build().unwrap();
    let mut tape = Tape::new(Threads(1));
    let step = tape.step(&params, StepKey::new(0, 0));
    let x = || step.input(&[0.0; 6], &[2, 3]).unwrap();
    let y = || step.input(&[0.0; 6], &[3, 2]).unwrap();
    let errors = [
        (x().masked_fill(&[true; 2], 0.0), "a mask of 2"),
        (x().select_where(&[true; 3], y()), "other has shape [3, 2]"),
        (x().gather(2, &[0], &[1, 1]), "dimension 2"),
        (x().gather(0, &[0], &[1, 2]), "1 indices"),
        (x().gather(1, &[3], &[1, 1]), "index 3"),
        (x().cumsum(2), "cumsum along dimension 2"),
        (x().rotary(1, 10.0, 0), "width of 3"),
        (y().rotary(0, 10.0, 0), "0 heads"),
        (y().rotary(1, 0.0, 0), "base is 0"),
        (Tensor::stack(vec![x(), y()], 0), "concat"),
        (Tensor::stack(vec![x()], 3), "stack along dimension 3"),
        (x().split(&[1, 1], 1).map(|_| x()), "sizes [1, 1]"),
        (
            x().huber_loss(&[0.0; 6], 0.0, 1.0),
            "huber_loss: delta is 0",
        ),
        (x().huber_loss(&[0.0; 5], 1.0, 1.0), "5 targets"),
        (
            x().smooth_l1_loss(&[0.0; 6], -1.0, 1.0),
            "smooth_l1_loss: beta is -1",
        ),
        (x().chunk(0, 1).map(|_| x()), "0 parts"),
    ];
    for (result, part) in errors {
        let e = result.unwrap_err();
        assert!(e.to_string().contains(part), "{e}");
    }
}

#[test]
fn draws_are_pytorchs() {
    for case in fixture()["draws"].as_array().unwrap() {
        let mut g = Generator::new(case["seed"].as_u64().unwrap());
        let mut weights = vec![0.0; 9];
        g.fill_uniform_f32(&mut weights, 0.0, 1.0);
        weights[3] = 0.0;
        assert_eq!(weights, floats(&case["weights"]));
        let integer = |v: &Value| v.as_i64().unwrap();
        for draw in case["randint"].as_array().unwrap() {
            let got = g.randint(integer(&draw[0]), integer(&draw[1]), 7).unwrap();
            assert_eq!(got, list(&draw[2], integer));
        }
        let places = g.multinomial(&weights, 40).unwrap();
        assert_eq!(places, sizes(&case["multinomial"]));
        let single = (0..30).flat_map(|_| g.multinomial(&weights, 1).unwrap());
        assert_eq!(single.collect::<Vec<_>>(), sizes(&case["single"]));
        assert_eq!(g.randint(0, 1000, 1).unwrap(), [integer(&case["after"])]);
    }
    let mut g = Generator::new(0);
    let all = g.randint(i64::MIN, i64::MAX, 3).unwrap();
    assert_eq!(all.len(), 3);
    let errors = [
        (g.randint(3, 3, 1).map(drop), "from 3 to below 3"),
        (g.multinomial(&[1.0, -1.0], 2).map(drop), "weight 1 is -1"),
        (
            g.multinomial(&[0.0], 2).map(drop),
            "sum of the weights is 0",
        ),
        (g.multinomial(&[], 2).map(drop), "sum of the weights is 0"),
    ];
    for (result, part) in errors {
        let e = result.unwrap_err();
        assert!(e.to_string().contains(part), "{e}");
    }
}

#[test]
fn initial_values_are_chosen_by_name_and_shape() {
    let mut scope = Scope::new(Seed(3));
    let other = Linear::new(scope.enter("a"), 3, 2);
    let mut inner = scope.enter("inner");
    let first = Linear::new(inner.enter("first"), 4, 5);
    let norm = LayerNorm::new(inner.enter("norm"), &[5]);
    let attention = MultiHeadAttention::new(inner.enter("attention"), 4, 2);
    let mut seen = Vec::new();
    let std = 0.02;
    inner.initialize(|name, shape| {
        seen.push((name.to_owned(), shape.to_vec()));
        match shape.len() {
            2 => Some(Init::Normal { mean: 0.0, std }),
            _ => name.ends_with("bias").then_some(Init::Constant(0.0)),
        }
    });
    let names: Vec<&str> = seen.iter().map(|(name, _)| &**name).collect();
    let of_attention = [
        "in_proj_weight",
        "in_proj_bias",
        "out_proj.weight",
        "out_proj.bias",
    ];
    let of_attention = of_attention.map(|name| format!("attention.{name}"));
    let of_attention = of_attention.each_ref().map(String::as_str);
    let others = ["first.weight", "first.bias", "norm.weight", "norm.bias"];
    assert_eq!(names, [others, of_attention].concat());
    assert_eq!(seen[0].1, [5, 4]);
    let params = scope.build().unwrap();
    assert_eq!(params.get(first.bias.unwrap()), [0.0; 5]);
    let weight = params.find("inner.norm.weight").unwrap();
    assert_eq!(params.get(weight), [1.0; 5]);
    let _ = norm;
    // As PyTorch, which has drawn the default values of all layers before: linear, attention.
    let mut g = Generator::new(3);
    for (weight, bias) in [(6, 2), (20, 5), (16, 4)] {
        g.fill_uniform_f32(&mut vec![0.0; weight], 0.0, 1.0);
        g.fill_uniform_f32(&mut vec![0.0; bias], 0.0, 1.0);
    }
    g.fill_uniform_f32(&mut [0.0; 48], 0.0, 1.0);
    for (id, len) in [
        (first.weight, 20),
        (attention.in_weight, 48),
        (attention.out.weight, 16),
    ] {
        let mut want = vec![0.0; len];
        g.fill_normal_f32(&mut want, 0.0, std);
        assert_eq!(params.export(id), want);
    }
    assert_ne!(params.get(other.bias.unwrap()), [0.0; 2]);
}

/// A batch norm with statistics far from the batch's, and dropout, before a layer that trains.
#[test]
fn a_part_evaluates_while_the_rest_trains() {
    let mut scope = Scope::new(Seed(0));
    let norm = BatchNorm::new(scope.enter("norm"), 3);
    let head = Linear::new(scope.enter("head"), 3, 2);
    let mut params = scope.build().unwrap();
    let running = norm.options().running.unwrap();
    let stats = [
        (running.mean, [0.5, -1.0, 2.0]),
        (running.var, [4.0, 0.25, 1.5]),
    ];
    for (id, values) in stats {
        params.buffer_mut(id).copy_from_slice(&values);
    }
    let weight = norm.options().weight.unwrap();
    params.import(weight, &[1.5, -0.5, 2.0]).unwrap();
    let values = noise(12, 1);
    let mut tape = Tape::new(Threads(2));
    let want = {
        let step = tape.inference(&params);
        let x = step.input(&values, &[4, 3]).unwrap();
        norm.forward(x).unwrap().to_vec()
    };
    let mut sink = Recorder::like(&params);
    let step = tape.step(&params, StepKey::new(0, 0));
    let x = step.variable(&values, &[4, 3]).unwrap();
    let seen = x.share();
    let y = x.evaluate(|x| {
        assert!(!x.is_training());
        Dropout::new(0.5).forward(norm.forward(x)?)
    });
    let y = y.unwrap();
    assert!(y.is_training());
    assert_eq!(y.data(), want);
    let loss = head.forward(y).unwrap().sum(&[], false).unwrap();
    loss.backward(&mut sink).unwrap();
    let slope = |c: usize| {
        let w = params.get(head.weight);
        f64::from(w[c]) + f64::from(w[3 + c])
    };
    let near = |got: &[f32], want: &[f64]| {
        let pairs = got.iter().zip(want);
        assert!(
            pairs.clone().all(|(g, w)| (f64::from(*g) - w).abs() < 1e-5),
            "{got:?} {want:?}"
        );
    };
    let deviation = |c: usize| (f64::from(stats[1].1[c]) + 1e-5).sqrt();
    let factor = |c: usize| f64::from(params.get(weight)[c]) / deviation(c);
    let each: Vec<f64> = (0..12).map(|i| slope(i % 3) * factor(i % 3)).collect();
    near(&seen.grad().unwrap(), &each);
    let of_weight = |c: usize| {
        let normal =
            |r: usize| (f64::from(values[r * 3 + c]) - f64::from(stats[0].1[c])) / deviation(c);
        (0..4).map(|r| slope(c) * normal(r)).sum()
    };
    near(&sink.grads.export(weight), &[0, 1, 2].map(of_weight));
    near(
        &sink.grads.export(norm.options().bias.unwrap()),
        &[0, 1, 2].map(|c| 4.0 * slope(c)),
    );
    drop(seen);
    drop(step);
    let before = params.buffer(running.mean).to_vec();
    tape.update_buffers(&mut params).unwrap();
    assert_eq!(params.buffer(running.mean), before);
    assert_eq!(params.buffer(running.batches), [0.0]);
}
