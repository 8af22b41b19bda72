//! Fuzz targets for the readers of files and of `/proc`. The tests here run them on garbled
//! seeds.

use std::fs::File;
use std::io::Write;
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};

use phalanx_nn::{Init, Layout, Params, Scope, Seed};

use crate::pth::{self, DType, PthFile, Saved};
use crate::{checkpoint, cifar10, mnist, process, state};

/// Name, function and seeds of a target.
pub type Target = (&'static str, fn(&[u8]), fn() -> Vec<Vec<u8>>);

/// All fuzz targets of this crate.
pub const TARGETS: &[Target] = &[
    ("train_idx_images", idx_images, idx_seeds),
    ("train_idx_labels", idx_labels, idx_seeds),
    ("train_safetensors", safetensors, safetensors_seeds),
    ("train_checkpoint", state::fuzz, state::fuzz_seeds),
    ("train_pth_archive", pth_archive, pth_seeds),
    ("train_pth_pickle", pth_pickle, pickle_seeds),
    ("train_image", image, image_seeds),
    ("train_cifar_pickle", cifar_pickle, cifar_pickle_seeds),
    ("train_cifar_binary", cifar_binary, cifar_binary_seeds),
    ("train_cifar_archive", cifar_archive, cifar_archive_seeds),
    ("train_proc_status", proc_status, proc_seeds),
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

pub(crate) fn model() -> Option<Params> {
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

/// A file is either valid for this model, or the model is unchanged.
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

/// Reads a file and all its tensors.
fn read_pth(path: &Path) {
    let Ok(file) = PthFile::read(path) else {
        return;
    };
    for (_, tensor) in file.state_dict().into_iter().flatten() {
        assert_eq!(tensor.to_f32().len(), tensor.len());
    }
    if let Ok((tensors, _)) = checkpoint::read_tensors(path) {
        let bytes: usize = tensors.iter().map(|t| t.bytes.len()).sum();
        assert!(bytes <= 16 << 20);
    }
    if let Some(mut params) = model() {
        let before = checkpoint::weights_sha256(&params);
        if checkpoint::load_params(path, &mut params).is_err() {
            assert_eq!(checkpoint::weights_sha256(&params), before);
        }
    }
}

fn pth_archive(data: &[u8]) {
    if let Some((_file, path)) = file(data) {
        read_pth(&path);
    }
}

/// `data` as the pickle in a valid archive, since the checksums would stop it otherwise.
/// The archive has a storage of six numbers.
fn pth_pickle(data: &[u8]) {
    let mut whole = Vec::new();
    if pth::write_archive(&mut whole, "a", data, 1, |_| Ok([1; 24])).is_ok() {
        pth_archive(&whole);
    }
}

fn pth_seeds() -> Vec<Vec<u8>> {
    let tensors = pth_tensors();
    let mut whole = Vec::new();
    let written = pth::write_state_dict(&mut whole, "seed", &tensors);
    written.map(|()| whole).into_iter().collect()
}

fn pickle_seeds() -> Vec<Vec<u8>> {
    let views = b"\x80\x02}q\x00(X\x01\0\0\0aq\x01ctorch._utils\n_rebuild_tensor_v2\nq\x02((X\x07\0\0\0storage\
        ctorch\nFloatStorage\nX\x01\0\0\x000X\x03\0\0\0cpuK\x06tq\x03QK\x01K\x02K\x02\x86K\x01K\x02\x86\x89\
        ccollections\nOrderedDict\n)RtRX\x01\0\0\0b]q\x04(K\x01M\x02\x03J\x01\0\0\0\x8a\x01\xffG?\xf0\0\0\0\0\0\0\
        N\x88h\x01ej\x04\0\0\0\x85a\x87s.";
    vec![views.to_vec(), pth::pickle(&[pth_tensors()[0].head()])]
}

/// The parameters of [`model`].
fn pth_tensors() -> Vec<Saved> {
    let saved = |name: &str, shape: &[usize]| Saved {
        name: name.to_owned(),
        dtype: DType::F32,
        shape: shape.to_vec(),
        bytes: vec![0; 4 * shape.iter().product::<usize>()],
    };
    vec![
        saved("fc.weight", &[2, 3]),
        saved("norm.running_mean", &[2]),
    ]
}

fn image(data: &[u8]) {
    if let Some((_file, path)) = file(data) {
        for channels in [1, 3] {
            if let Ok(pixels) = crate::image::read(&path, [2, 2, channels]) {
                assert_eq!(pixels.len(), 4 * channels);
            }
        }
    }
}

fn image_seeds() -> Vec<Vec<u8>> {
    let png = || -> Option<Vec<u8>> {
        let mut out = Vec::new();
        let mut encoder = png::Encoder::new(&mut out, 2, 2);
        encoder.set_color(png::ColorType::Grayscale);
        let mut writer = encoder.write_header().ok()?;
        writer.write_image_data(&[1, 2, 3, 4]).ok()?;
        writer.finish().ok()?;
        Some(out)
    };
    let pgm = b"P5 # c\n2 2\n255\n\x01\x02\x03\x04".to_vec();
    png().into_iter().chain([pgm]).collect()
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
        let (_file, path) = file(&safetensors_seeds()[0]).unwrap();
        checkpoint::load_params(&path, &mut model().unwrap()).unwrap();
        let (_file, path) = file(&pth_seeds()[0]).unwrap();
        checkpoint::load_params(&path, &mut model().unwrap()).unwrap();
    }
}
