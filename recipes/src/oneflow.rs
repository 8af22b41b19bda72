//! The OneFlow document's MobileNetV2 program: what it prints, and its training by SBP. `train mobilenetv2` is its network and its training,
//! with the head for ten classes that the document's `model.classifer` (so spelled) never puts in its place.

use phalanx::nn::models::MobileNetV2;
use phalanx::prelude::*;

use crate::shared::device::{EngineArgs, On};
use crate::shared::image::{Data, ImageArgs};

/// Steps between two loss lines, as in the document.
const PRINT_EVERY: usize = 5;

/// The document's lines. It tests nothing; the last line is ours.
pub struct OneFlow {
    /// Samples of a step, as it counts them.
    pub batch: usize,
}

/// The document's first line.
///
/// # Errors
///
/// Those of writing to standard output.
pub fn started(job: &Job<'_>) -> Result<()> {
    job.print("Using cpu device")
}

impl Reporter for OneFlow {
    fn on_epoch_start(&mut self, ctx: &RankContext, epoch: usize) -> Result<()> {
        if ctx.is_main() {
            ctx.line(&format!("Epoch {epoch}\n-------------------------------"))?;
        }
        Ok(())
    }

    fn on_step(&mut self, ctx: &RankContext, facts: &StepInfo) -> Option<String> {
        if !ctx.is_main() || !facts.index.is_multiple_of(PRINT_EVERY) {
            return None;
        }
        let current = facts.index * self.batch;
        Some(format!(
            "loss: {:>7.6} [{current:>5}/{:>5}]",
            facts.loss, facts.samples
        ))
    }

    fn on_evaluation(
        &mut self,
        ctx: &RankContext,
        _epoch: usize,
        tested: &Evaluation,
    ) -> Result<()> {
        ctx.note(&format!(
            "test loss {:.4}, accuracy {:.2} %",
            tested.loss,
            100.0 * tested.accuracy
        ));
        Ok(())
    }
}

/// Checks the flags of `--parallel sbp` before any rank is started.
///
/// # Errors
///
/// Usage errors naming the flags.
pub fn check_sbp<E: EngineArgs>(args: &ImageArgs<E>, settings: &Settings) -> Result<()> {
    let ImageArgs {
        document,
        log_batches,
        ..
    } = args;
    Mesh::data_parallel(1).refuse(settings, "--parallel sbp")?;
    // Other values than the defaults were typed.
    for (flag, is_typed) in [
        ("--document", *document),
        ("--log-batches", ![0, 10].contains(log_batches)),
    ] {
        if is_typed {
            return Err(Error::usage(format!(
                "{flag} does not go with --parallel sbp, which tests each image once and writes no predictions.jsonl; leave out one of them"
            )));
        }
    }
    Ok(())
}

type Batch<'s> = MicroBatch<'s, ImageBatch, OnMesh>;

/// The scores of all ranks' images.
fn scores<'s, E>(net: &On<MobileNetV2, E>, batch: &Batch<'s>) -> Result<Global<'s>> {
    net.net.forward(batch.images()?)
}

/// The document's first program: the model whole on all ranks, batches split over them.
///
/// # Errors
///
/// Anything that ends the training; the kind decides the exit code.
pub fn train_by_sbp<E>(
    job: &Job<'_>,
    builder: TrainerBuilder<'_, On<MobileNetV2, E>>,
    data: &Data,
) -> Result<()> {
    let mut trainer = builder
        .on(Mesh::data_parallel(job.world_size()), Parallel::new())
        .hyperparameters(vec!["--parallel sbp".to_owned()])
        .start()?;
    data.name_in_summary(&mut trainer);
    for _epoch in trainer.epochs() {
        for batch in trainer.batches(&data.train)? {
            trainer.step(&batch, |net, batch| {
                let labels = batch.indices_of(&batch.labels, &[batch.samples()])?;
                scores(net, &batch)?.cross_entropy(&labels, Reduction::Mean)
            })?;
        }
        trainer.evaluate(&data.test, |net, batch| {
            let Some(scores) = batch.own_rows(scores(net, &batch)?)? else {
                return Ok(Measure::empty());
            };
            let measure = Measure::of_scores(&scores, &batch.labels)?;
            Ok(measure.with_loss(scores.cross_entropy(&batch.labels, 1.0)?))
        })?;
    }
    trainer.finish().map(drop)
}
