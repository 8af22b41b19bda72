//! Fuzz target: the file store's log.

use std::fs::File;
use std::os::unix::fs::FileExt;

use phalanx_wire::store_msg::Request;
use rustix::fs::{MemfdFlags, memfd_create};

use super::log;
use crate::table::{Limits, Table};

/// Small limits, so that they are reached.
const LIMITS: Limits = Limits::new(16, 4096);

/// `data` as a whole file, and as the records behind a valid header: with its own
/// checksums, and with correct ones.
pub(crate) fn log(data: &[u8]) {
    if let Ok(fd) = memfd_create("phalanx-fuzz", MemfdFlags::CLOEXEC) {
        let file = File::from(fd);
        if file.write_all_at(data, 0).is_ok() {
            if let Ok(id) = log::read_header(&file, "the file") {
                assert_eq!(
                    data.get(..log::header(id).len()),
                    Some(&log::header(id)[..])
                );
            }
            // A file that is not a store is never overwritten.
            if log::start(&file, "the file").is_ok() {
                assert!(data.is_empty() || data.starts_with(b"PHXSTORE"));
            }
        }
    }
    replay(data);
    let mut sealed = data.to_vec();
    if let [a, b, c, d, rest @ ..] = &mut sealed[..] {
        let length = rest
            .first_chunk()
            .map_or(0, |l| u32::from_le_bytes(*l) as usize);
        let end = rest.len().min(length.saturating_add(4));
        [*a, *b, *c, *d] = crc32c::crc32c(&rest[..end]).to_le_bytes();
        replay(&sealed);
    }
}

fn replay(mut rest: &[u8]) {
    let mut table = Table::new(LIMITS);
    let mut at = log::HEADER_BYTES;
    while let Ok(Some(record)) = log::next(rest, "the file", at) {
        assert!(record.bytes <= rest.len());
        if log::apply(&mut table, &record.request, "the file", at).is_err() {
            break;
        }
        assert!(table.bytes() <= LIMITS.max_total_bytes);
        at += record.bytes as u64;
        rest = &rest[record.bytes..];
    }
}

pub(crate) fn log_seeds() -> Vec<Vec<u8>> {
    let records = [
        Request::Set {
            key: "rank/0",
            value: b"here",
        },
        Request::Delete { key: "rank/0" },
        Request::DeletePrefix { prefix: "rank" },
        // Not a change: refused.
        Request::TryGet { key: "rank/0" },
    ];
    let mut seeds = vec![log::header(7).to_vec()];
    let mut all = Vec::new();
    for record in &records {
        if let Ok(bytes) = log::encode(record) {
            all.extend_from_slice(&bytes);
            seeds.push(bytes);
        }
    }
    seeds.push(all);
    seeds
}
