//! Sharded optimizers whose gradients are scattered, not given to all ranks.

use super::zero::{State, gathered, restore};
use crate::common::{ALL, Over, bits, ranks, value};
use phalanx_comm::ProcessGroup;
use phalanx_ddp::{
    Bf16Gradients, BucketCaps, Commit, DdpOptions, Deterministic, DistributedDataParallel,
    Exchange, ShardTree, ShardedOptimizer,
};
use phalanx_nn::layers::Linear;
use phalanx_nn::optim::{Adam, Optimizer, Sgd, step_clipped};
use phalanx_nn::{GradView, Params, Reduction, Scope, Seed, StepKey, Tape, Threads};

/// Of the gradient's norm; some steps reach it and some do not.
const LIMIT: f64 = 0.5;

struct Net {
    layers: Vec<Linear>,
    /// In the model, but the loss depends on it in every third step only.
    idle: Linear,
}

/// Tensors of which none is a multiple of a line; several buckets.
fn model() -> (Net, Params) {
    let mut scope = Scope::new(Seed(3));
    let net = Net {
        layers: vec![
            Linear::new(scope.enter("first"), 5, 41),
            Linear::new(scope.enter("large"), 41, 37),
            Linear::new(scope.enter("last"), 37, 3),
        ],
        idle: Linear::new(scope.enter("idle"), 7, 3),
    };
    (net, scope.build().expect("model builds"))
}

fn options(exchange: Exchange) -> DdpOptions {
    DdpOptions {
        caps: Some(BucketCaps::uniform(2000)),
        keep_layout: true,
        frozen: vec!["first.bias".to_owned()],
        exchange,
        ..DdpOptions::default()
    }
}

/// Backward of step `index` on this rank in two micro-batches of uneven size; `bad` on rank 1.
fn backward(
    net: &Net,
    params: &Params,
    tape: &mut Tape,
    ddp: &mut DistributedDataParallel,
    index: usize,
    bad: bool,
) -> Commit {
    let rank = ddp.group().rank();
    let sizes = [4, 2 + rank % 2];
    let mut micro_batches = ddp.begin(&sizes).expect("begin");
    for (m, n) in sizes.into_iter().enumerate() {
        let start = ((index * 8 + rank) * 2 + m) * 64;
        let mut x: Vec<f32> = (start..start + 5 * n).map(value).collect();
        if bad && rank == 1 {
            x[0] = f32::NAN;
        }
        let y: Vec<f32> = (start..start + 3 * n).map(|i| value(i + 9_999)).collect();
        let step = tape.step(params, StepKey::new(0, index as u64));
        let mut x = step.input(&x, &[n, 5]).expect("input");
        for layer in &net.layers {
            x = layer.forward(x).expect("forward");
        }
        if index % 3 == 2 {
            let ones = step.input(&vec![1.0; 7 * n], &[n, 7]).expect("input");
            x = x
                .add(net.idle.forward(ones).expect("forward"))
                .expect("sum");
        }
        let loss = x.mse_loss(&y, Reduction::Mean).expect("loss");
        let sink = micro_batches.micro_batch().expect("micro-batch");
        loss.backward(sink).expect("backward");
    }
    micro_batches.finish().expect("finish")
}

/// Parameters, optimizer state, and norms, after ten steps; the fourth is voted down.
fn whole<O: Optimizer>(
    group: ProcessGroup,
    make: impl Fn(&Params) -> O,
    limit: Option<f64>,
) -> (Vec<f32>, State, Vec<f64>) {
    let (net, mut params) = model();
    let options = options(Exchange::AllReduce);
    let mut ddp = DistributedDataParallel::new(group, &mut params, options).expect("ddp");
    let (mut tape, mut norms) = (Tape::new(Threads(1)), Vec::new());
    let mut optimizer = make(&params);
    for index in 0..10 {
        let world = ddp.group().world_size();
        let bad = index == 3 && world > 1;
        if !backward(&net, &params, &mut tape, &mut ddp, index, bad).is_yes() {
            assert!(bad);
            continue;
        }
        match limit {
            Some(limit) => {
                norms.push(step_clipped(&mut optimizer, &mut params, &ddp, limit).expect("clipped"))
            }
            None => optimizer.step(&mut params, &ddp).expect("step"),
        }
    }
    let state = optimizer.state().into_iter();
    let state = state.map(|(n, v)| (n, v.to_vec())).collect();
    let state = (state, optimizer.updates().to_vec());
    (params.flat().to_vec(), state, norms)
}

/// The same scattered; stops after five steps and goes on in new ones.
fn scattered<O: Optimizer>(
    group: ProcessGroup,
    options: DdpOptions,
    make: impl Fn(&Params) -> O,
    limit: Option<f64>,
) -> (Vec<f32>, State, Vec<f64>, usize) {
    let (net, mut params) = model();
    let new = |params: &mut Params| {
        let ddp =
            DistributedDataParallel::new(group.clone(), params, options.clone()).expect("ddp");
        let optimizer = ShardedOptimizer::for_wrapper(&ddp, params, &make).expect("cut");
        (ddp, optimizer)
    };
    let (mut ddp, mut optimizer) = new(&mut params);
    let (mut tape, mut norms) = (Tape::new(Threads(1)), Vec::new());
    for index in 0..10 {
        if index == 5 {
            let (state, steps) = (gathered(&group, &params, &optimizer), optimizer.steps());
            (ddp, optimizer) = new(&mut params);
            restore(&mut optimizer, steps, &params, &state);
        }
        let bad = index == 3 && group.world_size() > 1;
        let commit = backward(&net, &params, &mut tape, &mut ddp, index, bad);
        if bad {
            let text = commit.to_string();
            assert!(text.starts_with("rank 1: the gradient of last."), "{text}");
            continue;
        }
        assert!(commit.is_yes());
        let first = params.ids().next().expect("a parameter");
        assert!(ddp.grad(first).is_empty(), "no rank has whole gradients");
        match limit {
            Some(limit) => {
                let norm = optimizer.prepare_step(&mut ddp, Some(limit));
                norms.extend(norm.expect("prepared"));
                let stepped = optimizer.step_prepared(&mut params, &mut ddp);
                stepped.expect("clipped");
                optimizer.gather(&mut params, &mut ddp).expect("gathered");
            }
            None => optimizer
                .step_scattered(&mut params, &mut ddp)
                .expect("step"),
        }
    }
    let bytes = optimizer.state_bytes();
    let state = gathered(&group, &params, &optimizer);
    (params.flat().to_vec(), state, norms, bytes)
}

/// Options of the scattered side: either exchange in several buckets, of which one has a hole; late also in the one
/// bucket that it makes by itself.
fn ways() -> [DdpOptions; 3] {
    let late = options(Exchange::AtStep);
    let one = DdpOptions {
        caps: None,
        ..late.clone()
    };
    [options(Exchange::ReduceScatter), late, one]
}

fn check<O: Optimizer>(make: impl Fn(&Params) -> O + Sync + Copy, limit: Option<f64>) {
    for world in [1, 2, 3, 4, 7] {
        let transports: &[Over] = if world == 3 { &ALL } else { &[Over::Thread] };
        for (&over, options) in transports.iter().flat_map(|o| ways().map(|w| (o, w))) {
            let want = ranks(world, over, |group| whole(group, make, limit));
            let got = ranks(world, over, |group| {
                scattered(group, options.clone(), make, limit)
            });
            let all: usize = want[0].1.0.iter().map(|(_, v)| 4 * v.len()).sum();
            for (rank, ((params, state, norms, bytes), want)) in got.iter().zip(&want).enumerate() {
                let at = format!(
                    "rank {rank} of {world} over {over:?}, {:?}",
                    options.exchange
                );
                assert_eq!(bits(params), bits(&want.0), "weights of {at}");
                let (state, updates) = state;
                assert_eq!(*updates, want.1.1, "updates of {at}");
                assert!(updates.contains(&0) && updates.contains(&3), "{updates:?}");
                assert_eq!(state.len(), want.1.0.len());
                for ((name, state), (_, want)) in state.iter().zip(&want.1.0) {
                    assert_eq!(bits(state), bits(want), "{name} of {at}");
                }
                assert_eq!(norms.len(), want.2.len());
                for (norm, want) in norms.iter().zip(&want.2) {
                    assert!((norm - want).abs() < 1e-12 * want, "{norm} {want}");
                }
                // At most a line a bucket, and one a tensor, more than its share.
                let lines = 64 * 8 * state.len();
                assert!(*bytes <= all / world + lines, "{bytes} of {all} on {at}");
            }
            if limit.is_some() {
                let clipped = want[0].2.iter().filter(|n| **n > LIMIT).count();
                assert!((1..=8).contains(&clipped), "{:?}", want[0].2);
            }
        }
    }
}

#[test]
fn sgd_with_momentum_has_the_same_bits() {
    check(|p| Sgd::new(p, 0.05).momentum(0.9).weight_decay(1e-3), None);
}

#[test]
fn adam_has_the_same_bits() {
    check(|p| Adam::new(p, 0.01), None);
}

#[test]
fn clipping_is_by_the_norm_of_the_joined_gradient() {
    check(|p| Sgd::new(p, 0.05).momentum(0.9), Some(LIMIT));
}

/// The first kind of cut, with whole gradients, clips alike.
#[test]
fn clipping_whole_gradients_has_the_same_bits() {
    let make = |p: &Params| Sgd::new(p, 0.05).momentum(0.9);
    for world in [1, 2, 3] {
        let want = ranks(world, Over::Thread, |group| whole(group, make, Some(LIMIT)));
        let got = ranks(world, Over::Thread, |group| {
            let (net, mut params) = model();
            let options = options(Exchange::AllReduce);
            let mut ddp =
                DistributedDataParallel::new(group.clone(), &mut params, options).expect("ddp");
            let mut optimizer = ShardedOptimizer::new(group, &params, make).expect("cut");
            let (mut tape, mut norms) = (Tape::new(Threads(1)), Vec::new());
            for index in 0..10 {
                let bad = index == 3 && ddp.group().world_size() > 1;
                if backward(&net, &params, &mut tape, &mut ddp, index, bad).is_yes() {
                    norms.push(
                        optimizer
                            .step_clipped(&mut params, &ddp, LIMIT)
                            .expect("step"),
                    );
                }
            }
            (params.flat().to_vec(), norms)
        });
        for ((params, norms), want) in got.iter().zip(&want) {
            assert_eq!(bits(params), bits(&want.0), "{world} ranks");
            assert_eq!(*norms, want.2);
        }
    }
}

/// Gradients one way, parameters the other: what an all-reduce moves.
#[test]
fn a_step_moves_what_an_all_reduce_moves() {
    for world in [2, 4] {
        let sent = |exchange: Exchange| {
            let all = ranks(world, Over::Tcp, |group| {
                let (net, mut params) = model();
                let mut ddp =
                    DistributedDataParallel::new(group.clone(), &mut params, options(exchange))
                        .expect("ddp");
                let make = |p: &Params| Sgd::new(p, 0.05);
                let mut whole = make(&params);
                let mut parts = exchange
                    .is_scattered()
                    .then(|| ShardedOptimizer::for_wrapper(&ddp, &params, make).expect("cut"));
                let mut tape = Tape::new(Threads(1));
                let before: u64 = group.bytes_sent_to().iter().sum();
                for index in 0..10 {
                    let commit = backward(&net, &params, &mut tape, &mut ddp, index, false);
                    assert!(commit.is_yes());
                    match &mut parts {
                        Some(parts) => parts.step_scattered(&mut params, &mut ddp),
                        None => {
                            whole.step(&mut params, &ddp).expect("step");
                            Ok(())
                        }
                    }
                    .expect("step");
                }
                group.bytes_sent_to().iter().sum::<u64>() - before
            });
            all.iter().sum::<u64>() as f64
        };
        let plain = sent(Exchange::AllReduce);
        for exchange in [Exchange::ReduceScatter, Exchange::AtStep] {
            let scattered = sent(exchange);
            assert!(
                scattered < 1.2 * plain,
                "{exchange:?}, {world} ranks: {scattered} for {plain}"
            );
        }
    }
}

#[test]
fn what_does_not_go_together_is_refused() {
    ranks(2, Over::Thread, |group| {
        let (_, mut params) = model();
        let mut refused = |options: DdpOptions, words: &str| {
            let made = DistributedDataParallel::new(group.clone(), &mut params, options);
            let text = made.map(|_| ()).expect_err("refused").to_string();
            assert!(text.contains(words), "{text}");
        };
        let shards = Deterministic::Shards(ShardTree::new(4).expect("fits"));
        refused(
            DdpOptions {
                deterministic: shards,
                ..options(Exchange::ReduceScatter)
            },
            "folded over shards",
        );
        refused(
            DdpOptions {
                ignored: vec!["idle.bias".to_owned()],
                ..options(Exchange::ReduceScatter)
            },
            "idle.bias is ignored",
        );
        let new = |exchange, params: &mut Params| {
            DistributedDataParallel::new(group.clone(), params, options(exchange)).expect("ddp")
        };
        let make = |p: &Params| Sgd::new(p, 0.1);
        let plain = new(Exchange::AllReduce, &mut params);
        let made = ShardedOptimizer::for_wrapper(&plain, &params, make);
        let text = made.map(|_| ()).expect_err("refused").to_string();
        assert!(text.contains("Exchange::ReduceScatter"), "{text}");
        let mut scattered = new(Exchange::ReduceScatter, &mut params);
        let text = scattered
            .set_hook(Some(Box::new(Bf16Gradients::default())))
            .expect_err("refused")
            .to_string();
        assert!(text.contains("whole gradients"), "{text}");
        // Before any backward there is nothing to step with.
        let mut optimizer = ShardedOptimizer::for_wrapper(&scattered, &params, make).expect("cut");
        let text = optimizer
            .step_scattered(&mut params, &mut scattered)
            .expect_err("no gradients")
            .to_string();
        assert!(text.contains("there are no gradients"), "{text}");
        let mut other = ShardedOptimizer::new(group.clone(), &params, make).expect("cut");
        let text = other
            .step_scattered(&mut params, &mut scattered)
            .expect_err("another cut")
            .to_string();
        assert!(text.contains("another DistributedDataParallel"), "{text}");
    });
}

/// A step without gradients is refused before the optimizer counts it, so that the next has the bits that it would have.
#[test]
fn a_refused_step_is_not_counted() {
    for exchange in [Exchange::ReduceScatter, Exchange::AtStep] {
        for world in [2, 3, 8] {
            let train = |refused: bool| {
                ranks(world, Over::Thread, |group| {
                    let (net, mut params) = model();
                    let mut ddp =
                        DistributedDataParallel::new(group, &mut params, options(exchange))
                            .expect("ddp");
                    let make = |p: &Params| Adam::new(p, 0.01);
                    let mut optimizer =
                        ShardedOptimizer::for_wrapper(&ddp, &params, make).expect("cut");
                    let mut tape = Tape::new(Threads(1));
                    for index in 0..4 {
                        let bad = index == 1;
                        let commit = backward(&net, &params, &mut tape, &mut ddp, index, bad);
                        assert_eq!(commit.is_yes(), !bad);
                        if bad && !refused {
                            continue;
                        }
                        let (before, steps) = (bits(params.flat()), optimizer.steps());
                        let stepped = optimizer.step_scattered(&mut params, &mut ddp);
                        if bad {
                            let text = stepped.expect_err("no gradients").to_string();
                            assert!(text.contains("no gradients to take a step with"), "{text}");
                            let prepared = optimizer.prepare_step(&mut ddp, Some(LIMIT));
                            prepared.expect_err("none");
                            assert_eq!((bits(params.flat()), optimizer.steps()), (before, steps));
                        } else {
                            stepped.expect("step");
                        }
                    }
                    bits(params.flat())
                })
            };
            assert_eq!(train(true), train(false), "{exchange:?}, {world} ranks");
        }
    }
}
