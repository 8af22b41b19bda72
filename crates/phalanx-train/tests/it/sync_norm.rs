//! Synchronized batch norms: ranks train as one rank on their joined batches.

use std::path::Path;
use std::sync::Arc;

use clap::Parser;
use phalanx_comm::{GroupOptions, ProcessGroup};
use phalanx_nn::layers::{BatchNorm, Linear};
use phalanx_nn::optim::Sgd;
use phalanx_nn::{Reduction, Scope};
use phalanx_train::{ErrorKind, Job, RankContext, Result, Settings};

#[derive(Parser)]
struct Cli {
    #[command(flatten)]
    settings: Settings,
}

struct Model(Linear, BatchNorm, Linear);

/// Weights and running statistics of each rank after two epochs of `samples`, 8 a step.
fn train(
    dir: &Path,
    samples: usize,
    (ranks, sync): (usize, bool),
    args: &[&str],
) -> Vec<Result<Vec<f32>>> {
    let dir = dir.display().to_string();
    let typed = ["test", "--lr", "0.1", "--epochs", "2", "--overwrite"];
    let more = ["--global-batch-size", "8", "--output-dir", &dir];
    let settings = Cli::parse_from(typed.iter().chain(&more).chain(args)).settings;
    let data: Arc<Vec<[f32; 3]>> = Arc::new(
        (0..3 * samples)
            .map(|i| ((i * 37 + 11) % 101) as f32 / 50.0 - 1.0)
            .collect::<Vec<f32>>()
            .chunks_exact(3)
            .map(|row| [row[0], row[1], row[2]])
            .collect(),
    );
    let rank = |group: ProcessGroup| -> Result<Vec<f32>> {
        let ctx = RankContext::new(group, 1);
        let job = Job::new("test", &ctx, &settings);
        let model = |scope: &mut Scope<'_>| {
            Model(
                Linear::new(scope.enter("in"), 2, 4),
                BatchNorm::new(scope.enter("norm"), 4),
                Linear::new(scope.enter("out"), 4, 1),
            )
        };
        let mut builder = job.trainer(&data, model, Sgd::new);
        if sync {
            builder = builder.sync_batch_norm(true);
        }
        let mut trainer = builder.start()?;
        for _epoch in trainer.epochs() {
            for batch in trainer.batches(&data)? {
                trainer.step(&batch, |Model(first, norm, last), batch| {
                    let rows = &batch.data()[..batch.samples()];
                    let x: Vec<f32> = rows.iter().flat_map(|row| [row[0], row[1]]).collect();
                    let y: Vec<f32> = rows.iter().map(|row| row[2]).collect();
                    let x = batch.input(&x, &[rows.len(), 2])?;
                    let out = last.forward(norm.forward(first.forward(x)?)?.relu()?)?;
                    out.mse_loss(&y, Reduction::Mean)
                })?;
            }
        }
        trainer.check_weights()?;
        let params = trainer.params();
        let made = [params.flat(), params.buffers_flat()].concat();
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
        all.collect()
    })
}

#[test]
fn ranks_train_as_one_on_their_joined_batches() {
    let dir = tempfile::tempdir().expect("folder");
    let furthest = |samples: usize, run: (usize, bool), args: &[&str]| {
        let mut whole = train(dir.path(), samples, (1, false), args);
        let whole = whole.remove(0).expect("trained");
        let all = train(dir.path(), samples, run, args).into_iter();
        let all: Vec<Vec<f32>> = all.map(|made| made.expect("trained")).collect();
        assert!(
            all.iter().all(|made| *made == all[0]) || !run.1,
            "ranks differ"
        );
        let apart = all[0].iter().zip(&whole).map(|(a, b)| (a - b).abs());
        apart.fold(0.0, f32::max)
    };
    // Of the last step's two samples, a third rank has none.
    for ranks in [2, 3] {
        let joined = furthest(10, (ranks, true), &[]);
        assert!(joined < 1e-5, "{joined}");
    }
    // Micro-batches of the same number are joined.
    let joined = furthest(12, (2, true), &["--accumulate", "2"]);
    assert!(joined < 1e-5, "{joined}");
    // Each rank's own statistics make another model.
    let apart = furthest(12, (2, false), &[]);
    assert!(apart > 1e-3, "{apart}");
}

#[test]
fn shards_have_statistics_of_their_own() {
    let dir = tempfile::tempdir().expect("folder");
    let args = ["--deterministic", "shards", "--shards", "2"];
    for made in train(dir.path(), 12, (2, true), &args) {
        let error = made.expect_err("refused");
        assert_eq!(error.kind(), ErrorKind::Usage);
        assert!(error.to_string().starts_with("--deterministic shards"));
    }
}
