//! Against scikit-learn's numbers, which `tests/table/make.py` has computed, and with bad files.

use std::path::PathBuf;

use phalanx_base::ErrorKind;

use super::*;
use crate::Dataset;

fn file(name: &str) -> PathBuf {
    let folder = PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/table"));
    folder.join(name)
}

fn read(text: &str) -> Result<Table> {
    Table::from_csv("t.csv", text, &TableOptions::default())
}

fn strings(words: &[&str]) -> Vec<String> {
    words.iter().map(|word| (*word).to_owned()).collect()
}

/// The first `count` rows.
fn first(table: &Table, count: usize) -> Table {
    let rows = table.rows[..count].to_vec();
    Table {
        rows,
        ..table.clone()
    }
}

fn batch(set: &TableDataset) -> TableBatch {
    let (mut batch, all) = (TableBatch::default(), 0..Dataset::len(set) as u64);
    let indices: Vec<u64> = all.collect();
    set.read_batch(0, &indices, &mut batch).expect("rows");
    batch
}

fn assert_near(is: &[f32], wanted: &serde_json::Value) {
    let wanted = wanted.as_array().expect("a list");
    assert_eq!(is.len(), wanted.len());
    for (i, (is, wanted)) in is.iter().zip(wanted).enumerate() {
        let wanted = wanted.as_f64().expect("a number");
        let off = (f64::from(*is) - wanted).abs();
        assert!(off <= 1e-6 * wanted.abs().max(1.0), "{i}: {is} {wanted}");
    }
}

fn without(columns: &[&str]) -> TableOptions {
    TableOptions {
        drop: strings(columns),
        ..TableOptions::default()
    }
}

#[test]
fn features_and_targets_are_those_of_scikit_learn() {
    let expected = std::fs::read_to_string(file("expected.json")).expect("a fixture");
    let expected: serde_json::Value = serde_json::from_str(&expected).expect("JSON");
    let rows = expected["train"].as_u64().expect("a number") as usize;
    let mut files = vec!["rows.csv"];
    files.extend(cfg!(feature = "parquet").then_some("rows.parquet"));
    for name in files {
        let price = Table::open(&file(name), &without(&["class"])).expect("a table");
        for (fill, wanted) in expected["transformed"].as_object().expect("fills") {
            let mut rules = vec![fill.clone()];
            if fill == "median" {
                rules.push("kind=none".to_owned());
            }
            let train = first(&price, rows);
            let fitted = Preprocessing::fit(&train, "price", &rules).expect("fitted");
            assert_eq!(
                Preprocessing::from_json(&fitted.to_json()).expect("read again"),
                fitted
            );
            let all = fitted.transform(&price).expect("transformed");
            let batch = batch(&all);
            let width = fitted.width();
            for (features, wanted) in batch
                .features
                .chunks(width)
                .zip(wanted.as_array().expect("rows"))
            {
                assert_near(features, wanted);
            }
            assert_eq!(batch.features.len(), width * price.len());
            assert_near(&batch.targets, &expected["price"]);
            assert!(batch.labels.is_empty());
            let unknown = "1 of 240 rows have a category of \"city\" that the training part has not, as \"Uppsala\"";
            assert_eq!(all.warnings(), [unknown]);
        }
        let class = Table::open(&file(name), &without(&["price"])).expect("a table");
        let fitted = Preprocessing::fit(&first(&class, rows), "class", &[]).expect("fitted");
        let all = fitted.transform(&class).expect("transformed");
        assert_eq!(fitted.classes(), ["maybe", "no", "yes"]);
        assert_eq!(all.class_names(), fitted.classes());
        let labels = serde_json::json!(batch(&all).labels);
        assert_eq!(labels, expected["class"]);
    }
}

#[cfg(feature = "parquet")]
#[test]
fn a_parquet_file_is_the_table_of_the_csv_file() {
    let [csv, parquet] = ["rows.csv", "rows.parquet"].map(|name| {
        let table = Table::open(&file(name), &without(&["class"])).expect("a table");
        let fitted = Preprocessing::fit(&table, "price", &[]).expect("fitted");
        let set = fitted.transform(&table).expect("transformed");
        (fitted, set.content())
    });
    assert_eq!(csv, parquet);
    let rows = crate::parquet::ParquetFile::open(&file("rows.parquet")).expect("opened");
    assert_eq!(rows.row_groups(), [100, 100, 40]);
    assert_eq!(rows.columns()[4..6], ["city", "kind"]);
    let mut seen = 0;
    rows.read(2, |row| {
        seen += row.len();
        Ok(())
    })
    .expect("rows");
    assert_eq!(seen, 40 * 8);
    let error = rows.read(3, |_| Ok(())).expect_err("too far").to_string();
    assert!(
        error.contains("has 3 row groups, so there is no 3"),
        "{error}"
    );
    // Cut off at any place, or with another byte, it is an error that names it, or other rows.
    let whole = std::fs::read(file("rows.parquet")).expect("a file");
    let dir = tempfile::tempdir().expect("a folder");
    let path = dir.path().join("cut.parquet");
    for length in [4, 12, whole.len() / 2, whole.len() - 1] {
        std::fs::write(&path, &whole[..length]).expect("written");
        let error = Table::open(&path, &TableOptions::default()).expect_err("cut off");
        assert_eq!(error.kind(), ErrorKind::Data, "{length}: {error}");
        assert!(error.to_string().contains("cut.parquet: "), "{error}");
    }
}

#[test]
fn delimiters_quotes_line_ends_and_gaps_are_those_of_spreadsheets() {
    let text = "name;weight\r\n\"a;\"\"b\"\"\r\nc\"; 1.5\r\n\r\nplain;NA\r\n null;-2e3\r\n";
    let table = read(text).expect("a table");
    assert_eq!(table.columns(), ["name", "weight"]);
    assert_eq!(table.columns[0].names, ["a;\"b\"\r\nc", "plain"]);
    let names = &table.columns[0].values;
    assert!(names[..2] == [0.0, 1.0] && names[2].is_nan(), "{names:?}");
    let weights = &table.columns[1].values;
    assert!(weights[0] == 1.5 && weights[1].is_nan() && weights[2] == -2000.0);
    let commas = read("a,x\tb\n1,2\n").expect("a table");
    assert_eq!(commas.columns(), ["a", "x\tb"], "as frequent: the comma");
    let given = TableOptions {
        delimiter: Some('\t'),
        ..TableOptions::default()
    };
    let tabs = Table::from_csv("t", "a,x\tb\n1\t2\n", &given).expect("a table");
    assert_eq!(tabs.columns(), ["a,x", "b"]);
    let dir = tempfile::tempdir().expect("a folder");
    let path = dir.path().join("t.csv");
    std::fs::write(&path, "\u{feff}a,b\n1,2\n").expect("written");
    let marked = Table::open(&path, &TableOptions::default()).expect("a table");
    assert_eq!(marked.columns(), ["a", "b"]);
}

#[test]
fn categories_are_in_the_order_of_their_values() {
    let options = TableOptions {
        categories: strings(&["zip"]),
        ..TableOptions::default()
    };
    let text = "zip,y\n10,1\n9,2\nb,3\n010,4\nB,5\n";
    let table = Table::from_csv("t", text, &options).expect("a table");
    assert_eq!(table.columns[0].names, ["9", "010", "10", "B", "b"]);
    assert_eq!(table.columns[0].values, [2.0, 0.0, 4.0, 1.0, 3.0]);
}

#[test]
fn wrong_files_are_refused_with_their_line_and_column() {
    let long = format!("a,b\n1,\"{}\n", "x".repeat(2 << 20));
    for (text, why) in [
        ("", "t.csv is empty, without a header"),
        ("a,b\n", "t.csv has 0 rows"),
        ("1,2\n3,4\n", "t.csv, the header: numbers only"),
        ("a,\n3,4\n", "t.csv, the header: column 2 has no name"),
        ("a,b,a\n", "t.csv, the header: two columns are called \"a\""),
        ("a,b\n1,2\n\n1,2,3\n", "t.csv, line 4: 3 of 2 columns"),
        ("a,b\r\n1,2\r\n\r\n1\r\n", "t.csv, line 4: 1 of 2 columns"),
        (
            "a,b\nx,1\n\"two\nlines\",2\nz,x\n",
            "t.csv, line 5: \"x\" is not a number, as values before it (column \"b\")",
        ),
        (
            "a,b\n1,red\n1,7\n",
            "t.csv, line 3: \"7\" is a number, unlike values before it (column \"b\")",
        ),
        (
            "a,b\n1,2\n1,inf\n",
            "t.csv, line 3: \"inf\" is not a number",
        ),
        (&long, "t.csv, line 2: \"xxxxxxxxxx"),
        (
            &long,
            "longer than 1 MiB; a quotation mark may not be closed",
        ),
    ] {
        let error = read(text).expect_err(why);
        assert_eq!(error.kind(), ErrorKind::Data, "{error}");
        assert!(
            error.to_string().starts_with(why) || error.to_string().contains(why),
            "{error}"
        );
        assert!(error.to_string().len() < 300, "{error}");
    }
    let dir = tempfile::tempdir().expect("a folder");
    let path = dir.path().join("latin.csv");
    std::fs::write(&path, b"a,b\nM\xfcnchen,1\n").expect("written");
    let error = Table::open(&path, &TableOptions::default()).expect_err("not UTF-8");
    assert!(
        error
            .to_string()
            .contains("latin.csv is not UTF-8 text: byte 5"),
        "{error}"
    );
    let error = Table::open(&dir.path().join("no.csv"), &TableOptions::default());
    assert_eq!(error.expect_err("no file").kind(), ErrorKind::Usage);
}

#[test]
fn columns_are_asked_for_by_name() {
    let options = TableOptions {
        columns: strings(&["c", "a"]),
        ..TableOptions::default()
    };
    // What is not asked for may be anything.
    let text = "a,b,c\n1,x,2\n1,3,2\n";
    let table = Table::from_csv("t", text, &options).expect("a table");
    assert_eq!(
        (table.columns(), table.unused()),
        (vec!["a", "c"], &strings(&["b"])[..])
    );
    let table = Table::from_csv("t", text, &without(&["b"])).expect("a table");
    assert_eq!(table.columns(), ["a", "c"]);
    let error = Table::from_csv("t", text, &without(&["d", "a", "e"])).expect_err("missing");
    assert_eq!(error.kind(), ErrorKind::Usage);
    assert!(
        error.render().contains("t has no column \"d\", \"e\""),
        "{}",
        error.render()
    );
    assert!(error.render().contains("a, b, c"), "{}", error.render());
}

#[test]
fn what_cannot_be_fitted_is_named() {
    let rows: String = (0..1500).map(|i| format!("id{i},{i}\n")).collect();
    let many = format!("id,y\n{rows}");
    for (text, target, rules, why) in [
        ("a,y\n1,2\n", "z", "", "t.csv has no column \"z\""),
        ("y\n1\n2\n", "y", "", "t.csv has no column but \"y\""),
        (
            "a,y\n,2\nNA,3\n",
            "y",
            "",
            "column \"a\": no row of the training part has a value",
        ),
        (
            "a,y\n1,\n2,\n",
            "y",
            "",
            "column \"y\": no row of the training part has a value",
        ),
        ("a,y\n1,2\n", "y", "b=3", "t.csv has no column \"b\""),
        (
            "a,y\n1,2\n",
            "y",
            "a=much",
            "column \"a\": \"much\" cannot fill numbers",
        ),
        ("a,y\n1,2\n", "y", "y=3", "\"y\" is the column to predict"),
        (
            "a,y\n1e200,2\n-1e200,3\n",
            "y",
            "",
            "column \"a\": its numbers are too large",
        ),
        (
            &many,
            "y",
            "",
            "column \"id\": 1,500 categories; 1000 are the most",
        ),
    ] {
        let table = read(text).expect("a table");
        let rules: Vec<String> = rules.split_whitespace().map(str::to_owned).collect();
        let error = Preprocessing::fit(&table, target, &rules).expect_err(why);
        assert_eq!(error.kind(), ErrorKind::Usage, "{error}");
        assert!(error.to_string().contains(why), "{error}");
    }
}

#[test]
fn other_files_are_transformed_as_the_training_part() {
    let train = read("a,city,y\n1,Oslo,2\n3,Bergen,4\n,Oslo,6\n").expect("a table");
    let fitted = Preprocessing::fit(&train, "y", &strings(&["a=9"])).expect("fitted");
    let dir = tempfile::tempdir().expect("a folder");
    let path = dir.path().join("new.csv");
    let open = |text: &str| {
        std::fs::write(&path, text).expect("written");
        fitted.open(&path)
    };
    // Other columns, in another order, without a target; one has both texts and numbers.
    let table = open("note,city,a\nx,,\n1,Rome,1\n").expect("a table");
    assert_eq!(table.unused(), ["note"]);
    let set = fitted.transform(&table).expect("transformed");
    let rows = batch(&set);
    assert!(rows.targets.is_empty() && rows.labels.is_empty());
    // Of 1, 3 and 9.
    let (mean, std) = (13.0 / 3.0, (104.0_f64 / 9.0).sqrt());
    let [nine, one] = [9.0, 1.0].map(|value| ((value - mean) / std) as f32);
    assert_eq!(rows.features, [nine, 0.0, 1.0, one, 0.0, 0.0]);
    // Nothing but gaps, and categories that are numbers.
    let table = open("a,city\n,\n").expect("a table");
    assert_eq!(
        batch(&fitted.transform(&table).expect("transformed")).features,
        [nine, 0.0, 1.0]
    );
    let table = open("a,city\n,12\n").expect("a table");
    assert_eq!(
        batch(&fitted.transform(&table).expect("transformed")).features,
        [nine, 0.0, 0.0]
    );
    let error = open("b\n1\n").expect_err("missing").render();
    assert!(
        error.contains("new.csv has no column \"a\", \"city\""),
        "{error}"
    );
    let error = fitted.transform(&open("a,city\nx,Oslo\n").expect("a table"));
    let error = error.err().expect("texts").to_string();
    assert!(
        error.contains("column \"a\" has categories, not numbers"),
        "{error}"
    );
    let error = fitted.transform(&read("a,city,y\n1,Oslo,\n1,Oslo,3\n").expect("a table"));
    let error = error.err().expect("a gap").to_string();
    assert!(error.contains("\"y\" is missing in some rows"), "{error}");
}

#[test]
fn predictions_are_in_the_targets_units_and_the_files_order() {
    let table = read("a,y\n1,10\n3,20\n5,\n7,30\n").expect("a table");
    let known = table.without_missing("y").expect("rows");
    let fitted = Preprocessing::fit(&known, "y", &[]).expect("fitted");
    let text = fitted.predictions(&known, &[0.0, 1.0, -1.0]).expect("CSV");
    let std = (200.0_f64 / 3.0).sqrt();
    let [up, down] = [20.0 + std, 20.0 - std];
    assert_eq!(text, format!("row,y\n1,20\n2,{up}\n4,{down}\n"));
    let table = read("a,y\n1,no\n3,\"a,b\"\n").expect("a table");
    let fitted = Preprocessing::fit(&table, "y", &[]).expect("fitted");
    let text = fitted.predictions(&table, &[0.0, 3.0_f32.ln(), 1000.0, -1000.0]);
    let wanted = "row,y,\"probability_a,b\",probability_no\n1,no,0.25,0.75\n2,\"a,b\",1,0\n";
    assert_eq!(text.expect("CSV"), wanted);
}

#[test]
fn a_split_is_drawn_by_the_seed_and_keeps_the_order() {
    let rows: String = (0..100).map(|i| format!("{i},1\n")).collect();
    let table = read(&format!("a,y\n{rows}")).expect("a table");
    let [train, test] = table.split(0.25, 7);
    assert_eq!((train.len(), test.len()), (75, 25));
    assert!(train.rows.is_sorted() && test.rows.is_sorted());
    let mut all = [&train.rows[..], &test.rows].concat();
    all.sort_unstable();
    assert_eq!(all, table.rows);
    assert_eq!(table.split(0.25, 7)[1].rows, test.rows);
    assert_ne!(table.split(0.25, 8)[1].rows, test.rows);
    let content = |table: &Table| {
        let fitted = Preprocessing::fit(&table.clone(), "y", &[]).expect("fitted");
        fitted.transform(table).expect("transformed").content()
    };
    assert_ne!(content(&train), content(&test));
    let [train, test] = read("a,y\n1,2\n3,4\n").expect("a table").split(0.01, 1);
    assert_eq!((train.len(), test.len()), (1, 1));
}

#[test]
fn damaged_preprocessings_are_refused() {
    let table = read("a,city,y\n1,Oslo,2\n3,Bergen,4\n").expect("a table");
    let sound = Preprocessing::fit(&table, "y", &[])
        .expect("fitted")
        .to_json();
    assert!(Preprocessing::from_json(&sound).is_ok());
    for (from, to) in [
        ("\"std\":1.0", "\"std\":0.0"),
        ("\"fill\":0.0", "\"fill\":2.0"),
        ("\"fill\":0.0", "\"fill\":-1.0"),
        ("\"mean\"", "\"means\""),
    ] {
        let damaged = sound.replacen(from, to, 1);
        assert_ne!(damaged, sound, "{from}");
        let error = Preprocessing::from_json(&damaged).expect_err("damaged");
        assert_eq!(error.kind(), ErrorKind::Data);
    }
}
