//! What records and files of a run have, for trackers.

use std::collections::BTreeMap;
use std::path::Path;

use phalanx_base::files::Dir;
use serde_json::Value;

use crate::{Error, ErrorKind, Result};

/// Largest image or table.
const LARGEST: u64 = 64 << 20;

/// The rows of predictions that programs write.
const PREDICTIONS_FILE: &str = "predictions.jsonl";
/// Their images.
#[cfg(feature = "images")]
const PICTURES_FILE: &str = "predictions.png";

/// Text as it is, anything else as JSON.
pub(crate) fn shown(value: &Value) -> String {
    value
        .as_str()
        .map_or_else(|| value.to_string(), str::to_owned)
}

/// Whether the file `name` of a run is the model's.
pub(crate) fn is_weights(name: &str) -> bool {
    let ends = [".pt", ".pth", ".safetensors"];
    ends.iter().any(|end| name.ends_with(end))
}

/// The name of the run's folder `dir`.
pub(crate) fn folder_name(dir: &Path) -> String {
    let name = dir.file_name().unwrap_or_default();
    name.to_string_lossy().into_owned()
}

/// There is no second attempt: a part of a record may be in the file at `path`.
pub(crate) fn failed(what: &str, path: &Path, e: std::io::Error) -> Error {
    let what = format!("cannot {what} {}", path.display());
    Error::new(ErrorKind::Failed, what).caused_by(e)
}

/// What the ranks use, by a `system` event: rank, name and number.
pub(crate) fn system(event: &Value) -> impl Iterator<Item = (&Value, &str, &Value)> {
    let ranks = event["ranks"].as_array().into_iter().flatten();
    ranks.flat_map(|rank| {
        let numbers = rank.as_object().into_iter().flatten();
        let numbers = numbers.filter(|(name, value)| {
            value.is_number() && !["rank", "pid", "time"].contains(&name.as_str())
        });
        numbers.map(|(name, value)| (&rank["rank"], name.as_str(), value))
    })
}

/// Where the buckets of a histogram begin, and where the last one ends.
pub(crate) fn edges(histogram: &Value) -> impl Iterator<Item = f64> {
    let number = |name: &str| histogram[name].as_f64().unwrap_or_default();
    let buckets = histogram["buckets"].as_array().map_or(0, Vec::len);
    let (min, max) = (number("min"), number("max"));
    let width = (max - min) / buckets as f64;
    let last = (buckets > 0).then_some(max);
    (0..buckets)
        .map(move |i| min + width * i as f64)
        .chain(last)
}

/// The file `path` of the run in `dir`, which may be in a folder of it; none, where it cannot be read.
pub(crate) fn read(dir: &Dir, path: &str) -> Option<Vec<u8>> {
    match path.split_once('/') {
        Some((folder, name)) => dir.sub(folder).ok()??.read(name, LARGEST).ok()?,
        None => dir.read(path, LARGEST).ok()?,
    }
}

/// A JSON lines file of the run in `dir`, without lines that are no objects.
pub(crate) fn rows(dir: &Dir, path: &str) -> Vec<Value> {
    let text = read(dir, path).unwrap_or_default();
    let lines = text.split(|byte| *byte == b'\n');
    let rows = lines.filter_map(|line| serde_json::from_slice(line).ok());
    rows.filter(Value::is_object).collect()
}

/// The predictions of one epoch.
pub(crate) struct Predictions {
    pub(crate) rows: Vec<Value>,
    /// The place in the picture, by the image's number.
    places: BTreeMap<u64, usize>,
    #[cfg(feature = "images")]
    sheet: Option<phalanx_report::image::Sheet>,
}

impl Predictions {
    /// Those that the `rows` event is of; none, if it is of another file, or the epoch's rows are not there any more.
    pub(crate) fn of(dir: &Path, event: &Value) -> Result<Option<Predictions>> {
        if event["file"] != PREDICTIONS_FILE {
            return Ok(None);
        }
        let dir = Dir::open(dir)?;
        let mut rows = rows(&dir, PREDICTIONS_FILE);
        let mut places = BTreeMap::new();
        for image in rows.iter().filter_map(|row| row["image"].as_u64()) {
            let next = places.len();
            places.entry(image).or_insert(next);
        }
        rows.retain(|row| row["epoch"] == event["epoch"]);
        #[cfg(feature = "images")]
        let sheet = read(&dir, PICTURES_FILE).and_then(|png| {
            let path = dir.path().join(PICTURES_FILE);
            phalanx_report::image::Sheet::read(&path, &png, places.len()).ok()
        });
        Ok((!rows.is_empty()).then_some(Predictions {
            rows,
            places,
            #[cfg(feature = "images")]
            sheet,
        }))
    }

    /// The image of `row` as a PNG.
    #[cfg(feature = "images")]
    pub(crate) fn image(&self, row: &Value) -> Option<Vec<u8>> {
        let place = self.places.get(&row["image"].as_u64()?)?;
        self.sheet.as_ref()?.image(*place).ok()
    }

    /// All images as a PNG, with a frame around those whose guess is wrong.
    #[cfg(feature = "images")]
    pub(crate) fn framed(&self) -> Option<Vec<u8>> {
        let wrong = self.rows.iter().filter(|row| row["guess"] != row["truth"]);
        let wrong = wrong.filter_map(|row| self.places.get(&row["image"].as_u64()?).copied());
        self.sheet.as_ref()?.framed(wrong).ok()
    }

    /// None: this program was built without images.
    #[cfg(not(feature = "images"))]
    pub(crate) fn image(&self, row: &Value) -> Option<Vec<u8>> {
        let _ = (row, &self.places);
        None
    }

    /// None: this program was built without images.
    #[cfg(not(feature = "images"))]
    pub(crate) fn framed(&self) -> Option<Vec<u8>> {
        None
    }
}
