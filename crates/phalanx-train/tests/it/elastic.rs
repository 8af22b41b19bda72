//! Trainings whose ranks are lost at chosen points, on ranks that are threads: the others go on, and the result has the bits
//! of a training of one rank. Processes that are killed, and that join, are in the tests of phalanx-cli.

use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::time::Duration;

use phalanx_comm::{GroupOptions, ProcessGroup, report_hold, report_leaving, report_lost};
use phalanx_launch::Elastic;
use phalanx_nn::optim::{Adam, schedule::Schedule};
use phalanx_train::{Error, ErrorKind, Job, Measure, RankContext, Result};
use serde_json::Value;

use crate::trainer::{answers, data, loss, settings, targets};

/// Where a rank is lost: in the forward pass of a step, or in an evaluation. Or where it asks to leave, or all to wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Point {
    Step(usize, usize),
    Evaluation(usize),
    Leave(usize, usize),
    Hold(usize, usize),
}

use Point::{Evaluation, Hold, Leave, Step};

const SAMPLES: usize = 37;
const SHARDS: [&str; 6] = [
    "--global-batch-size",
    "8",
    "--deterministic",
    "shards",
    "--shards",
    "4",
];

/// Trains on `world` ranks, of which each `(rank, point)` of `losses` is lost there. The bits of the weights of each rank
/// that ends, and the last evaluation's.
fn train(
    dir: &Path,
    args: &[&str],
    world: usize,
    losses: &[(usize, Point)],
) -> Vec<Option<(Vec<u32>, u64)>> {
    let settings = settings(dir, args);
    std::thread::scope(|scope| {
        let one = |group: ProcessGroup| {
            let settings = &settings;
            scope.spawn(move || {
                let (number, store) = (group.rank(), group.store());
                let mut ctx = RankContext::new(group, 1);
                ctx.elastic = (world > 1).then_some(Elastic {
                    first_world: world,
                    patience: Duration::from_secs(120),
                });
                let own = losses.iter().find(|(rank, _)| *rank == number);
                let (is_lost, point) = (AtomicBool::new(false), own.map(|(_, point)| *point));
                let here = |at: Point| {
                    let is_here = |point: Option<Point>| match (point, at) {
                        (Some(Leave(epoch, step) | Hold(epoch, step)), at) => {
                            at == Step(epoch, step)
                        }
                        (point, at) => point == Some(at),
                    };
                    match point.filter(|_| is_here(point)) {
                        Some(Leave(..)) => {
                            report_leaving(&*store, number).expect("a store");
                            rank_0_looks();
                        }
                        Some(Hold(..)) => {
                            report_hold(&*store, Some("it is a test")).expect("a store");
                            let store = store.clone();
                            std::thread::spawn(move || {
                                std::thread::sleep(Duration::from_millis(700));
                                report_hold(&*store, None).expect("a store");
                            });
                            rank_0_looks();
                        }
                        Some(_) => {
                            is_lost.store(true, SeqCst);
                            return Err(Error::new(ErrorKind::Failed, "this rank is lost"));
                        }
                        None => {}
                    }
                    Ok(())
                };
                let outcome = run(&Job::new("test", &ctx, settings), here);
                if matches!(&outcome, Err(error) if error.kind() == ErrorKind::Stopped) {
                    assert!(matches!(point, Some(Leave(..))), "{outcome:?}");
                    ctx.group().shutdown().expect("the others wait for it");
                    return None;
                }
                // The links end with the last handle.
                drop(ctx);
                match (outcome, is_lost.load(SeqCst)) {
                    (Err(_), true) => {
                        report_lost(&*store, number, "it is a test").expect("a store");
                        None
                    }
                    (outcome, _) => Some(outcome.expect("it goes on")),
                }
            })
        };
        let groups = ProcessGroup::threads(world, GroupOptions::default());
        let ranks: Vec<_> = groups.into_iter().map(one).collect();
        ranks
            .into_iter()
            .map(|rank| rank.join().expect("no panic"))
            .collect()
    })
}

/// Waits until rank 0 has seen what is asked.
fn rank_0_looks() {
    std::thread::sleep(Duration::from_millis(300));
}

fn run(job: &Job<'_>, here: impl Fn(Point) -> Result<()>) -> Result<(Vec<u32>, u64)> {
    let (samples, test) = (data(SAMPLES), data(11));
    let plane = crate::trainer::plane;
    let builder = job.trainer(&samples, plane, Adam::new);
    let mut trainer = builder
        .schedule(|lr, steps| Schedule::cosine(lr, steps, 0.0))
        .start()?;
    for epoch in trainer.epochs() {
        for batch in trainer.batches(&samples)? {
            let at = Step(epoch, batch.index());
            trainer.step(&batch, |model, batch| {
                here(at)?;
                loss(model, &batch)
            })?;
        }
        trainer.evaluate(&test, |model, batch| {
            here(Evaluation(epoch))?;
            let sum =
                answers(model, &batch)?.mse_loss(&targets(&batch), phalanx_nn::Reduction::Sum);
            Ok(Measure::of_loss(sum?))
        })?;
    }
    let params = trainer.params();
    let bits = params.flat().iter().map(|w| w.to_bits()).collect();
    let evaluation = trainer.finish()?;
    Ok((bits, evaluation.loss.to_bits()))
}

/// The losses of all steps and epochs, in order.
pub(crate) fn metrics(dir: &Path) -> Vec<(u64, Value, Value)> {
    let text = std::fs::read_to_string(dir.join("run/metrics.jsonl")).expect("metrics");
    let lines = text
        .lines()
        .map(|line| serde_json::from_str(line).expect("JSON"));
    let all = lines.filter(|record: &Value| record.get("ranks").is_none());
    let mut all: Vec<_> = all
        .map(|r: Value| {
            (
                r["step"].as_u64().expect("a step"),
                r["loss"].clone(),
                r["test_loss"].clone(),
            )
        })
        .collect();
    all.sort_by_key(|(step, loss, _)| (*step, loss.is_null()));
    all
}

#[test]
fn wherever_ranks_are_lost_the_others_end_with_the_bits_of_one() {
    let alone = tempfile::tempdir().expect("a folder");
    let want = train(alone.path(), &SHARDS, 1, &[]).remove(0);
    // Four steps and one of five samples.
    let points = [
        Step(1, 0),
        Step(1, 2),
        Step(1, 4),
        Evaluation(1),
        Step(2, 0),
        Step(2, 4),
        Evaluation(2),
    ];
    let mut cases: Vec<Vec<(usize, Point)>> = Vec::new();
    for point in points {
        cases.extend((0..3).map(|rank| vec![(rank, point)]));
        cases.push(vec![(0, point), (1, point)]);
    }
    cases.push(vec![(0, Step(1, 1)), (2, Evaluation(1))]);
    // In the first and last steps of an epoch, and one after the other.
    for rank in 0..3 {
        cases.push(vec![(rank, Leave(1, 1))]);
        cases.push(vec![(rank, Leave(2, 3)), ((rank + 1) % 3, Leave(1, 4))]);
        cases.push(vec![(rank, Leave(1, 2)), ((rank + 1) % 3, Step(1, 3))]);
        cases.push(vec![(rank, Leave(1, 2)), ((rank + 1) % 3, Hold(1, 3))]);
        cases.push(vec![(rank, Hold(1, 2)), ((rank + 1) % 3, Leave(1, 2))]);
    }
    cases.push(vec![(2, Step(1, 1)), (0, Step(2, 1))]);
    for losses in cases {
        let dir = tempfile::tempdir().expect("a folder");
        let got = train(dir.path(), &SHARDS, 3, &losses);
        for (rank, result) in got.iter().enumerate() {
            let ends = losses
                .iter()
                .any(|(lost, at)| *lost == rank && !matches!(at, Hold(..)));
            let want = if ends { &None } else { &want };
            assert_eq!(result, want, "rank {rank} of {losses:?}");
        }
        assert_eq!(metrics(dir.path()), metrics(alone.path()), "{losses:?}");
    }
}

/// Batches with fewer samples than there are parts of them after the loss.
#[test]
fn a_batch_of_one_sample_a_rank_is_divided_among_the_others() {
    let alone = tempfile::tempdir().expect("a folder");
    let args = ["--global-batch-size", "3"];
    let (want, _) = train(alone.path(), &args, 1, &[])
        .remove(0)
        .expect("it ends");
    let dir = tempfile::tempdir().expect("a folder");
    let got = train(dir.path(), &["--batch-size", "1"], 3, &[(1, Step(1, 1))]);
    assert_eq!(got[0], got[2]);
    let (got, _) = got[0].clone().expect("it goes on");
    for (got, want) in got.into_iter().zip(want) {
        let (got, want) = (f32::from_bits(got), f32::from_bits(want));
        assert!((got - want).abs() < 1e-4, "{got} {want}");
    }
}
