//! The OneFlow document's MobileNetV2 program: what it prints, and its training by SBP. `train mobilenetv2` is its network and its training,
//! with the head for ten classes that the document's `model.classifer` (so spelled) never puts in its place.

use std::sync::Arc;

use phalanx_data::{ImageBatch, ImageDataset};
use phalanx_global::{Global, Parallel};
use phalanx_nn::models::MobileNetV2;
use phalanx_nn::{Reduction, Tensor};
use phalanx_train::{Evaluation, Measure, RankContext, Reporter, StepFacts};

use crate::error::{Error, Result};
use crate::shared::global::{GlobalRun, Rows, Setup, Task};
use crate::shared::image::{self, ImageArgs, Lines, Program};
use crate::shared::mesh::Mesh;
use crate::shared::net::Loss;

/// A loss line every so many steps, as in the document.
const PRINT_EVERY: usize = 5;

/// The document's lines. It tests nothing; the last line is ours.
pub struct OneFlow {
    /// Samples of a step, as it counts them.
    pub batch: usize,
}

impl Lines for OneFlow {
    fn started(&mut self, ctx: &RankContext) -> Result<()> {
        match ctx.is_main() {
            true => ctx.line("Using cpu device"),
            false => Ok(()),
        }
    }
}

impl Reporter for OneFlow {
    fn epoch(&mut self, ctx: &RankContext, epoch: usize) -> Result<()> {
        if ctx.is_main() {
            ctx.line(&format!("Epoch {epoch}\n-------------------------------"))?;
        }
        Ok(())
    }

    fn step(&mut self, ctx: &RankContext, facts: &StepFacts) -> Option<String> {
        if !ctx.is_main() || !facts.index.is_multiple_of(PRINT_EVERY) {
            return None;
        }
        let current = facts.index * self.batch;
        Some(format!(
            "loss: {:>7.6} [{current:>5}/{:>5}]",
            facts.loss, facts.samples
        ))
    }

    fn evaluated(&mut self, ctx: &RankContext, _epoch: usize, tested: &Evaluation) -> Result<()> {
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
pub fn check_sbp(args: &ImageArgs) -> Result<()> {
    let ImageArgs {
        settings,
        exact_validation,
        log_batches,
        log_images,
    } = args;
    Mesh::refuse(settings, "--parallel sbp")?;
    // Other values than the defaults were typed.
    for (flag, is_typed) in [
        ("--exact-validation false", !exact_validation),
        ("--log-batches", ![0, 10].contains(log_batches)),
        ("--log-images", *log_images != 32),
    ] {
        if is_typed {
            return Err(Error::usage(format!(
                "{flag} does not go with --parallel sbp, which tests each image once and writes no predictions.jsonl; leave out one of them"
            )));
        }
    }
    Ok(())
}

/// Classifies images of these sizes.
struct Classify {
    image: [usize; 3],
}

impl Task for Classify {
    type Data = dyn ImageDataset;
    type Model = MobileNetV2;

    fn scores<'s>(&self, net: &MobileNetV2, batch: &Rows<'s, ImageBatch>) -> Result<Global<'s>> {
        let x = batch.tensor(&batch.data.images, &self.image)?;
        Ok(net.forward(x)?)
    }

    fn loss<'s>(&self, scores: Global<'s>, batch: &Rows<'s, ImageBatch>) -> Result<Global<'s>> {
        let y = batch.indices(&batch.data.labels, &[])?;
        Ok(scores.cross_entropy(&y, Reduction::Mean)?)
    }

    fn measure(&self, scores: Tensor<'_>, batch: &ImageBatch, _samples: usize) -> Result<Measure> {
        let measure = Measure::of_scores(&scores, &batch.labels)?;
        let loss = Loss::CrossEntropy { smoothing: 0.0 };
        Ok(measure.with_loss(loss.of(scores, &batch.labels, 1.0)?))
    }
}

/// The document's first program: the model whole on all ranks, batches split over them.
///
/// # Errors
///
/// Anything that ends the training; the kind decides the exit code.
pub fn train_by_sbp<P: Program<Net = MobileNetV2>>(ctx: &RankContext, program: &P) -> Result<()> {
    let (settings, mut lines) = (&program.images().settings, program.lines());
    let data = image::load(ctx, program, &mut *lines)?;
    let lr = settings.lr();
    let setup = Setup {
        name: P::NAME,
        title: P::NETWORK.title.to_owned(),
        unit: "images",
        data: data.description.clone(),
        content: data.content.clone(),
        mesh: Mesh::of_data(ctx.world()),
        parallel: Parallel::new(),
        model: Box::new(|scope| program.net(scope)),
        optimizer: Box::new(|params, lr| program.optimizer(params, lr)),
        optimizer_title: program.optimizer_title(lr),
        schedule: None,
        clip: None,
        shaping: [vec!["--parallel sbp".to_owned()], image::shaping(program)].concat(),
        files: image::files(program, &data),
        reporter: lines,
    };
    let task = Classify {
        image: data.train.image_shape(),
    };
    let mut run = GlobalRun::open(ctx, settings, setup, task, &data.train)?;
    run.add_to_summary("data", program.source().name());
    let names = data.test.class_names();
    if !names.is_empty() {
        run.add_to_summary("classes", names);
    }
    let tested: &Arc<dyn ImageDataset> = &data.test;
    if !run.train(&data.train, tested)? {
        return Ok(());
    }
    let whole = run.whole()?;
    run.finish(whole.as_ref())
}
