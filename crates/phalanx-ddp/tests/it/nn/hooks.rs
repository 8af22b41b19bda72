//! Gradient hooks: numbers, votes, bytes on the wire, and training with them.

use std::time::{Duration, Instant};

use super::power_sgd_hook::{PowerSgd, PowerSgdOptions};
use crate::common::{ALL, Over, ranks};
use phalanx_comm::{ProcessGroup, ReduceOp};
use phalanx_ddp::{
    Bf16Gradients, BucketCaps, DdpOptions, Deterministic, DistributedDataParallel, Error,
    ErrorKind, F16Gradients, GradBucket, GradientHook, LocalGradients, ParamSpec, Reducer,
    ReducerOptions, Result, ShardTree,
};
use phalanx_nn::layers::Linear;
use phalanx_nn::optim::Sgd;
use phalanx_nn::{GradSink, GradView, Params, Reduction, Scope, Seed, StepKey, Tape, Threads};

const LENS: [usize; 3] = [1000, 7, 5000];

fn reducer(group: ProcessGroup) -> Reducer {
    let specs = LENS
        .iter()
        .enumerate()
        .map(|(i, &len)| ParamSpec {
            name: format!("layer{i}.weight"),
            len,
            columns: 1,
        })
        .collect();
    let options = ReducerOptions {
        caps: BucketCaps::uniform(4096),
        ..ReducerOptions::default()
    };
    Reducer::new(group, specs, options)
}

fn value(rank: usize, param: usize, i: usize) -> f32 {
    (((rank * 31 + param * 17 + i) * 2_654_435) % 1009) as f32 / 500.0 - 1.0
}

/// One step; what came of it as text, and the gradients.
fn step(reducer: &mut Reducer, scale: f32) -> (String, Vec<Vec<f32>>) {
    let rank = reducer.group().rank();
    for (param, &len) in LENS.iter().enumerate().rev() {
        let slot = reducer.slot(param);
        (0..len).for_each(|i| slot[i] = scale * value(rank, param, i));
        reducer.ready(param).expect("ready");
    }
    let commit = reducer.finish().expect("finish").to_string();
    (
        commit,
        (0..LENS.len()).map(|p| reducer.grad(p).to_vec()).collect(),
    )
}

/// Greatest difference from the mean in f64, relative to values of up to 1.
fn error_of(hook: fn() -> Box<dyn GradientHook>, over: Over, world: usize) -> f64 {
    let all = ranks(world, over, |group| {
        let mut reducer = reducer(group);
        reducer.set_hook(Some(hook())).expect("between steps");
        // The second step runs in the rebuilt layout.
        step(&mut reducer, 1.0);
        let (commit, grads) = step(&mut reducer, 1.0);
        assert_eq!(commit, "");
        assert_eq!(
            reducer.times().buckets.len(),
            reducer.plan().buckets().len()
        );
        grads
    });
    let mut worst = 0.0f64;
    for (param, got) in all[0].iter().enumerate() {
        for (i, got) in got.iter().enumerate() {
            let mean = (0..world)
                .map(|r| f64::from(value(r, param, i)))
                .sum::<f64>()
                / world as f64;
            worst = worst.max((f64::from(*got) - mean).abs());
        }
    }
    assert!(
        all.iter().all(|grads| *grads == all[0]),
        "ranks got different gradients"
    );
    worst
}

#[test]
fn sixteen_bits_are_as_exact_as_they_can_be() {
    for world in [2, 3, 4, 8] {
        for over in ALL {
            // One rounding of inputs, one a fold at most, one of the mean.
            let bf16 = error_of(|| Box::new(Bf16Gradients::default()), over, world);
            assert!(
                bf16 > 1e-4 && bf16 < 2.5 / 128.0,
                "bf16, {world} over {over:?}: {bf16}"
            );
            let f16 = error_of(|| Box::new(F16Gradients::default()), over, world);
            assert!(
                f16 > 1e-5 && f16 < 2.5 / 1024.0,
                "f16, {world} over {over:?}: {f16}"
            );
        }
    }
}

#[test]
fn a_float16_overflow_votes_the_step_down_on_all_ranks() {
    let texts = ranks(2, Over::Thread, |group| {
        let mut reducer = reducer(group);
        reducer
            .set_hook(Some(Box::new(F16Gradients::default())))
            .expect("set");
        let (commit, grads) = step(&mut reducer, 1e6);
        assert!(grads.iter().all(Vec::is_empty));
        assert_eq!(
            step(&mut reducer, 1.0).0,
            "",
            "the next step is content again"
        );
        commit
    });
    for text in texts {
        assert_eq!(
            text,
            "rank 0: the gradient of layer2.weight is not finite; rank 1: the gradient of layer2.weight is not finite"
        );
    }
}

#[test]
fn sixteen_bits_halve_the_bytes_on_the_wire_and_local_gradients_send_next_to_none() {
    let sent = |hook: fn() -> Option<Box<dyn GradientHook>>| {
        let all = ranks(2, Over::Tcp, |group| {
            let mut reducer = reducer(group.clone());
            reducer.set_hook(hook()).expect("set");
            step(&mut reducer, 1.0);
            let before: u64 = group.bytes_sent_to().iter().sum();
            for _ in 0..10 {
                step(&mut reducer, 1.0);
            }
            group.bytes_sent_to().iter().sum::<u64>() - before
        });
        all[0] as f64 / 10.0
    };
    let full = sent(|| None);
    let half = sent(|| Some(Box::new(Bf16Gradients::default())));
    let none = sent(|| Some(Box::new(LocalGradients)));
    let gradients = 4.0 * LENS.iter().sum::<usize>() as f64;
    assert!(
        full > gradients && full < 1.2 * gradients,
        "{full} for {gradients}"
    );
    assert!(half < 0.65 * full, "{half} of {full}");
    assert!(none < 0.05 * full, "{none} of {full}");
}

/// The first bucket's bytes leave while later gradients are still to come.
#[test]
fn hooks_send_inside_backward() {
    let hooks: [fn() -> Box<dyn GradientHook>; 3] = [
        || Box::new(Bf16Gradients::default()),
        || Box::new(F16Gradients::default()),
        || {
            let options = PowerSgdOptions {
                start_step: 1,
                ..PowerSgdOptions::default()
            };
            Box::new(PowerSgd::new(options))
        },
    ];
    for hook in hooks {
        ranks(2, Over::Tcp, |group| {
            let mut reducer = reducer(group.clone());
            reducer.set_hook(Some(hook())).expect("set");
            step(&mut reducer, 1.0);
            let sent = || group.bytes_sent_to().iter().sum::<u64>();
            let before = sent();
            let first = reducer.plan().buckets()[0].clone();
            let ready = |reducer: &mut Reducer, param: usize| {
                reducer.slot(param).fill(1.0);
                reducer.ready(param).expect("ready");
            };
            first.iter().for_each(|param| ready(&mut reducer, *param));
            let limit = Instant::now() + Duration::from_secs(60);
            while sent() == before {
                assert!(Instant::now() < limit, "nothing was sent inside backward");
                std::thread::sleep(Duration::from_millis(1));
            }
            for param in (0..LENS.len()).filter(|p| !first.contains(p)) {
                ready(&mut reducer, param);
            }
            assert!(reducer.finish().expect("finish").is_yes());
            assert!(reducer.times().overlapped());
        });
    }
}

/// A user's own: the sum instead of the mean.
struct SumOf(f32);

impl GradientHook for SumOf {
    fn name(&self) -> String {
        format!("{} times the sum", self.0)
    }

    fn average(&mut self, group: &ProcessGroup, bucket: &mut GradBucket<'_>) -> Result<()> {
        group
            .all_reduce(bucket.gradients, ReduceOp::Sum)
            .expect("all-reduce");
        bucket.gradients.iter_mut().for_each(|g| *g *= self.0);
        Ok(())
    }
}

fn model() -> (Linear, Params) {
    let mut scope = Scope::new(Seed(3));
    let net = Linear::new(scope.enter("only"), 3, 2);
    (net, scope.build().expect("model builds"))
}

/// Weights after `steps` steps, each rank with its own samples.
fn train(group: ProcessGroup, hook: Option<Box<dyn GradientHook>>, steps: usize) -> Vec<f32> {
    let rank = group.rank();
    let (net, mut params) = model();
    let mut ddp =
        DistributedDataParallel::new(group, &mut params, DdpOptions::default()).expect("ddp");
    let local = hook.as_ref().is_some_and(|hook| hook.name() == "local");
    ddp.set_hook(hook).expect("set");
    let mut optimizer = Sgd::new(&params, 0.1);
    let mut tape = Tape::new(Threads(1));
    for i in 0..steps {
        let x: Vec<f32> = (0..12).map(|j| value(rank, i % 7, j)).collect();
        let y: Vec<f32> = x
            .chunks(3)
            .flat_map(|x| [x[0] - x[1], x[2] + 0.5])
            .collect();
        let step = tape.step(&params, StepKey::new(0, i as u64));
        let x = step.input(&x, &[4, 3]).expect("input");
        let loss = net
            .forward(x)
            .and_then(|x| x.mse_loss(&y, Reduction::Mean))
            .expect("loss");
        loss.backward(&mut ddp).expect("backward");
        drop(step);
        assert!(ddp.finish().expect("finish").is_yes());
        optimizer.step(&mut params, &ddp).expect("step");
        if local && (i + 1) % 5 == 0 {
            let mean = ddp.group().all_reduce(params.flat_mut(), ReduceOp::Mean);
            mean.expect("average");
        }
    }
    params.flat().to_vec()
}

fn distance(a: &[f32], b: &[f32]) -> f32 {
    a.iter()
        .zip(b)
        .map(|(a, b)| (a - b).abs())
        .fold(0.0, f32::max)
}

#[test]
fn a_users_own_hook_replaces_the_mean() {
    ranks(4, Over::Thread, |group| {
        let mean = train(group.clone(), None, 20);
        let own = train(group, Some(Box::new(SumOf(0.25))), 20);
        assert_eq!(mean, own, "a quarter of the sum is the mean of four");
    });
}

#[test]
fn every_way_learns_the_same_function() {
    for all in ranks(3, Over::Thread, |group| {
        [
            train(group.clone(), None, 400),
            train(group.clone(), Some(Box::new(Bf16Gradients::default())), 400),
            train(group.clone(), Some(Box::new(F16Gradients::default())), 400),
            train(group, Some(Box::new(LocalGradients)), 400),
        ]
    }) {
        // The function is linear, so all have one optimum to reach.
        for (way, weights) in all.iter().enumerate().skip(1) {
            let apart = distance(weights, &all[0]);
            assert!(apart < 2e-2, "way {way} ends {apart} apart");
        }
    }
}

#[test]
fn local_weights_are_equal_after_they_were_averaged_only() {
    let weights = |steps| {
        ranks(2, Over::Thread, |group| {
            train(group, Some(Box::new(LocalGradients)), steps)
        })
    };
    let four = weights(4);
    assert_ne!(four[0], four[1]);
    let five = weights(5);
    assert_eq!(five[0], five[1]);
}

#[test]
fn mistakes_are_named() {
    let errors = ranks(2, Over::Thread, |group| {
        let rank = group.rank();
        let (_, mut params) = model();
        let mut ddp =
            DistributedDataParallel::new(group, &mut params, DdpOptions::default()).expect("ddp");
        ddp.set_hook(Some(Box::new(SumOf(rank as f32))))
            .expect_err("different")
    });
    for error in errors {
        assert_eq!(error.kind(), ErrorKind::Mismatch);
        let text = error.to_string();
        assert!(text.contains("gradient hook 0 times the sum"), "{text}");
    }
    let alone = || ProcessGroup::threads(1, Default::default()).remove(0);
    let mut reducer = reducer(alone());
    reducer.slot(0);
    let text = reducer.set_hook(None).expect_err("in a step").to_string();
    assert!(text.contains("between steps"), "{text}");
    let (_, mut params) = model();
    let options = DdpOptions {
        deterministic: Deterministic::Shards(ShardTree::new(2).expect("fits")),
        ..DdpOptions::default()
    };
    let mut ddp = DistributedDataParallel::new(alone(), &mut params, options).expect("ddp");
    let text = ddp.set_hook(None).expect_err("shards").to_string();
    assert!(text.contains("leave out the gradient hook"), "{text}");
}

/// What one rank gave spoils the mean of all, but only that rank is named.
#[test]
fn only_the_rank_whose_gradient_is_not_finite_is_named() {
    let hooks: [fn() -> Box<dyn GradientHook>; 4] = [
        || Box::new(Bf16Gradients::default()),
        || Box::new(F16Gradients::default()),
        || Box::new(SumOf(0.5)),
        || {
            let options = PowerSgdOptions {
                start_step: 0,
                ..PowerSgdOptions::default()
            };
            Box::new(PowerSgd::new(options))
        },
    ];
    for hook in hooks {
        for world in [2, 3, 4] {
            let texts = ranks(world, Over::Thread, |group| {
                let rank = group.rank();
                let specs = LENS.iter().enumerate().map(|(i, &len)| ParamSpec {
                    name: format!("layer{i}.weight"),
                    len,
                    columns: if len > 100 { 50 } else { 1 },
                });
                let options = ReducerOptions {
                    caps: BucketCaps::uniform(4096),
                    ..ReducerOptions::default()
                };
                let mut reducer = Reducer::new(group, specs.collect(), options);
                reducer.set_hook(Some(hook())).expect("set");
                let mut step = |bad: Option<usize>| {
                    for (param, &len) in LENS.iter().enumerate().rev() {
                        let slot = reducer.slot(param);
                        (0..len).for_each(|i| slot[i] = value(rank, param, i));
                        if bad == Some(param) && rank == world - 1 {
                            slot[len - 1] = f32::NAN;
                        }
                        reducer.ready(param).expect("ready");
                    }
                    reducer.finish().expect("finish").to_string()
                };
                [
                    step(None),
                    step(Some(2)),
                    step(Some(1)),
                    step(Some(0)),
                    step(None),
                ]
            });
            let no = |param: usize| {
                format!(
                    "rank {}: the gradient of layer{param}.weight is not finite",
                    world - 1
                )
            };
            for text in texts {
                assert_eq!(text, [String::new(), no(2), no(1), no(0), String::new()]);
            }
        }
    }
}

/// A user's own that goes wrong on rank 1, in one of its stages.
struct Breaks(&'static str);

impl Breaks {
    fn stage(&self, name: &str, group: &ProcessGroup) -> Result<()> {
        if self.0 == name && group.rank() == 1 {
            return Err(Error::usage("of the hook's own"));
        }
        Ok(())
    }
}

impl GradientHook for Breaks {
    fn name(&self) -> String {
        format!("breaks in {}", self.0)
    }

    fn launch(&mut self, group: &ProcessGroup, _: &mut GradBucket<'_>) -> Result<()> {
        self.stage("launch", group)
    }

    fn advance(&mut self, group: &ProcessGroup, _: &mut GradBucket<'_>) -> Result<()> {
        self.stage("advance", group)
    }

    fn average(&mut self, group: &ProcessGroup, _: &mut GradBucket<'_>) -> Result<()> {
        self.stage("average", group)
    }
}

/// The others, who wait in the vote, are told at once; they do not wait for a deadline.
#[test]
fn a_hook_that_fails_in_any_stage_ends_the_step_for_all() {
    for stage in ["launch", "advance", "average"] {
        let errors = ranks(3, Over::Thread, |group| {
            let mut reducer = reducer(group);
            reducer
                .set_hook(Some(Box::new(Breaks(stage))))
                .expect("set");
            let mut ready = |(param, &len): (usize, &usize)| {
                reducer.slot(param)[..len].fill(1.0);
                reducer.ready(param)
            };
            let reported = LENS.iter().enumerate().rev().try_for_each(&mut ready);
            let finished = reported.and_then(|()| reducer.finish().map(|_| ()));
            let error = finished.expect_err("the hook breaks");
            assert!(reducer.is_failed());
            error
        });
        for (rank, error) in errors.iter().enumerate() {
            if rank == 1 {
                assert_eq!(error.kind(), ErrorKind::Usage, "{stage}");
                assert_eq!(error.to_string(), "of the hook's own");
                continue;
            }
            let cause = error.comm().expect("a collective's").to_string();
            assert!(
                cause.contains("aborted by rank 1: of the hook's own"),
                "{stage}, rank {rank}: {cause}"
            );
        }
    }
}

/// Micro-batches of several sizes, ranks of several numbers of them, one without any: the joined mean in f64.
#[test]
fn uneven_steps_are_weighed_with_every_hook() {
    type Make = fn() -> Box<dyn GradientHook>;
    let hooks: [(Make, f64); 3] = [
        (|| Box::new(Bf16Gradients::default()), 3e-2),
        (|| Box::new(F16Gradients::default()), 4e-3),
        // Of full rank, so that nothing is lost.
        (
            || {
                let options = PowerSgdOptions {
                    rank: 8,
                    min_compression_rate: 0.0,
                    start_step: 1,
                    ..PowerSgdOptions::default()
                };
                Box::new(PowerSgd::new(options))
            },
            1e-5,
        ),
    ];
    for (hook, bound) in hooks {
        for world in [2, 3, 8] {
            let sizes = |rank: usize| match rank {
                0 => vec![3, 1, 2],
                r if r + 1 == world => vec![],
                _ => vec![2],
            };
            let total: usize = (0..world).flat_map(sizes).sum();
            let made = |rank: usize, micro: usize, step: usize, at: usize| {
                value(rank, 7 * micro + step, at)
            };
            let all = ranks(world, Over::Thread, |group| {
                let rank = group.rank();
                let (_, mut params) = model();
                let mut ddp =
                    DistributedDataParallel::new(group, &mut params, DdpOptions::default())
                        .expect("ddp");
                ddp.set_hook(Some(hook())).expect("set");
                let mut seen = Vec::new();
                for index in 0..4 {
                    let mut step = ddp.begin(&sizes(rank)).expect("begin");
                    for micro in 0..sizes(rank).len() {
                        let sink = step.micro_batch().expect("declared");
                        for (id, info) in params.ids().zip(params.infos()).rev() {
                            for (i, g) in sink.slot(id).iter_mut().enumerate() {
                                *g = made(rank, micro, index, info.offset + i);
                            }
                            sink.ready(id).expect("ready");
                        }
                    }
                    assert!(step.finish().expect("finish").is_yes());
                    for (id, info) in params.ids().zip(params.infos()) {
                        assert_eq!(ddp.grad(id).len(), info.len);
                        for (i, g) in ddp.grad(id).iter().enumerate() {
                            let shares = (0..world).flat_map(|r| {
                                sizes(r)
                                    .into_iter()
                                    .enumerate()
                                    .map(move |(micro, n)| (r, micro, n))
                            });
                            let want: f64 = shares
                                .map(|(r, micro, n)| {
                                    n as f64 / total as f64
                                        * f64::from(made(r, micro, index, info.offset + i))
                                })
                                .sum();
                            let off = (f64::from(*g) - want).abs();
                            assert!(off < bound, "step {index}, {world} ranks: {g} for {want}");
                        }
                        seen.extend(ddp.grad(id).iter().map(|g| g.to_bits()));
                    }
                }
                seen
            });
            assert!(
                all.iter().all(|seen| *seen == all[0]),
                "ranks got different gradients"
            );
        }
    }
}
