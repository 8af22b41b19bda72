//! Records beside those of TensorBoard itself: `tools/ci/tensorboard.py --fixtures` printed them (TensorBoard 2.21).

use std::collections::BTreeMap;
use std::fs::File;
use std::io::BufWriter;
use std::time::Instant;

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

/// Events that go to a full disk.
pub(crate) fn on_a_full_disk() -> Events {
    let full = File::options().write(true).open("/dev/full");
    Events {
        path: "/dev/full".into(),
        out: BufWriter::new(full.expect("/dev/full")),
        flushed: Instant::now(),
        started: (Instant::now(), 1.5),
    }
}

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
    let values = scalars(&json!({"step": 7, "epoch": 1, "loss": 0.25})).expect("an object");
    same(2.5, 7, What::Summary(Summary { values }), SCALAR);
    let settings = [
        ("--lr", "0.5"),
        ("--sampler", "exact"),
        ("data", "digits"),
        ("no", "--save-every"),
    ];
    let settings: BTreeMap<_, _> = settings
        .map(|(k, v)| (k.to_owned(), v.to_owned()))
        .into_iter()
        .collect();
    let values = vec![
        text("settings", "| a |"),
        on_a_full_disk().hparams(&settings),
    ];
    same(2.5, 0, What::Summary(Summary { values }), PLUGINS);
}

#[test]
fn histograms_count_every_number() {
    let infinite = [f32::NAN, f32::INFINITY];
    let histogram = histogram::of(&[&infinite[..], &[-1.0, 0.0, 1.0, 2.0]].concat());
    let value = proto::Value {
        tag: "gradients/w".into(),
        histogram: Some(histogram.clone()),
        ..proto::Value::default()
    };
    let summary = Summary {
        values: vec![value],
    };
    same(2.5, 7, What::Summary(summary), HISTOGRAM);
    assert_eq!(histogram.bucket.iter().sum::<f64>(), 4.0);
    let equal = histogram::of(&[0.5; 3]);
    assert_eq!((equal.bucket, equal.bucket_limit), (vec![3.0], vec![0.5]));
    assert_eq!(histogram::of(&infinite), proto::Histogram::default());
}

#[test]
fn an_epochs_numbers_are_scalars_and_nothing_else_is() {
    let record = json!({
        "step": 10, "epoch": 1, "train_loss": 2.0, "test_loss": 1.0, "accuracy": 0.5, "train_s": 3, "elapsed_s": 4.0,
        "weights_sha256": "abc", "test_top5": 0.75, "nothing": null,
    });
    let values = scalars(&record).expect("an object");
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
    let settings = [("--init".to_owned(), "a|b\nc".to_owned())].into();
    assert_eq!(
        table(&settings),
        "| setting | value |\n|---|---|\n| --init | a\\|b c |\n"
    );
}
