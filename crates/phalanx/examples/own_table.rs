//! Regression on a table of your own: a CSV file with a header, whose last column is the target. Missing values are filled,
//! numbers standardised and texts become categories. The training stops when the test loss has not improved for five epochs. A
//! second start with `--predict` writes the predictions of the best weights for the rows of a file.
//! `cargo run --release -p phalanx --example own_table -- --nproc-per-node 2 --table FILE.csv --output-dir run`
//! `cargo run --release -p phalanx --example own_table -- --table FILE.csv --init run/best.safetensors --predict out.csv`

use std::fs;
use std::path::{Path, PathBuf};

use phalanx::checkpoint::read_metadata;
use phalanx::data::table::{Preprocessing, Table, TableBatch, TableOptions};
use phalanx::prelude::*;

struct Network(Linear, Linear);

impl Network {
    fn new(scope: &mut Scope, features: usize) -> Network {
        let hidden = Linear::new(scope.enter("hidden"), features, 32);
        Network(hidden, Linear::new(scope.enter("output"), 32, 1))
    }

    /// What it takes the targets for, a row each.
    fn answers<'s>(&self, batch: &MicroBatch<'s, TableBatch>) -> Result<Tensor<'s>> {
        let width = batch.features.len() / batch.samples();
        let x = batch.input(&batch.features, &[batch.samples(), width])?;
        self.1.forward(self.0.forward_act(x, Act::Relu)?)
    }

    /// The squared error, as a mean or a sum over the batch.
    fn loss<'s>(
        &self,
        batch: &MicroBatch<'s, TableBatch>,
        reduction: Reduction,
    ) -> Result<Tensor<'s>> {
        self.answers(batch)?.mse_loss(&batch.targets, reduction)
    }
}

/// y = 3 a - 2 b + 1.
fn generated() -> String {
    let row = |i: u32| {
        let (a, b) = (f64::from(i % 64) / 64.0, f64::from(i / 64) / 64.0);
        format!("{a},{b},{}\n", 3.0 * a - 2.0 * b + 1.0)
    };
    let rows: String = (0..4096).map(row).collect();
    format!("a,b,y\n{rows}")
}

#[derive(clap::Args)]
struct Args {
    /// CSV file with a header; the last column is the target [default: generated rows]
    #[arg(long)]
    table: Option<PathBuf>,
    /// Train nothing; write predictions for the rows of --table, by the weights of --init, to this CSV file
    #[arg(long, value_name = "FILE")]
    predict: Option<PathBuf>,
}

fn predict(job: &Job<'_>, args: &Args, output: &Path) -> Result<()> {
    let weights = job.settings().init.path();
    let weights = weights.ok_or_else(|| Error::usage("--predict needs --init"))?;
    let metadata = read_metadata(weights)?;
    let json = metadata.get("preprocessing");
    let rows = Preprocessing::from_json(json.map_or("", |json| json))?;
    let table = match &args.table {
        Some(path) => rows.open(path)?,
        None => Table::from_csv("generated", &generated(), &TableOptions::default())?,
    };
    let data = Arc::new(rows.transform(&table)?);
    let model = |scope: &mut Scope| Network::new(scope, rows.width());
    let trainer = job.trainer(&data, model, Adam::new);
    let mut trainer = trainer.evaluate_only().start()?;
    let answers = trainer.predict(&data, |net, batch| Ok(net.answers(&batch)?.to_vec()))?;
    let text = rows.predictions(&table, &answers)?;
    match job.is_main() {
        true => fs::write(output, text).map_err(|e| Error::io("cannot write", output, e)),
        false => Ok(()),
    }
}

fn main() -> ExitCode {
    let program = Program::new().defaults(Defaults::new(20, 32, 0.01));
    program.main_with(|job, args: &Args| {
        if let Some(output) = &args.predict {
            return predict(job, args, output);
        }
        let table = match &args.table {
            Some(path) => Table::open(path, &TableOptions::default())?,
            None => Table::from_csv("generated", &generated(), &TableOptions::default())?,
        };
        let target = table.columns().last().copied().unwrap_or_default();
        let [train, test] = table.split(0.1, job.settings().seed);
        let rows = Preprocessing::fit(&train, target, &[])?;
        let train = Arc::new(rows.transform(&train)?);
        let test = Arc::new(rows.transform(&test)?);
        let model = |scope: &mut Scope| Network::new(scope, rows.width());
        let mut trainer = (job.trainer(&train, model, Adam::new))
            .early_stopping(EarlyStopping::new(5))
            .files(Files {
                about: vec![("preprocessing", rows.to_json())],
                model: "table".to_owned(),
                weights: Some("table.safetensors".to_owned()),
                ..Files::default()
            })
            .start()?;
        for _epoch in trainer.epochs() {
            for batch in trainer.batches(&train)? {
                trainer.step(&batch, |net, batch| net.loss(&batch, Reduction::Mean))?;
            }
            trainer.evaluate(&test, |net, batch| {
                Ok(Measure::of_loss(net.loss(&batch, Reduction::Sum)?))
            })?;
        }
        trainer.finish().map(drop)
    })
}
