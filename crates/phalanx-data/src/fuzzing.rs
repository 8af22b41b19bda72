//! Fuzz targets for the readers of files and of `/proc`. The tests here run them on garbled
//! seeds.

use std::fs::File;
use std::io::Write;
use std::os::fd::AsRawFd;
use std::path::PathBuf;

use sha2::{Digest, Sha256};

use crate::packed::{END, Packer, Tokens};
use crate::table::{Preprocessing, Table, TableBatch, TableOptions};
use crate::{Dataset, cifar10, mnist, stream};

/// Name, function and seeds of a target.
pub type Target = (&'static str, fn(&[u8]), fn() -> Vec<Vec<u8>>);

/// All fuzz targets of this crate.
pub const TARGETS: &[Target] = &[
    ("data_idx_images", idx_images, idx_seeds),
    ("data_idx_labels", idx_labels, idx_seeds),
    ("data_cifar_pickle", cifar_pickle, cifar_pickle_seeds),
    ("data_cifar_binary", cifar_binary, cifar_binary_seeds),
    ("data_cifar_archive", cifar_archive, cifar_archive_seeds),
    ("data_packed", packed, packed_seeds),
    ("data_proc_status", proc_status, proc_seeds),
    ("data_table", table, table_seeds),
    #[cfg(feature = "parquet")]
    ("data_parquet", parquet, parquet_seeds),
    #[cfg(feature = "images")]
    ("data_image", image, image_seeds),
    ("data_stream_tar", stream::fuzz_tar, tar_seeds),
    ("data_stream_lines", stream::fuzz_lines, lines_seeds),
    ("data_stream_index", stream::fuzz_index, index_seeds),
];

/// A memory file with these bytes, and a path to it.
fn file(bytes: &[u8]) -> Option<(File, PathBuf)> {
    let mut file = tempfile::tempfile().ok()?;
    file.write_all(bytes).ok()?;
    let path = format!("/proc/self/fd/{}", file.as_raw_fd()).into();
    Some((file, path))
}

fn idx_images(data: &[u8]) {
    if let Some((_file, path)) = file(data)
        && let Ok((sides, pixels)) = mnist::read_images_file(&path)
    {
        assert!(sides.iter().all(|side| *side > 0));
        assert!(pixels.is_multiple_of(sides[0] * sides[1]));
    }
}

fn idx_labels(data: &[u8]) {
    if let Some((_file, path)) = file(data) {
        let _ = mnist::read_labels_file(&path);
    }
}

/// Images and labels, plain and compressed, and a decompression bomb.
fn idx_seeds() -> Vec<Vec<u8>> {
    let images = [
        &[0, 0, 8, 3, 0, 0, 0, 2, 0, 0, 0, 3, 0, 0, 0, 2][..],
        &[9; 12],
    ]
    .concat();
    let labels = b"\0\0\x08\x01\0\0\0\x05\x01\x02\x03\x04\x05".to_vec();
    let gzip = |bytes: &[u8]| {
        let mut out = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::best());
        out.write_all(bytes)
            .and_then(|()| out.finish())
            .unwrap_or_default()
    };
    let bomb = [&[0, 0, 8, 1, 0, 16, 0, 0][..], &vec![0; 1 << 20]].concat();
    vec![gzip(&images), gzip(&labels), gzip(&bomb), images, labels]
}

fn cifar_pickle(data: &[u8]) {
    if let Ok(batch) = cifar10::parse_pickle(data) {
        batch.consistent();
    }
}

fn cifar_binary(data: &[u8]) {
    if let Ok(batch) = cifar10::parse_binary(data) {
        batch.consistent();
    }
}

fn cifar_archive(data: &[u8]) {
    if let Some((_file, path)) = file(data)
        && let Ok(batches) = cifar10::read_archive(&path, cifar10::Split::Test)
    {
        assert_eq!(batches.len(), 1);
    }
}

/// One image of class 7 as Python 2 and numpy pickled it.
pub(crate) fn small_pickle() -> Vec<u8> {
    let mut out = b"\x80\x02}q\x01(U\x06labelsq\x02]q\x03K\x07aU\x04dataq\x04cnumpy.core.multiarray\n_reconstruct\nq\x05\
        cnumpy\nndarray\nq\x06K\x00\x85U\x01b\x87Rq\x07(K\x01K\x01M\x00\x0c\x86cnumpy\ndtype\nq\x08U\x02u1K\x00K\x01\x87R\
        q\x09(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb\x89T\x00\x0c\x00\x00"
        .to_vec();
    out.extend((0..3072_u32).map(|i| (i % 251) as u8));
    out.extend(b"r\x00\x01\x00\x00tbU\x09filenames]q\x0aU\x05x.pngau.");
    out
}

/// The same image in the binary version.
pub(crate) fn small_binary() -> Vec<u8> {
    std::iter::once(7)
        .chain((0..3072_u32).map(|i| (i % 251) as u8))
        .collect()
}

fn cifar_pickle_seeds() -> Vec<Vec<u8>> {
    vec![small_pickle()]
}

fn cifar_binary_seeds() -> Vec<Vec<u8>> {
    vec![small_binary()]
}

/// An archive of one member; empty if that is impossible.
pub(crate) fn small_archive(name: &str, content: &[u8]) -> Vec<u8> {
    archive_of(&[(name, content)])
}

/// A tar.gz of these files, with any names.
pub(crate) fn archive_of(members: &[(&str, &[u8])]) -> Vec<u8> {
    let packed = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
    let mut archive = tar::Builder::new(packed);
    let append = |(name, content): &(&str, &[u8])| {
        let mut header = tar::Header::new_gnu();
        // Circumvents the writer's check, which refuses `..`.
        let end = name.len().min(header.as_old().name.len());
        header.as_old_mut().name[..end].copy_from_slice(&name.as_bytes()[..end]);
        header.set_size(content.len() as u64);
        header.set_mode(0o644);
        header.set_cksum();
        archive.append(&header, *content)
    };
    let written = members.iter().try_for_each(append);
    let finished = written.and_then(|()| archive.into_inner()?.finish());
    finished.unwrap_or_default()
}

fn cifar_archive_seeds() -> Vec<Vec<u8>> {
    vec![
        small_archive("cifar-10-batches-py/test_batch", &small_pickle()),
        small_archive("cifar-10-batches-bin/test_batch.bin", &small_binary()),
    ]
}

fn packed(data: &[u8]) {
    // As it is, and with the checksum of what it is.
    for data in [data.to_vec(), sealed(data, "", "")] {
        let Some((_file, path)) = file(&data) else {
            return;
        };
        if let Ok(Some(packed)) = Tokens::open(&path) {
            let mut tokens = Vec::new();
            let all = packed.about.tokens;
            for range in [0..all.min(1), 0..all, all / 2..all] {
                if packed.read(range.clone(), &mut tokens).is_ok() {
                    assert_eq!(tokens.len(), range.len());
                }
            }
        }
    }
}

/// A packed file whose description has `new` for `old`, with the length and the checksum that it then has.
pub(crate) fn sealed(data: &[u8], old: &str, new: &str) -> Vec<u8> {
    let Some((all, end)) = data.split_last_chunk::<END>() else {
        return data.to_vec();
    };
    let size = end
        .as_chunks()
        .0
        .first()
        .map_or(0, |size| u64::from_le_bytes(*size));
    let size = usize::try_from(size).unwrap_or(usize::MAX).min(all.len());
    let (tokens, about) = all.split_at(all.len() - size);
    let about = match old {
        "" => about.to_vec(),
        _ => String::from_utf8_lossy(about)
            .replacen(old, new, 1)
            .into_bytes(),
    };
    let size = (about.len() as u64).to_le_bytes();
    [tokens, &about, &size, &Sha256::digest(&about)].concat()
}

/// A file of these documents with `vocabulary` tokens: `!` for token 0, which ends documents, and characters.
pub(crate) fn packed_file(documents: &[&[u32]], vocabulary: u32) -> Vec<u8> {
    let mut out = Vec::new();
    let names = (0..vocabulary).map(|token| char::from_u32(33 + token).unwrap_or('?'));
    let names = names.map(|c| c.to_string().into_bytes().into()).collect();
    let written = Packer::new(&mut out, names, Some(0), "").and_then(|mut packer| {
        for document in documents {
            packer.push(document, document.len() as u64)?;
            packer.end_document()?;
        }
        packer.finish()
    });
    written.map(|_| out).unwrap_or_default()
}

fn packed_seeds() -> Vec<Vec<u8>> {
    vec![
        packed_file(&[&[1, 2, 3], &[], &[4, 1, 0, 2]], 5),
        packed_file(&[], 5),
        packed_file(&[&[1; 9000]], 90),
    ]
}

fn proc_status(data: &[u8]) {
    let _ = phalanx_base::process::proc_bytes(&String::from_utf8_lossy(data), "VmHWM:");
}

fn proc_seeds() -> Vec<Vec<u8>> {
    vec![
        b"Name:\tx\nVmHWM:\t    1234 kB\nVmRSS:\t 7 kB\n".to_vec(),
        b"VmHWM: 18446744073709551615 kB".to_vec(),
    ]
}

/// Reads, fits and transforms a table, and reads the preprocessing again.
fn table(data: &[u8]) {
    let text = String::from_utf8_lossy(data);
    let _ = Preprocessing::from_json(&text);
    let Ok(table) = Table::from_csv("t", &text, &TableOptions::default()) else {
        return;
    };
    let columns = table.columns();
    let Some(target) = columns.last() else { return };
    let fitted = table
        .without_missing(target)
        .and_then(|known| Ok((Preprocessing::fit(&known, target, &[])?, known)));
    if let Ok((fitted, known)) = fitted {
        let mut batch = TableBatch::default();
        let rows = fitted.transform(&known).expect("its own table");
        rows.read_batch(0, &[0], &mut batch).expect("a row");
        assert_eq!(batch.features.len(), fitted.width());
        assert_eq!(
            Preprocessing::from_json(&fitted.to_json()).ok(),
            Some(fitted)
        );
    }
}

fn table_seeds() -> Vec<Vec<u8>> {
    vec![
        b"a;b;y\r\n1;\"x;\r\n\"\"\";2\r\n;NA;3\r\n".to_vec(),
        b"a,b\n1,yes\n2e3,no\nNaN,no\n".to_vec(),
        b"{\"features\":[{\"column\":\"a\",\"categories\":[\"x\"],\"fill\":0,\"mean\":0,\"std\":1}],\
          \"target\":{\"column\":\"y\",\"fill\":0,\"mean\":0,\"std\":1}}"
            .to_vec(),
    ]
}

#[cfg(feature = "parquet")]
fn parquet(data: &[u8]) {
    let Some((file, _)) = file(data) else { return };
    if let Ok(file) = crate::parquet::ParquetFile::new("t", file) {
        for group in 0..file.row_groups().len() {
            let _ = file.read(group, |_| Ok(()));
        }
    }
}

#[cfg(feature = "parquet")]
fn parquet_seeds() -> Vec<Vec<u8>> {
    vec![include_bytes!("../tests/table/small.parquet").to_vec()]
}

/// An archive with a long name, and what WebDataset writes.
fn tar_seeds() -> Vec<Vec<u8>> {
    let mut archive = tar::Builder::new(Vec::new());
    for name in ["a.txt", "a.cls", &format!("{}/b.txt", "x".repeat(150))] {
        let mut header = tar::Header::new_gnu();
        header.set_size(3);
        let _ = archive.append_data(&mut header, name, &b"abc"[..]);
    }
    let made = archive.into_inner().unwrap_or_default();
    vec![
        made,
        include_bytes!("../tests/fixtures/webdataset.tar").to_vec(),
    ]
}

fn lines_seeds() -> Vec<Vec<u8>> {
    vec![b"{\"a\": [1, {}]}\n\n{\"b\": \"\\u00e9\"}".to_vec()]
}

/// Of a shard of two samples.
fn index_seeds() -> Vec<Vec<u8>> {
    let list = br#"{"format":"jsonl","shards":[{"name":"a","bytes":9,"stamp":"","samples":2,"digest":"","damaged":0}]}"#;
    let offsets: Vec<u8> = [0_u64, 4, 9]
        .into_iter()
        .flat_map(u64::to_le_bytes)
        .collect();
    let length = (list.len() as u64).to_le_bytes();
    vec![[&offsets[..], list, &length, b"PHXINDX1"].concat()]
}

#[cfg(feature = "images")]
fn image(data: &[u8]) {
    if let Ok(image) = phalanx_image::decode(data) {
        assert_eq!(image.pixels.len(), image.width * image.height * 3);
    }
}

/// JPEG with subsampled, CMYK and progressive colors; PNG with a palette and with 16 bits.
#[cfg(feature = "images")]
fn image_seeds() -> Vec<Vec<u8>> {
    vec![
        include_bytes!("../tests/images/420.jpg").to_vec(),
        include_bytes!("../tests/images/cmyk.jpg").to_vec(),
        include_bytes!("../tests/images/progressive.jpg").to_vec(),
        include_bytes!("../tests/images/palette.png").to_vec(),
        include_bytes!("../tests/images/rgb16.png").to_vec(),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_target_survives_garbled_seeds() {
        for (_, run, seeds) in TARGETS {
            phalanx_garble::feed(&seeds(), 1500, run);
        }
    }

    #[test]
    fn seeds_are_accepted() {
        let accepted = idx_seeds()
            .iter()
            .filter_map(|seed| file(seed))
            .filter(|(_, path)| {
                mnist::read_images_file(path).is_ok() || mnist::read_labels_file(path).is_ok()
            })
            .count();
        assert_eq!(accepted, 5);
        for seed in packed_seeds() {
            let (_file, path) = file(&seed).unwrap();
            assert!(Tokens::open(&path).unwrap().is_some());
            assert_eq!(sealed(&seed, "", ""), seed);
        }
        let (pickle, binary) = (small_pickle(), small_binary());
        let pickle = cifar10::parse_pickle(&pickle).unwrap();
        let binary = cifar10::parse_binary(&binary).unwrap();
        assert_eq!((pickle.consistent(), binary.consistent()), (1, 1));
        assert!(pickle.images().eq(binary.images()));
        for seed in cifar_archive_seeds() {
            let (_file, path) = file(&seed).unwrap();
            let batches = cifar10::read_archive(&path, cifar10::Split::Test).unwrap();
            assert_eq!(batches, [(0, vec![7])]);
        }
    }
}
