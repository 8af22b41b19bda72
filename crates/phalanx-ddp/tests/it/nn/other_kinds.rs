//! The other kinds of parallelism, against one process: replicas with a
//! master, and layers on several ranks.

use crate::common::{ALL, Over, bits, ranks, value};
use phalanx_ddp::{
    DataParallel, DdpOptions, DistributedDataParallel, ErrorKind, Traffic, receive_activation,
    send_activation,
};
use phalanx_nn::layers::{BatchNorm, Linear};
use phalanx_nn::optim::Sgd;
use phalanx_nn::{
    GradSink, GradView, Grads, Params, Reduction, Scope, Seed, StepKey, Tape, Threads,
};

const IN: usize = 9;
const OUT: usize = 4;

struct Net {
    first: Linear,
    norm: BatchNorm,
    last: Linear,
    _idle: Linear,
}

fn model() -> (Net, Params) {
    let mut scope = Scope::new(Seed(2));
    let net = Net {
        first: Linear::new(scope.enter("first"), IN, 21),
        norm: BatchNorm::new(scope.enter("norm"), 21),
        last: Linear::new(scope.enter("last"), 21, OUT),
        _idle: Linear::new(scope.enter("idle"), 3, 3),
    };
    (net, scope.build().expect("model builds"))
}

/// Inputs and targets of `samples` of step `index`.
fn data(index: usize, samples: std::ops::Range<usize>) -> (Vec<f32>, Vec<f32>) {
    let at = |s: usize, width: usize, from: usize| (index * 1000 + s) * width + from;
    let x = samples
        .clone()
        .flat_map(|s| (0..IN).map(move |i| value(at(s, IN, i))));
    let y = samples.flat_map(|s| (0..OUT).map(move |i| value(at(s, OUT, 77_777 + i))));
    (x.collect(), y.collect())
}

fn backward(
    net: &Net,
    params: &Params,
    tape: &mut Tape,
    index: usize,
    samples: std::ops::Range<usize>,
    sink: &mut dyn GradSink,
) -> phalanx_nn::Result<f32> {
    let n = samples.len();
    let (x, y) = data(index, samples);
    let step = tape.step(params, StepKey::new(0, index as u64));
    let x = step.input(&x, &[n, IN])?;
    let x = net.norm.forward(net.first.forward(x)?)?.relu()?;
    let loss = net.last.forward(x)?.mse_loss(&y, Reduction::Mean)?;
    let value = loss.item().unwrap();
    loss.backward(sink)?;
    Ok(value)
}

const STEPS: usize = 5;

/// Even and uneven parts.
#[test]
fn replicas_of_one_process_train_as_ranks_do() {
    // The last ones leave replicas without samples, but not the master.
    for (world, samples) in [(1, 8), (2, 8), (3, 13), (4, 22), (8, 30)] {
        let border = |r: usize| (r * samples).div_ceil(world);
        let part = |r: usize| border(r)..border(r + 1);
        let want = ranks(world, Over::Thread, |group| {
            let rank = group.rank();
            let (net, mut params) = model();
            let options = DdpOptions::default();
            let mut ddp = DistributedDataParallel::new(group, &mut params, options).expect("ddp");
            let mut optimizer = Sgd::new(&params, 0.1).momentum(0.9);
            let mut tape = Tape::new(Threads(1));
            for index in 0..STEPS {
                let mut step = ddp.begin(&[part(rank).len()]).expect("begin");
                let sink = step.micro_batch().expect("declared");
                backward(&net, &params, &mut tape, index, part(rank), sink).expect("backward");
                assert!(step.finish().expect("finish").is_yes());
                tape.update_buffers(&mut params).expect("buffers");
                optimizer.step(&mut params, &ddp).expect("step");
            }
            (bits(params.flat()), bits(params.buffers_flat()))
        });
        let (net, mut params) = model();
        let mut replicas = DataParallel::new(&params, world, Threads(1)).expect("replicas");
        let mut optimizer = Sgd::new(&params, 0.1).momentum(0.9);
        let sample_bytes = 4 * (IN + OUT);
        let mut losses = Vec::new();
        for index in 0..STEPS {
            let loss = replicas.step(&mut params, samples, sample_bytes, |r| {
                assert_eq!(r.samples, part(r.index));
                Ok(backward(&net, r.params, r.tape, index, r.samples, r.sink)?)
            });
            losses.push(loss.expect("step"));
            optimizer.step(&mut params, &replicas).expect("step");
        }
        assert_eq!(bits(params.flat()), want[0].0, "{world} replicas");
        assert_eq!(bits(params.buffers_flat()), want[0].1, "{world} replicas");
        assert!(losses.iter().all(|l| *l > 0.0 && *l < 2.0), "{losses:?}");
        // All through the master, and more with every replica.
        let others = (STEPS * (world - 1)) as u64;
        let elsewhere = samples - part(0).len();
        let model_bytes = 4 * params.flat().len() as u64;
        let want = Traffic {
            parameters_bytes: others * (model_bytes + 4 * params.buffers_flat().len() as u64),
            samples_bytes: (STEPS * elsewhere * sample_bytes) as u64,
            gradients_bytes: others * model_bytes,
        };
        assert_eq!(replicas.traffic(), want);
    }
}

#[test]
fn a_replica_that_fails_is_named() {
    let (_, mut params) = model();
    assert!(DataParallel::new(&params, 0, Threads(1)).is_err());
    let mut replicas = DataParallel::new(&params, 3, Threads(1)).expect("replicas");
    let failed = replicas.step(&mut params, 9, 4, |r| {
        if r.index == 2 {
            return Err("no such picture".into());
        }
        Ok(0.0)
    });
    let text = failed.expect_err("failed").to_string();
    assert_eq!(text, "replica 2 failed: no such picture");
    let mut other = Scope::new(Seed(0));
    Linear::new(other.enter("x"), 2, 2);
    let mut other = other.build().expect("builds");
    let failed = replicas.step(&mut other, 9, 4, |_| Ok(0.0));
    assert!(
        failed
            .expect_err("another")
            .to_string()
            .contains("another model")
    );
}

/// First layer on rank 0, its normalisation on 1, the last layer and the loss on 2: the
/// bits of one process.
#[test]
fn layers_on_three_ranks_train_as_on_one() {
    let (net, mut params) = model();
    let mut optimizer = Sgd::new(&params, 0.1).momentum(0.9);
    let mut grads = Grads::like(&params);
    let mut tape = Tape::new(Threads(1));
    let mut losses = Vec::new();
    for index in 0..STEPS {
        let loss = backward(&net, &params, &mut tape, index, 0..10, &mut grads);
        losses.push(loss.expect("backward").to_bits());
        tape.update_buffers(&mut params).expect("buffers");
        optimizer.step(&mut params, &grads).expect("step");
    }
    for over in ALL {
        let all = ranks(3, over, |group| {
            let rank = group.rank();
            let (net, mut params) = model();
            let mut optimizer = Sgd::new(&params, 0.1).momentum(0.9);
            let mut grads = Grads::like(&params);
            let mut tape = Tape::new(Threads(1));
            let mut losses = Vec::new();
            let before: u64 = group.bytes_sent_to().iter().sum();
            for index in 0..STEPS {
                let (x, y) = data(index, 0..10);
                let step = tape.step(&params, StepKey::new(0, index as u64));
                match rank {
                    0 => {
                        let x = step.input(&x, &[10, IN]).expect("input");
                        let x = net.first.forward(x).expect("forward");
                        let sent = send_activation(&group, x, 1).expect("send");
                        sent.backward(&mut grads).expect("backward");
                    }
                    1 => {
                        let got = receive_activation(&group, &step, &[10, 21], 0);
                        let (x, received) = got.expect("receive");
                        let x = net.norm.forward(x).and_then(|x| x.relu());
                        let sent = send_activation(&group, x.expect("forward"), 2).expect("send");
                        sent.backward(&mut grads).expect("backward");
                        received.send_gradient().expect("gradient");
                    }
                    _ => {
                        let got = receive_activation(&group, &step, &[10, 21], 1);
                        let (x, received) = got.expect("receive");
                        let x = net.last.forward(x).expect("forward");
                        let loss = x.mse_loss(&y, Reduction::Mean).expect("loss");
                        losses.push(loss.item().unwrap().to_bits());
                        loss.backward(&mut grads).expect("backward");
                        received.send_gradient().expect("gradient");
                    }
                }
                drop(step);
                tape.update_buffers(&mut params).expect("buffers");
                optimizer.step(&mut params, &grads).expect("step");
            }
            let sent = group.bytes_sent_to().iter().sum::<u64>() - before;
            (params, losses, sent)
        });
        assert_eq!(all[2].1, losses, "{over:?}");
        let owner = |name: &str| match name.split('.').next() {
            Some("first") => 0,
            Some("norm") => 1,
            _ => 2,
        };
        for (id, info) in params.ids().zip(params.infos()) {
            let got = &all[owner(&info.name)].0;
            assert_eq!(bits(got.get(id)), bits(params.get(id)), "{}", info.name);
        }
        assert_eq!(
            bits(all[1].0.buffers_flat()),
            bits(params.buffers_flat()),
            "{over:?}"
        );
        if over == Over::Tcp {
            // One way or both: 10 samples of 21 values.
            let each = (STEPS * 10 * 21 * 4) as u64;
            for (rank, ways) in [(0, 1), (1, 2), (2, 1)] {
                let sent = all[rank].2;
                assert!(
                    sent >= ways * each && sent < ways * each + 4000,
                    "rank {rank}: {sent}"
                );
            }
        }
    }
}

/// A stage whose loss does not depend on what came sends zeros.
#[test]
fn what_is_not_used_has_a_gradient_of_zeros() {
    ranks(2, Over::Thread, |group| {
        let (net, params) = model();
        let mut grads = Grads::like(&params);
        let mut tape = Tape::new(Threads(1));
        let step = tape.step(&params, StepKey::new(0, 0));
        let (x, y) = data(0, 0..4);
        let input = step.input(&x, &[4, IN]).expect("input");
        let x = net.first.forward(input).expect("forward");
        if group.rank() == 0 {
            let sent = send_activation(&group, x, 1).expect("send");
            sent.backward(&mut grads).expect("backward");
            assert!(grads.flat().iter().all(|g| *g == 0.0));
        } else {
            let (_, received) = receive_activation(&group, &step, &[4, 21], 0).expect("receive");
            let x = net.last.forward(x).expect("forward");
            let loss = x.mse_loss(&y, Reduction::Mean).expect("loss");
            loss.backward(&mut grads).expect("backward");
            received.send_gradient().expect("gradient");
            assert!(grads.flat().iter().any(|g| *g != 0.0));
        }
    });
}

/// Fewer samples than replicas: the master, whose batch statistics are kept, is never without.
#[test]
fn few_samples_go_to_the_master_first() {
    for (replicas, samples) in [(2, 2), (4, 2), (8, 6), (3, 2), (2, 1), (8, 3), (1, 1)] {
        let (_, mut params) = model();
        let mut replicated = DataParallel::new(&params, replicas, Threads(1)).expect("replicas");
        let parts = std::sync::Mutex::new(Vec::new());
        let loss = replicated.step(&mut params, samples, 4, |r| {
            parts
                .lock()
                .expect("whole")
                .push((r.index, r.samples.clone()));
            for id in r.params.ids() {
                r.sink.slot(id).fill(
                    r.samples.clone().map(|s| s as f32).sum::<f32>() / r.samples.len() as f32,
                );
                r.sink.ready(id)?;
            }
            Ok(r.samples.len() as f32)
        });
        assert!(loss.expect("step") >= 1.0);
        let mut parts = parts.into_inner().expect("whole");
        parts.sort_by_key(|(index, _)| *index);
        assert_eq!(parts[0].0, 0, "{replicas} replicas, {samples} samples");
        let all: Vec<usize> = parts.iter().flat_map(|(_, part)| part.clone()).collect();
        assert_eq!(all, (0..samples).collect::<Vec<_>>(), "each once, in order");
        // The mean over samples of their numbers.
        let want = (samples - 1) as f32 / 2.0;
        for id in params.ids() {
            assert!(
                replicated.grad(id).iter().all(|g| (g - want).abs() < 1e-5),
                "{want}"
            );
        }
    }
}

#[test]
fn shapes_that_there_cannot_be_are_refused() {
    let group = phalanx_comm::ProcessGroup::threads(1, Default::default()).remove(0);
    let (_, params) = model();
    let mut tape = Tape::new(Threads(1));
    let step = tape.step(&params, StepKey::new(0, 0));
    for shape in [
        &[usize::MAX, 2][..],
        &[1 << 32, 1 << 32],
        &[usize::MAX],
        &[1 << 40, 1 << 20],
    ] {
        let error = receive_activation(&group, &step, shape, 0)
            .err()
            .expect("refused");
        assert_eq!(error.kind(), ErrorKind::Usage);
        assert_eq!(
            error.to_string(),
            format!("there is no memory for activations of shape {shape:?}")
        );
    }
}

/// A layer a rank, each between its neighbours: the bits of one process.
#[test]
fn a_chain_of_any_length_trains_as_one_process() {
    const SAMPLES: usize = 6;
    for world in [2, 4, 8] {
        let build = || {
            let mut scope = Scope::new(Seed(4));
            let layers: Vec<Linear> = (0..world)
                .map(|l| Linear::new(scope.enter(&format!("layer{l}")), IN, IN))
                .collect();
            (layers, scope.build().expect("model builds"))
        };
        let inputs = |index: usize| -> Vec<f32> {
            (0..SAMPLES * IN).map(|i| value(index * 999 + i)).collect()
        };
        let wanted = |index: usize| inputs(index + 100);
        let (layers, mut params) = build();
        let mut optimizer = Sgd::new(&params, 0.1).momentum(0.9);
        let mut grads = Grads::like(&params);
        let mut tape = Tape::new(Threads(1));
        for index in 0..STEPS {
            let step = tape.step(&params, StepKey::new(0, index as u64));
            let mut x = step.input(&inputs(index), &[SAMPLES, IN]).expect("input");
            for (l, layer) in layers.iter().enumerate() {
                x = layer.forward(x).expect("forward");
                if l + 1 < world {
                    x = x.relu().expect("relu");
                }
            }
            let loss = x.mse_loss(&wanted(index), Reduction::Mean).expect("loss");
            loss.backward(&mut grads).expect("backward");
            drop(step);
            optimizer.step(&mut params, &grads).expect("step");
        }
        let all = ranks(world, Over::Thread, |group| {
            let rank = group.rank();
            let (layers, mut params) = build();
            let mut optimizer = Sgd::new(&params, 0.1).momentum(0.9);
            let mut grads = Grads::like(&params);
            let mut tape = Tape::new(Threads(1));
            for index in 0..STEPS {
                let step = tape.step(&params, StepKey::new(0, index as u64));
                let (x, received) = if rank == 0 {
                    (
                        step.input(&inputs(index), &[SAMPLES, IN]).expect("input"),
                        None,
                    )
                } else {
                    let got = receive_activation(&group, &step, &[SAMPLES, IN], rank - 1);
                    let (x, received) = got.expect("receive");
                    (x, Some(received))
                };
                let x = layers[rank].forward(x).expect("forward");
                if rank + 1 < world {
                    let x = x.relu().expect("relu");
                    let sent = send_activation(&group, x, rank + 1).expect("send");
                    sent.backward(&mut grads).expect("backward");
                } else {
                    let loss = x.mse_loss(&wanted(index), Reduction::Mean).expect("loss");
                    loss.backward(&mut grads).expect("backward");
                }
                let sent = received.map_or(Ok(()), |received| received.send_gradient());
                sent.expect("gradient");
                drop(step);
                optimizer.step(&mut params, &grads).expect("step");
            }
            params
        });
        for (id, info) in params.ids().zip(params.infos()) {
            let owner = (0..world).find(|l| info.name.starts_with(&format!("layer{l}.")));
            let got = &all[owner.expect("a layer's")];
            assert_eq!(
                bits(got.get(id)),
                bits(params.get(id)),
                "{} of {world}",
                info.name
            );
        }
    }
}
