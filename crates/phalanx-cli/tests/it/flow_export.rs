//! The Flyte document's program as a workflow, and workflows exported for other engines. The scripts of exports run
//! here; `tools/ci/flow_export.sh` runs them on those engines.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use serde_json::Value;

use crate::support::{ended, phalanx, run, succeed};

fn recipe() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../recipes/flyte_mnist/flow.toml")
}

/// Runs the document's program on few synthetic digits, with little memory as the document does where `SANDBOX` is
/// set; outputs and messages.
fn train(flow: &Path, dir: &Path) -> (String, String) {
    let flow = flow.to_str().expect("UTF-8");
    let set = [
        "data=synthetic:720",
        "wandb=true",
        "hyperparameters.epochs=2",
        // The group's name may be left out.
        "batch_size=60",
        "learning_rate=0.05",
    ];
    let inputs = set.iter().flat_map(|input| ["--input", input]);
    let args: Vec<&str> = ["flow", "run", flow].into_iter().chain(inputs).collect();
    let child = phalanx(&args, dir).env("SANDBOX", "1").spawn();
    let (code, out, err) = ended(child.expect("it starts"));
    assert_eq!(code, 0, "{out}{err}");
    (out, err)
}

fn output<'a>(out: &'a str, name: &str) -> &'a str {
    let mut lines = out.lines();
    let found = lines.find_map(|line| line.strip_prefix(name)?.strip_prefix(" = "));
    found.unwrap_or_else(|| panic!("no {name} in {out}"))
}

#[test]
fn the_flyte_documents_workflow_trains_once() {
    let dir = tempfile::tempdir().expect("folder");
    let dir = dir.path();
    let (out, err) = train(&recipe(), dir);
    assert!(err.contains("Running pytorch_mnist_task"), "{err}");
    let run = Path::new(output(&out, "run"));
    let summary = fs::read_to_string(run.join("summary.json")).expect("summary");
    let summary: Value = serde_json::from_str(&summary).expect("JSON");
    let accuracies: Vec<f64> =
        serde_json::from_str(output(&out, "epoch_accuracies")).expect("a list");
    assert_eq!(accuracies.len(), 2, "one an epoch");
    assert_eq!(
        summary["accuracy"].as_f64(),
        accuracies.last().copied(),
        "{summary}"
    );
    let trained = fs::read_to_string(run.join("run.json")).expect("run.json");
    let trained: Value = serde_json::from_str(&trained).expect("JSON");
    assert_eq!(trained["settings"]["--batch-size"], "60");
    let wandb = fs::read_dir(run.join("wandb")).expect("wandb's folder");
    let has_record = |entry: fs::DirEntry| {
        let name = entry
            .file_name()
            .to_string_lossy()
            .replace("offline-run-", "");
        let id = name.rsplit('-').next().unwrap_or_default().to_owned();
        entry.path().join(format!("run-{id}.wandb")).is_file()
    };
    assert!(wandb.flatten().any(has_record));
    // The file for torch.load is a ZIP archive.
    let model = fs::read(output(&out, "model_state")).expect("the model");
    assert!(model.starts_with(b"PK\x03\x04"));
    // After each epoch one test batch: 32 of its images.
    let rows = fs::read_to_string(run.join("predictions.jsonl")).expect("predictions");
    assert_eq!(rows.lines().count(), 2 * 32);
    let (log, _) = succeed(&["flow", "logs", "last", "pytorch_mnist_task"], dir);
    for line in [
        "Device count: 2",
        "Rank 2/2 process complete.",
        "Training Complete",
    ] {
        assert!(log.contains(line), "{line}\n{log}");
    }

    let (again, err) = train(&recipe(), dir);
    assert!(err.contains("Cached pytorch_mnist_task"), "{err}");
    assert_eq!(again, out);
}

const FLOW: &str = r#"
name = "two"
[inputs]
text = "it's"
data = { type = "file", default = "data" }
[tasks.a]
command = ["sh", "-c", 'cat "$1" >"$3"; echo "$2" >>"$3"', "sh", "{inputs.data}", "{inputs.text}", "{outputs.all}"]
inputs = { data = "{inputs.data}", text = "{inputs.text}" }
outputs = { all = "file" }
cache = "1"
[tasks.b]
shell = '''cp "$INPUT_ALL" "$OUTPUT_ALL"'''
inputs = { all = "{a.all}" }
outputs = { all = "file" }
[outputs]
all = "{b.all}"
"#;

#[test]
fn exported_scripts_give_the_outputs_of_the_local_run() {
    let dir = tempfile::tempdir().expect("folder");
    let dir = dir.path();
    fs::create_dir_all(dir.join("w/here")).expect("folders");
    fs::write(dir.join("w/flow.toml"), FLOW).expect("flow.toml");
    fs::write(dir.join("w/data"), "default\n").expect("data");
    fs::write(dir.join("w/here/data"), "given\n").expect("data");
    let here = dir.join("w/here");
    for input in [
        &[][..],
        &["--input", "data=data", "--input", "text=$HOME '\"\n"],
    ] {
        let args = |command: &[&'static str]| [&["flow"], command, &[".."][..], input].concat();
        let (out, _) = succeed(&args(&["run"]), &here);
        let want = fs::read_to_string(output(&out, "all")).expect("the output");
        let (said, notes) = succeed(
            &args(&["export", "--to", "slurm", "--output", "out"]),
            &here,
        );
        assert_eq!(said.lines().next(), Some("5 files in out"), "{said}");
        assert!(
            notes.contains("note: slurm: results are not cached (a)\n"),
            "{notes}"
        );
        for task in ["a", "b"] {
            let script = here.join(format!("out/tasks/{task}.sh"));
            let mut command = Command::new("sh");
            command
                .arg(script)
                .env("FLOW_RESULTS", here.join("results"));
            let child = command
                .env("FLOW_FOLDER", "")
                .stdout(Stdio::piped())
                .stderr(Stdio::piped())
                .spawn();
            assert_eq!(ended(child.expect("sh")).0, 0);
        }
        let got = fs::read_to_string(here.join("results/b/all")).expect("the output");
        assert_eq!(got, want);
    }
    let (code, _, err) = run(&["flow", "export", "--to", "kubernetes", ".."], &here);
    assert_eq!(code, 2, "{err}");
    assert!(
        err.starts_with("error: task \"a\" has no container image\n"),
        "{err}"
    );
    let (said, _) = succeed(
        &["flow", "export", "--to", "kubernetes", "--image", "i", ".."],
        &here,
    );
    assert!(
        said.starts_with("6 files in two-kubernetes\nnext: "),
        "{said}"
    );
    let (said, _) = succeed(&["flow", "export", "--to", "flyte", ".."], &here);
    assert!(said.starts_with("1 file in two-flyte\nnext: "), "{said}");
}
