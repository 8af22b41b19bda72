//! `train gpt --mesh`: the same training on global tensors.

use phalanx::data::{TextBatch, TextDataset};
use phalanx::nn::{Tape, Threads};
use phalanx::prelude::*;
use phalanx_base::text::visible;

use crate::shared::text::{TextArgs, measure_scores, sample};

/// Checks `settings` for a training on `mesh`.
///
/// # Errors
///
/// Usage errors naming the flags.
pub fn check(mesh: Mesh, settings: &Settings, heads: usize) -> Result<()> {
    if mesh.tensor > heads {
        return Err(Error::usage(format!(
            "--mesh tensor={} leaves ranks without an attention head, since there are --heads {heads}; use at most {heads}",
            mesh.tensor
        )));
    }
    mesh.validate(settings, "--mesh")
}

/// Which modules are split over `tensor`.
pub fn parallel() -> Parallel {
    Parallel::new()
        .attention("tensor", &["transformer.h.*.attn"])
        .column("tensor", &["transformer.h.*.mlp.fc", "lm_head"])
        .row("tensor", &["transformer.h.*.mlp.proj"])
        .vocabulary("tensor", &["transformer.wte"])
}

type Batch<'s> = MicroBatch<'s, TextBatch, OnMesh>;

/// The scores of all ranks' sequences of `context` tokens.
fn scores<'s>(gpt: &Gpt, batch: &Batch<'s>, context: usize) -> Result<Global<'s>> {
    let tokens = batch.indices_of(&batch.tokens, &[batch.samples(), context])?;
    let rows = tokens.layout().shape()[0];
    gpt.forward(batch.step(), &tokens, (rows, context))
}

/// Trains as one rank of a mesh, and generates `count` tokens.
///
/// # Errors
///
/// Anything that ends the training; the kind decides the exit code.
pub fn train(
    job: &Job<'_>,
    (text, count): (&TextArgs, usize),
    builder: TrainerBuilder<'_, Gpt, OnMesh>,
    train: &Arc<TextDataset>,
    test: &Arc<TextDataset>,
) -> Result<()> {
    let (ctx, settings, context) = (job.context(), job.settings(), train.context());
    let mut trainer = builder.start()?;
    text.name_in_summary(&mut trainer, train);
    let measure = |gpt: &Gpt, batch: Batch<'_>| {
        let Some(scores) = batch.own_rows(scores(gpt, &batch, context)?)? else {
            return Ok(Measure::empty());
        };
        let (rows, vocab) = (batch.targets.len(), scores.shape()[2]);
        let scores = scores.reshape(&[rows, vocab])?;
        measure_scores(scores, &batch.targets, test)
    };
    for _epoch in trainer.epochs() {
        for batch in trainer.batches(train)? {
            trainer.step(&batch, |gpt, batch| {
                let targets = batch.indices_of(&batch.targets, &[batch.samples(), context])?;
                let scores = scores(gpt, &batch, context)?;
                scores.cross_entropy(&targets, Reduction::Mean)
            })?;
        }
        trainer.evaluate(test, measure)?;
    }
    let whole = match count {
        0 => None,
        _ => trainer.full_params()?,
    };
    if let Some(whole) = whole {
        let _phase = ctx.phase("evaluating");
        let mut tape = Tape::new(Threads(ctx.threads));
        tape.set_precision(settings.precision.into());
        let step = tape.inference(&whole);
        let text = sample(trainer.model(), &step, train, count, settings.seed)?;
        trainer.log_text("sample", &text);
        ctx.line(&format!("sample:\n{}", visible(&text)))?;
    }
    trainer.finish().map(drop)
}
