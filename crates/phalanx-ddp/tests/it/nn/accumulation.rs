//! Training on P ranks equals P-fold gradient accumulation in one process, bit
//! for bit: ten steps of the MNIST CNN with dropout and momentum, losses and
//! parameters, over every transport and with buckets of any size.

use crate::common::{ALL, Over, bits, ranks};
use phalanx_comm::ProcessGroup;
use phalanx_ddp::{BucketCaps, DdpOptions, DistributedDataParallel};
use phalanx_nn::models::MnistCnn;
use phalanx_nn::optim::Sgd;
use phalanx_nn::{GradSink, GradView, Grads, ParamId, Params, Scope, Seed, StepKey, Tape, Threads};

const STEPS: usize = 10;
/// Samples per rank and step. Odd, so nothing is a multiple of a vector.
const BATCH: usize = 3;
const PIXELS: usize = 28 * 28;

/// Images and labels of micro-batch `rank` of `step`: any fixed function will do.
fn data(step: usize, rank: usize) -> (Vec<f32>, Vec<u32>, Vec<u64>) {
    let first = (step * 8 + rank) * BATCH;
    let noise = |i: usize| {
        let x = (i as u32).wrapping_mul(2_654_435_761) ^ 0x9e37_79b9;
        (x.wrapping_mul(x >> 15) >> 8) as f32 / (1 << 24) as f32 - 0.5
    };
    let images = (0..BATCH * PIXELS)
        .map(|i| noise(first * PIXELS + i))
        .collect();
    let labels = (0..BATCH).map(|i| ((first + i) * 7 % 10) as u32).collect();
    let samples = (0..BATCH).map(|i| (first + i) as u64).collect();
    (images, labels, samples)
}

fn model() -> (MnistCnn, Params) {
    let mut scope = Scope::new(Seed(7));
    let net = MnistCnn::new(&mut scope);
    (net, scope.build().expect("model builds"))
}

/// Forward and backward of one micro-batch into `sink`; the loss.
fn micro_step(
    tape: &mut Tape,
    net: &MnistCnn,
    params: &Params,
    step: usize,
    rank: usize,
    sink: &mut dyn GradSink,
) -> f32 {
    let (images, labels, samples) = data(step, rank);
    let key = StepKey::new(0, step as u64).seed(11).samples(&samples);
    let step = tape.step(params, key);
    let x = step.input(&images, &[BATCH, 28, 28, 1]).expect("input");
    let loss = net
        .forward(x)
        .and_then(|scores| scores.nll_loss(&labels, BATCH as f32))
        .expect("forward");
    let value = loss.item().unwrap();
    loss.backward(sink).expect("backward");
    value
}

struct Trained {
    losses: Vec<u32>,
    params: Vec<u32>,
}

/// The oracle: no process group, no reducer. Each micro-batch's gradient is
/// finished in its own buffer; buffers are added in rank order and scaled once.
fn accumulated(world: usize) -> Vec<Trained> {
    struct Sum(Vec<Vec<f32>>);
    impl GradView for Sum {
        fn grad(&self, param: ParamId) -> &[f32] {
            &self.0[param.index()]
        }
    }
    let (net, mut params) = model();
    let mut tape = Tape::new(Threads(1));
    let mut optimizer = Sgd::new(&params, 0.05).momentum(0.9);
    let mut losses = vec![Vec::new(); world];
    for step in 0..STEPS {
        let mut sum = Sum(Vec::new());
        for (rank, losses) in losses.iter_mut().enumerate() {
            let mut grads = Grads::like(&params);
            losses.push(micro_step(&mut tape, &net, &params, step, rank, &mut grads).to_bits());
            for id in params.ids() {
                let grad = grads.grad(id);
                if rank == 0 {
                    sum.0.push(grad.to_vec());
                } else {
                    for (s, g) in sum.0[id.index()].iter_mut().zip(grad) {
                        *s += g;
                    }
                }
            }
        }
        let scale = 1.0 / world as f32;
        sum.0.iter_mut().flatten().for_each(|s| *s *= scale);
        optimizer.step(&mut params, &sum).expect("step");
    }
    losses
        .into_iter()
        .map(|losses| Trained {
            losses,
            params: bits(params.flat()),
        })
        .collect()
}

fn distributed(group: ProcessGroup, caps: BucketCaps) -> Trained {
    let rank = group.rank();
    let (net, mut params) = model();
    // Ranks but 0 start elsewhere: construction must bring them in line.
    if rank > 0 {
        params.flat_mut().iter_mut().for_each(|p| *p += 1.0);
    }
    let options = DdpOptions {
        caps: Some(caps),
        ..DdpOptions::default()
    };
    let mut ddp = DistributedDataParallel::new(group, &mut params, options).expect("ddp");
    let mut tape = Tape::new(Threads(1));
    let mut optimizer = Sgd::new(&params, 0.05).momentum(0.9);
    let mut losses = Vec::new();
    for step in 0..STEPS {
        losses.push(micro_step(&mut tape, &net, &params, step, rank, &mut ddp).to_bits());
        assert!(ddp.finish().expect("finish").is_yes());
        optimizer.step(&mut params, &ddp).expect("step");
    }
    Trained {
        losses,
        params: bits(params.flat()),
    }
}

fn check(world: usize, over: &[Over], caps: &[BucketCaps]) {
    let want = accumulated(world);
    for &over in over {
        for &caps in caps {
            let got = ranks(world, over, |group| distributed(group, caps));
            for (rank, (got, want)) in got.iter().zip(&want).enumerate() {
                assert_eq!(
                    got.losses, want.losses,
                    "losses of rank {rank} of {world} over {over:?}, {caps:?}"
                );
                let first = got
                    .params
                    .iter()
                    .zip(&want.params)
                    .position(|(g, w)| g != w);
                assert_eq!(
                    first, None,
                    "first parameter of rank {rank} of {world} over {over:?}, {caps:?}"
                );
            }
        }
    }
}

/// One tensor a bucket; the defaults; everything in one bucket.
const CAPS: [BucketCaps; 3] = [
    BucketCaps {
        first_bytes: 1,
        cap_bytes: 1,
        last_bytes: None,
    },
    BucketCaps::ONE_HOST,
    BucketCaps {
        first_bytes: usize::MAX,
        cap_bytes: usize::MAX,
        last_bytes: None,
    },
];

#[test]
fn two_ranks_equal_two_fold_accumulation() {
    check(2, &ALL, &CAPS);
}

#[test]
fn three_ranks_equal_three_fold_accumulation() {
    check(3, &ALL, &CAPS);
}

#[test]
fn four_ranks_equal_four_fold_accumulation() {
    check(4, &ALL, &CAPS);
}
