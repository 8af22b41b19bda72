//! Predictions with the best weights, in the program that trained them.

use std::path::Path;

use phalanx_checkpoint as checkpoint;
use phalanx_data::metrics::Confusion;
use phalanx_nn::optim::Sgd;
use phalanx_nn::{Scope, Seed};
use phalanx_train::{ErrorKind, Evaluation, Job, Measure, Result};

use crate::again::{metrics, start_on};
use crate::trainer::{answers, data, loss, plane};

/// Trains with evaluations of these losses. What the best and then the last weights predict, by the trainer and by this program.
fn predicted(job: &Job<'_>, losses: &[f64]) -> Result<[Vec<f32>; 2]> {
    let train = data(40);
    let mut trainer = job.trainer(&train, plane, Sgd::new).start()?;
    let mut lines = Vec::new();
    for epoch in trainer.epochs() {
        for batch in trainer.batches(&train)? {
            trainer.step(&batch, |model, batch| loss(model, &batch))?;
        }
        trainer.check_weights()?;
        trainer.record(Evaluation::new(losses[epoch - 1], Confusion::new(0)))?;
        lines.push(trainer.params().flat().to_vec());
    }
    let all = |trainer: &mut phalanx_train::Trainer<'_, _>| {
        trainer.predict(&train, |model, batch| Ok(answers(model, &batch)?.to_vec()))
    };
    let last = all(&mut trainer)?;
    trainer.load_best()?;
    let first = all(&mut trainer)?;
    // Not recorded.
    trainer.evaluate(&train, |_, _| Ok(Measure::of_sum(1.0)))?;
    assert!(trainer.folder().ends_with("run"));
    trainer.finish()?;
    Ok([first, last])
}

fn weights(run: &Path, name: &str) -> Vec<f32> {
    let mut scope = Scope::new(Seed(7));
    plane(&mut scope);
    let mut params = scope.build().expect("parameters");
    checkpoint::load_params(&run.join(name), &mut params).expect("weights");
    params.flat().to_vec()
}

/// What the weights of a file of the run predict.
fn by_file(run: &Path, name: &str) -> Vec<f32> {
    let weights = weights(run, name);
    let inputs = data(40);
    let values = inputs.iter().map(|(x, _)| {
        let product =
            f64::from(weights[0]) * f64::from(x[0]) + f64::from(weights[1]) * f64::from(x[1]);
        (product + f64::from(weights[16])) as f32
    });
    values.collect()
}

fn near(a: &[f32], b: &[f32]) -> bool {
    a.len() == b.len() && a.iter().zip(b).all(|(a, b)| (a - b).abs() < 1e-5)
}

#[test]
fn the_best_weights_predict_and_the_last_ones_are_saved() {
    for world in [1, 2] {
        let dir = tempfile::tempdir().expect("folder");
        let run = dir.path().join("run");
        let go = |more: &[&str]| {
            let args = [&["--epochs", "3", "--save-every", "5"][..], more].concat();
            start_on(world, dir.path(), &args, |job| {
                predicted(job, &[3.0, 1.0, 2.0])
            })
        };
        let [first, last] = go(&[]).expect("trained");
        assert!(near(&first, &by_file(&run, "best.safetensors")));
        assert!(!near(&first, &last));
        assert!(near(&last, &by_file(&run, "test.safetensors")));
        let recorded = metrics(&run).len();
        // Started again, the run is complete.
        let [first, last] = go(&["--resume", "auto"]).expect("complete");
        assert!(near(&first, &by_file(&run, "best.safetensors")) && !near(&first, &last));
        assert_eq!(metrics(&run).len(), recorded);
    }
}

#[test]
fn best_weights_that_are_not_there_are_refused() {
    let train = data(8);
    let dir = tempfile::tempdir().expect("folder");
    let outcome = start_on(1, dir.path(), &["--epochs", "1"], |job| {
        let mut trainer = job.trainer(&train, plane, Sgd::new).start()?;
        for _ in trainer.epochs() {
            for batch in trainer.batches(&train)? {
                let error = trainer.load_best().expect_err("in the loop");
                assert!(error.chain().contains("after the loop"), "{error}");
                trainer.step(&batch, |model, batch| loss(model, &batch))?;
            }
        }
        let error = trainer.load_best().expect_err("no evaluation");
        assert_eq!(error.kind(), ErrorKind::Usage);
        trainer.finish().map(drop)
    });
    outcome.expect("trained");
}
