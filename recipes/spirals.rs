//! A model and data of one's own: points on three spirals, and a small network that tells the
//! spirals apart. Change `Spirals` and `Network`, and keep `main`.

use phalanx::prelude::*;

/// Classes: a spiral each.
const CLASSES: usize = 3;

/// Points and the spirals they lie on.
struct Spirals {
    points: Vec<([f32; 2], u32)>,
}

impl Spirals {
    /// `count` points; those of other `shift`s lie between them.
    fn new(count: usize, shift: f32) -> Spirals {
        let point = |i: usize| {
            let class = i % CLASSES;
            let radius = (i as f32 + shift) / count as f32;
            let fraction = class as f32 / CLASSES as f32 + 0.6 * radius;
            let (sin, cos) = (std::f32::consts::TAU * fraction).sin_cos();
            ([radius * sin, radius * cos], class as u32)
        };
        Spirals {
            points: (0..count).map(point).collect(),
        }
    }
}

impl Dataset for Spirals {
    /// Coordinates, and a label a point.
    type Batch = (Vec<f32>, Vec<u32>);

    fn len(&self) -> usize {
        self.points.len()
    }

    fn read_batch(
        &self,
        _epoch: u64,
        indices: &[u64],
        (points, labels): &mut Self::Batch,
    ) -> Result<()> {
        points.clear();
        labels.clear();
        for &index in indices {
            let (point, label) = self.points[index as usize];
            points.extend(point);
            labels.push(label);
        }
        Ok(())
    }

    fn describe(&self) -> String {
        "points on spirals".to_owned()
    }
}

/// Two hidden layers.
struct Network(Linear, Linear, Linear);

impl Network {
    fn new(scope: &mut Scope, width: usize) -> Network {
        Network(
            Linear::new(scope.enter("fc1"), 2, width),
            Linear::new(scope.enter("fc2"), width, width),
            Linear::new(scope.enter("fc3"), width, CLASSES),
        )
    }

    /// Points of a batch to one score a class.
    fn forward<'s>(&self, batch: &MicroBatch<'s, (Vec<f32>, Vec<u32>)>) -> Result<Tensor<'s>> {
        let Network(fc1, fc2, fc3) = self;
        let x = batch.input(&batch.0, &[batch.samples(), 2])?;
        let x = fc2.forward_act(fc1.forward_act(x, Act::Relu)?, Act::Relu)?;
        fc3.forward(x)
    }
}

/// Flags of this program, besides those of training.
#[derive(clap::Args)]
struct Args {
    /// Units of each hidden layer
    #[arg(long, default_value_t = 64)]
    width: usize,
    /// Number of points to train on
    #[arg(long, default_value_t = 3000)]
    points: usize,
}

fn main() -> ExitCode {
    let program = Program::new().defaults(Defaults::new(20, 32, 0.005));
    program.main_with(|job, args: &Args| {
        let train = Arc::new(Spirals::new(args.points, 0.0));
        let test = Arc::new(Spirals::new(args.points / 4, 0.5));
        let mut trainer = job
            .trainer(&train, |scope| Network::new(scope, args.width), Adam::new)
            .schedule(|lr, steps| Schedule::cosine(lr, steps, 0.0))
            .hyperparameters(vec![format!("--width {}", args.width)])
            .start()?;
        for _epoch in trainer.epochs() {
            for batch in trainer.batches(&train)? {
                trainer.step(&batch, |model, batch| {
                    let scores = model.forward(&batch)?;
                    scores.cross_entropy(&batch.1, batch.samples())
                })?;
            }
            trainer.evaluate(&test, |model, batch| {
                let scores = model.forward(&batch)?;
                let measure = Measure::of_scores(&scores, &batch.1)?;
                Ok(measure.with_loss(scores.cross_entropy(&batch.1, 1.0)?))
            })?;
        }
        trainer.finish().map(drop)
    })
}
