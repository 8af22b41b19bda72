//! A network of your own on MNIST: data parallel, resumable, with metrics and progress.
//! `cargo run --release -p phalanx --example own_model -- --nproc-per-node 2`

use phalanx::prelude::*;

struct Cnn(Conv2d, Conv2d, MaxPool2d, Dropout, Linear, Dropout, Linear);

impl Cnn {
    fn new(scope: &mut Scope) -> Cnn {
        let conv1 = Conv2d::new(scope.enter("conv1"), 1, 32, 3);
        let conv2 = Conv2d::new(scope.enter("conv2"), 32, 64, 3);
        let fc1 = Linear::new(scope.enter("fc1"), 9216, 128);
        let fc2 = Linear::new(scope.enter("fc2"), 128, 10);
        let (drop1, drop2) = (Dropout::new(0.25), Dropout::new(0.5));
        Cnn(conv1, conv2, MaxPool2d::new(2), drop1, fc1, drop2, fc2)
    }

    fn forward<'s>(&self, x: Tensor<'s>) -> Result<Tensor<'s>> {
        let Cnn(conv1, conv2, pool, drop1, fc1, drop2, fc2) = self;
        let x = conv2.forward_act(conv1.forward_act(x, Act::Relu)?, Act::Relu)?;
        let x = drop1.forward(pool.forward(x)?)?.flatten()?;
        let x = drop2.forward(fc1.forward_act(x, Act::Relu)?)?;
        fc2.forward(x)?.log_softmax()
    }
}

#[derive(clap::Args)]
struct Args {
    /// Folder with the MNIST files, or `synthetic` for generated digits
    #[arg(long, default_value = "synthetic")]
    data: String,
}

fn main() -> ExitCode {
    phalanx::main_with(|job, args: &Args| {
        let (train, test) = mnist::open(&args.data, job.settings().seed)?;
        let sgd = |params: &Params, lr| Sgd::new(params, lr).momentum(0.9);
        let mut trainer = job.trainer(&train, Cnn::new, sgd).start()?;
        for _epoch in trainer.epochs() {
            for batch in trainer.batches(&train)? {
                trainer.step(&batch, |model, batch| {
                    let scores = model.forward(batch.images()?)?;
                    scores.nll_loss(batch.labels(), batch.samples())
                })?;
            }
            trainer.evaluate(&test, |model, batch| {
                let scores = model.forward(batch.images()?)?;
                let measure = Measure::of_scores(&scores, batch.labels())?;
                Ok(measure.with_loss(scores.nll_loss(batch.labels(), 1.0)?))
            })?;
        }
        trainer.finish().map(drop)
    })
}
