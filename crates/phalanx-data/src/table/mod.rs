//! Tables: CSV and Parquet files of numbers and categories, with gaps.
//!
//! ```
//! use phalanx_data::table::{Preprocessing, Table, TableOptions};
//!
//! # fn main() -> phalanx_base::Result<()> {
//! let text = "area,city,price\n50,Oslo,100\n,Bergen,150\n90,Oslo,200\n70,,150\n";
//! let table = Table::from_csv("flats.csv", text, &TableOptions::default())?;
//! let [train, test] = table.split(0.25, 1);
//! let preprocessing = Preprocessing::fit(&train, "price", &[])?;
//! let (train, test) = (preprocessing.transform(&train)?, preprocessing.transform(&test)?);
//! # let _ = (train, test);
//! # Ok(())
//! # }
//! ```

use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;

use phalanx_base::files::{open_regular, read_open};
use phalanx_base::{Error, Result};

use crate::text_files::utf8;
use crate::words::Words;

mod preprocessing;
mod read;
#[cfg(test)]
mod tests;

pub use preprocessing::{Preprocessing, TableBatch, TableDataset};
use read::Columns;

/// Most bytes of a CSV file.
const MAX_BYTES: u64 = 4 << 30;
/// Separates the random numbers of [`Table::split`] from others.
const SPLIT: u64 = 0x7461_626c_6500_0000;

/// How a table is read.
#[derive(Clone, Debug, Default)]
pub struct TableOptions {
    /// Between the fields of a CSV file; without it `,`, `;` or a tab, whichever is most frequent in the header.
    pub delimiter: Option<char>,
    /// Columns whose values are categories, whatever they look like: `01234`, or classes that are numbers.
    pub categories: Vec<String>,
    /// The only columns that are read; all where there are none.
    pub columns: Vec<String>,
    /// Columns that are not read.
    pub drop: Vec<String>,
}

/// A column of a table.
#[derive(Debug)]
struct Column {
    name: String,
    /// The categories, sorted: numbers by value, then texts by bytes. None where the values are numbers.
    names: Vec<String>,
    /// Numbers, or the places of categories in `names`; NaN where a value is missing.
    values: Vec<f64>,
}

/// Rows of named columns, in memory: numbers, and categories, which are texts. Values may be missing.
///
/// A column is of categories if its first value is no number. A column of both is an error, which names the line, unless
/// [`TableOptions::categories`] has it. In CSV files, an empty field, `NA`, `N/A`, `NaN`, `nan`, `null` and `NULL` are missing values, and spaces
/// around a field do not count.
#[derive(Clone, Debug)]
pub struct Table {
    name: String,
    columns: Arc<[Column]>,
    unused: Arc<[String]>,
    /// Their numbers in the file, from 0.
    rows: Vec<u32>,
}

impl Table {
    /// Reads the CSV file at `path`, which has a header, or a Parquet file (feature `parquet`).
    ///
    /// # Errors
    ///
    /// `Usage` when there is no such file, a column of `options` is missing, or Parquet is not built in; `Data`, naming file, line and column,
    /// when it is not UTF-8, larger than 4 GiB, has no header or no rows, two columns of one name, a row of another number of
    /// fields, or a column of both numbers and texts.
    pub fn open(path: &Path, options: &TableOptions) -> Result<Table> {
        let file = open_regular(path).map_err(|e| Error::not_opened("table", path, e))?;
        let mut magic = [0; 4];
        let is_parquet = file.read_exact_at(&mut magic, 0).is_ok() && &magic == b"PAR1";
        let shown = path.display().to_string();
        if is_parquet {
            return Table::of(&shown, read::parquet(&shown, file, options)?);
        }
        let bytes = read_open(path, file, MAX_BYTES)?;
        let text = utf8(path, 0, &bytes, true)?;
        let text = text.strip_prefix('\u{feff}').unwrap_or(text);
        Table::from_csv(&shown, text, options)
    }

    /// As [`open`](Self::open), of the text of a CSV file; errors call it `name`.
    ///
    /// # Errors
    ///
    /// As [`open`](Self::open).
    pub fn from_csv(name: &str, text: &str, options: &TableOptions) -> Result<Table> {
        Table::of(name, read::csv(name, text, options)?)
    }

    fn of(name: &str, mut read: Columns) -> Result<Table> {
        let unused = std::mem::take(&mut read.unused);
        let columns = read.finish();
        let rows = columns.first().map_or(0, |column| column.values.len());
        match u32::try_from(rows) {
            Ok(0) | Err(_) => Err(Error::data(format!("{name} has {rows} rows"))),
            Ok(rows) => Ok(Table {
                name: name.to_owned(),
                columns: columns.into(),
                unused: unused.into(),
                rows: (0..rows).collect(),
            }),
        }
    }

    /// Number of rows.
    pub fn len(&self) -> usize {
        self.rows.len()
    }

    /// Whether there are no rows.
    pub fn is_empty(&self) -> bool {
        self.rows.is_empty()
    }

    /// Names of the columns.
    pub fn columns(&self) -> Vec<&str> {
        self.columns.iter().map(|column| &*column.name).collect()
    }

    /// Names of the file's columns that were not read.
    pub fn unused(&self) -> &[String] {
        &self.unused
    }

    /// Divides the rows into two: a share `held_out` (0 to 1, rounded; at least one row on each side where there are two) is drawn
    /// by `seed` for the second. Both keep the order of the file.
    pub fn split(&self, held_out: f64, seed: u64) -> [Table; 2] {
        let mut order = self.rows.clone();
        let mut words = Words::new(seed ^ SPLIT, 0);
        for last in (1..order.len()).rev() {
            order.swap(last, words.below(last as u32 + 1) as usize);
        }
        let most = order.len().saturating_sub(1);
        let share = (order.len() as f64 * held_out).round() as usize;
        let share = share.clamp(1.min(most), most);
        let part = |rows: &[u32]| {
            let mut rows = rows.to_vec();
            rows.sort_unstable();
            Table {
                rows,
                ..self.clone()
            }
        };
        [part(&order[share..]), part(&order[..share])]
    }

    /// Without the rows in which `column` has no value.
    ///
    /// # Errors
    ///
    /// `Usage` when there is no such column.
    pub fn without_missing(&self, column: &str) -> Result<Table> {
        let values = &self.find(column)?.values;
        let rows = self.rows.iter().copied();
        let rows = rows.filter(|row| !values[*row as usize].is_nan());
        Ok(Table {
            rows: rows.collect(),
            ..self.clone()
        })
    }

    fn find(&self, name: &str) -> Result<&Column> {
        let found = self.columns.iter().find(|column| column.name == name);
        found.ok_or_else(|| no_columns(&self.name, &[name], &self.columns()))
    }

    /// The values of a column in the table's rows.
    fn values<'c>(&self, column: &'c Column) -> impl Iterator<Item = f64> + Clone + use<'_, 'c> {
        self.rows.iter().map(|row| column.values[*row as usize])
    }
}

/// The error for columns that a table does not have.
fn no_columns(table: &str, names: &[&str], has: &[&str]) -> Error {
    let names: Vec<String> = names.iter().map(|name| format!("{name:?}")).collect();
    let what = format!("{table} has no column {}", names.join(", "));
    Error::usage(what).note("it has", has.join(", "))
}
