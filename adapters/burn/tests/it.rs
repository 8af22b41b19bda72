//! Against Burn alone and serial folds. The ranks are threads.

mod devices;
#[cfg(feature = "train")]
mod learner;
#[cfg(feature = "nn")]
mod nn;

use burn::module::{Module, ModuleMapper, ModuleVisitor, Param};
use burn::nn::{BatchNorm, BatchNormConfig, Linear, LinearConfig};
use burn::optim::{GradientsParams, SgdConfig};
use burn::tensor::{DType, Device, Tensor, TensorData};
use phalanx_burn::comm::ProcessGroup;
use phalanx_burn::{DistributedDataParallel, ErrorKind, ReplicaOptions};

/// Runs `rank` on `world` ranks; the results by rank.
fn ranks<T: Send>(world: usize, rank: impl Fn(ProcessGroup) -> T + Sync) -> Vec<T> {
    let groups = ProcessGroup::threads(world, Default::default());
    std::thread::scope(|scope| {
        let threads: Vec<_> = groups
            .into_iter()
            .map(|group| scope.spawn(|| rank(group)))
            .collect();
        let results = threads
            .into_iter()
            .map(|thread| thread.join().expect("no panic"));
        results.collect()
    })
}

fn device() -> Device {
    Device::flex().autodiff()
}

/// Numbers between -1 and 1 that differ by `seed`.
fn numbers(count: usize, seed: usize) -> Vec<f32> {
    // The compiler's own sines of constants have other last bits.
    let seed = std::hint::black_box(seed);
    let number = |i: usize| ((i as f32 + 1.0) * (seed as f32 + 1.7)).sin();
    (0..count).map(number).collect()
}

#[derive(Module, Debug)]
struct Model {
    fc1: Linear,
    fc2: Linear,
    /// Not in the loss.
    spare: Linear,
}

/// Fills parameters with numbers, and keeps their gradients apart from the others.
struct Fill(usize);

impl ModuleMapper for Fill {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        self.0 += 1;
        param.map(|old| {
            let data = TensorData::new(numbers(old.dims().iter().product(), self.0), old.dims());
            Tensor::<D>::from_data(data, &old.device()).require_grad()
        })
    }
}

impl Model {
    /// Its weights depend on `seed`.
    fn new(seed: usize) -> Model {
        let model = Model {
            fc1: LinearConfig::new(4, 3).init(&device()),
            fc2: LinearConfig::new(3, 2).init(&device()),
            spare: LinearConfig::new(1, 1).init(&device()),
        };
        model.map(&mut Fill(seed * 10))
    }

    fn weights(&self) -> Vec<Vec<f32>> {
        weights_of(self)
    }

    /// The gradients by parameter; empty where there is none.
    fn flat(&self, gradients: &GradientsParams) -> Vec<Vec<f32>> {
        let mut read = Read {
            gradients: Some(gradients),
            all: Vec::new(),
        };
        self.visit(&mut read);
        read.all
    }

    /// The gradients of the mean loss of `samples` samples that depend on `batch`, times `factor`.
    fn gradients(&self, batch: usize, samples: usize, factor: f32) -> GradientsParams {
        let x = TensorData::new(numbers(4 * samples, 100 + batch), [samples, 4]);
        let x = Tensor::<2>::from_data(x, &device());
        let out = self.fc2.forward(self.fc1.forward(x).tanh());
        let loss = out.sub_scalar(0.5).powi_scalar(2).mean().mul_scalar(factor);
        GradientsParams::from_grads(loss.backward(), self)
    }
}

/// The values by parameter.
fn weights_of(model: &impl Module) -> Vec<Vec<f32>> {
    let mut read = Read {
        gradients: None,
        all: Vec::new(),
    };
    model.visit(&mut read);
    read.all
}

struct Read<'a> {
    gradients: Option<&'a GradientsParams>,
    all: Vec<Vec<f32>>,
}

impl ModuleVisitor for Read<'_> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let tensor = match self.gradients {
            Some(gradients) => gradients.get::<D>(param.id),
            None => Some(param.val()),
        };
        let values = tensor.map(|t| t.try_into_vec_as::<f32>().expect("values"));
        self.all.push(values.unwrap_or_default());
    }
}

fn ddp(group: &ProcessGroup, model: Model) -> (DistributedDataParallel, Model) {
    DistributedDataParallel::new(group, model, Default::default()).expect("a wrapper")
}

fn largest_difference(a: &[Vec<f32>], b: &[Vec<f32>]) -> f32 {
    assert_eq!(
        a.iter().map(Vec::len).collect::<Vec<_>>(),
        b.iter().map(Vec::len).collect::<Vec<_>>()
    );
    let pairs = a.iter().flatten().zip(b.iter().flatten());
    pairs.map(|(a, b)| (a - b).abs()).fold(0.0, f32::max)
}

/// A fold in the order of the batches, divided once.
fn mean(of: &[Vec<Vec<f32>>]) -> Vec<Vec<f32>> {
    let mut sum = of[0].clone();
    for next in &of[1..] {
        for (sum, next) in sum.iter_mut().zip(next) {
            sum.iter_mut().zip(next).for_each(|(s, g)| *s += g);
        }
    }
    let scale = 1.0 / of.len() as f32;
    sum.iter_mut().flatten().for_each(|g| *g *= scale);
    sum
}

#[test]
fn gradients_are_the_mean_in_the_order_of_the_ranks() {
    for world in 1..=3 {
        let model = Model::new(0);
        let all: Vec<_> = (0..world)
            .map(|r| model.flat(&model.gradients(r, 5, 1.0)))
            .collect();
        let want = mean(&all);
        for got in ranks(world, |group| {
            // Other weights on each rank: all get those of rank 0.
            let (mut ddp, model) = ddp(&group, Model::new(group.rank()));
            let own = model.gradients(group.rank(), 5, 1.0);
            model.flat(&ddp.average(&model, own).expect("gradients"))
        }) {
            assert_eq!(got, want, "{world} ranks");
            assert!(
                got[4..].iter().all(Vec::is_empty),
                "no rank uses the last layer"
            );
        }
    }
}

#[test]
fn ranks_get_the_bits_of_one_rank_with_accumulation() {
    let trained = |world: usize, each: usize| {
        let all = ranks(world, |group| {
            let (mut ddp, mut model) = ddp(&group, Model::new(0));
            let mut optimizer = SgdConfig::new().init();
            for step in 0..3 {
                let mut running = ddp.begin(&vec![5; each]).expect("a step");
                for micro in 0..each {
                    let batch = step * world * each + group.rank() * each + micro;
                    running
                        .add(&model, model.gradients(batch, 5, 1.0))
                        .expect("gradients");
                }
                let gradients = running.finish(&model).expect("gradients");
                model = optimizer.step(0.1, model, gradients);
            }
            ddp.verify_equal(&model).expect("equal weights");
            model.weights()
        });
        all.into_iter().next().expect("rank 0")
    };
    assert_ne!(trained(1, 1), Model::new(0).weights());
    assert_eq!(trained(4, 1), trained(1, 4));
    assert_eq!(trained(3, 1), trained(1, 3));
}

#[test]
fn uneven_batches_have_the_gradient_of_the_joined_one() {
    let plan: [&[usize]; 3] = [&[2, 3], &[6], &[]];
    let model = Model::new(0);
    let parts =
        [(0, 2), (1, 3), (2, 6)].map(|(batch, n)| (n, model.flat(&model.gradients(batch, n, 1.0))));
    let mut want: Vec<Vec<f32>> = parts[0].1.iter().map(|g| vec![0.0; g.len()]).collect();
    for (samples, gradients) in &parts {
        for (sum, gradient) in want.iter_mut().zip(gradients) {
            let share = *samples as f32 / 11.0;
            sum.iter_mut()
                .zip(gradient)
                .for_each(|(s, g)| *s += share * g);
        }
    }
    for got in ranks(3, |group| {
        let (mut ddp, model) = ddp(&group, Model::new(0));
        let mine = plan[group.rank()];
        let mut step = ddp.begin(mine).expect("a step");
        for (i, &samples) in mine.iter().enumerate() {
            let own = model.gradients(2 * group.rank() + i, samples, 1.0);
            step.add(&model, own).expect("gradients");
        }
        let got = model.flat(&step.finish(&model).expect("gradients"));
        let step = ddp.begin(&[]).expect("a step");
        assert!(step.is_over());
        assert_eq!(step.finish(&model).expect("an end").len(), 0);
        got
    }) {
        assert!(largest_difference(&got, &want) < 1e-6);
    }
}

#[test]
fn a_step_with_a_nan_is_skipped_by_all() {
    ranks(2, |group| {
        let (mut ddp, model) = ddp(&group, Model::new(0));
        let own = model.gradients(0, 5, [1.0, f32::NAN][group.rank()]);
        let gradients = ddp.average(&model, own).expect("a step");
        assert_eq!(gradients.len(), 0);
        assert_eq!(ddp.skipped_steps(), 1);
        let gradients = ddp
            .average(&model, model.gradients(0, 5, 1.0))
            .expect("a step");
        assert_eq!(gradients.len(), 4);
    });
}

#[test]
fn gradients_are_clipped_by_their_joined_norm() {
    ranks(2, |group| {
        let (mut plain, model) = ddp(&group, Model::new(0));
        let own = || model.gradients(group.rank(), 5, 1.0);
        let gradients = model.flat(&plain.average(&model, own()).expect("gradients"));
        let norm = gradients
            .iter()
            .flatten()
            .map(|&g| f64::from(g).powi(2))
            .sum::<f64>()
            .sqrt();
        let options = ReplicaOptions {
            max_norm: Some(norm / 2.0),
            ..ReplicaOptions::default()
        };
        let made = DistributedDataParallel::new(&group, model.clone(), options);
        let (mut ddp, model) = made.expect("a wrapper");
        let clipped = model.flat(&ddp.average(&model, own()).expect("gradients"));
        assert!((ddp.grad_norm().expect("a norm") - norm).abs() < 1e-12);
        let half: Vec<Vec<f32>> = gradients
            .iter()
            .map(|g| g.iter().map(|g| g / 2.0).collect())
            .collect();
        assert!(largest_difference(&clipped, &half) < 1e-5);
    });
}

#[test]
fn running_statistics_become_rank_0s() {
    let batch = |step: usize, rank: usize| {
        let x = TensorData::new(numbers(24, 10 * step + rank), [8, 3]);
        Tensor::<2>::from_data(x, &device())
    };
    let statistics = |norm: &BatchNorm| {
        let mean = norm.running_mean.value_sync();
        mean.try_into_vec_as::<f32>().expect("values")
    };
    // Burn alone, with rank 0's batches.
    let alone = BatchNormConfig::new(3).init(&device());
    (0..3).for_each(|step| drop(alone.forward(batch(step, 0))));
    let want = statistics(&alone);
    assert_ne!(want, [0.0; 3]);
    for got in ranks(3, |group| {
        let norm = BatchNormConfig::new(3).init(&device());
        let made = DistributedDataParallel::new(&group, norm, Default::default());
        let (mut ddp, norm) = made.expect("a wrapper");
        for step in 0..3 {
            norm.forward(batch(step, group.rank()));
        }
        let norm = ddp.sync_statistics(norm).expect("rank 0's");
        ddp.verify_equal(&norm).expect("equal");
        statistics(&norm)
    }) {
        assert_eq!(got, want);
    }
}

#[test]
fn frozen_parameters_keep_their_values_and_others_are_named() {
    ranks(2, |group| {
        let mut model = Model::new(group.rank());
        model.fc1 = model.fc1.no_grad();
        let (mut ddp, model) = ddp(&group, model);
        ddp.verify_equal(&model)
            .expect("frozen ones are rank 0's too");
        let gradients = ddp
            .average(&model, model.gradients(0, 5, 1.0))
            .expect("gradients");
        assert_eq!(gradients.len(), 2);
        let before = model.weights();
        let model = SgdConfig::new().init().step(0.1, model, gradients);
        let after = model.weights();
        assert_eq!(before[..2], after[..2]);
        assert_ne!(before[2..4], after[2..4]);
    });
    // Another module.
    ranks(1, |group| {
        let (mut ddp, model) = ddp(&group, Model::new(0));
        let gradients = model.gradients(0, 5, 1.0);
        let refused = ddp.average(&Model::new(0), gradients);
        assert_eq!(refused.expect_err("refused").kind(), ErrorKind::Usage);
    });
}

#[test]
fn mistakes_are_named() {
    ranks(1, |group| {
        let model = LinearConfig::new(2, 1).init(&Device::flex());
        let error = DistributedDataParallel::new(&group, model, Default::default()).err();
        let text = error.expect("refused").to_string();
        assert!(text.contains("autodiff"), "{text}");
        let model = LinearConfig::new(2, 1).init(&device());
        let model = model.map(&mut As(DType::F64));
        let error = DistributedDataParallel::new(&group, model, Default::default()).err();
        let text = error.expect("refused").to_string();
        assert!(text.contains("weight is F64"), "{text}");
    });
    // Fewer micro-batches than declared, and another module in a step without data.
    ranks(1, |group| {
        let (mut ddp, model) = ddp(&group, Model::new(0));
        assert!(
            ddp.begin(&[])
                .expect("a step")
                .finish(&Model::new(1))
                .is_err()
        );
        let text = ddp
            .average(&model, model.gradients(0, 5, 1.0))
            .expect_err("it failed")
            .to_string();
        assert!(text.contains("an earlier step failed"), "{text}");
    });
    ranks(1, |group| {
        let (mut ddp, model) = ddp(&group, Model::new(0));
        let mut step = ddp.begin(&[5, 5]).expect("a step");
        step.add(&model, model.gradients(0, 5, 1.0))
            .expect("the first");
        let text = step.finish(&model).expect_err("one is missing").to_string();
        assert!(text.contains("ended after 1"), "{text}");
    });
    // Another model on rank 1.
    ranks(2, |group| {
        let model = LinearConfig::new(2, 1 + group.rank()).init(&device());
        let error = DistributedDataParallel::new(&group, model, Default::default()).err();
        let text = error.expect("refused").to_string();
        assert!(text.contains("weight") && text.contains("rank 1"), "{text}");
    });
}

/// Changes the type of all parameters.
struct As(DType);

impl ModuleMapper for As {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        param.map(|old| old.inner().cast(self.0).autodiff_like())
    }
}

trait AutodiffLike {
    fn autodiff_like(self) -> Self;
}

impl<const D: usize> AutodiffLike for Tensor<D> {
    fn autodiff_like(self) -> Self {
        Tensor::from_inner(self).require_grad()
    }
}
