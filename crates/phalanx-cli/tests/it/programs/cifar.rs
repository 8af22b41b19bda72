//! The CIFAR-10 programs, on drawn pictures.

use phalanx_checkpoint as checkpoint;
use phalanx_nn::models::CifarResNet;
use phalanx_nn::{Scope, Seed};

use super::*;

/// Two epochs of few steps.
const SMALL: [&str; 14] = [
    "--data_url",
    "synthetic:48",
    "--epochs",
    "2",
    "--batch_size",
    "8",
    "--test_batch_size",
    "8",
    "--threads",
    "1",
    "--log_interval",
    "1",
    "--output_dir",
    "out",
];

/// The two `print` calls of the ModelArts document, an epoch.
const EPOCH_SHAPE: &str = "train | epoch: # | loss: #.####\n\
                           val | epoch: # | loss: #.#### | accuracy: #.#### \n\
                           \n";

fn program<'a>(name: &'a str, more: &[&'a str]) -> Vec<&'a str> {
    [&["train", name][..], &SMALL, more].concat()
}

#[test]
fn resnet18_prints_and_saves_what_the_document_does() {
    let dir = tempfile::tempdir().expect("folder");
    let (out, err) = succeed(
        &program("resnet18", &["--enable_gpu", "false", "--lr", "0.001"]),
        dir.path(),
    );
    assert_eq!(shape(&out), EPOCH_SHAPE.repeat(2), "{out}");
    assert!(out.starts_with("train | epoch: 1 | loss: "), "{out}");
    assert!(err.contains("11,173,962 parameters in 62 tensors"), "{err}");
    let folder = dir.path().join("out");
    // A file of torch.save each epoch, as there; the last has the weights of the summary.
    let summary = json(&folder.join("summary.json"));
    for (epoch, is_last) in [(1, false), (2, true)] {
        let path = folder.join(format!("epoch_{epoch}.pth"));
        assert!(std::fs::read(&path).expect("saved").starts_with(b"PK"));
        let mut scope = Scope::new(Seed(3));
        CifarResNet::resnet18(&mut scope, 10);
        let mut params = scope.build().expect("a model");
        checkpoint::load_params(&path, &mut params).expect("loads");
        let own = checkpoint::weights_sha256(&params);
        assert_eq!(summary["weights_sha256"] == own, is_last, "epoch {epoch}");
    }
    let matrix: Vec<Vec<i64>> =
        serde_json::from_value(summary["confusion"].clone()).expect("matrix");
    assert_eq!(
        matrix.iter().flatten().sum::<i64>(),
        8,
        "each of the test pictures once"
    );
}

#[test]
fn every_rank_prints_in_the_documents_form_and_rates_scale_as_asked() {
    let dir = tempfile::tempdir().expect("folder");
    let more = ["--nproc-per-node", "2", "--document"];
    let (out, err) = succeed(&program("resnet18", &more), dir.path());
    for line in [
        "train | epoch: 1 |",
        "train | epoch: 2 |",
        "val | epoch: 1 |",
        "val | epoch: 2 |",
    ] {
        assert_eq!(
            out.lines().filter(|l| l.starts_with(line)).count(),
            2,
            "{line}\n{out}"
        );
    }
    // Each validates the whole set by the same weights.
    let vals: Vec<&str> = out
        .lines()
        .filter(|l| l.starts_with("val | epoch: 2"))
        .collect();
    assert_eq!(vals[0], vals[1]);
    assert!(
        err.contains("Adam lr 0.02"),
        "the complete listing's rule: {err}"
    );
    let none = ["--lr_scaling", "none", "--overwrite", "--stop-after", "1"];
    let none = [&more[..], &none].concat();
    let (_, err) = succeed(&program("resnet18", &none), dir.path());
    assert!(err.contains("Adam lr 0.01"), "{err}");
}

/// As the platform of the document starts it: a process a task, told by flags.
#[test]
fn tasks_that_are_started_by_hand_meet_by_init_method() {
    let dir = tempfile::tempdir().expect("folder");
    let meet = format!("file://{}", dir.path().join("meet").display());
    let task = |rank: &'static str| {
        let args = program(
            "resnet18",
            &[
                "--custom_data",
                "true",
                "--train-samples",
                "32",
                "--test-samples",
                "16",
                "--init_method",
                &meet,
                "--world_size",
                "2",
                "--rank",
                rank,
            ],
        );
        phalanx(&args, dir.path()).spawn().expect("started")
    };
    let tasks = [task("1"), task("0")];
    let [second, first] = tasks.map(wait);
    assert!(
        first.status.success() && second.status.success(),
        "{}\n{}",
        text(&first.stderr),
        text(&second.stderr)
    );
    assert_eq!(shape(&text(&first.stdout)), EPOCH_SHAPE.repeat(2));
    assert_eq!(text(&second.stdout), "");
    let warning =
        "you are training on custom random dataset, validation accuracy may range from 0.4 to 0.6.";
    assert!(text(&first.stderr).contains(warning));
    assert_eq!(json(&dir.path().join("out/summary.json"))["world_size"], 2);
}

#[test]
fn help_tells_the_documents_flags_and_defaults() {
    help_tells(
        "resnet18",
        &[
            ("--enable-gpu", "[default: true]"),
            ("--lr ", "[default: 0.01;"),
            ("--epochs", "[default: 100;"),
            ("--init-method", "[default: env://]"),
            ("--rank ", "[default: 0]"),
            ("--world-size", "[default: 1]"),
            ("--custom-data", "[default: false]"),
            ("--data-url", "[default: input_dir]"),
            ("--output-dir", "[default: output_dir]"),
        ],
    );
}

/// Trains on `world` ranks by two shards: what it printed on either stream, and its summary.
fn by_shards(dir: &Path, name: &str, more: &[&str], world: &str) -> (String, String, Value) {
    let shards = [
        "--deterministic",
        "shards",
        "--shards",
        "2",
        "--threads",
        "1",
        "--output-dir",
        "out",
        "--overwrite",
        "--nproc-per-node",
        world,
    ];
    let (out, err) = succeed(&[&["train", name], more, &shards].concat(), dir);
    (out, err, json(&dir.join("out/summary.json")))
}

/// The document multiplies the rate by the number of ranks; by shards nothing may depend on that.
#[test]
fn resnet18_trains_alike_on_one_and_two_ranks_by_shards() {
    let dir = tempfile::tempdir().expect("folder");
    let digests = |world: &str| {
        let more = [
            "--custom_data",
            "true",
            "--train-samples",
            "16",
            "--test-samples",
            "8",
            "--epochs",
            "1",
            "--global-batch-size",
            "8",
        ];
        let (_, err, summary) = by_shards(dir.path(), "resnet18", &more, world);
        assert!(err.contains("Adam lr 0.01"), "{err}");
        ["weights_sha256", "optimizer_sha256", "metrics_sha256"]
            .map(|key| summary[key].as_str().expect("a digest").to_owned())
    };
    assert_eq!(digests("1"), digests("2"));
}

/// Augmented, whitened, with label smoothing and Muon: the same bits on any number of ranks.
#[test]
fn resnet9_trains_alike_on_one_and_two_ranks() {
    let dir = tempfile::tempdir().expect("folder");
    let weights = |world: &str| {
        let more = [
            "--data",
            "synthetic:96",
            "--epochs",
            "2",
            "--global-batch-size",
            "32",
            "--cutout",
            "4",
        ];
        let (out, _, summary) = by_shards(dir.path(), "resnet9", &more, world);
        assert_eq!(shape(&out), EPOCH_SHAPE.repeat(2), "{out}");
        (
            summary["weights_sha256"].clone(),
            summary["metrics_sha256"].clone(),
        )
    };
    assert_eq!(weights("1"), weights("2"));
    assert!(dir.path().join("out/resnet9.safetensors").is_file());
}

/// The trainer chooses an exchange of whole gradients, and refuses another one.
#[test]
fn resnet9_needs_whole_gradients() {
    let dir = tempfile::tempdir().expect("folder");
    let args = [
        "train",
        "resnet9",
        "--data",
        "synthetic:64",
        "--batch-size",
        "4",
        "--epochs",
        "1",
        "--nproc-per-node",
        "2",
        "--threads",
        "1",
    ];
    let (code, out, err) = run(
        &[&args[..], &["--exchange", "at-step"]].concat(),
        dir.path(),
    );
    assert_eq!(code, 2, "{out}\n{err}");
    let words = "Muon needs every rank to have whole gradients; leave out --exchange";
    assert!(err.contains(words), "{err}");
    let (_, said) = succeed(&[&args[..], &["--output-dir", "out"]].concat(), dir.path());
    assert!(said.contains("accuracy over 6 views"), "{said}");
    let summary = json(&dir.path().join("out/summary.json"));
    assert!(summary["tta_accuracy"].is_f64(), "{summary}");
}

#[test]
fn mobilenetv2_prints_the_oneflow_documents_lines() {
    let dir = tempfile::tempdir().expect("folder");
    let args = program("mobilenetv2", &["--nproc-per-node", "2"]);
    let (out, err) = succeed(&args, dir.path());
    let epoch = "Epoch #\n-------------------------------\nloss: #.###### [    #/   #]\n";
    assert_eq!(
        shape(&out),
        format!("Using cpu device\n{epoch}{epoch}"),
        "{out}"
    );
    assert!(out.contains("[    0/   48]"), "{out}");
    assert!(err.contains("2,236,682 parameters in 158 tensors"), "{err}");
    assert!(dir.path().join("out/mobilenetv2.safetensors").is_file());
}

#[test]
fn mistakes_are_named_before_any_rank_starts() {
    let dir = tempfile::tempdir().expect("folder");
    std::fs::write(dir.path().join("file.txt"), "x").expect("file");
    for (args, words) in [
        (
            &["train", "resnet18"][..],
            &["no data folder input_dir", "--data synthetic"][..],
        ),
        (
            &["train", "resnet9", "--data", "file.txt"],
            &["file.txt is a file", "archive"],
        ),
        (
            &[
                "train",
                "resnet9",
                "--data",
                "synthetic",
                "--label-smoothing",
                "1",
            ],
            &["--label-smoothing must lie in 0..1"],
        ),
        (
            &[
                "train",
                "resnet9",
                "--data",
                "synthetic",
                "--train-samples",
                "0",
            ],
            &["--train-samples must be at least 1"],
        ),
        (
            &[
                "train",
                "resnet18",
                "--data",
                "synthetic",
                "--world-size",
                "2",
            ],
            &["--world-size 2 requires --init-method tcp://HOST:PORT, the same for all ranks"],
        ),
        (
            &["train", "resnet18", "--data", "synthetic", "--rank", "1"],
            &["--rank 1 is not below --world-size 1"],
        ),
        (
            &[
                "train",
                "resnet18",
                "--data",
                "synthetic",
                "--init-method",
                "tcp://127.0.0.1:9",
                "--rank",
                "0",
            ],
            &["--init-method tcp://127.0.0.1:9 requires --world-size N"],
        ),
        (
            &["train", "resnet18", "--data", "synthetic", "--rank", "0"],
            &["--rank 0 requires --world-size N"],
        ),
        (
            &[
                "train",
                "resnet18",
                "--data",
                "synthetic",
                "--custom_data",
                "perhaps",
            ],
            &["--custom-data", "perhaps"],
        ),
        (
            &[
                "train",
                "resnet18",
                "--recipe",
                "fast",
                "--data",
                "synthetic",
                "--train-samples",
                "128",
                "--epochs",
                "1",
            ],
            &["one cycle of 2 steps", "more --epochs"],
        ),
    ] {
        let (code, out, err) = run(args, dir.path());
        assert_eq!(code, 2, "{args:?}\n{out}\n{err}");
        for word in words {
            assert!(err.contains(word), "{args:?}: no \"{word}\" in\n{err}");
        }
    }
}
