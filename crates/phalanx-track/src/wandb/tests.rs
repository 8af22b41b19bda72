//! Against the frames' own description, read back by another reader.

use prost::Message as _;
use serde_json::json;

use super::*;
use crate::{Delivery, FINISH_WAIT};

/// The records of a `.wandb` file.
fn records(file: &[u8]) -> Vec<proto::Record> {
    assert_eq!(&file[..7], b":W&B\xe1\xbe\0");
    let (mut at, mut data, mut records) = (7, Vec::new(), Vec::new());
    while at < file.len() {
        let left = (32 << 10) - at % (32 << 10);
        if left < 7 {
            assert!(file[at..at + left].iter().all(|byte| *byte == 0));
            at += left;
            continue;
        }
        let len = usize::from(u16::from_le_bytes([file[at + 4], file[at + 5]]));
        assert!(7 + len <= left, "over the end of a block");
        let kind = file[at + 6];
        let mut crc = !0_u32;
        // Bit by bit, of the kind and the data.
        for byte in &file[at + 6..at + 7 + len] {
            crc ^= u32::from(*byte);
            for _ in 0..8 {
                crc = crc >> 1 ^ if crc & 1 == 1 { 0xedb8_8320 } else { 0 };
            }
        }
        assert_eq!((!crc).to_le_bytes(), file[at..at + 4]);
        assert_eq!(data.is_empty(), [1, 2].contains(&kind));
        data.extend_from_slice(&file[at + 7..at + 7 + len]);
        if [1, 4].contains(&kind) {
            records.push(proto::Record::decode(&*data).expect("a record"));
            data.clear();
        }
        at += 7 + len;
    }
    records
}

#[test]
fn frames_stay_within_blocks() {
    for first in [0, 32_700, 32_740, 32_747, 32_748, 32_754, 32_755, 100_000] {
        let mut file = proto::MAGIC.to_vec();
        let mut offset = 7;
        let lens = [first, 3, 70_000, 1];
        for (n, len) in lens.into_iter().enumerate() {
            let what = What::Config(Items {
                update: vec![Item {
                    key: "k".repeat(len),
                    ..Item::default()
                }],
            });
            let record = proto::Record {
                num: n as i64 + 1,
                what: Some(what),
            };
            offset =
                proto::write_frames(&mut file, offset, &record.encode_to_vec()).expect("written");
            assert_eq!(offset, file.len() as u64);
        }
        let read = records(&file);
        let len = |record: &proto::Record| match &record.what {
            Some(What::Config(items)) => items.update[0].key.len(),
            _ => usize::MAX,
        };
        assert_eq!(read.iter().map(len).collect::<Vec<_>>(), lens);
    }
}

#[test]
fn a_resumed_run_is_written_again_in_the_same_folder() {
    let dir = tempfile::tempdir().expect("folder");
    let write =
        |name: &str, text: &str| std::fs::write(dir.path().join(name), text).expect("written");
    let run = |attempt| {
        write("run.json", &json!({"id": "ab12", "program": "mnist", "attempt": attempt, "started": 1_795_458_591.5,
            "settings": {"--lr": "0.05", "--name": "x"}}).to_string());
    };
    let deliver = || {
        let delivery =
            Delivery::start(dir.path(), Box::new(Wandb::new(&Env::new()))).expect("started");
        delivery.finish(FINISH_WAIT).expect("delivered");
        let mut folders = std::fs::read_dir(dir.path().join("wandb")).expect("folder");
        let folder = folders.next().expect("one").expect("entry").path();
        assert!(folders.next().is_none());
        assert!(
            folder.ends_with("offline-run-20261123_182951-ab12"),
            "{folder:?}"
        );
        records(&std::fs::read(folder.join("run-ab12.wandb")).expect("a file"))
    };
    let rows = |records: &[proto::Record]| {
        let row = |record: &proto::Record| match &record.what {
            Some(What::History(history)) => {
                let get = |name: &str| {
                    let item = history.item.iter().find(|item| item.nested_key == [name]);
                    item.map_or(String::new(), |item| item.value_json.clone())
                };
                Some((history.step.as_ref()?.num, get("loss"), get("train_loss")))
            }
            _ => None,
        };
        records.iter().filter_map(row).collect::<Vec<_>>()
    };
    let text = |text: &str| text.to_owned();
    run(1);
    write(
        "metrics.jsonl",
        "{\"step\":0,\"loss\":0.30000000000000004}\n{\"step\":1,\"loss\":1e-9}\n",
    );
    assert_eq!(
        rows(&deliver()),
        [
            (0, text("0.30000000000000004"), text("")),
            (1, text("1e-9"), text(""))
        ]
    );
    run(2);
    write(
        "metrics.jsonl",
        "{\"step\":0,\"loss\":2.5}\n{\"step\":1,\"train_loss\":3.0}\n{\"step\":1,\"loss\":null}\n",
    );
    write(
        "events.jsonl",
        "{\"kind\":\"finish\",\"status\":\"failed\",\"time\":1795458601.5}\n",
    );
    let records = deliver();
    assert_eq!(
        rows(&records),
        [(0, text("2.5"), text("")), (1, text(""), text("3.0"))]
    );
    let exit = proto::Exit {
        exit_code: 1,
        runtime: 10,
    };
    assert_eq!(
        records.last().and_then(|last| last.what.clone()),
        Some(What::Exit(exit))
    );
    let nums: Vec<i64> = records.iter().map(|record| record.num).collect();
    assert_eq!(nums, (1..=records.len() as i64).collect::<Vec<_>>());
}

#[test]
fn the_exit_and_the_summary_say_how_the_run_ended() {
    for (end, exit_code, error) in [
        (r#""finished""#, 0, None),
        (r#""stopped""#, 255, None),
        (
            r#""failed","error":"out of luck""#,
            1,
            Some("\"out of luck\""),
        ),
    ] {
        let dir = tempfile::tempdir().expect("folder");
        let write = |name: &str, text: &str| {
            std::fs::write(dir.path().join(name), text).expect("written");
        };
        write("run.json", r#"{"id":"ab","started":100.0}"#);
        let finish = format!("{{\"kind\":\"finish\",\"status\":{end},\"time\":107.0}}\n");
        // The end of an attempt before does not count.
        let before = r#"{"kind":"finish","status":"failed","error":"before","time":101.0}"#;
        let start = r#"{"kind":"start","time":102.0}"#;
        write("events.jsonl", &format!("{before}\n{start}\n{finish}"));
        write(
            "summary.json",
            r#"{"accuracy":0.5,"model":"cnn","confusion":[[1,2]],"settings":{"lr":1}}"#,
        );
        let delivery = Delivery::start(dir.path(), Box::new(Wandb::new(&Env::new())));
        delivery
            .expect("started")
            .finish(FINISH_WAIT)
            .expect("delivered");
        let file = dir
            .path()
            .join("wandb/offline-run-19700101_000140-ab/run-ab.wandb");
        let records = records(&std::fs::read(file).expect("a file"));
        let exit = proto::Exit {
            exit_code,
            runtime: 7,
        };
        assert_eq!(
            records.last().and_then(|last| last.what.clone()),
            Some(What::Exit(exit))
        );
        let summary = |record: &proto::Record| match &record.what {
            Some(What::Summary(items)) => Some(items.clone()),
            _ => None,
        };
        let last = records.iter().rev().find_map(summary);
        let last = last.expect("a summary");
        let get = |name: &str| {
            let item = last.update.iter().find(|item| item.nested_key == [name]);
            item.map(|item| item.value_json.as_str())
        };
        assert_eq!(get("error"), error);
        assert_eq!(
            [get("accuracy"), get("model")],
            [Some("0.5"), Some("\"cnn\"")]
        );
        // Results, not tables of them.
        assert_eq!([get("confusion"), get("settings")], [None, None]);
    }
}

/// The records of the run in `dir`, and the folder of its offline run.
fn delivered(dir: &Path) -> (PathBuf, Vec<proto::Record>) {
    crate::upload(dir, Box::new(Wandb::new(&Env::new()))).expect("written");
    let folder = dir.join("wandb/offline-run-19700101_000140-ab");
    let file = std::fs::read(folder.join("run-ab.wandb")).expect("a file");
    (folder, records(&file))
}

#[test]
fn histograms_tables_images_and_the_model_are_there_however_often_it_is_written() {
    let dir = tempfile::tempdir().expect("folder");
    let write = |name: &str, bytes: &[u8]| {
        let path = dir.path().join(name);
        std::fs::create_dir_all(path.parent().expect("folder")).expect("folder");
        std::fs::write(path, bytes).expect("written");
    };
    let sheet = |images: &[f32]| phalanx_report::image::sheet(images, [1, 2, 1]).expect("a PNG");
    write(
        "run.json",
        br#"{"id":"ab","started":100.0,"program":"mnist","model":{"graph":[
            {"name":"fc.0","operation":"Linear","inputs":["input"],"shape":[2,3]},
            {"name":"relu_1","operation":"Relu","inputs":["fc.0"],"shape":[2,3]}]}}"#,
    );
    write(
        "metrics.jsonl",
        b"{\"step\":0,\"loss\":1}\n{\"step\":1,\"loss\":0.5}\n",
    );
    // The second image is the first one mirrored.
    write("predictions.png", &sheet(&[0.0, 1.0, 1.0, 0.0]));
    let row = |epoch: u8, image: u8| {
        json!({"epoch": epoch, "id": format!("0_{image}"), "image": image, "guess": 1, "truth": image,
               "scores": [0.25, 0.75]})
    };
    let rows = [row(1, 0), row(1, 1), row(2, 0), row(2, 1)].map(|row| format!("{row}\n"));
    write("predictions.jsonl", rows.concat().as_bytes());
    write("tables/t.jsonl", b"{\"b\":1,\"a\":\"x\"}\n{\"a\":null}\n");
    write("images/i.png", &sheet(&[0.0, 1.0]));
    write("model.pt", b"123456789");
    let events = [
        json!({"kind": "watch", "step": 1, "parameters": {}, "gradients":
               {"w": {"min": -1.0, "max": 1.0, "buckets": [3.0, 4.0]}}}),
        json!({"kind": "text", "step": 1, "name": "sample", "text": "to be"}),
        json!({"kind": "image", "step": 1, "name": "digits", "file": "images/i.png"}),
        json!({"kind": "table", "step": 1, "name": "worst", "file": "tables/t.jsonl"}),
        json!({"kind": "rows", "step": 1, "epoch": 2, "file": "predictions.jsonl"}),
        // Its file is gone.
        json!({"kind": "image", "step": 1, "name": "gone", "file": "images/gone.png"}),
        json!({"kind": "finish", "status": "finished", "time": 101.0}),
    ];
    write(
        "events.jsonl",
        events.map(|event| format!("{event}\n")).concat().as_bytes(),
    );
    let (_, first) = delivered(dir.path());
    let (folder, all) = delivered(dir.path());
    assert_eq!(first, all, "the same each time");
    let mut items = all.iter().filter_map(|record| match &record.what {
        Some(What::History(history)) => Some((history.step.as_ref()?.num, history.item.clone())),
        _ => None,
    });
    let (step, items) = items.next_back().expect("a row");
    let get = |name: &str, part: &str| -> Value {
        let key = [name, part];
        let key = &key[..if part.is_empty() { 1 } else { 2 }];
        let item = items.iter().find(|item| item.nested_key == key);
        serde_json::from_str(&item.expect(name).value_json).expect("JSON")
    };
    assert_eq!((step, get("sample", "")), (1, json!("to be")));
    assert_eq!(get("gradients/w", "values"), json!([3.0, 4.0]));
    assert_eq!(get("gradients/w", "bins"), json!([-1.0, 0.0, 1.0]));
    assert_eq!(get("mnist_predictions", "nrows"), 2);
    assert!(items.iter().all(|item| item.nested_key[0] != "gone"));
    let of_run = |path: &Value| folder.join("files").join(path.as_str().expect("a path"));
    let image = std::fs::read(of_run(&get("digits", "path"))).expect("a file");
    assert_eq!(
        image,
        std::fs::read(dir.path().join("images/i.png")).expect("a file")
    );
    let brief = std::fs::read(of_run(&get("worst", "path"))).expect("a file");
    let brief: Value = serde_json::from_slice(&brief).expect("JSON");
    assert_eq!(
        brief,
        json!({"columns": ["a", "b"], "data": [["x", 1], [null, null]]})
    );
    // `wandb.watch` calls it so.
    let mut summaries = all.iter().filter_map(|record| match &record.what {
        Some(What::Summary(summary)) => Some(summary.update.clone()),
        _ => None,
    });
    let summary = summaries.next_back().expect("a summary");
    let get = |part: &str| -> Value {
        let item = summary
            .iter()
            .find(|item| item.nested_key == ["graph_0", part]);
        serde_json::from_str(&item.expect(part).value_json).expect("JSON")
    };
    assert_eq!(get("_type"), "graph-file");
    let bytes = std::fs::read(of_run(&get("path"))).expect("a file");
    let digest = hex::encode(<sha2::Sha256 as sha2::Digest>::digest(&bytes));
    assert_eq!(
        (get("size"), get("sha256")),
        (json!(bytes.len()), json!(digest))
    );
    let graph: Value = serde_json::from_slice(&bytes).expect("JSON");
    assert_eq!(
        graph["edges"],
        json!([["input", "fc.0"], ["fc.0", "relu_1"]])
    );
    let node =
        json!({"id": "fc.0", "name": "fc.0", "class_name": "Linear", "output_shape": [2, 3]});
    assert_eq!(
        (&graph["nodes"][1], graph["nodes"][0]["id"].as_str()),
        (&node, Some("input"))
    );
    let is_listed = |record: &proto::Record| match &record.what {
        Some(What::Files(files)) => files
            .files
            .iter()
            .any(|file| json!(file.path) == get("path")),
        _ => false,
    };
    assert_eq!(all.iter().filter(|record| is_listed(record)).count(), 1);
    let artifacts = all.iter().filter_map(|record| match &record.what {
        Some(What::Artifact(artifact)) => Some(artifact.clone()),
        _ => None,
    });
    let artifacts: Vec<proto::Artifact> = artifacts.collect();
    let names: Vec<&str> = artifacts.iter().map(|artifact| &*artifact.name).collect();
    assert_eq!(
        names,
        ["run-ab-worst", "run-ab-mnist_predictions", "run-ab-model"]
    );
    let files = |artifact: &proto::Artifact| artifact.manifest.clone().expect("files").contents;
    let predictions = files(&artifacts[1]);
    // Two images and the table.
    assert_eq!(predictions.len(), 3);
    let table = predictions
        .iter()
        .find(|entry| entry.path.ends_with(".json"))
        .expect("a table");
    let table = std::fs::read(&table.local_path).expect("a file");
    let table: Value = serde_json::from_slice(&table).expect("JSON");
    assert_eq!(
        table["columns"],
        json!(["id", "image", "guess", "truth", "score_0", "score_1"])
    );
    assert_eq!(table["data"][1][0], "0_1");
    let cells = table["data"][1].as_array().expect("a row");
    assert_eq!(cells[2..], [json!(1), json!(1), json!(0.25), json!(0.75)]);
    let model = files(&artifacts[2]);
    // `printf 123456789 | openssl md5 -binary | base64`
    assert_eq!(
        (&*model[0].path, &*model[0].digest, model[0].size),
        ("model.pt", "JfnnlDI7RTiF9RgfG2JNCw==", 9)
    );
    // `printf 'wandb-artifact-manifest-v1\nmodel.pt:JfnnlDI7RTiF9RgfG2JNCw==\n' | md5sum`
    assert_eq!(artifacts[2].digest, "2f902076e993e43f01b44c72bd3dce9f");
    // One that has failed has no model yet.
    let failed =
        "{\"kind\":\"start\"}\n{\"kind\":\"finish\",\"status\":\"failed\",\"time\":102.0}\n";
    let before = std::fs::read_to_string(dir.path().join("events.jsonl")).expect("a file");
    write("events.jsonl", (before + failed).as_bytes());
    let (_, all) = delivered(dir.path());
    let is_model = |record: &proto::Record| match &record.what {
        Some(What::Artifact(artifact)) => artifact.kind == "model",
        _ => false,
    };
    assert!(!all.iter().any(is_model));
}

#[test]
fn tags_have_at_most_64_characters() {
    let run = json!({"tags": {"a": null, "b": "c", "\u{fc}".repeat(70): null}});
    assert_eq!(tags(&run), ["a", "b=c", &"\u{fc}".repeat(64)]);
    assert_eq!(tags(&json!({"tags": 7})), [""; 0]);
}
