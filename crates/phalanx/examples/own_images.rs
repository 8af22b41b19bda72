//! Photos in a folder, a subfolder for each class: ResNet-18 on random crops.
//! `cargo run --release -p phalanx --example own_images -- --data photos --nproc-per-node 2`

use phalanx::data::folder::{IMAGENET_MEAN, IMAGENET_STD, ImageFolder, Transforms};
use phalanx::nn::models::CifarResNet;
use phalanx::prelude::*;

#[derive(clap::Args)]
struct Args {
    /// Folder with a subfolder of JPEG and PNG images for each class
    #[arg(long)]
    data: std::path::PathBuf,
    /// Side of the images in pixels
    #[arg(long, default_value_t = 64)]
    image_size: usize,
}

fn main() -> ExitCode {
    phalanx::main_with(|job, args: &Args| {
        let seed = job.settings().seed;
        let photos = job.skip_damaged(&ImageFolder::open_all(&args.data)?)?;
        let [train, test] = photos.split(0.1, seed);
        let transforms = Transforms::new()
            .random_resized_crop(args.image_size)
            .random_horizontal_flip(0.5)
            .color_jitter(0.2, 0.2, 0.2, 0.0)
            .normalize(IMAGENET_MEAN, IMAGENET_STD);
        let train = Arc::new(train.transform(transforms, seed)?);
        let test = Arc::new(test.transform(Transforms::evaluation(args.image_size), seed)?);
        let classes = train.class_names().len();
        let net = |scope: &mut Scope| CifarResNet::resnet18(scope, classes);
        let adam = |params: &Params, lr| Adam::new(params, lr);
        let mut trainer = job.trainer(&train, net, adam).start()?;
        for _epoch in trainer.epochs() {
            for batch in trainer.batches(&train)? {
                trainer.step(&batch, |model, batch| {
                    let scores = model.forward(batch.images()?)?;
                    scores.cross_entropy(batch.labels(), batch.samples())
                })?;
            }
            trainer.evaluate(&test, |model, batch| {
                let scores = model.forward(batch.images()?)?;
                let measure = Measure::of_scores(&scores, batch.labels())?;
                Ok(measure.with_loss(scores.cross_entropy(batch.labels(), 1.0)?))
            })?;
        }
        trainer.finish().map(drop)
    })
}
