//! A training on a mesh beside the same one written down in f64, and what it resumes.

use std::path::Path;
use std::sync::{Arc, Mutex};

use clap::Parser;
use phalanx_comm::{GroupOptions, ProcessGroup};
use phalanx_global::Parallel;
use phalanx_nn::layers::{Act, BatchNorm};
use phalanx_nn::optim::Sgd;
use phalanx_nn::{Init, Layout, ParamId, Value};
use phalanx_train::{
    ErrorKind, Job, Measure, Mesh, MicroBatch, OnMesh, RankContext, Result, Settings,
};
use serde_json::json;

/// Samples: what a weight is multiplied by, and what is normalised.
type Sample = (f32, f32);

/// The gradient of this one is infinite, its loss is not.
const BAD: Sample = (1e30, 3.0);
const SCALE: f32 = 1e10;
const FIRST_WEIGHT: f32 = 1e-3;

fn data(bad: bool) -> Arc<Vec<Sample>> {
    let mut all: Vec<Sample> = (0..12)
        .map(|i| ((i as f32 - 3.0) * 1e-10, (i * i % 7) as f32))
        .collect();
    if bad {
        all[5] = BAD;
    }
    Arc::new(all)
}

struct Model {
    weight: ParamId,
    norm: BatchNorm,
}

fn scores<'s>(
    model: &Model,
    batch: &MicroBatch<'s, Vec<Sample>, OnMesh>,
) -> Result<phalanx_global::Global<'s>> {
    let (x, z): (Vec<f32>, Vec<f32>) = batch.data().iter().copied().unzip();
    let shape = [batch.samples(), 1];
    let x = batch.input(&x, &shape)?;
    let x = x.linear(model.weight, None, Act::None)?.scale(SCALE)?;
    x.add(model.norm.forward(batch.input(&z, &shape)?)?)
}

#[derive(Parser)]
struct Cli {
    #[command(flatten)]
    settings: Settings,
}

/// Weight and running mean of each rank after two epochs of `ranks` ranks; none of a training that was stopped.
fn train(
    dir: &Path,
    (ranks, bad): (usize, bool),
    clip: Option<f64>,
    args: &[&str],
    steps: &Mutex<Vec<Vec<Sample>>>,
) -> Vec<Option<[f32; 2]>> {
    let dir = dir.join("run").display().to_string();
    let typed = ["test", "--lr", "1e-4", "--epochs", "2"];
    let more = ["--global-batch-size", "4", "--output-dir", &dir];
    let settings = Cli::parse_from(typed.iter().chain(&more).chain(args)).settings;
    let rank = |group: ProcessGroup| -> Result<[f32; 2]> {
        let ctx = RankContext::new(group, 1);
        let train = data(bad);
        let test = Arc::new(vec![(1e-10, 1.0); 3]);
        let job = Job::new("test", &ctx, &settings);
        let model = |scope: &mut phalanx_nn::Scope<'_>| Model {
            weight: scope.param("w", &[1, 1], Layout::Same, Init::Constant(FIRST_WEIGHT)),
            norm: BatchNorm::new(scope.enter("norm"), 1),
        };
        let mut builder = job.trainer(&train, model, Sgd::new);
        if let Some(limit) = clip {
            builder = builder.clip_grad_norm(limit);
        }
        let mut trainer = builder
            .on(Mesh::data_parallel(ranks), Parallel::new())
            .start()?;
        let mut at = 0;
        for _epoch in trainer.epochs() {
            for batch in trainer.batches(&train)? {
                trainer.step(&batch, |model, batch| {
                    let mut steps = steps.lock().expect("no panic");
                    let len = steps.len().max(at + 1);
                    steps.resize(len, Vec::new());
                    steps[at].extend_from_slice(&batch.data()[..batch.samples()]);
                    drop(steps);
                    scores(model, &batch)?.mean(&[], false)
                })?;
                at += 1;
            }
            trainer.evaluate(&test, |model, batch| {
                match batch.own_rows(scores(model, &batch)?)? {
                    Some(own) => Ok(Measure::of_loss(own.sum(&[], false)?)),
                    None => Ok(Measure::empty()),
                }
            })?;
        }
        let (model, local) = (trainer.model(), trainer.params());
        let mean = local.buffer_ids().next().expect("a running mean");
        let made = [local.get(model.weight)[0], local.buffer(mean)[0]];
        trainer.finish()?;
        Ok(made)
    };
    std::thread::scope(|scope| {
        let groups = ProcessGroup::threads(ranks, GroupOptions::default());
        let all: Vec<_> = groups
            .into_iter()
            .map(|group| scope.spawn(|| rank(group)))
            .collect();
        let all = all.into_iter().map(|rank| rank.join().expect("no panic"));
        all.map(|made| match made {
            Ok(made) => Some(made),
            Err(error) if error.kind() == ErrorKind::Stopped => None,
            Err(error) => panic!("{error:?}"),
        })
        .collect()
    })
}

fn skipped(dir: &Path) -> (serde_json::Value, usize) {
    let read = |name: &str| std::fs::read_to_string(dir.join("run").join(name)).expect(name);
    let summary: serde_json::Value = serde_json::from_str(&read("summary.json")).expect("JSON");
    let events = read("events.jsonl");
    let lines = events.lines();
    let lines = lines.filter(|line| {
        line.contains("is skipped on all ranks: rank ")
            && line.contains(": the gradient of w is not finite")
    });
    (summary["skipped_steps"].clone(), lines.count())
}

#[test]
fn a_step_with_an_infinite_gradient_is_left_out_on_all_ranks() {
    for clip in [None, Some(100.0)] {
        let [whole, halves] = [(); 2].map(|()| tempfile::tempdir().expect("folder"));
        let steps = Mutex::default();
        let made = train(whole.path(), (2, true), clip, &[], &steps);
        let [mut weight, mut mean] = [f64::from(FIRST_WEIGHT), 0.0];
        let steps = steps.into_inner().expect("no panic");
        assert_eq!(steps.iter().map(Vec::len).collect::<Vec<_>>(), [4; 6]);
        for batch in steps.iter().filter(|batch| !batch.contains(&BAD)) {
            let of = |value: fn(&Sample) -> f32| {
                let sum: f64 = batch.iter().map(|sample| f64::from(value(sample))).sum();
                sum / batch.len() as f64
            };
            weight -= 1e-4 * f64::from(SCALE) * of(|sample| sample.0);
            mean = 0.9 * mean + 0.1 * of(|sample| sample.1);
        }
        for made in &made {
            let [w, m] = made.expect("trained");
            assert!(
                (f64::from(w) - weight).abs() < 1e-6,
                "{w} instead of {weight}"
            );
            assert!((f64::from(m) - mean).abs() < 1e-5, "{m} instead of {mean}");
        }
        assert_eq!(made[0], made[1]);
        assert_eq!(skipped(whole.path()), (json!(2), 2));

        // The count goes on where it was.
        let stop = ["--save-every", "1", "--stop-after", "4"];
        let stopped = train(halves.path(), (2, true), clip, &stop, &Mutex::default());
        assert_eq!(stopped, [None; 2]);
        let resume = ["--resume", "auto"];
        let rest = train(halves.path(), (2, true), clip, &resume, &Mutex::default());
        assert_eq!(rest, made);
        assert_eq!(skipped(halves.path()).0, json!(2));
    }
}

#[test]
fn micro_batches_accumulate_the_gradient_of_the_whole_batch() {
    let folders = [(); 3].map(|()| tempfile::tempdir().expect("folder"));
    let nothing = Mutex::default();
    // 2 ranks of 2 samples, of 1 and 1, and one rank of 4 in micro-batches of 2 and 2 with another split.
    let runs: [(usize, &[&str]); 3] = [
        (2, &[]),
        (2, &["--accumulate", "2"]),
        (1, &["--accumulate", "2"]),
    ];
    let made: Vec<f32> = runs
        .iter()
        .zip(&folders)
        .map(|((ranks, args), dir)| {
            let made = train(dir.path(), (*ranks, false), None, args, &nothing);
            made[0].expect("trained")[0]
        })
        .collect();
    for weight in &made[1..] {
        assert!((weight - made[0]).abs() < 1e-7 * made[0].abs(), "{made:?}");
    }
}
