//! Safetensors files: the header is checked first, then tensors are read one by one.

use std::collections::{BTreeMap, HashSet};
use std::fmt;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use safetensors::tensor::{Metadata, TensorInfo};
use serde::de::{Deserializer, Error as _, IgnoredAny, MapAccess, Visitor};

use crate::pth::MAX_TENSORS;
use phalanx_base::text::one_line;
use phalanx_base::{Error, Result};

/// Maximum length of a header, as in the `safetensors` library.
const MAX_HEADER_BYTES: u64 = 100_000_000;

/// An open file whose header was checked against its length.
#[derive(Debug)]
pub(crate) struct TensorsFile {
    path: PathBuf,
    file: File,
    metadata: Metadata,
    /// End of the header.
    data_at: u64,
}

impl TensorsFile {
    /// Reads the header of `file`, which was opened at `path`.
    ///
    /// # Errors
    ///
    /// `Data`, naming the file, when it is truncated or has another format; `System`.
    pub fn new(path: &Path, file: File) -> Result<TensorsFile> {
        let failed = |e| Error::io("cannot read", path, e);
        let wrong = |why: String| {
            let path = path.display();
            Error::data(format!("{path} is not a complete safetensors file: {why}"))
        };
        let there = file.metadata().map_err(failed)?.len();
        if there < 8 {
            return Err(wrong(format!(
                "it has only {there} bytes; expected 8 bytes with the length of the header; it may be truncated"
            )));
        }
        let mut start = [0; 8];
        file.read_exact_at(&mut start, 0).map_err(failed)?;
        let header_bytes = u64::from_le_bytes(start);
        if header_bytes > MAX_HEADER_BYTES {
            let mut next = [0];
            let is_header =
                there > 8 && file.read_at(&mut next, 8).map_err(failed)? == 1 && next == *b"{";
            let why = match is_header {
                true => "the format allows no longer header",
                false => "it has another format",
            };
            return Err(wrong(format!(
                "its header length at byte 0 is {header_bytes}, expected at most {MAX_HEADER_BYTES}; {why}"
            )));
        }
        let data_at = header_bytes + 8;
        if data_at > there {
            return Err(wrong(format!(
                "its header should end at byte {data_at}, but it has {there} bytes; it may be truncated"
            )));
        }
        let mut header = vec![0; header_bytes as usize];
        file.read_exact_at(&mut header, 8).map_err(failed)?;
        let metadata = check_names(&header).and_then(|()| serde_json::from_slice(&header));
        let metadata: Metadata = metadata.map_err(|source| {
            wrong(format!(
                "in its header, bytes 8 to {data_at}, expected names, types and shapes: {}",
                one_line(&source.to_string())
            ))
            .with_source(source)
        })?;
        let promised = (metadata.data_len() as u64).saturating_add(data_at);
        if promised < there {
            return Err(wrong(format!(
                "it has {there} bytes, but its header describes {promised}"
            )));
        }
        if promised > there {
            return Err(wrong(format!(
                "it has {there} bytes, but its header describes {promised}; it may be truncated"
            )));
        }
        Ok(TensorsFile {
            path: path.to_owned(),
            file,
            metadata,
            data_at,
        })
    }

    /// All tensors, by name.
    pub fn tensors(&self) -> Vec<(String, &TensorInfo)> {
        let mut all: Vec<_> = self.metadata.tensors().into_iter().collect();
        all.sort_by(|a, b| a.0.cmp(&b.0));
        all
    }

    /// The tensor with this name.
    pub fn tensor(&self, name: &str) -> Option<&TensorInfo> {
        self.metadata.info(name)
    }

    /// The file's metadata.
    pub fn metadata(&self) -> BTreeMap<String, String> {
        let said = self.metadata.metadata().iter().flatten();
        said.map(|(k, v)| (k.clone(), v.clone())).collect()
    }

    /// The values of a tensor of this file, little-endian.
    ///
    /// # Errors
    ///
    /// `System`, naming the file.
    pub fn bytes(&self, tensor: &TensorInfo) -> Result<Vec<u8>> {
        let (from, to) = tensor.data_offsets;
        let mut bytes = vec![0; to - from];
        self.file
            .read_exact_at(&mut bytes, self.data_at + from as u64)
            .map_err(|e| Error::io("cannot read", &self.path, e))?;
        Ok(bytes)
    }
}

/// Refuses duplicate names, of which the library would silently take the last, and more
/// than [`MAX_TENSORS`] tensors.
fn check_names(header: &[u8]) -> serde_json::Result<()> {
    let mut all = serde_json::Deserializer::from_slice(header);
    all.deserialize_map(Names)?;
    all.end()
}

struct Names;

impl<'de> Visitor<'de> for Names {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a JSON object")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> std::result::Result<(), A::Error> {
        let mut names = HashSet::new();
        while let Some(name) = map.next_key::<String>()? {
            if names.len() > MAX_TENSORS {
                return Err(A::Error::custom(format_args!(
                    "it has more than {MAX_TENSORS} tensors"
                )));
            }
            if names.contains(&name) {
                return Err(A::Error::custom(format_args!("{name:?} appears twice")));
            }
            names.insert(name);
            map.next_value::<IgnoredAny>()?;
        }
        Ok(())
    }
}
