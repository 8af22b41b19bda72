//! MNIST files: found where they are, read what they say, refused by name
//! when they lie.

use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};

use flate2::Compression;
use flate2::write::GzEncoder;
use phalanx_base::ErrorKind;
use phalanx_data::ImageDataset;
use phalanx_data::cifar10;
use phalanx_data::mnist::{self, Split};
use tempfile::TempDir;

const IMAGES: &str = "train-images-idx3-ubyte";
const LABELS: &str = "train-labels-idx1-ubyte";

fn idx(sizes: &[u32], body: &[u8]) -> Vec<u8> {
    let mut bytes = vec![0, 0, 8, sizes.len() as u8];
    sizes.iter().for_each(|s| bytes.extend(s.to_be_bytes()));
    bytes.extend(body);
    bytes
}

/// `n` images of 28 x 28 in which pixel p of image i is (31 i + p) mod 256.
fn images(n: u32) -> Vec<u8> {
    let body: Vec<u8> = (0..n)
        .flat_map(|i| (0..784).map(move |p| (31 * i + p) as u8))
        .collect();
    idx(&[n, 28, 28], &body)
}

fn labels(n: u32) -> Vec<u8> {
    idx(&[n], &(0..n).map(|i| (i % 10) as u8).collect::<Vec<u8>>())
}

fn gz(bytes: &[u8]) -> Vec<u8> {
    let mut out = GzEncoder::new(vec![], Compression::default());
    out.write_all(bytes).unwrap();
    out.finish().unwrap()
}

/// A folder with these files; the path is kept short of the random part in
/// messages by the caller.
fn folder(files: &[(&str, Vec<u8>)]) -> TempDir {
    let dir = tempfile::tempdir().unwrap();
    for (name, bytes) in files {
        let path = dir.path().join(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, bytes).unwrap();
    }
    dir
}

/// The error of loading the training split, without the folder's random name.
fn refused(files: &[(&str, Vec<u8>)], kind: ErrorKind) -> String {
    let dir = folder(files);
    let error = mnist::load(dir.path(), Split::Train).unwrap_err();
    assert_eq!(error.kind(), kind, "{error}");
    let shown = dir.path().display().to_string();
    let text = error.render().replace(&shown, "d");
    text.trim_start_matches("error: ").trim_end().to_owned()
}

#[test]
fn plain_and_compressed_files_are_found_in_all_places() {
    let (i, l) = (images(20), labels(20));
    for place in ["", "raw/", "MNIST/raw/", "FashionMNIST/raw/"] {
        for suffix in ["", ".gz"] {
            let pack = |bytes: &[u8]| {
                if suffix.is_empty() {
                    bytes.to_vec()
                } else {
                    gz(bytes)
                }
            };
            let image_name = format!("{place}{IMAGES}{suffix}");
            let label_name = format!("{place}{LABELS}{suffix}");
            let dir = folder(&[(&image_name, pack(&i)), (&label_name, pack(&l))]);
            let set = mnist::load(dir.path(), Split::Train).unwrap();
            assert_eq!((set.len(), set.classes()), (20, 10));
            assert_eq!(set.image_shape(), [28, 28, 1]);
            let fashion = place.starts_with("Fashion");
            assert_eq!(set.name(), if fashion { "Fashion-MNIST" } else { "MNIST" });
        }
    }
}

#[test]
fn a_browser_may_have_unpacked_a_file_without_renaming_it() {
    let dir = folder(&[
        (&format!("{IMAGES}.gz"), images(3)),
        (LABELS, gz(&labels(3))),
    ]);
    assert_eq!(mnist::load(dir.path(), Split::Train).unwrap().len(), 3);
}

#[test]
fn the_test_split_has_its_own_files() {
    let dir = folder(&[
        (IMAGES, images(20)),
        (LABELS, labels(20)),
        ("t10k-images-idx3-ubyte", images(7)),
        ("t10k-labels-idx1-ubyte", labels(7)),
    ]);
    assert_eq!(mnist::load(dir.path(), Split::Test).unwrap().len(), 7);
}

#[test]
fn values_are_normalised_and_labels_read() {
    let dir = folder(&[(IMAGES, images(12)), (LABELS, labels(12))]);
    let set = mnist::load(dir.path(), Split::Train).unwrap();
    let mut image = vec![0.0; 784];
    assert_eq!(set.read(11, &mut image).unwrap(), 1);
    for (p, &value) in image.iter().enumerate() {
        let pixel = (31 * 11 + p) as u8;
        assert_eq!(set.pixels(11).unwrap()[p], pixel);
        assert_eq!(value, (f32::from(pixel) / 255.0 - 0.1307) / 0.3081);
    }
    assert!(set.pixels(12).is_none());
    assert_eq!(set.labels()[11], 1);
}

#[test]
fn reading_out_of_bounds_is_refused() {
    let dir = folder(&[(IMAGES, images(2)), (LABELS, labels(2))]);
    let set = mnist::load(dir.path(), Split::Train).unwrap();
    let error = set.read(2, &mut [0.0; 784]).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Usage);
    assert_eq!(
        error.to_string(),
        "MNIST has 2 samples, so there is no sample 2"
    );
    assert!(set.read(0, &mut [0.0; 783]).is_err());
}

#[test]
fn missing_data_says_what_is_expected_and_what_to_do() {
    let dir = tempfile::tempdir().unwrap();
    let absent = dir.path().join("pictures");
    let error = mnist::load(&absent, Split::Train).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Usage);
    let text = error.to_string();
    assert!(text.starts_with("no data folder "), "{text}");
    fs::create_dir(&absent).unwrap();
    let error = mnist::load(&absent, Split::Train).unwrap_err();
    let text = error.render();
    assert!(text.starts_with("error: no MNIST files in "), "{text}");
    for word in [
        IMAGES,
        LABELS,
        "t10k-images-idx3-ubyte",
        "t10k-labels-idx1-ubyte",
        "each plain or .gz",
        "phalanx download mnist --to ",
        "pictures      (11.6 MB)",
        "--data synthetic",
    ] {
        assert!(text.contains(word), "{word} is not in: {text}");
    }
    let fashion = dir.path().join("fashion");
    let text = mnist::load(&fashion, Split::Train).unwrap_err().render();
    assert!(
        text.contains("phalanx download fashion-mnist --to "),
        "{text}"
    );
    let file = dir.path().join("file");
    fs::write(&file, "x").unwrap();
    let error = mnist::load(&file, Split::Train).unwrap_err();
    assert!(error.to_string().contains("is a file, not a data folder"));
}

#[test]
fn a_missing_half_is_named() {
    let text = refused(&[(IMAGES, images(2))], ErrorKind::Usage);
    assert!(text.contains("lacks train-labels-idx1-ubyte"), "{text}");
    let text = refused(
        &[("raw/train-labels-idx1-ubyte.gz", gz(&labels(2)))],
        ErrorKind::Usage,
    );
    assert!(
        text.contains("d/raw lacks train-images-idx3-ubyte"),
        "{text}"
    );
}

#[test]
fn truncated_files_say_how_much_is_there_and_how_much_should_be() {
    // 3 images: 16 + 2,352 bytes.
    let whole = images(3);
    for keep in [0, 3, 15, 16, 2000, 2367] {
        let cut = whole[..keep].to_vec();
        let text = refused(&[(IMAGES, cut), (LABELS, labels(3))], ErrorKind::Data);
        let expected = match keep {
            0..16 => format!("d/{IMAGES} ends after {keep} of 16 header bytes"),
            16 => format!("d/{IMAGES} ends after 16 of 2,368 bytes"),
            2000 => format!("d/{IMAGES} ends after 2,000 of 2,368 bytes"),
            _ => format!("d/{IMAGES} ends after 2,367 of 2,368 bytes"),
        };
        assert!(text.starts_with(&expected), "{text}");
        assert!(text.contains("; the file is truncated (SHA-256 "), "{text}");
        assert!(text.ends_with(", expected ba891046e650…)"), "{text}");
    }
}

#[test]
fn truncated_compressed_files_count_their_content() {
    // Noise, so that compression does not hide the cut.
    let noise: Vec<u8> = (0..784_u32 * 50)
        .map(|i| (i.wrapping_mul(2_654_435_761) >> 23) as u8)
        .collect();
    let whole = gz(&idx(&[50, 28, 28], &noise));
    for keep in [20, whole.len() / 2, whole.len() - 9, whole.len() - 1] {
        let files = [
            ("train-images-idx3-ubyte.gz", whole[..keep].to_vec()),
            (LABELS, labels(50)),
        ];
        let text = refused(&files, ErrorKind::Data);
        let what = if keep >= whole.len() - 9 {
            // All of the content, but not all of its checksum.
            "ends before the checksum of its 39,216 bytes"
        } else {
            "ends after "
        };
        let named = format!("d/train-images-idx3-ubyte.gz {what}");
        assert!(text.starts_with(&named), "{text}");
        assert!(text.contains("; the file is truncated (SHA-256 "), "{text}");
        assert!(text.ends_with(", expected 440fcabf73cc…)"), "{text}");
    }
    let half = [
        (
            "train-images-idx3-ubyte.gz",
            whole[..whole.len() / 2].to_vec(),
        ),
        (LABELS, labels(50)),
    ];
    assert!(refused(&half, ErrorKind::Data).contains(" of 39,216 bytes;"));
}

#[test]
fn the_checksum_of_another_set_is_not_expected_from_fashion_mnist() {
    let files = [
        (
            "FashionMNIST/raw/train-images-idx3-ubyte",
            images(2)[..99].to_vec(),
        ),
        ("FashionMNIST/raw/train-labels-idx1-ubyte", labels(2)),
    ];
    let text = refused(&files, ErrorKind::Data);
    assert!(
        text.contains("(SHA-256 ") && !text.contains("expected"),
        "{text}"
    );
}

#[test]
fn damaged_compressed_files_are_named() {
    let mut bytes = gz(&images(30));
    let checksum = bytes.len() - 6;
    bytes[checksum] ^= 1;
    let files = [("train-images-idx3-ubyte.gz", bytes), (LABELS, labels(30))];
    let text = refused(&files, ErrorKind::Data);
    assert!(text.contains("the compressed data is damaged"), "{text}");

    let mut bytes = gz(&images(30));
    bytes[30..60].fill(0xff);
    let files = [("train-images-idx3-ubyte.gz", bytes), (LABELS, labels(30))];
    let text = refused(&files, ErrorKind::Data);
    assert!(
        text.contains("damaged") || text.contains("truncated"),
        "{text}"
    );
}

#[test]
fn bytes_after_the_end_are_refused() {
    let mut long = images(3);
    long.push(0);
    let text = refused(
        &[(IMAGES, long.clone()), (LABELS, labels(3))],
        ErrorKind::Data,
    );
    assert!(text.contains("has more than the 2,368 bytes"), "{text}");
    let files = [
        ("train-images-idx3-ubyte.gz", gz(&long)),
        (LABELS, labels(3)),
    ];
    assert!(refused(&files, ErrorKind::Data).contains("has more than the"));
    let mut trailing = gz(&images(3));
    trailing.extend(b"rubbish, more than the ten bytes of a gzip header");
    let files = [
        ("train-images-idx3-ubyte.gz", trailing),
        (LABELS, labels(3)),
    ];
    assert!(refused(&files, ErrorKind::Data).contains("damaged"));
}

#[test]
fn files_of_another_kind_are_told_apart() {
    let with = |images: Vec<u8>| refused(&[(IMAGES, images), (LABELS, labels(2))], ErrorKind::Data);
    let page = b"<!DOCTYPE html><html><body>404</body></html>".to_vec();
    let text = with(page);
    assert!(text.contains("it looks like a web page"), "{text}");
    assert!(
        text.contains("it starts with 3c21444f, not 00000803"),
        "{text}"
    );
    assert!(with(labels(200)).contains("it is a file of labels"));
    let mut floats = images(2);
    floats[2] = 0x0d;
    assert!(with(floats).contains("it starts with 00000d03"));
    let text = refused(&[(IMAGES, images(2)), (LABELS, images(2))], ErrorKind::Data);
    assert!(text.contains("not an IDX label file"), "{text}");
    assert!(text.contains("it is a file of images"), "{text}");
}

/// Headers that promise the moon: refused before anything of that size is
/// allocated (this test would need terabytes otherwise).
#[test]
fn absurd_headers_allocate_nothing() {
    if !phalanx_garble::alone("mnist_files::absurd_headers_allocate_nothing") {
        return;
    }
    let before = phalanx_base::process::peak_rss_bytes().unwrap();
    let with = |sizes: [u32; 3], packed: bool| {
        let bytes = idx(&sizes, &[0; 100]);
        let bytes = if packed { gz(&bytes) } else { bytes };
        refused(&[(IMAGES, bytes), (LABELS, labels(2))], ErrorKind::Data)
    };
    for packed in [false, true] {
        let text = with([u32::MAX, 1024, 1024], packed);
        assert!(text.contains("its header describes"), "{text}");
        assert!(with([u32::MAX, u32::MAX, u32::MAX], packed).contains("not MNIST"));
        assert!(with([0, 28, 28], packed).contains("not MNIST"));
        assert!(with([3, 0, 28], packed).contains("not MNIST"));
    }
    // Believable sizes that the file cannot hold.
    assert!(with([2_000_000, 28, 28], false).contains("truncated"));
    let text = with([2_000_000, 28, 28], true);
    assert!(text.contains("compressed bytes can hold"), "{text}");
    let grown = phalanx_base::process::peak_rss_bytes().unwrap() - before;
    assert!(grown < 64 << 20, "{grown} bytes");
}

#[test]
fn images_and_labels_must_belong_together() {
    let text = refused(&[(IMAGES, images(3)), (LABELS, labels(4))], ErrorKind::Data);
    assert!(
        text.contains("has 3 images") && text.contains("4 labels"),
        "{text}"
    );
    let mut wrong = labels(3);
    wrong[8 + 2] = 10;
    let text = refused(&[(IMAGES, images(3)), (LABELS, wrong)], ErrorKind::Data);
    assert!(
        text.contains("label 2 is 10; the classes are 0 to 9"),
        "{text}"
    );
}

fn real() -> Option<PathBuf> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../../shared/data/mnist");
    if path.is_dir() {
        return Some(path);
    }
    eprintln!("SKIPPED: no real MNIST in {}", path.display());
    None
}

#[test]
fn the_real_files_are_read() {
    let Some(folder) = real() else { return };
    let train = mnist::load(&folder, Split::Train).unwrap();
    let test = mnist::load(&folder, Split::Test).unwrap();
    assert_eq!((train.len(), test.len()), (60_000, 10_000));
    assert_eq!(train.labels()[..10], [5, 0, 4, 1, 9, 2, 1, 3, 1, 4]);
    assert_eq!(test.labels()[..5], [7, 2, 1, 0, 4]);
    let mut counts = [0; 10];
    train
        .labels()
        .iter()
        .for_each(|&l| counts[usize::from(l)] += 1);
    let expected = [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949];
    assert_eq!(counts, expected);
    // Normalisation's constants are this set's own.
    let (mut sum, mut squares) = (0.0, 0.0);
    let mut image = vec![0.0; 784];
    for i in 0..train.len() {
        train.read(i, &mut image).unwrap();
        for &x in &image {
            sum += f64::from(x);
            squares += f64::from(x * x);
        }
    }
    let n = 784.0 * 60_000.0;
    assert!((sum / n).abs() < 1e-3, "{}", sum / n);
    assert!((squares / n - 1.0).abs() < 1e-3, "{}", squares / n);
}

#[test]
fn a_real_file_cut_short_shows_both_checksums() {
    let Some(folder) = real() else { return };
    let mut images = fs::read(folder.join("train-images-idx3-ubyte.gz")).unwrap();
    images.truncate(2_000_000);
    let labels = fs::read(folder.join("train-labels-idx1-ubyte.gz")).unwrap();
    let files = [
        ("train-images-idx3-ubyte.gz", images),
        ("train-labels-idx1-ubyte.gz", labels),
    ];
    let text = refused(&files, ErrorKind::Data);
    assert!(
        text.contains(" of 47,040,016 bytes; the file is truncated"),
        "{text}"
    );
    assert!(text.contains(", expected 440fcabf73cc…)"), "{text}");
}

#[test]
fn zero_bytes_after_a_compressed_stream_are_skipped() {
    let whole = images(300);
    let (first, second) = whole.split_at(1000);
    let zeros = |n| vec![0; n];
    for parts in [
        vec![gz(&whole), zeros(1)],
        // More than a buffer holds.
        vec![gz(&whole), zeros(200_000)],
        vec![gz(first), zeros(512), gz(second), zeros(9)],
        vec![gz(first), gz(second)],
    ] {
        let dir = folder(&[
            ("train-images-idx3-ubyte.gz", parts.concat()),
            (LABELS, labels(300)),
        ]);
        let packed = dir.path().join("train-images-idx3-ubyte.gz");
        let gzip = std::process::Command::new("gzip")
            .arg("-dc")
            .arg(&packed)
            .output()
            .unwrap();
        // `gzip` ignores a stream after zero bytes; Python's module reads it, as this does.
        assert!(gzip.stdout == whole || parts.len() == 4 && gzip.stdout == first);
        let read = mnist::load(dir.path(), Split::Train).unwrap();
        let plain = folder(&[(IMAGES, whole.clone()), (LABELS, labels(300))]);
        let plain = mnist::load(plain.path(), Split::Train).unwrap();
        let (mut a, mut b) = ([0.0; 784], [1.0; 784]);
        read.read(299, &mut a).unwrap();
        plain.read(299, &mut b).unwrap();
        assert_eq!(a, b);
    }
    let files = [
        (
            "train-images-idx3-ubyte.gz",
            [gz(&whole), zeros(7), b"more than ten bytes".to_vec()].concat(),
        ),
        (LABELS, labels(300)),
    ];
    assert!(refused(&files, ErrorKind::Data).contains("damaged"));
}

#[test]
fn files_that_cannot_be_looked_at_are_not_said_to_be_missing() {
    let dir = tempfile::tempdir().unwrap();
    let link = |to: &str, name: &str| {
        let _ = fs::remove_file(dir.path().join(name));
        std::os::unix::fs::symlink(to, dir.path().join(name)).unwrap();
    };
    let said = |name: &str, error: phalanx_base::Error| {
        assert_eq!(error.kind(), ErrorKind::System, "{error}");
        assert!(error.to_string().contains(name), "{error}");
        error.to_string()
    };
    // A link that leads nowhere, and one to itself, which the system refuses.
    for (to, why) in [("gone", "cannot follow the link"), (IMAGES, "cannot read")] {
        link(to, IMAGES);
        let text = said(IMAGES, mnist::load(dir.path(), Split::Train).unwrap_err());
        assert!(text.starts_with(why), "{text}");
    }
    for (to, why) in [
        ("gone", "cannot follow the link"),
        ("data_batch_1", "cannot read"),
    ] {
        link(to, "data_batch_1");
        let error = cifar10::load(
            dir.path(),
            cifar10::Split::Train,
            cifar10::Scaling::Normalised,
        );
        assert!(said("data_batch_1", error.unwrap_err()).starts_with(why));
    }
    link("gone", "folder");
    let folder = dir.path().join("folder");
    said("folder", mnist::load(&folder, Split::Train).unwrap_err());
}

#[test]
fn a_git_lfs_pointer_is_named() {
    let pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 9\n".to_vec();
    let text = refused(&[(IMAGES, pointer), (LABELS, labels(2))], ErrorKind::Usage);
    assert!(
        text.contains("Git LFS pointer") && text.contains("git lfs pull"),
        "{text}"
    );
}
