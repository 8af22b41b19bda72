//! `train table`: predicts a column of a CSV or Parquet file from the others, a number or a class.

use std::path::PathBuf;

use phalanx::Subcommand;
use phalanx::prelude::*;
use phalanx::train::check_folder_of;

use crate::error::check_count;
use crate::format::{number, thousands};
use crate::shared::rows::RowArgs;
use crate::shared::table::{TableNet, check_hidden, in_units_of_the_target, measure, predict};

pub fn program() -> Subcommand {
    Program::new()
        .name("table")
        .about("Predicts a column of a CSV or Parquet file from the others, a number or a class")
        .defaults(Defaults::new(20, 64, 0.001))
        .check(TableArgs::check)
        .subcommand(train)
}

/// Flags of `train table`.
#[derive(Debug, Clone, clap::Args)]
struct TableArgs {
    #[command(flatten)]
    rows: RowArgs,
    /// Sizes of the hidden layers
    #[arg(
        long,
        value_delimiter = ',',
        default_value = "64,64",
        value_name = "N,..."
    )]
    hidden: Vec<usize>,
    /// Stop when the accuracy, or the loss where the target is a number, has not improved for N epochs
    #[arg(long, value_name = "N")]
    patience: Option<usize>,
    /// Train nothing: write predictions for all rows of --data to this CSV file, by the weights of --init
    #[arg(long, value_name = "FILE")]
    predict: Option<PathBuf>,
}

fn train(job: &Job<'_>, args: &TableArgs) -> Result<()> {
    if let Some(output) = &args.predict {
        return predict(job, args.rows.data()?, output);
    }
    let (rows, [train, test]) = args.rows.load(job)?;
    let hidden: Vec<String> = args.hidden.iter().map(usize::to_string).collect();
    let counts = [&train, &test].map(|part| thousands(part.len()));
    let task = match rows.classes().len() {
        0 => format!("regression of {}", rows.target()),
        classes => format!("{classes} classes of {}", rows.target()),
    };
    let data = args.rows.data()?.display();
    let description = format!(
        "{data}, {} train / {} test rows, {task}",
        counts[0], counts[1]
    );
    let content = [&train, &test].map(|part| part.content()).join(" + ");
    let net = |scope: &mut Scope| TableNet::new(scope, &rows, &args.hidden);
    let mut builder = (job.trainer(&train, net, Adam::new))
        .title(&format!("network of {} features", rows.width()))
        .data(&description, &content)
        .unit("rows")
        .optimizer_title(&format!("Adam lr {}", number(job.settings().lr())))
        .hyperparameters(vec![format!("--hidden {}", hidden.join(","))])
        .files(Files {
            model: "table".to_owned(),
            about: vec![
                ("preprocessing", rows.to_json()),
                ("hidden", hidden.join(",")),
            ],
            weights: Some("table.safetensors".to_owned()),
            ..Files::default()
        });
    if let Some(patience) = args.patience {
        builder = builder.early_stopping(EarlyStopping::new(patience));
    }
    let mut trainer = builder.start()?;
    trainer.add_to_summary("data", data.to_string());
    trainer.add_to_summary("features", rows.columns());
    for _epoch in trainer.epochs() {
        for batch in trainer.batches(&train)? {
            trainer.step(&batch, |net, batch| {
                let outputs = net.forward(batch.step(), &batch.features)?;
                Ok(match batch.labels.is_empty() {
                    true => outputs.mse_loss(&batch.targets, Reduction::Mean)?,
                    false => outputs.cross_entropy(&batch.labels, Reduction::Mean)?,
                })
            })?;
        }
        let phase = job.context().phase("evaluating");
        let mut evaluation = trainer.measure(&test, measure)?;
        in_units_of_the_target(&mut evaluation, rows.target_scale().1);
        drop(phase);
        trainer.record(evaluation)?;
    }
    trainer.finish().map(drop)
}

impl TableArgs {
    fn check(&self, settings: &Settings, world: usize) -> Result<()> {
        settings.validate(world)?;
        check_hidden("--hidden", &self.hidden)?;
        check_count("--patience", self.patience.unwrap_or(1), usize::MAX)?;
        if let Some(output) = &self.predict {
            check_folder_of("--predict", output)?;
            if settings.init.path().is_none() {
                let what = "--predict needs --init RUN, the folder of a training";
                return Err(Error::usage(what));
            }
        }
        self.rows.check(self.predict.is_none())
    }
}
