//! Readers of files and of `/proc`, fed with garbage: the bodies of the fuzz
//! targets in `fuzz/`, which the tests here run on garbled seeds.

use std::fs::File;
use std::io::Write;
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};

use phalanx_nn::{Init, Layout, Params, Scope, Seed};

use crate::{checkpoint, mnist, process};

/// Name, body, seeds.
pub type Target = (&'static str, fn(&[u8]), fn() -> Vec<Vec<u8>>);

/// All of them.
pub const TARGETS: &[Target] = &[
    ("train_idx_images", idx_images, idx_seeds),
    ("train_idx_labels", idx_labels, idx_seeds),
    ("train_safetensors", safetensors, safetensors_seeds),
    ("train_proc_status", proc_status, proc_seeds),
];

/// A file with these bytes, and a path to it. It has no name, so nothing is
/// left behind.
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

/// Images and labels, plain and compressed, and a bomb.
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

fn model() -> Option<Params> {
    let mut scope = Scope::new(Seed(1));
    let mut fc = scope.enter("fc");
    fc.param(
        "weight",
        &[2, 3],
        Layout::Same,
        Init::Uniform {
            low: -1.0,
            high: 1.0,
        },
    );
    scope.enter("norm").buffer("running_mean", &[2], 0.0);
    scope.build().ok()
}

/// A file either is this model's, or changes nothing.
fn safetensors(data: &[u8]) {
    let (Some(mut params), Some((_file, path))) = (model(), file(data)) else {
        return;
    };
    let before = checkpoint::weights_sha256(&params);
    if checkpoint::load_params(&path, &mut params).is_err() {
        assert_eq!(checkpoint::weights_sha256(&params), before);
    }
}

fn safetensors_seeds() -> Vec<Vec<u8>> {
    let saved = || -> Option<Vec<u8>> {
        let folder = tempfile::tempdir().ok()?;
        let path: &Path = &folder.path().join("seed");
        let notes = [("epoch".to_owned(), "3".to_owned())].into();
        checkpoint::save_params(path, &model()?, &notes).ok()?;
        std::fs::read(path).ok()
    };
    let header = br#"{"fc.weight":{"dtype":"F32","shape":[2,3],"data_offsets":[0,24]}}"#;
    let mut half = (header.len() as u64).to_le_bytes().to_vec();
    half.extend_from_slice(header);
    half.extend([0; 24]);
    saved().into_iter().chain([half]).collect()
}

fn proc_status(data: &[u8]) {
    let _ = process::parse_peak_rss(&String::from_utf8_lossy(data));
}

fn proc_seeds() -> Vec<Vec<u8>> {
    vec![
        b"Name:\tx\nVmHWM:\t    1234 kB\nVmRSS:\t 7 kB\n".to_vec(),
        b"VmHWM: 18446744073709551615 kB".to_vec(),
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
        let (_file, path) = file(&safetensors_seeds()[0]).unwrap();
        checkpoint::load_params(&path, &mut model().unwrap()).unwrap();
    }
}
