//! Batch statistics of the whole global batch under shards: those of one
//! process on the joined batch, and the same bits for every number of ranks.

mod common;

use common::{ALL, Over, bits, ranks};
use phalanx_comm::ProcessGroup;
use phalanx_ddp::{
    DdpOptions, Deterministic, DistributedDataParallel, Error, GlobalBatch, JoinedShard,
    JoinedShards, ShardTree,
};
use phalanx_nn::layers::{BatchNorm, Linear};
use phalanx_nn::optim::{Adam, Optimizer};
use phalanx_nn::{GradSink, GradView, Grads, Params, Scope, Seed, StepKey, Tape, Threads};

const IN: usize = 11;
const CLASSES: usize = 5;
/// Even, uneven, and fewer samples than shards.
const BATCHES: [usize; 4] = [24, 17, 3, 24];

struct Net {
    first: Linear,
    norm: BatchNorm,
    second: Linear,
    again: BatchNorm,
    last: Linear,
}

fn model() -> (Net, Params) {
    let mut scope = Scope::new(Seed(5));
    let net = Net {
        first: Linear::new(scope.enter("first"), IN, 18),
        norm: BatchNorm::new(scope.enter("norm"), 18),
        second: Linear::new(scope.enter("second"), 18, 13),
        again: BatchNorm::new(scope.enter("again"), 13),
        last: Linear::new(scope.enter("last"), 13, CLASSES),
    };
    (net, scope.build().expect("model builds"))
}

type Failure = Box<dyn std::error::Error + Send + Sync>;

/// Backward from `weight` times the mean loss over `samples`; the sum of their losses.
fn backward(
    net: &Net,
    params: &Params,
    tape: &mut Tape,
    samples: &[u64],
    weight: [f32; 1],
    sink: &mut dyn GradSink,
) -> Result<f64, Failure> {
    let n = samples.len();
    let pixel = |i: u64| ((i * 2_654_435_761) % 997) as f32 / 500.0 - 1.0;
    let x: Vec<f32> = samples
        .iter()
        .flat_map(|s| (0..IN as u64).map(move |i| pixel(s * IN as u64 + i)))
        .collect();
    let y: Vec<u32> = samples.iter().map(|s| (s * 7 % 5) as u32).collect();
    let step = tape.step(params, StepKey::new(0, 0).samples(samples));
    let x = step.input(&x, &[n, IN])?;
    let x = net.norm.forward(net.first.forward(x)?)?.relu()?;
    let x = net.again.forward(net.second.forward(x)?)?.relu()?;
    let loss = net
        .last
        .forward(x)?
        .log_softmax()?
        .nll_loss(&y, n.max(1) as f32)?;
    let sum = f64::from(loss.item()) * n as f64;
    loss.backward_with(&weight, sink)?;
    Ok(sum)
}

#[derive(Debug, PartialEq, Clone)]
struct Trained {
    params: Vec<u32>,
    buffers: Vec<u32>,
    optimizer: Vec<Vec<u32>>,
    losses: Vec<u64>,
    gradient: Vec<f32>,
}

fn options(shards: usize) -> DdpOptions {
    DdpOptions {
        deterministic: Deterministic::Shards(ShardTree::new(shards).expect("fits")),
        ..DdpOptions::default()
    }
}

fn sizes(tree: ShardTree, group: &ProcessGroup, samples: usize) -> (Vec<usize>, GlobalBatch) {
    let mine = tree.range(group.world_size(), group.rank());
    let global = GlobalBatch {
        samples,
        micro_batches: tree.present(samples),
        active_ranks: group.world_size(),
    };
    (mine.map(|s| tree.size(samples, s)).collect(), global)
}

fn train(group: ProcessGroup, shards: usize, threads: usize) -> Trained {
    let tree = ShardTree::new(shards).expect("fits");
    let (net, mut params) = model();
    let mut ddp =
        DistributedDataParallel::new(group.clone(), &mut params, options(shards)).expect("ddp");
    let mut team = JoinedShards::new(Threads(threads));
    let mut optimizer = Adam::new(&params, 0.01);
    let (mut losses, mut gradient, mut first) = (Vec::new(), Vec::new(), 0);
    for len in BATCHES {
        let (sizes, global) = sizes(tree, &group, len);
        let of_shards = std::sync::Mutex::new(vec![0.0; shards]);
        let mut step = ddp.begin_known(&sizes, global).expect("begin");
        step.run_joined(&mut team, &mut params, |shard: JoinedShard<'_>| {
            let own: Vec<u64> = (shard.shard..len)
                .step_by(shards)
                .map(|i| (first + i) as u64)
                .collect();
            assert_eq!(own.len(), shard.samples);
            let sum = backward(
                &net,
                shard.params,
                shard.tape,
                &own,
                shard.weight,
                shard.sink,
            )?;
            if let Some(place) = of_shards.lock().expect("whole").get_mut(shard.shard) {
                *place = sum;
            }
            Ok(())
        })
        .expect("joined");
        assert!(step.finish().expect("finish").is_yes());
        ddp.sync_buffers(&mut params).expect("buffers");
        if gradient.is_empty() {
            gradient = params.ids().flat_map(|p| ddp.grad(p).to_vec()).collect();
        }
        optimizer.step(&mut params, &ddp).expect("step");
        let mut of_shards = of_shards.into_inner().expect("whole");
        ShardTree::gather_values(&group, &mut of_shards).expect("losses");
        losses.push(tree.sum(&of_shards).to_bits());
        first += len;
    }
    Trained {
        params: bits(params.flat()),
        buffers: bits(params.buffers_flat()),
        optimizer: optimizer.state().iter().map(|(_, v)| bits(v)).collect(),
        losses,
        gradient,
    }
}

#[test]
fn any_number_of_ranks_has_the_same_bits() {
    let want = ranks(1, Over::Thread, |g| train(g, 8, 1)).remove(0);
    assert_eq!(want.losses.len(), BATCHES.len());
    for world in [1, 2, 3, 4, 8] {
        let transports: &[Over] = if world == 3 || world == 4 {
            &ALL
        } else {
            &[Over::Thread]
        };
        for &over in transports {
            for (rank, got) in ranks(world, over, |g| train(g, 8, 1 + world % 2))
                .into_iter()
                .enumerate()
            {
                assert!(got == want, "rank {rank} of {world} over {over:?}");
            }
        }
    }
}

/// One process, one batch, plain batch normalisation.
#[test]
fn the_first_step_is_that_of_the_joined_batch() {
    let (net, mut params) = model();
    let mut tape = Tape::new(Threads(1));
    let mut grads = Grads::like(&params);
    let samples: Vec<u64> = (0..BATCHES[0] as u64).collect();
    let sum = backward(&net, &params, &mut tape, &samples, [1.0], &mut grads).expect("backward");
    tape.update_buffers(&mut params).expect("buffers");
    let want: Vec<f32> = params.ids().flat_map(|p| grads.grad(p).to_vec()).collect();
    let largest = want.iter().fold(0.0f32, |a, v| a.max(v.abs()));
    assert!(largest > 0.05, "{largest}");
    for shards in [1, 5, 8] {
        let got = ranks(1, Over::Thread, |g| train(g, shards, 1)).remove(0);
        let loss = f64::from_bits(got.losses[0]);
        assert!((loss - sum).abs() < 1e-5 * sum, "{loss} for {sum}");
        for (got, want) in got.gradient.iter().zip(&want) {
            assert!(
                (got - want).abs() < 1e-6,
                "{shards} shards: {got} for {want}"
            );
        }
    }
}

/// Running statistics after one step, against those of the joined batch.
#[test]
fn running_statistics_are_those_of_the_joined_batch() {
    let (net, mut params) = model();
    let mut tape = Tape::new(Threads(1));
    let samples: Vec<u64> = (0..16).collect();
    let mut grads = Grads::like(&params);
    backward(&net, &params, &mut tape, &samples, [1.0], &mut grads).expect("backward");
    tape.update_buffers(&mut params).expect("buffers");
    let want = params.buffers_flat().to_vec();
    for got in ranks(3, Over::Thread, |group| {
        let tree = ShardTree::new(6).expect("fits");
        let (net, mut params) = model();
        let mut ddp =
            DistributedDataParallel::new(group.clone(), &mut params, options(6)).expect("ddp");
        let mut team = JoinedShards::new(Threads(1));
        let before = params.buffers_flat().to_vec();
        let (sizes, global) = sizes(tree, &group, 16);
        let mut step = ddp.begin_known(&sizes, global).expect("begin");
        step.run_joined(&mut team, &mut params, |s| {
            let own: Vec<u64> = (s.shard..16).step_by(6).map(|i| i as u64).collect();
            backward(&net, s.params, s.tape, &own, s.weight, s.sink)?;
            Ok(())
        })
        .expect("joined");
        assert!(step.finish().expect("finish").is_yes());
        assert_eq!(
            params.buffers_flat(),
            before,
            "not before the step is taken"
        );
        ddp.sync_buffers(&mut params).expect("buffers");
        params.buffers_flat().to_vec()
    }) {
        for (got, want) in got.iter().zip(&want) {
            assert!((got - want).abs() < 1e-6, "{got} for {want}");
        }
    }
}

/// One shard of one rank goes wrong; nobody waits for it.
#[test]
fn a_shard_that_fails_or_panics_ends_the_step_for_all() {
    for panics in [false, true] {
        let errors = ranks(2, Over::Thread, |group| -> Error {
            let tree = ShardTree::new(4).expect("fits");
            let (net, mut params) = model();
            // A rank may meet the abort of a peer that was faster even here.
            let mut ddp = match DistributedDataParallel::new(group.clone(), &mut params, options(4))
            {
                Ok(ddp) => ddp,
                Err(e) => return e,
            };
            let mut team = JoinedShards::new(Threads(1));
            let (sizes, global) = sizes(tree, &group, 16);
            let mut step = ddp.begin_known(&sizes, global).expect("begin");
            step.run_joined(&mut team, &mut params, |s| {
                if s.shard == 3 {
                    assert!(!panics, "as the test wants it");
                    return Err("no such picture".into());
                }
                let own: Vec<u64> = (s.shard..16).step_by(4).map(|i| i as u64).collect();
                backward(&net, s.params, s.tape, &own, s.weight, s.sink)?;
                Ok(())
            })
            .expect_err("a shard failed")
        });
        for (rank, error) in errors.iter().enumerate() {
            let mut text = error.to_string();
            let mut cause = std::error::Error::source(error);
            while let Some(inner) = cause {
                text = format!("{text}: {inner}");
                cause = inner.source();
            }
            let words = if panics {
                "shard 3 did not end"
            } else {
                "no such picture"
            };
            assert!(text.contains(words), "rank {rank}: {text}");
        }
    }
}

#[test]
fn mistakes_are_named() {
    let alone = || ProcessGroup::threads(1, Default::default()).remove(0);
    let (_, mut params) = model();
    let mut ddp =
        DistributedDataParallel::new(alone(), &mut params, DdpOptions::default()).expect("ddp");
    let mut team = JoinedShards::new(Threads(1));
    let mut step = ddp.begin(&[4]).expect("begin");
    let text = step
        .run_joined(&mut team, &mut params, |_| Ok(()))
        .expect_err("no shards")
        .to_string();
    assert!(text.contains("Deterministic::Shards"), "{text}");
    let mut ddp = DistributedDataParallel::new(alone(), &mut params, options(2)).expect("ddp");
    let global = GlobalBatch {
        samples: 4,
        micro_batches: 2,
        active_ranks: 1,
    };
    let mut step = ddp.begin_known(&[2, 2], global).expect("begin");
    step.micro_batch().expect("declared");
    let text = step
        .run_joined(&mut team, &mut params, |_| Ok(()))
        .expect_err("too late")
        .to_string();
    assert!(text.contains("leave out micro_batch"), "{text}");
}
