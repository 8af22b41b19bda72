//! Shared by the tests of `.pth` files.

use std::fs;
use std::path::PathBuf;

use rawzip::{Crc32Option, ZipArchiveWriter};
use std::io::Write;

pub fn fixtures() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/pth")
}

pub fn manifest() -> serde_json::Value {
    serde_json::from_slice(&fs::read(fixtures().join("manifest.json")).unwrap()).unwrap()
}

pub fn named_shape(shape: &[usize]) -> serde_json::Value {
    serde_json::json!(shape)
}

/// A zip archive of these entries, names as they are.
pub fn zip(entries: &[(&str, &[u8])]) -> Vec<u8> {
    zip_with(entries, |_| None)
}

/// As [`zip`], with a checksum of one's own choice.
pub fn zip_with(entries: &[(&str, &[u8])], crc: impl Fn(&str) -> Option<u32>) -> Vec<u8> {
    let mut zip = ZipArchiveWriter::new(Vec::new());
    for (name, bytes) in entries {
        let crc = crc(name).map_or(Crc32Option::Calculate, Crc32Option::Custom);
        let (mut entry, config) = zip.new_file(*name).crc32(crc).start().unwrap();
        let mut data = config.wrap(&mut entry);
        data.write_all(bytes).unwrap();
        let (_, descriptor) = data.finish().unwrap();
        entry.finish(descriptor).unwrap();
    }
    zip.finish().unwrap()
}

/// An archive around a pickle, with a storage `0` of six floats.
pub fn with_pickle(pickle: &[u8]) -> Vec<u8> {
    let six: Vec<u8> = (1..=6).flat_map(|v| (v as f32).to_le_bytes()).collect();
    zip(&[
        ("a/data.pkl", pickle),
        ("a/data/0", &six),
        ("a/version", b"3\n"),
    ])
}
