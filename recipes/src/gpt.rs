//! `train gpt`: a language model of characters, as nanoGPT's `train_shakespeare_char`, or of packed tokens.

use phalanx::Subcommand;
use phalanx::prelude::*;
use phalanx_base::text::visible;

use crate::error::check_count;
use crate::format::{number, plural};
use crate::gpt_mesh;
use crate::shared::gpt2::Sizes;
use crate::shared::image::check_share;
use crate::shared::text::{TextArgs, measure, sample, scores};

pub fn program() -> Subcommand {
    Program::new()
        .name("gpt")
        .about("A GPT that predicts the next character, or token, of a text")
        .defaults(Defaults::new(2, 16, 0.001))
        .check(|args: &GptArgs, settings, world| {
            match args.mesh.mesh(world)? {
                Some(mesh) => gpt_mesh::check(mesh, settings, args.heads)?,
                None => settings.validate(world)?,
            }
            args.check_sizes()?;
            args.text.validate(settings.seed)
        })
        .subcommand(train)
}

/// Flags of `train gpt`.
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
    /// Size of the vector of a token
    #[arg(long, default_value_t = 128, value_name = "N")]
    pub width: usize,
    /// Dropout probability
    #[arg(long, default_value_t = 0.0, value_name = "P")]
    pub dropout: f64,
    /// Recompute each block's activations in backward: less memory, more time, bit-identical results
    #[arg(long)]
    recompute: bool,
    /// Number of tokens to generate after training
    #[arg(long, default_value_t = 300, value_name = "N")]
    pub sample: usize,
    #[command(flatten)]
    mesh: MeshArgs,
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
    pub fn optimizer_title(&self, lr: f64) -> String {
        format!("Adam lr {}, falling along a cosine", number(lr))
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

/// The largest norm of the gradients.
const CLIP: f64 = 1.0;

fn train(job: &Job<'_>, args: &GptArgs) -> Result<()> {
    let (ctx, settings) = (job.context(), job.settings());
    let loading = ctx.phase("loading data");
    let (train, test) = args.text.load(settings.seed)?;
    drop(loading);
    let data = (train.vocabulary().len(), train.context());
    let flags = [args.layers, args.heads, args.width];
    let sizes = Sizes::of(job, data, flags, args.dropout)?;
    let (mut args, config) = (args.clone(), &sizes.config);
    (args.layers, args.heads, args.width) = (config.layers, config.heads, config.width);
    let model = |scope: &mut Scope<'_>| sizes.build(scope).recompute(args.recompute);
    let adam = |params: &Params, lr| Adam::new(params, lr).betas(0.9, 0.99);
    let builder = (job.trainer(&train, model, adam))
        .title(&args.title())
        .unit("sequences")
        .optimizer_title(&args.optimizer_title(settings.lr()))
        .schedule(|lr, steps| Schedule::cosine(lr, steps, lr / 10.0))
        .clip_grad_norm(CLIP)
        .files(sizes.files())
        .hyperparameters(args.shaping());
    if let Some(mesh) = args.mesh.mesh(ctx.world())? {
        if sizes.is_gpt2 {
            return Err(Error::usage("--mesh does not split GPT-2's weights"));
        }
        return gpt_mesh::train(
            job,
            (&args.text, args.sample),
            builder.on(mesh, gpt_mesh::parallel()),
            &train,
            &test,
        );
    }
    let mut trainer = builder.start()?;
    args.text.name_in_summary(&mut trainer, &train);
    for _epoch in trainer.epochs() {
        for batch in trainer.batches(&train)? {
            trainer.step(&batch, |gpt, batch| {
                scores(gpt, &batch)?.cross_entropy(&batch.targets, Reduction::Mean)
            })?;
        }
        trainer.evaluate(&test, |gpt, batch| measure(gpt, &batch, &test))?;
    }
    if ctx.is_main() && args.sample > 0 {
        let _phase = ctx.phase("evaluating");
        let count = args.sample;
        let text = trainer.infer(|gpt, step| sample(gpt, step, &train, count, settings.seed))?;
        trainer.log_text("sample", &text);
        ctx.line(&format!("sample:\n{}", visible(&text)))?;
    }
    trainer.finish().map(drop)
}
