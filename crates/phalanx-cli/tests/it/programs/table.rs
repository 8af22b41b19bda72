//! `train table` and `predict` on CSV and Parquet files.

use super::*;

/// Rows with numbers and categories, which the tests of `phalanx-data` compare with scikit-learn's.
const ROWS: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../phalanx-data/tests/table");

fn words(line: &str) -> Vec<&str> {
    line.split_whitespace().collect()
}

/// `rows` rows of `a,b,city,y` with gaps, y = 3 a - b + the city's price, and the y of each row without a gap.
fn table(rows: usize) -> (String, Vec<Option<f64>>) {
    let (mut text, mut wanted) = ("id,a,b,city,y\n".to_owned(), Vec::new());
    let mut state = 1_u64;
    let mut draw = |below: u64| {
        // Knuth's MMIX generator.
        state = state.wrapping_mul(6_364_136_223_846_793_005);
        state = state.wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) % below
    };
    for row in 0..rows {
        let [a, b] = [draw(1000), draw(1000)].map(|value| value as f64 / 100.0);
        let city = draw(4) as usize;
        let noise = draw(1000) as f64 / 1000.0;
        let y = 3.0 * a - b + [0.0, 20.0, -10.0, 5.0][city] + noise;
        let gap = draw(20);
        let field = |at: u64, text: String| if gap == at { "NA".to_owned() } else { text };
        let name = ["Oslo", "Bergen", "\"Mo, i Rana\"", "Bodø"][city].to_owned();
        let (a, b, city) = (
            field(0, a.to_string()),
            field(1, b.to_string()),
            field(2, name),
        );
        text.push_str(&format!("r{row},{a},{b},{city},{y}\n"));
        wanted.push((gap > 2).then_some(y));
    }
    (text, wanted)
}

const TRAIN: &str = "train table --data rows.csv --target y --drop id --global-batch-size 512 --deterministic shards \
                     --lr 0.02 --hidden 16 --patience 2 --epochs 40 --threads 1";

#[test]
fn fifty_thousand_rows_stop_early_alike_and_are_predicted_in_order() {
    let dir = tempfile::tempdir().expect("folder");
    let (text, wanted) = table(50_000);
    std::fs::write(dir.path().join("rows.csv"), text).expect("written");
    let mut first: Option<(Value, String)> = None;
    for ranks in ["1", "2", "3"] {
        let args = format!("{TRAIN} --nproc-per-node {ranks} --output-dir run{ranks}");
        let (out, err) = succeed(&words(&args), dir.path());
        assert!(
            err.contains("rows.csv, 45,000 train / 5,000 test rows, regression of y"),
            "{err}"
        );
        let summary = json(&dir.path().join(format!("run{ranks}/summary.json")));
        let step = summary["stopped_early"].as_u64().expect("stopped early");
        assert!(step < summary["planned_steps"].as_u64().expect("steps"));
        assert_eq!(summary["features"], serde_json::json!(["a", "b", "city"]));
        // The noise has a variance of 1/12, rows with a gap are worse.
        let measured = |name: &str| summary[name].as_f64().expect("measured");
        assert!(
            measured("test_mae") < 2.0 && measured("test_r2") > 0.9,
            "{summary}"
        );
        assert!(measured("test_rmse") > measured("test_mae"), "{summary}");
        assert!(out.contains(", mae ") && out.contains(", r2 "), "{out}");
        let name = format!("rows{ranks}.csv");
        let predict =
            format!("predict run{ranks} --data rows.csv --output {name} --nproc-per-node {ranks}");
        let (_, err) = succeed(&words(&predict), dir.path());
        assert!(err.contains("columns that are not used: id, y"), "{err}");
        let rows = std::fs::read_to_string(dir.path().join(name)).expect("predictions");
        let of_run = |field: &str| summary[field].clone();
        let facts =
            Value::from_iter(["weights_sha256", "steps", "stopped_early", "test_loss"].map(of_run));
        match &first {
            None => first = Some((facts, rows)),
            Some(first) => assert_eq!((&facts, &rows), (&first.0, &first.1)),
        }
    }
    let rows = first.expect("a run").1;
    let mut lines = rows.lines();
    assert_eq!(lines.next(), Some("row,y"));
    for (row, wanted) in (1..).zip(wanted) {
        let (number, y) = lines
            .next()
            .and_then(|line| line.split_once(','))
            .expect("a row");
        assert_eq!(number.parse(), Ok(row));
        let y: f64 = y.parse().expect("a number");
        if let Some(wanted) = wanted {
            // Another row is off by tens.
            assert!((y - wanted).abs() < 6.0, "row {row}: {y} {wanted}");
        }
    }
    assert_eq!(lines.next(), None);
    assert_eq!(
        std::fs::read_dir(dir.path()).expect("a folder").count(),
        7,
        "no other files"
    );
}

#[test]
fn classes_have_their_names_and_a_parquet_file_the_weights_of_csv() {
    let dir = tempfile::tempdir().expect("folder");
    let mut weights = Vec::new();
    for kind in ["csv", "parquet"] {
        let args = format!(
            "train table --data {ROWS}/rows.{kind} --target class --features area,kind --fill median,kind=none \
             --epochs 2 --threads 1 --output-dir {kind}"
        );
        let (_, err) = succeed(&words(&args), dir.path());
        assert!(
            err.contains("216 train / 24 test rows, 3 classes of class"),
            "{err}"
        );
        let summary = json(&dir.path().join(kind).join("summary.json"));
        weights.push(summary["weights_sha256"].clone());
        assert_eq!(
            summary["classes"],
            serde_json::json!(["maybe", "no", "yes"])
        );
        assert_eq!(summary["confusion"].as_array().map(Vec::len), Some(3));
    }
    assert_eq!(weights[0], weights[1]);
    let report = std::fs::read_to_string(dir.path().join("csv/report.html")).expect("a report");
    assert!(report.contains("\"maybe\""));
    let predict = format!("predict csv --data {ROWS}/rows.parquet");
    let (out, _) = succeed(&words(&predict), dir.path());
    let mut lines = out.lines();
    let header = "row,class,probability_maybe,probability_no,probability_yes";
    assert_eq!(lines.next(), Some(header));
    for (row, line) in (1..).zip(lines) {
        let fields: Vec<&str> = line.split(',').collect();
        assert_eq!(fields[0].parse(), Ok(row));
        let shares: Vec<f64> = fields[2..]
            .iter()
            .map(|share| share.parse().expect("a share"))
            .collect();
        assert!((shares.iter().sum::<f64>() - 1.0).abs() < 1e-6, "{line}");
        let best = shares.iter().copied().fold(0.0, f64::max);
        let place = shares
            .iter()
            .position(|share| *share == best)
            .expect("the best");
        assert_eq!(fields[1], ["maybe", "no", "yes"][place]);
    }
    assert_eq!(out.lines().count(), 241);
}

#[test]
fn mistakes_name_the_flag_the_column_or_the_line() {
    let dir = tempfile::tempdir().expect("folder");
    let write = |name: &str, text: &str| {
        std::fs::write(dir.path().join(name), text).expect("written");
    };
    write("t.csv", "a,y,mixed\n1,2,3\n4,5,x\n6,7,8\n");
    write("one.csv", "a,y\n1,2\n3,NA\n");
    succeed(
        &words("train table --data t.csv --target y --drop mixed --epochs 1 --output-dir run"),
        dir.path(),
    );
    write("other.csv", "b\n1\n");
    for (args, code, why) in [
        ("train table --target y", 2, "needs --data FILE"),
        ("train table --data t.csv", 2, "needs --target COLUMN"),
        (
            "train table --data no.csv --target y",
            2,
            "there is no file no.csv",
        ),
        (
            "train table --data t.csv --target z --drop mixed",
            2,
            "t.csv has no column \"z\"",
        ),
        (
            "train table --data t.csv --target y --features b",
            2,
            "t.csv has no column \"b\"",
        ),
        (
            "train table --data t.csv --target y",
            1,
            "t.csv, line 3: \"x\" is not a number",
        ),
        (
            "train table --data one.csv --target y",
            2,
            "needs values in two rows",
        ),
        (
            "train table --data t.csv --target y --held-out 1",
            2,
            "--held-out must lie between",
        ),
        (
            "train table --data t.csv --target y --hidden 0",
            2,
            "--hidden",
        ),
        (
            "train table --data t.csv --predict p.csv",
            2,
            "--predict needs --init RUN",
        ),
        (
            "predict run --data other.csv",
            2,
            "other.csv has no column \"a\"",
        ),
        (
            "predict run --data t.csv --limit 2",
            2,
            "--limit are not for tables",
        ),
        (
            "predict run --data t.csv t.csv",
            2,
            "--data takes one table",
        ),
    ] {
        let (is, _, err) = run(&words(args), dir.path());
        assert_eq!(is, code, "{args}: {err}");
        assert!(err.contains(why), "{args}: {err}");
    }
    // The same on several ranks.
    let args = "train table --data t.csv --target y --nproc-per-node 2";
    let (code, _, err) = run(&words(args), dir.path());
    assert_eq!(code, 1, "{err}");
    assert!(
        err.contains("t.csv, line 3: \"x\" is not a number"),
        "{err}"
    );
}
