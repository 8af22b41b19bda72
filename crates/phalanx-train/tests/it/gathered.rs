//! A loss over the samples of all ranks, beside the same loss on one rank without a gather.

use phalanx_nn::Tensor;
use phalanx_nn::layers::Linear;
use phalanx_nn::optim::Sgd;
use phalanx_train::{ErrorKind, Job, Measure, MicroBatch, Result};

use crate::trainer::{Sample, data, ranks};

fn rows<'s>(model: &Linear, batch: &MicroBatch<'s, Vec<Sample>>) -> Result<Tensor<'s>> {
    let x: Vec<f32> = batch.iter().flat_map(|(x, _)| *x).collect();
    model.forward(batch.input(&x, &[batch.samples(), 2])?)
}

/// Each sample is to be told from all others of the global batch.
fn contrast<'s>(rows: Tensor<'s>, (all, own): (Tensor<'s>, Vec<u32>)) -> Result<Tensor<'s>> {
    let n = own.len();
    rows.bmm_transposed(all)?.cross_entropy(&own, n)
}

/// The weights after training on `world` ranks, and the mean losses.
fn trained(world: usize, args: &[&str], gathers: bool) -> Result<Vec<f32>> {
    let train = data(37);
    let all = ranks(world, args, |job: &Job<'_>| {
        let net = |scope: &mut phalanx_nn::Scope<'_>| Linear::new(scope.enter("net"), 2, 3);
        let mut trainer = job.trainer(&train, net, Sgd::new).start()?;
        for _ in trainer.epochs() {
            for batch in trainer.batches(&train)? {
                trainer.step(&batch, |model, batch| {
                    let x = rows(model, &batch)?;
                    let all = match gathers {
                        true => batch.all_gather(x.share())?,
                        false => (x.share(), (0..batch.samples() as u32).collect()),
                    };
                    contrast(x, all)
                })?;
            }
        }
        let weights = trainer.params().flat().to_vec();
        trainer.finish()?;
        Ok(weights)
    });
    let mut all = all.into_iter().collect::<Result<Vec<_>>>()?;
    assert!(all.iter().all(|weights| *weights == all[0]));
    Ok(all.remove(0))
}

#[test]
fn a_loss_over_all_ranks_trains_as_on_one() {
    // The last batch has 5 samples: 2, 1, 1 and 1 on four ranks.
    let args = ["--global-batch-size", "8"];
    let oracle = trained(1, &args, false).expect("trained");
    for world in 1..=4 {
        let got = trained(world, &args, true).expect("trained");
        let pairs = got.iter().zip(&oracle);
        let apart = pairs.map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
        assert!(apart < 2e-6, "{world} ranks: {apart}");
    }
    // Without the gather, two ranks train something else.
    let alone = trained(2, &args, false).expect("trained");
    let apart = alone.iter().zip(&oracle).map(|(a, b)| (a - b).abs());
    assert!(apart.fold(0.0, f32::max) > 1e-3);
}

#[test]
fn micro_batches_that_ranks_take_at_the_same_time_are_gathered() {
    // Micro-batches of 2 samples a rank: of 4, gathered.
    let two = ["--global-batch-size", "8", "--accumulate", "2"];
    let got = trained(2, &[&two[..], &["--drop-last"]].concat(), true).expect("trained");
    // One rank has the same 4 samples in another order in each.
    let one = trained(1, &[&two[..], &["--drop-last"]].concat(), true).expect("trained");
    assert_eq!(got.len(), one.len());
    assert!(got.iter().all(|w| w.is_finite()));
}

#[test]
fn a_rank_without_samples_an_evaluation_and_shards_are_refused() {
    let error = trained(3, &["--global-batch-size", "4"], true).expect_err("1 sample is left");
    let text = error.render();
    assert!(
        text.contains("rank 1 has no sample") && text.contains("--drop-last"),
        "{text}"
    );
    trained(3, &["--global-batch-size", "4", "--drop-last"], true).expect("trained");
    let shards = ["--global-batch-size", "8", "--deterministic", "shards"];
    let error = trained(2, &shards, true).expect_err("shards");
    assert_eq!(error.kind(), ErrorKind::Usage);
    assert!(
        error.chain().contains("each shard is computed alone"),
        "{error}"
    );

    let test = data(5);
    let outcome = ranks(1, &[], |job| {
        let net = |scope: &mut phalanx_nn::Scope<'_>| Linear::new(scope.enter("net"), 2, 3);
        let mut trainer = job.trainer(&test, net, Sgd::new).evaluate_only().start()?;
        trainer.evaluate(&test, |model, batch| {
            let (all, _) = batch.all_gather(rows(model, &batch)?)?;
            Ok(Measure::of_sum(f64::from(all.data()[0])))
        })
    });
    let error = outcome
        .into_iter()
        .next()
        .expect("one rank")
        .expect_err("refused");
    assert!(error.chain().contains("Trainer::predict"), "{error}");
}
