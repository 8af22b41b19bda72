//! `train gpt --mesh` and `train mobilenetv2 --parallel sbp`: training on global tensors.

use super::gpt::TINY;
use super::*;

const LOGGED: [&str; 4] = ["--log-interval", "1", "--output-dir", "out"];

/// A run of `train gpt` with two or more ranks of one thread.
fn train(more: &[&str], dir: &Path) -> (String, String) {
    succeed(&[&TINY[..], &LOGGED, more].concat(), dir)
}

/// SHA-256 of weights and optimizer state.
fn digests(dir: &Path) -> [String; 2] {
    let summary = json(&dir.join("out/summary.json"));
    ["weights_sha256", "optimizer_sha256"]
        .map(|key| summary[key].as_str().expect("a digest").to_owned())
}

/// The loss of each step.
fn losses(dir: &Path) -> Vec<f64> {
    let text = std::fs::read_to_string(dir.join("out/metrics.jsonl")).expect("metrics");
    let records = text
        .lines()
        .map(|line| serde_json::from_str(line).expect("JSON"));
    records
        .filter_map(|record: Value| record["loss"].as_f64())
        .collect()
}

/// Gradients are added over ranks in the order of DDP if every batch is split evenly, so weights and optimizer state have
/// its bits; with weights that are gathered before their use, too. The loss of a step is that of all ranks here, and rank
/// 0's there, but the lines of the epochs are those of all.
#[test]
fn a_mesh_of_data_has_the_bits_of_ddp() {
    let runs = [
        &["--nproc-per-node", "2"][..],
        &["--nproc-per-node", "2", "--mesh", "data=2"],
        &[
            "--nproc-per-node",
            "2",
            "--mesh",
            "data=2",
            "--fully-sharded",
        ],
    ]
    .map(|more| {
        let dir = tempfile::tempdir().expect("folder");
        let (out, _) = train(more, dir.path());
        assert!(dir.path().join("out/gpt.safetensors").is_file());
        (out, digests(dir.path()))
    });
    assert_eq!(runs[0], runs[1]);
    assert_eq!(runs[0], runs[2]);
}

#[test]
fn any_mesh_has_the_losses_of_one_rank() {
    // The last batch of 67 leaves a rank without a sample.
    for batch in ["32", "67"] {
        let more = |ranks, mesh| {
            [
                "--nproc-per-node",
                ranks,
                "--global-batch-size",
                batch,
                "--mesh",
                mesh,
            ]
        };
        let runs = [
            more("1", "data=1").to_vec(),
            more("2", "tensor=2").to_vec(),
            more("4", "data=2,tensor=2").to_vec(),
            [&more("4", "tensor=2")[..], &["--fully-sharded"]].concat(),
        ]
        .map(|args| {
            let dir = tempfile::tempdir().expect("folder");
            let tiny = TINY.len() - 8;
            let base = [
                &TINY[..tiny],
                &["--epochs", "1", "--threads", "1", "--sample", "0"],
            ];
            succeed(&[&base.concat()[..], &LOGGED, &args].concat(), dir.path());
            losses(dir.path())
        });
        for run in &runs {
            assert_eq!(run.len(), runs[0].len());
            for (loss, expected) in run.iter().zip(&runs[0]) {
                let far = (loss - expected).abs() / expected;
                assert!(far < 1e-5, "{loss} instead of {expected}");
            }
        }
    }
}

#[test]
fn a_checkpoint_of_a_mesh_goes_on_with_another_mesh_or_ddp() {
    let (whole, parts) = (tempfile::tempdir(), tempfile::tempdir());
    let (whole, parts) = (whole.expect("folder"), parts.expect("folder"));
    let ranks = ["--nproc-per-node", "2"];
    train(&ranks, whole.path());
    let more = |more: &[&'static str]| [&ranks[..], more].concat();
    train(
        &more(&["--mesh", "data=2", "--fully-sharded", "--stop-after", "7"]),
        parts.path(),
    );
    let resumed = ["--resume", "auto", "--mesh", "data=2", "--stop-after", "7"];
    let (_, err) = train(&more(&resumed), parts.path());
    assert!(err.contains("--fully-sharded true -> false"), "{err}");
    train(&more(&["--resume", "auto"]), parts.path());
    assert_eq!(digests(whole.path()), digests(parts.path()));
}

#[test]
fn explain_tells_layouts_and_conversions() {
    let dir = tempfile::tempdir().expect("folder");
    let args = ["--nproc-per-node", "2", "--mesh", "tensor=2", "--explain"];
    let (_, err) = train(&args, dir.path());
    for words in [
        "mesh     data=1,tensor=2: batches over data, attention heads, MLPs and vocabulary over tensor\n",
        "  1 x transformer.h.*.attn.q.weight [16, 16] (B, S(0)): 128 of 256 elements on rank 0\n",
        " x add, operand 1: [32, 16, 16] (S(0), P) to ",
        " by all-gather over tensor; ",
        "\n  rank 0 sends ",
    ] {
        assert!(err.contains(words), "{words} in {err}");
    }
    assert_eq!(
        err.matches("explain  conversions of the first step")
            .count(),
        1
    );
}

#[test]
fn what_does_not_go_with_a_mesh_is_a_usage_error() {
    let dir = tempfile::tempdir().expect("folder");
    let of_gpt = ["train", "gpt", "--nproc-per-node", "2", "--mesh"];
    let of_net = [
        "train",
        "mobilenetv2",
        "--data",
        "synthetic",
        "--parallel",
        "sbp",
    ];
    for (args, more, words) in [
        (
            &of_gpt[..],
            &["data=2,tensor=2"][..],
            "--mesh data=2,tensor=2 needs 4 ranks; this run has 2 ranks",
        ),
        (
            &of_gpt,
            &["model=2"],
            "\"model\" is not a dimension; write data=N, tensor=N, or data=N,tensor=N",
        ),
        (
            &of_gpt,
            &["tensor=2", "--heads", "1"],
            "--mesh tensor=2 leaves ranks without an attention head",
        ),
        (
            &of_gpt,
            &["data=2", "--exchange", "at-step"],
            "--exchange at-step is for DistributedDataParallel and does not go with --mesh",
        ),
        (
            &of_gpt,
            &["data=2", "--gradient-type", "bf16"],
            "--gradient-type bf16 is for",
        ),
        (
            &of_gpt,
            &["data=2", "--deterministic", "shards"],
            "--deterministic shards is for",
        ),
        (
            &of_gpt,
            &["data=2", "--accumulate", "2"],
            "--accumulate 2 is for",
        ),
        (&["train", "gpt"], &["--fully-sharded"], "--mesh"),
        (
            &of_net,
            &["--watch", "1"],
            "--watch is for DistributedDataParallel and does not go with --parallel sbp",
        ),
        (
            &of_net,
            &["--exact-validation", "false"],
            "--exact-validation false does not go with --parallel sbp",
        ),
    ] {
        let (code, _, text) = run(&[args, more].concat(), dir.path());
        assert_eq!(code, 2, "{text}");
        assert!(text.contains(words), "{text}");
    }
}

/// Batch normalizations are joined over the ranks, as DDP joins them over two shards: the losses are equal up to the
/// order of additions. (That the bits are those of DDP with joined batch normalizations is a test of phalanx-global.)
#[test]
fn mobilenetv2_by_sbp_prints_the_oneflow_documents_lines() {
    let runs = [
        &["--parallel", "sbp", "--batch-size", "4"][..],
        &[
            "--deterministic",
            "shards",
            "--shards",
            "2",
            "--global-batch-size",
            "8",
        ],
    ]
    .map(|more| {
        let dir = tempfile::tempdir().expect("folder");
        let args = [
            "train",
            "mobilenetv2",
            "--data",
            "synthetic",
            "--synthetic-samples",
            "48",
            "--epochs",
            "1",
            "--log-interval",
            "1",
            "--threads",
            "1",
            "--nproc-per-node",
            "2",
            "--output-dir",
            "out",
        ];
        let (out, _) = succeed(&[&args[..], more].concat(), dir.path());
        assert!(dir.path().join("out/mobilenetv2.safetensors").is_file());
        (out, losses(dir.path()))
    });
    let expected = "Using cpu device\nEpoch #\n-------------------------------\n\
                    loss: #.###### [    #/   #]\nloss: #.###### [   #/   #]\n";
    assert_eq!(shape(&runs[0].0), expected, "{}", runs[0].0);
    assert_eq!(runs[0].1.len(), 6);
    for (sbp, ddp) in runs[0].1.iter().zip(&runs[1].1) {
        assert!((sbp - ddp).abs() / ddp < 1e-4, "{sbp} instead of {ddp}");
    }
}
