//! Evaluations between two steps of an epoch, of a model with running statistics.

use phalanx_nn::layers::{BatchNorm, Linear};
use phalanx_nn::optim::Sgd;
use phalanx_nn::{Reduction, Scope, Tensor};
use phalanx_train::{Job, Measure, MicroBatch, Result};

use crate::trainer::{Sample, data, ranks, targets};

struct Normed(BatchNorm, Linear);

impl Normed {
    fn new(scope: &mut Scope) -> Normed {
        // The last batch's statistics are the running ones: ranks differ as much as they can.
        let norm = BatchNorm::new(scope.enter("norm"), 2).momentum(Some(1.0));
        Normed(norm, Linear::new(scope.enter("plane"), 2, 1))
    }

    fn forward<'s>(&self, batch: &MicroBatch<'s, Vec<Sample>>) -> Result<Tensor<'s>> {
        let x: Vec<f32> = batch.iter().flat_map(|(x, _)| *x).collect();
        let n = batch.samples();
        let x = self.0.forward(batch.input(&x, &[n, 1, 1, 2])?)?;
        self.1.forward(x.reshape(&[n, 2])?)
    }
}

/// The loss of a step.
fn mean<'s>(model: &Normed, batch: MicroBatch<'s, Vec<Sample>>) -> Result<Tensor<'s>> {
    let output = model.forward(&batch)?;
    output.mse_loss(&targets(&batch), Reduction::Mean)
}

/// What an evaluation adds up.
fn sum(model: &Normed, batch: MicroBatch<'_, Vec<Sample>>) -> Result<Measure> {
    let output = model.forward(&batch)?;
    let loss = output.mse_loss(&targets(&batch), Reduction::Sum)?;
    Ok(Measure::of_loss(loss))
}

/// The losses of evaluations after each step, if it evaluates, and the bits of the weights and statistics at the end.
fn train(job: &Job<'_>, evaluates: bool) -> Result<(Vec<u64>, Vec<u32>)> {
    let (train, test) = (data(48), data(13));
    let mut trainer = job.trainer(&train, Normed::new, Sgd::new).start()?;
    let mut losses = Vec::new();
    for _ in trainer.epochs() {
        for batch in trainer.batches(&train)? {
            trainer.step(&batch, mean)?;
            if evaluates {
                let measured = trainer.measure(&test, sum)?;
                let evaluated = trainer.evaluate(&test, sum)?;
                assert_eq!(measured.loss.to_bits(), evaluated.loss.to_bits());
                losses.push(evaluated.loss.to_bits());
            }
        }
    }
    trainer.check_weights()?;
    let params = trainer.params();
    let bits = params.flat().iter().chain(params.buffers_flat());
    let bits = bits.map(|value| value.to_bits()).collect();
    trainer.finish()?;
    Ok((losses, bits))
}

fn of(world: usize, args: &[&str], evaluates: bool) -> Vec<(Vec<u64>, Vec<u32>)> {
    let trained = ranks(world, args, |job| train(job, evaluates));
    trained
        .into_iter()
        .map(|rank| rank.expect("trained"))
        .collect()
}

#[test]
fn an_evaluation_between_steps_is_of_one_model_and_changes_no_bit() {
    let args = ["--global-batch-size", "12"];
    let shards = [
        "--global-batch-size",
        "12",
        "--deterministic",
        "shards",
        "--shards",
        "4",
    ];
    for args in [&args[..], &shards] {
        let with = of(2, args, true);
        assert_eq!(with[0], with[1], "the same on all ranks");
        assert_eq!(with[0].0.len(), 8);
        assert_eq!(with[0].1, of(2, args, false)[0].1, "{args:?}");
    }
    let alone = of(1, &shards, true);
    for world in [2, 3, 4] {
        assert_eq!(of(world, &shards, true)[0], alone[0], "{world} ranks");
    }
}

/// What the checkpoint of the step has is what is evaluated.
#[test]
fn an_evaluation_between_steps_is_that_of_the_checkpoint() {
    let (train, test) = (data(48), data(13));
    let args = [
        "--global-batch-size",
        "12",
        "--save-every",
        "1",
        "--keep",
        "9",
    ];
    let dir = tempfile::tempdir().expect("folder");
    let losses = crate::trainer::ranks_in(dir.path(), 3, &args, |job| {
        let mut trainer = job.trainer(&train, Normed::new, Sgd::new).start()?;
        let mut losses = Vec::new();
        for _ in trainer.epochs() {
            for batch in trainer.batches(&train)? {
                trainer.step(&batch, mean)?;
                let evaluated = trainer.evaluate(&test, sum)?;
                losses.push(evaluated.loss);
            }
        }
        trainer.finish()?;
        Ok(losses)
    });
    let losses = losses.into_iter().map(|rank| rank.expect("trained"));
    let losses: Vec<Vec<f64>> = losses.collect();
    for step in 1..8 {
        let checkpoint = dir
            .path()
            .join(format!("run/checkpoints/step-{step:09}.json"));
        if !checkpoint.exists() {
            // The disk was too slow for it.
            continue;
        }
        let init = checkpoint.display().to_string();
        let fresh = ranks(1, &["--init", &init], |job| {
            let mut trainer = job.trainer(&train, Normed::new, Sgd::new).start()?;
            trainer.evaluate(&test, |model, batch| {
                let loss = model.forward(&batch)?;
                Ok(Measure::of_loss(
                    loss.mse_loss(&targets(&batch), Reduction::Sum)?,
                ))
            })
        });
        let expected = fresh
            .into_iter()
            .next()
            .expect("a rank")
            .expect("evaluated");
        for rank in &losses {
            let got = rank[step - 1];
            assert!(
                (got - expected.loss).abs() < 1e-6 * expected.loss,
                "step {step}: {got}"
            );
        }
    }
}
