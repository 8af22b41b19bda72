//! `train gpt`: a language model of characters, as nanoGPT's `train_shakespeare_char`.

use std::path::PathBuf;

use phalanx_base::text::visible;
use phalanx_launch::Speakers;
use phalanx_nn::models::{Gpt, GptConfig};
use phalanx_nn::optim::{Adam, schedule::Schedule};
use phalanx_nn::{Params, Reduction, Scope};
use phalanx_train::{Defaults, MeshArgs, RankContext, SavingArgs, Settings, TrainerBuilder};

use crate::error::Result;
use crate::gpt_mesh;
use crate::shared::text::{TextArgs, measure, sample, scores};
use crate::{AnyRecipe, Recipe};

pub const RECIPE: Recipe = Recipe::with_defaults::<GptArgs>(
    "gpt",
    "A GPT that predicts the next character of a text file or of synthetic text",
    DEFAULTS,
);

const DEFAULTS: Defaults = Defaults::new(2, 16, 0.001);

/// Arguments of `train gpt`.
#[derive(Debug, Clone, clap::Args)]
pub struct GptArgs {
    #[command(flatten)]
    pub text: TextArgs,
    /// Number of transformer blocks
    #[arg(long, default_value_t = 4, value_name = "N")]
    pub layers: usize,
    /// Number of attention heads; divides --width
    #[arg(long, default_value_t = 4, value_name = "N")]
    pub heads: usize,
    /// Size of the vector of a character
    #[arg(long, default_value_t = 128, value_name = "N")]
    pub width: usize,
    /// Dropout probability
    #[arg(long, default_value_t = 0.0, value_name = "P")]
    pub dropout: f64,
    /// Recompute each block's activations in backward: less memory, more time, bit-identical results
    #[arg(long)]
    recompute: bool,
    /// Number of characters to generate after training
    #[arg(long, default_value_t = 300, value_name = "N")]
    pub sample: usize,
    #[command(flatten)]
    mesh: MeshArgs,
    #[command(flatten)]
    pub settings: Settings,
}

/// The largest norm of the gradients.
pub const CLIP: f64 = 1.0;

/// The learning rate falls along a cosine.
pub fn schedule(lr: f64, steps: u64) -> phalanx_nn::Result<Schedule> {
    Schedule::cosine(lr, steps, lr / 10.0)
}

impl AnyRecipe for GptArgs {
    fn name(&self) -> &'static str {
        RECIPE.name
    }

    fn settings(&mut self) -> Option<&mut Settings> {
        Some(&mut self.settings)
    }

    fn folder(&mut self) -> (&mut Option<PathBuf>, &mut SavingArgs) {
        (&mut self.settings.output_dir, &mut self.settings.saving)
    }

    fn settle(&mut self) {
        self.settings.defaults = DEFAULTS;
    }

    fn validate(&self, world: usize) -> Result<()> {
        match self.mesh.mesh(world)? {
            Some(mesh) => gpt_mesh::validate(mesh, &self.settings, self.heads)?,
            None => self.settings.validate(world)?,
        }
        self.check_sizes()?;
        self.text.validate(self.settings.seed)
    }

    fn speakers(&self) -> Speakers {
        Speakers::Rank0
    }

    fn run_rank(&self, ctx: &RankContext) -> Result<()> {
        let (settings, loading) = (&self.settings, ctx.phase("loading data"));
        let (train, test) = self.text.load(settings.seed)?;
        drop(loading);
        let (vocab, context) = (train.vocabulary().len(), train.context());
        let (layers, heads, width, dropout) = (self.layers, self.heads, self.width, self.dropout);
        #[rustfmt::skip]
        let config = GptConfig { vocab, context, layers, heads, width, dropout };
        let model = |scope: &mut Scope<'_>| Gpt::new(scope, &config).recompute(self.recompute);
        let adam = |params: &Params, lr| Adam::new(params, lr).betas(0.9, 0.99);
        if let Some(mesh) = self.mesh.mesh(ctx.world())? {
            return gpt_mesh::run(ctx, self, mesh, (train, test), model, adam);
        }
        let mut trainer = TrainerBuilder::new(ctx, settings, self.name(), &train, model, adam)
            .title(&self.title())
            .unit("sequences")
            .optimizer_title(&self.optimizer_title())
            .schedule(schedule)
            .clip_grad_norm(CLIP)
            .shaped_by(self.shaping())
            .start()?;
        trainer.add_to_summary("data", self.text.name());
        let names: Vec<String> = train.vocabulary().iter().map(char::to_string).collect();
        trainer.add_to_summary("classes", names);
        if trainer.epochs().is_empty() && trainer.last_evaluation().loss.is_nan() {
            // Resumed after its last epoch, from an older checkpoint, which does not have its evaluation.
            trainer.evaluate(&test, measure)?;
        }
        for _epoch in trainer.epochs() {
            for batch in trainer.batches(&train)? {
                trainer.step(&batch, |gpt, batch| {
                    Ok(scores(gpt, &batch)?.cross_entropy(&batch.targets, Reduction::Mean)?)
                })?;
            }
            trainer.evaluate(&test, measure)?;
        }
        if ctx.is_main() && self.sample > 0 {
            let _phase = ctx.phase("evaluating");
            let count = self.sample;
            let text =
                trainer.infer(|gpt, step| sample(gpt, step, &train, count, settings.seed))?;
            trainer.log_text("sample", &text);
            ctx.line(&format!("sample:\n{}", visible(&text)))?;
        }
        trainer.finish().map(drop)
    }
}
