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

/// A run that is resumed after its last step loads the checkpoint, and writes weights and digests again.
#[test]
fn a_checkpoint_has_the_same_bits_on_any_mesh_and_with_ddp() {
    let dir = tempfile::tempdir().expect("folder");
    let go = |out: &str, more: &[&str]| {
        let to = ["--output-dir", out];
        succeed(&[&TINY[..], &to, more].concat(), dir.path());
        let folder = dir.path().join(out);
        let summary = json(&folder.join("summary.json"));
        let files = ["gpt.safetensors", "gpt.pt"];
        let files = files.map(|name| std::fs::read(folder.join(name)).expect(name));
        (summary["optimizer_sha256"].clone(), files)
    };
    let saves = ["--save-every", "100", "--mesh", "data=2", "--fully-sharded"];
    let whole = go("out", &[&["--nproc-per-node", "2"], &saves[..]].concat());
    let checkpoints = std::fs::read_dir(dir.path().join("out/checkpoints")).expect("folder");
    let names = checkpoints.map(|entry| entry.expect("entry").path());
    let manifests = names.filter(|path| path.extension().is_some_and(|e| e == "json"));
    let newest = manifests.max().expect("a manifest").display().to_string();
    for (out, more) in [
        ("tensor", &["2", "--mesh", "tensor=2"][..]),
        (
            "both",
            &["4", "--mesh", "data=2,tensor=2", "--fully-sharded"],
        ),
        ("three", &["3", "--mesh", "data=3", "--fully-sharded"]),
        ("one", &["1", "--mesh", "data=1"]),
        ("at-step", &["3", "--exchange", "at-step"]),
        ("all-reduce", &["2", "--exchange", "all-reduce"]),
    ] {
        let resumed = ["--resume", &newest, "--nproc-per-node"];
        assert!(go(out, &[&resumed[..], more].concat()) == whole, "{out}");
    }
}

/// Training continues from the last finite checkpoint, says so, and has the bits of one that was never spoiled.
#[test]
fn weights_that_are_not_finite_are_told_of_and_passed_over() {
    for mesh in [&["--mesh", "data=2", "--fully-sharded"][..], &[]] {
        let (whole, parts) = (tempfile::tempdir(), tempfile::tempdir());
        let (whole, parts) = (whole.expect("folder"), parts.expect("folder"));
        let more = |more: &[&'static str]| [&["--nproc-per-node", "2"], mesh, more].concat();
        train(&more(&[]), whole.path());
        train(&more(&["--stop-after", "3"]), parts.path());
        let spoil = [
            "--resume",
            "auto",
            "--save-every",
            "1",
            "--keep",
            "1",
            "--lr",
            "1e39",
        ];
        let args = [&TINY[..], &LOGGED, &more(&spoil)].concat();
        let (code, _, err) = run(&args, parts.path());
        assert_eq!(code, 1, "{err}");
        let file = "out/checkpoints/step-000000004.json";
        let warning = format!("warning: {file} has infinite or NaN weights (first in ");
        assert!(
            err.contains(&warning) && err.contains("the loss became"),
            "{err}"
        );
        let (_, err) = train(&more(&["--resume", "auto"]), parts.path());
        let passed = format!("warning: passed over a checkpoint: {file} has infinite or NaN");
        assert!(err.contains(&passed), "{err}");
        assert!(err.contains("resumed  after 3 of "), "{err}");
        assert_eq!(digests(whole.path()), digests(parts.path()));
        // By name, as it is asked for.
        let aside = "out/checkpoints/aside-step-000000004.json";
        let args = [
            &TINY[..],
            &LOGGED[..2],
            &["--output-dir", "other"],
            &more(&["--resume", aside]),
        ];
        let (code, _, err) = run(&args.concat(), parts.path());
        assert_eq!(code, 1, "{err}");
        let warning = format!("warning: the checkpoint {aside} has infinite or NaN weights");
        assert!(
            err.contains(&warning) && err.contains("resumed  after 4 of "),
            "{err}"
        );
        let (_, err) = succeed(&["export", aside, "--to", "a.pth"], parts.path());
        assert!(
            err.contains("warning: the weights have infinite or NaN values (first in "),
            "{err}"
        );
    }
}

#[test]
fn explain_tells_layouts_and_conversions() {
    let dir = tempfile::tempdir().expect("folder");
    let args = ["--nproc-per-node", "2", "--mesh", "tensor=2", "--explain"];
    let (_, err) = train(&args, dir.path());
    for words in [
        "mesh     data=1,tensor=2: attention heads, MLPs and vocabulary over tensor\n",
        "  1 x transformer.h.*.attn.q.weight [16, 16] (B, S(0)): 128 of 256 elements on rank 0\n",
        "\n    1 x embedding, the result: [32, 16, 16] (S(0), P) to (S(0), B) by all-reduce (sum) over tensor; ",
        "\n    2 x linear, the result: [32, 16, 16] (S(0), P) to (S(0), B) by all-reduce (sum) over tensor; ",
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
            "--exchange at-step does not go with --mesh: a mesh exchanges gradients as its parameters are laid out",
        ),
        (
            &of_gpt,
            &["data=2", "--gradient-type", "bf16"],
            "--gradient-type bf16 does not go with --mesh",
        ),
        (
            &of_gpt,
            &["data=2", "--deterministic", "shards"],
            "--deterministic shards does not go with --mesh",
        ),
        (
            &of_gpt,
            &["data=2", "--fully-sharded", "--watch", "1"],
            "--watch does not go with --mesh: it shows the parameters of rank 0",
        ),
        (&["train", "gpt"], &["--fully-sharded"], "--mesh"),
        (
            &of_net,
            &["--document"],
            "--document does not go with --parallel sbp",
        ),
    ] {
        let (code, _, text) = run(&[args, more].concat(), dir.path());
        assert_eq!(code, 2, "{text}");
        assert!(text.contains(words), "{text}");
    }
}

/// Batch normalizations are joined over the ranks, so that two ranks have the losses of one rank with the same batch. The
/// weights stay as they are, because such small batches make percents of a last bit in one step. (That trained weights
/// have the bits of DDP with joined batch normalizations is a test of phalanx-global.)
#[test]
fn mobilenetv2_by_sbp_prints_the_oneflow_documents_lines() {
    let runs = [
        &[
            "--parallel",
            "sbp",
            "--batch-size",
            "4",
            "--nproc-per-node",
            "2",
        ][..],
        &["--batch-size", "8"],
    ]
    .map(|more| {
        let dir = tempfile::tempdir().expect("folder");
        let args = [
            "train",
            "mobilenetv2",
            "--data",
            "synthetic:48",
            "--epochs",
            "1",
            "--log-interval",
            "1",
            "--lr",
            "0",
            "--threads",
            "1",
            "--output-dir",
            "out",
            "--profile",
            "profile",
        ];
        let (out, _) = succeed(&[&args[..], more].concat(), dir.path());
        assert!(dir.path().join("out/mobilenetv2.safetensors").is_file());
        // On a mesh, only operations have times.
        let profile = json(&dir.path().join("profile.0.json"));
        let events = profile["traceEvents"].as_array().expect("events");
        let has_lane = |lane: u64| events.iter().any(|event| event["tid"] == lane);
        assert!(has_lane(2));
        assert_eq!(has_lane(0), !more.contains(&"sbp"));
        (out, losses(dir.path()))
    });
    let expected = "Using cpu device\nEpoch #\n-------------------------------\n\
                    loss: #.###### [    #/   #]\nloss: #.###### [   #/   #]\n";
    assert_eq!(shape(&runs[0].0), expected, "{}", runs[0].0);
    assert_eq!(runs[0].1.len(), 6);
    for (sbp, ddp) in runs[0].1.iter().zip(&runs[1].1) {
        assert!((sbp - ddp).abs() / ddp < 1e-5, "{sbp} instead of {ddp}");
    }
}
