//! ResNet-18 with batch norm and Adam: the same bits for every number of
//! ranks, also when a run is stopped and goes on with another.
//!
//! Small pictures: the layers are those of CIFAR's, at a sixteenth of the work.

use crate::common::{Over, bits, ranks};
use phalanx_comm::ProcessGroup;
use phalanx_ddp::{DdpOptions, Deterministic, DistributedDataParallel, GlobalBatch, ShardTree};
use phalanx_nn::models::CifarResNet;
use phalanx_nn::optim::{Adam, Optimizer};
use phalanx_nn::{Params, Scope, Seed, StepKey, Tape, Threads};

const SIDE: usize = 8;
/// Samples of a step: not a multiple of the shards.
const BATCH: usize = 21;
const SHARDS: usize = 8;
const STEPS: usize = 30;
/// Steps after which a run is stopped.
const STOP: usize = 17;

/// All that a run goes on from.
#[derive(Clone, PartialEq)]
struct State {
    params: Vec<f32>,
    buffers: Vec<f32>,
    optimizer: Vec<(&'static str, Vec<f32>)>,
    losses: Vec<u64>,
}

fn pixels(sample: u64) -> impl Iterator<Item = f32> {
    (0..(SIDE * SIDE * 3) as u64).map(move |i| {
        let x = (sample * 193 + i).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 40;
        x as f32 / (1u32 << 23) as f32 - 1.0
    })
}

fn same(a: &State, b: &State) -> bool {
    let optimizer =
        |s: &State| -> Vec<_> { s.optimizer.iter().map(|(n, v)| (*n, bits(v))).collect() };
    bits(&a.params) == bits(&b.params)
        && bits(&a.buffers) == bits(&b.buffers)
        && optimizer(a) == optimizer(b)
        && a.losses == b.losses
}

/// Steps `from` to `to` on this rank.
fn train(
    group: ProcessGroup,
    widths: &[usize],
    start: Option<&State>,
    from: usize,
    to: usize,
) -> State {
    let (rank, world) = (group.rank(), group.world_size());
    let tree = ShardTree::new(SHARDS).expect("fits");
    let mut scope = Scope::new(Seed(1));
    let net = CifarResNet::new(&mut scope, widths, 2, 10);
    let mut params: Params = scope.build().expect("model builds");
    let mut optimizer = Adam::new(&params, 1e-3);
    let mut losses = Vec::new();
    if let Some(start) = start {
        params.flat_mut().copy_from_slice(&start.params);
        params.buffers_flat_mut().copy_from_slice(&start.buffers);
        let state: Vec<(&str, &[f32])> =
            start.optimizer.iter().map(|(n, v)| (*n, &v[..])).collect();
        let updates = vec![from as u64; params.len()];
        optimizer
            .restore(from as u64, &updates, &state)
            .expect("restore");
        losses.clone_from(&start.losses);
    }
    let options = DdpOptions {
        deterministic: Deterministic::Shards(tree),
        ..DdpOptions::default()
    };
    let mut ddp = DistributedDataParallel::new(group.clone(), &mut params, options).expect("ddp");
    let mut tape = Tape::new(Threads(1 + world % 2));
    let global = GlobalBatch {
        samples: BATCH,
        micro_batches: tree.present(BATCH),
        active_ranks: world,
    };
    for i in from..to {
        let mine = tree.range(world, rank);
        let sizes: Vec<usize> = mine.clone().map(|s| tree.size(BATCH, s)).collect();
        let mut of_shards = vec![0.0; SHARDS];
        let mut step = ddp.begin_known(&sizes, global).expect("begin");
        for shard in mine {
            let samples: Vec<u64> = (shard..BATCH)
                .step_by(SHARDS)
                .map(|s| (i * BATCH + s) as u64)
                .collect();
            let images: Vec<f32> = samples.iter().flat_map(|s| pixels(*s)).collect();
            let labels: Vec<u32> = samples.iter().map(|s| (s * 7 % 10) as u32).collect();
            let tape_step = tape.step(&params, StepKey::new(0, i as u64).samples(&samples));
            let x = tape_step
                .input(&images, &[samples.len(), SIDE, SIDE, 3])
                .expect("input");
            let loss = net
                .forward(x)
                .and_then(|x| x.log_softmax())
                .and_then(|x| x.nll_loss(&labels, samples.len() as f32))
                .expect("forward");
            of_shards[shard] = f64::from(loss.item().unwrap()) * samples.len() as f64;
            loss.backward(step.micro_batch().expect("declared"))
                .expect("backward");
            drop(tape_step);
            step.update_buffers(&mut tape, &mut params)
                .expect("buffers");
        }
        assert!(step.finish().expect("finish").is_yes());
        ddp.sync_buffers(&mut params).expect("buffers");
        optimizer.step(&mut params, &ddp).expect("step");
        ShardTree::gather_values(&group, &mut of_shards).expect("losses");
        losses.push(tree.sum(&of_shards).to_bits());
    }
    State {
        params: params.flat().to_vec(),
        buffers: params.buffers_flat().to_vec(),
        optimizer: optimizer
            .state()
            .into_iter()
            .map(|(n, v)| (n, v.to_vec()))
            .collect(),
        losses,
    }
}

#[test]
fn any_number_of_ranks_trains_the_same_narrow_resnet_18_also_across_a_stop() {
    check(&[4, 8, 16, 32]);
}

#[test]
#[ignore = "ten minutes; cargo test -p phalanx-ddp --test resnet_shards -- --ignored"]
fn any_number_of_ranks_trains_the_same_resnet_18_also_across_a_stop() {
    check(&[64, 128, 256, 512]);
}

fn check(widths: &[usize]) {
    let run = |world, over, start: Option<&State>, from, to| {
        let all = ranks(world, over, |group| train(group, widths, start, from, to));
        assert!(
            all.iter().all(|s| same(s, &all[0])),
            "ranks of {world} differ"
        );
        all.into_iter().next().expect("a rank")
    };
    let want = run(1, Over::Thread, None, 0, STEPS);
    assert_eq!(want.losses.len(), STEPS);
    for (world, over) in [
        (2, Over::Shm),
        (3, Over::Tcp),
        (4, Over::Thread),
        (8, Over::Thread),
    ] {
        assert!(
            same(&run(world, over, None, 0, STEPS), &want),
            "{world} ranks over {over:?}"
        );
    }
    for ((one, over), (other, then)) in [
        ((3, Over::Thread), (2, Over::Shm)),
        ((1, Over::Thread), (4, Over::Tcp)),
        ((2, Over::Tcp), (1, Over::Thread)),
    ] {
        let stopped = run(one, over, None, 0, STOP);
        let gone_on = run(other, then, Some(&stopped), STOP, STEPS);
        assert!(
            same(&gone_on, &want),
            "stopped on {one} ranks over {over:?}, went on with {other} over {then:?}"
        );
    }
}
