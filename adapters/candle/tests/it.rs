//! Against candle alone, serial folds and PyTorch's numbers. The ranks are threads.

use std::time::Duration;

use candle_core::backprop::GradStore;
use candle_core::{DType, Device, Tensor, Var};
use candle_nn::{BatchNorm, Linear, Module as _, ModuleT as _, Optimizer, ParamsAdamW, SGD};
use candle_nn::{VarBuilder, VarMap, batch_norm, linear};
use phalanx_candle::comm::{GroupOptions, ProcessGroup};
use phalanx_candle::{
    AdamW, DistributedDataParallel, ErrorKind, ParamsSgd, ReplicaOptions, Result, Resumable, Sgd,
    Uneven,
};
use serde::{Deserialize, Deserializer, Serialize, Serializer};

const CPU: Device = Device::Cpu;

/// Runs `rank` on `world` ranks; the results by rank.
fn ranks<T: Send>(world: usize, rank: impl Fn(ProcessGroup) -> T + Sync) -> Vec<T> {
    ranks_with(Default::default(), world, rank)
}

/// The same with these options.
fn ranks_with<T: Send>(
    options: GroupOptions,
    world: usize,
    rank: impl Fn(ProcessGroup) -> T + Sync,
) -> Vec<T> {
    let groups = ProcessGroup::threads(world, options);
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

/// Numbers between -1 and 1 that differ by `seed`.
fn numbers(count: usize, seed: usize) -> Vec<f32> {
    // The compiler's own sines of constants have other last bits.
    let seed = std::hint::black_box(seed);
    let number = |i: usize| ((i as f32 + 1.0) * (seed as f32 + 1.7)).sin();
    (0..count).map(number).collect()
}

struct Model {
    varmap: VarMap,
    layers: [Linear; 2],
}

impl Model {
    /// Its weights depend on `seed`.
    fn new(seed: usize) -> Model {
        let varmap = VarMap::new();
        let vb = VarBuilder::from_varmap(&varmap, DType::F32, &CPU);
        let layers = [linear(4, 3, vb.pp("fc1")), linear(3, 2, vb.pp("fc2"))];
        let model = Model {
            layers: layers.map(|layer| layer.expect("a layer")),
            varmap,
        };
        for (i, (_, var)) in model.vars().iter().enumerate() {
            let values = numbers(var.elem_count(), seed * 10 + i);
            let values = Tensor::from_vec(values, var.shape(), &CPU).expect("values");
            var.set(&values).expect("set");
        }
        model
    }

    fn vars(&self) -> Vec<(String, Var)> {
        let all = self.varmap.data().lock().expect("a lock");
        let mut all: Vec<_> = all.iter().map(|(n, v)| (n.clone(), v.clone())).collect();
        all.sort_by(|a, b| a.0.cmp(&b.0));
        all
    }

    fn weights(&self) -> Vec<Vec<f32>> {
        self.vars().iter().map(|(_, var)| values(var)).collect()
    }

    fn gradients(&self, store: &GradStore) -> Vec<Vec<f32>> {
        let of = |var: &Var| store.get(var).map(values).unwrap_or_default();
        self.vars().iter().map(|(_, var)| of(var)).collect()
    }

    /// The mean loss of `samples` samples that depend on `batch`.
    fn loss(&self, batch: usize, samples: usize) -> Tensor {
        let x = Tensor::from_vec(numbers(4 * samples, 100 + batch), (samples, 4), &CPU);
        let hidden = x.and_then(|x| self.layers[0].forward(&x)?.tanh());
        let out = hidden.and_then(|x| self.layers[1].forward(&x));
        out.and_then(|out| (out - 0.5)?.sqr()?.mean_all())
            .expect("a loss")
    }
}

fn values(tensor: &Tensor) -> Vec<f32> {
    let flat = tensor.flatten_all().and_then(|t| t.to_dtype(DType::F32));
    flat.and_then(|t| t.to_vec1()).expect("values")
}

fn ddp(group: &ProcessGroup, model: &Model) -> DistributedDataParallel {
    DistributedDataParallel::new(group, &model.varmap, Default::default()).expect("a wrapper")
}

fn largest_difference(a: &[Vec<f32>], b: &[Vec<f32>]) -> f32 {
    assert_eq!(a.len(), b.len());
    let pairs = a.iter().flatten().zip(b.iter().flatten());
    assert_eq!(a.iter().flatten().count(), b.iter().flatten().count());
    pairs.map(|(a, b)| (a - b).abs()).fold(0.0, f32::max)
}

#[test]
fn ranks_train_as_one_process_that_adds_in_their_order() {
    for world in 1..=3 {
        // candle alone, and a fold in the order of the ranks.
        let model = Model::new(0);
        let mut optimizer = SGD::new(model.varmap.all_vars(), 0.5).expect("an optimizer");
        for step in 0..4 {
            let mut sum = model.loss(step * world, 5).backward().expect("gradients");
            for rank in 1..world {
                let next = model
                    .loss(step * world + rank, 5)
                    .backward()
                    .expect("gradients");
                for (_, var) in model.vars() {
                    let added = (sum.get(&var).expect("one") + next.get(&var).expect("one"))
                        .expect("a sum");
                    sum.insert(&var, added);
                }
            }
            for (_, var) in model.vars() {
                let mean: Vec<f32> = values(sum.get(&var).expect("one"))
                    .iter()
                    .map(|g| g * (1.0 / world as f32))
                    .collect();
                sum.insert(
                    &var,
                    Tensor::from_vec(mean, var.shape(), &CPU).expect("a mean"),
                );
            }
            optimizer.step(&sum).expect("a step");
        }
        let want = model.weights();
        assert_ne!(want, Model::new(0).weights());
        let got = ranks(world, |group| {
            // Other weights on each rank: all get those of rank 0.
            let model = Model::new(group.rank());
            let mut ddp = ddp(&group, &model);
            let mut optimizer = SGD::new(model.varmap.all_vars(), 0.5).expect("an optimizer");
            for step in 0..4 {
                let loss = model.loss(step * world + group.rank(), 5);
                ddp.backward_step(&mut optimizer, &loss).expect("a step");
            }
            ddp.verify_equal().expect("equal weights");
            model.weights()
        });
        for weights in got {
            assert_eq!(weights, want, "{world} ranks");
        }
    }
}

#[test]
fn ranks_get_the_bits_of_one_rank_with_accumulation() {
    let trained = |world: usize, each: usize| {
        let all = ranks(world, |group| {
            let model = Model::new(0);
            let mut ddp = ddp(&group, &model);
            let mut optimizer =
                AdamW::new(model.varmap.all_vars(), Default::default()).expect("AdamW");
            for step in 0..3 {
                let mut running = ddp.begin(&vec![5; each]).expect("a step");
                for micro in 0..each {
                    let batch = step * world * each + group.rank() * each + micro;
                    running.backward(&model.loss(batch, 5)).expect("gradients");
                }
                optimizer
                    .step(&running.finish().expect("gradients"))
                    .expect("a step");
            }
            model.weights()
        });
        all.into_iter().next().expect("rank 0")
    };
    assert_eq!(trained(4, 1), trained(1, 4));
    assert_eq!(trained(3, 1), trained(1, 3));
}

/// The mean over all samples, however they are divided.
#[test]
fn uneven_batches_have_the_gradient_of_the_joined_one() {
    // Samples of each micro-batch of each rank.
    let plans: [&[&[usize]]; 4] = [
        &[&[4], &[1]],
        &[&[2, 3], &[6]],
        &[&[5], &[]],
        &[&[3, 0], &[0, 2], &[1]],
    ];
    for plan in plans {
        let all: Vec<usize> = plan.iter().copied().flatten().copied().collect();
        let total: usize = all.iter().sum();
        let model = Model::new(0);
        let mut want: Vec<Vec<f64>> = Vec::new();
        for (batch, &samples) in all.iter().enumerate().filter(|(_, n)| **n > 0) {
            let store = model.loss(batch, samples).backward().expect("gradients");
            let share = samples as f64 / total as f64;
            let gradients = model.gradients(&store);
            want.resize_with(gradients.len(), Vec::new);
            for (sum, gradient) in want.iter_mut().zip(gradients) {
                sum.resize(gradient.len(), 0.0);
                sum.iter_mut()
                    .zip(gradient)
                    .for_each(|(s, g)| *s += share * f64::from(g));
            }
        }
        let want: Vec<Vec<f32>> = want
            .iter()
            .map(|g| g.iter().map(|&g| g as f32).collect())
            .collect();
        let got = ranks(plan.len(), |group| {
            let model = Model::new(0);
            let mut ddp = ddp(&group, &model);
            let before: usize = plan[..group.rank()].iter().map(|sizes| sizes.len()).sum();
            let mine = plan[group.rank()];
            let mut step = ddp.begin(mine).expect("a step");
            assert!(!step.is_over());
            assert_eq!(step.global().samples, total);
            for (i, &samples) in mine.iter().enumerate().filter(|(_, n)| **n > 0) {
                step.backward(&model.loss(before + i, samples))
                    .expect("gradients");
            }
            let gradients = model.gradients(&step.finish().expect("gradients"));
            let step = ddp.begin(&[]).expect("a step");
            assert!(step.is_over());
            let none = model.gradients(&step.finish().expect("an end"));
            assert!(none.iter().all(Vec::is_empty), "gradients of no samples");
            gradients
        });
        for gradients in got {
            assert!(largest_difference(&gradients, &want) < 1e-6, "{plan:?}");
        }
    }
}

#[test]
fn adamw_is_candles_own() {
    let params = ParamsAdamW {
        lr: 0.05,
        weight_decay: 0.1,
        ..ParamsAdamW::default()
    };
    let (ours, theirs) = (Model::new(0), Model::new(0));
    let mut a = AdamW::new(ours.varmap.all_vars(), params.clone()).expect("ours");
    let mut b = candle_nn::AdamW::new(theirs.varmap.all_vars(), params).expect("theirs");
    for step in 0..10 {
        a.backward_step(&ours.loss(step, 5)).expect("a step");
        b.backward_step(&theirs.loss(step, 5)).expect("a step");
    }
    assert_eq!(ours.weights(), theirs.weights());
    assert_eq!(a.steps(), 10);
}

/// `torch.optim.SGD` of PyTorch 2.15 on the loss `((w - [1, -2, 3]) ** 2).sum()` from `w = [0.5, 0.25, -1]`, lr 0.1, four steps.
#[test]
fn sgd_is_pytorchs() {
    let runs = [
        (0.9, 0.0, false, SGD_MOMENTUM),
        (0.9, 0.1, true, SGD_NESTEROV),
        (0.0, 0.1, false, SGD_DECAY),
    ];
    for (momentum, weight_decay, nesterov, want) in runs {
        let w = Var::new(&[0.5f32, 0.25, -1.0], &CPU).expect("a variable");
        let target = Tensor::new(&[1f32, -2.0, 3.0], &CPU).expect("a target");
        let params = ParamsSgd {
            lr: 0.1,
            momentum,
            weight_decay,
            nesterov,
        };
        let mut optimizer = Sgd::new(vec![w.clone()], params).expect("an optimizer");
        for _ in 0..4 {
            let loss = (w.as_tensor() - &target).and_then(|d| d.sqr()?.sum_all());
            optimizer
                .backward_step(&loss.expect("a loss"))
                .expect("a step");
        }
        let got = values(&w);
        assert!(
            largest_difference(std::slice::from_ref(&got), &[want.to_vec()]) < 1e-6,
            "{got:?} {want:?}"
        );
    }
}

const SGD_MOMENTUM: [f32; 3] = [1.1543, -2.69435, 4.2344003];
const SGD_NESTEROV: [f32; 3] = [1.1092286, -2.651852, 4.194475];
const SGD_DECAY: [f32; 3] = [0.77617824, -1.0654805, 1.3547826];

/// `steps` steps from step `first`, on this rank's part.
fn go_on(
    ddp: &mut DistributedDataParallel,
    model: &Model,
    optimizer: &mut impl Resumable,
    steps: std::ops::Range<usize>,
) {
    for step in steps {
        // Six micro-batches on any number of ranks.
        let (rank, world) = (ddp.group().rank(), ddp.group().world_size());
        let mine = 6 / world;
        let mut running = ddp.begin(&vec![3; mine]).expect("a step");
        for micro in 0..mine {
            running
                .backward(&model.loss(step * 6 + rank * mine + micro, 3))
                .expect("gradients");
        }
        let gradients = running.finish().expect("gradients");
        optimizer.step(&gradients).expect("a step");
    }
}

#[test]
fn a_training_goes_on_from_its_checkpoint() {
    let dir = tempfile::tempdir().expect("a folder");
    let path = dir.path().join("checkpoint.safetensors");
    let adamw =
        |model: &Model| AdamW::new(model.varmap.all_vars(), Default::default()).expect("AdamW");
    let whole = ranks(2, |group| {
        let model = Model::new(0);
        let (mut ddp, mut optimizer) = (ddp(&group, &model), adamw(&model));
        // Nothing is there yet.
        let none: Option<usize> = ddp.load(&path, &mut optimizer).expect("no error");
        assert_eq!(none, None);
        go_on(&mut ddp, &model, &mut optimizer, 0..3);
        optimizer.set_learning_rate(0.02);
        ddp.save(&path, &optimizer, &3usize).expect("saved");
        go_on(&mut ddp, &model, &mut optimizer, 3..6);
        model.weights()
    });
    // Killed before the end, and started again; then once more, after the end. Another initial model.
    for start in 0..2 {
        let resumed = ranks(2, |group| {
            let model = Model::new(7);
            let (mut ddp, mut optimizer) = (ddp(&group, &model), adamw(&model));
            let first: Option<usize> = ddp.load(&path, &mut optimizer).expect("loaded");
            assert_eq!(first, Some([3, 6][start]));
            assert_eq!(optimizer.learning_rate(), 0.02);
            go_on(&mut ddp, &model, &mut optimizer, [3, 6][start]..6);
            ddp.save(&path, &optimizer, &6usize).expect("saved");
            model.weights()
        });
        assert_eq!(resumed, whole, "start {start}");
    }
    // candle reads the weights by their names.
    let mut model = Model::new(9);
    model.varmap.load(&path).expect("loaded");
    assert_eq!(model.weights(), whole[0]);
}

/// A value that takes longer to write than an operation may.
struct Slow;

impl Serialize for Slow {
    fn serialize<S: Serializer>(&self, to: S) -> std::result::Result<S::Ok, S::Error> {
        std::thread::sleep(Duration::from_millis(1500));
        to.serialize_bool(true)
    }
}

impl<'de> Deserialize<'de> for Slow {
    fn deserialize<D: Deserializer<'de>>(from: D) -> std::result::Result<Self, D::Error> {
        bool::deserialize(from).map(|_| Slow)
    }
}

#[test]
fn a_checkpoint_may_take_longer_than_an_operation() {
    let dir = tempfile::tempdir().expect("a folder");
    let options = GroupOptions {
        op_timeout: Duration::from_millis(500),
        ..GroupOptions::default()
    };
    ranks_with(options, 2, |group| {
        let model = Model::new(0);
        let ddp = ddp(&group, &model);
        let optimizer = AdamW::new(model.varmap.all_vars(), Default::default()).expect("AdamW");
        for limit in [None, Some(Duration::from_secs(60))] {
            // Rank 0 may have said so itself.
            let _phase = limit.map(|limit| group.phase("of the program", limit));
            let path = dir.path().join("checkpoint.safetensors");
            ddp.save(path, &optimizer, &Slow).expect("saved");
            assert_eq!(group.in_phase(), limit.is_some());
        }
        group.barrier().expect("the ranks go on");
    });
}

#[test]
fn other_numbers_of_ranks_go_on_from_it() {
    let dir = tempfile::tempdir().expect("a folder");
    let path = dir.path().join("checkpoint.safetensors");
    let sgd = |model: &Model| Sgd::new(model.varmap.all_vars(), Default::default()).expect("SGD");
    let run = |world: usize, steps: std::ops::Range<usize>| {
        ranks(world, |group| {
            let model = Model::new(0);
            let (mut ddp, mut optimizer) = (ddp(&group, &model), sgd(&model));
            if steps.start > 0 {
                let at: Option<usize> = ddp.load(&path, &mut optimizer).expect("loaded");
                assert_eq!(at, Some(steps.start));
            }
            go_on(&mut ddp, &model, &mut optimizer, steps.clone());
            ddp.save(&path, &optimizer, &steps.end).expect("saved");
            model.weights()
        })
    };
    let whole = run(1, 0..6);
    run(3, 0..2);
    run(2, 2..5);
    let last = run(1, 5..6);
    assert!(largest_difference(&last[0], &whole[0]) < 1e-6);
}

#[test]
fn damaged_and_foreign_checkpoints_change_nothing() {
    let dir = tempfile::tempdir().expect("a folder");
    let path = dir.path().join("checkpoint.safetensors");
    let adamw =
        |model: &Model| AdamW::new(model.varmap.all_vars(), Default::default()).expect("AdamW");
    ranks(1, |group| {
        let model = Model::new(0);
        ddp(&group, &model)
            .save(&path, &adamw(&model), &"three".to_owned())
            .expect("saved");
    });
    let whole = std::fs::read(&path).expect("the file");
    let refused = |what: &str, load: &(dyn Fn(&ProcessGroup, &Model) -> Result<()> + Sync)| {
        for error in ranks(2, |group| {
            let model = Model::new(0);
            let before = model.weights();
            let error = load(&group, &model).expect_err("refused");
            assert_eq!(model.weights(), before);
            (error.kind(), error.to_string())
        }) {
            assert_eq!(error.0, ErrorKind::Data, "{error:?}");
            assert!(error.1.contains(what), "{what}: {}", error.1);
        }
    };
    let load = |group: &ProcessGroup, model: &Model| {
        ddp(group, model)
            .load::<String>(&path, &mut adamw(model))
            .map(drop)
    };
    for length in [0, 5, whole.len() / 2, whole.len() - 1] {
        std::fs::write(&path, &whole[..length]).expect("written");
        refused("checkpoint.safetensors", &load);
    }
    std::fs::write(&path, &whole).expect("written");
    ranks(2, |group| load(&group, &Model::new(0)).expect("whole"));
    refused("state has another type", &|group, model| {
        ddp(group, model)
            .load::<u32>(&path, &mut adamw(model))
            .map(drop)
    });
    refused("optimizer.momentum_buffer.fc1.bias", &|group, model| {
        let mut sgd = Sgd::new(model.varmap.all_vars(), Default::default())?;
        ddp(group, model).load::<String>(&path, &mut sgd).map(drop)
    });
    // A plain safetensors file of candle's.
    Model::new(0).varmap.save(&path).expect("saved");
    refused("has no phalanx.", &load);
    // All ranks hear that rank 0 could not write.
    let missing = dir.path().join("missing").join("checkpoint");
    for error in ranks(2, |group| {
        let model = Model::new(0);
        let saved = ddp(&group, &model).save(&missing, &adamw(&model), &0);
        let error = saved.expect_err("no folder");
        (error.kind(), error.to_string())
    }) {
        assert_eq!(error.0, ErrorKind::System);
        assert!(error.1.contains("missing"), "{error:?}");
    }
    // A state that could not be loaded again does not take the place of one that can.
    let before = std::fs::read(&path).expect("the file");
    ranks(2, |group| {
        let model = Model::new(0);
        let saved = ddp(&group, &model).save(&path, &adamw(&model), &f64::INFINITY);
        assert_eq!(saved.expect_err("refused").kind(), ErrorKind::Usage);
    });
    assert_eq!(std::fs::read(&path).expect("the file"), before);
}

#[test]
fn running_statistics_are_rank_0s() {
    let all = ranks(2, |group| {
        let varmap = VarMap::new();
        let vb = VarBuilder::from_varmap(&varmap, DType::F32, &CPU);
        let norm: BatchNorm = batch_norm(3, 1e-5, vb.pp("norm")).expect("a layer");
        let mut ddp =
            DistributedDataParallel::new(&group, &varmap, Default::default()).expect("a wrapper");
        let mut optimizer = AdamW::new(varmap.all_vars(), Default::default()).expect("AdamW");
        for step in 0..3 {
            let x = numbers(24, 10 * step + group.rank());
            let x = Tensor::from_vec(x, (8, 3), &CPU).expect("a batch");
            let loss = norm.forward_t(&x, true).and_then(|y| y.sqr()?.sum_all());
            ddp.backward_step(&mut optimizer, &loss.expect("a loss"))
                .expect("a step");
        }
        ddp.verify_equal().expect("equal buffers too");
        values(norm.running_mean())
    });
    // candle alone, with rank 0's batches.
    let varmap = VarMap::new();
    let vb = VarBuilder::from_varmap(&varmap, DType::F32, &CPU);
    let norm: BatchNorm = batch_norm(3, 1e-5, vb).expect("a layer");
    for step in 0..3 {
        let x = Tensor::from_vec(numbers(24, 10 * step), (8, 3), &CPU).expect("a batch");
        norm.forward_t(&x, true).expect("statistics");
    }
    for mean in all {
        assert_eq!(mean, values(norm.running_mean()));
    }
}

#[test]
fn a_step_with_a_nan_is_skipped_by_all() {
    ranks(2, |group| {
        let model = Model::new(0);
        let mut ddp = ddp(&group, &model);
        let mut optimizer = AdamW::new(model.varmap.all_vars(), Default::default()).expect("AdamW");
        let before = model.weights();
        let factor = [1.0, f64::NAN][group.rank()];
        let loss = (model.loss(0, 5) * factor).expect("a loss");
        ddp.backward_step(&mut optimizer, &loss).expect("a step");
        assert_eq!(model.weights(), before);
        assert_eq!((ddp.skipped_steps(), optimizer.steps()), (1, 0));
        // By hand.
        let gradients = ddp.backward(&loss).expect("a step");
        optimizer.step(&gradients).expect("no step");
        assert_eq!((ddp.skipped_steps(), optimizer.steps()), (2, 0));
        ddp.backward_step(&mut optimizer, &model.loss(0, 5))
            .expect("a step");
        assert_ne!(model.weights(), before);
    });
}

#[test]
fn parameters_that_no_rank_uses_have_no_gradient() {
    ranks(2, |group| {
        let model = Model::new(0);
        let mut ddp = ddp(&group, &model);
        let of = |name: &str| {
            let var = model.vars().into_iter().find(|(known, _)| known == name);
            var.expect("a variable").1
        };
        let (bias, weight) = (of("fc2.bias"), of("fc1.weight"));
        // Rank 0 uses fc2.bias, rank 1 fc1.weight; no rank the others.
        let used = [&bias, &weight][group.rank()];
        let loss = used.sum_all().expect("a loss");
        let gradients = ddp.backward(&loss).expect("gradients");
        for (var, count) in [(&bias, 2), (&weight, 12)] {
            assert_eq!(
                values(gradients.get(var).expect("a mean")),
                vec![0.5; count]
            );
        }
        assert!(gradients.get(&of("fc1.bias")).is_none());
    });
}

#[test]
fn gradients_are_clipped_by_their_joined_norm() {
    ranks(2, |group| {
        let model = Model::new(0);
        let plain = ddp(&group, &model).backward(&model.loss(group.rank(), 5));
        let plain = model.gradients(&plain.expect("gradients"));
        let squares = plain.iter().flatten().map(|&g| f64::from(g).powi(2));
        let norm = squares.sum::<f64>().sqrt();
        let options = ReplicaOptions {
            max_norm: Some(norm / 2.0),
            ..ReplicaOptions::default()
        };
        let mut ddp =
            DistributedDataParallel::new(&group, &model.varmap, options).expect("a wrapper");
        let clipped = ddp
            .backward(&model.loss(group.rank(), 5))
            .expect("gradients");
        assert!((ddp.grad_norm().expect("a norm") - norm).abs() < 1e-12);
        let half: Vec<Vec<f32>> = plain
            .iter()
            .map(|g| g.iter().map(|g| g / 2.0).collect())
            .collect();
        assert!(largest_difference(&model.gradients(&clipped), &half) < 1e-5);
    });
}

#[test]
fn half_precision_is_averaged_in_f32() {
    for dtype in [DType::F16, DType::BF16] {
        ranks(3, |group| {
            let varmap = VarMap::new();
            let vb = VarBuilder::from_varmap(&varmap, dtype, &CPU);
            let w = vb
                .get_with_hints(4, "w", candle_nn::init::ONE)
                .expect("a variable");
            let mut ddp = DistributedDataParallel::new(&group, &varmap, Default::default())
                .expect("a wrapper");
            let x = |rank: usize| {
                let x = Tensor::from_vec(numbers(4, rank), 4, &CPU).and_then(|x| x.to_dtype(dtype));
                x.expect("numbers")
            };
            let loss = (&w * x(group.rank()))
                .and_then(|y| y.sum_all())
                .expect("a loss");
            let gradients = ddp.backward(&loss).expect("gradients");
            let got = gradients
                .get(&varmap.all_vars()[0])
                .expect("a gradient")
                .clone();
            assert_eq!(got.dtype(), dtype);
            let [a, b, c] = [0, 1, 2].map(|rank| values(&x(rank)));
            let mean = (0..4).map(|i| (a[i] + b[i] + c[i]) * (1.0 / 3.0)).collect();
            let want = Tensor::from_vec(mean, 4, &CPU).and_then(|t: Tensor| t.to_dtype(dtype));
            assert_eq!(values(&got), values(&want.expect("a mean")));
        });
    }
}

#[test]
fn mistakes_are_named() {
    let wrap = |group: &ProcessGroup, varmap: &VarMap, options| {
        let made = DistributedDataParallel::new(group, varmap, options);
        let error = made.err().expect("refused");
        (error.kind(), error.to_string())
    };
    ranks(1, |group| {
        let varmap = VarMap::new();
        let (kind, text) = wrap(&group, &varmap, Default::default());
        assert_eq!(kind, ErrorKind::Usage);
        assert!(text.contains("has no variables"), "{text}");
        let vb = VarBuilder::from_varmap(&varmap, DType::F64, &CPU);
        vb.get(3, "table.scale").expect("a variable");
        let (kind, text) = wrap(&group, &varmap, Default::default());
        assert_eq!(kind, ErrorKind::Usage);
        assert!(text.contains("table.scale is f64"), "{text}");
    });
    // Another model, and other options, on rank 1.
    ranks(2, |group| {
        let varmap = VarMap::new();
        let vb = VarBuilder::from_varmap(&varmap, DType::F32, &CPU);
        linear(4, 3 + group.rank(), vb.pp("fc1")).expect("a layer");
        let (_, text) = wrap(&group, &varmap, Default::default());
        assert!(
            text.contains("fc1.bias") && text.contains("rank 1"),
            "{text}"
        );
    });
    ranks(2, |group| {
        let options = ReplicaOptions {
            max_norm: Some(1.0 + group.rank() as f64),
            uneven: Uneven::Refuse,
            ..ReplicaOptions::default()
        };
        let (_, text) = wrap(&group, &Model::new(0).varmap, options);
        assert!(text.contains("a norm of 2"), "{text}");
    });
    // More and fewer micro-batches than declared.
    ranks(1, |group| {
        let model = Model::new(0);
        let mut ddp = ddp(&group, &model);
        let mut step = ddp.begin(&[2]).expect("a step");
        step.backward(&model.loss(0, 2)).expect("the first");
        let text = step
            .backward(&model.loss(0, 2))
            .expect_err("a second")
            .to_string();
        assert!(text.contains("1 micro-batches"), "{text}");
    });
    ranks(1, |group| {
        let model = Model::new(0);
        let mut ddp = ddp(&group, &model);
        let mut step = ddp.begin(&[2, 2]).expect("a step");
        step.backward(&model.loss(0, 2)).expect("the first");
        let text = step.finish().expect_err("one is missing").to_string();
        assert!(text.contains("ended after 1"), "{text}");
    });
    // A variable that came too late, on one rank of two; the other may hear of it before it is made itself.
    for text in ranks(2, |group| {
        let model = Model::new(0);
        let made = DistributedDataParallel::new(&group, &model.varmap, Default::default());
        if group.rank() == 1 {
            let vb = VarBuilder::from_varmap(&model.varmap, DType::F32, &CPU);
            vb.get(3, "late").expect("a variable");
        }
        let refused = made.and_then(|mut ddp| ddp.backward(&model.loss(0, 2)));
        phalanx_base::Error::from(refused.expect_err("refused")).render()
    }) {
        assert!(text.contains("build the whole model first"), "{text}");
    }
    // Other types.
    for text in ranks(2, |group| {
        let varmap = VarMap::new();
        let dtype = [DType::F32, DType::F16][group.rank()];
        let vb = VarBuilder::from_varmap(&varmap, dtype, &CPU);
        vb.get(3, "w").expect("a variable");
        wrap(&group, &varmap, Default::default()).1
    }) {
        assert!(
            text.contains("w is f16") && text.contains("w is f32"),
            "{text}"
        );
    }
    ranks(1, |group| {
        let options = ReplicaOptions {
            max_norm: Some(-1.0),
            ..ReplicaOptions::default()
        };
        assert_eq!(
            wrap(&group, &Model::new(0).varmap, options).0,
            ErrorKind::Usage
        );
    });
}

#[test]
fn steps_that_are_left_leave_nothing_behind() {
    ranks(2, |group| {
        let model = Model::new(0);
        let mut ddp = ddp(&group, &model);
        let want = model.gradients(
            &ddp.backward(&model.loss(group.rank(), 5))
                .expect("gradients"),
        );
        assert!(ddp.begin(&[]).expect("a step").is_over());
        drop(ddp.begin(&[7, 1]).expect("a step"));
        let got = model.gradients(
            &ddp.backward(&model.loss(group.rank(), 5))
                .expect("gradients"),
        );
        assert_eq!(got, want);
    });
    // In the middle of one the other rank gets the error, wherever it is.
    for text in ranks(2, |group| {
        let model = Model::new(0);
        let mut ddp = ddp(&group, &model);
        if group.rank() == 1 {
            let mut step = ddp.begin(&[5, 5]).expect("a step");
            step.backward(&model.loss(0, 5)).expect("the first");
            drop(step);
            let error = ddp.backward(&model.loss(0, 5)).expect_err("it failed");
            return error.to_string();
        }
        let steps = (0..2).try_for_each(|_| {
            let mut step = ddp.begin(&[5])?;
            step.backward(&model.loss(1, 5))?;
            step.finish().map(drop)
        });
        let error = phalanx_base::Error::from(steps.expect_err("rank 1 left"));
        error.render()
    }) {
        assert!(
            text.contains("an earlier step failed") || text.contains("was left before"),
            "{text}"
        );
    }
}

#[test]
fn other_variables_may_be_buffers() {
    ranks(2, |group| {
        let varmap = VarMap::new();
        let vb = VarBuilder::from_varmap(&varmap, DType::F32, &CPU);
        let w = vb
            .get_with_hints(2, "w", candle_nn::init::ONE)
            .expect("a variable");
        vb.get(2, "table").expect("a variable");
        let made =
            DistributedDataParallel::with_buffers(&group, &varmap, Default::default(), |name| {
                name == "table"
            });
        let mut ddp = made.expect("a wrapper");
        let table = varmap.data().lock().expect("a lock")["table"].clone();
        let mine = Tensor::full(3.0 + group.rank() as f32, 2, &CPU).expect("values");
        table.set(&mine).expect("set");
        ddp.backward(&w.sum_all().expect("a loss"))
            .expect("gradients");
        assert_eq!(values(&table), [3.0; 2]);
    });
}
