//! N ranks equal one rank with N micro-batches, bit for bit, with batch
//! normalisation; running statistics follow the policy.

use crate::common::{ALL, Over, bits, ranks, value};
use phalanx_comm::ProcessGroup;
use phalanx_ddp::{Buffers, DdpOptions, DistributedDataParallel, Every};
use phalanx_nn::models::CifarResNet;
use phalanx_nn::optim::{Optimizer, Sgd};
use phalanx_nn::{Params, Scope, Seed, StepKey, Tape, Threads};

const SIDE: usize = 8;
/// Samples of a micro-batch.
const BATCH: usize = 3;
const STEPS: usize = 4;

#[derive(Clone, PartialEq)]
struct Trained {
    params: Vec<u32>,
    momentum: Vec<u32>,
    /// By step and micro-batch of this rank.
    losses: Vec<u32>,
    /// After each step.
    buffers: Vec<Vec<f32>>,
}

/// Trains with `of` micro-batches a step over all ranks.
fn train(group: ProcessGroup, of: usize, buffers: Buffers) -> Trained {
    let (rank, world) = (group.rank(), group.world_size());
    let mut scope = Scope::new(Seed(1));
    let net = CifarResNet::new(&mut scope, &[8, 16], 1, 10);
    let mut params: Params = scope.build().expect("model builds");
    let options = DdpOptions {
        buffers,
        ..DdpOptions::default()
    };
    let mut ddp = DistributedDataParallel::new(group, &mut params, options).expect("ddp");
    let mut optimizer = Sgd::new(&params, 0.05).momentum(0.9);
    let mut tape = Tape::new(Threads(1));
    let each = of / world;
    let (mut losses, mut all_buffers) = (Vec::new(), Vec::new());
    for index in 0..STEPS {
        let mut step = ddp.begin(&vec![BATCH; each]).expect("begin");
        for part in rank * each..(rank + 1) * each {
            let samples: Vec<u64> = (0..BATCH as u64)
                .map(|s| ((index * of + part) * BATCH) as u64 + s)
                .collect();
            let len = SIDE * SIDE * 3;
            let images: Vec<f32> = samples
                .iter()
                .flat_map(|s| (0..len).map(move |i| value(*s as usize * len + i)))
                .collect();
            let labels: Vec<u32> = samples.iter().map(|s| (s * 7 % 10) as u32).collect();
            let key = StepKey::new(0, index as u64).samples(&samples);
            let tape_step = tape.step(&params, key);
            let x = tape_step
                .input(&images, &[BATCH, SIDE, SIDE, 3])
                .expect("input");
            let loss = net
                .forward(x)
                .and_then(|x| x.cross_entropy(&labels, BATCH as f32))
                .expect("forward");
            losses.push(loss.item().unwrap().to_bits());
            loss.backward(step.micro_batch().expect("declared"))
                .expect("backward");
            drop(tape_step);
            step.update_buffers(&mut tape, &mut params)
                .expect("buffers");
        }
        assert!(step.finish().expect("finish").is_yes());
        optimizer.step(&mut params, &ddp).expect("step");
        ddp.sync_buffers(&mut params).expect("buffers");
        all_buffers.push(params.buffers_flat().to_vec());
    }
    Trained {
        params: bits(params.flat()),
        momentum: bits(optimizer.state()[0].1),
        losses,
        buffers: all_buffers,
    }
}

/// Losses of all ranks in the order of one rank.
fn joined(all: &[Trained]) -> Vec<u32> {
    let steps = (0..STEPS).flat_map(|s| all.iter().map(move |t| t.losses[s]));
    steps.collect()
}

#[test]
fn ranks_equal_one_rank_that_accumulates() {
    for world in [2, 3, 4, 8] {
        let want = ranks(1, Over::Thread, |g| train(g, world, Buffers::Never)).remove(0);
        let transports: &[Over] = if world == 3 { &ALL } else { &[Over::Thread] };
        for &over in transports {
            let all = ranks(world, over, |g| train(g, world, Buffers::Never));
            for (rank, got) in all.iter().enumerate() {
                assert!(
                    got.params == want.params && got.momentum == want.momentum,
                    "rank {rank} of {world} over {over:?}"
                );
            }
            assert_eq!(joined(&all), want.losses);
        }
    }
}

#[test]
fn running_statistics_follow_the_policy() {
    let run = |buffers| ranks(3, Over::Thread, |g| train(g, 3, buffers));
    let own = run(Buffers::Never);
    assert!(
        own[0].buffers != own[1].buffers,
        "each rank has its own data"
    );
    for got in run(Buffers::RankZero(Every::Step)) {
        // Rank 0 never sees another's, so it goes on as by itself.
        assert!(got.params == own[0].params && got.buffers == own[0].buffers);
    }
    for got in run(Buffers::Mean(Every::Step)) {
        assert!(got.params == own[0].params);
        // The running ones are linear in the batches', so a mean of each step is one of all.
        for (got, step) in got.buffers.iter().zip(0..STEPS) {
            for (i, got) in got.iter().enumerate() {
                let mean = own
                    .iter()
                    .map(|t| f64::from(t.buffers[step][i]))
                    .sum::<f64>()
                    / 3.0;
                let apart = (f64::from(*got) - mean).abs();
                assert!(apart < 1e-5 * mean.abs().max(1.0), "{got} for {mean}");
            }
        }
    }
    let epochs = run(Buffers::Mean(Every::Epoch));
    assert!(
        epochs.iter().zip(&own).all(|(a, b)| a.buffers == b.buffers),
        "no epoch has ended"
    );
}
