//! Regression on a table of your own: a CSV file with a header, whose last column is the target. The training stops when the
//! test loss has not improved for five epochs. A second start with `--predict` writes the predictions of the best weights.
//! `cargo run --release -p phalanx --example own_table -- --nproc-per-node 2 --table FILE.csv --output-dir run`
//! `cargo run --release -p phalanx --example own_table -- --table FILE.csv --init run/best.safetensors --predict out.csv`

use std::fs;
use std::path::{Path, PathBuf};

use phalanx::prelude::*;

/// Rows of numbers; the last of each is the target.
struct Table {
    columns: usize,
    rows: Vec<Vec<f32>>,
}

impl Table {
    fn read(path: &str) -> Result<Table> {
        let wrong = |line: usize, what: String| Error::data(format!("{path}, line {line}: {what}"));
        let text = fs::read_to_string(path);
        let text = text.map_err(|error| Error::not_opened("table", Path::new(path), error))?;
        let mut lines = text.lines().zip(1..);
        let columns = lines
            .next()
            .map_or(0, |(header, _)| header.split(',').count());
        let mut rows = Vec::new();
        for (text, line) in lines {
            let row = text.split(',').map(|cell| {
                let number = cell.trim().parse::<f32>();
                number.map_err(|_| wrong(line, format!("\"{cell}\" is not a number")))
            });
            let row = row.collect::<Result<Vec<f32>>>()?;
            if row.len() != columns {
                return Err(wrong(line, format!("{} of {columns} columns", row.len())));
            }
            rows.push(row);
        }
        Ok(Table { columns, rows })
    }

    /// y = 3 a - 2 b + 1.
    fn generated() -> Table {
        let row = |i: u32| {
            let (a, b) = ((i % 64) as f32 / 64.0, (i / 64) as f32 / 64.0);
            vec![a, b, 3.0 * a - 2.0 * b + 1.0]
        };
        Table {
            columns: 3,
            rows: (0..4096).map(row).collect(),
        }
    }

    /// Every tenth row is for the test.
    fn split(self) -> (Arc<Table>, Arc<Table>) {
        let columns = self.columns;
        let of = |rows| Arc::new(Table { columns, rows });
        let (mut train, mut test) = (Vec::new(), Vec::new());
        for (i, row) in self.rows.into_iter().enumerate() {
            match i % 10 {
                0 => test.push(row),
                _ => train.push(row),
            }
        }
        (of(train), of(test))
    }
}

impl Dataset for Table {
    /// Features of all samples one after the other, and a target a sample.
    type Batch = (Vec<f32>, Vec<f32>);

    fn len(&self) -> usize {
        self.rows.len()
    }

    fn read_batch(
        &self,
        _epoch: u64,
        indices: &[u64],
        (features, targets): &mut Self::Batch,
    ) -> Result<()> {
        features.clear();
        targets.clear();
        for &index in indices {
            if let Some((target, values)) = self.rows[index as usize].split_last() {
                features.extend(values);
                targets.push(*target);
            }
        }
        Ok(())
    }

    fn describe(&self) -> String {
        format!("a table of {} columns", self.columns)
    }
}

type Rows<'s> = MicroBatch<'s, (Vec<f32>, Vec<f32>)>;

struct Network(Linear, Linear);

impl Network {
    fn new(scope: &mut Scope, features: usize) -> Network {
        let hidden = Linear::new(scope.enter("hidden"), features, 32);
        Network(hidden, Linear::new(scope.enter("output"), 32, 1))
    }

    /// What it takes the targets for, a row each.
    fn answers<'s>(&self, batch: &Rows<'s>) -> Result<Tensor<'s>> {
        let (features, targets) = batch.data();
        let columns = features.len() / targets.len().max(1);
        let x = batch.input(features, &[batch.samples(), columns])?;
        self.1.forward(self.0.forward_act(x, Act::Relu)?)
    }

    /// The squared error, as a mean or a sum over the batch.
    fn loss<'s>(&self, batch: &Rows<'s>, reduction: Reduction) -> Result<Tensor<'s>> {
        let (_, targets) = batch.data();
        self.answers(batch)?.mse_loss(targets, reduction)
    }
}

/// Writes target and answer of each row.
fn write(path: &Path, table: &Table, answers: &[f32]) -> Result<()> {
    let mut text = String::from("target,prediction\n");
    for (row, answer) in table.rows.iter().zip(answers) {
        let target = row.last().copied().unwrap_or_default();
        text.push_str(&format!("{target},{answer}\n"));
    }
    fs::write(path, text).map_err(|error| Error::io("cannot write", path, error))
}

#[derive(clap::Args)]
struct Args {
    /// CSV file with a header; the last column is the target [default: generated rows]
    #[arg(long)]
    table: Option<String>,
    /// Train nothing; write target and prediction of each row of the test to this CSV file
    #[arg(long, value_name = "FILE")]
    predict: Option<PathBuf>,
}

fn main() -> ExitCode {
    let program = Program::new().defaults(Defaults::new(20, 32, 0.01));
    program.main_with(|job, args: &Args| {
        let table = match &args.table {
            Some(path) => Table::read(path)?,
            None => Table::generated(),
        };
        let features = table.columns.saturating_sub(1);
        let (train, test) = table.split();
        let model = |scope: &mut Scope| Network::new(scope, features);
        if let Some(path) = &args.predict {
            let trainer = job.trainer(&test, model, Adam::new);
            let mut trainer = trainer.evaluate_only().start()?;
            let answers = trainer.predict(&test, |net, batch| Ok(net.answers(&batch)?.to_vec()))?;
            return match job.is_main() {
                true => write(path, &test, &answers),
                false => Ok(()),
            };
        }
        let trainer = job.trainer(&train, model, Adam::new);
        let mut trainer = trainer.early_stopping(EarlyStopping::new(5)).start()?;
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
