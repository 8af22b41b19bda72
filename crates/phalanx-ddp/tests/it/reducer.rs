//! The reducer over plain slices: order of launches, overlap, rebuild, micro-batches, votes, misuse.

use std::sync::atomic::Ordering::SeqCst;

use crate::common::{ALL, Over, ranks};
use phalanx_comm::ProcessGroup;
use phalanx_ddp::{BucketCaps, Commit, ErrorKind, Fingerprint, ParamSpec, Reducer, ReducerOptions};

fn specs(lens: &[usize]) -> Vec<ParamSpec> {
    lens.iter()
        .enumerate()
        .map(|(i, &len)| ParamSpec {
            name: format!("layer{i}.weight"),
            len,
            columns: 1,
        })
        .collect()
}

fn one_tensor_a_bucket() -> ReducerOptions {
    ReducerOptions {
        caps: BucketCaps::uniform(1),
        ..ReducerOptions::default()
    }
}

/// Writes `value` everywhere in the gradient of `param` and reports it.
fn produce(reducer: &mut Reducer, param: usize, value: f32) {
    reducer.slot(param).fill(value);
    reducer.ready(param).expect("first report");
}

fn alone() -> ProcessGroup {
    ProcessGroup::threads(1, Default::default()).remove(0)
}

#[test]
fn gradients_are_averaged_whatever_order_they_come_in() {
    ranks(3, Over::Thread, |group| {
        let rank = group.rank();
        let mut reducer = Reducer::new(group, specs(&[5, 1, 40]), one_tensor_a_bucket());
        // Each rank reports in another order, and another one each step.
        for step in 0..4 {
            for i in 0..3 {
                let param = (i + rank + step) % 3;
                produce(&mut reducer, param, (10 * param + rank) as f32);
            }
            assert_eq!(reducer.finish().expect("finish"), Commit::Yes);
            for param in 0..3 {
                let want = (10 * param + 1) as f32;
                assert!(
                    reducer.grad(param).iter().all(|&g| (g - want).abs() < 1e-5),
                    "step {step}"
                );
            }
            assert_eq!(reducer.grad(2).len(), 40);
        }
    });
}

#[test]
fn gradient_is_produced_in_the_memory_that_is_reduced() {
    let pointers = ranks(2, Over::Thread, |group| {
        let mut reducer = Reducer::new(
            group,
            specs(&[100]),
            ReducerOptions {
                rebuild: false,
                ..Default::default()
            },
        );
        let written = reducer.slot(0).as_ptr() as usize;
        produce(&mut reducer, 0, 1.0);
        assert_eq!(reducer.finish().expect("finish"), Commit::Yes);
        (written, reducer.grad(0).as_ptr() as usize)
    });
    for (written, read) in pointers {
        assert_eq!(written, read, "the gradient was copied");
    }
}

#[test]
fn buckets_are_rebuilt_once_in_rank_0s_observed_order() {
    ranks(2, Over::Thread, |group| {
        let rank = group.rank();
        let mut reducer = Reducer::new(group, specs(&[1, 1, 1]), one_tensor_a_bucket());
        assert_eq!(reducer.plan().buckets(), [[2], [1], [0]]);
        let order = if rank == 0 { [1, 2, 0] } else { [0, 1, 2] };
        for step in 0..3 {
            for param in order {
                produce(&mut reducer, param, 1.0);
            }
            assert_eq!(reducer.finish().expect("finish"), Commit::Yes);
            // This step's gradients are read from this step's buckets.
            assert!((0..3).all(|p| reducer.grad(p) == [1.0]));
            let want = if step == 0 {
                [[2], [1], [0]]
            } else {
                [[1], [2], [0]]
            };
            assert_eq!(reducer.plan().buckets(), want, "step {step}");
        }
    });
}

#[test]
fn first_bucket_is_reduced_before_backward_ends() {
    // However long backward takes, a reducer that waits for its end is late.
    const LONGEST_MS: u64 = 6400;
    let late = std::sync::atomic::AtomicUsize::new(0);
    let gate = std::sync::Barrier::new(2);
    ranks(2, Over::Thread, |group| {
        let mut reducer = Reducer::new(group.clone(), specs(&[8, 8]), one_tensor_a_bucket());
        let mut backward_ms = 100;
        loop {
            produce(&mut reducer, 1, 1.0);
            // Backward is still running (parameter 0 is missing); the peer may
            // still have to launch too, and the communication thread needs time.
            std::thread::sleep(std::time::Duration::from_millis(backward_ms));
            produce(&mut reducer, 0, 1.0);
            assert_eq!(reducer.finish().expect("finish"), Commit::Yes);
            let first = &reducer.times().buckets[0];
            let ended = reducer.times().backward_ended.expect("ended");
            let in_time = reducer.times().overlapped() && first.finished < ended;
            late.fetch_add(usize::from(!in_time), SeqCst);
            gate.wait();
            let all_in_time = late.load(SeqCst) == 0;
            if gate.wait().is_leader() {
                late.store(0, SeqCst);
            }
            gate.wait();
            if all_in_time {
                break;
            }
            assert!(
                backward_ms < LONGEST_MS,
                "the first bucket was not done when backward ended"
            );
            backward_ms *= 4;
        }
    });
}

#[test]
fn missing_gradient_is_named() {
    let mut reducer = Reducer::new(alone(), specs(&[1, 1, 1]), ReducerOptions::default());
    produce(&mut reducer, 1, 1.0);
    let error = reducer.finish().expect_err("two are missing");
    assert_eq!(error.kind(), ErrorKind::Usage);
    let text = error.to_string();
    assert!(text.contains("2 of 3"), "{text}");
    assert!(text.contains("layer0.weight, layer2.weight"), "{text}");
    let error = reducer.ready(0).expect_err("a failed reducer refuses");
    assert_eq!(error.kind(), ErrorKind::Usage);
    let error = reducer.finish().expect_err("a failed reducer refuses");
    assert!(error.to_string().contains("an earlier step"), "{error}");
}

#[test]
fn missing_gradient_stops_the_other_ranks_at_once() {
    for over in [Over::Thread, Over::Tcp] {
        let began = std::time::Instant::now();
        let errors = ranks(2, over, |group| {
            let rank = group.rank();
            let mut reducer = Reducer::new(group, specs(&[3, 3]), one_tensor_a_bucket());
            produce(&mut reducer, 1, 1.0);
            if rank == 1 {
                produce(&mut reducer, 0, 1.0);
            }
            let error = reducer.finish().expect_err("rank 0 lacks a gradient");
            (error.kind(), error.comm().map(ToString::to_string))
        });
        assert_eq!(errors[0], (ErrorKind::Usage, None));
        let (kind, cause) = &errors[1];
        assert_eq!(*kind, ErrorKind::Comm);
        let cause = cause.as_ref().expect("the group's error");
        assert!(cause.contains("no gradient for 1 of 2"), "{cause}");
        assert!(
            began.elapsed().as_secs() < 20,
            "a rank waited for its deadline"
        );
    }
}

#[test]
fn unknown_parameter_is_refused() {
    let mut reducer = Reducer::new(alone(), specs(&[2]), ReducerOptions::default());
    assert!(reducer.slot(1).is_empty());
    let error = reducer.ready(1).expect_err("there is no parameter 1");
    assert!(error.to_string().contains("number 1"), "{error}");
    produce(&mut reducer, 0, 1.0);
    assert_eq!(reducer.finish().expect("nothing was harmed"), Commit::Yes);
    assert_eq!(reducer.grad(0), [1.0; 2]);
    assert!(reducer.grad(1).is_empty());
}

#[test]
fn empty_parameters_and_empty_models_are_fine() {
    for world in [1, 2] {
        for lens in [&[][..], &[0], &[0, 3, 0], &[3, 0]] {
            for caps in [BucketCaps::uniform(1), BucketCaps::ONE_HOST] {
                ranks(world, Over::Thread, |group| {
                    let options = ReducerOptions {
                        caps,
                        rebuild: true,
                        ..ReducerOptions::default()
                    };
                    let mut reducer = Reducer::new(group, specs(lens), options);
                    for _ in 0..3 {
                        for param in 0..lens.len() {
                            produce(&mut reducer, param, 1.0);
                        }
                        assert_eq!(reducer.finish().expect("finish"), Commit::Yes);
                        for (param, &len) in lens.iter().enumerate() {
                            assert_eq!(reducer.grad(param), vec![1.0; len]);
                        }
                    }
                });
            }
        }
    }
}

#[test]
fn gradient_reported_twice_is_named_and_harms_nothing() {
    ranks(2, Over::Thread, |group| {
        let mut reducer = Reducer::new(group, specs(&[1, 4]), one_tensor_a_bucket());
        produce(&mut reducer, 1, 2.0);
        // Its bucket is in flight now; a second write must not reach it.
        reducer.slot(1).fill(f32::NAN);
        let error = reducer.ready(1).expect_err("twice");
        assert_eq!(error.kind(), ErrorKind::Usage);
        assert!(
            error
                .to_string()
                .contains("layer1.weight was marked ready twice"),
            "{error}"
        );
        produce(&mut reducer, 0, 2.0);
        assert_eq!(reducer.finish().expect("finish"), Commit::Yes);
        assert_eq!(reducer.grad(1), [2.0; 4]);
    });
}

#[test]
fn gradients_are_unreadable_while_backward_runs() {
    let mut reducer = Reducer::new(alone(), specs(&[2, 2]), ReducerOptions::default());
    produce(&mut reducer, 0, 1.0);
    produce(&mut reducer, 1, 1.0);
    assert_eq!(reducer.finish().expect("finish"), Commit::Yes);
    assert_eq!(reducer.grad(0), [1.0, 1.0]);
    reducer.slot(1);
    assert!(reducer.grad(0).is_empty());
}

#[test]
fn different_models_are_refused_on_every_rank_by_name() {
    let errors = ranks(3, Over::Thread, |group| {
        let mut print = Fingerprint::new();
        print.line("parameter fc1.bias f32 [128]");
        let width = if group.rank() == 2 { 64 } else { 128 };
        print.line(format!("parameter fc2.weight f32 [{width}, 10]"));
        print.compare(&group).map_err(|e| (e.kind(), e.to_string()))
    });
    for error in errors {
        let (kind, text) = error.expect_err("models differ");
        assert_eq!(kind, ErrorKind::Mismatch);
        assert!(
            text.contains("rank 2") && text.contains("fc2.weight f32 [64, 10]"),
            "{text}"
        );
    }
}

#[test]
fn equal_models_pass() {
    let outcomes = ranks(4, Over::Thread, |group| {
        let mut print = Fingerprint::new();
        print.line("parameter fc1.bias f32 [128]");
        print.compare(&group).is_ok()
    });
    assert_eq!(outcomes, [true; 4]);
}

#[test]
fn lost_peer_is_reported_with_the_bucket() {
    let outcomes = ranks(2, Over::Tcp, |group| {
        let rank = group.rank();
        let mut reducer = Reducer::new(group, specs(&[4]), ReducerOptions::default());
        if rank == 1 {
            return None; // leaves without a word in the middle of the step
        }
        produce(&mut reducer, 0, 1.0);
        let error = reducer.finish().expect_err("the peer is gone");
        // The memory is lost; asked again, it must not say that all is well.
        for _ in 0..3 {
            reducer.finish().expect_err("a failed reducer refuses");
        }
        assert!(reducer.is_failed() && reducer.grad(0).is_empty());
        Some(error)
    });
    let error = outcomes[0].as_ref().expect("rank 0 failed");
    assert_eq!(error.kind(), ErrorKind::Comm);
    assert!(
        error.to_string().contains("bucket 0 of 1: layer0.weight"),
        "{error}"
    );
    assert!(error.comm().is_some());
}

#[test]
fn a_step_copies_no_gradient_where_ranks_share_memory() {
    for over in [Over::Thread, Over::Shm] {
        ranks(3, over, |group| {
            let lens = [50_000, 60_000, 40_000];
            let mut reducer = Reducer::new(group.clone(), specs(&lens), one_tensor_a_bucket());
            let step = |reducer: &mut Reducer| {
                for param in [1, 2, 0] {
                    produce(reducer, param, (param + group.rank()) as f32);
                }
                assert!(reducer.finish().expect("finish").is_yes());
                assert_eq!(reducer.grad(2)[39_999], 3.0);
                group.counters()
            };
            // The first step also tells all ranks in which order gradients
            // came; the second one has new buckets.
            let before = step(&mut reducer);
            step(&mut reducer);
            let after = step(&mut reducer);
            assert_eq!(after.staged_bytes, before.staged_bytes, "{over:?}");
            assert_eq!(after.moved_bytes, before.moved_bytes, "{over:?}");
            // Two steps; a third of three ranks' gradients, but for whole lines.
            let folded = after.folded_bytes - before.folded_bytes;
            let gradients = 4 * lens.iter().sum::<usize>() as u64;
            assert!(folded.abs_diff(2 * gradients) < 10_000, "{folded}");

            // Ordinary memory of the same length: what others own is staged,
            // and what they made of it is fetched.
            let mut heap = vec![1f32; 150_000];
            group
                .all_reduce(&mut heap, phalanx_comm::ReduceOp::Sum)
                .expect("all-reduce");
            let staged = group.counters().staged_bytes - after.staged_bytes;
            assert!(staged.abs_diff(2 * gradients * 2 / 3) < 10_000, "{staged}");
        });
    }
}

/// Asked to keep its layout, a reducer does, whatever order gradients come in; the means stay those of f64.
#[test]
fn a_kept_layout_stays() {
    for world in [1, 2, 8] {
        ranks(world, Over::Thread, |group| {
            let rank = group.rank();
            let options = ReducerOptions {
                rebuild: false,
                ..one_tensor_a_bucket()
            };
            let mut reducer = Reducer::new(group, specs(&[5, 1, 40]), options);
            let value = |rank: usize, param: usize, step: usize| {
                ((rank * 5 + param * 3 + step) % 17) as f32 / 7.0
            };
            for step in 0..4 {
                for i in 0..3 {
                    let param = (i + step) % 3;
                    produce(&mut reducer, param, value(rank, param, step));
                }
                assert_eq!(reducer.finish().expect("finish"), Commit::Yes);
                assert_eq!(reducer.plan().buckets(), [[2], [1], [0]], "step {step}");
                for param in 0..3 {
                    let sum: f64 = (0..world).map(|r| f64::from(value(r, param, step))).sum();
                    let want = sum / world as f64;
                    assert!(!reducer.grad(param).is_empty());
                    assert!(
                        reducer
                            .grad(param)
                            .iter()
                            .all(|g| (f64::from(*g) - want).abs() < 1e-6)
                    );
                }
            }
        });
    }
}

/// Element counts of a model; one tensor is empty, none fills a line.
const LENS: [usize; 6] = [33, 70, 0, 129, 1, 7];

/// A gradient that no fold of several ranks leaves without rounding.
fn value(step: usize, rank: usize, micro: usize, param: usize, i: usize) -> f32 {
    let at = ((((step * 8 + rank) * 4 + micro) * LENS.len() + param) * 131 + i) as f32;
    (at * 0.754_877_7).fract() * 3.0 - 1.5
}

/// The mean of weighed sums of micro-batches, one rank and one operation after the other.
fn serial(step: usize, weights: &[&[f32]], scale: f32, param: usize) -> Vec<u32> {
    let of_rank = |rank: usize, i: usize| {
        let weighed = (0..).zip(weights[rank]).map(|(micro, w)| {
            let g = value(step, rank, micro, param, i);
            if *w == 1.0 { g } else { g * w }
        });
        weighed.reduce(|a, b| a + b).unwrap_or(0.0)
    };
    let mean = |i| {
        let sum = (0..weights.len()).map(|rank| of_rank(rank, i));
        sum.reduce(|a, b| a + b).expect("a rank") * (1.0 / weights.len() as f32)
    };
    let bits = |i| (mean(i) * scale).to_bits();
    (0..LENS[param]).map(bits).collect()
}

#[test]
fn weighed_micro_batches_are_added_and_ranks_without_data_take_part() {
    let weights: [&[f32]; 3] = [&[0.5, 2.0, 1.0], &[], &[0.75]];
    for over in ALL {
        ranks(3, over, |group| {
            let rank = group.rank();
            let options = ReducerOptions {
                caps: BucketCaps::uniform(300),
                ..ReducerOptions::default()
            };
            let mut reducer = Reducer::new(group, specs(&LENS), options);
            for step in 0..2 {
                reducer
                    .plan_step(weights[rank], 3.0)
                    .expect("between steps");
                for micro in 0..weights[rank].len() {
                    if micro > 0 {
                        reducer.next_micro_batch().expect("declared");
                    }
                    for i in (0..LENS.len()).rev() {
                        let param = (i + step * rank) % LENS.len();
                        for (i, g) in reducer.slot(param).iter_mut().enumerate() {
                            *g = value(step, rank, micro, param, i);
                        }
                        reducer.ready(param).expect("first report");
                    }
                }
                assert_eq!(reducer.finish().expect("finish"), Commit::Yes);
                for param in 0..LENS.len() {
                    let got: Vec<u32> = reducer.grad(param).iter().map(|g| g.to_bits()).collect();
                    let want = serial(step, &weights, 3.0, param);
                    assert_eq!(got, want, "{over:?}, step {step}, parameter {param}");
                }
            }
        });
    }
}

#[test]
fn a_nan_votes_the_step_down_and_unused_parameters_stay_untouched() {
    ranks(2, Over::Thread, |group| {
        let rank = group.rank();
        let mut reducer = Reducer::new(group, specs(&[3, 3]), one_tensor_a_bucket());
        for bad in 0..2 {
            for param in (0..2).rev() {
                reducer.unused(param).expect("zeros");
            }
            assert_eq!(reducer.finish().expect("finish"), Commit::Yes);
            assert!((0..2).all(|p| reducer.is_untouched(p)));
            for param in (0..2).rev() {
                if rank == 1 && param == bad {
                    produce(&mut reducer, param, f32::NAN);
                } else {
                    reducer.unused(param).expect("once");
                }
            }
            let commit = reducer.finish().expect("finish");
            let want = format!("rank 1: the gradient of layer{bad}.weight is not finite");
            assert_eq!(commit.to_string(), want);
            assert!((0..2).all(|p| reducer.grad(p).is_empty()));
        }
    });
}

/// Two finite micro-batches whose sum is not, on one rank.
#[test]
fn a_sum_of_micro_batches_that_overflows_votes_the_step_down() {
    for world in [1, 2, 3, 8] {
        ranks(world, Over::Thread, |group| {
            let rank = group.rank();
            let mut reducer = Reducer::new(group, specs(&[3, 3]), ReducerOptions::default());
            for bad in 0..2 {
                reducer.plan_step(&[1.0, 1.0], 0.5).expect("plan");
                for micro in 0..2 {
                    if micro > 0 {
                        reducer.next_micro_batch().expect("declared");
                    }
                    for param in (0..2).rev() {
                        let large = param == bad && rank == world - 1;
                        let value = if large { 0.75 * f32::MAX } else { 1.0 };
                        produce(&mut reducer, param, value);
                    }
                }
                let text = reducer.finish().expect("finish").to_string();
                let culprit = world - 1;
                let want =
                    format!("rank {culprit}: the gradient of layer{bad}.weight is not finite");
                assert_eq!(text, want);
                assert!(reducer.grad(1).is_empty());
            }
        });
    }
}
