//! The zip archive of a pickle and its storages.

use std::collections::HashMap;
use std::fs::File;
use std::io::{Read, Seek};
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use rawzip::{CompressionMethod, FileReader, ZipArchive, ZipArchiveEntryWayfinder};

use super::MAX_TENSORS;
use super::{LEGACY_START, ZIP_START};
use phalanx_base::text::one_line;
use phalanx_base::{Error, Result};

/// Maximum size of `data.pkl`; that of a network of a thousand tensors has 200 kB.
const MAX_PICKLE_BYTES: u64 = 32 << 20;

/// Maximum number of entries: one per storage, and a few.
const MAX_ENTRIES: u64 = MAX_TENSORS as u64 + 64;

/// The newest format that PyTorch itself reads (`kMaxSupportedFileFormatVersion`).
const MAX_VERSION: u32 = 10;

struct Entry {
    place: ZipArchiveEntryWayfinder,
    size_bytes: u64,
    crc: u32,
}

/// An open archive with a checked directory.
pub(super) struct Archive {
    path: PathBuf,
    zip: ZipArchive<FileReader>,
    /// Entries by name, without the root folder.
    entries: HashMap<String, Entry>,
    /// Warning if an entry without a checksum was read.
    unchecked: OnceLock<String>,
}

impl Archive {
    /// Opens the archive in `file`, which was opened at `path`.
    pub fn open(path: &Path, mut file: File) -> Result<Archive> {
        let cannot_read = |source| Error::io("cannot read", path, source);
        let file_bytes = file.metadata().map_err(cannot_read)?.len();
        file.rewind().map_err(cannot_read)?;
        let mut start = Vec::new();
        (&mut file)
            .take(LEGACY_START.len() as u64)
            .read_to_end(&mut start)
            .map_err(cannot_read)?;
        if start == LEGACY_START {
            return Err(Error::data(format!(
                "{} is in PyTorch's format from before 2020, a bare pickle and no zip archive\n  \
                 load it in Python and torch.save() it again",
                path.display()
            )));
        }
        if !start.starts_with(&ZIP_START) {
            let starts = match &start[..start.len().min(4)] {
                [] => String::new(),
                start => format!(" and starts with {}", hex::encode(start)),
            };
            return Err(Error::data(format!(
                "{} is not a PyTorch file: it has {file_bytes} bytes{starts}; expected a zip archive, which starts with {}",
                path.display(),
                hex::encode(ZIP_START),
            )));
        }
        let refused = |source| damaged(path, file_bytes, source);
        let mut buffer = vec![0; rawzip::RECOMMENDED_BUFFER_SIZE];
        let zip = ZipArchive::from_file(file, &mut buffer).map_err(refused)?;
        let mut archive = Archive {
            path: path.to_path_buf(),
            entries: HashMap::new(),
            unchecked: OnceLock::new(),
            zip,
        };
        let names = archive.list(file_bytes)?;
        archive.keep_below_root(names)?;
        archive.check_conventions()?;
        Ok(archive)
    }

    /// Full names and locations of all entries.
    fn list(&self, file_bytes: u64) -> Result<Vec<(String, Entry)>> {
        let expected = self.zip.entries_hint();
        if expected > MAX_ENTRIES {
            return Err(self.wrong(format_args!(
                "its directory announces {expected} entries; the limit is {MAX_ENTRIES}"
            )));
        }
        let mut all = Vec::new();
        let mut total_bytes = 0u64;
        let mut buffer = vec![0; rawzip::MAX_CENTRAL_DIRECTORY_RECORD_SIZE];
        let mut entries = self.zip.entries(&mut buffer);
        while let Some(record) = entries
            .next_entry()
            .map_err(|source| damaged(&self.path, file_bytes, source))?
        {
            let name = String::from_utf8(record.file_path().as_ref().to_vec()).map_err(|e| {
                let lossy = String::from_utf8_lossy(e.as_bytes()).into_owned();
                self.wrong(format_args!("the name of entry {lossy:?} is not UTF-8"))
            })?;
            let shown = one_line(&name);
            if all.len() as u64 >= expected {
                return Err(self.wrong(format_args!(
                    "its directory has more than the {expected} entries that it announces"
                )));
            }
            let (size_bytes, stored) = (
                record.uncompressed_size_hint(),
                record.compressed_size_hint(),
            );
            if record.flags().is_encrypted() {
                return Err(self.wrong(format_args!("entry {shown} is encrypted")));
            }
            if record.compression_method() != CompressionMethod::STORE {
                return Err(self.wrong(format_args!(
                    "entry {shown} is compressed; torch.save stores entries as they are"
                )));
            }
            if size_bytes != stored {
                return Err(self.wrong(format_args!(
                    "entry {shown} is stored but takes {stored} bytes for {size_bytes}"
                )));
            }
            // Overlapping entries could otherwise multiply a small file.
            total_bytes = total_bytes.saturating_add(size_bytes);
            if total_bytes > file_bytes {
                return Err(self.wrong(format_args!(
                    "up to entry {shown} its directory announces {total_bytes} bytes, but the file has {file_bytes}"
                )));
            }
            let entry = Entry {
                place: record.wayfinder(),
                size_bytes,
                crc: record.crc32(),
            };
            all.push((name, entry));
        }
        if (all.len() as u64) < expected {
            return Err(self.wrong(format_args!(
                "its directory has {} of the {expected} entries that it announces",
                all.len()
            )));
        }
        Ok(all)
    }

    /// All entries must be in the one folder that has a `data.pkl`.
    fn keep_below_root(&mut self, all: Vec<(String, Entry)>) -> Result<()> {
        let roots: Vec<String> = all
            .iter()
            .filter_map(|(name, _)| name.strip_suffix("/data.pkl"))
            .filter(|root| !root.contains('/'))
            .map(|root| format!("{root}/"))
            .collect();
        let mut roots = roots.iter();
        let (Some(root), None) = (roots.next(), roots.next()) else {
            return Err(self.wrong(format_args!(
                "it needs exactly one <folder>/data.pkl, as torch.save writes it"
            )));
        };
        for (name, entry) in all {
            let Some(inner) = name.strip_prefix(root).filter(|inner| {
                inner
                    .split('/')
                    .all(|part| !matches!(part, "" | "." | ".."))
            }) else {
                return Err(self.wrong(format_args!("entry {name:?} is outside of {root}")));
            };
            if self.entries.contains_key(inner) {
                return Err(self.wrong(format_args!("entry {} appears twice", one_line(&name))));
            }
            self.entries.insert(inner.to_owned(), entry);
        }
        Ok(())
    }

    /// Reads the entries with version and byte order.
    fn check_conventions(&self) -> Result<()> {
        let version = self.read("version", 64)?;
        let version = String::from_utf8_lossy(&version).trim().to_owned();
        match version.parse::<u32>() {
            Ok(1..=MAX_VERSION) => {}
            _ => {
                return Err(self.wrong(format_args!(
                    "it is of format version {version:?}; versions 1 to {MAX_VERSION} are read"
                )));
            }
        }
        if self.entries.contains_key("byteorder") {
            let order = self.read("byteorder", 64)?;
            if order != b"little" {
                return Err(self.wrong(format_args!(
                    "its byte order is {:?}; only \"little\" is read",
                    String::from_utf8_lossy(&order)
                )));
            }
        }
        Ok(())
    }

    /// The bytes of the pickle.
    pub fn pickle(&self) -> Result<Vec<u8>> {
        self.read("data.pkl", MAX_PICKLE_BYTES)
    }

    /// The entry of a storage of exactly `size_bytes`. The error is a reason to which the
    /// pickle machine adds the offset.
    pub fn storage(&self, key: &str, size_bytes: usize) -> std::result::Result<String, String> {
        let name = format!("data/{key}");
        let Some(entry) = self.entries.get(&name) else {
            return Err(format!(
                "it refers to storage {key:?}, but the archive has no entry {name}"
            ));
        };
        if entry.size_bytes != size_bytes as u64 {
            return Err(format!(
                "it refers to storage {key:?} of {size_bytes} bytes, but entry {name} has {}",
                entry.size_bytes
            ));
        }
        Ok(name)
    }

    /// Warnings about entries that were read.
    pub fn warnings(&self) -> &[String] {
        self.unchecked.get().map_or(&[], std::slice::from_ref)
    }

    /// Reads the entry `name`, which may have up to `largest_bytes`.
    pub fn read(&self, name: &str, largest_bytes: u64) -> Result<Vec<u8>> {
        let Some(entry) = self.entries.get(name) else {
            return Err(self.wrong(format_args!("it has no entry {name}")));
        };
        let (size_bytes, expected) = (entry.size_bytes, entry.crc);
        if size_bytes > largest_bytes {
            return Err(self.wrong(format_args!(
                "entry {name} has {size_bytes} bytes; the limit is {largest_bytes}"
            )));
        }
        let found = self.zip.get_entry(entry.place).map_err(|source| {
            self.wrong(format_args!("entry {name}: {source}"))
                .with_source(source)
        })?;
        let (from, to) = found.compressed_data_range();
        // At most the size of the file, which `list` has checked.
        let mut bytes = Vec::with_capacity(size_bytes as usize);
        found
            .reader()
            .read_to_end(&mut bytes)
            .map_err(|source| Error::io("cannot read", &self.path, source))?;
        if bytes.len() as u64 != size_bytes {
            return Err(self.wrong(format_args!(
                "entry {name}, bytes {from} to {to} of the file, ends after {} of {size_bytes} bytes",
                bytes.len()
            )));
        }
        let actual = crc32fast::hash(&bytes);
        if actual != expected {
            // PyTorch can write zeros, and does not check.
            if expected != 0 {
                return Err(self.wrong(format_args!(
                    "entry {name}, bytes {from} to {to} of the file, is damaged: \
                     its CRC-32 is {actual:08x}, the directory says {expected:08x}"
                )));
            }
            self.unchecked.get_or_init(|| {
                format!(
                    "{}: saved without checksums, so damage cannot be detected",
                    self.path.display()
                )
            });
        }
        Ok(bytes)
    }

    fn wrong(&self, what: std::fmt::Arguments<'_>) -> Error {
        Error::data(format!("{}: {what}", self.path.display()))
    }
}

fn damaged(path: &Path, file_bytes: u64, source: rawzip::Error) -> Error {
    Error::data(format!(
        "{} is not a complete zip archive: {source}; expected a directory of its entries at the end; it has {file_bytes} bytes and may be truncated",
        path.display()
    ))
    .with_source(source)
}
