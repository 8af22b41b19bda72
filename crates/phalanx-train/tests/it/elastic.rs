//! Trainings whose ranks are lost at chosen points, on ranks that are threads: the others go on, and the result has the bits
//! of a training of one rank; those with parts of the optimizer's state have the bits of those with all of it. Processes that
//! are killed, and that join, are in the tests of phalanx-cli.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Barrier;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::time::Duration;

use phalanx_comm::{GroupOptions, ProcessGroup};
use phalanx_member::Elastic;
use phalanx_member::{Event, Log};
use phalanx_nn::layers::{Act, Linear};
use phalanx_nn::optim::{Adam, Ema, Optimizer, Sgd, schedule::Schedule};
use phalanx_nn::{Params, Reduction, Scope, Tensor};
use phalanx_train::{
    EarlyStopping, Error, ErrorKind, Job, Measure, MicroBatch, RankContext, Result,
};
use serde_json::Value;

use crate::trainer::{Sample, data, settings, targets};

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
pub(crate) const SHARDS: [&str; 6] = [
    "--global-batch-size",
    "8",
    "--deterministic",
    "shards",
    "--shards",
    "4",
];

/// The bits of a rank's weights, and of the last evaluation; what the program has counted itself.
pub(crate) type Trained = (Vec<u32>, u64, Own);

/// Steps and learning rates, each beside its epoch.
pub(crate) type Own = Vec<(usize, u64)>;

/// Trains on `world` ranks, of which each `(rank, point)` of `losses` is lost there. What each rank has that ends.
fn train(
    dir: &Path,
    args: &[&str],
    world: usize,
    losses: &[(usize, Point)],
) -> Vec<Option<Trained>> {
    let ended = outcomes(dir, args, world, losses, &plain);
    ended
        .into_iter()
        .map(|rank| rank.map(|outcome| outcome.expect("it goes on")))
        .collect()
}

/// The same; nothing of ranks that are lost or leave.
pub(crate) fn outcomes(
    dir: &Path,
    args: &[&str],
    world: usize,
    losses: &[(usize, Point)],
    run: &(impl Fn(&Job<'_>, &dyn Fn(Point) -> Result<()>) -> Result<Trained> + Sync),
) -> Vec<Option<Result<Trained>>> {
    let settings = settings(dir, args);
    // Ranks that are lost at the same point are lost together.
    let meets = losses.iter().map(|(_, point)| {
        let together = losses.iter().filter(|(_, at)| at == point);
        (*point, Barrier::new(together.count()))
    });
    let meets: Vec<(Point, Barrier)> = meets.collect();
    std::thread::scope(|scope| {
        let one = |group: ProcessGroup| {
            let (settings, meets) = (&settings, &meets);
            scope.spawn(move || {
                let (number, store) = (group.rank(), group.store());
                let log = || Log::new(store.clone());
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
                            let leave = Event::Leave { number };
                            log().append(|_| Some(leave.clone())).expect("a store");
                            rank_0_looks();
                        }
                        Some(Hold(..)) => {
                            let mut log = log();
                            log.hold(Some("it is a test")).expect("a store");
                            std::thread::spawn(move || {
                                std::thread::sleep(Duration::from_millis(700));
                                log.hold(None).expect("a store");
                            });
                            rank_0_looks();
                        }
                        Some(point) => {
                            let meet = meets.iter().find(|(at, _)| *at == point);
                            meet.expect("it is one of them").1.wait();
                            is_lost.store(true, SeqCst);
                            return Err(Error::new(ErrorKind::Failed, "this rank is lost"));
                        }
                        None => {}
                    }
                    Ok(())
                };
                let outcome = run(&Job::new("test", &ctx, settings), &here);
                if matches!(&outcome, Err(error) if error.kind() == ErrorKind::Stopped) {
                    assert!(matches!(point, Some(Leave(..))), "{outcome:?}");
                    ctx.group().shutdown().expect("the others wait for it");
                    return None;
                }
                // The links end with the last handle.
                drop(ctx);
                match (outcome, is_lost.load(SeqCst)) {
                    (Err(_), true) => {
                        log().lose(number, "it is a test").expect("a store");
                        None
                    }
                    (outcome, _) => Some(outcome),
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

/// Wide enough for each of a few ranks to have a part.
struct Net {
    up: Linear,
    down: Linear,
}

fn net(scope: &mut Scope<'_>) -> Net {
    Net {
        up: Linear::new(scope.enter("up"), 2, 40),
        down: Linear::new(scope.enter("down"), 40, 1),
    }
}

fn answers<'s>(net: &Net, batch: &MicroBatch<'s, Vec<Sample>>) -> Result<Tensor<'s>> {
    let x: Vec<f32> = batch.iter().flat_map(|(x, _)| *x).collect();
    let x = batch.input(&x, &[batch.samples(), 2])?;
    net.down.forward(net.up.forward_act(x, Act::Relu)?)
}

fn loss<'s>(net: &Net, batch: &MicroBatch<'s, Vec<Sample>>) -> Result<Tensor<'s>> {
    answers(net, batch)?.mse_loss(&targets(batch), Reduction::Mean)
}

/// The layers have optimizers of their own, with a step each for a batch. Some updates are refused, the program sets the
/// learning rate once, and no evaluation after the first is good enough: it ends after the fourth of them.
fn run<O: Optimizer + 'static>(
    job: &Job<'_>,
    optimizer: impl Fn(&Params, f64) -> O,
    here: impl Fn(Point) -> Result<()>,
) -> Result<Trained> {
    let (samples, test) = (data(SAMPLES), data(11));
    let momentum = |params: &_, lr| Sgd::new(params, lr).momentum(0.9);
    let builder = job.trainer(&samples, net, optimizer);
    let mut trainer = builder
        .optimizer_of("up", momentum)
        .clip_grad_norm(0.5)
        .schedule(|lr, steps| Schedule::cosine(lr, steps, 0.0))
        .early_stopping(EarlyStopping::new(3).min_delta(1e9))
        .before_update(|update| {
            Ok(match update.group {
                "up" => update.step % 4 != 2,
                _ => update.step % 4 != 3 && update.grad_norm > 0.0,
            })
        })
        .start()?;
    let mut own: Own = trainer.state()?.unwrap_or_default();
    for epoch in trainer.epochs() {
        for batch in trainer.batches(&samples)? {
            let at = Step(epoch, batch.index());
            own.push((epoch, trainer.lr().to_bits()));
            trainer.set_state(&own)?;
            if own.len() == 7 {
                trainer.set_lr(0.03125)?;
            }
            trainer.step_of("up", &batch, |model, batch| loss(model, &batch))?;
            trainer.step(&batch, |model, batch| {
                here(at)?;
                loss(model, &batch)
            })?;
        }
        trainer.evaluate(&test, |model, batch| {
            here(Evaluation(epoch))?;
            let sum = answers(model, &batch)?.mse_loss(&targets(&batch), Reduction::Sum);
            Ok(Measure::of_loss(sum?))
        })?;
    }
    let params = trainer.params();
    let bits = params.flat().iter().map(|w| w.to_bits()).collect();
    let evaluation = trainer.finish()?;
    Ok((bits, evaluation.loss.to_bits(), own))
}

fn plain(job: &Job<'_>, here: &dyn Fn(Point) -> Result<()>) -> Result<Trained> {
    run(job, Adam::new, here)
}

/// The losses of all steps and epochs, in order.
pub(crate) fn metrics(dir: &Path) -> Vec<(u64, Value, Value)> {
    let text = std::fs::read_to_string(dir.join("run/metrics.jsonl")).expect("metrics");
    let lines = text
        .lines()
        .map(|line| serde_json::from_str(line).expect("JSON"));
    let mut all: Vec<_> = lines
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

#[test]
fn parts_of_epochs_and_early_stopping_go_on_without_a_lost_rank() {
    let args = [&SHARDS[..], &["--eval-every", "2"]].concat();
    let alone = tempfile::tempdir().expect("a folder");
    let want = train(alone.path(), &args, 1, &[]).remove(0);
    let steps = want.as_ref().map(|(_, _, own)| own.len());
    assert_eq!(
        steps,
        Some(7),
        "the fourth evaluation is after the second part of epoch 2"
    );
    let all = [
        Step(1, 1),
        Step(1, 2),
        Evaluation(1),
        Step(2, 0),
        Step(2, 1),
        Evaluation(2),
    ];
    for (rank, point) in (0..3).flat_map(|rank| all.map(|point| (rank, point))) {
        let dir = tempfile::tempdir().expect("a folder");
        let got = train(dir.path(), &args, 3, &[(rank, point)]);
        for (other, result) in got.iter().enumerate() {
            let want = if other == rank { &None } else { &want };
            assert_eq!(result, want, "rank {other} after {rank} at {point:?}");
        }
        assert_eq!(
            metrics(dir.path()),
            metrics(alone.path()),
            "{rank} {point:?}"
        );
    }
}

#[test]
fn averages_of_the_weights_are_taken_over_from_a_rank_that_is_ahead() {
    let averaged = |job: &Job<'_>, here: &dyn Fn(Point) -> Result<()>| {
        let ema = |params: &Params, lr| Ema::new(params, Adam::new(params, lr), 0.75);
        run(job, ema, here)
    };
    let train = |world, losses: &[(usize, Point)]| {
        let dir = tempfile::tempdir().expect("a folder");
        let ended = outcomes(dir.path(), &SHARDS, world, losses, &averaged);
        let ended = ended
            .into_iter()
            .flatten()
            .map(|rank| rank.expect("it goes on"));
        (
            ended.collect::<Vec<_>>(),
            metrics(dir.path()),
            saved(dir.path()).1,
        )
    };
    let want = train(1, &[]);
    for (rank, point) in [(0, Step(1, 3)), (1, Evaluation(1)), (2, Step(2, 1))] {
        let got = train(3, &[(rank, point)]);
        assert_eq!(
            got.0,
            [&want.0[..], &want.0[..]].concat(),
            "{rank} {point:?}"
        );
        assert_eq!(
            (got.1, got.2),
            (want.1.clone(), want.2.clone()),
            "{rank} {point:?}"
        );
    }
}

/// Batches with fewer samples than there are parts of them after the loss.
#[test]
fn a_batch_of_one_sample_a_rank_is_divided_among_the_others() {
    let alone = tempfile::tempdir().expect("a folder");
    let args = ["--global-batch-size", "3"];
    let (want, ..) = train(alone.path(), &args, 1, &[])
        .remove(0)
        .expect("it ends");
    let dir = tempfile::tempdir().expect("a folder");
    let got = train(dir.path(), &["--batch-size", "1"], 3, &[(1, Step(1, 1))]);
    assert_eq!(got[0], got[2]);
    let (got, ..) = got[0].clone().expect("it goes on");
    for (got, want) in got.into_iter().zip(want) {
        let (got, want) = (f32::from_bits(got), f32::from_bits(want));
        assert!((got - want).abs() < 1e-4, "{got} {want}");
    }
}

/// The files of weights and state below `dir`, and the hashes of the summary.
fn saved(dir: &Path) -> (BTreeMap<String, Vec<u8>>, Vec<Value>) {
    let (mut files, mut folders) = (BTreeMap::new(), vec![dir.join("run")]);
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(folder).expect("a folder").flatten() {
            let path = entry.path();
            match path.extension() {
                _ if path.is_dir() => folders.push(path),
                Some(end) if end == "safetensors" => {
                    let name = path.strip_prefix(dir).expect("it is below").display();
                    files.insert(name.to_string(), std::fs::read(&path).expect("a file"));
                }
                _ => {}
            }
        }
    }
    let text = std::fs::read_to_string(dir.join("run/summary.json")).expect("a summary");
    let summary: Value = serde_json::from_str(&text).expect("JSON");
    let names = ["initial", "weights", "optimizer", "metrics"];
    let hashes = names.map(|name| summary[format!("{name}_sha256")].clone());
    (files, hashes.into())
}

#[test]
fn parts_of_the_state_are_taken_over_with_the_bits_of_whole_state() {
    let mut cases: Vec<Vec<(usize, Point)>> = vec![Vec::new()];
    for point in [
        Step(1, 0),
        Step(1, 3),
        Evaluation(1),
        Step(2, 4),
        Evaluation(2),
    ] {
        cases.extend((0..4).map(|rank| vec![(rank, point)]));
        cases.push(vec![(0, point), (2, point)]);
    }
    // One after the other, until one is left.
    cases.push(vec![(1, Step(1, 1)), (2, Evaluation(1)), (3, Step(2, 1))]);
    cases.push(vec![(3, Step(1, 1)), (0, Step(1, 2)), (1, Step(1, 3))]);
    // Neighbours that leave at the same time, and all but one.
    cases.push(vec![(1, Leave(1, 1)), (2, Leave(1, 1)), (0, Step(2, 1))]);
    cases.push((0..3).map(|rank| (rank, Leave(1, 4))).collect());
    cases.push(vec![(0, Leave(1, 2)), (3, Hold(1, 2)), (2, Step(1, 3))]);
    for (i, losses) in cases.into_iter().enumerate() {
        let train = |exchange: &str| {
            let dir = tempfile::tempdir().expect("a folder");
            let args = [
                "--batch-size",
                "2",
                "--save-every",
                "3",
                "--exchange",
                exchange,
            ];
            let trained = train(dir.path(), &args, 4, &losses);
            (trained, metrics(dir.path()), saved(dir.path()))
        };
        let exchange = ["reduce-scatter", "at-step"][i % 2];
        let (want, got) = (train("all-reduce"), train(exchange));
        // Ranks that are asked to leave or wait may do so a step later, with other bits.
        if losses
            .iter()
            .any(|(_, point)| matches!(point, Leave(..) | Hold(..)))
        {
            assert_eq!(got.1.len(), want.1.len(), "{exchange}: {losses:?}");
            continue;
        }
        assert_eq!(got.0, want.0, "{exchange}: {losses:?}");
        assert_eq!(got.1, want.1, "{exchange}: {losses:?}");
        let ((files, hashes), (want, want_hashes)) = (got.2, want.2);
        assert_eq!(hashes, want_hashes, "{exchange}: {losses:?}");
        // A save may be late, and then another file has its state.
        let both = files.keys().filter(|name| want.contains_key(*name));
        assert!(
            both.clone().next().is_some(),
            "{:?} {:?}",
            files.keys(),
            want.keys()
        );
        for name in both {
            assert!(files[name] == want[name], "{name}, {exchange}: {losses:?}");
        }
    }
}

#[test]
fn the_loss_of_a_part_and_its_copy_ends_the_training_with_an_error() {
    for (first, second) in [(0, 1), (1, 2), (3, 0)] {
        let dir = tempfile::tempdir().expect("a folder");
        let losses = [(first, Step(1, 2)), (second, Step(1, 2))];
        let args = ["--batch-size", "2", "--exchange", "reduce-scatter"];
        let ended = outcomes(dir.path(), &args, 4, &losses, &plain);
        let errors: Vec<Error> = ended
            .into_iter()
            .flatten()
            .map(|outcome| outcome.expect_err("it ends"))
            .collect();
        assert_eq!(errors.len(), 2);
        let words = format!("rank {first} had it and rank {second} the copy, and both were lost");
        for error in errors {
            assert_eq!(error.kind(), ErrorKind::PeerLost);
            let text = error.chain();
            assert!(text.contains(&words), "{text}");
        }
    }
}
