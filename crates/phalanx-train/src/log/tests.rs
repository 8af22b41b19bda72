use std::io::Read as _;
use std::path::Path;

use phalanx_base::files::Dir;
use phalanx_comm::{GroupOptions, ProcessGroup};
use serde_json::json;

use super::run::named;
use super::*;
use crate::error::ErrorKind;

fn context(group: ProcessGroup) -> RankContext {
    RankContext::new(group, 1)
}

fn alone() -> RankContext {
    context(ProcessGroup::threads(1, GroupOptions::default()).remove(0))
}

fn files(dir: &Dir) -> Files {
    Files {
        dir: dir.clone(),
        log: MetricsLog::create(dir, EVENTS_FILE, 1).ok(),
        run: json!({ "model": {} }),
    }
}

fn written(dir: &Path) -> Vec<Value> {
    let text = std::fs::read_to_string(dir.join(EVENTS_FILE)).expect("a file");
    let lines = text.lines().map(serde_json::from_str);
    lines.collect::<serde_json::Result<_>>().expect("JSON")
}

#[test]
fn a_full_disk_ends_the_events_and_not_the_metrics() {
    let dir = tempfile::tempdir().expect("folder");
    let open = Dir::open(dir.path()).expect("folder");
    let metrics = MetricsLog::create(&open, "metrics.jsonl", 1).expect("a log");
    let files = Files {
        log: MetricsLog::append(Path::new("/dev/full")).ok(),
        ..files(&open)
    };
    let mut log = RunLog::start(&alone(), metrics, Some(files), json!({}));
    for step in 0..3 {
        log.event(&json!({"step": step, "train_loss": 1.0}))
            .expect("written");
    }
    log.finish();
    let text = std::fs::read_to_string(dir.path().join("metrics.jsonl")).expect("a file");
    assert_eq!(text.lines().count(), 3);
}

#[test]
fn rank_0_writes_what_all_ranks_use_and_how_the_run_ended() {
    for fails in [false, true] {
        let dir = tempfile::tempdir().expect("folder");
        let open = Dir::open(dir.path()).expect("folder");
        let groups = ProcessGroup::threads(3, GroupOptions::default());
        std::thread::scope(|scope| {
            for group in groups {
                let open = &open;
                scope.spawn(move || {
                    let ctx = context(group);
                    let files = ctx.is_main().then(|| files(open));
                    let start = json!({"attempt": 1});
                    let mut log = RunLog::start(&ctx, MetricsLog::disabled(), files, start);
                    log.counters().steps.store(10 + ctx.rank() as u64, Relaxed);
                    log.counters().train.store(2_500_000_000, Relaxed);
                    log.flush();
                    ctx.group().barrier().expect("all there");
                    match fails {
                        true => log.failed_by(&Error::new(ErrorKind::Failed, "out of luck")),
                        false => log.finish(),
                    }
                });
            }
        });
        let events = written(dir.path());
        let kinds: Vec<&str> = events.iter().filter_map(|e| e["kind"].as_str()).collect();
        assert_eq!(kinds, ["start", "system", "finish"]);
        let ranks = events[1]["ranks"].as_array().expect("ranks");
        for (rank, record) in ranks.iter().enumerate() {
            assert_eq!(record["rank"], rank);
            assert_eq!(record["steps"], 10 + rank);
            assert_eq!(record["train_s"], 2.5);
            assert!(record["memory_bytes"].as_u64() > Some(1 << 20));
        }
        assert_eq!(ranks.len(), 3);
        let (status, error) = (&events[2]["status"], events[2]["error"].as_str());
        match fails {
            true => assert_eq!((status, error), (&json!("failed"), Some("out of luck"))),
            false => assert_eq!((status, error), (&json!("finished"), None)),
        }
    }
}

#[test]
fn rank_0_knows_the_ranks_that_there_are_now() {
    let dir = tempfile::tempdir().expect("folder");
    let open = Dir::open(dir.path()).expect("folder");
    let ranks: Vec<_> = ProcessGroup::threads(2, GroupOptions::default());
    let ctx: Vec<RankContext> = ranks.into_iter().map(context).collect();
    let start = |files| {
        let ctx = if files { &ctx[0] } else { &ctx[1] };
        let files = files.then(|| self::files(&open));
        RunLog::start(ctx, MetricsLog::disabled(), files, json!({}))
    };
    // A newcomer is alone at first, with a number of its own.
    let newcomer = RunLog::start(&alone(), MetricsLog::disabled(), None, json!({}));
    let mut first = start(true);
    newcomer.set_members(&ctx[1]);
    let mut newcomer = newcomer;
    newcomer.counters().train.store(4_000_000_000, Relaxed);
    newcomer.flush();
    // What is no record is left out.
    let store = ctx[0].group().store();
    store.set("system/1", b"[1]").expect("set");
    let all = |events: &[Value]| events.last().expect("one")["ranks"].clone();
    let mut system = System::new(&ctx[0], Arc::default());
    let numbers = |ranks: &Value| {
        let ranks = ranks.as_array().expect("ranks");
        let number = |rank: &Value| (rank["rank"].as_u64(), rank["train_s"].as_f64());
        ranks.iter().map(number).collect::<Vec<_>>()
    };
    assert_eq!(numbers(&system.all()["ranks"]), [(Some(0), Some(0.0))]);
    newcomer.flush();
    first.finish();
    let events: Vec<Value> = written(dir.path());
    let systems: Vec<Value> = events
        .into_iter()
        .filter(|e| e["kind"] == "system")
        .collect();
    let found = numbers(&all(&systems));
    assert_eq!(found, [(Some(0), Some(0.0)), (Some(1), Some(4.0))]);
}

#[test]
fn too_short_a_time_does_not_measure_the_processor() {
    let mut system = System::new(&alone(), Arc::default());
    let percent = |system: &mut System| system.all()["ranks"][0]["cpu_percent"].as_f64();
    assert_eq!(percent(&mut system), None);
    let until = Instant::now() + Duration::from_millis(300);
    let mut sum = 0u64;
    while Instant::now() < until {
        sum = std::hint::black_box(sum + 1);
    }
    // Since it began: a part of an interval is better than nothing.
    assert!(percent(&mut system) > Some(1.0), "{sum}");
    system.end_interval();
    let whole = percent(&mut system);
    assert!(whole > Some(1.0));
    assert_eq!(percent(&mut system), whole);
}

#[test]
fn a_disk_that_hangs_delays_nobody_and_what_is_dropped_is_counted() {
    let dir = tempfile::tempdir().expect("folder");
    let open = Dir::open(dir.path()).expect("folder");
    let fifo = dir.path().join("fifo");
    let made = std::process::Command::new("mkfifo").arg(&fifo).status();
    assert!(made.expect("mkfifo").success());
    let files = Files {
        log: MetricsLog::append(&fifo).ok(),
        ..files(&open)
    };
    let mut log = RunLog::start(&alone(), MetricsLog::disabled(), Some(files), json!({}));
    // A pipe takes 64 KiB.
    let text = "x".repeat(1 << 10);
    for _ in 0..3 * QUEUE {
        log.notice(0, &text);
    }
    let dropped = log
        .thread
        .as_ref()
        .map(|thread| thread.dropped.load(Relaxed));
    // All but those in the queue and in the pipe; a thread that has not begun yet has taken none.
    assert!(dropped.is_some_and(|n| (QUEUE as u64..=2 * QUEUE as u64 + 1).contains(&n)));
    let reader = std::thread::spawn(move || {
        let mut pipe = std::fs::File::open(fifo).expect("the pipe");
        let (mut bytes, mut all) = ([0; 1 << 16], 0);
        while let Ok(read @ 1..) = pipe.read(&mut bytes) {
            all += read;
        }
        all
    });
    log.finish();
    drop(log);
    assert!(reader.join().expect("read") > QUEUE << 10);
}

#[test]
fn names_of_the_trainer_are_refused() {
    let dir = tempfile::tempdir().expect("folder");
    let open = Dir::open(dir.path()).expect("folder");
    let metrics = MetricsLog::create(&open, "metrics.jsonl", 1).expect("a log");
    let mut log = RunLog::start(&alone(), metrics, Some(files(&open)), json!({}));
    log.values((7, 1), &[("top5", 0.5), ("bad", f64::NAN)])
        .expect("logged");
    let refused = log
        .values((7, 1), &[("loss", 0.5)])
        .expect_err("the trainer's");
    assert_eq!(refused.kind(), ErrorKind::Usage);
    let text = std::fs::read_to_string(dir.path().join("metrics.jsonl")).expect("a file");
    let record: Value = serde_json::from_str(&text).expect("one record");
    assert_eq!(
        (&record["step"], &record["top5"], &record["bad"]),
        (&json!(7), &json!(0.5), &json!(null))
    );
    let refused = log.image((7, 1), "digits", b"GIF89a").expect_err("no PNG");
    assert_eq!(refused.kind(), ErrorKind::Usage);
}

#[test]
fn nodes_are_called_by_their_layers() {
    let node = |operation, params: &[&str], inputs: &[Option<usize>]| GraphNode {
        operation,
        params: params.iter().map(|name| (*name).to_owned()).collect(),
        inputs: inputs.to_vec(),
        shape: vec![2],
    };
    let graph = named(vec![
        node("Conv2d", &["a.0.weight", "a.0.bias"], &[None]),
        node("Relu", &[], &[Some(0)]),
        node("Conv2d", &["a.0.weight"], &[Some(1)]),
        node("Add", &[], &[Some(2), Some(1)]),
    ]);
    let names: Vec<&str> = graph.iter().map(|named| &*named.name).collect();
    assert_eq!(names, ["a.0", "relu_1", "a.0_2", "add_3"]);
    assert_eq!(graph[0].inputs, ["input"]);
    assert_eq!(graph[3].inputs, ["a.0_2", "relu_1"]);
}
