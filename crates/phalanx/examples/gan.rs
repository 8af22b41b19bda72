//! A GAN that draws digits: two optimizers, for the discriminator and for all other parameters.
//! `cargo run --release -p phalanx --example gan -- --nproc-per-node 2`

use phalanx::prelude::*;

struct Gan {
    generator: [Linear; 2],
    discriminator: [Linear; 2],
}

impl Gan {
    fn new(scope: &mut Scope) -> Gan {
        let mut layers = |name: &str, sizes: [usize; 3]| {
            let mut scope = scope.enter(name);
            [0, 1].map(|i| Linear::new(scope.enter(&i.to_string()), sizes[i], sizes[i + 1]))
        };
        Gan {
            generator: layers("generator", [64, 256, 784]),
            discriminator: layers("discriminator", [784, 256, 1]),
        }
    }

    fn fake<'s>(&self, batch: &MicroBatch<'s, ImageBatch>) -> Result<Tensor<'s>> {
        let [first, last] = &self.generator;
        last.forward(first.forward_act(batch.normal(&[64])?, Act::Relu)?)
    }

    /// How far the discriminator is from the answer `target`.
    fn loss<'s>(&self, images: Tensor<'s>, target: f32) -> Result<Tensor<'s>> {
        let [first, last] = &self.discriminator;
        let scores = last.forward(first.forward_act(images, Act::Relu)?)?;
        let targets = vec![target; scores.numel()];
        scores.mse_loss(&targets, Reduction::Mean)
    }
}

#[derive(clap::Args)]
struct Args {
    /// Folder with the MNIST files, or `synthetic` for generated digits
    #[arg(long, default_value = "synthetic")]
    data: String,
}

fn main() -> ExitCode {
    let program = Program::new().defaults(Defaults::new(3, 64, 2e-4));
    program.main_with(|job, args: &Args| {
        let (train, _) = mnist::open(&args.data, job.settings().seed)?;
        let adam = |params: &Params, lr| Adam::new(params, lr).betas(0.5, 0.999);
        let mut trainer = job
            .trainer(&train, Gan::new, adam)
            .optimizer_of("discriminator", adam)
            .start()?;
        for _epoch in trainer.epochs() {
            for batch in trainer.batches(&train)? {
                let loss = trainer.step_of("discriminator", &batch, |gan, batch| {
                    let fake = gan.fake(&batch)?;
                    let fake = batch.input(fake.data(), &fake.shape())?; // detached
                    let real = gan.loss(batch.images()?.flatten()?, 1.0)?;
                    real.add(gan.loss(fake, 0.0)?)
                })?;
                trainer.step(&batch, |gan, batch| gan.loss(gan.fake(&batch)?, 1.0))?;
                trainer.log(&[("discriminator_loss", loss)])?;
            }
        }
        trainer.finish().map(drop)
    })
}
