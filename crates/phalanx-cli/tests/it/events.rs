//! TensorBoard's event files beside `metrics.jsonl`, by a reader of the test's own.

use std::collections::BTreeMap;
use std::path::Path;

use serde_json::Value;

use crate::support::succeed;

/// One record.
#[derive(Debug, Default)]
struct Event {
    wall_time: f64,
    step: u64,
    version: String,
    starts: bool,
    scalars: Vec<(String, f32)>,
    /// Tags that have no number, with all the bytes of their value.
    others: Vec<(String, Vec<u8>)>,
    /// Name, operation and inputs of each node.
    graph: Vec<[String; 3]>,
}

/// CRC-32C bit by bit, masked as in a TFRecord.
fn masked_crc(data: &[u8]) -> u32 {
    let mut crc = u32::MAX;
    for byte in data {
        crc ^= u32::from(*byte);
        for _ in 0..8 {
            crc = (crc >> 1) ^ if crc & 1 == 1 { 0x82f6_3b78 } else { 0 };
        }
    }
    (!crc).rotate_right(15).wrapping_add(0xa282_ead8)
}

fn take<'a>(bytes: &mut &'a [u8], n: usize) -> &'a [u8] {
    let (taken, rest) = bytes.split_at(n);
    *bytes = rest;
    taken
}

fn varint(bytes: &mut &[u8]) -> u64 {
    let mut value = 0;
    for shift in (0..).step_by(7) {
        let byte = take(bytes, 1)[0];
        value |= u64::from(byte & 0x7f) << shift;
        if byte < 0x80 {
            break;
        }
    }
    value
}

/// The fields of a message: number, and its bytes or the eight of a number.
fn fields(mut message: &[u8]) -> Vec<(u64, Vec<u8>)> {
    let mut fields = Vec::new();
    while !message.is_empty() {
        let key = varint(&mut message);
        let value = match key & 7 {
            0 => varint(&mut message).to_le_bytes().to_vec(),
            1 => take(&mut message, 8).to_vec(),
            2 => {
                let length = varint(&mut message) as usize;
                take(&mut message, length).to_vec()
            }
            5 => take(&mut message, 4).to_vec(),
            other => panic!("wire type {other}"),
        };
        fields.push((key >> 3, value));
    }
    fields
}

fn eight(bytes: &[u8]) -> [u8; 8] {
    bytes.try_into().expect("eight bytes")
}

fn graph(bytes: &[u8]) -> Vec<[String; 3]> {
    let nodes = fields(bytes).into_iter().filter(|(n, _)| *n == 1);
    let nodes = nodes.map(|(_, node)| {
        let fields = fields(&node);
        let texts = |number| {
            let all = fields.iter().filter(move |(n, _)| *n == number);
            let texts = all.map(|(_, text)| String::from_utf8(text.clone()).expect("text"));
            texts.collect::<Vec<_>>().join(" ")
        };
        [texts(1), texts(2), texts(3)]
    });
    nodes.collect()
}

fn event(message: &[u8]) -> Event {
    let text = |bytes: &[u8]| String::from_utf8(bytes.to_vec()).expect("text");
    let mut event = Event::default();
    for (number, bytes) in fields(message) {
        match number {
            1 => event.wall_time = f64::from_le_bytes(eight(&bytes)),
            2 => event.step = u64::from_le_bytes(eight(&bytes)),
            3 => event.version = text(&bytes),
            5 => {
                for (_, value) in fields(&bytes) {
                    let parts = fields(&value);
                    let part = |n| parts.iter().find(|(number, _)| *number == n);
                    let tag = text(&part(1).expect("a tag").1);
                    match part(2) {
                        Some((_, number)) => {
                            let number = number[..].try_into().expect("four bytes");
                            event.scalars.push((tag, f32::from_le_bytes(number)));
                        }
                        None => event.others.push((tag, value)),
                    }
                }
            }
            4 => event.graph = graph(&bytes),
            7 => event.starts = fields(&bytes) == [(1, 1u64.to_le_bytes().to_vec())],
            other => panic!("field {other} of an event"),
        }
    }
    event
}

/// The events of a run's files, in the order of their names.
fn files(run: &Path) -> Vec<Vec<Event>> {
    let entries = std::fs::read_dir(run).expect("folder").flatten();
    let mut names: Vec<_> = entries.map(|entry| entry.path()).collect();
    names.retain(|path| path.to_string_lossy().contains("events.out.tfevents."));
    names.sort();
    let read = |path| {
        let bytes = std::fs::read(path).expect("a file");
        let (mut rest, mut events) = (&bytes[..], Vec::new());
        while !rest.is_empty() {
            let length = take(&mut rest, 8);
            let crc = |bytes: &[u8]| u32::from_le_bytes(bytes.try_into().expect("four bytes"));
            assert_eq!(crc(take(&mut rest, 4)), masked_crc(length));
            let data = take(&mut rest, u64::from_le_bytes(eight(length)) as usize);
            assert_eq!(crc(take(&mut rest, 4)), masked_crc(data));
            events.push(event(data));
        }
        assert_eq!(events[0].version, "brain.Event:2");
        assert!(events[1].starts, "a session's start comes first");
        events
    };
    names.into_iter().map(read).collect()
}

type Scalars = BTreeMap<String, Vec<(u64, f32)>>;

/// What TensorBoard shows of the training: a later start drops what was written of its step and later ones.
fn shown(files: &[Vec<Event>]) -> Scalars {
    let mut shown = Scalars::new();
    for event in files.iter().flatten() {
        if event.starts {
            let keep = |of: &mut Vec<(u64, f32)>| of.retain(|(step, _)| *step < event.step);
            shown.values_mut().for_each(keep);
        }
        let others = event.scalars.iter();
        for (tag, value) in others.filter(|(tag, _)| !tag.starts_with("system/")) {
            let of = shown.entry(tag.clone()).or_default();
            of.push((event.step, *value));
        }
    }
    shown
}

/// What `metrics.jsonl` has.
fn measured(run: &Path) -> Scalars {
    let text = std::fs::read_to_string(run.join("metrics.jsonl")).expect("metrics.jsonl");
    let mut measured = Scalars::new();
    for line in text.lines() {
        let record: Value = serde_json::from_str(line).expect("JSON");
        for (name, value) in record.as_object().expect("an object") {
            let tag = match &name[..] {
                "step" | "epoch" | "elapsed_s" | "weights_sha256" => continue,
                "test_loss" => "test/loss".to_owned(),
                "accuracy" => "test/accuracy".to_owned(),
                name if record["loss"].is_null() => format!("epoch/{name}"),
                name => format!("train/{name}"),
            };
            let step = record["step"].as_u64().expect("a step");
            let value = value.as_f64().expect("a number") as f32;
            measured.entry(tag).or_default().push((step, value));
        }
    }
    measured
}

/// `train mnist` of 10 steps an epoch into `out`.
fn train(dir: &Path, more: &[&str]) -> String {
    let args = "train mnist --output-dir out --log-interval 1 --data synthetic:640 --global-batch-size 64 \
                --threads 1 --test-batch-size 50 --epochs 2";
    let args: Vec<&str> = args.split_whitespace().collect();
    succeed(&[&args[..], more].concat(), dir).1
}

#[test]
fn event_files_have_the_scalars_of_the_metrics_and_the_settings() {
    let dir = tempfile::tempdir().expect("folder");
    let out = dir.path().join("out");
    train(dir.path(), &["--nproc-per-node", "2"]);
    let written = files(&out);
    assert_eq!(written.len(), 1, "rank 0 writes one file");
    let scalars = shown(&written);
    assert_eq!(scalars, measured(&out));
    for tag in [
        "train/loss",
        "train/lr",
        "train/exposed_comm_ms",
        "epoch/train_loss",
        "test/loss",
        "test/accuracy",
    ] {
        let expected = if tag.starts_with("train/") { 20 } else { 2 };
        assert_eq!(scalars[tag].len(), expected, "{tag}");
    }
    let is_of_training = |(tag, _): &(String, f32)| !tag.starts_with("system/");
    let timed = written[0]
        .iter()
        .filter(|event| event.scalars.iter().any(is_of_training));
    let times: Vec<f64> = timed.map(|event| event.wall_time).collect();
    assert!(times.is_sorted(), "{times:?}");
    let now = std::time::UNIX_EPOCH.elapsed().expect("a clock");
    let age = now.as_secs_f64() - times[0];
    assert!((0.0..600.0).contains(&age), "{age}");
    let others: BTreeMap<_, _> = written[0].iter().flat_map(|e| e.others.clone()).collect();
    let text = |tag: &str| String::from_utf8_lossy(&others[tag]).into_owned();
    let settings = text("settings");
    for line in ["| --lr | 0.05 |", "| ranks | 2 |", "| --log-interval | 1 |"] {
        assert!(settings.contains(line), "no {line:?} in {settings}");
    }
    assert!(text("_hparams_/session_start_info").contains("global-batch-size"));
    assert!(others.contains_key("_hparams_/session_end_info"));
    assert!(text("end").contains("finished"));
    let all = written[0].iter().flat_map(|event| &event.scalars);
    for tag in ["system/rank_0/cpu_percent", "system/rank_1/memory_bytes"] {
        assert!(all.clone().any(|(name, _)| name == tag), "{tag}");
    }
    // The predictions of each epoch.
    let images = written[0]
        .iter()
        .filter(|event| event.others.iter().any(|(tag, _)| tag == "predictions"));
    assert_eq!(images.map(|event| event.step).collect::<Vec<_>>(), [10, 20]);
    let graphs: Vec<_> = written[0].iter().filter(|e| !e.graph.is_empty()).collect();
    let names: Vec<&str> = graphs[0].graph.iter().map(|[name, ..]| &name[..]).collect();
    assert_eq!(names[..3], ["input", "conv1", "conv2"]);
    assert_eq!(graphs[0].graph[1], ["conv1", "Conv2d", "input"]);
    assert_eq!(graphs.len(), 1);
    // Another run in the same folder does not keep them.
    train(dir.path(), &["--overwrite"]);
    let written = files(&out);
    assert_eq!(written.len(), 1);
    assert_eq!(shown(&written), measured(&out));
}

#[test]
fn a_resumed_run_drops_what_was_written_after_its_checkpoint() {
    let dir = tempfile::tempdir().expect("folder");
    let out = dir.path().join("out");
    // Checkpoints after steps 10 (an epoch's end) and 14.
    train(dir.path(), &["--keep", "9", "--stop-after", "14"]);
    for checkpoint in ["step-000000014", "step-000000010"] {
        let checkpoint = format!("out/checkpoints/{checkpoint}.json");
        let more = ["--keep", "9", "--stop-after", "3", "--resume"];
        train(dir.path(), &[&more[..], &[&checkpoint]].concat());
        let written = files(&out);
        assert_eq!(written.len(), 1, "the last process's");
        assert_eq!(shown(&written), measured(&out));
    }
    train(dir.path(), &["--resume", "auto"]);
    let written = files(&out);
    let scalars = shown(&written);
    assert_eq!(scalars, measured(&out));
    let steps = |tag: &str| -> Vec<u64> { scalars[tag].iter().map(|(step, _)| *step).collect() };
    assert_eq!(steps("train/loss"), (0..20).collect::<Vec<_>>());
    assert_eq!(steps("test/accuracy"), [10, 20]);
}

#[test]
fn watching_counts_every_parameter_and_gradient_and_changes_no_bit() {
    let dir = tempfile::tempdir().expect("folder");
    let go = |name: &str, more: &[&str]| {
        let at = dir.path().join(name);
        std::fs::create_dir(&at).expect("folder");
        let said = train(&at, &[&["--nproc-per-node", "2"], more].concat());
        let out = at.join("out");
        let summary = std::fs::read_to_string(out.join("summary.json")).expect("summary.json");
        let summary: Value = serde_json::from_str(&summary).expect("JSON");
        // By tag, the steps and how many values were counted.
        let mut counts: BTreeMap<String, Vec<(u64, f64)>> = BTreeMap::new();
        for event in files(&out).iter().flatten() {
            for (tag, value) in &event.others {
                for (_, histogram) in fields(value).iter().filter(|(n, _)| *n == 5) {
                    let buckets = fields(histogram).into_iter().find(|(n, _)| *n == 7);
                    let buckets = buckets.expect("buckets").1;
                    let count = buckets
                        .chunks(8)
                        .map(|b| f64::from_le_bytes(eight(b)))
                        .sum();
                    counts
                        .entry(tag.clone())
                        .or_default()
                        .push((event.step, count));
                }
            }
        }
        (summary["weights_sha256"].clone(), counts, said)
    };
    let (weights, counts, _) = go("off", &[]);
    assert!(counts.is_empty());
    let (both, counts, _) = go("both", &["--watch", "5"]);
    assert_eq!(both, weights);
    assert_eq!(counts.len(), 2 * 8, "{counts:?}");
    for kind in ["parameters", "gradients"] {
        let bias: Vec<_> = [0, 5, 10, 15].map(|step| (step, 10.0)).into();
        assert_eq!(counts[&format!("{kind}/fc2.bias")], bias);
        let first = counts.iter().filter(|(tag, _)| tag.starts_with(kind));
        let all: f64 = first.map(|(_, counted)| counted[0].1).sum();
        assert_eq!(all, 1_199_882.0);
    }
    let (part, counts, said) = go("part", &["--watch", "10", "--exchange", "reduce-scatter"]);
    assert_eq!(part, weights);
    assert_eq!(counts.len(), 8, "{counts:?}");
    assert_eq!(
        said.matches("watch    parameters only").count(),
        1,
        "{said}"
    );
}
