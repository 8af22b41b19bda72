//! How often the loss is recorded and printed, and how a run is named that fails.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use phalanx_data::Dataset;
use phalanx_nn::layers::Linear;
use phalanx_nn::optim::Sgd;
use phalanx_train::{Error, ErrorKind, Job, Measure, RankContext, Reporter, Result, StepInfo};
use serde_json::{Value, json};

use crate::again::json as read;
use crate::trainer::{Sample, data, loss, plane, ranks, ranks_with, settings};

/// Keeps the steps that a program would print.
struct Printed;

static PRINTED: Mutex<Vec<usize>> = Mutex::new(Vec::new());

impl Reporter for Printed {
    fn on_step(&mut self, ctx: &RankContext, facts: &StepInfo) -> Option<String> {
        if facts.logged && ctx.is_main() {
            PRINTED.lock().expect("no panic").push(facts.index);
        }
        None
    }
}

/// The steps whose loss a run of `epochs` epochs of `steps` steps has recorded, and those that are printed.
fn run(epochs: usize, steps: usize, more: &[&str]) -> (Vec<u64>, Vec<usize>) {
    let dir = tempfile::tempdir().expect("folder");
    let epochs = epochs.to_string();
    let args = [&["--global-batch-size", "8", "--epochs", &epochs], more].concat();
    let settings = settings(dir.path(), &args);
    let train = |job: &Job<'_>| -> Result<()> {
        let train = data(8 * steps);
        let builder = job.trainer(&train, plane, Sgd::new);
        let mut trainer = builder.reporter(Box::new(Printed)).start()?;
        for _ in trainer.epochs() {
            for batch in trainer.batches(&train)? {
                trainer.step(&batch, |model, batch| loss(model, &batch))?;
            }
        }
        trainer.finish().map(drop)
    };
    for rank in ranks_with(&settings, 2, train) {
        rank.expect("trained");
    }
    let metrics = std::fs::read_to_string(dir.path().join("run/metrics.jsonl")).expect("metrics");
    let records = metrics
        .lines()
        .map(|line| serde_json::from_str(line).expect("JSON"));
    let losses = records.filter(|record: &Value| record["loss"].is_f64());
    let recorded = losses
        .filter_map(|record| record["step"].as_u64())
        .collect();
    (
        recorded,
        std::mem::take(&mut PRINTED.lock().expect("no panic")),
    )
}

#[test]
fn every_run_has_a_curve_and_prints_at_its_own_interval() {
    let all = |steps: u64| (0..steps).collect::<Vec<_>>();
    assert_eq!(run(1, 5, &[]), (all(5), vec![0]));
    assert_eq!(run(1, 88, &[]), (all(88), vec![0]));
    assert_eq!(run(2, 47, &[]), (all(94), vec![0, 0]));
    assert_eq!(run(1, 5, &["--log-interval", "3"]), (all(5), vec![0, 3]));
    let (recorded, printed) = run(3, 469, &[]);
    assert_eq!(recorded, all(3 * 469));
    assert_eq!(printed, [0, 100, 200, 300, 400].repeat(3));
    // A collective a record: fewer, and what is printed among them.
    let shards = ["--deterministic", "shards"];
    let (recorded, printed) = run(3, 469, &shards);
    assert!((50..200).contains(&recorded.len()), "{}", recorded.len());
    assert_eq!(printed, [0, 100, 200, 300, 400].repeat(3));
    for step in printed.iter().map(|step| *step as u64) {
        assert!(recorded.contains(&step), "{step}");
    }
    assert_eq!(run(1, 5, &shards), (all(5), vec![0]));
}

#[test]
fn long_runs_have_a_thousand_points_or_those_of_the_interval() {
    let dir = tempfile::tempdir().expect("folder");
    let interval = |epoch: u64, more: &[&str]| {
        let settings = settings(dir.path(), more);
        settings.record_interval(epoch * settings.epochs() as u64)
    };
    // Two epochs.
    assert_eq!(interval(0, &[]), 1);
    assert_eq!(interval(999, &[]), 1);
    assert_eq!(interval(25_000, &[]), 50);
    assert_eq!(interval(1_000_000, &[]), 100);
    assert_eq!(interval(25_000, &["--log-interval", "7"]), 7);
    assert_eq!(interval(1_000_000, &["--log-interval", "500"]), 500);
    assert_eq!(interval(1000, &["--deterministic", "shards"]), 40);
}

#[test]
fn a_run_that_fails_has_a_report_and_says_where() {
    let dir = tempfile::tempdir().expect("folder");
    let train = |kind: ErrorKind| {
        let outcome = ranks_with(&settings(dir.path(), &["--overwrite"]), 1, |job| {
            let train = data(8);
            let mut trainer = job.trainer(&train, plane, Sgd::new).start()?;
            let batch = trainer.batches(&train)?.next().expect("a batch");
            trainer.step(&batch, |_, _| Err(Error::new(kind, "no luck")))
        });
        format!(
            "{:?}",
            outcome
                .into_iter()
                .next()
                .and_then(Result::err)
                .expect("failed")
        )
    };
    let run = dir.path().join("run");
    let report = run.join("report.html");
    let line = format!("\n  report  {}", report.display());
    assert_eq!(train(ErrorKind::Failed), format!("no luck{line}"));
    let page = std::fs::read_to_string(report).expect("a report");
    assert!(page.contains("\"error\":\"no luck\""), "it says why");
    // The rank that was lost says it.
    assert_eq!(train(ErrorKind::PeerLost), "no luck");
    let events = std::fs::read_to_string(run.join("events.jsonl")).expect("events");
    assert!(events.contains("\"status\":\"failed\""), "{events}");
}

#[test]
fn utilization_counts_the_steps_of_this_rank_without_evaluation() {
    let dir = tempfile::tempdir().expect("folder");
    let settings = settings(dir.path(), &["--global-batch-size", "12"]);
    let train = |job: &Job<'_>| -> Result<()> {
        let train = data(36);
        let mut trainer = job.trainer(&train, plane, Sgd::new).start()?;
        for _ in trainer.epochs() {
            for batch in trainer.batches(&train)? {
                trainer.step(&batch, |model, batch| loss(model, &batch))?;
                trainer.infer(|model, step| {
                    std::thread::sleep(Duration::from_millis(20));
                    model.forward(step.input(&[1.0, 2.0], &[1, 2])?)?;
                    Ok(())
                })?;
            }
        }
        trainer.finish().map(drop)
    };
    for rank in ranks_with(&settings, 2, train) {
        rank.expect("trained");
    }
    let run = dir.path().join("run");
    let summary = read(&run.join("summary.json"));
    let number = |name: &str| summary[name].as_f64().expect("a number");
    // Six samples of two values, forward and the weight's gradient.
    let flops = f64::from(2 * (2 * 6 * 2));
    assert_eq!(number("rank_flops_per_step"), flops);
    let peak = number("rank_peak_flops_per_s");
    let (train, test) = (number("train_s"), number("test_s"));
    let whole = 6.0 * flops / (train - number("saving_s")) / peak;
    assert!((number("mfu") / whole - 1.0).abs() < 1e-9, "{summary}");
    assert!(train + test <= number("total_s"), "{summary}");
    let metrics = std::fs::read_to_string(run.join("metrics.jsonl")).expect("metrics");
    let records = metrics
        .lines()
        .map(|line| serde_json::from_str::<Value>(line).expect("JSON"));
    let shares: Vec<f64> = records.filter_map(|r| r["mfu"].as_f64()).collect();
    assert_eq!(shares.len(), 6);
    let time: f64 = shares.iter().map(|share| flops / (share * peak)).sum();
    assert!(0.0 < time && time <= train, "{time} of {train}");
}

/// Samples with names that were read at run time.
struct Named(Arc<Vec<Sample>>, Vec<String>);

impl Dataset for Named {
    type Batch = Vec<Sample>;

    fn len(&self) -> usize {
        self.0.len()
    }

    fn read_batch(
        &self,
        epoch: u64,
        indices: &[u64],
        batch: &mut Vec<Sample>,
    ) -> phalanx_base::Result<()> {
        self.0.read_batch(epoch, indices, batch)
    }

    fn class_names(&self) -> Vec<String> {
        self.1.clone()
    }
}

#[test]
fn a_run_has_the_names_of_classes_and_of_the_measure_that_decides() {
    let names = |names: &[&str]| {
        names
            .iter()
            .map(|name| (*name).to_owned())
            .collect::<Vec<_>>()
    };
    for (classes, own, best, shown) in [
        (
            names(&["a", "b c"]),
            None,
            Some("mae:min"),
            json!(["a", "b c"]),
        ),
        (
            names(&["a", "b"]),
            Some(names(&["x", "y"])),
            Some("loss"),
            json!(["x", "y"]),
        ),
        (names(&[]), None, None, Value::Null),
    ] {
        let dir = tempfile::tempdir().expect("folder");
        let train = Arc::new(Named(data(8), classes));
        let trained = ranks_with(&settings(dir.path(), &["--epochs", "1"]), 2, |job| {
            let builder = job.trainer(&train, plane, Sgd::new);
            let builder = match best {
                Some(best) => builder.best(best),
                None => builder,
            };
            let mut trainer = builder.start()?;
            if let Some(own) = &own {
                trainer.add_to_summary("classes", own.clone());
            }
            for _ in trainer.epochs() {
                for batch in trainer.batches(&train)? {
                    trainer.step(&batch, |model, batch| loss(model, &batch))?;
                }
                trainer.evaluate(&train, |_, _| {
                    Ok(Measure::of_sum(1.0).with_value("mae", 2.0))
                })?;
            }
            trainer.finish()
        });
        trained
            .into_iter()
            .for_each(|rank| drop(rank.expect("trained")));
        let run = dir.path().join("run");
        assert_eq!(read(&run.join("summary.json"))["classes"], shown);
        let measure = best.map(|best| best.replace("loss", "test_loss:min"));
        assert_eq!(
            read(&run.join("run.json"))["settings"]["best"],
            json!(measure)
        );
    }
}

#[test]
fn a_part_of_the_model_is_frozen_by_its_name() {
    type Two = (Linear, Linear);
    let two = |scope: &mut phalanx_nn::Scope| -> Two {
        let first = Linear::new(scope.enter("plane"), 2, 1);
        (first, Linear::new(scope.enter("planet.x"), 1, 1))
    };
    let train = |frozen: &'static [&str], dir: &std::path::Path| {
        let settings = settings(dir, &["--overwrite"]);
        let trained = ranks_with(&settings, 2, |job| {
            let train = data(8);
            let names = frozen.iter().map(|name| (*name).to_owned()).collect();
            let mut trainer = job.trainer(&train, two, Sgd::new).frozen(names).start()?;
            let before = trainer.params().flat().to_vec();
            for _ in trainer.epochs() {
                for batch in trainer.batches(&train)? {
                    trainer.step(&batch, |(first, second), batch| {
                        let x: Vec<f32> = batch.iter().flat_map(|(x, _)| *x).collect();
                        let x = first.forward(batch.input(&x, &[batch.samples(), 2])?)?;
                        second.forward(x)?.mean(&[], false)
                    })?;
                }
            }
            let params = trainer.params();
            let changed = params.ids().zip(params.infos()).filter(|(id, _)| {
                let at = before.iter().position(|w| *w == params.get(*id)[0]);
                at.is_none()
            });
            let changed = changed
                .map(|(_, info)| info.name.clone())
                .collect::<Vec<_>>();
            trainer.finish()?;
            Ok(changed)
        });
        trained.into_iter().next().expect("a rank")
    };
    let dir = tempfile::tempdir().expect("folder");
    for (frozen, trained) in [
        (&["plane"][..], &["planet.x.weight", "planet.x.bias"][..]),
        (&["planet"], &["plane.weight", "plane.bias"]),
        (&["planet.x", "plane.bias", "plane.bias"], &["plane.weight"]),
        (&["plane*.bias", "*.x.weig?t"], &["plane.weight"]),
    ] {
        assert_eq!(
            train(frozen, dir.path()).expect("trained"),
            trained,
            "{frozen:?}"
        );
        let run = read(&dir.path().join("run/run.json"));
        let tensors = run["model"]["tensors"].as_array().expect("tensors");
        let shown = tensors.iter().filter(|tensor| tensor["trained"] == true);
        assert_eq!(
            shown.map(|tensor| &tensor["name"]).collect::<Vec<_>>(),
            trained
        );
    }
    for wrong in ["plan", "plane.", "planet.x.weights", "", "?"] {
        let outcome = ranks(1, &[], |job| {
            let train = data(8);
            job.trainer(&train, two, Sgd::new)
                .frozen(vec![wrong.to_owned()])
                .start()
                .map(drop)
        });
        let error = outcome
            .into_iter()
            .next()
            .expect("a rank")
            .expect_err(wrong);
        assert_eq!(error.kind(), ErrorKind::Usage);
        assert!(
            error
                .to_string()
                .contains(&format!("frozen(\"{wrong}\"): ")),
            "{error}"
        );
    }
}
