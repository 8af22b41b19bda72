//! Reads files into columns.

use std::cmp::Ordering;
use std::collections::{BTreeSet, HashMap};
use std::fs::File;

use csv::{ReaderBuilder, StringRecord, Trim};
use phalanx_base::{Error, Result};

use super::{Column, TableOptions, no_columns};

/// Most columns of a table.
const MAX_COLUMNS: usize = 100_000;
/// Most bytes of a field: a quotation mark that is not closed takes in the rest of the file.
const MAX_FIELD: usize = 1 << 20;
/// Most rows of a Parquet file: a few bytes may stand for billions of gaps.
#[cfg(feature = "parquet")]
const MAX_ROWS: usize = 1 << 28;
/// Fields that stand for a missing value.
const GAPS: [&str; 7] = ["", "NA", "N/A", "NaN", "nan", "null", "NULL"];

/// The columns of a file.
pub(super) struct Columns {
    reading: Vec<Reading>,
    /// Names of those that are not read.
    pub(super) unused: Vec<String>,
}

/// A column that is read.
struct Reading {
    name: String,
    /// Its place in a row.
    index: usize,
    /// Its values are categories, whatever they look like.
    is_asked: bool,
    /// Whether they are, once there is one.
    has_categories: Option<bool>,
    values: Vec<f64>,
    /// The categories, in order of appearance.
    names: HashMap<String, usize>,
}

fn number(text: &str) -> Option<f64> {
    text.parse().ok().filter(|number: &f64| number.is_finite())
}

/// The beginning of a value, for messages.
pub(super) fn short(text: &str) -> String {
    format!("{:?}", text.chars().take(40).collect::<String>())
}

/// The order of categories: numbers by value, then texts by bytes.
pub(super) fn in_order(a: &str, b: &str) -> Ordering {
    let [x, y] = [a, b].map(|name| number(name).unwrap_or(f64::INFINITY));
    x.total_cmp(&y).then_with(|| a.cmp(b))
}

impl Reading {
    /// Adds the value of the row that `place` names.
    fn add(&mut self, field: &str, place: impl Fn() -> String) -> Result<()> {
        let wrong = |what: &str| {
            let (field, place) = (short(field), place());
            let what = format!("{place}: {field} is {what} (column {:?})", self.name);
            let fix = "the value, or read the column as categories, or drop it";
            Err(Error::data(what).note("fix", fix))
        };
        if GAPS.contains(&field) {
            self.values.push(f64::NAN);
            return Ok(());
        }
        if field.len() > MAX_FIELD {
            return wrong("longer than 1 MiB; a quotation mark may not be closed");
        }
        let found = number(field);
        let starts = found.is_none() || self.is_asked;
        let value = match (*self.has_categories.get_or_insert(starts), found) {
            (false, Some(found)) => found,
            (false, None) => return wrong("not a number, as values before it"),
            (true, Some(_)) if !self.is_asked => return wrong("a number, unlike values before it"),
            (true, _) => match self.names.get(field) {
                Some(code) => *code as f64,
                None => {
                    let code = self.names.len();
                    self.names.insert(field.to_owned(), code);
                    code as f64
                }
            },
        };
        self.values.push(value);
        Ok(())
    }

    fn finish(mut self) -> Column {
        let mut sorted: Vec<(String, usize)> = self.names.into_iter().collect();
        sorted.sort_by(|(a, _), (b, _)| in_order(a, b));
        let mut places = vec![0.0; sorted.len()];
        for (place, (_, code)) in sorted.iter().enumerate() {
            places[*code] = place as f64;
        }
        if !sorted.is_empty() {
            let known = self.values.iter_mut().filter(|code| !code.is_nan());
            known.for_each(|code| *code = places[*code as usize]);
        }
        Column {
            name: self.name,
            names: sorted.into_iter().map(|(name, _)| name).collect(),
            values: self.values,
        }
    }
}

impl Columns {
    /// Those of the file `name` with this header.
    fn new(name: &str, header: &[&str], options: &TableOptions) -> Result<Columns> {
        let mut seen = BTreeSet::new();
        let twice = header.iter().find(|column| !seen.insert(**column));
        let wrong = match (header.iter().position(|column| column.is_empty()), twice) {
            _ if header.len() > MAX_COLUMNS => format!("more than {MAX_COLUMNS} columns"),
            _ if header.iter().all(|field| number(field).is_some()) => {
                "numbers only; the first line has the names of the columns".to_owned()
            }
            (Some(index), _) => format!("column {} has no name", index + 1),
            (_, Some(twice)) => format!("two columns are called {twice:?}"),
            _ => String::new(),
        };
        if !wrong.is_empty() {
            return Err(Error::data(format!("{name}, the header: {wrong}")));
        }
        let (asked, wanted, drop) = (&options.categories, &options.columns, &options.drop);
        let named = [asked, wanted, drop].into_iter().flatten();
        let missing = named
            .map(|name| &**name)
            .filter(|name| !seen.contains(name));
        let missing: BTreeSet<&str> = missing.collect();
        if !missing.is_empty() {
            let missing: Vec<&str> = missing.into_iter().collect();
            return Err(no_columns(name, &missing, header));
        }
        let has = |list: &[String], column: &str| list.iter().any(|name| name == column);
        let is_read = |column: &str| wanted.is_empty() || has(wanted, column);
        let (mut reading, mut unused) = (Vec::new(), Vec::new());
        for (index, column) in header.iter().enumerate() {
            let name = (*column).to_owned();
            match is_read(column) && !has(drop, column) {
                true => reading.push(Reading {
                    name,
                    index,
                    is_asked: has(asked, column),
                    has_categories: None,
                    values: Vec::new(),
                    names: HashMap::new(),
                }),
                false => unused.push(name),
            }
        }
        Ok(Columns { reading, unused })
    }

    /// The columns when all rows are read.
    pub(super) fn finish(self) -> Vec<Column> {
        self.reading.into_iter().map(Reading::finish).collect()
    }
}

/// The most frequent of `,`, `;` and the tab in the header; the comma where none is.
fn delimiter(text: &str) -> char {
    let header = text.lines().next().unwrap_or_default();
    // Not those within quotation marks.
    let count = |delimiter: &char| -> usize {
        let outside = header.split('"').step_by(2);
        outside.map(|part| part.matches(*delimiter).count()).sum()
    };
    ['\t', ';', ',']
        .into_iter()
        .max_by_key(count)
        .unwrap_or(',')
}

/// The columns of the CSV file with this text.
pub(super) fn csv(name: &str, text: &str, options: &TableOptions) -> Result<Columns> {
    let delimiter = options.delimiter.unwrap_or_else(|| delimiter(text));
    let byte = u8::try_from(delimiter).ok().filter(u8::is_ascii);
    let no_byte = || Error::usage(format!("the delimiter {delimiter:?} is not ASCII"));
    let mut reader = ReaderBuilder::new()
        .has_headers(false)
        .flexible(true)
        .trim(Trim::All)
        .delimiter(byte.ok_or_else(no_byte)?)
        .from_reader(text.as_bytes());
    let mut row = StringRecord::new();
    let mut next = |row: &mut StringRecord| {
        let read = reader.read_record(row);
        read.map_err(|e| Error::data(format!("{name}: {e}")))
    };
    if !next(&mut row)? {
        return Err(Error::data(format!("{name} is empty, without a header")));
    }
    let header: Vec<&str> = row.iter().collect();
    let (mut columns, fields) = (Columns::new(name, &header, options)?, header.len());
    while next(&mut row)? {
        // Empty lines before the row are skipped with it.
        let place = || {
            let at = row.position().map_or(0, |at| at.byte() as usize);
            let rest = text[at..].trim_start_matches(['\r', '\n']).len();
            let line = 1 + text[..text.len() - rest].matches('\n').count();
            format!("{name}, line {line}")
        };
        if row.len() != fields {
            let what = format!("{}: {} of {fields} columns", place(), row.len());
            return Err(Error::data(what));
        }
        for column in &mut columns.reading {
            column.add(row.get(column.index).unwrap_or_default(), place)?;
        }
    }
    Ok(columns)
}

/// The columns of a Parquet file.
#[cfg(feature = "parquet")]
pub(super) fn parquet(name: &str, file: File, options: &TableOptions) -> Result<Columns> {
    use crate::parquet::{Field, ParquetFile};
    let file = ParquetFile::new(name, file)?;
    let rows = file.row_groups().into_iter().fold(0, usize::saturating_add);
    if rows > MAX_ROWS {
        let what = format!("{name} has {rows} rows; {MAX_ROWS} are the most");
        return Err(Error::data(what));
    }
    let header = file.columns();
    let header: Vec<&str> = header.iter().map(|name| &**name).collect();
    let (mut columns, mut number) = (Columns::new(name, &header, options)?, 0);
    for group in 0..file.row_groups().len() {
        file.read(group, |row| {
            number += 1;
            let fields: Vec<&Field> = row.get_column_iter().map(|(_, field)| field).collect();
            for column in &mut columns.reading {
                let place = || format!("{name}, row {number}");
                match fields.get(column.index) {
                    None | Some(Field::Null) => column.add("", place)?,
                    Some(Field::Str(text)) => {
                        // The file says that it is text.
                        column.is_asked = true;
                        column.add(text, place)?;
                    }
                    Some(field) if field.is_primitive() && !matches!(field, Field::Bytes(_)) => {
                        column.add(&field.to_string(), place)?;
                    }
                    Some(_) => {
                        let what = format!(
                            "{name}: column {:?} has lists, or bytes that are not marked as text",
                            column.name
                        );
                        return Err(Error::data(what).note("fix", "drop the column"));
                    }
                }
            }
            Ok(())
        })?;
    }
    Ok(columns)
}

/// The error for Parquet files, which this build does not read.
#[cfg(not(feature = "parquet"))]
pub(super) fn parquet(name: &str, _file: File, _options: &TableOptions) -> Result<Columns> {
    let what = format!("{name} is a Parquet file, and this program is built without them");
    let build = "it with the feature parquet: cargo build --release --features parquet";
    Err(Error::usage(what).note("build", build))
}
