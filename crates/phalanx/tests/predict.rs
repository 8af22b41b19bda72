//! `phalanx predict` and `phalanx export` on what a training left.

use std::path::Path;
use std::process::Command;

use serde_json::Value;

fn phalanx(dir: &Path, args: &[&str]) -> (i32, String, String) {
    let output = Command::new(env!("CARGO_BIN_EXE_phalanx"))
        .args(args)
        .current_dir(dir)
        .env_remove("RANK")
        .env_remove("WORLD_SIZE")
        .output()
        .expect("phalanx runs");
    let text = |bytes: Vec<u8>| String::from_utf8_lossy(&bytes).into_owned();
    (
        output.status.code().unwrap_or(-1),
        text(output.stdout),
        text(output.stderr),
    )
}

fn succeed(dir: &Path, args: &[&str]) -> (String, String) {
    let (code, out, err) = phalanx(dir, args);
    assert_eq!(code, 0, "{args:?}\n{out}\n{err}");
    (out, err)
}

fn refused(dir: &Path, args: &[&str], reason: &str) {
    let (code, _, err) = phalanx(dir, args);
    assert_ne!(code, 0, "{args:?}");
    assert!(err.contains(reason), "{err}");
}

/// A short training in `dir/run`.
fn trained() -> tempfile::TempDir {
    let dir = tempfile::tempdir().expect("a temporary folder");
    let args = "train mnist --synthetic-samples 1200 --epochs 1 --threads 1 --output-dir run --save-every 10";
    succeed(dir.path(), &args.split(' ').collect::<Vec<_>>());
    dir
}

fn rows(text: &str) -> Vec<Value> {
    text.lines()
        .map(|line| serde_json::from_str(line).expect("JSON"))
        .collect()
}

#[test]
fn every_form_of_a_checkpoint_predicts_the_same() {
    let dir = trained();
    let dir = dir.path();
    let predict = |checkpoint: &str| {
        let args = [
            "predict",
            checkpoint,
            "--data",
            "synthetic",
            "--limit",
            "300",
        ];
        succeed(dir, &args)
    };
    let (expected, said) = predict("run/mnist_cnn.safetensors");
    assert!(said.contains("300 images with mnist_cnn, "), "{said}");
    let all = rows(&expected);
    assert_eq!(all.len(), 300);
    let right = all
        .iter()
        .filter(|row| row["guess"] == row["truth"])
        .count();
    assert!(said.contains(&format!("{right} of 300 right")), "{said}");
    for row in &all {
        let scores: Vec<f64> = row["scores"]
            .as_array()
            .expect("scores")
            .iter()
            .filter_map(Value::as_f64)
            .collect();
        assert_eq!(scores.len(), 10);
        // Log-probabilities.
        let sum: f64 = scores.iter().map(|s| s.exp()).sum();
        assert!((sum - 1.0).abs() < 1e-4, "{sum}");
    }
    // The checkpoint after the last step has the same weights.
    let manifest = "run/checkpoints/step-000000019.json";
    assert_eq!(predict("run/mnist_cnn.pt").0, expected);
    assert_eq!(predict(manifest).0, expected);
    for to in ["a.pth", "b.safetensors", "c.pt"] {
        for from in ["run/mnist_cnn.pt", "run/mnist_cnn.safetensors", manifest] {
            let (_, said) = succeed(dir, &["export", from, "--to", to]);
            assert!(said.contains("8 tensors"), "{said}");
            assert_eq!(predict(to).0, expected, "{from} {to}");
        }
    }
    // What safetensors said about itself is not lost on the way.
    succeed(
        dir,
        &[
            "export",
            "run/mnist_cnn.safetensors",
            "--to",
            "d.safetensors",
        ],
    );
    let read = |name: &str| std::fs::read(dir.join(name)).expect("file");
    assert_eq!(read("d.safetensors"), read("run/mnist_cnn.safetensors"));
    let args = "predict a.pth --data synthetic --limit 300 --batch-size 7 --output p.jsonl";
    let (out, _) = succeed(dir, &args.split(' ').collect::<Vec<_>>());
    assert!(out.is_empty(), "{out}");
    assert_eq!(
        rows(&String::from_utf8(read("p.jsonl")).expect("text")).len(),
        300
    );
}

#[test]
fn images_are_read_and_wrong_ones_named() {
    let dir = trained();
    let dir = dir.path();
    let digit = |name: &str, width: usize| {
        let mut bytes = format!("P5\n{width} 28\n255\n").into_bytes();
        // A thick vertical line.
        bytes.extend((0..28 * width).map(|i| {
            if (12..16).contains(&(i % width)) {
                255
            } else {
                0
            }
        }));
        std::fs::write(dir.join(name), bytes).expect("written");
    };
    digit("one.pgm", 28);
    digit("wide.pgm", 30);
    let weights = "run/mnist_cnn.pt";
    let (out, said) = succeed(dir, &["predict", weights, "--data", "one.pgm", "one.pgm"]);
    let all = rows(&out);
    assert_eq!(all.len(), 2);
    assert_eq!(all[0], all[1]);
    assert_eq!(all[0]["image"], "one.pgm");
    assert!(all[0]["truth"].is_null());
    assert_eq!(said.trim(), "2 images with mnist_cnn");
    refused(
        dir,
        &["predict", weights, "--data", "wide.pgm"],
        "wide.pgm: it has 30 x 28 pixels",
    );
    refused(
        dir,
        &["predict", weights, "--data", "none.png"],
        "no image none.png",
    );
    refused(
        dir,
        &["predict", weights, "--data", weights],
        "neither PNG nor binary",
    );
    refused(
        dir,
        &["predict", "none.pth", "--data", "one.pgm"],
        "no checkpoint none.pth",
    );
    refused(
        dir,
        &["predict", "one.pgm", "--data", "one.pgm"],
        "no complete safetensors file",
    );
    refused(
        dir,
        &["predict", weights, "--data", "one.pgm", "--model", "x"],
        "mnist_cnn",
    );
    refused(
        dir,
        &["export", weights, "--to", "x.onnx"],
        "must end in .pth, .pt or .safetensors",
    );
    refused(
        dir,
        &["export", "run/summary.json", "--to", "x.pth"],
        "no manifest of a checkpoint",
    );
}
