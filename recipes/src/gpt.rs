//! `train gpt`: a language model of characters, as nanoGPT's `train_shakespeare_char`.

use std::path::PathBuf;

use phalanx_data::text::visible;
use phalanx_launch::Speakers;
use phalanx_nn::models::{Gpt, GptConfig};
use phalanx_nn::optim::{Adam, schedule::Schedule};
use phalanx_nn::{Params, Reduction, Scope};
use phalanx_train::{Defaults, RankContext, SavingArgs, Settings, TrainerBuilder};

use crate::error::{Error, Result, check_count};
use crate::shared::image::check_share;
use crate::shared::text::{TextArgs, generate, measure, scores};
use crate::{AnyRecipe, Recipe};

pub const RECIPE: Recipe = Recipe::with_defaults::<GptArgs>(
    "gpt",
    "A GPT that predicts the next character of a text file or of synthetic text",
    DEFAULTS,
);

const DEFAULTS: Defaults = Defaults::new(2, 16, 0.001);

/// Arguments of `train gpt`.
#[derive(Debug, Clone, clap::Args)]
struct GptArgs {
    #[command(flatten)]
    text: TextArgs,
    /// Number of transformer blocks
    #[arg(long, default_value_t = 4, value_name = "N")]
    layers: usize,
    /// Number of attention heads; divides --width
    #[arg(long, default_value_t = 4, value_name = "N")]
    heads: usize,
    /// Size of the vector of a character
    #[arg(long, default_value_t = 128, value_name = "N")]
    width: usize,
    /// Dropout probability
    #[arg(long, default_value_t = 0.0, value_name = "P")]
    dropout: f64,
    /// Recompute each block's activations in backward: less memory, more time, bit-identical results
    #[arg(long)]
    recompute: bool,
    /// Number of characters to generate after training
    #[arg(long, default_value_t = 300, value_name = "N")]
    sample: usize,
    #[command(flatten)]
    settings: Settings,
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
        self.settings.validate(world)?;
        check_count("--layers", self.layers, 1000)?;
        check_count("--width", self.width, 1 << 16)?;
        check_share("--dropout", self.dropout)?;
        if !self.width.is_multiple_of(self.heads) {
            let (width, heads) = (self.width, self.heads);
            return Err(Error::usage(format!(
                "--width {width} is not divisible by --heads {heads}"
            )));
        }
        self.text.validate(self.settings.seed)
    }

    fn speakers(&self) -> Speakers {
        Speakers::Rank0
    }

    fn run_rank(&self, ctx: &RankContext) -> Result<()> {
        let (settings, loading) = (&self.settings, ctx.phase("loading data"));
        let (train, test) = self.text.load(settings.seed)?;
        drop(loading);
        let config = GptConfig {
            vocab: train.vocabulary().len(),
            context: train.context(),
            layers: self.layers,
            heads: self.heads,
            width: self.width,
            dropout: self.dropout,
        };
        let model = |scope: &mut Scope<'_>| Gpt::new(scope, &config).recompute(self.recompute);
        let adam = |params: &Params, lr| Adam::new(params, lr).betas(0.9, 0.99);
        let mut trainer = TrainerBuilder::new(ctx, settings, self.name(), &train, model, adam)
            .title(&format!("GPT of {} blocks", self.layers))
            .unit("sequences")
            .optimizer_title(&format!(
                "Adam lr {}, falling along a cosine",
                settings.lr()
            ))
            .schedule(|lr, steps| Schedule::cosine(lr, steps, lr / 10.0))
            .clip_grad_norm(1.0)
            .shaped_by(vec![
                format!("--layers {}", self.layers),
                format!("--heads {}", self.heads),
                format!("--width {}", self.width),
                format!("--dropout {}", self.dropout),
            ])
            .start()?;
        trainer.add_to_summary("data", self.text.name());
        let names: Vec<String> = train.vocabulary().iter().map(char::to_string).collect();
        trainer.add_to_summary("classes", names);
        let epochs = trainer.epochs();
        if epochs.is_empty() {
            // Resumed after its last epoch.
            trainer.evaluate(&test, measure)?;
        }
        for _epoch in epochs {
            for batch in trainer.batches(&train)? {
                trainer.step(&batch, |gpt, batch| {
                    Ok(scores(gpt, &batch)?.cross_entropy(&batch.targets, Reduction::Mean)?)
                })?;
            }
            trainer.evaluate(&test, measure)?;
        }
        if ctx.is_main() && self.sample > 0 {
            let _phase = ctx.phase("evaluating");
            let text = trainer.infer(|gpt, step| {
                generate(&train, self.sample, settings.seed, |seen| {
                    let scores = gpt.forward(step, seen, (1, seen.len()))?.softmax(2)?;
                    Ok(scores.data()[(seen.len() - 1) * config.vocab..].to_vec())
                })
            })?;
            trainer.log_text("sample", &text);
            ctx.line(&format!("sample:\n{}", visible(&text)))?;
        }
        trainer.finish().map(drop)
    }
}
