//! `train gpt --mesh`: the same training on global tensors.

use std::sync::Arc;

use phalanx_base::text::visible;
use phalanx_data::{Dataset, TextBatch, TextDataset};
use phalanx_global::{Global, Parallel};
use phalanx_nn::models::Gpt;
use phalanx_nn::optim::Adam;
use phalanx_nn::{Params, Reduction, Scope, Tape, Tensor, Threads};
use phalanx_train::{EpochLines, Files, Measure, RankContext, Settings};

use crate::error::{Error, Result, check_count};
use crate::format::{number, plural, thousands};
use crate::gpt::{CLIP, GptArgs, RECIPE, schedule};
use crate::shared::global::{GlobalRun, Rows, Setup, Task};
use crate::shared::image::check_share;
use crate::shared::mesh::Mesh;
use crate::shared::text::{measure_scores, sample};

/// Checks `settings` for a training on `mesh`.
///
/// # Errors
///
/// Usage errors naming the flags.
pub fn validate(mesh: Mesh, settings: &Settings, heads: usize) -> Result<()> {
    if mesh.tensor > heads {
        return Err(Error::usage(format!(
            "--mesh tensor={} leaves ranks without an attention head, since there are --heads {heads}; use at most {heads}",
            mesh.tensor
        )));
    }
    mesh.validate(settings, "--mesh")
}

impl GptArgs {
    /// Checks the model's sizes.
    ///
    /// # Errors
    ///
    /// Usage errors naming the flags.
    pub fn check_sizes(&self) -> Result<()> {
        check_count("--layers", self.layers, 1000)?;
        check_count("--width", self.width, 1 << 16)?;
        check_share("--dropout", self.dropout)?;
        if !self.width.is_multiple_of(self.heads) {
            let (width, heads) = (self.width, self.heads);
            return Err(Error::usage(format!(
                "--width {width} is not divisible by --heads {heads}"
            )));
        }
        Ok(())
    }

    /// The model, for people.
    pub fn title(&self) -> String {
        format!("GPT of {}", plural(self.layers, "block"))
    }

    /// The optimizer, for people.
    pub fn optimizer_title(&self) -> String {
        format!(
            "Adam lr {}, falling along a cosine",
            number(self.settings.lr())
        )
    }

    /// Its flags that shape the result.
    pub fn shaping(&self) -> Vec<String> {
        vec![
            format!("--layers {}", self.layers),
            format!("--heads {}", self.heads),
            format!("--width {}", self.width),
            format!("--dropout {}", self.dropout),
        ]
    }
}

/// Which modules are split over `tensor`, and whether weights are over `data`.
fn parallel(mesh: Mesh) -> Parallel {
    let mut parallel = Parallel::new();
    if mesh.tensor > 1 {
        parallel = parallel
            .attention("tensor", &["transformer.h.*.attn"])
            .column("tensor", &["transformer.h.*.mlp.fc", "lm_head"])
            .row("tensor", &["transformer.h.*.mlp.proj"])
            .vocabulary("tensor", &["transformer.wte"]);
    }
    match mesh.fully_sharded {
        true => parallel.fully_sharded("data"),
        false => parallel,
    }
}

/// Predicts the next character of sequences of `context`.
struct NextCharacter {
    context: usize,
}

impl Task for NextCharacter {
    type Data = TextDataset;
    type Model = Gpt;

    fn scores<'s>(&self, gpt: &Gpt, batch: &Rows<'s, TextBatch>) -> Result<Global<'s>> {
        let tokens = batch.indices(&batch.data.tokens, &[self.context])?;
        let rows = tokens.layout().shape()[0];
        Ok(gpt.forward(batch.step(), &tokens, (rows, self.context))?)
    }

    fn loss<'s>(&self, scores: Global<'s>, batch: &Rows<'s, TextBatch>) -> Result<Global<'s>> {
        let targets = batch.indices(&batch.data.targets, &[self.context])?;
        Ok(scores.cross_entropy(&targets, Reduction::Mean)?)
    }

    fn measure(&self, scores: Tensor<'_>, batch: &TextBatch, samples: usize) -> Result<Measure> {
        let (rows, vocab) = (batch.targets.len(), scores.shape()[2]);
        measure_scores(scores.reshape(&[rows, vocab])?, &batch.targets, samples)
    }
}

/// Trains as one rank of `mesh`.
///
/// # Errors
///
/// Anything that ends the training; the kind decides the exit code.
pub fn run(
    ctx: &RankContext,
    args: &GptArgs,
    mesh: Mesh,
    (train, test): (Arc<TextDataset>, Arc<TextDataset>),
    model: impl FnOnce(&mut Scope<'_>) -> Gpt,
    adam: impl FnOnce(&Params, f64) -> Adam,
) -> Result<()> {
    let settings = &args.settings;
    let setup = Setup {
        name: RECIPE.name,
        title: args.title(),
        unit: "sequences",
        data: format!("{}, {} samples", train.describe(), thousands(train.len())),
        content: train.content(),
        mesh,
        parallel: parallel(mesh),
        model: Box::new(model),
        optimizer: Box::new(|params, lr| Box::new(adam(params, lr))),
        optimizer_title: args.optimizer_title(),
        schedule: Some(schedule),
        clip: Some(CLIP),
        shaping: args.shaping(),
        files: Files {
            model: RECIPE.name.to_owned(),
            weights: Some("gpt.safetensors".to_owned()),
            ..Files::default()
        },
        reporter: Box::new(EpochLines),
    };
    let task = NextCharacter {
        context: train.context(),
    };
    let mut run = GlobalRun::open(ctx, settings, setup, task, &train)?;
    run.add_to_summary("data", args.text.name());
    let names: Vec<String> = train.vocabulary().iter().map(char::to_string).collect();
    run.add_to_summary("classes", names);
    if !run.train(&train, &test)? {
        return Ok(());
    }
    let whole = run.whole()?;
    if let (Some(whole), true) = (&whole, args.sample > 0) {
        let _phase = ctx.phase("evaluating");
        let mut tape = Tape::new(Threads(ctx.threads));
        tape.set_precision(settings.precision.into());
        let step = tape.inference(whole);
        let text = sample(run.model(), &step, &train, args.sample, settings.seed)?;
        run.log_text("sample", &text);
        ctx.line(&format!("sample:\n{}", visible(&text)))?;
    }
    run.finish(whole.as_ref())
}
