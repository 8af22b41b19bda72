//! `--init`: where weights start, beside PyTorch's own (`fixtures/initial.json`)
//! and from files.

use super::*;

/// As few steps as there can be.
const SHORT: [&str; 12] = [
    "--epochs",
    "1",
    "--data",
    "synthetic:6",
    "--batch-size",
    "3",
    "--test-batch-size",
    "1",
    "--threads",
    "1",
    "--log-batches",
    "0",
];

fn train(dir: &Path, out: &str, program: &str, more: &[&str]) -> (i32, String, String) {
    let mut args = vec!["train", program, "--overwrite", "--output-dir", out];
    args.extend(SHORT);
    args.extend(more);
    run(&args, dir)
}

fn summary(dir: &Path, out: &str, program: &str, more: &[&str]) -> Value {
    let (code, stdout, stderr) = train(dir, out, program, more);
    assert_eq!(code, 0, "{program} {more:?}\n{stdout}\n{stderr}");
    json(&dir.join(out).join("summary.json"))
}

#[test]
fn a_seed_gives_the_weights_that_pytorch_draws_from_it() {
    let dir = tempfile::tempdir().expect("folder");
    let cases: Value =
        serde_json::from_str(include_str!("../../fixtures/initial.json")).expect("JSON");
    let cases = cases.as_array().expect("cases");
    assert!(!cases.is_empty());
    for case in cases {
        let program = case["program"].as_str().expect("program");
        let seed = case["seed"].as_u64().expect("seed").to_string();
        let ours = summary(
            dir.path(),
            "out",
            program,
            &["--seed", &seed, "--init", "torch"],
        );
        assert_eq!(ours["initial_sha256"], case["sha256"], "{program} {seed}");
    }
}

#[test]
fn weights_start_from_a_file_of_either_kind_on_all_ranks() {
    let dir = tempfile::tempdir().expect("folder");
    let first = summary(dir.path(), "first", "mnist", &[]);
    assert_ne!(first["initial_sha256"], first["weights_sha256"]);
    for file in ["first/mnist_cnn.pt", "first/mnist_cnn.safetensors"] {
        let more = ["--init", file, "--nproc-per-node", "2"];
        let next = summary(dir.path(), "next", "mnist", &more);
        assert_eq!(next["initial_sha256"], first["weights_sha256"], "{file}");
    }
}

#[test]
fn weights_that_do_not_fit_are_refused_by_name() {
    let dir = tempfile::tempdir().expect("folder");
    summary(dir.path(), "first", "mnist", &[]);
    let init = ["--init", "first/mnist_cnn.pt", "--nproc-per-node", "2"];
    for (program, more, reason) in [
        ("mnist", &["--init", "absent.pth"][..], "absent.pth"),
        ("resnet18", &init[..2], "first/mnist_cnn.pt"),
        ("resnet18", &init[..], "first/mnist_cnn.pt"),
        ("mnist", &["--dropout", "0.5"], "--dropout"),
        ("mnist", &["--dropout", "0.5,1"], "--dropout"),
        ("mnist", &["--shift", "28"], "--shift"),
    ] {
        let (code, _, err) = train(dir.path(), "next", program, more);
        assert!(code > 0, "{program} {more:?} ended with {code}");
        assert!(err.contains(reason), "{err}");
    }
}
