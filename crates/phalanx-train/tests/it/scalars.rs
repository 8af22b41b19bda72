//! A loss is one number.

use std::sync::Arc;

use phalanx_nn::layers::Linear;
use phalanx_nn::optim::Sgd;
use phalanx_nn::{Reduction, Scope, Tensor};
use phalanx_train::{ErrorKind, Job, Measure, MicroBatch, Result};

use crate::trainer::ranks;

/// The square of the model's error, of each sample alone.
fn errors<'s>(fc: &Linear, batch: MicroBatch<'s, Vec<f32>>) -> Result<Tensor<'s>> {
    let x: Vec<f32> = batch.iter().copied().collect();
    let y = fc.forward(batch.input(&x, &[x.len(), 1])?)?;
    y.mse_loss(&x, Reduction::None)
}

#[test]
fn a_loss_of_several_elements_is_an_error() {
    let data: Arc<Vec<f32>> = Arc::new((0..8u8).map(f32::from).collect());
    let model = |scope: &mut Scope| Linear::new(scope.enter("fc"), 1, 1);
    let train = |job: &Job<'_>| -> Result<()> {
        let mut trainer = job.trainer(&data, model, Sgd::new).start()?;
        let batch = trainer.batches(&data)?.next().expect("a batch");
        trainer.step(&batch, errors).map(drop)
    };
    let evaluate = |job: &Job<'_>| -> Result<()> {
        let mut trainer = job.trainer(&data, model, Sgd::new).start()?;
        let measure =
            |fc: &Linear, batch: MicroBatch<'_, Vec<f32>>| Ok(Measure::of_loss(errors(fc, batch)?));
        trainer.measure(&data, measure).map(drop)
    };
    let args = ["--batch-size", "4", "--test-batch-size", "4"];
    for outcome in [ranks(1, &args, train), ranks(1, &args, evaluate)] {
        let error = outcome.into_iter().next().and_then(Result::err);
        let error = error.expect("refused");
        // As other errors of the engine.
        assert_eq!(error.kind(), ErrorKind::Usage);
        assert!(error.to_string().contains("shape [4, 1]"), "{error}");
    }
}
