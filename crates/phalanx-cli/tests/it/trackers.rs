//! `--mlflow`, `--wandb` and `phalanx report --upload`, without a server.

use crate::support::{free_port, run, succeed};

fn words(line: &str) -> Vec<&str> {
    line.split(' ').collect()
}

const TRAIN: &str =
    "train mnist --nproc-per-node 2 --data synthetic:256 --epochs 1 --log-batches 0";

#[test]
fn a_training_without_its_server_ends_well_and_says_how_to_upload_later() {
    let dir = tempfile::tempdir().expect("folder");
    let uri = format!("http://127.0.0.1:{}", free_port());
    let line = format!("{TRAIN} --output-dir a --wandb --mlflow {uri}");
    let (_, err) = succeed(&words(&line), dir.path());
    let later = format!("; later: phalanx report a --upload {uri}\n");
    assert_eq!(err.matches(&later).count(), 1, "{err}");
    let told = err.lines().filter(|line| line.contains("mlflow")).count();
    assert_eq!(told, 2, "a first failure, and what is left: {err}");
    assert!(err.contains("weights "), "{err}");
    let at = |name: &str| dir.path().join(name);
    let runs: Vec<_> = std::fs::read_dir(at("a/wandb"))
        .expect("a folder")
        .flatten()
        .collect();
    assert_eq!(runs.len(), 1, "{runs:?}");
    let (code, out, err) = run(&words(&format!("report a --upload {uri}")), dir.path());
    assert_eq!((code, &*out), (3, "a/report.html\n"), "{err}");
    assert!(
        err.contains("error: mlflow: ") && err.contains(&later[..later.len() - 1]),
        "{err}"
    );
}

#[test]
fn any_run_gets_an_offline_run_of_wandb_whose_files_are_where_the_folder_is() {
    let dir = tempfile::tempdir().expect("folder");
    succeed(&words(&format!("{TRAIN} --output-dir a")), dir.path());
    let at = |name: &str| dir.path().join(name);
    assert!(!at("a/wandb").exists());
    for folder in ["a", "b"] {
        let (out, _) = succeed(&words(&format!("report {folder} --wandb")), dir.path());
        assert_eq!(
            out,
            format!("{folder}/report.html\nwandb sync {folder}/wandb/offline-run-*\n")
        );
        let runs = std::fs::read_dir(at(folder).join("wandb")).expect("a folder");
        let runs: Vec<_> = runs.flatten().map(|run| run.path()).collect();
        assert_eq!(runs.len(), 1, "{runs:?}");
        let files = std::fs::read_dir(&runs[0]).expect("a folder").flatten();
        let mut files = files.map(|file| file.path());
        let file = files.find(|path| path.extension().is_some_and(|end| end == "wandb"));
        let bytes = std::fs::read(file.expect("a file")).expect("read");
        let model = at(folder)
            .canonicalize()
            .expect("a path")
            .join("mnist_cnn.pt");
        let model = model.to_str().expect("UTF-8").as_bytes();
        assert!(bytes.windows(model.len()).any(|part| part == model));
        // Moved, it is written again.
        if folder == "a" {
            std::fs::rename(at("a"), at("b")).expect("moved");
        }
    }
}

#[test]
fn an_address_that_is_none_is_the_users_mistake() {
    let dir = tempfile::tempdir().expect("folder");
    for (uri, why) in [
        (" sqlite:///mlflow.db", "is not http://HOST:PORT"),
        (" http://ada:s3cret@localhost", "MLFLOW_TRACKING_PASSWORD"),
        ("", "set MLFLOW_TRACKING_URI"),
    ] {
        let line = format!("{TRAIN} --output-dir b --mlflow{uri}");
        let (code, _, err) = run(&words(&line), dir.path());
        assert_eq!(code, 2, "{err}");
        assert!(err.contains(why) && !err.contains("s3cret"), "{err}");
        assert!(!dir.path().join("b/metrics.jsonl").exists());
    }
}
