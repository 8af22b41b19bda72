//! The Flyte document's program.

use super::*;

const SMALL: [&str; 8] = [
    "train",
    "mnist",
    "--data",
    "synthetic:600",
    "--epochs",
    "2",
    "--output-dir",
    "out",
];

/// What two ranks of the document's program print, from its own `print` calls
/// (`Using distributed PyTorch` is ours by name).
const RANK_LINES: [&str; 8] = [
    "Using distributed Phalanx with shm backend",
    "Running MNIST training on rank {r}, world size: 2",
    "Use cuda: False",
    "Rank {n}/2 process initialized.",
    "Getting data loaders",
    "Defining model",
    "Training for 2 epochs",
    "Rank {n}/2 process complete.",
];
const EPOCH_SHAPE: &str = "Train Epoch: # [#/# (#%)]\tloss=#.####\n\
                           Train Epoch: # [#/# (#%)]\tloss=#.####\n\
                           Train Epoch: # [#/# (#%)]\tloss=#.####\n\
                           \n\
                           test_loss=#.####\n\
                           accuracy=#.####\n\
                           \n";

#[test]
fn the_document_is_printed_line_for_line() {
    let dir = tempfile::tempdir().expect("folder");
    let args = [
        &SMALL[..],
        &["--document", "--nproc-per-node", "2", "--log-interval", "2"],
    ]
    .concat();
    let (out, _) = succeed(&args, dir.path());
    // Lines of different ranks come in any order, those of one in its own.
    for (rank, number) in [("0", "1"), ("1", "2")] {
        let mut rest = out.as_str();
        for line in RANK_LINES {
            let line = line.replace("{r}", rank).replace("{n}", number);
            // Some are the same for both ranks: they come in order, and twice.
            let at = rest
                .find(&line)
                .unwrap_or_else(|| panic!("no \"{line}\" in its place in\n{out}"));
            rest = &rest[at + line.len()..];
        }
    }
    for line in [
        "Getting data loaders",
        "Defining model",
        "Training for 2 epochs",
        "Use cuda: False",
    ] {
        assert_eq!(
            out.lines().filter(|l| *l == line).count(),
            2,
            "{line}\n{out}"
        );
    }
    let main = [
        "Start MNIST training:",
        "Device count: 2",
        "Running MNIST training on rank 0, world size: 2",
        "Saving accuracies",
        "Rank 1/2 process complete.",
        "Training Complete",
    ];
    let places: Vec<usize> = main
        .iter()
        .map(|line| out.find(line).expect(line))
        .collect();
    assert!(places.is_sorted(), "{places:?}\n{out}");
    // Rank 0 alone speaks while training and testing.
    for (start, count) in [("Train Epoch: ", 6), ("test_loss=", 2), ("accuracy=", 2)] {
        assert_eq!(
            out.lines().filter(|l| l.starts_with(start)).count(),
            count,
            "{start}\n{out}"
        );
    }
    // 300 samples a rank in batches of 64: rank 0's own count, as there.
    assert!(
        out.contains("Train Epoch: 2 [256/600 (80%)]\tloss="),
        "{out}"
    );
}

/// The document's hyperparameters, by their names there.
#[test]
fn help_tells_the_documents_hyperparameters() {
    help_tells(
        "mnist",
        &[
            ("--transport", "[alias: --backend]"),
            ("--momentum", "[alias: --sgd-momentum]"),
            ("--seed", "[default: 1]"),
            ("--log-interval", "[default: 100]"),
            ("--batch-size", "[default: 64]"),
            ("--test-batch-size", "[default: 500]"),
            ("--epochs", "[default: 3]"),
            ("--lr ", "[alias: --learning-rate]"),
        ],
    );
    let dir = tempfile::tempdir().expect("folder");
    let typed = [
        "--sgd_momentum",
        "0.25",
        "--learning_rate",
        "0.125",
        "--backend",
        "thread",
        "--stop_after",
        "1",
    ];
    let (_, err) = succeed(&[&SMALL[..], &typed].concat(), dir.path());
    assert!(err.contains("SGD lr 0.125 momentum 0.25"), "{err}");
}

/// One rank's lines cannot mix with another's: the whole transcript.
#[test]
fn one_rank_prints_the_whole_transcript_in_order() {
    let dir = tempfile::tempdir().expect("folder");
    let args = [&SMALL[..], &["--document", "--log-interval", "4"]].concat();
    let (out, _) = succeed(&args, dir.path());
    let expected = format!(
        "Start MNIST training:\n\
         Device count: #\n\
         Using distributed Phalanx with local backend\n\
         Running MNIST training on rank #, world size: #\n\
         Use cuda: False\n\
         Rank #/# process initialized.\n\
         \n\
         Getting data loaders\n\
         Defining model\n\
         Training for # epochs\n\
         {EPOCH_SHAPE}{EPOCH_SHAPE}\
         Saving model\n\
         Saving accuracies\n\
         Rank #/# process complete.\n\
         \n\
         Training Complete\n"
    );
    assert_eq!(shape(&out), expected);
}

#[test]
fn rank_0_alone_tests_as_the_document_has_it() {
    let dir = tempfile::tempdir().expect("folder");
    let exact = [&SMALL[..], &["--nproc-per-node", "2"]].concat();
    succeed(&exact, dir.path());
    let summary_of = |name: &str| json(&dir.path().join("out").join(name));
    let first = summary_of("summary.json");
    let document = [&exact[..], &["--document", "--overwrite"]].concat();
    succeed(&document, dir.path());
    let second = summary_of("summary.json");
    // The same weights and the same answers; only who computed them differs.
    assert_eq!(first["weights_sha256"], second["weights_sha256"]);
    assert_eq!(first["confusion"], second["confusion"]);
    assert_eq!(first["accuracies"], second["accuracies"]);
    assert_eq!(
        summary_of("mnist_cnn_accuracies.json"),
        second["accuracies"]
    );
}

#[test]
fn the_summary_tells_classes_and_first_predictions() {
    let dir = tempfile::tempdir().expect("folder");
    let args = [
        &SMALL[..],
        &[
            "--nproc-per-node",
            "2",
            "--test-batch-size",
            "40",
            "--log-batches",
            "2",
        ],
    ]
    .concat();
    succeed(&args, dir.path());
    let out = dir.path().join("out");
    let summary = json(&out.join("summary.json"));
    let matrix: Vec<Vec<i64>> =
        serde_json::from_value(summary["confusion"].clone()).expect("matrix");
    assert_eq!(
        matrix.iter().flatten().sum::<i64>(),
        100,
        "every test sample once"
    );
    let right: i64 = (0..10).map(|c| matrix[c][c]).sum();
    near(&summary["accuracy"], right as f64 / 100.0);
    for (class, row) in matrix.iter().enumerate() {
        let share = row[class] as f64 / row.iter().sum::<i64>() as f64;
        near(&summary["class_accuracies"][class], share);
    }
    let text = std::fs::read_to_string(out.join("predictions.jsonl")).expect("predictions");
    let rows: Vec<Value> = text
        .lines()
        .map(|l| serde_json::from_str(l).expect("JSON"))
        .collect();
    // The same images after each epoch.
    let (first, rows) = rows.split_at(64);
    assert!(first.iter().all(|row| row["epoch"] == 1) && rows.iter().all(|row| row["epoch"] == 2));
    for (before, row) in first.iter().zip(rows) {
        for name in ["id", "image", "truth"] {
            assert_eq!(before[name], row[name]);
        }
    }
    let ids: Vec<&str> = rows.iter().filter_map(|r| r["id"].as_str()).collect();
    assert_eq!(ids.len(), 64);
    assert_eq!(
        (ids[0], ids[31], ids[32], ids[63]),
        ("0_0", "0_31", "1_0", "1_31")
    );
    for row in rows {
        let scores: Vec<f64> = serde_json::from_value(row["scores"].clone()).expect("scores");
        assert_eq!(scores.len(), 10);
        let guess = row["guess"].as_u64().expect("guess") as usize;
        assert!(scores.iter().all(|s| *s <= scores[guess]), "{row}");
        assert!(row["truth"].as_u64().expect("truth") < 10);
    }
    assert_eq!(rows[32]["image"], 40, "the first of the second batch");
}
