//! `image`, `table` and `text` events: what a program has logged.

use std::collections::BTreeMap;

use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;
use phalanx_base::files::{Dir, image_kind};
use serde::Serialize;
use serde_json::value::RawValue;

use crate::curve::spread;
use crate::line::Line;
use crate::lines;

/// Most names of each kind, and most entries of a name.
const MAX_NAMES: usize = 50;
const MAX_IMAGES: usize = 24;
const MAX_TABLES: usize = 4;
const MAX_TEXTS: usize = 100;
/// Limits of one file, and of all images together.
const MAX_IMAGE_BYTES: u64 = 4 << 20;
const MAX_IMAGES_BYTES: usize = 24 << 20;
const MAX_TABLE_BYTES: u64 = 64 << 20;
const MAX_ROWS: usize = 1000;
/// Most characters of a text.
const MAX_TEXT: usize = 20_000;

/// One image, table or text.
#[derive(Debug, Serialize)]
pub struct Logged {
    kind: &'static str,
    name: String,
    step: Option<f64>,
    /// How many of this kind and name the program has logged.
    of: usize,
    #[serde(flatten)]
    content: Content,
}

#[derive(Debug, Serialize)]
#[serde(untagged)]
enum Content {
    Image {
        src: String,
    },
    Table {
        rows: Vec<Box<RawValue>>,
        total: usize,
    },
    Text {
        text: String,
        is_cut: bool,
    },
    /// It cannot be shown.
    Missing {
        why: String,
    },
}

impl Logged {
    /// The events of `all` with what their files in `dir` have, by kind and name.
    pub fn read(all: &[Line], dir: &Dir) -> Vec<Logged> {
        let mut named: BTreeMap<(&'static str, &str), Vec<&Line>> = BTreeMap::new();
        let mut names: BTreeMap<&str, usize> = BTreeMap::new();
        for line in all {
            let kind = match &*line.kind {
                "image" => "image",
                "table" => "table",
                _ => "text",
            };
            let id = (kind, line.name.as_deref().unwrap_or_default());
            let count = names.entry(kind).or_default();
            if let Some(there) = named.get_mut(&id) {
                there.push(line);
            } else if *count < MAX_NAMES {
                *count += 1;
                named.insert(id, vec![line]);
            }
        }
        let mut free_bytes = MAX_IMAGES_BYTES;
        let mut logged = Vec::new();
        for ((kind, name), all) in named {
            let most = match kind {
                "image" => MAX_IMAGES,
                "table" => MAX_TABLES,
                _ => MAX_TEXTS,
            };
            for line in spread(all.len(), most).into_iter().map(|i| all[i]) {
                let content = match kind {
                    "image" => image(line, dir, &mut free_bytes),
                    "table" => table(line, dir),
                    _ => Ok(text(line)),
                };
                logged.push(Logged {
                    kind,
                    name: name.to_owned(),
                    step: line.step,
                    of: all.len(),
                    content: content.unwrap_or_else(|why| Content::Missing { why }),
                });
            }
        }
        logged
    }
}

/// The file of `line`, which lies in `dir` or a folder of it. No link is followed.
fn file(line: &Line, dir: &Dir, most_bytes: u64) -> Result<Vec<u8>, String> {
    let path = line.file.as_deref().unwrap_or_default();
    let mut parts: Vec<&str> = path.split('/').collect();
    let name = parts.pop().unwrap_or_default();
    let is_name = |part: &&str| !["", ".", ".."].contains(part) && !part.contains('\0');
    if !parts.iter().chain([&name]).all(is_name) {
        return Err(format!("{path:?} is no file of this folder"));
    }
    let mut at = dir.clone();
    for part in parts {
        let sub = at.sub(part).map_err(|e| e.to_string())?;
        at = sub.ok_or_else(|| format!("{path} is missing"))?;
    }
    let bytes = at.read(name, most_bytes).map_err(|e| e.to_string())?;
    bytes.ok_or_else(|| format!("{path} is missing"))
}

fn image(line: &Line, dir: &Dir, free_bytes: &mut usize) -> Result<Content, String> {
    let bytes = file(line, dir, MAX_IMAGE_BYTES)?;
    let kind = match image_kind(&bytes) {
        kind @ ("PNG" | "JPEG" | "GIF" | "WebP") => kind.to_ascii_lowercase(),
        _ => return Err("not PNG, JPEG, GIF or WebP".to_owned()),
    };
    *free_bytes = free_bytes.checked_sub(bytes.len()).ok_or_else(|| {
        let most = MAX_IMAGES_BYTES >> 20;
        format!("left out: the images of a report have at most {most} MiB")
    })?;
    let src = format!(
        "data:image/{kind};base64,{}",
        BASE64_STANDARD.encode(&bytes)
    );
    Ok(Content::Image { src })
}

fn table(line: &Line, dir: &Dir) -> Result<Content, String> {
    let text = file(line, dir, MAX_TABLE_BYTES)?;
    let first = lines(&text).take(MAX_ROWS);
    let rows = first.filter_map(|row| serde_json::from_slice(row).ok());
    Ok(Content::Table {
        rows: rows.collect(),
        total: line
            .rows
            .map_or_else(|| lines(&text).count(), |n| n as usize),
    })
}

fn text(line: &Line) -> Content {
    let whole = line.text.as_deref().unwrap_or_default();
    let text: String = whole.chars().take(MAX_TEXT).collect();
    Content::Text {
        is_cut: text.len() < whole.len(),
        text,
    }
}
