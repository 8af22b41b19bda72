//! Sums, counts, and the files they go to.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use phalanx_base::ErrorKind;
use phalanx_base::files::{Dir, atomic_write, atomic_write_with};
use phalanx_data::metrics::{
    Confusion, Mean, MetricsLog, argmax, quantile, roc_auc, top_k, write_summary,
};
use serde_json::{Value, json};

#[test]
fn means_weigh_by_count() {
    let mut mean = Mean::new();
    assert_eq!(mean.mean(), None);
    mean.add(1.0, 64);
    mean.add(4.0, 32);
    assert_eq!(mean.mean(), Some(2.0));
    // A rank without samples in the last batch reports the mean of nothing.
    mean.add(f64::NAN, 0);
    assert_eq!(mean.mean(), Some(2.0));
    mean.add_sum(4.0, 4);
    assert_eq!((mean.mean(), mean.count()), (Some(1.96), 100.0));
}

#[test]
fn means_of_ranks_add_up() {
    let (mut a, mut b, mut both) = (Mean::new(), Mean::new(), Mean::new());
    a.add(1.0, 3);
    b.add(5.0, 1);
    both.add(1.0, 3);
    both.add(5.0, 1);
    let [p, q] = [a.parts(), b.parts()];
    let sum = Mean::from_parts([p[0] + q[0], p[1] + q[1]]);
    assert_eq!(sum, both);
    assert_eq!(sum.mean(), Some(2.0));
}

#[test]
fn the_first_highest_score_wins() {
    assert_eq!(argmax(&[1.0, 3.0, 3.0, 2.0]), Some(1));
    assert_eq!(argmax(&[-1.0]), Some(0));
    assert_eq!(argmax(&[]), None);
    assert_eq!(argmax(&[0.0, f32::NAN, 1.0]), Some(2));
}

#[test]
fn right_answers_are_counted() {
    let scores = [0.1, 0.9, 0.8, 0.2, 0.4, 0.6];
    assert_eq!(top_k(&scores, 2, &[1, 0, 0], 1).unwrap(), 2);
    assert_eq!(top_k(&[], 2, &[], 1).unwrap(), 0);
    for (classes, labels) in [(2, &[1, 0][..]), (0, &[1, 0, 0]), (4, &[1, 0, 0])] {
        let error = top_k(&scores, classes, labels, 1).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Usage);
    }
}

#[test]
fn confusion_tells_who_is_taken_for_whom() {
    let mut confusion = Confusion::new(3);
    assert_eq!(confusion.accuracy(), None);
    confusion.add(0, 0).unwrap();
    confusion.add(0, 2).unwrap();
    confusion
        .add_scores(&[0.0, 9.0, 1.0, 7.0, 1.0, 2.0], &[1, 1])
        .unwrap();
    assert_eq!(confusion.counts(), [1, 0, 1, 1, 1, 0, 0, 0, 0]);
    assert_eq!(confusion.accuracy(), Some(0.5));
    assert_eq!(confusion.recall(0), Some(0.5));
    assert_eq!(confusion.recall(2), None);
    assert_eq!(confusion.recall(3), None);
    assert_eq!(confusion.total(), 4);
    assert!(confusion.add(3, 0).is_err());
    assert!(confusion.add(0, 3).is_err());
    // Counts of another rank, as an all-reduce adds them.
    confusion.counts_mut()[8] += 4;
    assert_eq!(confusion.accuracy(), Some(0.75));
}

const METRICS: &str = "metrics.jsonl";

fn open(dir: &tempfile::TempDir) -> Dir {
    Dir::open(dir.path()).unwrap()
}

fn lines(path: &Path) -> Vec<Value> {
    let text = fs::read_to_string(path).unwrap();
    assert!(text.is_empty() || text.ends_with('\n'));
    text.lines()
        .map(|l| serde_json::from_str(l).unwrap())
        .collect()
}

#[test]
fn every_line_is_in_the_file_at_once() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("metrics.jsonl");
    let mut log = MetricsLog::create(&open(&dir), METRICS, 1).unwrap();
    for step in 0..3 {
        log.step(step, &json!({"step": step, "loss": 0.5})).unwrap();
        assert_eq!(lines(&path).len(), step as usize + 1);
    }
    log.event(&json!({"epoch": 1, "accuracy": 0.98})).unwrap();
    assert_eq!(lines(&path)[1], json!({"step": 1, "loss": 0.5}));
    assert_eq!(lines(&path)[3]["accuracy"], 0.98);
    log.step(3, &json!({"loss": f64::NAN})).unwrap();
    assert_eq!(lines(&path)[4], json!({"loss": null}));
}

#[test]
fn some_steps_may_be_left_out_events_never() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("metrics.jsonl");
    let mut log = MetricsLog::create(&open(&dir), METRICS, 50).unwrap();
    for step in 0..120 {
        log.step(step, &json!({ "step": step })).unwrap();
    }
    log.event(&json!({ "done": true })).unwrap();
    let steps: Vec<_> = lines(&path).iter().map(|l| l["step"].as_u64()).collect();
    assert_eq!(steps, [Some(0), Some(50), Some(100), None]);
    assert!(MetricsLog::create(&open(&dir), METRICS, 0).is_err());
}

#[test]
fn steps_rise() {
    let mut log = MetricsLog::disabled();
    log.step(5, &json!({})).unwrap();
    for step in [5, 4] {
        let error = log.step(step, &json!({})).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Internal);
    }
    log.step(6, &json!({})).unwrap();
}

#[test]
fn a_full_disk_is_named() {
    let full = Path::new("/dev/full");
    if !full.exists() {
        eprintln!("SKIPPED: no /dev/full");
        return;
    }
    let error = MetricsLog::append(full).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::DiskFull);
    let text = error.to_string();
    assert!(
        text.contains("/dev/full") && text.contains("the disk is full"),
        "{text}"
    );
    assert!(std::error::Error::source(&error).is_some());
}

#[test]
fn a_folder_that_is_not_there_is_named() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("absent");
    let error = Dir::open(&path).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::System);
    assert!(error.to_string().contains("/absent"), "{error}");
    Dir::create(&path).unwrap();
    MetricsLog::create(&Dir::create(&path).unwrap(), METRICS, 1).unwrap();
}

#[test]
fn summaries_replace_older_ones_whole() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("summary.json");
    write_summary(&path, &json!({"accuracy": 0.1, "long": "x".repeat(5000)})).unwrap();
    write_summary(&path, &json!({"accuracy": 0.9})).unwrap();
    let text = fs::read_to_string(&path).unwrap();
    assert_eq!(text, "{\n  \"accuracy\": 0.9\n}\n");
    assert_eq!(names(dir.path()), ["summary.json"]);
}

fn names(folder: &Path) -> Vec<String> {
    let mut names: Vec<String> = fs::read_dir(folder)
        .unwrap()
        .map(|e| e.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    names
}

#[test]
fn a_failed_write_leaves_the_old_file_and_no_other() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("weights");
    atomic_write(&path, b"old").unwrap();
    let error = atomic_write_with(&path, |out| {
        out.write_all(&[0; 3 << 20])?;
        Err(std::io::Error::from(std::io::ErrorKind::StorageFull))
    })
    .unwrap_err();
    assert_eq!(error.kind(), ErrorKind::DiskFull);
    assert!(error.to_string().contains("weights"), "{error}");
    assert_eq!(fs::read(&path).unwrap(), b"old");
    assert_eq!(names(dir.path()), ["weights"]);
}

#[test]
fn written_files_are_readable_by_others_as_the_umask_allows() {
    let dir = tempfile::tempdir().unwrap();
    let (ours, plain) = (dir.path().join("ours"), dir.path().join("plain"));
    atomic_write(&ours, b"x").unwrap();
    fs::write(&plain, b"x").unwrap();
    let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode();
    assert_eq!(mode(&ours), mode(&plain));
}

#[test]
fn a_path_without_a_file_name_is_refused() {
    let error = atomic_write(Path::new("/"), b"x").unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Usage);
}

#[test]
fn a_log_goes_on_where_it_is_told_to() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("metrics.jsonl");
    // A file that is not there is an empty one.
    let mut log = MetricsLog::resume(&open(&dir), METRICS, 1, |_| false).unwrap();
    for step in 0..4 {
        log.event(&json!({"step": step})).unwrap();
    }
    drop(log);
    // A kill cut the last line off.
    let mut bytes = fs::read(&path).unwrap();
    bytes.extend_from_slice(b"{\"step\": 0, \"lo");
    fs::write(&path, bytes).unwrap();
    let mut log =
        MetricsLog::resume(&open(&dir), METRICS, 1, |r| r["step"].as_u64() < Some(2)).unwrap();
    log.event(&json!({"step": 9})).unwrap();
    assert_eq!(
        fs::read_to_string(&path).unwrap(),
        "{\"step\":0}\n{\"step\":1}\n{\"step\":9}\n"
    );
    let error = MetricsLog::resume(&open(&dir), METRICS, 0, |_| true).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Usage);
}

/// Values that repeat, from 0 up.
fn noise(count: usize, seed: u64) -> Vec<u64> {
    let mut state = seed;
    let mut next = || {
        state = state
            .wrapping_mul(6364136223846793005)
            .wrapping_add(1442695040888963407);
        state >> 33
    };
    (0..count).map(|_| next()).collect()
}

#[test]
fn the_area_under_the_curve_is_the_share_of_pairs_in_order() {
    for (count, values) in [(2, 2), (9, 3), (50, 20), (200, 1000)] {
        let both = noise(count, 5).into_iter().zip(noise(count, 77));
        let samples: Vec<(f64, bool)> = both
            .map(|(score, label)| ((score % values) as f64 - 3.0, label % 3 == 0))
            .collect();
        let (mut pairs, mut right) = (0.0, 0.0);
        for (score, _) in samples.iter().filter(|s| s.1) {
            for (other, _) in samples.iter().filter(|s| !s.1) {
                pairs += 1.0;
                right +=
                    f64::from(u8::from(score > other)) + 0.5 * f64::from(u8::from(score == other));
            }
        }
        let auc = roc_auc(&samples);
        match pairs > 0.0 {
            true => assert!((auc.expect("pairs") - right / pairs).abs() < 1e-12),
            false => assert_eq!(auc, None),
        }
    }
    assert_eq!(roc_auc(&[(1.0, true), (2.0, true)]), None);
    assert_eq!(roc_auc(&[(f64::NAN, true), (2.0, false)]), None);
}

#[test]
fn quantiles_are_those_of_numpy() {
    // numpy.quantile([3, 1, 4, 1, 5, 9, 2, 6], [0, 0.1, 0.5, 0.9, 1])
    let values = [3.0, 1.0, 4.0, 1.0, 5.0, 9.0, 2.0, 6.0];
    for (q, want) in [(0.0, 1.0), (0.1, 1.0), (0.5, 3.5), (0.9, 6.9), (1.0, 9.0)] {
        assert!(
            (quantile(&values, q).expect("values") - want).abs() < 1e-12,
            "{q}"
        );
    }
    assert_eq!(quantile(&[], 0.5), None);
    assert_eq!(quantile(&values, 1.5), None);
    assert_eq!(quantile(&[1.0, f64::NAN], 0.5), None);
}

#[test]
fn scores_of_classes_are_counted_as_they_are_defined() {
    let scores = [0.1, 0.5, 0.4, 0.3, 0.3, 0.3, f32::NAN, 0.2, 0.1];
    let labels = [2, 1, 0];
    let right = |k| top_k(&scores, 3, &labels, k).expect("rows");
    assert_eq!([right(0), right(1), right(2), right(3)], [0, 0, 2, 2]);
    top_k(&scores, 3, &labels[1..], 1).expect_err("a row without a label");

    // Rows of true classes: 0 is taken for 0, 0, 1; 1 for 1; 2 for 0, 2. Class 3 does not occur.
    let mut confusion = Confusion::new(4);
    for (label, predicted) in [(0, 0), (0, 0), (0, 1), (1, 1), (2, 0), (2, 2)] {
        confusion.add(label, predicted).expect("a class");
    }
    let all = |f: fn(&Confusion, usize) -> Option<f64>| [0, 1, 2, 3, 4].map(|c| f(&confusion, c));
    let third = 2.0 / 3.0;
    assert_eq!(
        all(Confusion::recall),
        [Some(third), Some(1.0), Some(0.5), None, None]
    );
    assert_eq!(
        all(Confusion::precision),
        [Some(third), Some(0.5), Some(1.0), None, None]
    );
    // 2 p r / (p + r).
    assert_eq!(
        all(Confusion::f1),
        [Some(third), Some(third), Some(third), None, None]
    );
    assert_eq!(confusion.macro_f1(), Some(third));
    assert_eq!(Confusion::new(0).macro_f1(), None);
}
