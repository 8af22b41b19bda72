use std::path::PathBuf;

use super::*;
use crate::dataset::ImageDataset as _;
use crate::fuzzing::{archive_of, small_archive, small_binary, small_pickle};
use phalanx_base::ErrorKind;

/// Where the real files are, if anywhere.
fn real() -> Option<PathBuf> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../../shared/data/cifar-10");
    let data = std::env::var_os("PHALANX_DATA").map(|d| PathBuf::from(d).join("cifar-10"));
    let found = [
        data,
        Some(folder),
        Some("/work/shared/data/cifar-10".into()),
    ]
    .into_iter()
    .flatten()
    .find(|folder| check(folder).is_ok());
    if found.is_none() {
        eprintln!("skipped: no CIFAR-10 here; set PHALANX_DATA to the folder above cifar-10");
    }
    found
}

fn message(result: Result<Batch<'_>>) -> String {
    let error = result.expect_err("refused");
    assert_eq!(error.kind(), ErrorKind::Data);
    error.to_string()
}

/// The digests are numpy's, of the pickles as Python itself reads them:
/// `sha256(data.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1).tobytes() + labels.tobytes())`.
#[test]
fn the_real_files_are_read_as_python_reads_them() {
    let Some(folder) = real() else {
        return;
    };
    let train = load(&folder, Split::Train, Scaling::Normalised).expect("train");
    assert_eq!(train.len(), 50_000);
    assert_eq!(
        train.sha256(),
        "f912919bdea371136f1aa4feed6beeca728015a5f08b1899a29c932a7e30be2b"
    );
    assert_eq!(train.labels()[..10], [6, 9, 9, 4, 1, 1, 2, 7, 8, 3]);
    let mut image = vec![0.0; PIXELS];
    assert_eq!(train.read(0, &mut image).expect("image"), 6);
    let expected: Vec<f32> = [59., 62., 63.]
        .iter()
        .zip(MEAN.iter().zip(&DEVIATION))
        .map(|(x, (mean, deviation))| (x / 255.0 - mean) / deviation)
        .collect();
    assert_eq!(image[..3], expected);
    let test = load(&folder, Split::Test, Scaling::Unit).expect("test");
    assert_eq!(test.len(), 10_000);
    assert_eq!(
        test.sha256(),
        "8193b3fbce55bec361cd1b8fd4880cb1649832dc4d6de6da1e7a21847a4843aa"
    );
}

/// As the authors packed them: the published folder with all its files. Read in
/// place, and unpacked first, it holds what the files themselves do.
#[test]
fn the_real_files_in_an_archive_are_the_same_set() {
    let Some(folder) = real() else { return };
    let Ok(Source::Python(folder)) = check(&folder) else {
        eprintln!("skipped: the set here is not the Python version");
        return;
    };
    let dir = tempfile::tempdir().expect("folder");
    let file = std::fs::File::create(dir.path().join("cifar-10-python.tar.gz")).expect("file");
    // Not compressed: 180 MB of noise would take a minute.
    let packed = flate2::write::GzEncoder::new(file, flate2::Compression::none());
    let mut archive = tar::Builder::new(packed);
    archive
        .append_dir_all("cifar-10-batches-py", &folder)
        .expect("packed");
    let packed = archive.into_inner().expect("written");
    drop(packed.finish().expect("written"));
    let digest = |place: &Path| {
        let test = load(place, Split::Test, Scaling::Unit).expect("test");
        test.sha256()
    };
    let expected = digest(&folder);
    assert!(matches!(check(dir.path()), Ok(Source::Archive(_))));
    assert_eq!(digest(dir.path()), expected);
    unpack(dir.path()).expect("unpacked");
    let inner = dir.path().join("cifar-10-batches-py");
    assert_eq!(
        check(dir.path()).expect("there"),
        Source::Python(inner.clone())
    );
    assert_eq!(digest(dir.path()), expected);
    for name in (1..=5).map(|i| format!("data_batch_{i}")) {
        let read = |folder: &Path| std::fs::read(folder.join(&name)).expect("a batch");
        assert!(read(&inner) == read(&folder), "{name} is another");
    }
}

#[test]
fn planes_become_pixels() {
    let bytes = small_binary();
    let batch = parse_binary(&bytes).expect("one image");
    let mut set = with_room(1, Scaling::Unit);
    put(&mut set, 0, &batch);
    let pixels = set.pixels(0).expect("an image");
    for (i, pixel) in pixels.chunks_exact(3).enumerate() {
        let plane = |c: usize| ((i + 1024 * c) % 251) as u8;
        assert_eq!(pixel, [plane(0), plane(1), plane(2)], "pixel {i}");
    }
    let mut image = vec![0.0; PIXELS];
    assert_eq!(set.read(0, &mut image).expect("an image"), 7);
    assert_eq!(image[3], 1.0 / 255.0);
    assert!(set.read(1, &mut image).is_err());
}

#[test]
fn every_shorter_pickle_is_refused_by_name() {
    let whole = small_pickle();
    for len in (0..300).chain(whole.len() - 60..whole.len()) {
        let text = message(pickle::parse(Path::new("d/data_batch_1"), &whole[..len]));
        assert!(
            text.starts_with("d/data_batch_1: at byte "),
            "{len}: {text}"
        );
        assert!(
            ["ends early", "expected", "a name has no end"]
                .iter()
                .any(|words| text.contains(words)),
            "{len}: {text}"
        );
    }
}

#[test]
fn lies_in_a_pickle_are_named_with_their_place() {
    let whole = small_pickle();
    let change = |from: &[u8], to: &[u8]| {
        let at = whole
            .windows(from.len())
            .position(|w| w == from)
            .expect("there");
        [&whole[..at], to, &whole[at + from.len()..]].concat()
    };
    let deep = [&b"\x80\x02N"[..], &[0x85; 100_000], b"."].concat();
    let many = [&b"\x80\x02("[..], &[b'N'; 1 << 19], b"t."].concat();
    let marks = [&b"\x80\x02"[..], &[b'('; 1 << 19]].concat();
    for (bytes, words) in [
        (
            change(b"cnumpy\ndtype", b"cos\nsystem"),
            ["os.system", "expected one of numpy's three"],
        ),
        (
            change(b"numpy.core.multiarray\n_re", b"builtins\neval\n(((("),
            ["builtins.eval", "numpy"],
        ),
        (
            change(b"K\x07a", b"K\x0ba"),
            ["label 0 is 11", "expected 0 to 9"],
        ),
        (
            change(b"K\x07a", b"Na"),
            ["label 0 is None", "expected 0 to 9"],
        ),
        (
            change(b"M\x00\x0c\x86", b"M\x01\x0c\x86"),
            ["shape [1, 3073]", "expected [1, 3072]"],
        ),
        (
            change(b"T\x00\x0c\x00\x00", b"T\xff\xff\xff\x7f"),
            ["2147483647 bytes are expected", "ends early"],
        ),
        (
            change(b"T\x00\x0c\x00\x00", b"T\xff\xff\xff\xff"),
            ["a str of -1 bytes", "at byte"],
        ),
        (
            change(b"u1", b"f4"),
            ["another type or order", "unsigned bytes"],
        ),
        (
            change(b"tb\x89", b"tb\x88"),
            ["another type or order", "unsigned bytes"],
        ),
        (
            change(b"labels", b"lables"),
            ["lacks \"labels\"", "expected a batch"],
        ),
        (
            change(b"]q\x03K\x07a", b"K\x07"),
            ["\"labels\" is an int", "expected a list"],
        ),
        (
            change(b"}q\x01", b"]q\x01"),
            ["sets items of a list", "at byte"],
        ),
        (change(b"u.", b"u.x"), ["1 bytes follow its end", "at byte"]),
        (
            change(b"u.", b"uN."),
            ["1 objects are left on the stack", "at byte"],
        ),
        (
            change(b"\x80\x02", b"\x80\x04"),
            ["protocol 2", "found 8004"],
        ),
        (b"<html>".to_vec(), ["web page", "at byte 0"]),
        (Vec::new(), ["found an empty file", "at byte 0"]),
        (deep, ["gives a tuple", "expected one dict"]),
        (
            b"\x80\x02N.".to_vec(),
            ["gives None", "at byte 3: the pickle"],
        ),
        (many, ["more than 262144 objects", "at byte 262,"]),
        (marks, ["more than 262144 objects", "at byte 262,"]),
        // What the machine knows, but not from these files: shared objects, strings of Python 3, persistent ids.
        (b"\x80\x02}q\0h\0.".to_vec(), ["opcode 'h'", "at byte 5"]),
        (
            b"\x80\x02X\x01\0\0\0a.".to_vec(),
            ["opcode 'X'", "at byte 2"],
        ),
        (b"\x80\x02NQ.".to_vec(), ["opcode 'Q'", "at byte 3"]),
        (b"\x80\x02i\n.".to_vec(), ["opcode 'i' (0x69)", "at byte 2"]),
        (
            b"\x80\x02\x85.".to_vec(),
            ["pops an empty stack", "at byte 2"],
        ),
        (
            b"\x80\x02t.".to_vec(),
            ["a mark that is not on the stack", "at byte 2"],
        ),
    ] {
        let text = message(pickle::parse(Path::new("f"), &bytes));
        for word in words {
            assert!(text.contains(word), "no \"{word}\" in {text}");
        }
    }
}

#[test]
fn records_that_are_cut_or_mislabelled_are_named() {
    let whole = [small_binary(), small_binary()].concat();
    let text = message(binary::parse(Path::new("f.bin"), &whole[..5000]));
    assert!(
        text.contains("f.bin ends after 5,000 bytes, 1927 bytes into record 1"),
        "{text}"
    );
    let text = message(binary::parse(Path::new("f.bin"), &[]));
    assert!(text.contains("ends after 0 bytes"), "{text}");
    let mut wrong = whole.clone();
    wrong[3073] = 10;
    let text = message(binary::parse(Path::new("f.bin"), &wrong));
    assert!(
        text.contains("label 10 in record 1, at byte 3,073"),
        "{text}"
    );
}

#[test]
fn archives_that_are_cut_damaged_or_of_something_else_are_named() {
    let dir = tempfile::tempdir().expect("folder");
    let path = dir.path().join("cifar-10-python.tar.gz");
    let whole = small_archive("cifar-10-batches-py/test_batch", &small_pickle());
    let read = |bytes: &[u8], split| {
        std::fs::write(&path, bytes).expect("written");
        read_archive(&path, split)
    };
    assert_eq!(read(&whole, Split::Test).expect("whole"), [(0, vec![7])]);
    for len in 0..whole.len() - 8 {
        // Near the end only padding is lost; whatever is read is whole.
        if let Err(error) = read(&whole[..len], Split::Test) {
            assert_eq!(error.kind(), ErrorKind::Data, "{len}: {error}");
            assert!(
                error.to_string().contains("cifar-10-python.tar.gz"),
                "{error}"
            );
        } else {
            assert!(len > whole.len() / 2, "{len} of {}", whole.len());
        }
    }
    let text = read(&whole, Split::Train)
        .expect_err("no such member")
        .to_string();
    assert!(
        text.contains("has no member data_batch_1 (or data_batch_1.bin)"),
        "{text}"
    );
    let inner = small_archive("x/test_batch", &small_pickle()[..100]);
    let text = read(&inner, Split::Test)
        .expect_err("cut inside")
        .to_string();
    assert!(
        text.contains("x/test_batch: at byte") && text.contains("ends early"),
        "{text}"
    );
    let text = read(b"hello", Split::Test)
        .expect_err("no archive")
        .to_string();
    assert!(text.contains("expected a complete tar.gz"), "{text}");
    assert!(text.contains("after 0 bytes of content"), "{text}");
    // Cut within the member: its header of 512 bytes and a part of it were there.
    let text = read(&whole[..whole.len() / 2], Split::Test)
        .expect_err("half")
        .to_string();
    let words = text.split(" after ").nth(1).expect("a place");
    let at: u64 = (words.split(' ').next().and_then(|n| n.parse().ok())).expect("a number");
    assert!((1..5120).contains(&at), "{text}");
}

#[test]
fn archives_are_unpacked_into_known_files_only() {
    let dir = tempfile::tempdir().expect("folder");
    let pickle = small_pickle();
    let mut names: Vec<String> = (1..=5).map(|i| format!("../../data_batch_{i}")).collect();
    names.push("etc/passwd".to_owned());
    names.push("x/test_batch".to_owned());
    let members: Vec<(&str, &[u8])> = names.iter().map(|n| (&n[..], &pickle[..])).collect();
    std::fs::write(
        dir.path().join("cifar-10-python.tar.gz"),
        archive_of(&members),
    )
    .expect("written");
    unpack(dir.path()).expect("unpacked");
    let folder = dir.path().join("cifar-10-batches-py");
    assert_eq!(
        check(dir.path()).expect("there"),
        Source::Python(folder.clone())
    );
    assert_eq!(std::fs::read_dir(dir.path()).expect("folder").count(), 2);
    assert_eq!(std::fs::read_dir(&folder).expect("folder").count(), 6);
    for entry in std::fs::read_dir(&folder).expect("folder").flatten() {
        assert_eq!(std::fs::read(entry.path()).expect("a file"), pickle);
    }
    // Nothing is left to do.
    unpack(dir.path()).expect("done before");

    let twice = tempfile::tempdir().expect("folder");
    let mut newer = pickle.clone();
    // A pixel.
    newer[1600] ^= 1;
    let members = [&members[..], &[("y/data_batch_1", &newer[..])]].concat();
    std::fs::write(
        twice.path().join("cifar-10-python.tar.gz"),
        archive_of(&members),
    )
    .expect("written");
    unpack(twice.path()).expect("unpacked");
    let first = twice.path().join("cifar-10-batches-py/data_batch_1");
    assert_eq!(std::fs::read(first).expect("a file"), newer);

    let half = tempfile::tempdir().expect("folder");
    std::fs::write(
        half.path().join("cifar-10-python.tar.gz"),
        archive_of(&members[..3]),
    )
    .expect("written");
    let text = unpack(half.path()).expect_err("half").to_string();
    assert!(text.contains("has no member data_batch_4"), "{text}");
    assert!(matches!(check(half.path()), Ok(Source::Archive(_))));
}

#[test]
fn folders_say_what_they_lack() {
    let dir = tempfile::tempdir().expect("folder");
    let text = |place: &Path| check(place).expect_err("nothing there").render();
    assert!(text(&dir.path().join("no")).contains("no data folder"));
    assert!(text(dir.path()).contains("no CIFAR-10 files in"));
    assert!(text(dir.path()).contains("cifar-10-python.tar.gz"));
    let inner = dir.path().join("cifar-10-batches-bin");
    std::fs::create_dir(&inner).expect("folder");
    for i in 1..=5 {
        std::fs::write(inner.join(format!("data_batch_{i}.bin")), small_binary()).expect("file");
    }
    assert!(text(dir.path()).contains("cifar-10-batches-bin lacks test_batch.bin"));
    std::fs::write(inner.join("test_batch.bin"), small_binary()).expect("file");
    assert_eq!(
        check(dir.path()).expect("there"),
        Source::Binary(inner.clone())
    );
    assert_eq!(check(&inner).expect("there"), Source::Binary(inner));
    // Complete by name; each file is much too short.
    let error = load(dir.path(), Split::Test, Scaling::Unit).expect_err("too few");
    assert!(
        error.to_string().contains("holds 1 images, expected 10000"),
        "{error}"
    );
    let archive = dir.path().join("some.tgz");
    std::fs::write(&archive, "x").expect("file");
    assert_eq!(
        check(&archive).expect("an archive by name"),
        Source::Archive(archive)
    );
}
