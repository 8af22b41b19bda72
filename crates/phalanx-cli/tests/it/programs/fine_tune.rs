//! Trainings that start from weights: `--init-map`, `--init-skip`, `--freeze`, `--lora`, and `export` of adapters.

use std::collections::BTreeMap;

use phalanx_checkpoint::pth::Saved;
use phalanx_checkpoint::{read_metadata, read_tensors};

use super::photos::classes;
use super::*;

const GPT2: &str = concat!(
    env!("CARGO_MANIFEST_DIR"),
    "/../phalanx-checkpoint/tests/fixtures/pretrained"
);

fn tensors(path: &Path) -> BTreeMap<String, Saved> {
    let (all, _) = read_tensors(path).expect("weights");
    all.into_iter().map(|t| (t.name.clone(), t)).collect()
}

fn split(line: &str) -> Vec<&str> {
    line.split_whitespace().collect()
}

#[test]
fn resnet50_trains_a_new_head_on_a_folder_from_weights() {
    let dir = tempfile::tempdir().expect("folder");
    classes(&dir.path().join("photos"));
    let common = "train resnet50 --data photos --skip-damaged --image-size 64 --test-batch-size 3 --max-steps 2";
    let train = |more: &str, ranks: &str| {
        let more =
            format!("{common} {more} --nproc-per-node {ranks} --global-batch-size 8 --threads 1");
        run(&split(&more), dir.path())
    };
    // CIFAR's ten classes: another head.
    let ten = "train resnet50 --data synthetic:16 --batch-size 8 --max-steps 1 --output-dir ten --threads 1";
    succeed(&split(ten), dir.path());
    let (code, _, err) = train("--init ten/resnet50.safetensors --output-dir no", "1");
    assert_eq!(code, 1, "{err}");
    for words in [
        "fc.bias is F32 of shape [10], the model has F32 of shape [3]",
        "--init-skip 'fc.*'",
    ] {
        assert!(err.contains(words), "{err}");
    }
    let flags = "--init ten/resnet50.safetensors --init-skip fc.* --freeze conv1 --freeze bn1 --freeze layer*";
    let mut runs = Vec::new();
    for ranks in ["1", "2"] {
        let (code, _, err) = train(
            &format!("{flags} --deterministic shards --output-dir {ranks}"),
            ranks,
        );
        assert_eq!(code, 0, "{err}");
        for words in [
            "not loaded, with their initial values: fc.bias, fc.weight",
            "(6,147 trained, 23,508,032 frozen)",
        ] {
            assert!(err.contains(words), "{err}");
        }
        runs.push(json(&dir.path().join(ranks).join("summary.json"))["weights_sha256"].clone());
    }
    assert_eq!(runs[0], runs[1]);
    let [from, to] =
        ["ten", "2"].map(|f| tensors(&dir.path().join(f).join("resnet50.safetensors")));
    for (name, tensor) in &to {
        // Statistics of frozen layers move on, as in PyTorch.
        let moves =
            name.starts_with("fc.") || name.contains(".running_") || name.ends_with("tracked");
        assert_eq!(
            from[name].bytes != tensor.bytes,
            moves || name.starts_with("bn1.running_"),
            "{name}"
        );
    }
    let (out, _) = succeed(&split("predict 2 --data photos/red/0-420.jpg"), dir.path());
    assert!(
        ["\"blue\"", "\"gray\"", "\"red\""]
            .iter()
            .any(|class| out.contains(class)),
        "{out}"
    );
}

/// A folder with GPT-2's file, and a text with fewer characters than it has tokens.
fn gpt2(dir: &Path) {
    std::fs::create_dir(dir.join("gpt2")).expect("folder");
    let copy = dir.join("gpt2/model.safetensors");
    std::fs::copy(format!("{GPT2}/model.safetensors"), copy).expect("copied");
    std::fs::write(dir.join("gpt2/config.json"), r#"{"n_head": 2}"#).expect("written");
    std::fs::write(dir.join("text.txt"), "a bad cab deaf face ".repeat(40)).expect("written");
}

const GPT: &str = "train gpt --data text.txt --context 8 --sample 0 --batch-size 4 --threads 1";

#[test]
fn gpt2_is_trained_with_adapters_that_pefts_files_have() {
    let dir = tempfile::tempdir().expect("folder");
    gpt2(dir.path());
    let lora = "--init gpt2/model.safetensors --lora 2 --lora-alpha 4 --lora-targets c_attn,c_proj";
    let weights = |folder: &str| tensors(&dir.path().join(folder).join("gpt.safetensors"));
    let sha = |folder: &str| {
        json(&dir.path().join(folder).join("summary.json"))["weights_sha256"].clone()
    };
    let line = format!("{GPT} {lora} --max-steps 4 --nproc-per-node 2 --output-dir run");
    let (_, err) = succeed(&split(&line), dir.path());
    assert!(
        err.contains("GPT of 2 blocks") && err.contains("(704 trained, "),
        "{err}"
    );
    let base = tensors(&dir.path().join("gpt2/model.safetensors"));
    let trained = weights("run");
    for (name, tensor) in &trained {
        let Some(short) = name
            .strip_prefix("transformer.")
            .filter(|n| !n.contains(".lora_"))
        else {
            continue;
        };
        let before = base[short].dtype.to_f32(&base[short].bytes);
        assert_eq!(before, tensor.dtype.to_f32(&tensor.bytes), "{name}");
    }

    // Stopped and continued, without a file of GPT-2.
    let halves = [
        format!("{GPT} {lora} --max-steps 4 --nproc-per-node 2 --output-dir half --stop-after 2"),
        format!(
            "{GPT} --lora 2 --lora-alpha 4 --lora-targets c_attn,c_proj --max-steps 4 --nproc-per-node 2 --resume half"
        ),
    ];
    halves
        .iter()
        .for_each(|line| drop(run(&split(line), dir.path())));
    assert_eq!(sha("half"), sha("run"));

    // PEFT's files: of the same matrices, and taken up again.
    succeed(&split("export run --adapter --to adapter"), dir.path());
    let matrices = tensors(&dir.path().join("adapter/adapter_model.safetensors"));
    let own = trained.iter().filter(|(name, _)| name.contains(".lora_"));
    let own: BTreeMap<_, _> = own
        .map(|(name, t)| (format!("base_model.model.{name}"), &t.bytes))
        .collect();
    assert_eq!(
        matrices
            .iter()
            .map(|(name, t)| (name.clone(), &t.bytes))
            .collect::<BTreeMap<_, _>>(),
        own
    );
    let config = json(&dir.path().join("adapter/adapter_config.json"));
    assert_eq!(
        (
            &config["r"],
            &config["lora_alpha"],
            &config["fan_in_fan_out"]
        ),
        (&2.into(), &4.0.into(), &true.into())
    );
    let again = format!(
        "{GPT} --init gpt2/model.safetensors --lora adapter --lr 0 --max-steps 1 --output-dir again"
    );
    succeed(&split(&again), dir.path());
    assert_eq!(sha("again"), sha("run"));

    // Merged from the run, or from the base and the adapter: the same weights, which say nothing of adapters.
    succeed(
        &split("export run --merge --to merged.safetensors"),
        dir.path(),
    );
    succeed(
        &split("export gpt2/model.safetensors --merge=adapter --to same.pth"),
        dir.path(),
    );
    let merged = tensors(&dir.path().join("merged.safetensors"));
    for (name, tensor) in tensors(&dir.path().join("same.pth")) {
        let Some(other) = merged.get(&format!("transformer.{name}")) else {
            assert!(name.ends_with(".attn.bias"), "{name}");
            continue;
        };
        assert_eq!(
            other.dtype.to_f32(&other.bytes),
            tensor.dtype.to_f32(&tensor.bytes),
            "{name}"
        );
    }
    assert!(!merged.keys().any(|name| name.contains("lora")));
    assert!(
        !read_metadata(&dir.path().join("merged.safetensors"))
            .expect("read")
            .contains_key("lora")
    );
    let evaluated =
        format!("{GPT} --init merged.safetensors --lr 0 --max-steps 1 --output-dir merged");
    let loss = |folder: &str| {
        json(&dir.path().join(folder).join("summary.json"))["test_loss"]
            .as_f64()
            .expect("a loss")
    };
    succeed(&split(&evaluated), dir.path());
    assert!(
        (loss("merged") - loss("again")).abs() < 1e-5,
        "{} {}",
        loss("merged"),
        loss("again")
    );
}

#[test]
fn flags_that_do_not_fit_the_weights_are_refused_before_a_rank_starts() {
    let dir = tempfile::tempdir().expect("folder");
    gpt2(dir.path());
    for (flags, words) in [
        ("--init-skip fc.*", "add --init FILE"),
        ("--init-map a.=b.", "add --init FILE"),
        (
            "--init gpt2/model.safetensors --init-map a",
            "expected OLD=NEW",
        ),
        ("--lora 0", "--lora must be at least 1"),
        (
            "--lora none",
            "takes a rank, as 8, or the folder of an adapter",
        ),
        (
            "--lora 2 --lora-dropout 1",
            "--lora-dropout must lie in 0..1",
        ),
        ("--lora-alpha 2", "--lora"),
        (
            "--lora 2 --mesh data=2 --nproc-per-node 2",
            "a mesh trains all parameters",
        ),
        (
            "--freeze ln_f --mesh data=2 --nproc-per-node 2",
            "a mesh trains all parameters",
        ),
        (
            "--init gpt2/model.safetensors --context 13",
            "has 31 tokens and a context of 12",
        ),
        ("--freeze no.layer", "no parameter of this name or pattern"),
        ("--freeze *", "nothing is left to train"),
        (
            "--lora 2 --lora-targets nothing",
            "no linear layer or attention is called nothing",
        ),
    ] {
        let (code, _, err) = run(&split(&format!("{GPT} --max-steps 1 {flags}")), dir.path());
        assert_eq!(code, 2, "{flags}: {err}");
        assert!(err.contains(words), "{flags}: {err}");
    }
    let (code, _, err) = run(
        &split("export gpt2/model.safetensors --merge --to x.pth"),
        dir.path(),
    );
    assert_eq!(code, 2, "{err}");
    assert!(err.contains("has no low-rank adapters"), "{err}");
}
