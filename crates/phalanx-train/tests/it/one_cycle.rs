//! Losses of a training under a one-cycle schedule, beside those of PyTorch with `OneCycleLR`
//! (`one_cycle.json` of phalanx-nn), and schedules of several optimizers.

use std::path::Path;
use std::sync::Arc;

use phalanx_nn::layers::{Act, Linear};
use phalanx_nn::optim::schedule::{OneCycle, Schedule};
use phalanx_nn::optim::{Adam, Optimizer, Sgd};
use phalanx_nn::{Params, Reduction, Scope, Tensor};
use phalanx_train::{ErrorKind, Job, MicroBatch, Result};
use serde_json::Value;

use crate::trainer::ranks_in;

const STEPS: usize = 20;

type Sample = ([f32; 2], f32);

fn data() -> Arc<Vec<Sample>> {
    let sample = |i: u8| {
        let x = [f32::from(i) / 8.0 - 1.0, f32::from(i % 5) / 4.0];
        (x, x[0] * x[0] - x[1])
    };
    Arc::new((0..16).map(sample).collect())
}

/// Two networks with the same weights at the start. Each has a loss of its own.
struct Nets([[Linear; 2]; 2]);

impl Nets {
    fn new(scope: &mut Scope) -> Nets {
        Nets(["main", "other"].map(|name| {
            let mut net = scope.enter(name);
            [
                Linear::new(net.enter("0"), 2, 8),
                Linear::new(net.enter("2"), 8, 1),
            ]
        }))
    }

    fn loss<'s>(&self, net: usize, batch: &MicroBatch<'s, Vec<Sample>>) -> Result<Tensor<'s>> {
        let [first, second] = &self.0[net];
        let n = batch.samples();
        let x: Vec<f32> = batch.iter().flat_map(|(x, _)| *x).collect();
        let y: Vec<f32> = batch.iter().map(|(_, y)| *y).collect();
        let hidden = first.forward_act(batch.input(&x, &[n, 2])?, Act::Relu)?;
        second.forward(hidden)?.mse_loss(&y, Reduction::Mean)
    }
}

/// Copies the weights of the first network to the second.
fn copy(params: &mut Params) -> Result<()> {
    let ids: Vec<_> = params.ids().collect();
    let (main, other) = ids.split_at(4);
    for (from, to) in main.iter().zip(other) {
        let values = params.get(*from).to_vec();
        params.get_mut(*to).copy_from_slice(&values);
    }
    Ok(())
}

/// The optimizer of a case of the fixture.
fn optimizer(case: &str, params: &Params, lr: f64) -> Box<dyn Optimizer> {
    match case {
        "sgd_without_momentum" => Box::new(Sgd::new(params, lr)),
        "sgd_nesterov" => Box::new(Sgd::new(params, lr).momentum(0.9).nesterov(true)),
        "adam" => Box::new(Adam::new(params, lr)),
        "adamw" => Box::new(Adam::adamw(params, lr).betas(0.8, 0.95).weight_decay(0.1)),
        other => panic!("no such case: {other}"),
    }
}

/// Trains the main network with the optimizer `main`, and the other with `other` at half the
/// rate. The mean losses of both by step.
fn train(job: &Job<'_>, [main, other]: [&str; 2]) -> Result<Vec<[f64; 2]>> {
    let data = data();
    let mut trainer = job
        .trainer(&data, Nets::new, |params, lr| optimizer(main, params, lr))
        .optimizer_of("other", |params, lr| optimizer(other, params, 0.5 * lr))
        .schedule(|lr, steps| Schedule::one_cycle(OneCycle::new(lr, steps)))
        .init(copy)
        .start()?;
    let mut losses = Vec::new();
    for _ in trainer.epochs() {
        for batch in trainer.batches(&data)? {
            let of_other = trainer.step_of("other", &batch, |nets, batch| nets.loss(1, &batch))?;
            let of_main = trainer.step(&batch, |nets, batch| nets.loss(0, &batch))?;
            losses.push([of_main, of_other]);
        }
    }
    trainer.finish()?;
    Ok(losses)
}

fn hashes(dir: &Path) -> [String; 2] {
    let text = std::fs::read_to_string(dir.join("run/summary.json")).expect("a summary");
    let summary: Value = serde_json::from_str(&text).expect("JSON");
    ["weights_sha256", "optimizer_sha256"].map(|name| summary[name].to_string())
}

#[test]
fn losses_are_those_of_pytorch_and_a_resume_keeps_the_bits() {
    let text = include_str!("../../../phalanx-nn/tests/fixtures/one_cycle.json");
    let fixture: Value = serde_json::from_str(text).expect("JSON");
    let wanted = |name: &str| -> Vec<f64> {
        let mut cases = fixture["cases"].as_array().expect("cases").iter();
        let case = cases.find(|case| case["name"] == name).expect(name);
        serde_json::from_value(case["losses"].clone()).expect("losses")
    };
    for (world, names, more) in [
        (1, ["sgd_nesterov", "adam"], &[][..]),
        (1, ["sgd_without_momentum", "adamw"], &[]),
        (
            2,
            ["sgd_nesterov", "adam"],
            &["--exchange", "reduce-scatter"],
        ),
        (
            2,
            ["sgd_without_momentum", "adamw"],
            &["--exchange", "at-step"],
        ),
    ] {
        let args = [
            &["--epochs", "20", "--global-batch-size", "16", "--lr", "0.1"],
            &["--save-every", "4"][..],
            more,
        ]
        .concat();
        let [whole, halves] = [(); 2].map(|()| tempfile::tempdir().expect("folder"));
        let run = |dir: &Path, more: &[&str]| {
            ranks_in(dir, world, &[&args, more].concat(), |job| train(job, names))
        };
        let losses = run(whole.path(), &[]).into_iter();
        let losses: Vec<_> = losses.map(|rank| rank.expect("trained")).collect();
        for (net, name) in names.into_iter().enumerate() {
            let wanted = wanted(name);
            assert_eq!(wanted.len(), STEPS);
            for (step, want) in wanted.into_iter().enumerate() {
                let of_rank = losses.iter().map(|losses| losses[step][net]);
                let got = of_rank.sum::<f64>() / world as f64;
                let close = (got - want).abs() <= 2e-6 * want;
                assert!(close, "{world} {more:?} {name}, step {step}: {got} {want}");
            }
        }
        for rank in run(halves.path(), &["--stop-after", "9"]) {
            assert_eq!(rank.expect_err("stopped").kind(), ErrorKind::Stopped);
        }
        for rank in run(halves.path(), &["--resume", "auto"]) {
            assert_eq!(rank.expect("trained").len(), STEPS - 9);
        }
        assert_eq!(hashes(halves.path()), hashes(whole.path()), "{names:?}");
    }
}

/// At `--lr 0` there is no factor by which the schedule changes the rate of another optimizer.
#[test]
fn a_learning_rate_of_zero_leaves_that_of_another_optimizer() {
    let dir = tempfile::tempdir().expect("folder");
    let args = ["--epochs", "2", "--batch-size", "16", "--lr", "0"];
    let data = data();
    let trained = ranks_in(dir.path(), 1, &args, |job| {
        let mut trainer = job
            .trainer(&data, Nets::new, Sgd::new)
            .optimizer_of("other", |params, _| Sgd::new(params, 0.05))
            .schedule(|lr, steps| Schedule::cosine(lr, steps, 0.0))
            .init(copy)
            .start()?;
        let before = trainer.params().flat().to_vec();
        for _ in trainer.epochs() {
            for batch in trainer.batches(&data)? {
                trainer.step_of("other", &batch, |nets, batch| nets.loss(1, &batch))?;
                trainer.step(&batch, |nets, batch| nets.loss(0, &batch))?;
            }
        }
        let params = trainer.params();
        let changed = |name: &str| {
            let infos = params.infos().iter();
            let mut elems = infos
                .filter(|info| info.name.starts_with(name))
                .flat_map(|info| info.offset..info.offset + info.len);
            elems.any(|at| params.flat()[at].to_bits() != before[at].to_bits())
        };
        let changed = ["main", "other"].map(changed);
        trainer.finish()?;
        Ok(changed)
    });
    let changed = trained
        .into_iter()
        .next()
        .expect("a rank")
        .expect("trained");
    assert_eq!(changed, [false, true]);
}
