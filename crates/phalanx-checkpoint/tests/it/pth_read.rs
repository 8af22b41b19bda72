//! Files that PyTorch wrote, and files that lie. `fixtures/pth` holds them
//! with the script that made them and a manifest of their contents.

use std::fs;
use std::path::{Path, PathBuf};

use crate::pth_common::{fixtures, manifest, named_shape};
use phalanx_base::ErrorKind;
use phalanx_checkpoint::pth::{DType, PthFile, Tensor, Value};

fn file_of(entry: &serde_json::Value) -> PathBuf {
    let name = entry["file"].as_str().unwrap();
    fixtures().join(name.strip_prefix("pth/").unwrap())
}

fn numbers(list: &serde_json::Value) -> Vec<f64> {
    let list = list.as_array().unwrap();
    list.iter().map(|v| v.as_f64().unwrap()).collect()
}

/// Values as float64, exact for every type.
fn exact(tensor: &Tensor) -> Vec<f64> {
    let bytes = tensor.to_bytes();
    match tensor.dtype() {
        DType::F64 => bytes
            .as_chunks()
            .0
            .iter()
            .map(|b| f64::from_le_bytes(*b))
            .collect(),
        DType::I64 => bytes
            .as_chunks()
            .0
            .iter()
            .map(|b| i64::from_le_bytes(*b) as f64)
            .collect(),
        _ => tensor.to_f32().iter().map(|v| f64::from(*v)).collect(),
    }
}

#[test]
fn every_good_file_holds_what_its_manifest_says() {
    let mut tensors = 0;
    for entry in manifest()["files"].as_array().unwrap() {
        let path = file_of(entry);
        let file = PthFile::read(&path).unwrap();
        assert!(file.warnings().is_empty(), "{:?}", file.warnings());
        let expected = entry["tensors"].as_object().unwrap();
        let items: Vec<(&str, Value<'_>)> = file.root().items().unwrap().collect();
        assert_eq!(items.len(), expected.len(), "{}", path.display());
        for (name, value) in items {
            let (tensor, expected) = (value.as_tensor().unwrap(), &expected[name]);
            assert_eq!(
                tensor.dtype().to_string(),
                expected["dtype"].as_str().unwrap()
            );
            assert_eq!(named_shape(tensor.shape()), expected["shape"], "{name}");
            assert_eq!(named_shape(tensor.strides()), expected["stride"], "{name}");
            assert_eq!(tensor.offset(), expected["offset"]);
            let (got, expected) = (exact(tensor), numbers(&expected["values"]["data"]));
            assert_eq!(got.len(), expected.len(), "{name}");
            for (got, expected) in got.iter().zip(expected) {
                // As near as JSON's reader comes.
                assert!(
                    (got - expected).abs() <= expected.abs() * 3e-16,
                    "{name}: {got} {expected}"
                );
            }
            tensors += 1;
        }
    }
    assert!(tensors > 60, "{tensors}");
}

#[test]
fn names_keep_their_order() {
    let file = PthFile::read(&fixtures().join("state_dict_f32.pth")).unwrap();
    let names: Vec<String> = file
        .state_dict()
        .unwrap()
        .into_iter()
        .map(|i| i.0)
        .collect();
    assert_eq!(
        names,
        [
            "conv.weight",
            "conv.bias",
            "bn.weight",
            "bn.bias",
            "bn.running_mean",
            "bn.running_var",
            "bn.num_batches_tracked",
            "fc.weight",
            "fc.bias"
        ]
    );
}

#[test]
fn the_prefix_of_a_wrapper_is_taken_away() {
    let plain = PthFile::read(&fixtures().join("state_dict_f32.pth")).unwrap();
    let wrapped = PthFile::read(&fixtures().join("module_prefix.pth")).unwrap();
    assert!(wrapped.root().get("module.conv.weight").is_some());
    let pairs = plain.state_dict().unwrap();
    for ((a, x), (b, y)) in pairs.iter().zip(wrapped.state_dict().unwrap()) {
        assert_eq!(*a, b);
        assert_eq!(x.to_bytes(), y.to_bytes());
    }
}

#[test]
fn checkpoints_with_optimizer_state_are_read() {
    for entry in manifest()["checkpoints"].as_array().unwrap() {
        let path = file_of(entry);
        let file = PthFile::read(&path).unwrap();
        let root = file.root();
        assert_eq!(root.get("epoch").unwrap().as_int(), Some(3));
        assert_eq!(root.get("best").unwrap().as_float(), Some(0.25));
        assert_eq!(root.get("note").unwrap().as_str(), Some("ok"));
        assert!(root.get("none").unwrap().is_none());
        let same = |tensor: &Tensor, expected: &serde_json::Value| {
            assert_eq!(named_shape(tensor.shape()), expected["shape"]);
            let expected: Vec<f32> = numbers(&expected["data"])
                .iter()
                .map(|v| *v as f32)
                .collect();
            assert_eq!(tensor.to_f32(), expected);
        };
        // Found below "model".
        let state = file.state_dict().unwrap();
        assert_eq!(state.len(), 2);
        for (name, tensor) in state {
            same(tensor, &entry["model"][&name]);
        }
        let optimizer = root.get("optimizer").unwrap();
        let state: Vec<(i64, Value<'_>)> = optimizer
            .get("state")
            .unwrap()
            .numbered()
            .unwrap()
            .collect();
        assert_eq!(state.len(), 2);
        for (number, moments) in state {
            for (name, value) in moments.items().unwrap() {
                same(
                    value.as_tensor().unwrap(),
                    &entry["optimizer_state"][number.to_string()][name],
                );
            }
        }
        let mut groups = optimizer.get("param_groups").unwrap().elements().unwrap();
        let group = groups.next().unwrap();
        let expected = &entry["param_groups"][0];
        assert_eq!(group.get("lr").unwrap().as_float(), expected["lr"].as_f64());
        assert!(group.get("foreach").unwrap().is_none());
        assert_eq!(group.get("maximize").unwrap().as_bool(), Some(false));
        let order: Vec<i64> = group
            .get("params")
            .unwrap()
            .elements()
            .unwrap()
            .filter_map(|v| v.as_int())
            .collect();
        assert_eq!(order, [0, 1]);
        if let Some(betas) = group.get("betas") {
            let betas: Vec<f64> = betas
                .elements()
                .unwrap()
                .filter_map(|v| v.as_float())
                .collect();
            assert_eq!(betas, [0.9, 0.999]);
        }
    }
}

/// Reading must fail with a `Data` error that names the file.
fn refused(path: &Path) -> String {
    let error = match PthFile::read(path) {
        Ok(_) => panic!("{} is accepted", path.display()),
        Err(error) => error,
    };
    assert_eq!(error.kind(), ErrorKind::Data, "{error}");
    let text = error.to_string();
    assert!(text.starts_with(&path.display().to_string()), "{text}");
    text
}

#[test]
fn every_bad_file_is_refused_by_name() {
    let reasons = [
        ("big_endian", "byte order is \"big\"; only \"little\""),
        (
            "global_builtins_eval",
            "data.pkl at byte 2 of 29: it names builtins.eval",
        ),
        (
            "global_os_system",
            "data.pkl at byte 2 of 26: it names os.system",
        ),
        ("huge_shape_overflow", "more elements than can be counted"),
        ("legacy_format", "format from before 2020"),
        ("list_into_itself", "a persistent id is a list"),
        ("memo_missing", "it gets memo entry 5"),
        ("missing_storage", "no entry data/3"),
        ("negative_offset", "the offset of a tensor is -1"),
        ("negative_stride", "the strides of a tensor contain -1"),
        ("no_stop", "it ends early: 1 bytes are expected, 0 are left"),
        (
            "offset_beyond_storage",
            "offset 5 reaches outside its storage of 6",
        ),
        (
            "shape_beyond_storage",
            "shape [7], strides [1] and offset 0 reaches outside",
        ),
        ("stack_empty", "an empty stack"),
        (
            "storage_length_differs",
            "of 36 bytes, but entry data/0 has 24",
        ),
        ("truncated_file", "it has 546 bytes and may be truncated"),
        (
            "truncated_pickle",
            "2147483647 bytes are expected, 3 are left",
        ),
        ("wrong_crc", "is damaged: its CRC-32 is"),
    ];
    let bad = fixtures().join("bad");
    assert_eq!(fs::read_dir(&bad).unwrap().count(), reasons.len());
    assert_eq!(
        manifest()["must_be_refused"].as_array().unwrap().len(),
        reasons.len()
    );
    for (name, reason) in reasons {
        let text = refused(&bad.join(format!("{name}.pth")));
        assert!(text.contains(reason), "{text}");
    }
}

#[test]
fn a_file_cut_anywhere_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("cut.pth");
    let whole = fs::read(fixtures().join("state_dict_f16.pth")).unwrap();
    for keep in 0..whole.len() {
        fs::write(&path, &whole[..keep]).unwrap();
        refused(&path);
    }
}

/// Whatever byte changes: the file is refused, or it says the same as before.
#[test]
fn no_changed_byte_changes_a_number() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("flipped.pth");
    let whole = fs::read(fixtures().join("hand/minimal_entries.pth")).unwrap();
    let said = |path: &Path| {
        let file = PthFile::read(path).ok()?;
        let all = file.state_dict().ok()?.into_iter();
        Some(
            all.map(|(name, t)| (name, t.dtype(), t.shape().to_vec(), t.to_bytes()))
                .collect::<Vec<_>>(),
        )
    };
    fs::write(&path, &whole).unwrap();
    let original = said(&path).unwrap();
    let mut refusals = 0;
    for at in 0..whole.len() {
        for change in [0x01, 0x80] {
            let mut bytes = whole.clone();
            bytes[at] ^= change;
            fs::write(&path, &bytes).unwrap();
            match said(&path) {
                Some(now) => assert_eq!(now, original, "byte {at} ^ {change:#x}"),
                None => refusals += 1,
            }
        }
    }
    assert!(refusals > whole.len(), "{refusals}");
}

#[test]
fn files_of_another_kind_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("x.pth");
    for bytes in [&b""[..], b"P", b"{\"a\": 1}", &[0xff; 100]] {
        fs::write(&path, bytes).unwrap();
        assert!(refused(&path).contains("is not a PyTorch file"));
    }
    let missing = PthFile::read(&dir.path().join("absent.pth")).err().unwrap();
    assert_eq!(missing.kind(), ErrorKind::Usage);
    let folder = PthFile::read(dir.path()).err().unwrap();
    assert_eq!(folder.kind(), ErrorKind::Usage);
    assert!(
        folder
            .to_string()
            .ends_with("it is a folder, expected a regular file")
    );
}
