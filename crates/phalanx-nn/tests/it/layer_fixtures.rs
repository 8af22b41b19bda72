//! Single operations against PyTorch (`fixtures/layers.json`: an extract of
//! the project's parity fixtures, made with PyTorch 2.15).

use crate::common::{Array, channels_first};
use phalanx_nn::layers::{
    Act, AvgPool2dOptions, BatchNormOptions, Conv2dOptions, MaxPool2dOptions, RunningStats,
};
use phalanx_nn::losses::IGNORE_LABEL;
use phalanx_nn::{
    Grads, Init, Layout, Params, Reduction, Result, Scope, Seed, StepKey, Tape, Tensor, Threads,
};
use serde_json::Value;

/// One number, or one per direction.
fn pair(v: &Value, default: u64) -> (usize, usize) {
    match v.as_array() {
        Some(a) => (
            a[0].as_u64().unwrap() as usize,
            a[1].as_u64().unwrap() as usize,
        ),
        None => {
            let n = v.as_u64().unwrap_or(default) as usize;
            (n, n)
        }
    }
}

fn conv_options(o: &Value, weight: &[usize]) -> Conv2dOptions {
    let (s, p, d) = (
        pair(&o["stride"], 1),
        pair(&o["padding"], 0),
        pair(&o["dilation"], 1),
    );
    Conv2dOptions::rect(weight[2], weight[3])
        .stride_rect(s.0, s.1)
        .padding_rect(p.0, p.1)
        .dilation_rect(d.0, d.1)
        .groups(o["groups"].as_u64().unwrap_or(1) as usize)
}

fn pool_options(o: &Value) -> MaxPool2dOptions {
    let n = |name: &str, default: usize| o[name].as_u64().map_or(default, |v| v as usize);
    let kernel = n("kernel_size", 1);
    let p = MaxPool2dOptions::new(kernel)
        .stride(n("stride", kernel))
        .padding(n("padding", 0))
        .dilation(n("dilation", 1));
    if o["ceil_mode"].as_bool() == Some(true) {
        p.ceil_mode()
    } else {
        p
    }
}

fn avg_options(o: &Value) -> AvgPool2dOptions {
    let n = |name: &str, default: usize| o[name].as_u64().map_or(default, |v| v as usize);
    let kernel = n("kernel_size", 1);
    let mut p = AvgPool2dOptions::new(kernel)
        .stride(n("stride", kernel))
        .padding(n("padding", 0));
    if o["ceil_mode"].as_bool() == Some(true) {
        p = p.ceil_mode();
    }
    if o["count_include_pad"].as_bool() == Some(false) {
        p = p.exclude_padding();
    }
    p
}

fn norm_options(o: &Value, params: &Params, affine: bool) -> BatchNormOptions {
    let buffer = |name| params.find_buffer(name).unwrap();
    BatchNormOptions {
        weight: params.find("weight").filter(|_| affine),
        bias: params.find("bias").filter(|_| affine),
        running: Some(RunningStats {
            mean: buffer("running_mean"),
            var: buffer("running_var"),
            batches: buffer("num_batches_tracked"),
        }),
        momentum: match o.get("momentum") {
            Some(m) => m.as_f64(),
            None => Some(0.1),
        },
        eps: o["eps"].as_f64().unwrap_or(1e-5),
    }
}

/// Trains the running statistics on the case's first batch (weight 1, bias 0).
fn first_batch(case: &Value, params: &mut Params, tape: &mut Tape) {
    let x = Array::parse(&case["first_batch"]).channels_last();
    let step = tape.step(params, StepKey::new(0, 0));
    let options = norm_options(&case["options"], params, false);
    let x = step.input(&x.data, &x.shape).unwrap();
    x.batch_norm(&options, None, Act::None).unwrap();
    drop(step);
    tape.update_buffers(params).unwrap();
}

fn labels(v: &Value) -> Vec<u32> {
    v["data"]
        .as_array()
        .unwrap()
        .iter()
        .map(|l| u32::try_from(l.as_i64().unwrap()).unwrap_or(IGNORE_LABEL))
        .collect()
}

fn run<'s>(case: &Value, params: &Params, x: Tensor<'s>) -> Result<Tensor<'s>> {
    let (o, inputs) = (&case["options"], &case["inputs"]);
    let id = |name| params.find(name);
    let mean = o["reduction"].as_str() != Some("sum");
    let counted = |l: &[u32]| {
        if mean {
            l.iter().filter(|l| **l != IGNORE_LABEL).count() as f32
        } else {
            1.0
        }
    };
    match case["layer"].as_str().unwrap() {
        "conv2d" => {
            let w = Array::parse(&inputs["weight"]);
            x.conv2d(
                id("weight").unwrap(),
                id("bias"),
                conv_options(o, &w.shape),
                Act::None,
            )
        }
        "linear" => x.linear(id("weight").unwrap(), id("bias"), Act::None),
        "avg_pool2d" => x.avg_pool2d(avg_options(o)),
        "adaptive_avg_pool2d" => {
            let (h, w) = pair(&o["output_size"], 1);
            x.adaptive_avg_pool2d(h, w)
        }
        "batch_norm" => x.batch_norm(&norm_options(o, params, true), None, Act::None),
        "max_pool2d" => x.max_pool2d(pool_options(o)),
        "relu" => x.relu(),
        "log_softmax" => x.log_softmax(),
        "cross_entropy" => {
            let l = labels(&inputs["target"]);
            x.cross_entropy(&l, counted(&l))
        }
        "nll_loss" => {
            let l = labels(&inputs["target"]);
            x.nll_loss(&l, counted(&l))
        }
        "mse_loss" => {
            let t = Array::parse(&inputs["target"]);
            x.mse_loss(
                &t.data,
                if mean {
                    Reduction::Mean
                } else {
                    Reduction::Sum
                },
            )
        }
        other => panic!("no such layer: {other}"),
    }
}

fn check(name: &str, what: &str, got: &[f32], want: &[f32], torch_error: f64) {
    assert_eq!(got.len(), want.len(), "{name}: {what}");
    let largest = want.iter().fold(0.0f64, |a, v| a.max(f64::from(v.abs())));
    let bound = (4.0 * torch_error).max(2e-6 * largest);
    for (i, (&g, &w)) in got.iter().zip(want).enumerate() {
        if torch_error == 0.0 && name != "nll_loss sum" {
            assert!(
                g == w,
                "{name}: {what}[{i}] is {g}, PyTorch has {w}, and every order of summation is exact"
            );
        }
        assert!(
            (f64::from(g) - f64::from(w)).abs() <= bound,
            "{name}: {what}[{i}] is {g}, PyTorch has {w}"
        );
    }
}

#[test]
fn every_case_agrees_with_pytorch() {
    let cases: Vec<Value> = serde_json::from_str(include_str!("../fixtures/layers.json")).unwrap();
    let mut tape = Tape::new(Threads(2));
    for case in &cases {
        let (name, inputs) = (case["name"].as_str().unwrap(), &case["inputs"]);
        let error = case["torch_f32_error"].as_f64().unwrap();
        let mut scope = Scope::new(Seed(0));
        let layout = if case["layer"] == "conv2d" {
            Layout::Conv
        } else {
            Layout::Same
        };
        let given: Vec<(&str, Array)> = ["weight", "bias"]
            .into_iter()
            .filter(|n| inputs[n].is_object())
            .map(|n| (n, Array::parse(&inputs[n])))
            .collect();
        for (n, a) in &given {
            scope.param(
                n,
                &a.shape,
                if *n == "bias" { Layout::Same } else { layout },
                Init::Constant(0.0),
            );
        }
        if let Some(state) = case["state_after"].as_object() {
            for (n, a) in state {
                let start = if n == "running_var" { 1.0 } else { 0.0 };
                scope.buffer(n, &Array::parse(a).shape, start);
            }
        }
        let mut params = scope.build().unwrap();
        for (n, a) in &given {
            params.import(params.find(n).unwrap(), &a.data).unwrap();
        }
        if case["first_batch"].is_object() {
            first_batch(case, &mut params, &mut tape);
        }
        let mut grads = Grads::like(&params);
        let x = Array::parse(&inputs["x"]).channels_last();
        if case["options"]["eval"].as_bool() == Some(true) {
            let step = tape.inference(&params);
            let out = run(case, &params, step.input(&x.data, &x.shape).unwrap()).unwrap();
            let got = channels_first(out.data(), &out.shape());
            check(name, "out", &got, &Array::parse(&case["out"]).data, error);
            continue;
        }
        let step = tape.step(&params, StepKey::new(0, 0));
        let input = step.variable(&x.data, &x.shape).unwrap();
        let seen = input.share();
        let out = run(case, &params, input).unwrap();
        let shape = out.shape();
        check(
            name,
            "out",
            &channels_first(out.data(), &shape),
            &Array::parse(&case["out"]).data,
            error,
        );
        let dout = if case["dout"].is_object() {
            Array::parse(&case["dout"]).channels_last().data
        } else {
            vec![1.0]
        };
        out.backward_with(&dout, &mut grads).unwrap();
        let dx = channels_first(&seen.grad().unwrap(), &x.shape);
        check(
            name,
            "grad of x",
            &dx,
            &Array::parse(&case["grads"]["x"]).data,
            error,
        );
        drop(seen);
        drop(step);
        for (n, _) in &given {
            check(
                name,
                &format!("grad of {n}"),
                &grads.export(params.find(n).unwrap()),
                &Array::parse(&case["grads"][n]).data,
                error,
            );
        }
        if let Some(state) = case["state_after"].as_object() {
            tape.update_buffers(&mut params).unwrap();
            for (n, a) in state {
                let got = params.buffer(params.find_buffer(n).unwrap());
                check(name, n, got, &Array::parse(a).data, error);
            }
        }
    }
    assert_eq!(cases.len(), 54);
}
