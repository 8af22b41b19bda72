//! What is written: read back here and by PyTorch, where there is one.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::pth_common::fixtures;
use half::{bf16, f16};
use phalanx_base::ErrorKind;
use phalanx_checkpoint::pth::{DType, PthFile, Saved, save_state_dict};
use phalanx_checkpoint::{load_params, save_params, save_pth, weights_sha256};
use phalanx_nn::{Init, Layout, Params, Scope, Seed};
use safetensors::SafeTensors;
use safetensors::tensor::TensorView;
use sha2::{Digest, Sha256};

/// The model of the fixtures: a convolution, a batch norm, a linear layer.
fn model(value: f32) -> Params {
    let mut scope = Scope::new(Seed(1));
    let values = Init::Uniform {
        low: f64::from(value) - 0.25,
        high: f64::from(value),
    };
    let mut conv = scope.enter("conv");
    conv.param("weight", &[3, 2, 3, 3], Layout::Conv, values);
    conv.param("bias", &[3], Layout::Same, values);
    let mut bn = scope.enter("bn");
    bn.param("weight", &[3], Layout::Same, values);
    bn.param("bias", &[3], Layout::Same, values);
    bn.buffer("running_mean", &[3], value);
    bn.buffer("running_var", &[3], value);
    bn.buffer("num_batches_tracked", &[], 7.0);
    let mut fc = scope.enter("fc");
    fc.param("weight", &[2, 4], Layout::Same, values);
    fc.param("bias", &[2], Layout::Same, values);
    scope.build().unwrap()
}

/// A tensor of each type, the empty and the odd ones among them.
fn assortment() -> Vec<Saved> {
    let floats = [0.1f32, -2.0, 3e-8, 65504.0, 1.5, f32::INFINITY];
    let saved = |name: &str, dtype, shape: &[usize], bytes: Vec<u8>| Saved {
        name: name.to_owned(),
        dtype,
        shape: shape.to_vec(),
        bytes,
    };
    let all = |f: fn(f32) -> Vec<u8>| floats.iter().flat_map(|v| f(*v)).collect::<Vec<u8>>();
    vec![
        saved(
            "a.f32",
            DType::F32,
            &[2, 3],
            all(|v| v.to_le_bytes().into()),
        ),
        saved(
            "a.f64",
            DType::F64,
            &[6],
            all(|v| f64::from(v).to_le_bytes().into()),
        ),
        saved(
            "a.f16",
            DType::F16,
            &[3, 2],
            all(|v| f16::from_f32(v).to_le_bytes().into()),
        ),
        saved(
            "a.bf16",
            DType::BF16,
            &[1, 6],
            all(|v| bf16::from_f32(v).to_le_bytes().into()),
        ),
        saved(
            "größe",
            DType::I64,
            &[],
            (-(1i64 << 40)).to_le_bytes().into(),
        ),
        saved("i32", DType::I32, &[1], (-5i32).to_le_bytes().into()),
        saved("i16", DType::I16, &[2], vec![1, 0, 0xff, 0xff]),
        saved("i8", DType::I8, &[3], vec![1, 0xff, 0x80]),
        saved("u8", DType::U8, &[300], vec![200; 300]),
        saved("bool", DType::Bool, &[2], vec![1, 0]),
        saved("empty", DType::F32, &[0, 4], Vec::new()),
        saved("many", DType::U8, &[70_000], vec![1; 70_000]),
        saved("", DType::F32, &[1], vec![0, 0, 0x80, 0x3f]),
    ]
}

#[test]
fn what_is_written_is_read() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("epoch_3.pth");
    let tensors = assortment();
    save_state_dict(&path, &tensors).unwrap();
    let file = PthFile::read(&path).unwrap();
    assert!(file.warnings().is_empty());
    let read = file.state_dict().unwrap();
    assert_eq!(read.len(), tensors.len());
    for (saved, (name, tensor)) in tensors.iter().zip(read) {
        assert_eq!(saved.name, name);
        assert_eq!(
            (saved.dtype, &saved.shape[..]),
            (tensor.dtype(), tensor.shape())
        );
        assert_eq!(saved.bytes, tensor.to_bytes(), "{name}");
    }
}

#[test]
fn entries_are_pytorchs_and_begin_at_multiples_of_64() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("epoch_3.pth");
    save_pth(&path, &model(1.0)).unwrap();
    let bytes = fs::read(&path).unwrap();
    let zip = rawzip::ZipArchive::from_slice(&bytes).unwrap();
    let mut entries = zip.entries();
    let mut names = Vec::new();
    while let Some(record) = entries.next_entry().unwrap() {
        let (from, to) = zip
            .get_entry(record.wayfinder())
            .unwrap()
            .compressed_data_range();
        assert_eq!(from % 64, 0);
        assert_eq!(to - from, record.uncompressed_size_hint());
        assert_eq!(
            record.crc32(),
            rawzip::crc32(&bytes[from as usize..to as usize])
        );
        names.push(String::from_utf8(record.file_path().as_ref().to_vec()).unwrap());
    }
    let manifest = crate::pth_common::manifest();
    let theirs = manifest["files"]
        .as_array()
        .unwrap()
        .iter()
        .find(|f| f["file"] == "pth/state_dict_f32.pth")
        .unwrap();
    let theirs: Vec<String> = theirs["entries"]
        .as_array()
        .unwrap()
        .iter()
        .map(|name| format!("epoch_3/{}", name.as_str().unwrap()))
        .filter(|name| !name.ends_with("serialization_id"))
        .collect();
    assert_eq!(names, theirs);
}

#[test]
fn a_model_goes_both_ways() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("m.pt");
    let original = model(1.0);
    save_pth(&path, &original).unwrap();
    let mut other = model(2.0);
    load_params(&path, &mut other).unwrap();
    assert_eq!(weights_sha256(&original), weights_sha256(&other));
    // The order of PyTorch's own state dict.
    let ours: Vec<String> = names_of(&path);
    assert_eq!(ours, names_of(&fixtures().join("state_dict_f32.pth")));
    let counted = PthFile::read(&path).unwrap();
    let counted = counted.root().get("bn.num_batches_tracked").unwrap();
    assert_eq!(counted.as_tensor().unwrap().dtype(), DType::I64);
}

fn names_of(path: &Path) -> Vec<String> {
    let file = PthFile::read(path).unwrap();
    file.state_dict()
        .unwrap()
        .into_iter()
        .map(|i| i.0)
        .collect()
}

#[test]
fn pytorchs_files_fill_the_model() {
    let mut full = model(1.0);
    load_params(&fixtures().join("state_dict_f32.pth"), &mut full).unwrap();
    let weight = full.export(full.find("conv.weight").unwrap());
    assert_eq!(weight[..2], [-0.233_692_42, -0.185_936_39]);
    let count = full.find_buffer("bn.num_batches_tracked").unwrap();
    assert_eq!(full.buffer(count), [1.0]);
    let mut wrapped = model(1.0);
    load_params(&fixtures().join("module_prefix.pth"), &mut wrapped).unwrap();
    assert_eq!(weights_sha256(&full), weights_sha256(&wrapped));
    for (file, precision) in [("state_dict_f16", 1e-3), ("state_dict_bf16", 1e-2)] {
        let mut params = model(1.0);
        load_params(&fixtures().join(format!("{file}.pth")), &mut params).unwrap();
        for (a, b) in full.flat().iter().zip(params.flat()) {
            assert!((a - b).abs() <= a.abs() * precision + 1e-7, "{a} {b}");
        }
        assert_ne!(weights_sha256(&full), weights_sha256(&params));
    }
}

#[test]
fn another_models_file_names_the_culprit() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("m.pth");
    let refused = |tensors: &[Saved]| {
        save_state_dict(&path, tensors).unwrap();
        let mut params = model(1.0);
        let before = weights_sha256(&params);
        let error = load_params(&path, &mut params).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Data);
        assert_eq!(weights_sha256(&params), before);
        error.to_string()
    };
    save_pth(&path, &model(1.0)).unwrap();
    let file = PthFile::read(&path).unwrap();
    let whole: Vec<Saved> = file
        .state_dict()
        .unwrap()
        .into_iter()
        .map(|(name, tensor)| Saved {
            name,
            dtype: tensor.dtype(),
            shape: tensor.shape().to_vec(),
            bytes: tensor.to_bytes(),
        })
        .collect();
    let text = refused(&whole[1..]);
    assert!(
        text.ends_with("another model: it lacks conv.weight"),
        "{text}"
    );
    let mut changed = whole.clone();
    changed[1].name = "conv.biases".to_owned();
    let text = refused(&changed);
    assert!(
        text.contains("it lacks conv.bias; the model does not know conv.biases"),
        "{text}"
    );
    let mut changed = whole.clone();
    changed[0].shape = vec![2, 3, 3, 3];
    let text = refused(&changed);
    assert!(
        text.contains(
            "conv.weight is float32 of shape [2, 3, 3, 3], the model has F32 of shape [3, 2, 3, 3]"
        ),
        "{text}"
    );
    let mut changed = whole;
    changed[0].dtype = DType::I32;
    assert!(refused(&changed).contains("conv.weight is int32"));
}

#[test]
fn safetensors_may_be_of_half_precision_and_wrapped() {
    let dir = tempfile::tempdir().unwrap();
    let (plain, half) = (dir.path().join("plain"), dir.path().join("half"));
    let original = model(1.0);
    save_params(&plain, &original, &BTreeMap::new()).unwrap();
    let bytes = fs::read(&plain).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let halves: Vec<(String, Vec<usize>, Vec<u8>)> = file
        .iter()
        .map(|(name, view)| {
            let values = view.data().as_chunks().0.iter();
            let values = values.flat_map(|b| bf16::from_f32(f32::from_le_bytes(*b)).to_le_bytes());
            (
                format!("module.{name}"),
                view.shape().to_vec(),
                values.collect(),
            )
        })
        .collect();
    let views = halves.iter().map(|(name, shape, data)| {
        let view = TensorView::new(safetensors::Dtype::BF16, shape.clone(), data).unwrap();
        (name.clone(), view)
    });
    fs::write(&half, safetensors::serialize(views, None).unwrap()).unwrap();
    let mut params = model(2.0);
    load_params(&half, &mut params).unwrap();
    for (a, b) in original.flat().iter().zip(params.flat()) {
        assert_eq!(bf16::from_f32(*a).to_f32(), *b);
    }
}

#[test]
fn bytes_that_fit_no_shape_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("m.pth");
    let mut tensors = assortment();
    tensors[0].shape = vec![2, 4];
    let error = save_state_dict(&path, &tensors).unwrap_err();
    assert!(
        error.to_string().contains("a.f32 of shape [2, 4]"),
        "{error}"
    );
    assert!(!path.exists());
}

/// The golden file was loaded by `torch.load(weights_only=True)` when it was
/// made (by the test below, with `PHALANX_BLESS=1`); what is written now is
/// the same to the last byte.
#[test]
fn the_bytes_written_are_those_that_pytorch_was_shown() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("golden.pth");
    save_state_dict(&path, &golden()).unwrap();
    let golden = fs::read(fixtures().join("golden.pth")).unwrap();
    assert!(fs::read(&path).unwrap() == golden);
}

fn golden() -> Vec<Saved> {
    let mut tensors = assortment();
    tensors.retain(|t| t.name != "many");
    tensors
}

/// A Python with PyTorch: `PHALANX_TORCH_PYTHON`, or `python3` if it has one.
fn python() -> Option<PathBuf> {
    let named = std::env::var_os("PHALANX_TORCH_PYTHON").map(PathBuf::from);
    let python = named.unwrap_or_else(|| "python3".into());
    let works = Command::new(&python)
        .args(["-c", "import torch"])
        .output()
        .is_ok_and(|out| out.status.success());
    works.then_some(python)
}

#[test]
fn pytorch_loads_what_is_written() {
    let Some(python) = python() else {
        eprintln!("skipped: no Python with PyTorch (set PHALANX_TORCH_PYTHON)");
        return;
    };
    let dir = tempfile::tempdir().unwrap();
    let (plain, net, gold) = (
        dir.path().join("plain.pth"),
        dir.path().join("net.pth"),
        dir.path().join("golden.pth"),
    );
    let params = model(1.0);
    save_state_dict(&plain, &assortment()).unwrap();
    save_pth(&net, &params).unwrap();
    save_state_dict(&gold, &golden()).unwrap();
    let script = fixtures().join("check_ours.py");
    let out = Command::new(python)
        .arg(script)
        .args([&plain, &net, &gold])
        .output()
        .unwrap();
    let (text, errors) = (
        String::from_utf8_lossy(&out.stdout),
        String::from_utf8_lossy(&out.stderr),
    );
    assert!(out.status.success(), "{errors}");
    let lines: Vec<&str> = text.lines().collect();
    let expected: Vec<String> = assortment()
        .iter()
        .map(|t| {
            let shape = serde_json::to_string(&t.shape).unwrap();
            format!(
                "{} {} {shape} {}",
                t.name,
                t.dtype,
                hex::encode(Sha256::digest(&t.bytes))
            )
        })
        .collect();
    assert_eq!(lines[..expected.len()], expected);
    assert_eq!(
        lines[expected.len()..],
        [format!("weights {}", weights_sha256(&params))]
    );
    if std::env::var_os("PHALANX_BLESS").is_some() {
        fs::copy(&gold, fixtures().join("golden.pth")).unwrap();
    }
}
