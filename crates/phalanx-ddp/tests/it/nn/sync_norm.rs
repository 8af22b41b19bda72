//! Synchronised batch normalisation against PyTorch and the joined batch.

use std::sync::Arc;

use crate::common::{ALL, Over, ranks, value};
use phalanx_comm::{ProcessGroup, ReduceOp};
use phalanx_ddp::{
    DdpOptions, Deterministic, DistributedDataParallel, ErrorKind, GlobalBatch, ShardTree,
    SyncBatchNorm,
};
use phalanx_nn::layers::{BatchNorm, Linear};
use phalanx_nn::models::CifarResNet;
use phalanx_nn::optim::Sgd;
use phalanx_nn::{GradView, Grads, Params, Reduction, Scope, Seed, StepKey, Tape, Threads};
use serde_json::Value;

fn floats(value: &Value) -> Vec<f32> {
    let data = value["data"].as_array().expect("data");
    data.iter()
        .map(|v| v.as_f64().expect("a number") as f32)
        .collect()
}

/// PyTorch's `(N, C, ...)` as our `(N, ..., C)`, and back.
fn channels_last(values: &[f32], shape: &[usize], back: bool) -> Vec<f32> {
    let (n, c) = (shape[0], shape[1]);
    let space: usize = shape[2..].iter().product();
    let mut out = vec![0.0; values.len()];
    for i in 0..n * c * space {
        let (sample, channel, place) = (i / (c * space), i / space % c, i % space);
        let ours = (sample * space + place) * c + channel;
        if back {
            out[i] = values[ours];
        } else {
            out[ours] = values[i];
        }
    }
    out
}

fn close(got: &[f32], want: &[f32], what: &str) {
    assert_eq!(got.len(), want.len(), "{what}");
    for (i, (g, w)) in got.iter().zip(want).enumerate() {
        let bound = 1e-6 * w.abs().max(1.0);
        assert!(
            (g - w).abs() <= bound,
            "{what}[{i}] is {g}, PyTorch has {w}"
        );
    }
}

/// All fields of one rank of one case.
fn check_case(case: &Value, group: ProcessGroup) {
    let name = case["name"].as_str().expect("name");
    let rank = group.rank();
    let shape: Vec<usize> = case["x"]["shape"]
        .as_array()
        .expect("shape")
        .iter()
        .map(|n| n.as_u64().expect("a size") as usize)
        .collect();
    let sizes: Vec<usize> = case["rank_sizes"]
        .as_array()
        .expect("sizes")
        .iter()
        .map(|n| n.as_u64().expect("a size") as usize)
        .collect();
    let row: usize = shape[1..].iter().product();
    let first: usize = sizes[..rank].iter().sum();
    let own = |key: &str| floats(&case[key])[first * row..(first + sizes[rank]) * row].to_vec();
    let mut own_shape = shape.clone();
    own_shape[0] = sizes[rank];
    // N, spatial dimensions, C.
    let mut ours: Vec<usize> = own_shape.clone();
    let channels = ours.remove(1);
    ours.push(channels);

    let mut scope = Scope::new(Seed(1));
    let norm = BatchNorm::new(scope.enter("bn"), channels);
    let mut params = scope.build().expect("model builds");
    let id = |name: &str, params: &Params| params.find(name).expect("parameter");
    for (name, key) in [("bn.weight", "weight"), ("bn.bias", "bias")] {
        let id = id(name, &params);
        params.import(id, &floats(&case[key])).expect("import");
    }
    let mut ddp =
        DistributedDataParallel::new(group, &mut params, DdpOptions::default()).expect("ddp");
    let mut tape = Tape::new(Threads(1));
    ddp.sync_batch_norm(&mut tape).expect("converted");
    let mut grads = Grads::like(&params);
    {
        let step = tape.step(&params, StepKey::new(0, 0));
        let x = channels_last(&own("x"), &own_shape, false);
        let x = step.variable(&x, &ours).expect("input");
        let shared = x.share();
        let y = norm.forward(x).expect("forward");
        let out = channels_last(y.data(), &own_shape, true);
        close(&out, &own("out"), &format!("{name}: out of rank {rank}"));
        let dout = channels_last(&own("dout"), &own_shape, false);
        y.backward_with(&dout, &mut grads).expect("backward");
        let dx = shared.grad().unwrap_or_default();
        let dx = channels_last(&dx, &own_shape, true);
        close(
            &dx,
            &own("grad_x"),
            &format!("{name}: grad_x of rank {rank}"),
        );
    }
    let local = &case["grads_of_each_rank_before_averaging"][rank];
    for (param, key) in [("bn.weight", "grad_weight"), ("bn.bias", "grad_bias")] {
        let got = grads.grad(id(param, &params));
        for (g, w) in got.iter().zip(floats(&local[key])) {
            assert!(
                (g - w).abs() < 1e-5,
                "{name}: {key} of rank {rank}: {g} for {w}"
            );
        }
    }
    tape.update_buffers(&mut params).expect("buffers");
    for (buffer, key) in [
        ("bn.running_mean", "running_mean"),
        ("bn.running_var", "running_var"),
    ] {
        let id = params.find_buffer(buffer).expect("buffer");
        close(
            params.buffer(id),
            &floats(&case[key]),
            &format!("{name}: {key} of rank {rank}"),
        );
    }
}

#[test]
fn every_case_of_pytorch() {
    let text = include_str!("../../fixtures/syncbn.json");
    let cases: Vec<Value> = serde_json::from_str(text).expect("fixture");
    assert_eq!(cases.len(), 4);
    for case in &cases {
        let world = case["rank_sizes"].as_array().expect("sizes").len();
        for over in ALL {
            ranks(world, over, |group| check_case(case, group));
        }
    }
}

struct Net {
    first: Linear,
    norm: BatchNorm,
    last: Linear,
}

fn model() -> (Net, Params) {
    let mut scope = Scope::new(Seed(5));
    let net = Net {
        first: Linear::new(scope.enter("first"), 3, 6),
        norm: BatchNorm::new(scope.enter("norm"), 6),
        last: Linear::new(scope.enter("last"), 6, 2),
    };
    (net, scope.build().expect("model builds"))
}

/// Samples `from..from + n` through the model; mean loss and its backward.
fn backward(
    net: &Net,
    params: &Params,
    tape: &mut Tape,
    (from, n): (usize, usize),
    weight: [f32; 1],
    sink: &mut dyn phalanx_nn::GradSink,
) {
    let value = |i: usize| ((i * 37 + 11) % 101) as f32 / 50.0 - 1.0;
    let x: Vec<f32> = (from * 3..(from + n) * 3).map(value).collect();
    let y: Vec<f32> = (from * 2..(from + n) * 2).map(|i| value(i + 5)).collect();
    let step = tape.step(params, StepKey::new(0, 0));
    let x = step.input(&x, &[n, 3]).expect("input");
    let loss = net
        .first
        .forward(x)
        .and_then(|x| net.norm.forward(x))
        .and_then(phalanx_nn::Tensor::relu)
        .and_then(|x| net.last.forward(x))
        .and_then(|x| x.mse_loss(&y, Reduction::Mean))
        .expect("forward");
    loss.backward_with(&weight, sink).expect("backward");
}

/// A whole step of a whole model: uneven ranks, one of them without data.
#[test]
fn a_step_of_uneven_ranks_is_that_of_the_joined_batch() {
    for sizes in [vec![5, 3], vec![1, 4, 2], vec![3, 0, 2, 6], vec![2; 8]] {
        let (net, mut joined) = model();
        let total = sizes.iter().sum();
        let mut want = Grads::like(&joined);
        let mut tape = Tape::new(Threads(1));
        backward(&net, &joined, &mut tape, (0, total), [1.0], &mut want);
        tape.update_buffers(&mut joined).expect("buffers");
        let (want, joined, sizes) = (&want, &joined, &sizes);
        ranks(sizes.len(), Over::Thread, |group| {
            let rank = group.rank();
            let from = sizes[..rank].iter().sum();
            let (net, mut params) = model();
            let mut ddp = DistributedDataParallel::new(group, &mut params, DdpOptions::default())
                .expect("ddp");
            let mut tape = Tape::new(Threads(1));
            ddp.sync_batch_norm(&mut tape).expect("converted");
            // A rank without data runs a batch of none.
            let mut step = ddp.begin(&sizes[rank..=rank]).expect("begin");
            let (weight, sink) = step.weighed_micro_batch().expect("declared");
            let part = (from, sizes[rank]);
            backward(&net, &params, &mut tape, part, weight, sink);
            assert!(step.finish().expect("finish").is_yes());
            tape.update_buffers(&mut params).expect("buffers");
            for (id, info) in params.ids().zip(params.infos()) {
                for (g, w) in ddp.grad(id).iter().zip(want.grad(id)) {
                    assert!(
                        (g - w).abs() < 1e-6,
                        "{} of rank {rank}: {g} for {w}",
                        info.name
                    );
                }
            }
            for (b, w) in params.buffers_flat().iter().zip(joined.buffers_flat()) {
                assert!((b - w).abs() < 1e-6, "buffers of rank {rank}: {b} for {w}");
            }
        });
    }
}

/// Three steps of a small ResNet on samples from a first to before a last one in each micro-batch, as a training loop takes
/// them; weights and running statistics.
fn train_resnet(group: ProcessGroup, micro_batches: &[(usize, usize)]) -> [Vec<f32>; 2] {
    const SIDE: usize = 8;
    let mut scope = Scope::new(Seed(1));
    let net = CifarResNet::new(&mut scope, &[32, 64], 1, 10);
    let mut params = scope.build().expect("model builds");
    let options = DdpOptions::default();
    let mut ddp = DistributedDataParallel::new(group, &mut params, options).expect("ddp");
    let mut tape = Tape::new(Threads(1));
    ddp.sync_batch_norm(&mut tape).expect("converted");
    let mut optimizer = Sgd::new(&params, 0.1).momentum(0.9);
    let sizes: Vec<usize> = micro_batches.iter().map(|(from, to)| to - from).collect();
    for index in 0..3 {
        let mut step = ddp.begin(&sizes).expect("begin");
        for &(from, to) in micro_batches {
            let at = |sample: usize| (index * 100 + sample) * SIDE * SIDE * 3;
            let images: Vec<f32> = (at(from)..at(to)).map(value).collect();
            let labels: Vec<u32> = (from..to).map(|s| (s * 7 % 10) as u32).collect();
            let recorded = tape.step(&params, StepKey::new(0, index as u64));
            let x = recorded.input(&images, &[labels.len(), SIDE, SIDE, 3]);
            let loss = x
                .and_then(|x| net.forward(x))
                .and_then(phalanx_nn::Tensor::log_softmax)
                .and_then(|x| x.nll_loss(&labels, labels.len() as f32))
                .expect("forward");
            let (weight, sink) = step.weighed_micro_batch().expect("declared");
            loss.backward_with(&weight, sink).expect("backward");
            drop(recorded);
            step.update_buffers(&mut tape, &mut params)
                .expect("buffers");
        }
        assert!(step.finish().expect("finish").is_yes());
        ddp.sync_buffers(&mut params).expect("buffers");
        optimizer.step(&mut params, &ddp).expect("step");
    }
    [params.flat().to_vec(), params.buffers_flat().to_vec()]
}

/// Convolutions, pooling and the loss run on no samples as well; ranks with several micro-batches join them one by one.
#[test]
fn a_resnet_of_uneven_ranks_trains_as_on_the_joined_batch() {
    let serial = |micro_batches: &[(usize, usize)]| {
        let alone = ProcessGroup::threads(1, Default::default()).remove(0);
        train_resnet(alone, micro_batches)
    };
    let close = |got: &[Vec<f32>; 2], want: &[Vec<f32>; 2], what: &str| {
        for (g, w) in got.iter().flatten().zip(want.iter().flatten()) {
            assert!((g - w).abs() < 1e-5, "{what}: {g} for {w}");
        }
    };
    // One micro-batch a rank: the third rank has none of the 6 samples.
    let want = serial(&[(0, 6)]);
    let cut = [[(0, 4)], [(4, 6)], [(6, 6)]];
    let all = ranks(3, Over::Thread, |group| {
        let mine = &cut[group.rank()];
        train_resnet(group, mine)
    });
    all.iter()
        .for_each(|got| close(got, &want, "one micro-batch"));
    assert!(all[1..].iter().all(|got| *got == all[0]), "ranks differ");
    // Two a rank; those of the same number are normalised together.
    let want = serial(&[(0, 5), (5, 8)]);
    let cut = [[(0, 3), (5, 8)], [(3, 5), (8, 8)]];
    let all = ranks(2, Over::Thread, |group| {
        let mine = &cut[group.rank()];
        train_resnet(group, mine)
    });
    all.iter()
        .for_each(|got| close(got, &want, "two micro-batches"));
    assert_eq!(all[0], all[1]);
}

/// Statistics of some of the ranks only: PyTorch's `process_group` option.
#[test]
fn a_group_of_its_own_joins_its_ranks_alone() {
    let sizes = [3, 2, 1, 5];
    for members in [[0, 2], [1, 3]] {
        // The joined batch of these two ranks, in ascending order of ranks.
        let total = members.iter().map(|r| sizes[*r]).sum::<usize>();
        let (net, params) = model();
        let mut want = Grads::like(&params);
        let mut tape = Tape::new(Threads(1));
        let all = (0, total);
        backward(&net, &params, &mut tape, all, [total as f32], &mut want);
        let (want, params) = (&want, &params);
        ranks(4, Over::Thread, |group| {
            let rank = group.rank();
            let pair = group.new_group(&members).expect("group");
            let others: Vec<usize> = (0..4).filter(|r| !members.contains(r)).collect();
            let other_pair = group.new_group(&others).expect("group");
            let Some(pair) = pair else {
                // Another normalisation at the same time, of other sizes.
                let pair = other_pair.expect("member of one or the other");
                let mut tape = Tape::new(Threads(1));
                tape.join_statistics(Some(Arc::new(SyncBatchNorm::new(pair))));
                let mut grads = Grads::like(params);
                let part = (20 * rank, sizes[rank]);
                return backward(&net, params, &mut tape, part, [1.0], &mut grads);
            };
            let from = if rank == members[0] {
                0
            } else {
                sizes[members[0]]
            };
            let mut tape = Tape::new(Threads(1));
            tape.join_statistics(Some(Arc::new(SyncBatchNorm::new(pair.clone()))));
            let mut grads = Grads::like(params);
            let part = (from, sizes[rank]);
            let weight = [sizes[rank] as f32];
            backward(&net, params, &mut tape, part, weight, &mut grads);
            let mut sum = grads.flat().to_vec();
            pair.all_reduce(&mut sum, ReduceOp::Sum).expect("sum");
            for (g, w) in sum.iter().zip(want.flat()) {
                assert!((g - w).abs() < 1e-5, "rank {rank}: {g} for {w}");
            }
        });
    }
}

/// Only one rank evaluates: were there any communication, it would wait in vain.
#[test]
fn evaluation_does_not_communicate() {
    ranks(2, Over::Thread, |group| {
        let (net, mut params) = model();
        let mut ddp =
            DistributedDataParallel::new(group.clone(), &mut params, DdpOptions::default())
                .expect("ddp");
        let mut tape = Tape::new(Threads(1));
        ddp.sync_batch_norm(&mut tape).expect("converted");
        if group.rank() == 1 {
            let step = tape.inference(&params);
            let x = step.input(&[0.5; 6], &[2, 3]).expect("input");
            let x = net.first.forward(x).expect("first");
            assert_eq!(net.norm.forward(x).expect("norm").shape(), [2, 6]);
        }
        group.barrier().expect("barrier");
    });
}

#[test]
fn one_value_over_all_ranks_is_refused_on_all() {
    let errors = ranks(2, Over::Thread, |group| {
        let n = group.rank();
        let (net, mut params) = model();
        let mut ddp =
            DistributedDataParallel::new(group, &mut params, DdpOptions::default()).expect("ddp");
        let mut tape = Tape::new(Threads(1));
        ddp.sync_batch_norm(&mut tape).expect("converted");
        let step = tape.step(&params, StepKey::new(0, 0));
        let x = step.input(&vec![0.5; 3 * n], &[n, 3]).expect("input");
        let x = net.first.forward(x).expect("first");
        net.norm.forward(x).expect_err("no variance").to_string()
    });
    for text in errors {
        assert!(
            text.contains("more than one value per channel in the joined batch"),
            "{text}"
        );
    }
}

#[test]
fn shards_have_statistics_of_their_own() {
    let group = ProcessGroup::threads(1, Default::default()).remove(0);
    let (_, mut params) = model();
    let options = DdpOptions {
        deterministic: Deterministic::Shards(ShardTree::new(4).expect("fits")),
        ..DdpOptions::default()
    };
    let mut ddp = DistributedDataParallel::new(group, &mut params, options).expect("ddp");
    let error = ddp
        .sync_batch_norm(&mut Tape::new(Threads(1)))
        .expect_err("refused");
    assert!(
        error.to_string().contains("batch statistics of each shard"),
        "{error}"
    );
}

/// Forward of two samples; the error with its causes.
fn forward_of_two(net: &Net, params: &Params, tape: &mut Tape) -> Result<(), String> {
    let step = tape.step(params, StepKey::new(0, 0));
    let x = step
        .input(&[0.5, 1.0, -1.0, 2.0, 0.0, 1.0], &[2, 3])
        .expect("input");
    let x = net.first.forward(x).expect("first");
    net.norm.forward(x).map(|_| ()).map_err(|e| {
        let mut text = e.to_string();
        let mut cause = std::error::Error::source(&e);
        while let Some(inner) = cause {
            text = format!("{text}: {inner}");
            cause = inner.source();
        }
        text
    })
}

/// A rank with fewer micro-batches would leave the others waiting in a normalisation.
#[test]
fn ranks_with_other_numbers_of_micro_batches_are_told_at_once() {
    for world in [2, 3, 8] {
        let texts = ranks(world, Over::Thread, |group| {
            let rank = group.rank();
            let (_, mut params) = model();
            let mut ddp = DistributedDataParallel::new(group, &mut params, DdpOptions::default())
                .expect("ddp");
            let mut tape = Tape::new(Threads(1));
            ddp.sync_batch_norm(&mut tape).expect("converted");
            // All may sit out: the step is over then.
            assert!(ddp.begin(&[]).expect("begin").is_over());
            let refused = [&[2, 2, 1][..], &[2, 2], &[]].map(|fewer| {
                let sizes = if rank == 1 { fewer } else { &[2, 2, 2, 2] };
                let error = ddp.begin(sizes).err().expect("refused");
                assert_eq!(error.kind(), ErrorKind::Mismatch);
                error.to_string()
            });
            // It is no one's end.
            let sizes: &[usize] = if rank == 1 { &[2, 0] } else { &[2, 2] };
            let global = ddp.begin(sizes).expect("begun").global();
            assert_eq!(global.micro_batches, 2 * world - 1);
            refused
        });
        for refused in texts {
            for (text, has) in refused.iter().zip([3, 2, 0]) {
                let words = format!("rank 1 has {has} of the step's micro-batches and rank ");
                assert!(text.starts_with(&words), "{text}");
                assert!(
                    text.contains(" has 4, but batch normalisations join"),
                    "{text}"
                );
            }
        }
    }
}

/// Whoever says what all ranks have finds it out alone: the others may be in a normalisation already.
#[test]
fn a_rank_that_sits_out_a_known_step_is_told_to_run_a_batch_of_none() {
    for world in [2, 3, 8] {
        let texts = ranks(world, Over::Thread, |group| {
            let sits_out = group.rank() + 1 == world;
            let (net, mut params) = model();
            let mut ddp = DistributedDataParallel::new(group, &mut params, DdpOptions::default())
                .expect("ddp");
            let mut tape = Tape::new(Threads(1));
            ddp.sync_batch_norm(&mut tape).expect("converted");
            // Who leaves it last may hear of the end already.
            let met = ddp.group().barrier();
            let global = GlobalBatch {
                samples: 2 * (world - 1),
                micro_batches: world - 1,
                active_ranks: world - 1,
            };
            if sits_out {
                let error = ddp.begin_known(&[], global).err().expect("refused");
                assert_eq!(error.kind(), ErrorKind::Usage);
                return error.to_string();
            }
            // It may not even come so far.
            let (Ok(()), Ok(_step)) = (met, ddp.begin_known(&[2], global)) else {
                return "aborted by rank".to_owned();
            };
            forward_of_two(&net, &params, &mut tape).expect_err("nobody is left to join")
        });
        for (rank, text) in texts.iter().enumerate() {
            let words = match rank + 1 == world {
                true => {
                    "has no micro-batch in a step in which others have, but batch normalisations join the batches of all \
                         ranks; begin it with one of no samples (&[0]) and run the model on it"
                }
                false => "aborted by rank",
            };
            assert!(text.contains(words), "rank {rank} of {world}: {text}");
        }
    }
}

/// Ranks inside a normalisation wait in a group of its own, which ends with the wrapper's.
#[test]
fn an_abort_reaches_ranks_inside_a_normalisation() {
    for over in ALL {
        for world in [2, 3] {
            let texts = ranks(world, over, |group| {
                let rank = group.rank();
                let (net, mut params) = model();
                let mut ddp =
                    DistributedDataParallel::new(group, &mut params, DdpOptions::default())
                        .expect("ddp");
                let mut tape = Tape::new(Threads(1));
                ddp.sync_batch_norm(&mut tape).expect("converted");
                if rank + 1 == world {
                    std::thread::sleep(std::time::Duration::from_millis(200));
                    ddp.group().abort("disk full");
                    // Not by leaving.
                    std::thread::sleep(std::time::Duration::from_millis(500));
                    return String::new();
                }
                forward_of_two(&net, &params, &mut tape).expect_err("aborted")
            });
            for text in &texts[..world - 1] {
                let words = format!("aborted by rank {}: disk full", world - 1);
                assert!(text.contains(&words), "{over:?}: {text}");
            }
        }
    }
}
