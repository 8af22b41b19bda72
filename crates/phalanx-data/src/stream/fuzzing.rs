//! The readers of shards and of their index.

use std::fs::File;
use std::io::Write;
use std::os::unix::fs::FileExt;

use super::index::Index;
use super::shard::{Format, parse, scan};

fn file(bytes: &[u8]) -> Option<File> {
    let mut file = tempfile::tempfile().ok()?;
    file.write_all(bytes).ok()?;
    std::io::Seek::rewind(&mut file).ok()?;
    Some(file)
}

/// Each sample that is found lies in the file, and is read without a panic.
fn shard(format: Format, data: &[u8]) {
    let Some(file) = file(data) else { return };
    let Ok(found) = scan(format, "shard", &file, data.len() as u64) else {
        return;
    };
    for ends in found.starts.windows(2) {
        assert!(ends[0] < ends[1]);
        let mut bytes = vec![0; (ends[1] - ends[0]) as usize];
        assert!(file.read_exact_at(&mut bytes, ends[0]).is_ok());
        assert!(parse(format, bytes).is_ok());
    }
}

pub(crate) fn fuzz_tar(data: &[u8]) {
    shard(Format::Tar, data);
}

pub(crate) fn fuzz_lines(data: &[u8]) {
    shard(Format::Jsonl, data);
}

pub(crate) fn fuzz_index(data: &[u8]) {
    let index = file(data).and_then(|file| Index::open("index", file).ok());
    if let Some(index) = index {
        for (shard, about) in index.list.shards.iter().enumerate() {
            for sample in (0..about.samples).take(10) {
                let _ = index.range(shard, sample);
            }
        }
        let _ = index.content();
    }
}
