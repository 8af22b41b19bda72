//! Records beside those of TensorBoard itself: `tools/ci/tensorboard.py --fixtures` printed them (TensorBoard 2.21).

use std::collections::BTreeMap;
use std::fs;
use std::io::BufWriter;

use serde_json::json;

use super::proto::{Event, SESSION_START, SessionLog, Summary, What, masked_crc, record};
use super::*;

const VERSION: &str =
    "1800000000000000a37f4b2209000000000000f83f1a0d627261696e2e4576656e743a322a28646c";
const START: &str = "0f000000000000006d532b0909000000000000f83f10073a020801774771c7";
const SCALAR: &str = "200000000000000029eda95009000000000000044010072a130a110a0a747261696e2f6c6f7373150000803e083ded8e";
const PLUGINS: &str = concat!(
    "8e00000000000000c67db1520900000000000004402a82010a210a0873657474696e6773420b0807120042057c2061207c4a",
    "080a060a04746578740a5d0a1c5f68706172616d735f2f73657373696f6e5f73746172745f696e666f4a3d0a3b0a07687061",
    "72616d7312301a2e0a0f0a026c72120911000000000000e03f0a120a0773616d706c657212071a0565786163742900000000",
    "0000f83f0581ad86",
);

const HISTOGRAM: &str = concat!(
    "340200000000000062d338ad09000000000000044010072aa6040aa3040a0b6772616469656e74732f772a93040900000000",
    "0000f0bf11000000000000004019000000000000104021000000000000004029000000000000184032f001cdccccccccccec",
    "bf9a9999999999e9bf666666666666e6bf333333333333e3bf000000000000e0bf989999999999d9bf323333333333d3bf98",
    "9999999999c9bf989999999999b9bf0000000000000000a09999999999b93fa09999999999c93f343333333333d33f9c9999",
    "999999d93f000000000000e03f343333333333e33f686666666666e63f9a9999999999e93fceccccccccccec3f0000000000",
    "00f03f9a9999999999f13f343333333333f33fceccccccccccf43f686666666666f63f000000000000f83f9a9999999999f9",
    "3f343333333333fb3fceccccccccccfc3f686666666666fe3f00000000000000403af001000000000000f03f000000000000",
    "0000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000",
    "00000000000000000000000000000000000000000000f03f0000000000000000000000000000000000000000000000000000",
    "0000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000",
    "0000f03f00000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000",
    "000000000000000000000000000000000000000000000000f03f3e06f33b",
);

#[track_caller]
fn same(wall_time: f64, step: i64, what: What, expected: &str) {
    let what = Some(what);
    let event = Event {
        wall_time,
        step,
        what,
    };
    assert_eq!(hex::encode(record(&event)), expected);
}

#[test]
fn checksums_are_those_computed_by_hand() {
    // 0xe3069283, the check value of CRC-32C, rotated right by 15 bits: 0x2507c60d. That plus 0xa282ead8.
    assert_eq!(masked_crc(b"123456789"), 0xc78a_b0e5);
}

#[test]
fn records_have_the_bytes_of_tensorboards_own() {
    same(1.5, 0, What::FileVersion("brain.Event:2".into()), VERSION);
    let status = SESSION_START;
    same(1.5, 7, What::SessionLog(SessionLog { status }), START);
    let values = scalars(&json!({"step": 7, "epoch": 1, "loss": 0.25}));
    same(2.5, 7, What::Summary(Summary { values }), SCALAR);
    let settings =
        json!({"--lr": "0.5", "--sampler": "exact", "data": "digits", "no": "--save-every"});
    let run = json!({"settings": settings});
    let values = vec![text("settings", "| a |"), hparams(&run, 1.5)];
    same(2.5, 0, What::Summary(Summary { values }), PLUGINS);
}

#[test]
fn histograms_have_the_bytes_of_tensorboards_own() {
    let filled = |at: usize| u8::from([0, 10, 20, 29].contains(&at));
    let buckets: Vec<u8> = (0..30).map(filled).collect();
    let of = json!({
        "count": 4.0, "min": -1.0, "max": 2.0, "sum": 2.0, "sum_squares": 6.0, "buckets": buckets,
    });
    let values = histograms("gradients", &json!({"w": of}));
    same(2.5, 7, What::Summary(Summary { values }), HISTOGRAM);
    // All values are equal, or none is finite.
    let equal = json!({"h": {"min": 0.5, "max": 0.5, "buckets": [3.0]}, "none": {"buckets": []}});
    let values = histograms("parameters", &equal);
    let limits = |at: usize| {
        values[at]
            .histogram
            .as_ref()
            .map(|h| h.bucket_limit.clone())
    };
    assert_eq!((limits(0), limits(1)), (Some(vec![0.5]), Some(vec![])));
}

/// Field numbers of the messages are those of the structures, so these can be read as well.
fn events(path: &Path) -> Vec<Event> {
    let bytes = fs::read(path).expect("a file");
    let (mut rest, mut events) = (&bytes[..], Vec::new());
    while let Some((length, after)) = rest.split_first_chunk::<8>() {
        let end = u64::from_le_bytes(*length) as usize;
        events.push(Event::decode(&after[4..4 + end]).expect("an event"));
        rest = &after[8 + end..];
    }
    events
}

fn files(dir: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(dir).expect("folder").flatten();
    let mut files: Vec<PathBuf> = entries.map(|entry| entry.path()).collect();
    files.retain(|path| path.to_string_lossy().contains(EVENT_FILE_PREFIX));
    files.sort();
    files
}

const RUN: &str = r#"{"id":"ab12","started":1000.5,"ranks":2,"settings":{"--lr":"0.5"},
    "model":{"graph":[{"name":"a.0","operation":"Conv2d","inputs":["input"],"shape":[2,3]}]}}"#;

const METRICS: &str = r#"{"step":0,"epoch":1,"loss":2.0,"elapsed_s":1.0}
{"step":1,"epoch":1,"loss":1.0,"elapsed_s":2.0}
{"step":2,"epoch":1,"train_loss":1.5,"accuracy":0.5,"elapsed_s":3.0}
"#;

const LOGGED: &str = r#"{"kind":"start","attempt":1,"time":1001.0,"elapsed_s":0.5}
{"kind":"watch","step":1,"time":1002.5,"parameters":{"w":{"count":1.0,"min":1.0,"max":1.0,"buckets":[1.0]}},"gradients":{}}
{"kind":"system","time":1003.0,"ranks":[{"rank":0,"pid":7,"host":"a","cpu_percent":50.0},{"rank":1,"cpu_percent":75.0}]}
{"kind":"text","step":2,"epoch":1,"name":"sample","text":"to be","time":1003.5}
{"kind":"image","step":2,"epoch":1,"name":"digits","file":"images/digits.png","time":1003.5}
{"kind":"rows","step":2,"epoch":1,"file":"predictions.jsonl","time":1003.5}
{"kind":"finish","time":1004.0,"status":"failed","error":"the loss became NaN"}
"#;

/// A run whose two predictions are one right, one wrong.
fn logged() -> tempfile::TempDir {
    let dir = tempfile::tempdir().expect("folder");
    let write =
        |name: &str, bytes: &[u8]| fs::write(dir.path().join(name), bytes).expect("written");
    let images = |count: usize| {
        phalanx_report::image::sheet(&vec![0.5; count * 9], [3, 3, 1]).expect("a PNG")
    };
    write("run.json", RUN.as_bytes());
    write("metrics.jsonl", METRICS.as_bytes());
    write("events.jsonl", LOGGED.as_bytes());
    fs::create_dir(dir.path().join("images")).expect("folder");
    write("images/digits.png", &images(1));
    let row = |image: u8, guess: u8| {
        json!({"epoch": 1, "id": "0_0", "image": image, "guess": guess, "truth": 1}).to_string()
            + "\n"
    };
    write("predictions.jsonl", (row(4, 1) + &row(9, 0)).as_bytes());
    write("predictions.png", &images(2));
    dir
}

#[test]
fn all_that_a_run_has_logged_is_in_one_file_however_often_it_is_written() {
    let dir = logged();
    // Of a version before, under its own name.
    fs::write(
        dir.path().join("events.out.tfevents.1700000000.host.7.0"),
        "",
    )
    .expect("written");
    for _ in 0..3 {
        crate::upload(dir.path(), Box::new(TensorBoard::default())).expect("written");
    }
    let files = files(dir.path());
    assert_eq!(files.len(), 2, "{files:?}");
    assert!(files[1].to_string_lossy().ends_with(".ab12"), "{files:?}");
    let events = events(&files[1]);
    let values = events.iter().flat_map(|event| {
        let values = match &event.what {
            Some(What::Summary(summary)) => summary.values.clone(),
            _ => Vec::new(),
        };
        values
            .into_iter()
            .map(|value| (event.wall_time, event.step, value))
    });
    let values: Vec<(f64, i64, proto::Value)> = values.collect();
    let tags: Vec<(f64, i64, &str)> = values.iter().map(|(t, s, v)| (*t, *s, &*v.tag)).collect();
    assert_eq!(
        tags,
        [
            (1000.5, 0, "settings"),
            (1000.5, 0, "_hparams_/session_start_info"),
            (1001.5, 0, "train/loss"),
            (1002.5, 1, "train/loss"),
            (1002.5, 1, "parameters/w"),
            (1003.0, 1, "system/rank_0/cpu_percent"),
            (1003.0, 1, "system/rank_1/cpu_percent"),
            (1003.5, 2, "test/accuracy"),
            (1003.5, 2, "epoch/train_loss"),
            (1003.5, 2, "sample"),
            (1003.5, 2, "digits"),
            (1003.5, 2, "predictions"),
            (1004.0, 2, "end"),
            (1004.0, 2, "_hparams_/session_end_info"),
        ]
    );
    let of = |tag: &str| {
        &values
            .iter()
            .find(|(_, _, value)| value.tag == tag)
            .expect(tag)
            .2
    };
    let words = |tag: &str| {
        of(tag)
            .tensor
            .as_ref()
            .map(|tensor| tensor.strings.concat())
    };
    assert_eq!(words("end"), Some(b"failed: the loss became NaN".to_vec()));
    let end = of("_hparams_/session_end_info").metadata.as_ref();
    let content = end
        .and_then(|end| end.plugin.as_ref())
        .expect("a plugin")
        .content
        .clone();
    let end = proto::Hparams::decode(&content[..])
        .expect("hparams")
        .end
        .expect("an end");
    assert_eq!((end.status, end.end_time_secs), (2, 1004.0));
    let png = |tag: &str| of(tag).image.as_ref().expect("an image").png.clone();
    let plain = fs::read(dir.path().join("predictions.png")).expect("a file");
    assert!(png("predictions") != plain && png("predictions").starts_with(b"\x89PNG"));
    assert_eq!(
        png("digits"),
        fs::read(dir.path().join("images/digits.png")).expect("a file")
    );
    let graph = events.iter().find_map(|event| match &event.what {
        Some(What::Graph(graph)) => Some(proto::Graph::decode(&graph[..]).expect("a graph")),
        _ => None,
    });
    let nodes = graph.expect("a graph").nodes;
    assert_eq!(
        (&*nodes[1].name, &*nodes[1].op, &*nodes[1].inputs),
        ("a/0", "Conv2d", &["input".to_owned()][..])
    );
}

#[test]
fn a_full_disk_ends_the_file_with_its_name() {
    let full = File::options()
        .write(true)
        .open("/dev/full")
        .expect("/dev/full");
    let folder = tempfile::tempdir().expect("folder");
    let out = Out {
        dir: Dir::open(folder.path()).expect("folder"),
        before: Vec::new(),
        path: "/dev/full".into(),
        file: BufWriter::new(full),
    };
    let mut events = TensorBoard {
        out: Some(out),
        ..TensorBoard::default()
    };
    let error = events
        .metrics(&[json!({"step": 1, "loss": 1.0})])
        .expect_err("a full disk");
    assert_eq!(error.kind(), ErrorKind::Failed);
    assert!(error.chain().contains("/dev/full"), "{}", error.chain());
}

#[test]
fn an_epochs_numbers_are_scalars_and_nothing_else_is() {
    let record = json!({
        "step": 10, "epoch": 1, "train_loss": 2.0, "test_loss": 1.0, "accuracy": 0.5, "train_s": 3, "elapsed_s": 4.0,
        "weights_sha256": "abc", "test_top5": 0.75, "nothing": null,
    });
    let values = scalars(&record);
    let values: BTreeMap<&str, Option<f32>> = values
        .iter()
        .map(|value| (&value.tag[..], value.simple_value))
        .collect();
    let expected = [
        ("epoch/train_loss", 2.0),
        ("epoch/train_s", 3.0),
        ("test/accuracy", 0.5),
        ("test/loss", 1.0),
        ("test/top5", 0.75),
    ];
    assert_eq!(
        values,
        expected.map(|(tag, value)| (tag, Some(value))).into()
    );
}

#[test]
fn a_value_does_not_break_the_table() {
    let run = json!({"settings": {"--init": "a|b\nc"}, "arguments": ["train"], "ranks": 2, "transport": "shm"});
    assert_eq!(
        table(&run),
        "| setting | value |\n|---|---|\n| --init | a\\|b c |\n| arguments | train |\n| ranks | 2 |\n| transport | shm |\n"
    );
}
