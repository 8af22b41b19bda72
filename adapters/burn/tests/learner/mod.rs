//! Burn's learner on several ranks, against Burn's own on one.

use std::path::Path;
use std::sync::Arc;

use burn::data::dataloader::batcher::Batcher;
use burn::data::dataloader::{DataLoader, DataLoaderBuilder, Dataset};
use burn::data::dataset::DatasetError;
use burn::lr_scheduler::constant::ConstantLr;
use burn::module::Module;
use burn::nn::loss::{MseLoss, Reduction};
use burn::nn::{Linear, LinearConfig};
use burn::optim::{AdamConfig, GradientsParams, ModuleOptimizer};
use burn::tensor::{Device, Tensor, TensorData};
use burn::train::metric::LossMetric;
use burn::train::metric::store::EventStoreClient;
use burn::train::{
    EarlyStoppingStrategy, InferenceStep, Interrupter, Learner, LearningResult, RegressionOutput,
    SupervisedTraining, TrainOutput, TrainStep,
};
use phalanx_burn::comm::ProcessGroup;
use phalanx_burn::{DataParallel, ErrorKind, RankContext, Result};

use super::{Fill, device, largest_difference, numbers, ranks, weights_of};

const RATE: f64 = 0.01;

#[derive(Module, Debug)]
struct Net {
    first: Linear,
    last: Linear,
}

#[derive(Clone, Debug)]
struct Batch {
    x: Tensor<2>,
    y: Tensor<2>,
}

impl Net {
    fn new(seed: usize) -> Net {
        let net = Net {
            first: LinearConfig::new(3, 5).init(&device()),
            last: LinearConfig::new(5, 2).init(&device()),
        };
        net.map(&mut Fill(seed * 10))
    }

    fn output(&self, batch: Batch) -> RegressionOutput {
        let output = self.last.forward(self.first.forward(batch.x).tanh());
        let loss = MseLoss::new().forward(output.clone(), batch.y.clone(), Reduction::Mean);
        RegressionOutput::new(loss, output, batch.y)
    }
}

impl TrainStep for Net {
    type Input = Batch;
    type Output = RegressionOutput;

    fn step(&self, batch: Batch) -> TrainOutput<RegressionOutput> {
        let output = self.output(batch);
        TrainOutput::new(self, output.loss.backward(), output)
    }
}

impl InferenceStep for Net {
    type Input = Batch;
    type Output = RegressionOutput;

    fn step(&self, batch: Batch) -> RegressionOutput {
        self.output(batch)
    }
}

/// Samples by their numbers; `missing` cannot be read.
struct Samples {
    count: usize,
    missing: Option<usize>,
}

impl Dataset<usize> for Samples {
    fn get(&self, index: usize) -> std::result::Result<usize, DatasetError> {
        match self.missing == Some(index) {
            true => Err(DatasetError::new(std::io::Error::other("a bad sector"))),
            false => Ok(index),
        }
    }

    fn len(&self) -> usize {
        self.count
    }
}

/// Makes the samples; the one numbered `.0` interrupts the training.
struct Make(Option<(usize, Interrupter)>);

impl Batcher<usize, Batch> for Make {
    fn batch(&self, items: Vec<usize>, device: &Device) -> Batch {
        if let Some((sample, interrupter)) = &self.0
            && items.contains(sample)
        {
            interrupter.stop(Some("enough"));
        }
        let tensor = |wide: usize, seed: usize| {
            let values = items.iter().flat_map(|item| numbers(wide, item + seed));
            let data = TensorData::new(values.collect::<Vec<_>>(), [items.len(), wide]);
            Tensor::<2>::from_data(data, device)
        };
        Batch {
            x: tensor(3, 1),
            y: tensor(2, 100),
        }
    }
}

fn loader(samples: Samples, make: Make, shuffled: bool) -> Arc<dyn DataLoader<Batch>> {
    let builder = DataLoaderBuilder::new(make).batch_size(4);
    match shuffled {
        true => builder.shuffle(7).build(samples),
        false => builder.build(samples),
    }
}

fn whole(count: usize) -> Samples {
    Samples {
        count,
        missing: None,
    }
}

fn learner(seed: usize) -> Learner<Net> {
    Learner::new(Net::new(seed), adam(), ConstantLr::new(RATE))
}

fn adam() -> ModuleOptimizer {
    AdamConfig::new().init()
}

/// Trains on `samples` of which `own` gives each rank's; `set` changes the training.
fn trained(
    group: ProcessGroup,
    dir: &Path,
    train: Arc<dyn DataLoader<Batch>>,
    set: impl FnOnce(SupervisedTraining<Net>) -> SupervisedTraining<Net>,
) -> (bool, Result<Net>) {
    let rank = RankContext::new(group, 1);
    let strategy = DataParallel::new(&rank, Default::default());
    let valid = loader(whole(6), Make(None), false);
    let training = strategy
        .training(dir, train, valid)
        .with_application_logger(None)
        .metrics((LossMetric::new(),));
    // Each rank has weights of its own at first.
    let result: LearningResult<Net> = set(training).launch(learner(1 + rank.rank()));
    (result.interrupted.is_some(), strategy.result(result))
}

/// The weights of each rank after these epochs.
fn weights(
    world: usize,
    samples: usize,
    set: impl Fn(SupervisedTraining<Net>) -> SupervisedTraining<Net> + Sync,
) -> Vec<Vec<f32>> {
    let dir = tempfile::tempdir().expect("a folder");
    let of_ranks = ranks(world, |group| {
        let train = loader(whole(samples), Make(None), false);
        let (_, model) = trained(group, dir.path(), train, &set);
        weights_of(&model.expect("a model"))
    });
    assert!(of_ranks.iter().all(|own| *own == of_ranks[0]));
    of_ranks[0].clone()
}

#[test]
fn one_rank_has_the_bits_of_burns_own_strategy() {
    for accumulation in [None, Some(2)] {
        let dir = tempfile::tempdir().expect("a folder");
        let set = |training: SupervisedTraining<Net>| match accumulation {
            Some(batches) => training.num_epochs(3).grads_accumulation(batches),
            None => training.num_epochs(3),
        };
        let train = || loader(whole(22), Make(None), true);
        let valid = loader(whole(6), Make(None), false);
        let own = SupervisedTraining::new(dir.path(), train(), valid).with_application_logger(None);
        let own = set(own).launch(learner(1)).model;
        let ours = ranks(1, |group| {
            trained(group, dir.path(), train(), set).1.expect("a model")
        });
        assert_eq!(weights_of(&ours[0]), weights_of(&own));
    }
}

#[test]
fn ranks_train_as_one_does_on_their_batches_together() {
    for (world, samples) in [(2, 24), (2, 23), (3, 31)] {
        // By hand, with the batches of each step joined.
        let part = |rank: usize| rank * samples / world..(rank + 1) * samples / world;
        let longest = (0..world).map(|rank| part(rank).len()).max().unwrap_or(0);
        let (mut alone, mut optimizer) = (Net::new(1), adam());
        for _epoch in 0..2 {
            for first in (0..longest).step_by(4) {
                let joined = (0..world).flat_map(|rank| part(rank).skip(first).take(4));
                let batch = Make(None).batch(joined.collect(), &device());
                let gradients = alone.output(batch).loss.backward();
                let gradients = GradientsParams::from_grads(gradients, &alone);
                alone = optimizer.step(RATE, alone, gradients);
            }
        }
        let got = weights(world, samples, |training| training.num_epochs(2));
        let difference = largest_difference(&got, &weights_of(&alone));
        assert!(difference < 1e-5, "{world} ranks: {difference}");
    }
}

/// Ends the training after its epoch.
#[derive(Clone)]
struct After(usize);

impl EarlyStoppingStrategy for After {
    fn should_stop(&mut self, epoch: usize, _: &EventStoreClient) -> bool {
        epoch == self.0
    }
}

#[test]
fn rank_0_ends_the_training_of_all_early() {
    let two = weights(2, 16, |training| training.num_epochs(2));
    let stopped = weights(2, 16, |training| {
        training.num_epochs(5).early_stopping(After(2))
    });
    assert_eq!(stopped, two);
    assert_ne!(weights(2, 16, |training| training.num_epochs(3)), two);
}

#[test]
fn a_training_goes_on_from_its_checkpoint_and_starts_again_after_its_end() {
    let whole_one = weights(2, 16, |training| training.num_epochs(4));
    let dir = tempfile::tempdir().expect("a folder");
    let run = |from: Option<usize>, epochs: usize| {
        let of_ranks = ranks(2, |group| {
            let train = loader(whole(16), Make(None), false);
            let set = |training: SupervisedTraining<Net>| {
                let training = training.with_default_checkpointers().num_epochs(epochs);
                match from {
                    Some(epoch) => training.checkpoint(epoch),
                    None => training,
                }
            };
            let (_, model) = trained(group, dir.path(), train, set);
            weights_of(&model.expect("a model"))
        });
        assert_eq!(of_ranks[0], of_ranks[1]);
        of_ranks[0].clone()
    };
    assert_ne!(run(None, 2), whole_one);
    assert_eq!(run(Some(2), 4), whole_one);
    assert_eq!(run(Some(4), 4), whole_one);
}

#[test]
fn all_ranks_stop_when_one_is_interrupted() {
    let dir = tempfile::tempdir().expect("a folder");
    let of_ranks = ranks(2, |group| {
        let interrupter = Interrupter::new();
        // Sample 13 is rank 1's.
        let make = Make(Some((13, interrupter.clone())));
        let train = loader(whole(16), make, false);
        let set = |training: SupervisedTraining<Net>| {
            training.num_epochs(3).with_interrupter(interrupter)
        };
        let (interrupted, model) = trained(group, dir.path(), train, set);
        assert!(interrupted);
        weights_of(&model.expect("what was trained so far"))
    });
    assert_eq!(of_ranks[0], of_ranks[1]);
}

#[test]
fn an_error_of_one_rank_is_one_of_all() {
    let dir = tempfile::tempdir().expect("a folder");
    let of_ranks = ranks(3, |group| {
        let samples = Samples {
            count: 24,
            missing: Some(13),
        };
        let train = loader(samples, Make(None), false);
        let (_, model) = trained(group, dir.path(), train, |training| training.num_epochs(3));
        model.expect_err("an error")
    });
    for (rank, error) in of_ranks.iter().enumerate() {
        assert_eq!(error.kind(), ErrorKind::Failed);
        let said = error.to_string();
        let own = said.contains("a bad sector");
        assert_eq!(own, rank == 1, "{said}");
        assert!(own || said.contains("rank 1"), "{said}");
    }
}
