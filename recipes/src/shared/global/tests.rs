//! A training on global tensors beside the same one written down in f64.

use std::cell::Cell;
use std::path::Path;
use std::sync::Mutex;

use clap::Parser;
use phalanx_comm::{GroupOptions, ProcessGroup};
use phalanx_nn::layers::{Act, BatchNorm};
use phalanx_nn::optim::Sgd;
use phalanx_nn::{Init, Layout, ParamId, Value};

use super::*;

/// Samples: what a weight is multiplied by, and what is normalised.
type Sample = (f32, f32);

/// The gradient of this one is infinite, its loss is not.
const BAD: Sample = (1e30, 3.0);
const SCALE: f32 = 1e10;
const FIRST_WEIGHT: f32 = 1e-3;

fn data() -> Arc<Vec<Sample>> {
    let mut all: Vec<Sample> = (0..12)
        .map(|i| ((i as f32 - 3.0) * 1e-10, (i * i % 7) as f32))
        .collect();
    all[5] = BAD;
    Arc::new(all)
}

struct Model {
    weight: ParamId,
    norm: BatchNorm,
}

struct Plane<'t> {
    /// The samples of all ranks, step by step.
    steps: &'t Mutex<Vec<Vec<Sample>>>,
    step: Cell<usize>,
}

impl Task for Plane<'_> {
    type Data = Vec<Sample>;
    type Model = Model;

    fn scores<'s>(&self, model: &Model, batch: &Rows<'s, Vec<Sample>>) -> Result<Global<'s>> {
        let (x, z): (Vec<f32>, Vec<f32>) = batch.data.iter().copied().unzip();
        let x = batch.tensor(&x, &[1])?;
        let x = x.linear(model.weight, None, Act::None)?.scale(SCALE)?;
        Ok(x.add(model.norm.forward(batch.tensor(&z, &[1])?)?)?)
    }

    fn loss<'s>(&self, scores: Global<'s>, batch: &Rows<'s, Vec<Sample>>) -> Result<Global<'s>> {
        let (mut steps, at) = (self.steps.lock().expect("no panic"), self.step.get());
        let len = steps.len().max(at + 1);
        steps.resize(len, Vec::new());
        steps[at].extend_from_slice(&batch.data[..batch.own]);
        self.step.set(at + 1);
        Ok(scores.mean(&[], false)?)
    }

    fn measure(&self, scores: Tensor<'_>, _: &Vec<Sample>, _: usize) -> Result<Measure> {
        Ok(Measure::of_loss(scores.sum(&[], false)?))
    }
}

struct Quiet;

impl Reporter for Quiet {}

#[derive(Parser)]
struct Cli {
    #[command(flatten)]
    settings: Settings,
}

/// Weight and running mean of each rank after two epochs of two ranks; none of a training that was stopped.
fn train(
    dir: &Path,
    clip: Option<f64>,
    args: &[&str],
    steps: &Mutex<Vec<Vec<Sample>>>,
) -> Vec<Option<[f32; 2]>> {
    let dir = dir.join("run").display().to_string();
    let typed = ["test", "--lr", "1e-4", "--epochs", "2"];
    let more = ["--global-batch-size", "4", "--output-dir", &dir];
    let settings = Cli::parse_from(typed.iter().chain(&more).chain(args)).settings;
    let rank = |group: ProcessGroup| -> Result<Option<[f32; 2]>> {
        let ctx = RankContext {
            phase_limit: Duration::from_secs(60),
            threads: 1,
            local_rank: group.rank(),
            prefix: None,
            started: Instant::now(),
            group,
        };
        let setup = Setup {
            name: "test",
            title: "a plane".to_owned(),
            unit: "samples",
            data: "samples".to_owned(),
            content: "samples".to_owned(),
            mesh: Mesh::of_data(2),
            parallel: Parallel::new(),
            model: Box::new(|scope| Model {
                weight: scope.param("w", &[1, 1], Layout::Same, Init::Constant(FIRST_WEIGHT)),
                norm: BatchNorm::new(scope.enter("norm"), 1),
            }),
            optimizer: Box::new(|params, lr| Box::new(Sgd::new(params, lr))),
            optimizer_title: "SGD".to_owned(),
            schedule: None,
            clip,
            shaping: Vec::new(),
            files: Files {
                model: "test".to_owned(),
                about: Vec::new(),
                weights: Some("test.safetensors".to_owned()),
                accuracies: None,
                each_epoch: false,
            },
            reporter: Box::new(Quiet),
        };
        let task = Plane {
            steps,
            step: Cell::new(0),
        };
        let train = data();
        let test = Arc::new(vec![(1e-10, 1.0); 3]);
        let mut run = GlobalRun::open(&ctx, &settings, setup, task, &train)?;
        if !run.train(&train, &test)? {
            return Ok(None);
        }
        let local = run.weights.local();
        let mean = local.buffer_ids().next().expect("a running mean");
        let made = [local.get(run.model.weight)[0], local.buffer(mean)[0]];
        let whole = run.whole()?;
        run.finish(whole.as_ref())?;
        Ok(Some(made))
    };
    std::thread::scope(|scope| {
        let groups = ProcessGroup::threads(2, GroupOptions::default());
        let all: Vec<_> = groups
            .into_iter()
            .map(|group| scope.spawn(|| rank(group)))
            .collect();
        let all = all.into_iter().map(|rank| rank.join().expect("no panic"));
        all.map(|made| made.expect("trained")).collect()
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
        let made = train(whole.path(), clip, &[], &steps);
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
        assert_eq!(
            train(halves.path(), clip, &stop, &Mutex::default()),
            [None; 2]
        );
        let rest = train(
            halves.path(),
            clip,
            &["--resume", "auto"],
            &Mutex::default(),
        );
        assert_eq!(rest, made);
        assert_eq!(skipped(halves.path()).0, json!(2));
    }
}
