//! Files of other libraries: GPT-2 of transformers and an adapter of PEFT (`fixtures/pretrained/make_pretrained.py`), and files that have
//! only a part of a model.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use phalanx_base::ErrorKind;
use phalanx_checkpoint::{
    Adapter, AdapterConfig, LoadOptions, load_params, load_params_with, read_shapes, read_tensors,
    save_params, save_tensors,
};
use phalanx_nn::layers::Linear;
use phalanx_nn::models::{Gpt, GptConfig, Vit, VitConfig};
use phalanx_nn::optim::Sgd;
use phalanx_nn::{Grads, LoraConfig, Params, Reduction, Scope, Seed, StepKey, Tape, Threads};
use serde_json::Value;

const CONFIG: GptConfig = GptConfig {
    vocab: 31,
    context: 12,
    layers: 2,
    heads: 2,
    width: 16,
    dropout: 0.0,
};

fn fixture(name: &str) -> PathBuf {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/pretrained");
    folder.join(name)
}

fn expected() -> Value {
    let text = std::fs::read(fixture("expected.json")).unwrap();
    serde_json::from_slice(&text).unwrap()
}

fn build(lora: Option<LoraConfig>) -> (Gpt, Params) {
    let mut scope = Scope::new(Seed(3));
    if let Some(lora) = lora {
        scope.lora(lora);
    }
    let gpt = Gpt::gpt2(&mut scope, &CONFIG);
    (gpt, scope.build().unwrap())
}

fn tokens() -> Vec<u32> {
    let all = expected()["tokens"].as_array().unwrap().clone();
    all.iter().map(|t| t.as_u64().unwrap() as u32).collect()
}

fn check(gpt: &Gpt, params: &Params, name: &str) {
    let mut tape = Tape::new(Threads(1));
    let step = tape.inference(params);
    compare(
        &gpt.forward(&step, &tokens(), (2, 10)).unwrap().to_vec(),
        name,
    );
}

fn compare(logits: &[f32], name: &str) {
    let expected = expected()[name].as_array().unwrap().clone();
    assert_eq!(logits.len(), expected.len());
    for (i, (got, want)) in logits.iter().zip(&expected).enumerate() {
        let want = want.as_f64().unwrap();
        let off = (f64::from(*got) - want).abs();
        assert!(off < 1e-4 * want.abs().max(1.0), "{name} {i}: {got} {want}");
    }
}

#[test]
fn gpt2_of_transformers_has_its_outputs() {
    for (file, dropped, unused) in [
        (
            "model.safetensors",
            "",
            &["transformer.h.0.attn.bias", "transformer.h.1.attn.bias"][..],
        ),
        ("pytorch_model.bin", "module.", &["lm_head.weight"]),
    ] {
        let (gpt, mut params) = build(None);
        let options = LoadOptions::new();
        let loaded = load_params_with(&fixture(file), &mut params, &options).unwrap();
        assert_eq!(
            (loaded.tensors, &*loaded.dropped),
            (params.len(), dropped),
            "{file}"
        );
        assert!(loaded.kept.is_empty());
        assert_eq!(loaded.unused, unused, "{file}");
        check(&gpt, &params, "logits");
    }
    let shapes = read_shapes(&fixture("model.safetensors")).unwrap();
    assert_eq!(shapes["h.1.attn.c_attn.weight"], [16, 48]);
}

#[test]
fn the_cached_gpt2_continues_as_the_whole_one() {
    let (gpt, mut params) = build(None);
    load_params(&fixture("model.safetensors"), &mut params).unwrap();
    let mut tape = Tape::new(Threads(1));
    let step = tape.inference(&params);
    let whole = gpt
        .forward(&step, &tokens()[..10], (1, 10))
        .unwrap()
        .to_vec();
    let mut caches = Vec::new();
    let first = gpt
        .forward_cached(&step, &tokens()[..6], (1, 6), &mut caches)
        .unwrap();
    let rest = gpt
        .forward_cached(&step, &tokens()[6..10], (1, 4), &mut caches)
        .unwrap();
    let parts = [first.to_vec(), rest.to_vec()].concat();
    let off = whole.iter().zip(&parts).map(|(a, b)| (a - b).abs());
    assert!(off.fold(0.0, f32::max) < 1e-5);
}

#[test]
fn a_head_of_its_own_is_not_taken_for_the_tied_one() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("untied.pth");
    let (mut tensors, _) = read_tensors(&fixture("pytorch_model.bin")).unwrap();
    let head = tensors
        .iter_mut()
        .find(|t| t.name == "lm_head.weight")
        .unwrap();
    head.bytes[0] ^= 1;
    save_tensors(&path, tensors, &BTreeMap::new()).unwrap();
    let error = load_params(&path, &mut build(None).1).unwrap_err();
    assert!(
        error.to_string().contains("does not know lm_head.weight"),
        "{error}"
    );
}

#[test]
fn an_adapter_of_peft_has_its_outputs_and_trains_as_there() {
    let config = AdapterConfig::read(&fixture("adapter")).unwrap();
    assert!(config.fan_in_fan_out);
    let (gpt, mut params) = build(Some(config.lora()));
    let base = load_params_with(
        &fixture("model.safetensors"),
        &mut params,
        &LoadOptions::new(),
    );
    // c_attn, and c_proj of attention and MLP, in two blocks; the adapter is new.
    assert_eq!(base.unwrap().kept.len(), 12);
    let only = LoadOptions::new().only_adapters();
    let path = Adapter::tensors_in(&fixture("adapter"));
    let loaded = load_params_with(&path, &mut params, &only).unwrap();
    assert_eq!((loaded.tensors, loaded.unused.len()), (12, 0));
    check(&gpt, &params, "adapted");
    let targets: Vec<u32> = (tokens().chunks(10))
        .flat_map(|row| (0..10).map(|i| row[(i + 1) % 10]))
        .collect();
    let mut sgd = Sgd::new(&params, 0.1);
    let (mut grads, mut tape) = (Grads::like(&params), Tape::new(Threads(1)));
    for want in expected()["losses"].as_array().unwrap() {
        let step = tape.step(&params, StepKey::new(0, 0));
        let logits = gpt.forward(&step, &tokens(), (2, 10)).unwrap();
        let loss = logits.cross_entropy(&targets, Reduction::Mean).unwrap();
        assert!((f64::from(loss.to_vec()[0]) - want.as_f64().unwrap()).abs() < 1e-4);
        loss.backward(&mut grads).unwrap();
        drop(step);
        sgd.step(&mut params, &grads).unwrap();
    }
    check(&gpt, &params, "trained");
}

#[test]
fn a_merged_adapter_is_in_the_weights() {
    for base in ["model.safetensors", "pytorch_model.bin"] {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("merged.safetensors");
        let (mut tensors, _) = read_tensors(&fixture(base)).unwrap();
        let adapter = Adapter::read(&fixture("adapter")).unwrap();
        assert_eq!(adapter.merge_into(&mut tensors).unwrap(), 6);
        save_tensors(&path, tensors, &BTreeMap::new()).unwrap();
        let (gpt, mut params) = build(None);
        load_params(&path, &mut params).unwrap();
        check(&gpt, &params, "adapted");
    }
}

#[test]
fn an_adapter_goes_into_pefts_files_and_back() {
    let dir = tempfile::tempdir().unwrap();
    let config = AdapterConfig::read(&fixture("adapter")).unwrap();
    let (_, mut params) = build(Some(config.lora()));
    load_params(&fixture("model.safetensors"), &mut params).unwrap();
    let only = LoadOptions::new().only_adapters();
    let path = Adapter::tensors_in(&fixture("adapter"));
    load_params_with(&path, &mut params, &only).unwrap();
    // As a run saves it.
    let file = dir.path().join("run.safetensors");
    let text = serde_json::to_string(&AdapterConfig::of(&config.lora(), true)).unwrap();
    let metadata = [(AdapterConfig::METADATA.to_owned(), text)].into();
    save_params(&file, &params, &metadata).unwrap();
    let (mut tensors, mut loaded) = read_tensors(&file).unwrap();
    let adapter = Adapter::take(&mut tensors, &mut loaded.metadata, &file).unwrap();
    assert!(
        loaded.metadata.is_empty() && tensors.len() == 28,
        "{}",
        tensors.len()
    );
    let folder = dir.path().join("new/adapter");
    adapter.save(&folder).unwrap();
    let (ours, _) = read_tensors(&Adapter::tensors_in(&folder)).unwrap();
    let (theirs, _) = read_tensors(&path).unwrap();
    let sorted = |mut all: Vec<phalanx_checkpoint::pth::Saved>| {
        all.sort_by(|a, b| a.name.cmp(&b.name));
        all.into_iter()
            .map(|t| (t.name, t.shape, t.bytes))
            .collect::<Vec<_>>()
    };
    assert_eq!(sorted(ours), sorted(theirs));
    let again = AdapterConfig::read(&folder).unwrap();
    assert_eq!(
        (again.r, again.lora_alpha, again.fan_in_fan_out),
        (3, 6.0, true)
    );
    let targets = again.lora().targets;
    assert!(
        targets.len() == 6 && targets[0] == "transformer.h.0.attn.c_attn",
        "{targets:?}"
    );
    let error = Adapter::take(&mut tensors, &mut loaded.metadata, &file).unwrap_err();
    assert!(
        error.to_string().contains("has no low-rank adapters"),
        "{error}"
    );
}

#[test]
fn a_vision_transformer_with_an_adapter_of_its_attention_is_that_of_merged_weights() {
    let sizes = VitConfig {
        image: 16,
        patch: 8,
        layers: 1,
        heads: 2,
        width: 16,
        mlp: 24,
        classes: 5,
        dropout: 0.0,
    };
    let pixels = expected()["pixels"].as_array().unwrap().clone();
    let pixels: Vec<f32> = pixels.iter().map(|p| p.as_f64().unwrap() as f32).collect();
    let check = |vit: &Vit, params: &Params| {
        let mut tape = Tape::new(Threads(1));
        let step = tape.inference(params);
        let images = step.input(&pixels, &[2, 16, 16, 3]).unwrap();
        compare(&vit.forward(images).unwrap().to_vec(), "vit");
    };
    let (base, folder) = (fixture("vit.pth"), fixture("vit"));
    let mut scope = Scope::new(Seed(1));
    scope.lora(AdapterConfig::read(&folder).unwrap().lora());
    let vit = Vit::new(&mut scope, &sizes);
    let mut params = scope.build().unwrap();
    load_params(&base, &mut params).unwrap();
    let only = LoadOptions::new().only_adapters();
    let loaded = load_params_with(&Adapter::tensors_in(&folder), &mut params, &only).unwrap();
    assert_eq!(loaded.tensors, 6);
    check(&vit, &params);

    // Merged, from the adapter written again.
    let dir = tempfile::tempdir().unwrap();
    Adapter::read(&folder).unwrap().save(dir.path()).unwrap();
    let names = |folder: &Path| {
        let (all, _) = read_tensors(&Adapter::tensors_in(folder)).unwrap();
        let mut names: Vec<String> = all.into_iter().map(|t| t.name).collect();
        names.sort();
        names
    };
    assert_eq!(names(dir.path()), names(&folder));
    let (mut tensors, _) = read_tensors(&base).unwrap();
    let adapter = Adapter::read(dir.path()).unwrap();
    assert_eq!(adapter.merge_into(&mut tensors).unwrap(), 3);
    let merged = dir.path().join("merged.pth");
    save_tensors(&merged, tensors, &BTreeMap::new()).unwrap();
    let mut scope = Scope::new(Seed(1));
    let vit = Vit::new(&mut scope, &sizes);
    let mut params = scope.build().unwrap();
    load_params(&merged, &mut params).unwrap();
    check(&vit, &params);
}

#[test]
fn adapters_are_drawn_as_peft_draws_them() {
    let mut scope = Scope::new(Seed(5));
    let all = ["0".to_owned(), "2".to_owned()].into();
    scope.lora(LoraConfig {
        rank: 2,
        alpha: 8.0,
        dropout: 0.0,
        targets: all,
    });
    Linear::new(scope.enter("0"), 4, 6);
    Linear::new(scope.enter("2"), 6, 3);
    let params = scope.build().unwrap();
    let (tensors, _) = read_tensors(&fixture("fresh.safetensors")).unwrap();
    assert_eq!(tensors.len(), params.len());
    for tensor in tensors {
        let id = params.find(&tensor.name).expect(&tensor.name);
        assert_eq!(
            tensor.dtype.to_f32(&tensor.bytes),
            params.export(id),
            "{}",
            tensor.name
        );
    }
}

#[test]
fn settings_of_adapters_that_are_not_known_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let good = std::fs::read_to_string(fixture("adapter/adapter_config.json")).unwrap();
    let good: Value = serde_json::from_str(&good).unwrap();
    for (key, value, words) in [
        ("peft_type", "IA3".into(), "peft_type is not LORA"),
        ("use_dora", true.into(), "use_dora is not supported"),
        (
            "rank_pattern",
            serde_json::json!({"c_attn": 4}),
            "rank_pattern is not supported",
        ),
        (
            "modules_to_save",
            serde_json::json!(["head"]),
            "modules_to_save is not supported",
        ),
        ("bias", "all".into(), "biases of its own"),
        ("r", 0.into(), "r must be at least 1"),
        ("r", "x".into(), "invalid type"),
    ] {
        let mut bad = good.clone();
        bad[key] = value;
        std::fs::write(dir.path().join("adapter_config.json"), bad.to_string()).unwrap();
        let error = AdapterConfig::read(dir.path()).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Data);
        assert!(error.to_string().contains(words), "{error}");
    }
    let error = AdapterConfig::read(&dir.path().join("none")).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Usage, "{error}");
}

/// A trunk and a head of `classes` classes.
fn net(trunk: &str, classes: usize, seed: u64) -> Params {
    let mut scope = Scope::new(Seed(seed));
    Linear::new(scope.enter(trunk), 3, 4);
    Linear::new(scope.enter("fc"), 4, classes);
    scope.build().unwrap()
}

#[test]
fn what_is_renamed_skipped_and_left_over_is_named() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("net.safetensors");
    let theirs = net("encoder", 10, 1);
    save_params(&path, &theirs, &BTreeMap::new()).unwrap();
    let fresh = net("backbone.body", 5, 2);
    let same = |params: &Params, name: &str, of: &Params, other: &str| {
        params.get(params.find(name).unwrap()) == of.get(of.find(other).unwrap())
    };

    let error = load_params(&path, &mut fresh.clone())
        .unwrap_err()
        .to_string();
    for name in ["backbone.body.bias", "encoder.weight"] {
        assert!(error.contains(name), "{error}");
    }
    let renamed = LoadOptions::new().rename("encoder.", "backbone.body.");
    let error = load_params_with(&path, &mut fresh.clone(), &renamed)
        .unwrap_err()
        .to_string();
    assert!(error.contains("[10]") && error.contains("[5]"), "{error}");

    let mut params = fresh.clone();
    let options = renamed.clone().skip("fc.*");
    let loaded = load_params_with(&path, &mut params, &options).unwrap();
    assert_eq!(
        (loaded.tensors, loaded.kept.join(" ")),
        (2, "fc.bias fc.weight".to_owned())
    );
    assert_eq!(
        loaded.notes(),
        ["not loaded, with their initial values: fc.bias, fc.weight"]
    );
    assert!(same(
        &params,
        "backbone.body.weight",
        &theirs,
        "encoder.weight"
    ));
    assert!(same(&params, "fc.weight", &fresh, "fc.weight"));

    // Left over in the file.
    let mut scope = Scope::new(Seed(2));
    Linear::new(scope.enter("backbone").enter("body"), 3, 4);
    let mut trunk = scope.build().unwrap();
    let error = load_params_with(&path, &mut trunk, &renamed)
        .unwrap_err()
        .to_string();
    assert!(
        error.contains("does not know fc.bias, fc.weight"),
        "{error}"
    );
    let loaded = load_params_with(&path, &mut trunk, &options).unwrap();
    assert_eq!(
        loaded.notes(),
        ["in the file only, and not used: fc.bias, fc.weight"]
    );

    let error = load_params_with(&path, &mut trunk, &LoadOptions::new().skip("*")).unwrap_err();
    assert!(
        error.to_string().contains("nothing of it is left"),
        "{error}"
    );
    let twice = LoadOptions::new().rename("encoder.", "fc.");
    let error = load_params_with(&path, &mut trunk, &twice).unwrap_err();
    assert!(
        error.to_string().contains("two of its tensors become fc."),
        "{error}"
    );
}
