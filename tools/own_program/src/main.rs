//! Forecasts the next value of a time series from the values before it: own data, own model,
//! and nothing of Phalanx but its prelude.

use phalanx::prelude::*;

/// Values that a forecast is made from.
const PAST: usize = 24;

/// One sample: values in a row, and the value to forecast.
#[derive(Clone)]
struct Window {
    past: [f32; PAST],
    next: f32,
}

/// `count` windows of a series with two periods, from value number `start` on.
fn windows(start: usize, count: usize) -> Vec<Window> {
    let value = |i: usize| {
        let t = i as f32;
        (t * 0.26).sin() + 0.5 * (t * 0.037).cos()
    };
    let window = |i: usize| Window {
        past: std::array::from_fn(|k| value(i + k)),
        next: value(i + PAST),
    };
    (start..start + count).map(window).collect()
}

/// A hidden layer, and the last value added to what it forecasts.
struct Forecaster {
    hidden: Linear,
    change: Linear,
}

impl Forecaster {
    fn new(scope: &mut Scope, width: usize) -> Forecaster {
        Forecaster {
            hidden: Linear::new(scope.enter("hidden"), PAST, width),
            change: Linear::new(scope.enter("change"), width, 1),
        }
    }

    /// One forecast a window.
    fn forward<'s>(&self, batch: &MicroBatch<'s, Vec<Window>>) -> Result<Tensor<'s>> {
        let past: Vec<f32> = batch.iter().flat_map(|window| window.past).collect();
        let last: Vec<f32> = batch.iter().map(|window| window.past[PAST - 1]).collect();
        let hidden = self.hidden.forward(batch.input(&past, &[batch.samples(), PAST])?)?;
        let change = self.change.forward(hidden.gelu()?)?;
        change.add(batch.input(&last, &[batch.samples(), 1])?)
    }
}

/// The values to forecast.
fn targets(batch: &[Window]) -> Vec<f32> {
    batch.iter().map(|window| window.next).collect()
}

/// Flags of this program, besides those of training.
#[derive(clap::Args)]
struct Args {
    /// Units of the hidden layer
    #[arg(long, default_value_t = 32)]
    width: usize,
    /// Number of windows to train on
    #[arg(long, default_value_t = 20000)]
    windows: usize,
}

fn main() -> ExitCode {
    let program = Program::new().defaults(Defaults::new(3, 32, 0.002));
    program.main_with(|job, args: &Args| {
        let train = Arc::new(windows(0, args.windows));
        let test = Arc::new(windows(args.windows, 1000));
        let mut trainer = job
            .trainer(&train, |scope| Forecaster::new(scope, args.width), Adam::new)
            .hyperparameters(vec![format!("--width {}", args.width)])
            .start()?;
        for _epoch in trainer.epochs() {
            for batch in trainer.batches(&train)? {
                trainer.step(&batch, |model, batch| {
                    let forecast = model.forward(&batch)?;
                    forecast.mse_loss(&targets(&batch), Reduction::Mean)
                })?;
            }
            let tested = trainer.evaluate(&test, |model, batch| {
                let forecast = model.forward(&batch)?;
                let sum = forecast.mse_loss(&targets(&batch), Reduction::Sum)?;
                Ok(Measure::of_loss(sum))
            })?;
            trainer.log(&[("error", tested.loss.sqrt())])?;
            trainer.log_text("forecast", &format!("off by {:.4} on average", tested.loss.sqrt()));
        }
        trainer.finish().map(drop)
    })
}
