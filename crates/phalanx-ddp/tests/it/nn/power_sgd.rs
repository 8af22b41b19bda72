//! PowerSGD, the example: against PyTorch's, against plain means, and what it promises of
//! errors, votes, bytes and resuming.

use super::power_sgd_hook::{PowerSgd, PowerSgdOptions};
use crate::common::{ALL, Over, ranks};
use phalanx_comm::ProcessGroup;
use phalanx_ddp::{
    BucketCaps, DdpOptions, DistributedDataParallel, GradientHook, HookState, ParamSpec, Reducer,
    ReducerOptions,
};
use phalanx_nn::layers::Linear;
use phalanx_nn::{Reduction, Scope, Seed, StepKey, Tape, Threads};
use serde_json::Value;

/// Rows and columns; the last is no matrix.
const SHAPES: [(usize, usize); 4] = [(24, 31), (70, 9), (16, 16), (50, 1)];

fn options(rank: usize) -> PowerSgdOptions {
    PowerSgdOptions {
        rank,
        start_step: 0,
        min_compression_rate: 1.0,
        ..PowerSgdOptions::default()
    }
}

fn reducer(group: ProcessGroup, shapes: &[(usize, usize)]) -> Reducer {
    let specs = shapes
        .iter()
        .enumerate()
        .map(|(i, (rows, columns))| ParamSpec {
            name: format!("layer{i}"),
            len: rows * columns,
            columns: *columns,
        })
        .collect();
    let options = ReducerOptions {
        caps: BucketCaps::uniform(3000),
        ..ReducerOptions::default()
    };
    Reducer::new(group, specs, options)
}

fn with_hook(group: ProcessGroup, options: PowerSgdOptions) -> Reducer {
    let mut reducer = reducer(group, &SHAPES);
    let hook = PowerSgd::new(options);
    reducer.set_hook(Some(Box::new(hook))).expect("set");
    reducer
}

fn value(step: usize, rank: usize, param: usize, i: usize) -> f32 {
    let mixed = (step * 7919 + rank * 104_729 + param * 1301 + i).wrapping_mul(0x9E37_79B9);
    ((mixed >> 7) % 2001) as f32 / 1000.0 - 1.0
}

/// One step; what came of it as text, and the gradients.
fn step(reducer: &mut Reducer, gradient: impl Fn(usize, usize) -> f32) -> (String, Vec<Vec<f32>>) {
    for (param, (rows, columns)) in SHAPES.iter().enumerate().rev() {
        let slot = reducer.slot(param);
        (0..rows * columns).for_each(|i| slot[i] = gradient(param, i));
        reducer.ready(param).expect("ready");
    }
    let commit = reducer.finish().expect("finish").to_string();
    let grads = (0..SHAPES.len()).map(|p| reducer.grad(p).to_vec());
    (commit, grads.collect())
}

fn state(reducer: &mut Reducer) -> HookState {
    let group = reducer.group().clone();
    let hook = reducer.hook_mut().expect("a hook");
    hook.gather_state(&group).expect("gather")
}

/// Sum over values and ranks, as the tests want it.
fn mean(world: usize, of: impl Fn(usize) -> f32) -> f64 {
    (0..world).map(|r| f64::from(of(r))).sum::<f64>() / world as f64
}

fn floats(value: &Value) -> Vec<f32> {
    let numbers = value.as_array().expect("numbers").iter();
    numbers
        .map(|v| v.as_f64().expect("number") as f32)
        .collect()
}

#[test]
fn four_steps_are_those_of_pytorch() {
    let fixture: Value =
        serde_json::from_str(include_str!("../../fixtures/power_sgd.json")).expect("a fixture");
    let shapes = [(6, 12), (7, 9), (5, 1)];
    let runs = fixture["runs"].as_array().expect("runs");
    assert_eq!(runs.len(), 6);
    for run in runs {
        let rank = run["rank"].as_u64().expect("rank") as usize;
        let flag = |name: &str| run[name].as_bool().expect("a flag");
        let (warm_start, error_feedback) = (flag("warm_start"), flag("error_feedback"));
        ranks(2, Over::Thread, |group| {
            let me = group.rank();
            let mut reducer = reducer(group, &shapes);
            let mut hook = PowerSgd::new(PowerSgdOptions {
                min_compression_rate: 0.5,
                start_step: 2,
                warm_start,
                error_feedback,
                seed: 5,
                ..options(rank)
            });
            // Without a warm start PyTorch was given what we draw, in each step.
            let drawn = run["q"].as_array().into_iter().flatten().enumerate();
            let drawn = HookState {
                steps: 2,
                tensors: drawn
                    .map(|(i, q)| (format!("q.layer{i}"), floats(q)))
                    .collect(),
            };
            hook.restore_state(&drawn).expect("first factors");
            reducer.set_hook(Some(Box::new(hook))).expect("set");
            for (index, step) in run["steps"].as_array().expect("steps").iter().enumerate() {
                for param in (0..shapes.len()).rev() {
                    let values = floats(&step["gradients"][me][param]);
                    reducer.slot(param).copy_from_slice(&values);
                    reducer.ready(param).expect("ready");
                }
                assert!(reducer.finish().expect("finish").is_yes());
                for param in 0..shapes.len() {
                    let want = floats(&step["mean"][param]);
                    let pairs = reducer.grad(param).iter().zip(&want);
                    let apart = pairs.map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
                    assert!(
                        apart < 2e-5,
                        "rank {rank}, warm {warm_start}, feedback {error_feedback}, step {index}, layer {param}: {apart} apart"
                    );
                }
            }
        });
    }
}

#[test]
fn full_rank_is_the_plain_mean() {
    for world in [2, 3, 4, 8] {
        let full = PowerSgdOptions {
            min_compression_rate: 0.0,
            ..options(1000)
        };
        ranks(world, Over::Thread, |group| {
            let rank = group.rank();
            let mut reducer = with_hook(group, full);
            // The layout changes after the first.
            for index in 0..4 {
                let (commit, grads) = step(&mut reducer, |p, i| value(index, rank, p, i));
                assert_eq!(commit, "");
                for (param, grads) in grads.iter().enumerate() {
                    for (i, got) in grads.iter().enumerate() {
                        let want = mean(world, |r| value(index, r, param, i));
                        let apart = (f64::from(*got) - want).abs();
                        assert!(
                            apart < 1e-5,
                            "{world} ranks, step {index}, layer {param}: {apart}"
                        );
                    }
                }
            }
        });
    }
}

/// Gradients that all lie along one column are of rank 1, and so is their mean.
#[test]
fn a_mean_of_rank_one_arrives_whole_at_rank_one() {
    let gradient = |step: usize, rank: usize, param: usize, i: usize| {
        let columns = SHAPES[param].1;
        value(step, 0, param, i / columns) * value(step, rank + 1, param + 9, i % columns)
    };
    ranks(3, Over::Thread, |group| {
        let rank = group.rank();
        let mut reducer = with_hook(group, options(1));
        for index in 0..3 {
            let (_, grads) = step(&mut reducer, |p, i| gradient(index, rank, p, i));
            for (param, grads) in grads.iter().enumerate() {
                for (i, got) in grads.iter().enumerate() {
                    let want = mean(3, |r| gradient(index, r, param, i));
                    assert!((f64::from(*got) - want).abs() < 1e-5, "layer {param}");
                }
            }
        }
    });
}

/// Runs steps `from..to` and adds up what was applied and what should have been.
fn add_up(reducer: &mut Reducer, steps: std::ops::Range<usize>, sums: &mut [Vec<f64>]) {
    let (rank, world) = (reducer.group().rank(), reducer.group().world_size());
    for index in steps {
        let (commit, grads) = step(reducer, |p, i| value(index, rank, p, i));
        assert_eq!(commit, "");
        for (param, (grads, sums)) in grads.iter().zip(&mut *sums).enumerate() {
            for (i, (got, sum)) in grads.iter().zip(sums).enumerate() {
                *sum += f64::from(*got) - mean(world, |r| value(index, r, param, i));
            }
        }
    }
}

fn no_sums() -> Vec<Vec<f64>> {
    SHAPES.iter().map(|(r, c)| vec![0.0; r * c]).collect()
}

/// What was applied and what is kept in the errors is all that ever came;
/// also when other ranks go on from the saved state.
#[test]
fn nothing_is_lost_for_good() {
    let before = ranks(3, Over::Thread, |group| {
        let mut reducer = with_hook(group, options(2));
        let mut sums = no_sums();
        add_up(&mut reducer, 0..12, &mut sums);
        (sums, state(&mut reducer))
    });
    let (sums, saved) = &before[0];
    assert!(before.iter().all(|(_, s)| s == saved), "states differ");
    assert_eq!(saved.steps, 12);
    let check = |sums: &[Vec<f64>], state: &HookState| {
        for (param, sums) in sums.iter().enumerate() {
            let name = format!("error.layer{param}");
            let error = state.tensors.iter().find(|(n, _)| *n == name);
            let error = error.map_or(vec![0.0; sums.len()], |(_, e)| e.clone());
            let largest = error.iter().fold(0.0f32, |a, e| a.max(e.abs()));
            assert_eq!(largest > 0.1, param < 3, "what is compressed loses some");
            for (sum, error) in sums.iter().zip(&error) {
                assert!((sum + f64::from(*error)).abs() < 1e-4, "{name}");
            }
        }
    };
    check(sums, saved);
    for (sums, state) in ranks(2, Over::Thread, |group| {
        let mut reducer = with_hook(group, options(2));
        let hook = reducer.hook_mut().expect("a hook");
        hook.restore_state(saved).expect("restore");
        let mut sums = sums.clone();
        add_up(&mut reducer, 12..20, &mut sums);
        (sums, state(&mut reducer))
    }) {
        check(&sums, &state);
        assert_eq!(state.steps, 20);
    }
}

/// The same through the wrapper.
#[test]
fn the_wrapper_keeps_the_hooks_state() {
    ranks(2, Over::Thread, |group| {
        let make = || {
            let mut scope = Scope::new(Seed(3));
            let net = Linear::new(scope.enter("only"), 40, 30);
            let mut params = scope.build().expect("model builds");
            let ddp =
                DistributedDataParallel::new(group.clone(), &mut params, DdpOptions::default());
            let mut ddp = ddp.expect("ddp");
            let hook = PowerSgd::new(options(2));
            ddp.set_hook(Some(Box::new(hook))).expect("set");
            (net, params, ddp)
        };
        let state = |ddp: &mut DistributedDataParallel| {
            let hook = ddp.hook_mut().expect("a hook");
            hook.gather_state(&group).expect("gather")
        };
        let (net, params, mut ddp) = make();
        let mut tape = Tape::new(Threads(1));
        for index in 0..3 {
            let x: Vec<f32> = (0..80).map(|i| value(index, group.rank(), 0, i)).collect();
            let step = tape.step(&params, StepKey::new(0, index as u64));
            let x = step.input(&x, &[2, 40]).expect("input");
            let y = net.forward(x).expect("forward");
            let loss = y.mse_loss(&[0.5; 60], Reduction::Mean).expect("loss");
            loss.backward(&mut ddp).expect("backward");
            drop(step);
            assert!(ddp.finish().expect("finish").is_yes());
        }
        let saved = state(&mut ddp);
        assert_eq!(saved.steps, 3);
        assert_eq!(saved.tensors.len(), 2, "an error and a factor");
        let (_, _, mut other) = make();
        let hook = other.hook_mut().expect("a hook");
        hook.restore_state(&saved).expect("restore");
        assert_eq!(state(&mut other), saved);
    });
}

#[test]
fn all_ranks_get_the_same_bits_over_every_transport() {
    for world in [2, 4] {
        let mut seen = None;
        for over in ALL {
            for got in ranks(world, over, |group| {
                let rank = group.rank();
                let mut reducer = with_hook(group, options(2));
                (0..3).for_each(|index| {
                    step(&mut reducer, |p, i| value(index, rank, p, i));
                });
                step(&mut reducer, |p, i| value(3, rank, p, i)).1
            }) {
                assert_eq!(
                    *seen.get_or_insert(got.clone()),
                    got,
                    "{world} over {over:?}"
                );
            }
        }
    }
}

/// Its optimizer leaves it alone, so its error must not count as sent.
#[test]
fn a_parameter_that_nobody_used_keeps_its_error() {
    ranks(2, Over::Thread, |group| {
        let rank = group.rank();
        let mut reducer = with_hook(group, options(2));
        for index in 0..3 {
            step(&mut reducer, |p, i| value(index, rank, p, i));
        }
        let of = |state: &HookState, layer: &str| {
            let mine = state.tensors.iter().filter(|(n, _)| n.ends_with(layer));
            mine.map(|(_, values)| values.clone()).collect::<Vec<_>>()
        };
        let before = state(&mut reducer);
        for (param, (rows, columns)) in SHAPES.iter().enumerate().rev() {
            if param == 1 {
                reducer.unused(param).expect("unused");
                continue;
            }
            let slot = reducer.slot(param);
            (0..rows * columns).for_each(|i| slot[i] = value(3, rank, param, i));
            reducer.ready(param).expect("ready");
        }
        assert!(reducer.finish().expect("finish").is_yes());
        assert!(reducer.is_untouched(1) && !reducer.is_untouched(0));
        let after = state(&mut reducer);
        assert_eq!(of(&after, "layer1"), of(&before, "layer1"));
        assert_eq!(of(&before, "layer1").len(), 2);
        assert_ne!(of(&after, "layer0"), of(&before, "layer0"));
    });
}

#[test]
fn a_step_that_is_voted_down_leaves_nothing_behind() {
    let run = |bad: Option<usize>| {
        ranks(2, Over::Thread, |group| {
            let rank = group.rank();
            let mut reducer = with_hook(group, options(2));
            let mut last = Vec::new();
            for index in 0..5 {
                if bad == Some(index) {
                    let (commit, grads) = step(&mut reducer, |p, i| {
                        if (rank, p, i) == (1, 1, 77) {
                            f32::INFINITY
                        } else {
                            9.0
                        }
                    });
                    assert!(
                        commit.contains("rank 1: the gradient of layer1 is not"),
                        "{commit}"
                    );
                    assert!(grads.iter().all(Vec::is_empty));
                }
                last = step(&mut reducer, |p, i| value(index, rank, p, i)).1;
            }
            let mut state = state(&mut reducer);
            state.steps = 0;
            (last, state)
        })
    };
    let good = run(None);
    assert_eq!(run(Some(3)), good);
    assert_eq!(run(Some(1)), good);
}

/// Columns without a gradient for a while come back to life.
#[test]
fn a_gradient_that_was_zero_is_followed_again() {
    ranks(2, Over::Thread, |group| {
        let rank = group.rank();
        let mut reducer = with_hook(group, options(16));
        for index in 0..3 {
            let (_, grads) = step(&mut reducer, |_, _| 0.0);
            assert!(grads.iter().flatten().all(|g| *g == 0.0), "step {index}");
        }
        // Layer 2 is at full rank: at once the mean again.
        let full = PowerSgdOptions {
            min_compression_rate: 0.0,
            ..options(16)
        };
        let hook = PowerSgd::new(full);
        reducer.set_hook(Some(Box::new(hook))).expect("set");
        step(&mut reducer, |_, _| 0.0);
        let (_, grads) = step(&mut reducer, |p, i| value(1, rank, p, i));
        for (i, got) in grads[2].iter().enumerate() {
            let want = mean(2, |r| value(1, r, 2, i));
            assert!((f64::from(*got) - want).abs() < 1e-5);
        }
    });
}

#[test]
fn thin_matrices_travel_and_plain_means_before_them() {
    let all = ranks(2, Over::Tcp, |group| {
        let mut reducer = with_hook(
            group.clone(),
            PowerSgdOptions {
                start_step: 5,
                ..options(1)
            },
        );
        let mut sent = |steps: std::ops::Range<usize>| {
            let before: u64 = group.bytes_sent_to().iter().sum();
            let count = steps.len() as f64;
            for index in steps {
                let rank = group.rank();
                let (_, grads) = step(&mut reducer, |p, i| value(index, rank, p, i));
                if index < 5 {
                    let want = mean(2, |r| value(index, r, 0, 5));
                    assert!((f64::from(grads[0][5]) - want).abs() < 1e-6);
                }
            }
            (group.bytes_sent_to().iter().sum::<u64>() - before) as f64 / count
        };
        // The first broadcasts the layout besides.
        sent(0..1);
        (sent(1..5), sent(5..25))
    });
    let plain: usize = SHAPES.iter().map(|(r, c)| 4 * r * c).sum();
    let thin: usize = SHAPES[..3].iter().map(|(r, c)| 4 * (r + c)).sum::<usize>() + 4 * 50;
    for (full, compressed) in all {
        assert!(
            full > plain as f64 && full < 1.3 * plain as f64,
            "{full} for {plain}"
        );
        // Frames and votes are a few hundred bytes.
        let (least, most) = (thin as f64, thin as f64 + 900.0);
        assert!(
            compressed >= least && compressed < most,
            "{compressed} for {thin}"
        );
    }
}

#[test]
fn the_state_of_another_hook_is_refused() {
    let state = HookState {
        steps: 1,
        tensors: vec![("momentum.layer0".to_owned(), vec![0.0; 3])],
    };
    let error = PowerSgd::new(options(1)).restore_state(&state);
    let text = error.expect_err("another's").to_string();
    assert_eq!(text, "momentum.layer0 is no state of PowerSGD");
}

/// Two ranks with the same gradients are one rank: it goes on from their state, uses their errors, and counts its steps.
#[test]
fn one_rank_compresses_as_several_do() {
    let run = |world: usize, from: Option<&HookState>, steps: std::ops::Range<usize>| {
        let all = ranks(world, Over::Thread, |group| {
            let mut reducer = with_hook(group, options(2));
            if let Some(from) = from {
                let hook = reducer.hook_mut().expect("a hook");
                hook.restore_state(from).expect("restore");
            }
            let each = steps
                .clone()
                .map(|s| step(&mut reducer, |p, i| value(s, 0, p, i)).1);
            let grads: Vec<_> = each.collect();
            (grads, state(&mut reducer))
        });
        all.into_iter().next().expect("rank 0")
    };
    let (_, half) = run(2, None, 0..4);
    let one = run(1, Some(&half), 4..8);
    assert_eq!(one, run(2, Some(&half), 4..8));
    assert_eq!(one.1.steps, 8);
    assert_eq!(run(1, None, 0..4).1, half);
}
