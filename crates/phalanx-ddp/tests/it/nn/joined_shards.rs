//! Batch statistics of the whole global batch under shards: those of one
//! process on the joined batch, and the same bits for every number of ranks.

use crate::common::{ALL, Over, bits, ranks};
use phalanx_comm::{ErrorKind as CommKind, ProcessGroup};
use phalanx_ddp::{
    DdpOptions, Deterministic, DistributedDataParallel, Error, ErrorKind, GlobalBatch, JoinedShard,
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
    let sum = f64::from(loss.item().unwrap()) * n as f64;
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
            let words = if panics {
                "shard 3 did not end"
            } else {
                "no such picture"
            };
            let text = chain(error);
            assert!(text.contains(words), "rank {rank}: {text}");
        }
        // Whose shard it is says what went wrong in it; to the others their peer's failure is one of communication.
        let own = if panics {
            "shard 3 did not end its step: it panicked"
        } else {
            "shard 3 failed: no such picture"
        };
        assert_eq!(errors[1].to_string(), own);
        assert_eq!(errors[1].kind(), ErrorKind::Usage);
        assert_eq!(errors[0].kind(), ErrorKind::Comm);
        let cause = errors[0].comm().expect("has the collective's error");
        assert_eq!(cause.kind(), CommKind::Aborted);
        assert_eq!(cause.origin_rank(), Some(1));
    }
}

/// With all causes.
fn chain(error: &Error) -> String {
    let mut text = error.to_string();
    let mut cause = std::error::Error::source(error);
    while let Some(inner) = cause {
        text = format!("{text}: {inner}");
        cause = inner.source();
    }
    text
}

/// What a step of four shards fails with, on each rank, where `run` is not the same in all.
fn errors_of(
    world: usize,
    run: impl Fn(&Net, JoinedShard<'_>) -> Result<(), Failure> + Sync,
) -> Vec<Error> {
    ranks(world, Over::Thread, |group| -> Error {
        let tree = ShardTree::new(4).expect("fits");
        let (net, mut params) = model();
        let mut ddp = match DistributedDataParallel::new(group.clone(), &mut params, options(4)) {
            Ok(ddp) => ddp,
            Err(e) => return e,
        };
        let mut team = JoinedShards::new(Threads(1));
        let (sizes, global) = sizes(tree, &group, 16);
        let mut step = ddp.begin_known(&sizes, global).expect("begin");
        let ran = step.run_joined(&mut team, &mut params, |s| run(&net, s));
        ran.expect_err("the shards do not meet")
    })
}

fn whole_shard(net: &Net, s: JoinedShard<'_>) -> Result<(), Failure> {
    let own: Vec<u64> = (s.shard..16).step_by(4).map(|i| i as u64).collect();
    backward(net, s.params, s.tape, &own, s.weight, s.sink)?;
    Ok(())
}

/// Nobody waits for a shard that will not come.
#[test]
fn a_shard_that_leaves_a_normalisation_out_is_named_at_once() {
    for world in [1, 2, 3] {
        let errors = errors_of(world, |net, s| match s.shard {
            3 => Ok(()),
            _ => whole_shard(net, s),
        });
        for (rank, error) in errors.iter().enumerate() {
            let text = chain(error);
            let words = "shard 3 ended its step without a batch normalisation that shard ";
            assert!(text.contains(words), "rank {rank} of {world}: {text}");
            assert!(
                text.contains("all shards must run the same layers"),
                "{text}"
            );
            let owns = rank + 1 == world;
            assert_eq!(
                error.kind() == ErrorKind::Usage,
                owns,
                "rank {rank}: {text}"
            );
        }
    }
}

#[test]
fn shards_in_different_layers_are_named() {
    for world in [1, 2, 3] {
        let errors = errors_of(world, |net, s| {
            if s.shard < 3 {
                return whole_shard(net, s);
            }
            let step = s.tape.step(s.params, StepKey::new(0, 0));
            let x = step.input(&[0.5; 4 * IN], &[4, IN])?;
            let x = net.second.forward(net.first.forward(x)?)?;
            let x = net.again.forward(x)?;
            x.sum(&[0, 1], false)?.backward(s.sink)?;
            Ok(())
        });
        for (rank, error) in errors.iter().enumerate() {
            let text = chain(error);
            let words = "shards 2 and 3 are in different layers: they bring 37 and 27 numbers to a batch normalisation; all \
                         shards must run the same layers";
            assert!(text.contains(words), "rank {rank} of {world}: {text}");
        }
    }
}

/// A peer's abort reaches shards that wait for one of their own rank, which computes.
#[test]
fn an_abort_reaches_shards_that_wait_for_each_other() {
    let waiting = std::sync::atomic::AtomicBool::new(true);
    let waits = || waiting.load(std::sync::atomic::Ordering::SeqCst);
    let errors = ranks(2, Over::Thread, |group| -> Option<Error> {
        let tree = ShardTree::new(4).expect("fits");
        let (net, mut params) = model();
        let mut ddp =
            DistributedDataParallel::new(group.clone(), &mut params, options(4)).expect("ddp");
        if group.rank() == 1 {
            std::thread::sleep(std::time::Duration::from_millis(300));
            group.abort("disk full");
            return None;
        }
        let mut team = JoinedShards::new(Threads(1));
        let (sizes, global) = sizes(tree, &group, 16);
        let mut step = ddp.begin_known(&sizes, global).expect("begin");
        let ran = step.run_joined(&mut team, &mut params, |s| {
            if s.shard == 1 {
                while waits() {
                    std::thread::sleep(std::time::Duration::from_millis(10));
                }
                return Ok(());
            }
            let ended = whole_shard(&net, s);
            waiting.store(false, std::sync::atomic::Ordering::SeqCst);
            ended
        });
        Some(ran.expect_err("aborted"))
    });
    let error = errors[0].as_ref().expect("rank 0 ran");
    assert_eq!(error.kind(), ErrorKind::Comm, "{}", chain(error));
    assert_eq!(error.comm().expect("cause").kind(), CommKind::Aborted);
    assert!(
        chain(error).contains("aborted by rank 1: disk full"),
        "{}",
        chain(error)
    );
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

/// Five samples in four shards weigh 2, 1, 1 and 1. The gradient of a parameter of each rank's own is that of the mean
/// over the rank's own samples, computed here in f64.
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
            let ignored = DdpOptions {
                ignored: vec!["only.bias".to_owned()],
                ..options(4)
            };
            let mut ddp =
                DistributedDataParallel::new(group.clone(), &mut params, ignored).expect("ddp");
            let mut team = JoinedShards::new(Threads(1));
            let mine = tree.range(world, group.rank());
            for joined in [true, false, true] {
                let (sizes, global) = sizes(tree, &group, SAMPLES);
                let run = |params: &Params,
                           tape: &mut Tape,
                           shard: usize,
                           weight: [f32; 1],
                           sink: &mut dyn GradSink| {
                    let own: Vec<usize> = (shard..SAMPLES).step_by(4).collect();
                    let step = tape.step(params, StepKey::new(0, 0));
                    let inputs: Vec<f32> = own.iter().map(|i| x(*i) as f32).collect();
                    let wanted: Vec<f32> = own.iter().map(|i| y(*i) as f32).collect();
                    let out = net.forward(step.input(&inputs, &[own.len(), 1])?)?;
                    let loss = out.mse_loss(&wanted, phalanx_nn::Reduction::Mean)?;
                    loss.backward_with(&weight, sink)
                };
                let mut step = ddp.begin_known(&sizes, global).expect("begin");
                if joined {
                    let run =
                        |s: JoinedShard<'_>| Ok(run(s.params, s.tape, s.shard, s.weight, s.sink)?);
                    step.run_joined(&mut team, &mut params, run)
                        .expect("joined");
                } else {
                    let mut tape = Tape::new(Threads(1));
                    for shard in mine.clone() {
                        let sink = step.micro_batch().expect("declared");
                        run(&params, &mut tape, shard, [1.0], sink).expect("backward");
                    }
                }
                assert!(step.finish().expect("finish").is_yes());
                let value =
                    |name: &str| f64::from(params.get(params.find(name).expect("there"))[0]);
                let (w, b) = (value("only.weight"), value("only.bias"));
                let slope = |i: usize| 2.0 * (w * x(i) + b - y(i));
                let own: Vec<usize> = (0..SAMPLES).filter(|i| mine.contains(&(i % 4))).collect();
                let want = own.iter().map(|i| slope(*i)).sum::<f64>() / own.len() as f64;
                let got = f64::from(ddp.grad(params.find("only.bias").expect("there"))[0]);
                assert!(
                    (got - want).abs() < 1e-5,
                    "{world} ranks, joined {joined}: {got} for {want}"
                );
                let want = (0..SAMPLES).map(|i| slope(i) * x(i)).sum::<f64>() / SAMPLES as f64;
                let got = f64::from(ddp.grad(params.find("only.weight").expect("there"))[0]);
                assert!(
                    (got - want).abs() < 1e-5,
                    "{world} ranks, joined {joined}: {got} for {want}"
                );
            }
        });
    }
}
