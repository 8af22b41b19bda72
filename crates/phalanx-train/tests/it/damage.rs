//! Every format that is read, damaged in every way: a table of what is said.
//!
//! Other tests go deeper into one format each (cut at every byte, every lie in
//! a header), and fuzz targets feed each reader with garbage; this one is for
//! completeness. A format that is added belongs in [`formats`].

use std::fs;
use std::io::Write;
use std::path::Path;

use crate::pth_common::with_pickle;
use flate2::Compression;
use flate2::write::GzEncoder;
use phalanx_base::{ErrorKind, Result};
use phalanx_checkpoint as checkpoint;
use phalanx_checkpoint::state::{Folder, Place, Snapshot, State};
use phalanx_data::cifar10::{self, Scaling};
use phalanx_data::mnist;
use phalanx_nn::optim::Sgd;
use phalanx_nn::{Init, Layout, Params, Scope, Seed};
use phalanx_report::image;

struct Format {
    title: &'static str,
    file: &'static str,
    /// A good file.
    whole: Vec<u8>,
    /// One whose head promises more than any memory has.
    huge: Vec<u8>,
    /// What else must be there.
    beside: Vec<(String, Vec<u8>)>,
    read: fn(&Path) -> Result<()>,
    /// Other formats that this reader knows by their content.
    also: &'static [&'static str],
}

fn idx(kind: u8, sizes: &[u32], body: &[u8]) -> Vec<u8> {
    let mut bytes = vec![0, 0, 8, kind];
    sizes.iter().for_each(|s| bytes.extend(s.to_be_bytes()));
    bytes.extend(body);
    bytes
}

fn gz(bytes: &[u8]) -> Vec<u8> {
    let mut out = GzEncoder::new(vec![], Compression::default());
    out.write_all(bytes).unwrap();
    out.finish().unwrap()
}

/// A batch of one image, as Python 2 and numpy pickled it.
fn pickle(pixels: u32) -> Vec<u8> {
    let mut out = b"\x80\x02}q\x01(U\x06labelsq\x02]q\x03K\x07aU\x04dataq\x04cnumpy.core.multiarray\n_reconstruct\nq\x05\
        cnumpy\nndarray\nq\x06K\x00\x85U\x01b\x87Rq\x07(K\x01K\x01M\x00\x0c\x86cnumpy\ndtype\nq\x08U\x02u1K\x00K\x01\x87R\
        q\x09(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb\x89T"
        .to_vec();
    out.extend(pixels.to_le_bytes());
    out.extend([5; 3072]);
    out.extend(b"tbu.");
    out
}

/// A tar.gz of one member that says it has `size` bytes.
fn tar_gz(name: &str, content: &[u8], size: u64) -> Vec<u8> {
    let mut header = tar::Header::new_gnu();
    header.set_path(name).unwrap();
    header.set_size(size);
    header.set_mode(0o644);
    header.set_cksum();
    let mut tar = header.as_bytes().to_vec();
    tar.extend(content);
    tar.resize(tar.len().next_multiple_of(512) + 1024, 0);
    gz(&tar)
}

fn png(width: u32, pixels: &[u8]) -> Vec<u8> {
    let mut out = Vec::new();
    let mut encoder = png::Encoder::new(&mut out, 2, 2);
    encoder.set_color(png::ColorType::Grayscale);
    let mut writer = encoder.write_header().unwrap();
    writer.write_image_data(pixels).unwrap();
    writer.finish().unwrap();
    // Signature, length and name of the header's chunk, width, height.
    out[16..20].copy_from_slice(&width.to_be_bytes());
    let crc = crc32fast::hash(&out[12..29]);
    out[29..33].copy_from_slice(&crc.to_be_bytes());
    out
}

fn model() -> Params {
    let mut scope = Scope::new(Seed(1));
    scope.param("w", &[2, 3], Layout::Same, Init::Constant(0.5));
    scope.build().unwrap()
}

fn safetensors(shape: &str) -> Vec<u8> {
    let mut header = format!(r#"{{"w":{{"dtype":"F32","shape":{shape},"data_offsets":[0,24]}}}}"#);
    header.push_str(&" ".repeat(header.len().next_multiple_of(8) - header.len()));
    let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
    bytes.extend(header.as_bytes());
    bytes.extend([0; 24]);
    bytes
}

/// A dict with one tensor of `rows` x 3 floats.
fn tensor(rows: &[u8]) -> Vec<u8> {
    let mut pickle =
        b"\x80\x02}X\x01\0\0\0wctorch._utils\n_rebuild_tensor_v2\n((X\x07\0\0\0storage\
        ctorch\nFloatStorage\nX\x01\0\0\x000X\x03\0\0\0cpuK\x06tQK\0"
            .to_vec();
    pickle.extend(rows);
    pickle.extend(b"K\x03\x86K\x03K\x01\x86\x89ccollections\nOrderedDict\n)RtRs.");
    with_pickle(&pickle)
}

fn weights(folder: &Path, file: &str) -> Result<()> {
    checkpoint::load_params(&folder.join(file), &mut model()).map(|_| ())
}

const IMAGES: &str = "train-images-idx3-ubyte";
const LABELS: &str = "train-labels-idx1-ubyte";
const STATE: &str = "step-000000003";

fn formats() -> Vec<Format> {
    let images = idx(3, &[2, 28, 28], &[7; 2 * 784]);
    let labels = idx(1, &[2], &[3, 4]);
    let too_many = idx(3, &[u32::MAX, 28, 28], &[7; 2 * 784]);
    let mnist: fn(&Path) -> Result<()> =
        |folder| mnist::load(folder, mnist::Split::Train).map(|_| ());
    // One image is less than a file should have; that is said after it was read.
    let cifar: fn(&Path) -> Result<()> =
        |folder| match cifar10::load(folder, cifar10::Split::Test, Scaling::Unit) {
            Err(error) if error.to_string().contains("holds 1 images") => Ok(()),
            other => other.map(|_| ()),
        };
    let batches = |ending: &str| -> Vec<(String, Vec<u8>)> {
        let names = (1..=5).map(|i| format!("data_batch_{i}{ending}"));
        names.map(|name| (name, Vec::new())).collect()
    };
    let record = [&[7][..], &[5; 3072]].concat();
    let saved = tempfile::tempdir().unwrap();
    let params = model();
    let sgd = Sgd::new(&params, 0.1);
    let place = Place {
        step: 3,
        ..Place::default()
    };
    let snapshot = Snapshot::take(
        &params,
        &sgd,
        place,
        Default::default(),
        serde_json::json!({}),
    );
    Folder::new(saved.path(), 1).save(&snapshot).unwrap();
    let read = |ending: &str| fs::read(saved.path().join(format!("{STATE}.{ending}"))).unwrap();
    let (manifest, data) = (read("json"), read("safetensors"));
    let state: fn(&Path) -> Result<()> = |folder| {
        let state = State::load(&folder.join(format!("{STATE}.json")))?;
        state.restore_params(&mut model())
    };
    let text = String::from_utf8(manifest.clone()).unwrap();
    let size = format!("\"bytes\": {}", data.len());
    assert!(text.contains(&size));
    let huge_manifest = text.replace(&size, "\"bytes\": 18446744073709551615");
    vec![
        Format {
            title: "idx images",
            file: IMAGES,
            whole: images.clone(),
            huge: too_many.clone(),
            beside: vec![(LABELS.into(), labels.clone())],
            read: mnist,
            also: &["idx.gz images"],
        },
        Format {
            title: "idx labels",
            file: LABELS,
            whole: labels.clone(),
            huge: idx(1, &[u32::MAX], &[3, 4]),
            beside: vec![(IMAGES.into(), images.clone())],
            read: mnist,
            also: &[],
        },
        Format {
            title: "idx.gz images",
            file: "train-images-idx3-ubyte.gz",
            whole: gz(&images),
            huge: gz(&too_many),
            beside: vec![(LABELS.into(), labels)],
            read: mnist,
            also: &["idx images"],
        },
        Format {
            title: "CIFAR pickle",
            file: "test_batch",
            whole: pickle(3072),
            huge: pickle(i32::MAX as u32),
            beside: batches(""),
            read: cifar,
            also: &[],
        },
        Format {
            title: "CIFAR binary",
            file: "test_batch.bin",
            whole: record.clone(),
            // It has no head; a million records, of which there is one and a half.
            huge: [&record[..], &record[..1500]].concat(),
            beside: batches(".bin"),
            read: cifar,
            also: &[],
        },
        Format {
            title: "CIFAR archive",
            file: "cifar-10-python.tar.gz",
            whole: tar_gz("x/test_batch", &pickle(3072), pickle(3072).len() as u64),
            huge: tar_gz("x/test_batch", &pickle(3072), 1 << 62),
            beside: Vec::new(),
            read: cifar,
            also: &[],
        },
        Format {
            title: "pth",
            file: "w.pth",
            whole: tensor(b"K\x02"),
            huge: tensor(b"\x8a\x08\xff\xff\xff\xff\xff\xff\xff\x7f"),
            beside: Vec::new(),
            read: |folder| weights(folder, "w.pth"),
            also: &["safetensors", "state, numbers"],
        },
        Format {
            title: "safetensors",
            file: "w.safetensors",
            whole: safetensors("[2,3]"),
            huge: safetensors("[9223372036854775807,3]"),
            beside: Vec::new(),
            read: |folder| weights(folder, "w.safetensors"),
            also: &["pth", "state, numbers"],
        },
        Format {
            title: "state, manifest",
            file: "step-000000003.json",
            whole: manifest.clone(),
            huge: huge_manifest.into_bytes(),
            beside: vec![(format!("{STATE}.safetensors"), data.clone())],
            read: state,
            also: &[],
        },
        Format {
            title: "state, numbers",
            file: "step-000000003.safetensors",
            whole: data.clone(),
            huge: [&[0xff; 8], &data[8..]].concat(),
            beside: vec![(format!("{STATE}.json"), manifest)],
            read: state,
            also: &[],
        },
        Format {
            title: "PNG",
            file: "a.png",
            whole: png(2, &[1, 2, 3, 4]),
            huge: png(0x7fff_ffff, &[1, 2, 3, 4]),
            beside: Vec::new(),
            read: |folder| image::read(&folder.join("a.png"), [2, 2, 1]).map(|_| ()),
            also: &["PGM", "PPM"],
        },
        Format {
            title: "PGM",
            file: "a.pgm",
            whole: b"P5\n2 2\n255\n\x01\x02\x03\x04".to_vec(),
            huge: b"P5\n99999999999999999999 2\n255\n\x01\x02\x03\x04".to_vec(),
            beside: Vec::new(),
            read: |folder| image::read(&folder.join("a.pgm"), [2, 2, 1]).map(|_| ()),
            also: &["PNG", "PPM"],
        },
        Format {
            title: "PPM",
            file: "a.ppm",
            whole: b"P6\n2 2\n255\n123456789abc".to_vec(),
            huge: b"P6\n4294967295 4294967295\n255\n123456789abc".to_vec(),
            beside: Vec::new(),
            read: |folder| image::read(&folder.join("a.ppm"), [2, 2, 3]).map(|_| ()),
            also: &["PNG", "PGM"],
        },
    ]
}

/// What is said when `format`'s file has these bytes; nothing when they are read.
fn said(format: &Format, bytes: &[u8]) -> Option<String> {
    let dir = tempfile::tempdir().unwrap();
    for (name, content) in &format.beside {
        fs::write(dir.path().join(name), content).unwrap();
    }
    fs::write(dir.path().join(format.file), bytes).unwrap();
    let error = (format.read)(dir.path()).err()?;
    assert_eq!(error.kind(), ErrorKind::Data, "{}: {error}", format.title);
    Some(error.to_string())
}

#[test]
fn every_format_in_every_damage_is_refused_by_file_place_and_expectation() {
    let all = formats();
    let (mut cells, mut unclear) = (0, Vec::new());
    for format in &all {
        assert_eq!(said(format, &format.whole), None, "{}", format.title);
        let half = &format.whole[..format.whole.len() / 2];
        let page = b"<!DOCTYPE html><html><body>404 Not Found</body></html>";
        let mut damages: Vec<(String, &[u8])> = vec![
            ("empty".into(), b""),
            ("cut in half".into(), half),
            ("a web page".into(), page),
            ("a huge head".into(), &format.huge),
        ];
        for other in &all {
            if other.title != format.title && !format.also.contains(&other.title) {
                damages.push((format!("swapped for {}", other.title), &other.whole));
            }
        }
        for (damage, bytes) in damages {
            let at = format!("{}, {damage}", format.title);
            let text = said(format, bytes).unwrap_or_else(|| panic!("{at}: was read"));
            println!("{at}: {}", text.replace('\n', " "));
            let (_, said) = text.split_once(format.file).expect("the file");
            // A place or a size, and what should be there.
            let one_of = |words: &[&str]| words.iter().any(|word| said.contains(word));
            // Of the whole, only its hash, its size or its tensors can be said.
            let whole = ["SHA-256", " pixels", "another model"];
            let place = one_of(&["byte", "starts with", "line "]) || one_of(&whole);
            let wanted = [
                "expected", "promise", "says", "should", ", not ", "more", "takes", "lacks",
            ];
            if !place || !one_of(&wanted) {
                unclear.push(format!("{at}: {text}"));
            }
            cells += 1;
        }
    }
    println!("{} formats, {cells} damaged files", all.len());
    assert!(unclear.is_empty(), "{}", unclear.join("\n"));
    assert!(cells > 150);
}

/// Only what is checked by content goes by another name.
#[test]
fn a_good_file_of_another_known_kind_is_read() {
    let all = formats();
    for format in &all {
        for other in all.iter().filter(|o| format.also.contains(&o.title)) {
            assert_eq!(said(format, &other.whole), None, "{}", format.title);
        }
    }
}
