//! A training in which another engine, here loops over slices, computes a part of the model: the trainer does with it what
//! it does with its own.

use std::path::Path;

use phalanx_nn::layers::Linear;
use phalanx_nn::optim::Adam;
use phalanx_nn::{Computed, ComputedBackward, ParamId, Reduction, Scope, TakeGradient, Tensor};
use phalanx_train::{EarlyStopping, Error, Job, Measure, MicroBatch, Result};

use crate::again::start_on;
use crate::elastic::{Point, SHARDS, Trained, metrics, outcomes};
use crate::trainer::{Sample, data, targets};

const WIDE: usize = 12;

/// What its backward pass reads.
struct Backward {
    x: Vec<f32>,
    is_positive: Vec<bool>,
    weight: ParamId,
    bias: ParamId,
}

impl ComputedBackward for Backward {
    fn backward(
        &mut self,
        dy: &[f32],
        gradient: &mut TakeGradient<'_>,
    ) -> phalanx_base::Result<()> {
        let (mut dw, mut db) = (vec![0.0; 2 * WIDE], vec![0.0; WIDE]);
        for (i, (dy, is_positive)) in dy.iter().zip(&self.is_positive).enumerate() {
            let (row, out) = (i / WIDE, i % WIDE);
            if *is_positive {
                db[out] += dy;
                dw[2 * out] += dy * self.x[2 * row];
                dw[2 * out + 1] += dy * self.x[2 * row + 1];
            }
        }
        gradient(self.bias, Some(&db))?;
        gradient(self.weight, Some(&dw))
    }
}

/// The layers, and whether loops compute the first.
struct Net(Linear, Linear, bool);

impl Net {
    /// The first layer and its ReLU.
    fn up<'s>(&self, x: Tensor<'s>) -> Result<Tensor<'s>> {
        if !self.2 {
            return self.0.forward(x)?.relu();
        }
        let step = x.step();
        let bias = self.0.bias.ok_or_else(|| Error::usage("no bias"))?;
        let [w, b] = [self.0.weight, bias].map(|id| step.params().export(id));
        let y: Vec<f32> = (x.data().chunks(2))
            .flat_map(|x| (0..WIDE).map(|o| w[2 * o] * x[0] + w[2 * o + 1] * x[1] + b[o]))
            .collect();
        step.computed(Computed {
            shape: vec![x.data().len() / 2, WIDE],
            params: vec![self.0.weight, bias],
            statistics: Vec::new(),
            backward: Box::new(Backward {
                x: x.to_vec(),
                is_positive: y.iter().map(|y| *y > 0.0).collect(),
                weight: self.0.weight,
                bias,
            }),
            values: y.into_iter().map(|y| y.max(0.0)).collect(),
        })
    }

    fn forward<'s>(&self, batch: &MicroBatch<'s, Vec<Sample>>) -> Result<Tensor<'s>> {
        let x: Vec<f32> = batch.iter().flat_map(|(x, _)| *x).collect();
        self.1
            .forward(self.up(batch.input(&x, &[batch.samples(), 2])?)?)
    }
}

/// Trains with either engine.
fn train(job: &Job<'_>, by_loops: bool, here: impl Fn(Point) -> Result<()>) -> Result<Trained> {
    let (samples, test) = (data(37), data(11));
    let net = |scope: &mut Scope<'_>| {
        let up = Linear::new(scope.enter("up"), 2, WIDE);
        Net(up, Linear::new(scope.enter("down"), WIDE, 1), by_loops)
    };
    let mut trainer = (job.trainer(&samples, net, Adam::new))
        .early_stopping(EarlyStopping::new(2).min_delta(1e9))
        .start()?;
    for epoch in trainer.epochs() {
        for batch in trainer.batches(&samples)? {
            let at = Point::Step(epoch, batch.index());
            trainer.step(&batch, |net, batch| {
                here(at)?;
                net.forward(&batch)?
                    .mse_loss(&targets(&batch), Reduction::Mean)
            })?;
        }
        trainer.evaluate(&test, |net, batch| {
            let sum = net
                .forward(&batch)?
                .mse_loss(&targets(&batch), Reduction::Sum);
            Ok(Measure::of_loss(sum?))
        })?;
    }
    let bits = trainer
        .params()
        .flat()
        .iter()
        .map(|w| w.to_bits())
        .collect();
    let evaluation = trainer.finish()?;
    Ok((bits, evaluation.loss.to_bits(), Vec::new()))
}

/// The bits of ranks without a loss, which are equal.
fn bits(dir: &Path, args: &[&str], world: usize, by_loops: bool) -> Vec<u32> {
    let run = |job: &Job<'_>, here: &dyn Fn(Point) -> Result<()>| train(job, by_loops, here);
    let mut all = outcomes(dir, args, world, &[], &run)
        .into_iter()
        .map(|rank| {
            let trained = rank.expect("none is lost").expect("trained");
            trained.0
        });
    let first = all.next().expect("a rank");
    assert!(all.all(|other| other == first));
    first
}

fn folder() -> tempfile::TempDir {
    tempfile::tempdir().expect("a folder")
}

#[test]
fn it_trains_as_the_own_engine_on_any_number_of_ranks() {
    let own = bits(folder().path(), &SHARDS, 1, false);
    let loops = bits(folder().path(), &SHARDS, 1, true);
    let value = |bits: &u32| f32::from_bits(*bits);
    let apart = own
        .iter()
        .zip(&loops)
        .map(|(a, b)| (value(a) - value(b)).abs());
    let apart = apart.fold(0.0, f32::max);
    assert!(apart < 1e-5, "{apart}");
    for world in [2, 3] {
        assert_eq!(
            bits(folder().path(), &SHARDS, world, true),
            loops,
            "{world} ranks"
        );
    }
    // Micro-batches of one rank are those of several.
    let alone = ["--global-batch-size", "8", "--accumulate", "2"];
    let alone = bits(folder().path(), &alone, 1, true);
    let batch = ["--global-batch-size", "8"];
    assert_eq!(bits(folder().path(), &batch, 2, true), alone);
    // The optimizer's state divided over ranks.
    let divided = [&batch[..], &["--exchange", "reduce-scatter"]].concat();
    assert_eq!(bits(folder().path(), &divided, 2, true), alone);
}

#[test]
fn it_goes_on_without_lost_ranks_and_from_a_checkpoint_of_others() {
    let alone = folder();
    let want = bits(alone.path(), &SHARDS, 1, true);
    for lost in [(0, Point::Step(1, 2)), (2, Point::Step(2, 0))] {
        let dir = folder();
        let run = |job: &Job<'_>, here: &dyn Fn(Point) -> Result<()>| train(job, true, here);
        let ended = outcomes(dir.path(), &SHARDS, 3, &[lost], &run);
        let bits = ended
            .into_iter()
            .flatten()
            .map(|rank| rank.expect("it goes on").0);
        assert_eq!(bits.collect::<Vec<_>>(), [&want[..]; 2]);
        assert_eq!(metrics(dir.path()), metrics(alone.path()), "{lost:?}");
    }
    let dir = folder();
    let run = |job: &Job<'_>| train(job, true, |_| Ok(()));
    let stop = [&SHARDS[..], &["--save-every", "100", "--stop-after", "7"]].concat();
    start_on(2, dir.path(), &stop, run).expect_err("it was stopped");
    let resume = [&SHARDS[..], &["--resume", "auto"]].concat();
    let resumed = start_on(3, dir.path(), &resume, run).expect("it was resumed");
    assert_eq!(resumed.0, want);
    // This engine's training goes on where the other's was stopped.
    let dir = folder();
    start_on(2, dir.path(), &stop, run).expect_err("it was stopped");
    let own = |job: &Job<'_>| train(job, false, |_| Ok(()));
    let (bits, ..) = start_on(1, dir.path(), &resume, own).expect("it was resumed");
    let near = |(a, b): (&u32, &u32)| (f32::from_bits(*a) - f32::from_bits(*b)).abs() < 1e-5;
    assert!(bits.iter().zip(&want).all(near));
}
