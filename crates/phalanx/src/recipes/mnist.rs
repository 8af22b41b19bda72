//! `train mnist`: PyTorch's basic MNIST CNN, data parallel, as the Flyte
//! document trains it.

use std::sync::Arc;

use phalanx_data::augment::{Augmentation, Augmented, Edge, Flip};
use phalanx_data::{ImageDataset, mnist, synthetic};
use phalanx_nn::models::MnistCnn;
use phalanx_nn::optim::schedule::Schedule;
use phalanx_nn::optim::{Optimizer, Sgd};
use phalanx_nn::{Params, Scope, Tensor};
use phalanx_train::{Defaults, Evaluation, Files, RankContext, Reporter, StepFacts};

use super::prepare::{Fetch, FetchArgs, Kind, unreadable};
use super::program::{Data, ImageArgs, Loss, Net, Program, Testers};
use crate::error::{Error, Result};
use crate::format::{on_or_off, thousands};

/// Arguments of `train mnist`.
#[derive(Debug, Clone, clap::Args)]
pub struct MnistArgs {
    /// Folder with the MNIST or Fashion-MNIST files, or `synthetic` for generated digits
    #[arg(long, default_value = "synthetic", value_name = "DIR|synthetic")]
    pub data: String,
    #[command(flatten)]
    pub fetch: FetchArgs,
    /// SGD momentum
    #[arg(long, visible_alias = "sgd-momentum", default_value_t = 0.9)]
    pub momentum: f64,
    /// Cosine schedule: decrease the learning rate from --lr to zero over all steps
    #[arg(long)]
    pub cosine: bool,
    /// Dropout probabilities before and after the first linear layer
    #[arg(
        long,
        value_delimiter = ',',
        default_value = "0.25,0.5",
        value_name = "FIRST,SECOND"
    )]
    pub dropout: Vec<f64>,
    /// Shift each training image at random by up to this many pixels in each direction, anew in every epoch
    #[arg(long, default_value_t = 0, value_name = "PIXELS")]
    pub shift: usize,
    /// Print the Flyte document's lines on every rank
    #[arg(long)]
    pub document: bool,
    #[command(flatten)]
    pub images: ImageArgs,
}

impl MnistArgs {
    fn flyte(&self) -> Flyte {
        Flyte {
            document: self.document,
        }
    }
}

impl Net for MnistCnn {
    fn forward<'s>(&self, x: Tensor<'s>) -> phalanx_nn::Result<Tensor<'s>> {
        MnistCnn::forward(self, x)
    }
}

impl Program for MnistArgs {
    type Net = MnistCnn;

    fn name(&self) -> &'static str {
        "mnist"
    }

    fn title(&self) -> &'static str {
        "MNIST CNN"
    }

    fn images(&self) -> &ImageArgs {
        &self.images
    }

    fn images_mut(&mut self) -> &mut ImageArgs {
        &mut self.images
    }

    fn defaults(&self) -> Defaults {
        Defaults::default()
    }

    fn validate(&self, _world: usize) -> Result<()> {
        if !(0.0..1.0).contains(&self.momentum) {
            return Err(Error::usage("--momentum must lie in 0..1 (1 excluded)"));
        }
        if self.dropout.len() != 2 || !self.dropout.iter().all(|p| (0.0..1.0).contains(p)) {
            return Err(Error::usage(
                "--dropout takes two shares in 0..1 (1 excluded), as in --dropout 0.25,0.5",
            ));
        }
        if self.shift >= synthetic::SIDE {
            return Err(Error::usage(format!(
                "--shift must be less than the {} pixels of a digit's side",
                synthetic::SIDE
            )));
        }
        self.fetch.validate()?;
        // The data is looked at once here, so that a wrong folder is one error and not
        // one per rank.
        if self.data == "synthetic" {
            self.fetch.refuse("synthetic")?;
            return Ok(());
        }
        self.images.refuse_synthetic_samples(&self.data)?;
        if !self.fetch.wanted() {
            mnist::check(self.data.as_ref())?;
        }
        Ok(())
    }

    fn prints_on_all(&self) -> bool {
        self.document
    }

    fn files(&self) -> Files {
        Files {
            model: "mnist_cnn".into(),
            weights: Some("mnist_cnn.safetensors".into()),
            accuracies: Some("mnist_cnn_accuracies.json".into()),
            ..Files::default()
        }
    }

    fn data_name(&self) -> String {
        self.data.clone()
    }

    fn must_agree(&self) -> Vec<String> {
        let dropout: Vec<String> = self.dropout.iter().map(f64::to_string).collect();
        vec![
            format!("--momentum {}", self.momentum),
            format!("--dropout {}", dropout.join(",")),
            format!("--cosine {}", on_or_off(self.cosine)),
            format!("--shift {}", self.shift),
        ]
    }

    fn fetch(&self) -> Option<Fetch> {
        self.fetch.fetch(Kind::Mnist, &self.data)
    }

    fn data(&self) -> Result<Data> {
        let seed = self.images.settings.seed;
        let mut data = if self.data == "synthetic" {
            drawn(self.images.synthetic_samples.unwrap_or(SAMPLES), seed)
        } else {
            read(&self.data)?
        };
        if self.shift > 0 {
            let augmentation = Augmentation {
                shift: self.shift,
                edge: Edge::Constant([mnist::normalised()[0]; 3]),
                flip: Flip::Never,
                cutout: 0,
            };
            data.train = Arc::new(Augmented::new(data.train, augmentation, seed)?);
            let shifted = format!(", shifted by up to {}", self.shift);
            data.description.push_str(&shifted);
        }
        Ok(data)
    }

    fn net(&self, scope: &mut Scope) -> MnistCnn {
        // `validate` has counted them.
        let share = |i: usize| self.dropout.get(i).copied().unwrap_or_default();
        MnistCnn::with_dropout(scope, share(0), share(1))
    }

    fn optimizer(&self, params: &Params, lr: f64) -> Box<dyn Optimizer> {
        Box::new(Sgd::new(params, lr).momentum(self.momentum))
    }

    fn optimizer_title(&self, lr: f64) -> String {
        let falling = match self.cosine {
            true => ", falling along a cosine",
            false => "",
        };
        format!("SGD lr {lr} momentum {}{falling}", self.momentum)
    }

    fn schedule(&self, lr: f64, steps: u64) -> Result<Option<Schedule>> {
        match self.cosine {
            true => Ok(Some(Schedule::cosine(lr, steps, 0.0)?)),
            false => Ok(None),
        }
    }

    fn loss(&self) -> Loss {
        Loss::Nll
    }

    fn testers(&self) -> Testers {
        Testers::Rank0
    }

    fn reporter(&self) -> Box<dyn Reporter> {
        Box::new(self.flyte())
    }

    fn started(&self, ctx: &RankContext) -> Result<()> {
        let (rank, world) = (ctx.rank(), ctx.world());
        // Its task prints these before it starts the ranks.
        self.flyte().main(
            ctx,
            &format!("Start MNIST training:\nDevice count: {world}"),
        )?;
        let backend = if world > 1 { ctx.transport() } else { "local" };
        self.flyte().all(
            ctx,
            &format!(
                "Using distributed Phalanx with {backend} backend\n\
                 Running MNIST training on rank {rank}, world size: {world}\n\
                 Use cuda: False\n\
                 Rank {}/{world} process initialized.\n\n\
                 Getting data loaders",
                rank + 1
            ),
        )
    }

    fn loaded(&self, ctx: &RankContext) -> Result<()> {
        self.flyte().all(ctx, "Defining model")
    }
}

/// Training samples of the synthetic set.
const SAMPLES: usize = 60_000;

fn drawn(n: usize, seed: u64) -> Data {
    let m = (n / 6).max(1);
    // The test digits follow the training digits, so none is seen in training.
    Data {
        train: Arc::new(synthetic::digits(n, seed)),
        test: Arc::new(synthetic::range(n as u64, m, seed)),
        description: format!(
            "synthetic digits, {} train / {} test, seed {seed}",
            thousands(n),
            thousands(m),
        ),
        content: format!("synthetic {n} + {m}, seed {seed}"),
    }
}

fn read(folder: &str) -> Result<Data> {
    let load = |split| {
        let set = mnist::load(folder.as_ref(), split);
        set.map_err(|error| unreadable(Kind::Mnist, folder, error))
    };
    let (train, test) = (load(mnist::Split::Train)?, load(mnist::Split::Test)?);
    let description = format!(
        "{} in {folder}, {} train / {} test",
        train.name(),
        thousands(train.len()),
        thousands(test.len())
    );
    let content = format!(
        "{} {} + {}, SHA-256 {:.16} + {:.16}",
        train.name(),
        train.len(),
        test.len(),
        train.sha256(),
        test.sha256()
    );
    Ok(Data {
        train: Arc::new(train),
        test: Arc::new(test),
        description,
        content,
    })
}

/// The lines of the Flyte document: rank 0 about steps and tests, and with
/// `document` every rank about its life.
struct Flyte {
    document: bool,
}

impl Flyte {
    /// A line that every rank prints, in the document's form only.
    fn all(&self, ctx: &RankContext, text: &str) -> Result<()> {
        if self.document {
            ctx.line(text)
        } else {
            Ok(())
        }
    }

    /// A line of rank 0, in the document's form only.
    fn main(&self, ctx: &RankContext, text: &str) -> Result<()> {
        if self.document && ctx.is_main() {
            ctx.line(text)
        } else {
            Ok(())
        }
    }
}

impl Reporter for Flyte {
    fn trains(&mut self, ctx: &RankContext, epochs: usize) -> Result<()> {
        self.all(ctx, &format!("Training for {epochs} epochs"))
    }

    fn step(&mut self, ctx: &RankContext, facts: &StepFacts) -> Option<String> {
        if !(facts.logged && ctx.is_main()) {
            return None;
        }
        // The document counts the samples of rank 0 alone.
        let done = if self.document {
            facts.done / ctx.world()
        } else {
            facts.done
        };
        let percent = 100.0 * facts.index as f64 / facts.steps as f64;
        Some(format!(
            "Train Epoch: {} [{done}/{} ({percent:.0}%)]\tloss={:.4}",
            facts.epoch, facts.samples, facts.loss
        ))
    }

    fn evaluated(&mut self, ctx: &RankContext, _epoch: usize, tested: &Evaluation) -> Result<()> {
        if !ctx.is_main() {
            return Ok(());
        }
        ctx.line(&format!(
            "\ntest_loss={:.4}\naccuracy={:.4}\n",
            tested.loss, tested.accuracy
        ))
    }

    fn saves(&mut self, ctx: &RankContext, weights: bool) -> Result<()> {
        self.main(
            ctx,
            if weights {
                "Saving model"
            } else {
                "Saving accuracies"
            },
        )
    }

    fn ends(&mut self, ctx: &RankContext) -> Result<()> {
        let world = ctx.world();
        self.all(
            ctx,
            &format!("Rank {}/{world} process complete.\n", ctx.rank() + 1),
        )?;
        self.main(ctx, "Training Complete")
    }
}
