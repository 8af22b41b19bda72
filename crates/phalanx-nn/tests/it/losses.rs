//! Losses kept by element, class shares for targets, and adaptive max pooling, against
//! PyTorch (`fixtures/losses.json`, made by `make_losses.py`) and central differences.

use crate::common::Recorder;
use crate::common::differences::{check, input};
use phalanx_nn::losses::{CrossEntropyOptions, IGNORE_LABEL};
use phalanx_nn::{Reduction, Result, Scope, Seed, StepKey, Tape, Tensor, Threads};
use serde_json::Value;

fn floats(v: &Value) -> Vec<f32> {
    let list = v.as_array().map_or(&[][..], Vec::as_slice);
    list.iter().map(|v| v.as_f64().unwrap() as f32).collect()
}

fn sizes(v: &Value) -> Vec<usize> {
    let list = v.as_array().unwrap().iter();
    list.map(|v| v.as_u64().unwrap() as usize).collect()
}

fn labels(v: &Value) -> Vec<u32> {
    let list = v.as_array().unwrap().iter();
    let label = |v: &Value| u32::try_from(v.as_i64().unwrap()).unwrap_or(IGNORE_LABEL);
    list.map(label).collect()
}

/// The operation of a case, on its input.
fn apply<'s>(case: &Value, x: Tensor<'s>) -> Result<Tensor<'s>> {
    let (o, target) = (&case["options"], &case["target"]);
    let reduction = match o["reduction"].as_str() {
        Some("none") => Reduction::None,
        Some("sum") => Reduction::Sum,
        _ => Reduction::Mean,
    };
    let weights = floats(&o["weights"]);
    let options = CrossEntropyOptions {
        label_smoothing: o["smoothing"].as_f64().unwrap_or(0.0),
        class_weights: (!weights.is_empty()).then_some(&weights[..]),
        reduction,
    };
    match case["op"].as_str().unwrap() {
        "cross_entropy" => x.cross_entropy_with(&labels(target), options),
        "cross_entropy_shares" => x.cross_entropy_shares(&floats(target), options),
        "nll" => x.nll_loss(&labels(target), reduction),
        "mse" => x.mse_loss(&floats(target), reduction),
        "l1" => x.l1_loss(&floats(target), reduction),
        "bce" => x.bce_with_logits(&floats(target), Some(&floats(&o["positive"])), reduction),
        "adaptive_max_pool2d" => {
            let to = sizes(&o["size"]);
            x.adaptive_max_pool2d(to[0], to[1])
        }
        other => panic!("fixture with an unknown operation: {other}"),
    }
}

#[test]
fn outputs_and_gradients_are_pytorchs() {
    let fixture: Value = serde_json::from_str(include_str!("../fixtures/losses.json")).unwrap();
    let params = Scope::new(Seed(0)).build().unwrap();
    for threads in [1, 3] {
        let mut tape = Tape::new(Threads(threads));
        tape.poison(true);
        for case in fixture["cases"].as_array().unwrap() {
            let name = format!("{} {}", case["op"], case["options"]);
            let mut sink = Recorder::like(&params);
            let step = tape.step(&params, StepKey::new(0, 0));
            let x = step
                .variable(&floats(&case["x"]), &sizes(&case["shape"]))
                .unwrap();
            let seen = x.share();
            let out = apply(case, x).unwrap();
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
                for (g, w) in got.iter().zip(&want) {
                    assert!(
                        (g - w).abs() <= 2e-6 * largest,
                        "{name}: {what}: {g} for {w}"
                    );
                }
            }
        }
    }
}

#[test]
fn gradients_are_those_of_differences() {
    let truth = [0.25f32, 0.5, 0.125, 1.0, 0.0, 0.75];
    let log_p = |row: &[f64], c: usize| row[c] - row.iter().map(|v| v.exp()).sum::<f64>().ln();
    check(
        "cross_entropy_shares, kept by row",
        &[input(&[2, 3], 1)],
        |g, _| {
            let options = CrossEntropyOptions {
                label_smoothing: 0.1,
                reduction: Reduction::None,
                ..CrossEntropyOptions::default()
            };
            g.x(0).cross_entropy_shares(&truth, options)
        },
        |v| {
            let rows = v[0].chunks(3).zip(truth.chunks(3));
            rows.map(|(row, t)| {
                let share = |c: usize| 0.9 * f64::from(t[c]) + 0.1 / 3.0;
                (0..3).map(|c| -share(c) * log_p(row, c)).sum()
            })
            .collect()
        },
    );
    check(
        "mse, kept by element",
        &[input(&[2, 3], 2)],
        |g, _| g.x(0).mse_loss(&truth, Reduction::None),
        |v| {
            let pairs = v[0].iter().zip(&truth);
            pairs.map(|(x, &t)| (x - f64::from(t)).powi(2)).collect()
        },
    );
    check(
        "adaptive_max_pool2d",
        &[input(&[2, 5, 3, 2], 3)],
        |g, _| g.x(0).adaptive_max_pool2d(2, 2),
        |v| {
            let mut out = Vec::new();
            for n in 0..2usize {
                for rows in [0..3, 2..5] {
                    for columns in [0..2, 1..3] {
                        for c in 0..2 {
                            let at = |y: usize, x: usize| v[0][((n * 5 + y) * 3 + x) * 2 + c];
                            let all = rows
                                .clone()
                                .flat_map(|y| columns.clone().map(move |x| (y, x)));
                            out.push(all.fold(f64::MIN, |m, (y, x)| m.max(at(y, x))));
                        }
                    }
                }
            }
            out
        },
    );
}

#[test]
fn mistakes_are_named() {
    let params = Scope::new(Seed(0)).build().unwrap();
    let mut tape = Tape::new(Threads(1));
    let step = tape.step(&params, StepKey::new(0, 0));
    let x = || step.input(&[0.0; 6], &[2, 3]).unwrap();
    let options = CrossEntropyOptions::default();
    let error = x().cross_entropy_shares(&[0.5; 5], options).unwrap_err();
    assert!(error.to_string().contains("5 shares"), "{error}");
    let error = x().adaptive_max_pool2d(1, 1).unwrap_err();
    assert!(error.to_string().contains("adaptive_max_pool2d"), "{error}");
    let image = step.input(&[0.0; 4], &[1, 2, 2, 1]).unwrap();
    let error = image.adaptive_max_pool2d(0, 1).unwrap_err();
    assert!(error.to_string().contains("0 x 1"), "{error}");
}
