//! Weights to safetensors and back; files that lie are refused by name.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{Seek, SeekFrom, Write};
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Command;

use phalanx_base::{ErrorKind, process};
use phalanx_checkpoint::pth::{DType, Saved, write_state_dict};
use phalanx_checkpoint::state::State;
use phalanx_checkpoint::{load_params, read_tensors, save_params, weights_sha256};
use phalanx_nn::{Init, Layout, Params, Scope, Seed};
use safetensors::SafeTensors;
use serde_json::json;
use sha2::{Digest, Sha256};
use tempfile::TempDir;

use phalanx_garble::alone;

/// A convolution, a linear layer and a running mean; every layout is there.
fn model(seed: u64) -> Params {
    let mut scope = Scope::new(Seed(seed));
    let uniform = Init::Uniform {
        low: -1.0,
        high: 1.0,
    };
    let mut conv = scope.enter("conv");
    conv.param("weight", &[4, 3, 2, 2], Layout::Conv, uniform);
    conv.param("bias", &[4], Layout::Same, uniform);
    let mut fc = scope.enter("fc");
    fc.param("weight", &[5, 7], Layout::Same, uniform);
    scope
        .enter("norm")
        .buffer("running_mean", &[4], seed as f32);
    scope.build().unwrap()
}

fn notes() -> BTreeMap<String, String> {
    [("epoch", "3"), ("recipe", "mnist"), ("version", "0.1.0")]
        .map(|(k, v)| (k.to_owned(), v.to_owned()))
        .into()
}

fn saved(params: &Params) -> (TempDir, PathBuf) {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("model.safetensors");
    save_params(&path, params, &notes()).unwrap();
    (dir, path)
}

fn same(a: &Params, b: &Params) -> bool {
    a.flat() == b.flat() && a.buffers_flat() == b.buffers_flat()
}

#[test]
fn what_is_saved_is_loaded() {
    let original = model(1);
    let (_dir, path) = saved(&original);
    let mut other = model(2);
    assert!(!same(&original, &other));
    let loaded = load_params(&path, &mut other).unwrap();
    assert!(same(&original, &other));
    assert_eq!(loaded.metadata, notes());
    assert_eq!(weights_sha256(&original), weights_sha256(&other));
}

#[test]
fn the_file_holds_pytorchs_names_shapes_and_order() {
    let params = model(1);
    let (_dir, path) = saved(&params);
    let bytes = fs::read(&path).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let mut names = file.names();
    names.sort_unstable();
    assert_eq!(
        names,
        ["conv.bias", "conv.weight", "fc.weight", "norm.running_mean"]
    );
    for id in params.ids() {
        let info = &params.infos()[id.index()];
        let view = file.tensor(&info.name).unwrap();
        assert_eq!(view.shape(), info.shape);
        let exported: Vec<u8> = params
            .export(id)
            .iter()
            .flat_map(|v| v.to_le_bytes())
            .collect();
        assert_eq!(view.data(), exported);
        // The engine keeps a convolution's weight in another order.
        let reordered = params.export(id) != params.get(id);
        assert_eq!(reordered, info.name == "conv.weight");
    }
    // Tensors begin at a multiple of 8.
    let header = u64::from_le_bytes(bytes[..8].try_into().unwrap());
    assert_eq!(header % 8, 0);
}

#[test]
fn equal_weights_give_equal_files() {
    let (_dir1, first) = saved(&model(1));
    let (_dir2, second) = saved(&model(1));
    let (_dir3, third) = saved(&model(3));
    let read = |path| fs::read(path).unwrap();
    assert_eq!(read(&first), read(&second));
    assert_ne!(read(&first), read(&third));
}

#[test]
fn the_hash_is_what_its_definition_says() {
    let params = model(4);
    let mut hash = Sha256::new();
    for name in ["conv.bias", "conv.weight", "fc.weight"] {
        for value in params.export(params.find(name).unwrap()) {
            hash.update(value.to_le_bytes());
        }
    }
    for value in [4.0_f32; 4] {
        hash.update(value.to_le_bytes());
    }
    assert_eq!(weights_sha256(&params), hex::encode(hash.finalize()));
    let mut changed = params.clone();
    let last = changed.find("fc.weight").unwrap();
    changed.get_mut(last)[34] += 1e-6;
    assert_ne!(weights_sha256(&params), weights_sha256(&changed));
}

/// Loading `bytes` must fail with a `Data` error that names the file, and
/// change nothing.
fn refused(bytes: &[u8]) -> String {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("w.safetensors");
    fs::write(&path, bytes).unwrap();
    let mut params = model(9);
    let error = load_params(&path, &mut params).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Data, "{error}");
    assert!(same(&params, &model(9)));
    let text = error.to_string();
    assert!(text.contains("w.safetensors"), "{text}");
    text
}

#[test]
fn a_file_cut_anywhere_is_refused() {
    let (_dir, path) = saved(&model(1));
    let whole = fs::read(path).unwrap();
    let header_end = 8 + u64::from_le_bytes(whole[..8].try_into().unwrap()) as usize;
    for keep in 0..whole.len() {
        let text = refused(&whole[..keep]);
        let expected = if keep < 8 {
            format!("it has only {keep} bytes; expected 8 bytes with the length of the header")
        } else if keep < header_end {
            format!("its header should end at byte {header_end}, but it has {keep} bytes")
        } else {
            format!(
                "it has {keep} bytes, but its header describes {}",
                whole.len()
            )
        };
        assert!(text.contains(&expected), "{text}");
        assert!(text.contains("it may be truncated"), "{text}");
    }
    let mut longer = whole.clone();
    longer.push(0);
    let expected = format!("bytes, but its header describes {}", whole.len());
    assert!(refused(&longer).contains(&expected));
}

#[test]
fn files_of_another_kind_are_refused() {
    let text = refused(b"\x89PNG\r\n\x1a\n and so on");
    assert!(text.contains("its header length at byte 0 is"), "{text}");
    assert!(
        text.contains("expected at most 100000000; it has another format"),
        "{text}"
    );
    let mut long = 100_000_001_u64.to_le_bytes().to_vec();
    long.extend(b"{}");
    let text = refused(&long);
    assert!(text.contains("allows no longer header"), "{text}");
    refused(&[0xff; 64]);
    refused(b"{}");
    let text = refused(b"\x07\0\0\0\0\0\0\0{\"a\": x");
    assert!(
        text.contains("in its header, bytes 8 to 15, expected"),
        "{text}"
    );
    assert!(text.contains("column 7"), "{text}");
    // A header that promises more than a machine has.
    let header = br#"{"a":{"dtype":"F32","shape":[9223372036854775807],"data_offsets":[0,4]}}"#;
    let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
    bytes.extend(header);
    bytes.extend([0; 4]);
    refused(&bytes);
}

#[test]
fn another_models_file_names_the_differences() {
    let build = |extra: Option<&str>, shape: [usize; 2], without_bias: bool| {
        let mut scope = Scope::new(Seed(1));
        let zeros = Init::Constant(0.0);
        let mut conv = scope.enter("conv");
        conv.param("weight", &[4, 3, 2, 2], Layout::Conv, zeros);
        if !without_bias {
            conv.param("bias", &[4], Layout::Same, zeros);
        }
        scope.param("fc.weight", &shape, Layout::Same, zeros);
        scope.buffer("norm.running_mean", &[4], 0.0);
        if let Some(name) = extra {
            scope.param(name, &[1], Layout::Same, zeros);
        }
        let (_dir, path) = saved(&scope.build().unwrap());
        refused(&fs::read(path).unwrap())
    };
    let text = build(None, [7, 5], false);
    assert!(
        text.contains("fc.weight is F32 of shape [7, 5], the model has F32 of shape [5, 7]"),
        "{text}"
    );
    let text = build(Some("fc.bias"), [5, 7], true);
    assert!(text.contains("it lacks conv.bias"), "{text}");
    assert!(text.contains("the model does not know fc.bias"), "{text}");
}

#[test]
fn other_number_types_are_refused() {
    let (_dir, path) = saved(&model(1));
    let text = String::from_utf8_lossy(&fs::read(&path).unwrap()).into_owned();
    assert!(text.contains("F32"));
    let mut bytes = fs::read(&path).unwrap();
    let at = bytes.windows(3).position(|w| w == b"F32").unwrap();
    bytes[at..at + 3].copy_from_slice(b"I32");
    let text = refused(&bytes);
    assert!(text.contains("conv.bias is I32"), "{text}");
}

#[test]
fn a_missing_file_is_the_users_mistake() {
    let dir = tempfile::tempdir().unwrap();
    let error = load_params(&dir.path().join("absent"), &mut model(1)).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Usage);
    assert!(error.to_string().starts_with("no checkpoint "), "{error}");
}

/// A file's header.
fn header(text: &str) -> Vec<u8> {
    [&(text.len() as u64).to_le_bytes(), text.as_bytes()].concat()
}

#[test]
fn what_may_have_no_end_or_never_begin_is_not_read() {
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| dir.path().join(name);
    let manifest = "step-000000001.json";
    for name in ["a.safetensors", "b.pth", manifest] {
        symlink("/dev/zero", at(name)).unwrap();
        let said = load_params(&at(name), &mut model(1)).unwrap_err();
        assert_eq!(said.kind(), ErrorKind::Usage);
        let why = "it is a device, expected a regular file";
        assert!(
            said.to_string().ends_with(&format!("{name}: {why}")),
            "{said}"
        );
        fs::remove_file(at(name)).unwrap();
        // Nobody writes into it: opening it would wait for ever.
        assert!(
            Command::new("mkfifo")
                .arg(at(name))
                .status()
                .unwrap()
                .success()
        );
        for said in [
            load_params(&at(name), &mut model(1)).unwrap_err(),
            read_tensors(&at(name)).unwrap_err(),
            State::load(&at(name)).unwrap_err(),
        ] {
            assert!(
                said.to_string()
                    .ends_with(": it is a named pipe, expected a regular file"),
                "{said}"
            );
        }
    }
}

#[test]
fn shapes_are_compared_before_numbers_are_read() {
    if !alone("checkpoint::shapes_are_compared_before_numbers_are_read") {
        return;
    }
    const LARGE: u64 = 3 << 30;
    let dir = tempfile::tempdir().unwrap();
    let names = ["conv.bias", "conv.weight", "fc.weight", "norm.running_mean"];
    let sparse = dir.path().join("sparse.safetensors");
    let each = LARGE / names.len() as u64;
    let tensors: Vec<String> = (0..)
        .zip(names)
        .map(|(i, name)| {
            format!(
                r#""{name}":{{"dtype":"F32","shape":[{}],"data_offsets":[{},{}]}}"#,
                each / 4,
                i * each,
                (i + 1) * each
            )
        })
        .collect();
    let start = header(&format!("{{{}}}", tensors.join(",")));
    let mut file = File::create(&sparse).unwrap();
    file.write_all(&start).unwrap();
    file.set_len(start.len() as u64 + LARGE).unwrap();
    // A PyTorch file of such tensors, whose zeros are holes.
    let pth = dir.path().join("sparse.pth");
    let saved = |name: &&str| Saved {
        name: (*name).to_owned(),
        dtype: DType::F32,
        shape: vec![each as usize / 16],
        bytes: vec![0; each as usize / 4],
    };
    let all: Vec<Saved> = names.iter().map(saved).collect();
    write_state_dict(&mut Sparse(File::create(&pth).unwrap()), "x", &all).unwrap();
    drop(all);
    for path in [sparse, pth] {
        let before = process::peak_rss_bytes().unwrap();
        let said = load_params(&path, &mut model(1)).unwrap_err().to_string();
        assert!(
            said.contains("conv.bias is ") && said.contains("the model has F32 of shape"),
            "{said}"
        );
        let more = process::peak_rss_bytes().unwrap() - before;
        assert!(more < 64 << 20, "{more} bytes");
    }
}

/// Zeros become holes.
struct Sparse(File);

impl Write for Sparse {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        if bytes.len() < 4096 || bytes.iter().any(|b| *b != 0) {
            return self.0.write(bytes);
        }
        self.0.seek(SeekFrom::Current(bytes.len() as i64))?;
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        self.0.flush()
    }
}

#[test]
fn names_are_there_once_and_not_without_end() {
    if !alone("checkpoint::names_are_there_once_and_not_without_end") {
        return;
    }
    let entry =
        |name: &str| format!(r#""{name}":{{"dtype":"F32","shape":[0],"data_offsets":[0,0]}}"#);
    let twice = header(&format!("{{{},{}}}", entry("a\\u001b"), entry("a\\u001b")));
    let said = refused(&twice);
    assert!(said.contains(r#""a\u{1b}" appears twice"#), "{said}");
    let many: Vec<String> = (0..200_000).map(|n| entry(&n.to_string())).collect();
    let many = header(&format!("{{{}}}", many.join(",")));
    let before = process::peak_rss_bytes().unwrap();
    let said = refused(&many);
    assert!(said.contains("it has more than 65536 tensors"), "{said}");
    let more = process::peak_rss_bytes().unwrap() - before;
    assert!(more < 64 << 20, "{more} bytes");
}

/// The tensors of `params`, each name and value changed by `change`, in a `.pth` file in float64.
fn in_f64(
    params: &Params,
    change: impl Fn(&str, usize, f32) -> (String, f64),
) -> (TempDir, PathBuf) {
    let (dir, path) = saved(params);
    let (mut all, _) = read_tensors(&path).unwrap();
    for tensor in &mut all {
        let values = tensor
            .bytes
            .as_chunks()
            .0
            .iter()
            .map(|b| f32::from_le_bytes(*b));
        let values: Vec<f32> = values.collect();
        let name = tensor.name.clone();
        tensor.bytes.clear();
        for (i, value) in values.into_iter().enumerate() {
            let (renamed, value) = change(&name, i, value);
            tensor.name = renamed;
            tensor.bytes.extend(value.to_le_bytes());
        }
        tensor.dtype = DType::F64;
    }
    let path = dir.path().join("wide.pth");
    write_state_dict(&mut File::create(&path).unwrap(), "wide", &all).unwrap();
    (dir, path)
}

#[test]
fn values_that_are_not_finite_are_refused_by_name() {
    let original = model(1);
    let refused = |path: &std::path::Path, words: &str| {
        let mut params = model(2);
        let error = load_params(path, &mut params).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Data, "{error}");
        assert!(error.to_string().ends_with(words), "{error}");
        assert!(same(&params, &model(2)));
    };
    for value in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        let mut bad = original.clone();
        let weight = bad.find("fc.weight").unwrap();
        bad.get_mut(weight)[34] = value;
        let (_dir, path) = saved(&bad);
        let words =
            format!("fc.weight has {value} at index 34 (1 of its 35 values are not finite)");
        refused(&path, &words);
        // Tools that show or convert a file still read it.
        assert!(read_tensors(&path).is_ok());
    }
    let (_dir, path) = in_f64(&original, |name, i, value| {
        let large = name == "norm.running_mean" && i > 1;
        (name.to_owned(), if large { -1e300 } else { value.into() })
    });
    let words = "norm.running_mean has -1e300, which is too large for float32, at index 2 (2 of its 4 values are not finite)";
    refused(&path, words);
}

/// As Hugging Face's `save_pretrained` writes a model that is larger than `max_shard_size`.
#[test]
fn a_model_in_several_files_is_read_by_its_index() {
    let original = model(1);
    let (dir, whole) = in_f64(&original, |name, _, value| (name.to_owned(), value.into()));
    let (all, _) = read_tensors(&whole).unwrap();
    let (first, second) = all.split_at(all.len() / 2);
    let at = |name: &str| dir.path().join(name);
    let write = |name: &str, tensors: &[Saved]| {
        write_state_dict(&mut File::create(at(name)).unwrap(), "part", tensors).unwrap();
    };
    let index = |change: &dyn Fn(&mut serde_json::Value)| {
        let parts = [("one.bin", first), ("two.bin", second)];
        let names = parts.iter().flat_map(|(file, part)| {
            part.iter()
                .map(move |tensor| (tensor.name.clone(), json!(file)))
        });
        let names: serde_json::Map<String, serde_json::Value> = names.collect();
        let mut index = json!({"metadata": {"total_size": 9}, "weight_map": names});
        change(&mut index);
        let path = at("pytorch_model.bin.index.json");
        std::fs::write(&path, index.to_string()).unwrap();
        path
    };
    write("one.bin", first);
    // The index decides, also where a file has a tensor of another one.
    let mut more = second.to_vec();
    more.push(Saved {
        bytes: vec![1; first[0].bytes.len()],
        ..first[0].clone()
    });
    write("two.bin", &more);
    let path = index(&|_| {});
    let mut params = model(2);
    load_params(&path, &mut params).unwrap();
    assert!(same(&params, &original));
    assert_eq!(read_tensors(&path).unwrap().0.len(), all.len());

    let refused = |path: &Path, words: &str| {
        let mut params = model(2);
        let error = load_params(path, &mut params).unwrap_err();
        assert!(error.to_string().contains(words), "{error}");
        assert!(same(&params, &model(2)), "{error}");
    };
    let name = &second[0].name;
    let place = format!("/weight_map/{name}");
    let file_of =
        |file: &'static str| index(&|index| *index.pointer_mut(&place).unwrap() = json!(file));
    refused(
        &file_of("one.bin"),
        &format!("one.bin lacks {name}, which the index says it has"),
    );
    refused(&file_of("three.bin"), "three.bin");
    refused(
        &file_of("../two.bin"),
        "its file ../two.bin is not in the same folder",
    );
    refused(&file_of(".."), "its file .. is not in the same folder");
    let less = index(&|index| {
        index["weight_map"].as_object_mut().unwrap().remove(name);
    });
    refused(&less, &format!("it lacks {name}"));
    let path = index(&|index| *index = json!({"weights": {}}));
    refused(
        &path,
        "expected the index of a model: missing field `weight_map`",
    );
    std::fs::write(at("two.bin"), b"PK").unwrap();
    refused(&index(&|_| {}), "two.bin");
}

#[test]
fn prefixes_of_wrappers_are_taken_away_in_any_order() {
    let original = model(1);
    for prefix in [
        "module.",
        "_orig_mod.",
        "model.",
        "_orig_mod.module.",
        "module._orig_mod.",
        "model._orig_mod.module.module.",
    ] {
        let (_dir, path) = in_f64(&original, |name, _, value| {
            (format!("{prefix}{name}"), value.into())
        });
        let mut params = model(2);
        load_params(&path, &mut params).unwrap();
        assert!(same(&params, &original), "{prefix}");
        // `AveragedModel` counts beside the names.
        let (mut all, _) = read_tensors(&path).unwrap();
        for tensor in &mut all {
            tensor.name = format!("module.{}", tensor.name);
        }
        all.push(Saved {
            name: "n_averaged".to_owned(),
            dtype: DType::I64,
            shape: vec![],
            bytes: 5_i64.to_le_bytes().to_vec(),
        });
        write_state_dict(&mut File::create(&path).unwrap(), "wide", &all).unwrap();
        let mut params = model(2);
        load_params(&path, &mut params).unwrap();
        assert!(same(&params, &original), "{prefix} of an average");
    }
    // Only some names have it.
    let (_dir, path) = in_f64(&original, |name, _, value| match name {
        "fc.weight" => (format!("module.{name}"), value.into()),
        _ => (name.to_owned(), value.into()),
    });
    let error = load_params(&path, &mut model(2)).unwrap_err().to_string();
    assert!(error.contains("does not know module.fc.weight"), "{error}");
    // A model's own names may begin so.
    let own = |n: f32| {
        let mut scope = Scope::new(Seed(1));
        scope.enter("module").buffer("mean", &[2], n);
        scope.build().unwrap()
    };
    for prefix in ["module.", "module.module.", "_orig_mod.module."] {
        let (_dir, path) = in_f64(&own(1.0), |name, _, value| {
            (format!("{prefix}{name}"), value.into())
        });
        let mut params = own(2.0);
        load_params(&path, &mut params).unwrap();
        assert!(same(&params, &own(1.0)), "{prefix}");
    }
}

#[test]
fn a_git_lfs_pointer_is_named() {
    let dir = tempfile::tempdir().unwrap();
    for name in ["w.safetensors", "w.pth", "w.json"] {
        let path = dir.path().join(name);
        fs::write(
            &path,
            "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n",
        )
        .unwrap();
        let error = load_params(&path, &mut model(1)).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Usage, "{error}");
        assert!(error.to_string().contains("git lfs pull"), "{error}");
    }
}
