//! Parquet files, a row group at a time.
//!
//! Columns are compressed by Snappy, gzip or LZ4, or not at all; Zstandard and Brotli are not read.

use std::fmt::Display;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;

pub use parquet::file::reader::ChunkReader;
use parquet::file::reader::{FileReader, SerializedFileReader};
use parquet::record::reader::RowIter;
pub use parquet::record::{Field, Row};
use phalanx_base::files::open_regular;
use phalanx_base::{Error, Result, refuse};

/// An open Parquet file.
///
/// ```no_run
/// use phalanx_data::parquet::{Field, ParquetFile};
///
/// # fn main() -> phalanx_base::Result<()> {
/// let file = ParquetFile::open("texts.parquet".as_ref())?;
/// for group in 0..file.row_groups().len() {
///     file.read(group, |row| {
///         for (name, value) in row.get_column_iter() {
///             if let ("text", Field::Str(text)) = (&**name, value) {
///                 println!("{text}");
///             }
///         }
///         Ok(())
///     })?;
/// }
/// # Ok(())
/// # }
/// ```
pub struct ParquetFile {
    reader: Box<dyn FileReader>,
    /// For messages.
    name: String,
}

impl ParquetFile {
    /// Opens the file at `path`, and reads its schema.
    ///
    /// # Errors
    ///
    /// `Usage` when there is no such file; `Data`, naming it, when it is damaged.
    pub fn open(path: &Path) -> Result<Self> {
        let file = open_regular(path).map_err(|e| Error::not_opened("Parquet file", path, e))?;
        Self::new(&path.display().to_string(), file)
    }

    /// As [`open`](Self::open), of a file or whatever else gives parts of one; errors call it `name`.
    ///
    /// # Errors
    ///
    /// As [`open`](Self::open).
    pub fn new(name: &str, file: impl ChunkReader + 'static) -> Result<Self> {
        let bytes = file.len();
        let reader = guarded(name, || {
            SerializedFileReader::new(file).map_err(|e| damaged(name, e))
        })?;
        let groups = reader.metadata().row_groups().iter();
        for chunk in groups.flat_map(|group| group.columns()) {
            let first = chunk.dictionary_page_offset().unwrap_or(i64::MAX);
            let range = [first.min(chunk.data_page_offset()), chunk.compressed_size()];
            let [first, length] = range.map(|at| u64::try_from(at).unwrap_or(u64::MAX));
            if first.saturating_add(length) > bytes {
                let what = format!("column {} is not all in the file", chunk.column_path());
                return Err(damaged(name, what));
            }
        }
        Ok(ParquetFile {
            reader: Box::new(reader),
            name: name.to_owned(),
        })
    }

    /// Names of the columns, in the order of a row's.
    pub fn columns(&self) -> Vec<String> {
        let schema = self.reader.metadata().file_metadata().schema();
        let columns = schema.get_fields().iter();
        columns.map(|column| column.name().to_owned()).collect()
    }

    /// Number of rows of each row group.
    pub fn row_groups(&self) -> Vec<usize> {
        let groups = self.reader.metadata().row_groups().iter();
        let rows = groups.map(|group| usize::try_from(group.num_rows()).unwrap_or(usize::MAX));
        rows.collect()
    }

    /// Calls `each` with the rows of row group `group`: their values by the names of the columns.
    ///
    /// # Errors
    ///
    /// `Usage` when the row group is not there; `Data`, naming the file, when it is damaged, or compressed in a way that is not
    /// read; those of `each`.
    pub fn read(&self, group: usize, mut each: impl FnMut(Row) -> Result<()>) -> Result<()> {
        let (name, groups) = (&self.name, self.reader.num_row_groups());
        if group >= groups {
            refuse!("{name} has {groups} row groups, so there is no {group}");
        }
        guarded(name, || {
            let group = self.reader.get_row_group(group);
            let group = group.map_err(|e| damaged(name, e))?;
            let mut rows = RowIter::from_row_group(None, &*group).map_err(|e| damaged(name, e))?;
            rows.try_for_each(|row| each(row.map_err(|e| damaged(name, e))?))
        })
    }
}

/// What `work` gives. Of some damaged files, the crate makes assertions.
fn guarded<T>(name: &str, work: impl FnOnce() -> Result<T>) -> Result<T> {
    let outcome = catch_unwind(AssertUnwindSafe(work));
    outcome.unwrap_or_else(|_| Err(damaged(name, "it is damaged")))
}

fn damaged(name: &str, error: impl Display) -> Error {
    Error::data(format!("{name}: {error}"))
}
