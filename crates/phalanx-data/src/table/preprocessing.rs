//! What a network gets of a table's rows.

use std::collections::BTreeMap;
use std::path::Path;

use phalanx_base::text::grouped;
use phalanx_base::{Error, Result, refuse};
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use super::read::{in_order, short};
use super::{Column, Table, TableOptions};
use crate::Dataset;
use crate::metrics::argmax;

/// Most categories of a column, and most classes.
const MAX_CATEGORIES: usize = 1000;

/// What becomes of a column: `(x - mean) / std` of a number, a feature for each category.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
struct Encoding {
    column: String,
    /// The categories; none where the column has numbers.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    categories: Vec<String>,
    /// Stands for missing values: a number, or the place of a category.
    fill: f64,
    /// Of numbers; 0 and 1 for categories.
    mean: f64,
    std: f64,
}

/// What becomes of the columns of a table: missing values are filled, numbers standardised, and categories become a feature each,
/// as the training part says. It is saved with the weights, as JSON.
///
/// The features are those of scikit-learn's `SimpleImputer`, then `StandardScaler` or `OneHotEncoder(handle_unknown="ignore")`. A
/// target of numbers is standardised too, one of categories becomes the number of a class.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Preprocessing {
    features: Vec<Encoding>,
    target: Encoding,
}

impl Preprocessing {
    /// Fits to `train`: all columns but `target` are features.
    ///
    /// `fill` says what stands for missing values, a rule each: `mean` (without a rule), `median`, `most_frequent` or a number for all
    /// columns of numbers, and `COLUMN=` before it for one column. Missing categories are the most frequent one, or by
    /// `COLUMN=CATEGORY` that one. Of equally frequent values the first in order is taken.
    ///
    /// # Errors
    ///
    /// `Usage`, naming the column, when it is missing, has no value in `train`, has more than 1000 categories, or cannot be
    /// filled so.
    pub fn fit(train: &Table, target: &str, fill: &[String]) -> Result<Preprocessing> {
        for (name, _) in fill.iter().filter_map(|rule| rule.rsplit_once('=')) {
            if train.find(name)?.name == target {
                let what = format!("{target:?} is the column to predict; it cannot be filled");
                return Err(Error::usage(what).note("rows without it", "are left out"));
            }
        }
        let (target, mut features) = (train.find(target)?, Vec::new());
        for column in (train.columns.iter()).filter(|column| column.name != target.name) {
            features.push(Encoding::fit(train, column, fill)?);
        }
        if features.is_empty() {
            refuse!("{} has no column but {:?}", train.name, target.name);
        }
        let mut fitted = Encoding::fit(train, target, &[])?;
        // Classes that are in the other part only are known too.
        fitted.categories.clone_from(&target.names);
        let classes = fitted.categories.len();
        if classes > MAX_CATEGORIES {
            let (table, column) = (&train.name, &target.name);
            refuse!("{table}, column {column:?}: {classes} classes; {MAX_CATEGORIES} are the most");
        }
        let target = fitted;
        Ok(Preprocessing { features, target })
    }

    /// As [`to_json`](Self::to_json) gave it.
    ///
    /// # Errors
    ///
    /// `Data` when it is not that.
    pub fn from_json(text: &str) -> Result<Preprocessing> {
        let wrong = |why: String| Error::data(format!("no preprocessing of a table: {why}"));
        let read: Preprocessing = serde_json::from_str(text).map_err(|e| wrong(e.to_string()))?;
        if read.features.is_empty() {
            return Err(wrong("it has no features".to_owned()));
        }
        for of in read.features.iter().chain([&read.target]) {
            let count = of.categories.len();
            let is_place = of.fill >= 0.0 && of.fill < count as f64;
            let is_sound = count == 0 || is_place && [of.mean, of.std] == [0.0, 1.0];
            if !(of.std > 0.0 && count <= MAX_CATEGORIES && is_sound) {
                return Err(wrong(format!("column {:?} is impossible", of.column)));
            }
        }
        Ok(read)
    }

    /// All of it, for [`from_json`](Self::from_json).
    pub fn to_json(&self) -> String {
        serde_json::json!(self).to_string()
    }

    /// Names of the columns that are features.
    pub fn columns(&self) -> Vec<&str> {
        self.features.iter().map(|of| &*of.column).collect()
    }

    /// Number of features of a row.
    pub fn width(&self) -> usize {
        let widths = self.features.iter().map(|of| of.categories.len().max(1));
        widths.sum()
    }

    /// The name of the target's column.
    pub fn target(&self) -> &str {
        &self.target.column
    }

    /// The classes, by label; none where the target is a number.
    pub fn classes(&self) -> &[String] {
        &self.target.categories
    }

    /// Mean and standard deviation of a target of numbers in the training part: a network's answer `y` means `y * std + mean`.
    pub fn target_scale(&self) -> (f64, f64) {
        (self.target.mean, self.target.std)
    }

    /// Reads the features of the rows of a CSV or Parquet file whose target is to be predicted.
    ///
    /// # Errors
    ///
    /// As [`Table::open`]; `Usage`, naming all columns of features that it has not.
    pub fn open(&self, path: &Path) -> Result<Table> {
        let columns = |of: fn(&Encoding) -> bool| {
            let features = self.features.iter().filter(|feature| of(feature));
            features.map(|feature| feature.column.clone()).collect()
        };
        let options = TableOptions {
            categories: columns(|of| !of.categories.is_empty()),
            columns: columns(|_| true),
            ..TableOptions::default()
        };
        Table::open(path, &options)
    }

    /// The rows of `table` as a network gets them; with targets, if the table has the target's column.
    ///
    /// # Errors
    ///
    /// `Usage`, naming the column, when one is missing, or has numbers instead of categories or the reverse; `Data` when a target
    /// is missing, or a class that the training file had not.
    pub fn transform(&self, table: &Table) -> Result<TableDataset> {
        let (mut warnings, mut wrong) = (Vec::new(), Vec::new());
        let features = self.features.iter();
        let features = features.map(|of| of.encode(table, &mut warnings));
        let features = features.collect::<Result<Vec<_>>>()?;
        let has_target = table.columns().contains(&self.target());
        let target = has_target.then(|| self.target.encode(table, &mut wrong));
        let target = target.transpose()?;
        if has_target && table.without_missing(self.target())?.len() < table.len() {
            wrong.push(format!("{:?} is missing in some rows", self.target()));
        }
        match wrong.first() {
            Some(wrong) => Err(Error::data(format!("{}: {wrong}", table.name))),
            None => Ok(TableDataset {
                preprocessing: self.clone(),
                name: table.name.clone(),
                len: table.len(),
                features,
                target,
                warnings,
            }),
        }
    }

    /// Predictions as a CSV file. A line has the number of the row in the file of `table`, from 1, and what `outputs`, those of
    /// the network for the table's first rows, mean: a number in the target's units, or a class and the probability of each.
    ///
    /// # Errors
    ///
    /// None for outputs of such a network.
    pub fn predictions(&self, table: &Table, outputs: &[f32]) -> Result<String> {
        let (classes, (mean, std)) = (self.classes(), self.target_scale());
        let mut file = csv::Writer::from_writer(Vec::new());
        let failed = |e: csv::Error| Error::internal(format!("predictions are not CSV: {e}"));
        let mut line = vec!["row".to_owned(), self.target().to_owned()];
        line.extend(classes.iter().map(|class| format!("probability_{class}")));
        file.write_record(&line).map_err(failed)?;
        for (row, output) in table.rows.iter().zip(outputs.chunks(classes.len().max(1))) {
            line = vec![(row + 1).to_string()];
            match argmax(output).and_then(|best| classes.get(best)) {
                None => line.push((f64::from(output[0]) * std + mean).to_string()),
                Some(class) => {
                    line.push(class.clone());
                    let highest = output.iter().copied().fold(f32::NEG_INFINITY, f32::max);
                    let shares = output.iter().map(|score| f64::from(score - highest).exp());
                    let sum: f64 = shares.clone().sum();
                    line.extend(shares.map(|share| ((share / sum) as f32).to_string()));
                }
            }
            file.write_record(&line).map_err(failed)?;
        }
        let bytes = file.into_inner();
        let bytes = bytes.map_err(|e| failed(e.into_error().into()))?;
        Ok(String::from_utf8_lossy(&bytes).into_owned())
    }
}

/// The value of the longest run in sorted numbers; the first of equally long ones.
fn most_frequent(sorted: &[f64]) -> f64 {
    let runs = sorted.chunk_by(|a, b| a == b);
    let longest = runs.reduce(|a, b| if b.len() > a.len() { b } else { a });
    longest.map_or(f64::NAN, |run| run[0])
}

/// Mean and standard deviation, 1 where all values are equal: scikit-learn's `_incremental_mean_and_var` and `_is_constant_feature`.
fn scale(values: impl Iterator<Item = f64> + Clone) -> (f64, f64) {
    let count = values.clone().count() as f64;
    let mean = values.clone().sum::<f64>() / count;
    let off = values.map(|value| value - mean);
    let error: f64 = off.clone().sum();
    let squares: f64 = off.map(|off| off * off).sum();
    let variance = (squares - error * error / count) / count;
    let rounding = count * f64::EPSILON * variance + (count * mean * f64::EPSILON).powi(2);
    let is_constant = variance.is_finite() && variance <= rounding;
    (mean, if is_constant { 1.0 } else { variance.sqrt() })
}

impl Encoding {
    fn fit(train: &Table, column: &Column, rules: &[String]) -> Result<Encoding> {
        let wrong = |what: String| {
            let what = format!("{}, column {:?}: {what}", train.name, column.name);
            Err(Error::usage(what).note("fix", "the file, or drop the column"))
        };
        let known = train.values(column).filter(|value| !value.is_nan());
        let mut known: Vec<f64> = known.collect();
        if known.is_empty() {
            return wrong("no row of the training part has a value".to_owned());
        }
        let average = known.iter().sum::<f64>() / known.len() as f64;
        known.sort_by(f64::total_cmp);
        let has_numbers = column.names.is_empty();
        let own = |rule: &&String| {
            rule.rsplit_once('=')
                .is_some_and(|(of, _)| of == column.name)
        };
        let general = |rule: &&String| has_numbers && !rule.contains('=');
        let rule = rules.iter().rfind(own);
        let rule = rule.or_else(|| rules.iter().rfind(general));
        let rule = rule.map(|rule| rule.rsplit('=').next().unwrap_or_default());
        let mut fill = match rule.unwrap_or(if has_numbers { "mean" } else { "most_frequent" }) {
            "most_frequent" => most_frequent(&known),
            "mean" if has_numbers => average,
            "median" if has_numbers => {
                f64::midpoint(known[(known.len() - 1) / 2], known[known.len() / 2])
            }
            constant if has_numbers => match constant.parse() {
                Ok(number) if f64::is_finite(number) => number,
                _ => return wrong(format!("{constant:?} cannot fill numbers")),
            },
            _ => f64::NAN,
        };
        let (mut categories, mut mean, mut std) = (Vec::new(), 0.0, 1.0);
        if has_numbers {
            let filled = train.values(column);
            (mean, std) = scale(filled.map(|value| if value.is_nan() { fill } else { value }));
            if !(fill.is_finite() && mean.is_finite() && std.is_finite()) {
                return wrong("its numbers are too large to be standardised".to_owned());
            }
        } else {
            let frequent = column.names.get(fill as usize).filter(|_| !fill.is_nan());
            let name = frequent.map_or(rule.unwrap_or_default(), String::as_str);
            known.dedup();
            let known = known.iter().map(|place| &*column.names[*place as usize]);
            let mut names: Vec<&str> = known.filter(|known| *known != name).collect();
            names.push(name);
            names.sort_by(|a, b| in_order(a, b));
            if names.len() > MAX_CATEGORIES {
                let count = grouped(names.len() as u64);
                return wrong(format!("{count} categories; {MAX_CATEGORIES} are the most"));
            }
            fill = names.partition_point(|other| in_order(other, name).is_lt()) as f64;
            categories = names.into_iter().map(str::to_owned).collect();
        }
        Ok(Encoding {
            column: column.name.clone(),
            categories,
            fill,
            mean,
            std,
        })
    }

    /// The column in `table`, and in `warnings` what it has that the training part had not.
    fn encode(&self, table: &Table, warnings: &mut Vec<String>) -> Result<Encoded> {
        let column = table.find(&self.column)?;
        let has_numbers = column.names.is_empty();
        if has_numbers != self.categories.is_empty() && table.values(column).any(|v| !v.is_nan()) {
            let is = if has_numbers {
                "numbers, not categories"
            } else {
                "categories, not numbers"
            };
            refuse!("{}: the column {:?} has {is}", table.name, self.column);
        }
        let known: BTreeMap<&String, usize> = self.categories.iter().zip(0..).collect();
        let place = |name| known.get(name).map_or(-1.0, |place| *place as f64);
        let places: Vec<f64> = column.names.iter().map(place).collect();
        let value = |value: f64| match places.get(value as usize) {
            _ if value.is_nan() => self.fill,
            Some(place) => *place,
            None => value,
        };
        let values = table
            .values(column)
            .map(|of| ((value(of) - self.mean) / self.std) as f32);
        let values: Vec<f32> = values.collect();
        let known = table.values(column).filter(|value| !value.is_nan());
        let mut unknown = known.filter(|value| places.get(*value as usize) == Some(&-1.0));
        if let Some(first) = unknown.next() {
            let [rows, all] = [1 + unknown.count(), table.len()].map(|count| grouped(count as u64));
            let (name, first) = (&self.column, short(&column.names[first as usize]));
            warnings.push(format!(
                "{rows} of {all} rows have a category of {name:?} that the training part has not, as {first}"
            ));
        }
        Ok(Encoded {
            categories: self.categories.len(),
            values,
        })
    }
}

/// A column as a network gets it.
struct Encoded {
    /// 0 for numbers.
    categories: usize,
    /// Numbers, or places of categories; -1 for one that is unknown.
    values: Vec<f32>,
}

/// Rows of a table as a network gets them.
pub struct TableDataset {
    preprocessing: Preprocessing,
    name: String,
    len: usize,
    features: Vec<Encoded>,
    target: Option<Encoded>,
    warnings: Vec<String>,
}

/// Some rows.
#[derive(Clone, Debug, Default)]
pub struct TableBatch {
    /// The features of all rows, one row after the other.
    pub features: Vec<f32>,
    /// The standardised target of each row, where it is a number.
    pub targets: Vec<f32>,
    /// The class of each row, where it is a category.
    pub labels: Vec<u32>,
}

impl TableDataset {
    /// Sentences about categories that the training part had not: all their features are 0.
    pub fn warnings(&self) -> &[String] {
        &self.warnings
    }
}

impl Dataset for TableDataset {
    type Batch = TableBatch;

    fn len(&self) -> usize {
        self.len
    }

    fn read_batch(&self, _epoch: u64, indices: &[u64], batch: &mut TableBatch) -> Result<()> {
        batch.features.clear();
        batch.targets.clear();
        batch.labels.clear();
        for &index in indices {
            let row = usize::try_from(index).ok().filter(|row| *row < self.len);
            let row = row.ok_or_else(|| Error::usage(format!("there is no row {index}")))?;
            for column in &self.features {
                let (value, first) = (column.values[row], batch.features.len());
                match column.categories {
                    0 => batch.features.push(value),
                    width => batch.features.resize(first + width, 0.0),
                }
                if column.categories > 0 && value >= 0.0 {
                    batch.features[first + value as usize] = 1.0;
                }
            }
            match &self.target {
                Some(of) if of.categories > 0 => batch.labels.push(of.values[row] as u32),
                Some(of) => batch.targets.push(of.values[row]),
                None => {}
            }
        }
        Ok(())
    }

    fn describe(&self) -> String {
        let (name, width) = (&self.name, self.preprocessing.width());
        format!("{name}, {width} features")
    }

    fn content(&self) -> String {
        let mut hash = Sha256::new_with_prefix(self.preprocessing.to_json());
        let columns = self.features.iter().chain(&self.target);
        let values = columns.flat_map(|column| &column.values);
        values.for_each(|value| hash.update(value.to_le_bytes()));
        let hash = hex::encode(hash.finalize());
        format!("table of {} rows, SHA-256 {hash:.16}", self.len)
    }

    fn class_names(&self) -> Vec<String> {
        self.preprocessing.classes().to_vec()
    }
}
