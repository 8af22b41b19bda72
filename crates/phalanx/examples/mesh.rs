//! An MLP on a mesh of ranks: batches are split over `data`, layers over `tensor`.
//! `cargo run --release --example mesh -- --nproc-per-node 4 --mesh data=2,tensor=2`

use phalanx::prelude::*;

struct Mlp(Linear, Linear);

impl Mlp {
    fn new(scope: &mut Scope) -> Mlp {
        let fc1 = Linear::new(scope.enter("fc1"), 28 * 28, 128);
        Mlp(fc1, Linear::new(scope.enter("fc2"), 128, 10))
    }

    fn forward<'s, V: Value<'s>>(&self, x: V) -> phalanx::nn::Result<V> {
        self.1.forward(self.0.forward(x.flatten()?)?.relu()?)
    }
}

#[derive(clap::Args)]
struct Args {
    #[command(flatten)]
    mesh: MeshArgs,
}

fn main() -> ExitCode {
    phalanx::main_with(|job, args: &Args| {
        let (train, test) = mnist::open("synthetic", job.settings().seed)?;
        let mesh = args.mesh.mesh(job.world_size())?;
        let mesh = mesh.unwrap_or(Mesh::data_parallel(job.world_size()));
        let layers = Parallel::new()
            .column("tensor", &["fc1"])
            .row("tensor", &["fc2"]);
        let builder = job.trainer(&train, Mlp::new, Sgd::new);
        let mut trainer = builder.on(mesh, layers).start()?;
        for _epoch in trainer.epochs() {
            for batch in trainer.batches(&train)? {
                trainer.step(&batch, |model, batch| {
                    let labels = batch.indices_of(batch.labels(), &[batch.samples()])?;
                    let scores = model.forward(batch.images()?)?;
                    scores.cross_entropy(&labels, Reduction::Mean)
                })?;
            }
            trainer.evaluate(&test, |model, batch| {
                let scores = model.forward(batch.images()?)?;
                let Some(scores) = batch.own_rows(scores)? else {
                    return Ok(Measure::empty());
                };
                let measure = Measure::of_scores(&scores, batch.labels())?;
                Ok(measure.with_loss(scores.cross_entropy(batch.labels(), 1.0)?))
            })?;
        }
        trainer.finish().map(drop)
    })
}
