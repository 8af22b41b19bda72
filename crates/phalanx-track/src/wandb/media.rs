//! Files of an offline run: tables, images and artifacts.
//!
//! Names, digests and JSON are those that wandb's client writes for `wandb.Table`, `wandb.Image` and `wandb.Artifact`.

use std::fs::File;
use std::io::Write as _;
use std::path::Path;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use md5::Md5;
use phalanx_base::files::Dir;
use phalanx_report::png_size;
use serde_json::{Map, Value, json};
use sha2::{Digest as _, Sha256};

use super::proto::{Artifact, Config, Entry, FilesItem, Manifest};
use crate::Result;
use crate::values::failed;

/// The folder of what is uploaded as files of the run.
pub(super) const FILES: &str = "files";
/// The folder of what only artifacts have.
const ARTIFACTS: &str = "artifacts";

/// Weights that are larger are in the artifact only.
const LARGEST_COPY: u64 = 64 << 20;

/// Characters of a digest in a file's name.
const NAME_DIGITS: usize = 20;

/// A cell of a table.
pub(super) enum Cell {
    Json(Value),
    Png(Vec<u8>),
}

/// A table that was written.
pub(super) struct Table {
    /// What history has of it.
    pub(super) value: Value,
    /// The file in [`FILES`].
    pub(super) file: FilesItem,
    pub(super) artifact: Artifact,
}

/// Writes into the folder of an offline run.
pub(super) struct Media<'a> {
    pub(super) dir: &'a Dir,
    /// The run's.
    pub(super) id: &'a str,
    pub(super) entity: &'a str,
    pub(super) project: &'a str,
}

impl Media<'_> {
    /// Writes a table that was logged at `step` as `key`.
    pub(super) fn table(
        &self,
        key: &str,
        step: u64,
        columns: &[String],
        rows: &[Vec<Cell>],
    ) -> Result<Table> {
        let mut entries = Vec::new();
        let (mut whole, mut brief) = (Vec::new(), Vec::new());
        for row in rows {
            let (mut cells, mut words) = (Vec::new(), Vec::new());
            for cell in row {
                match cell {
                    Cell::Json(value) => {
                        cells.push(value.clone());
                        words.push(value.clone());
                    }
                    Cell::Png(png) => {
                        let name = format!("{}.png", &sha256(png)[..NAME_DIGITS]);
                        let path = format!("media/images/{name}");
                        cells.push(image(png, &path));
                        words.push(json!("Image"));
                        if entries.iter().all(|entry: &Entry| entry.path != path) {
                            let file = self.write(ARTIFACTS, &["media", "images"], &name, png)?;
                            entries.push(entry(&path, png, &file));
                        }
                    }
                }
            }
            whole.push(cells);
            brief.push(words);
        }
        let of_column = |(at, name): (usize, &String)| {
            let cells = whole.iter().filter_map(|row| row.get(at));
            (name.clone(), kind(cells))
        };
        let types: Map<String, Value> = columns.iter().enumerate().map(of_column).collect();
        let (rows, cols) = (whole.len(), columns.len());
        let whole = json!({
            "_type": "table", "columns": columns, "data": whole, "ncols": cols, "nrows": rows,
            "column_types": {"wb_type": "typedDict", "params": {"type_map": types}},
            "log_mode": "IMMUTABLE",
        });
        let name = file_name(key);
        let whole = whole.to_string();
        let file = format!("{name}_{step}.table.json");
        let path = self.write(ARTIFACTS, &[], &file, whole.as_bytes())?;
        let inside = format!("{name}.table.json");
        entries.push(entry(&inside, whole.as_bytes(), &path));
        let artifact = self.artifact("run_table", &format!("run-{}-{name}", self.id), entries);
        let brief = json!({"columns": columns, "data": brief}).to_string();
        let value = json!({
            "_type": "table-file", "ncols": cols, "nrows": rows, "log_mode": "IMMUTABLE",
            "artifact_path": format!("wandb-client-artifact://{}/{inside}", artifact.client_id),
            "_latest_artifact_path":
                format!("wandb-client-artifact://{}:latest/{inside}", artifact.sequence_client_id),
        });
        let name = format!("{name}_{step}");
        let (value, file) = self.file(["table", &name, "table.json"], brief.as_bytes(), value)?;
        Ok(Table {
            value,
            file,
            artifact,
        })
    }

    /// Writes an image that was logged at `step` as `key`: what history has of it, and its file.
    pub(super) fn image(&self, key: &str, step: u64, png: &[u8]) -> Result<(Value, FilesItem)> {
        let name = format!("{}_{step}", file_name(key));
        self.file(["images", &name, "png"], png, image(png, ""))
    }

    /// Writes the graph of the model, the `nodes` of `run.json`: what the summary has of it, and its file.
    pub(super) fn graph(&self, nodes: &[Value]) -> Result<(Value, FilesItem)> {
        let input = json!({"name": "input", "operation": "Input"});
        let nodes = std::iter::once(&input).chain(nodes);
        let edges = nodes.clone().flat_map(|node| {
            let inputs = node["inputs"].as_array().into_iter().flatten();
            inputs.map(|input| json!([input, node["name"]]))
        });
        let edges: Vec<Value> = edges.collect();
        let nodes = nodes.map(|node| {
            json!({"id": node["name"], "name": node["name"], "class_name": node["operation"], "output_shape": node["shape"]})
        });
        let nodes: Vec<Value> = nodes.collect();
        let graph = json!({"format": "torch", "nodes": nodes, "edges": edges}).to_string();
        let value = json!({"_type": "graph-file"});
        self.file(
            ["graph", "graph_0_summary", "graph.json"],
            graph.as_bytes(),
            value,
        )
    }

    /// Writes a file of the run, of this kind and with this name and ending: `value` with its place, and the file.
    fn file(
        &self,
        [kind, name, end]: [&str; 3],
        bytes: &[u8],
        mut value: Value,
    ) -> Result<(Value, FilesItem)> {
        let digest = sha256(bytes);
        let name = format!("{name}_{}.{end}", &digest[..NAME_DIGITS]);
        self.write(FILES, &["media", kind], &name, bytes)?;
        let path = format!("media/{kind}/{name}");
        value["path"] = json!(path);
        value["sha256"] = json!(digest);
        value["size"] = json!(bytes.len());
        let policy = FilesItem::default().policy;
        Ok((value, FilesItem { path, policy }))
    }

    /// The artifact of the model, whose files are those in the run's folder `run`; none without files.
    pub(super) fn model(&self, run: &Dir, files: &[String]) -> Result<Option<Artifact>> {
        let mut entries = Vec::new();
        for name in files {
            let Some(file) = run.open_read(name)? else {
                continue;
            };
            let mut md5 = Hashing(Md5::new(), 0);
            let read = std::io::copy(&mut &file, &mut md5);
            let path = run.path().join(name);
            read.map_err(|e| failed("read", &path, e))?;
            entries.push(Entry {
                path: name.clone(),
                digest: STANDARD.encode(md5.0.finalize()),
                size: md5.1,
                local_path: absolute(&path),
            });
        }
        let artifact =
            || self.artifact("model", &format!("run-{}-model", self.id), entries.clone());
        Ok((!entries.is_empty()).then(artifact))
    }

    /// Copies the file `name` of the run's folder `run`; whether it was done. Larger files are left out, and what is no file.
    pub(super) fn copy(&self, run: &Dir, name: &str) -> Result<bool> {
        let Ok(Some(file)) = run.open_read(name) else {
            return Ok(false);
        };
        let path = run.path().join(name);
        if file.metadata().map_err(|e| failed("read", &path, e))?.len() > LARGEST_COPY {
            return Ok(false);
        }
        let mut to = self.dir.create_sub(FILES)?.create_file(name)?;
        let copied = std::io::copy(&mut &file, &mut to);
        copied.map_err(|e| failed("copy", &path, e))?;
        Ok(true)
    }

    fn artifact(&self, kind: &str, name: &str, mut entries: Vec<Entry>) -> Artifact {
        entries.sort_by(|a, b| a.path.cmp(&b.path));
        let mut md5 = Md5::new();
        md5.update(b"wandb-artifact-manifest-v1\n");
        for entry in &entries {
            md5.update(format!("{}:{}\n", entry.path, entry.digest));
        }
        let digest = hex::encode(md5.finalize());
        // Drawn at random by the client. Here the same each time that the run is written.
        let drawn = |of: &str| {
            let half = |n: u8| sha256(format!("{} {name} {of} {n}", self.id).as_bytes());
            half(0) + &half(1)
        };
        Artifact {
            run_id: self.id.to_owned(),
            project: self.project.to_owned(),
            entity: self.entity.to_owned(),
            kind: kind.to_owned(),
            name: name.to_owned(),
            client_id: drawn(&digest),
            sequence_client_id: drawn("sequence"),
            digest,
            aliases: vec!["latest".to_owned()],
            manifest: Some(Manifest {
                version: 1,
                storage_policy: "wandb-storage-policy-v1".to_owned(),
                storage_policy_config: vec![Config {
                    key: "storageLayout".to_owned(),
                    value_json: "\"V2\"".to_owned(),
                }],
                contents: entries,
            }),
            finalize: true,
            digest_algorithm: "MANIFEST_MD5".to_owned(),
        }
    }

    /// Writes a file below the run's folder; returns its absolute path.
    fn write(&self, top: &str, below: &[&str], name: &str, bytes: &[u8]) -> Result<String> {
        let mut dir = self.dir.create_sub(top)?;
        for folder in below {
            dir = dir.create_sub(folder)?;
        }
        let path = dir.path().join(name);
        let mut file: File = dir.create_file(name)?;
        file.write_all(bytes)
            .map_err(|e| failed("write", &path, e))?;
        Ok(absolute(&path))
    }
}

/// A sum of what is written to it, and the number of bytes.
struct Hashing(Md5, i64);

impl std::io::Write for Hashing {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0.update(bytes);
        self.1 += bytes.len() as i64;
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

/// The file `bytes` of an artifact, which lies at `file`.
fn entry(path: &str, bytes: &[u8], file: &str) -> Entry {
    Entry {
        path: path.to_owned(),
        digest: STANDARD.encode(Md5::digest(bytes)),
        size: bytes.len() as i64,
        local_path: file.to_owned(),
    }
}

fn image(png: &[u8], path: &str) -> Value {
    let [width, height] = png_size(png).unwrap_or_default();
    json!({
        "_type": "image-file", "format": "png", "width": width, "height": height, "path": path,
        "sha256": sha256(png),
    })
}

/// The type of a column by its cells.
fn kind<'v>(cells: impl Iterator<Item = &'v Value>) -> Value {
    let of = |cell: &Value| match cell {
        Value::Null => None,
        Value::Bool(_) => Some("boolean"),
        Value::Number(_) => Some("number"),
        Value::String(_) => Some("string"),
        cell if cell["_type"] == "image-file" => Some("image-file"),
        _ => Some("any"),
    };
    let mut kinds: Vec<&str> = cells.filter_map(of).collect();
    kinds.sort_unstable();
    kinds.dedup();
    let types = kinds.into_iter().chain(["none"]);
    let types: Vec<Value> = types.map(|kind| json!({"wb_type": kind})).collect();
    json!({"wb_type": "union", "params": {"allowed_types": types}})
}

fn sha256(bytes: &[u8]) -> String {
    hex::encode(Sha256::digest(bytes))
}

/// `wandb sync` may be started elsewhere.
fn absolute(path: &Path) -> String {
    let path = path.canonicalize().unwrap_or_else(|_| path.to_owned());
    path.to_string_lossy().into_owned()
}

/// `key` as a part of a file's name.
fn file_name(key: &str) -> String {
    let plain = |c: char| match c.is_ascii_alphanumeric() || "-_.".contains(c) {
        true => c,
        false => '_',
    };
    key.chars().take(100).map(plain).collect()
}
