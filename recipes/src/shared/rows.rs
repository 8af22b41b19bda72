//! Rows of a CSV or Parquet file, for training and for tests.

use std::path::{Path, PathBuf};

use phalanx::data::table::{Preprocessing, Table, TableDataset, TableOptions};
use phalanx::prelude::*;
use phalanx_base::files::is_file;

use crate::format::plural;

/// Flags about a table.
#[derive(Debug, Clone, clap::Args)]
pub struct RowArgs {
    /// CSV file with a header, or Parquet file (built with --features parquet)
    #[arg(long, value_name = "FILE")]
    data: Option<PathBuf>,
    /// Column to predict: a number, or a class where its values are texts
    #[arg(long, value_name = "COLUMN")]
    target: Option<String>,
    /// Columns to predict it from [default: all others]
    #[arg(long, value_delimiter = ',', value_name = "COLUMN,...")]
    features: Vec<String>,
    /// Columns to leave out
    #[arg(long, value_delimiter = ',', value_name = "COLUMN,...")]
    drop: Vec<String>,
    /// Columns whose numbers are categories; with the target's name, they are classes
    #[arg(long, value_delimiter = ',', value_name = "COLUMN,...")]
    categories: Vec<String>,
    /// What stands for missing numbers: mean, median, most_frequent or a value; COLUMN=RULE for one column, which may have categories
    #[arg(long, value_delimiter = ',', value_name = "[COLUMN=]RULE,...")]
    fill: Vec<String>,
    /// Share of the rows that is held out for tests, drawn by --seed
    #[arg(long, default_value_t = 0.1, value_name = "SHARE")]
    held_out: f64,
}

impl RowArgs {
    /// Checks them, before any rank is started; with a target, if the program `trains`.
    ///
    /// # Errors
    ///
    /// Usage, naming the flag or the file.
    pub fn check(&self, trains: bool) -> Result<()> {
        if !(self.held_out > 0.0 && self.held_out < 1.0) {
            return Err(Error::usage("--held-out must lie between 0 and 1"));
        }
        if trains {
            self.target()?;
        }
        let data = self.data()?;
        match is_file(data)? {
            true => Ok(()),
            false => Err(Error::usage(format!("there is no file {}", data.display()))),
        }
    }

    /// The file.
    ///
    /// # Errors
    ///
    /// Usage, when it is not given.
    pub fn data(&self) -> Result<&Path> {
        let none = || Error::usage("train table needs --data FILE, a CSV or Parquet file");
        self.data.as_deref().ok_or_else(none)
    }

    fn target(&self) -> Result<&str> {
        let none = || Error::usage("train table needs --target COLUMN, which is predicted");
        self.target.as_deref().ok_or_else(none)
    }

    /// What becomes of the columns, and the rows for training and for tests.
    ///
    /// # Errors
    ///
    /// Usage and data, naming file, line and column.
    pub fn load(&self, job: &Job<'_>) -> Result<(Preprocessing, [Arc<TableDataset>; 2])> {
        let _phase = job.context().phase("loading data");
        let (target, mut columns) = (self.target()?, self.features.clone());
        if !columns.is_empty() {
            columns.push(target.to_owned());
        }
        let (categories, drop) = (self.categories.clone(), self.drop.clone());
        let options = TableOptions {
            categories,
            columns,
            drop,
            delimiter: None,
        };
        let all = Table::open(self.data()?, &options)?;
        let known = all.without_missing(target)?;
        if known.len() < all.len() {
            let rows = plural(all.len() - known.len(), "row");
            job.warn(&format!("left out: {rows} without a value of {target:?}"));
        }
        let [train, test] = known.split(self.held_out, job.settings().seed);
        if test.is_empty() {
            let what = format!("{target:?} needs values in two rows, one for tests");
            return Err(Error::usage(what));
        }
        let rows = Preprocessing::fit(&train, target, &self.fill)?;
        let (train, test) = (rows.transform(&train)?, rows.transform(&test)?);
        test.warnings().iter().for_each(|text| job.warn(text));
        Ok((rows, [Arc::new(train), Arc::new(test)]))
    }
}
