//! With gradients folded over shards, weights, buffers, optimizer state and
//! losses have the same bits for every number of ranks, transport, number of
//! threads and batch length.

use crate::common::{ALL, Over, bits, ranks};
use phalanx_comm::ProcessGroup;
use phalanx_ddp::{
    DdpOptions, Deterministic, DistributedDataParallel, ErrorKind, GlobalBatch, ShardTree,
};
use phalanx_nn::layers::{BatchNorm, Dropout, Linear};
use phalanx_nn::optim::{Adam, Optimizer};
use phalanx_nn::{GradSink, GradView, Grads, Params, Scope, Seed, StepKey, Tape, Threads};

const IN: usize = 19;
const CLASSES: usize = 10;

struct Net {
    first: Linear,
    norm: BatchNorm,
    dropout: Dropout,
    last: Linear,
}

fn model() -> (Net, Params) {
    let mut scope = Scope::new(Seed(5));
    let net = Net {
        first: Linear::new(scope.enter("first"), IN, 33),
        norm: BatchNorm::new(scope.enter("norm"), 33),
        dropout: Dropout::new(0.25),
        last: Linear::new(scope.enter("last"), 33, CLASSES),
    };
    (net, scope.build().expect("model builds"))
}

/// Backward of the mean loss over `samples`; the sum of their losses.
fn backward(
    net: &Net,
    params: &Params,
    tape: &mut Tape,
    step: usize,
    samples: &[u64],
    sink: &mut dyn GradSink,
) -> f64 {
    let n = samples.len();
    let pixel = |i: u64| ((i * 2_654_435_761) % 997) as f32 / 500.0 - 1.0;
    let x: Vec<f32> = samples
        .iter()
        .flat_map(|s| (0..IN as u64).map(move |i| pixel(s * IN as u64 + i)))
        .collect();
    let y: Vec<u32> = samples.iter().map(|s| (s * 7 % 10) as u32).collect();
    let key = StepKey::new(0, step as u64).seed(11).samples(samples);
    let step = tape.step(params, key);
    let x = step.input(&x, &[n, IN]).expect("input");
    let loss = net
        .first
        .forward(x)
        .and_then(|x| net.norm.forward(x))
        .and_then(|x| x.relu())
        .and_then(|x| net.dropout.forward(x))
        .and_then(|x| net.last.forward(x))
        .and_then(|x| x.log_softmax())
        .and_then(|x| x.nll_loss(&y, n as f32))
        .expect("forward");
    let sum = f64::from(loss.item().unwrap()) * n as f64;
    loss.backward(sink).expect("backward");
    sum
}

/// Samples of `shard` in the global batch that begins at `first`.
fn samples(tree: ShardTree, first: usize, len: usize, shard: usize) -> Vec<u64> {
    (shard..len)
        .step_by(tree.shards())
        .map(|i| (first + i) as u64)
        .collect()
}

/// Lengths of the global batches: even, uneven, and fewer samples than shards.
/// (A batch of one sample a shard has no variance for the norm.)
const BATCHES: [usize; 4] = [48, 37, 24, 48];

#[derive(PartialEq)]
struct Trained {
    params: Vec<u32>,
    buffers: Vec<u32>,
    optimizer: Vec<Vec<u32>>,
    losses: Vec<u64>,
}

fn train(group: ProcessGroup, tree: ShardTree, threads: usize) -> Trained {
    let (rank, world) = (group.rank(), group.world_size());
    let (net, mut params) = model();
    if rank > 0 {
        params.flat_mut().iter_mut().for_each(|p| *p += 1.0);
    }
    let options = DdpOptions {
        deterministic: Deterministic::Shards(tree),
        ..DdpOptions::default()
    };
    let mut ddp = DistributedDataParallel::new(group.clone(), &mut params, options).expect("ddp");
    let mut tape = Tape::new(Threads(threads));
    let mut optimizer = Adam::new(&params, 0.01);
    let mut losses = Vec::new();
    let mut first = 0;
    for (i, len) in BATCHES.into_iter().enumerate() {
        let range = tree.range(world, rank);
        let sizes: Vec<usize> = range.clone().map(|s| tree.size(len, s)).collect();
        let global = GlobalBatch {
            samples: len,
            micro_batches: tree.present(len),
            active_ranks: world,
        };
        let mut of_shards = vec![0.0; tree.shards()];
        let mut step = ddp.begin_known(&sizes, global).expect("begin");
        for shard in range.filter(|s| tree.size(len, *s) > 0) {
            let samples = samples(tree, first, len, shard);
            let sink = step.micro_batch().expect("declared");
            of_shards[shard] = backward(&net, &params, &mut tape, i, &samples, sink);
            step.update_buffers(&mut tape, &mut params)
                .expect("buffers");
        }
        assert!(step.finish().expect("finish").is_yes());
        ddp.sync_buffers(&mut params).expect("buffers");
        optimizer.step(&mut params, &ddp).expect("step");
        ShardTree::gather_values(&group, &mut of_shards).expect("losses");
        losses.push(tree.sum(&of_shards).to_bits());
        first += len;
    }
    Trained {
        params: bits(params.flat()),
        buffers: bits(params.buffers_flat()),
        optimizer: optimizer.state().iter().map(|(_, v)| bits(v)).collect(),
        losses,
    }
}

fn tree(shards: usize) -> ShardTree {
    ShardTree::new(shards).expect("fits")
}

#[test]
fn every_world_transport_and_number_of_threads_gives_the_same_bits() {
    for shards in [8, 12] {
        let want = ranks(1, Over::Thread, |group| train(group, tree(shards), 1)).remove(0);
        assert!(want.losses[0] != want.losses[3] && want.optimizer.len() >= 2);
        for world in [1, 2, 3, 4, 8] {
            for over in ALL {
                for (rank, got) in ranks(world, over, |group| train(group, tree(shards), 2))
                    .iter()
                    .enumerate()
                {
                    let of = format!("rank {rank} of {world} over {over:?}, {shards} shards");
                    assert_eq!(got.losses, want.losses, "losses of {of}");
                    assert!(got.params == want.params, "parameters of {of}");
                    assert!(got.buffers == want.buffers, "buffers of {of}");
                    assert!(got.optimizer == want.optimizer, "optimizer of {of}");
                }
            }
        }
    }
}

#[test]
fn other_worlds_up_to_the_number_of_shards_do_too() {
    let want = ranks(1, Over::Thread, |group| train(group, tree(8), 1)).remove(0);
    for world in [5, 6, 7] {
        for got in ranks(world, Over::Thread, |group| train(group, tree(8), 1)) {
            assert!(got == want, "world {world}");
        }
    }
}

/// The oracle without any of our arithmetic: f64 sums of each shard's
/// gradient, weighted by its samples.
#[test]
fn the_gradient_is_the_mean_over_samples_and_buffers_are_means_over_shards() {
    let (tree, len) = (tree(8), 37);
    let (net, start) = model();
    let mut want = vec![0.0f64; start.flat().len()];
    let mut buffers = vec![0.0f64; start.buffers_flat().len()];
    for shard in 0..8 {
        let samples = samples(tree, 0, len, shard);
        let mut params = start.clone();
        let mut tape = Tape::new(Threads(1));
        let mut grads = Grads::like(&params);
        backward(&net, &params, &mut tape, 0, &samples, &mut grads);
        tape.update_buffers(&mut params).expect("buffers");
        let share = samples.len() as f64 / len as f64;
        want.iter_mut()
            .zip(grads.flat())
            .for_each(|(w, g)| *w += share * f64::from(*g));
        buffers
            .iter_mut()
            .zip(params.buffers_flat())
            .for_each(|(b, p)| *b += f64::from(*p) / 8.0);
    }
    ranks(3, Over::Thread, |group| {
        let rank = group.rank();
        let (net, mut params) = model();
        let options = DdpOptions {
            deterministic: Deterministic::Shards(tree),
            ..DdpOptions::default()
        };
        let mut ddp = DistributedDataParallel::new(group, &mut params, options).expect("ddp");
        let mut tape = Tape::new(Threads(1));
        let range = tree.range(3, rank);
        let sizes: Vec<usize> = range.clone().map(|s| tree.size(len, s)).collect();
        let mut step = ddp.begin(&sizes).expect("begin");
        for shard in range {
            let samples = samples(tree, 0, len, shard);
            backward(
                &net,
                &params,
                &mut tape,
                0,
                &samples,
                step.micro_batch().expect("declared"),
            );
            step.update_buffers(&mut tape, &mut params)
                .expect("buffers");
        }
        assert_eq!(params.buffers_flat(), start.buffers_flat());
        assert!(step.finish().expect("finish").is_yes());
        ddp.sync_buffers(&mut params).expect("buffers");
        for (id, info) in params.ids().zip(params.infos()) {
            assert_eq!(ddp.grad(id).len(), info.len);
            for (g, w) in ddp.grad(id).iter().zip(&want[info.offset..]) {
                assert!(
                    (f64::from(*g) - w).abs() < 1e-6,
                    "{}: {g} for {w}",
                    info.name
                );
            }
        }
        for (b, w) in params.buffers_flat().iter().zip(&buffers) {
            assert!((f64::from(*b) - w).abs() < 1e-6, "{b} for {w}");
        }
    });
}

#[test]
fn mistakes_are_named() {
    let alone = || ProcessGroup::threads(1, Default::default()).remove(0);
    let options = || DdpOptions {
        deterministic: Deterministic::Shards(tree(4)),
        ..DdpOptions::default()
    };
    let (net, mut params) = model();
    let mut tape = Tape::new(Threads(1));
    let new = |params: &mut Params| {
        DistributedDataParallel::new(alone(), params, options()).expect("ddp")
    };

    let mut ddp = new(&mut params);
    let error = ddp.begin(&[3, 3, 3, 4]).err().expect("another cut");
    assert_eq!(error.kind(), ErrorKind::Usage);
    let text = error.to_string();
    assert!(
        text.contains("its part of 13 samples in 4 shards is [4, 3, 3, 3]"),
        "{text}"
    );

    let mut step = ddp.begin(&[2, 2, 2, 2]).expect("begin");
    backward(
        &net,
        &params,
        &mut tape,
        0,
        &[0, 4],
        step.micro_batch().expect("declared"),
    );
    tape.update_buffers(&mut params)
        .expect("the user's own call");
    let text = step
        .micro_batch()
        .err()
        .expect("buffers are lost")
        .to_string();
    assert!(text.contains("call GlobalStep::update_buffers"), "{text}");

    let mut ddp = new(&mut params);
    let mut step = ddp.begin(&[2, 2, 2, 2]).expect("begin");
    backward(
        &net,
        &params,
        &mut tape,
        0,
        &[0, 4],
        step.micro_batch().expect("declared"),
    );
    step.update_buffers(&mut tape, &mut params)
        .expect("buffers");
    let text = step.finish().expect_err("three are missing").to_string();
    assert!(
        text.contains("rank 0 has 4 shards of this step, but it ended after 1"),
        "{text}"
    );

    let text = ranks(5, Over::Thread, |group| {
        let (_, mut params) = model();
        let made = DistributedDataParallel::new(group, &mut params, options());
        made.err().expect("too few shards").to_string()
    });
    assert!(
        text[4].contains("5 ranks cannot share 4 shards"),
        "{}",
        text[4]
    );
}

#[test]
fn a_gradient_that_is_not_finite_is_named_with_its_rank() {
    let commits = ranks(3, Over::Thread, |group| {
        let rank = group.rank();
        let mut scope = Scope::new(Seed(1));
        Linear::new(scope.enter("only"), 2, 2);
        let mut params = scope.build().expect("model builds");
        let options = DdpOptions {
            deterministic: Deterministic::Shards(tree(8)),
            ..DdpOptions::default()
        };
        let mut ddp = DistributedDataParallel::new(group, &mut params, options).expect("ddp");
        let shards = tree(8).range(3, rank).len();
        let mut step = ddp.begin(&vec![1; shards]).expect("begin");
        for shard in 0..shards {
            let sink = step.micro_batch().expect("declared");
            for id in params.ids() {
                let bad = rank == 2 && shard == 1 && id.index() == 1;
                sink.slot(id).fill(if bad { f32::NAN } else { 1.0 });
                sink.ready(id).expect("ready");
            }
        }
        let text = step.finish().expect("finish").to_string();
        assert!(ddp.grad(params.ids().next().expect("one")).is_empty());
        (text, ddp.skipped_steps())
    });
    for commit in commits {
        let text = "rank 2: the gradient of only.bias is not finite".to_owned();
        assert_eq!(commit, (text, 1));
    }
}

/// Five samples in four shards weigh 2, 1, 1 and 1, at the loss or in the wrapper. The gradient of a parameter of each rank's
/// own is that of the mean over the rank's own samples, computed here in f64.
#[test]
fn a_parameter_of_each_ranks_own_is_weighed_once() {
    const SAMPLES: usize = 5;
    let (x, y) = (
        |i: usize| 0.5 * i as f64 - 1.0,
        |i: usize| 2.0 - 0.75 * i as f64,
    );
    for world in [1, 2, 4] {
        ranks(world, Over::Thread, |group| {
            let tree = ShardTree::new(4).expect("fits");
            let mut scope = Scope::new(Seed(5));
            let net = Linear::new(scope.enter("only"), 1, 1);
            let mut params = scope.build().expect("model builds");
            let options = DdpOptions {
                deterministic: Deterministic::Shards(tree),
                ignored: vec!["only.bias".to_owned()],
                ..DdpOptions::default()
            };
            let mine = tree.range(world, group.rank());
            let sizes: Vec<usize> = mine.clone().map(|s| tree.size(SAMPLES, s)).collect();
            let mut ddp = DistributedDataParallel::new(group, &mut params, options).expect("ddp");
            let mut tape = Tape::new(Threads(1));
            for at_loss in [true, false, true] {
                let mut step = ddp.begin(&sizes).expect("begin");
                for shard in mine.clone() {
                    let own: Vec<usize> = (shard..SAMPLES).step_by(4).collect();
                    let forward = tape.step(&params, StepKey::new(0, 0));
                    let inputs: Vec<f32> = own.iter().map(|i| x(*i) as f32).collect();
                    let wanted: Vec<f32> = own.iter().map(|i| y(*i) as f32).collect();
                    let input = forward.input(&inputs, &[own.len(), 1]).expect("input");
                    let loss = net
                        .forward(input)
                        .and_then(|out| out.mse_loss(&wanted, phalanx_nn::Reduction::Mean));
                    let loss = loss.expect("forward");
                    match at_loss {
                        true => {
                            let (weight, sink) = step.weighed_micro_batch().expect("declared");
                            loss.backward_with(&weight, sink)
                        }
                        false => loss.backward(step.micro_batch().expect("declared")),
                    }
                    .expect("backward");
                }
                assert!(step.finish().expect("finish").is_yes());
                let value =
                    |name: &str| f64::from(params.get(params.find(name).expect("there"))[0]);
                let (w, b) = (value("only.weight"), value("only.bias"));
                let slope = |i: usize| 2.0 * (w * x(i) + b - y(i));
                let own: Vec<usize> = (0..SAMPLES).filter(|i| mine.contains(&(i % 4))).collect();
                let of_own = own.iter().map(|i| slope(*i)).sum::<f64>() / own.len() as f64;
                let of_all = (0..SAMPLES).map(|i| slope(i) * x(i)).sum::<f64>() / SAMPLES as f64;
                for (name, want) in [("only.bias", of_own), ("only.weight", of_all)] {
                    let got = f64::from(ddp.grad(params.find(name).expect("there"))[0]);
                    assert!(
                        (got - want).abs() < 1e-5,
                        "{world} ranks, {name}, at the loss {at_loss}: {got} for {want}"
                    );
                }
            }
        });
    }
}
