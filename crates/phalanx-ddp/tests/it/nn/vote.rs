//! The commit vote: a step that one rank cannot take is taken by none.

use crate::common::{ALL, Over, ranks};
use phalanx_comm::ProcessGroup;
use phalanx_ddp::{
    BucketCaps, Commit, DdpOptions, DistributedDataParallel, ParamSpec, Reducer, ReducerOptions,
};
use phalanx_nn::optim::Sgd;
use phalanx_nn::{GradSink, ParamId, Params, Scope, Seed, layers::Linear};

fn specs() -> Vec<ParamSpec> {
    let spec = |(i, len)| ParamSpec {
        name: format!("layer{i}.weight"),
        len,
        columns: 1,
    };
    [70, 1, 33].into_iter().enumerate().map(spec).collect()
}

fn reducer(group: ProcessGroup, caps: BucketCaps) -> Reducer {
    let options = ReducerOptions {
        caps,
        ..ReducerOptions::default()
    };
    Reducer::new(group, specs(), options)
}

/// One step in which `spoil` may write into a gradient.
fn step(
    reducer: &mut Reducer,
    spoil: impl Fn(usize, &mut [f32]),
) -> Result<Commit, phalanx_ddp::Error> {
    for param in [2, 1, 0] {
        let slot = reducer.slot(param);
        slot.fill(1.0);
        spoil(param, slot);
        reducer.ready(param)?;
    }
    reducer.finish()
}

#[test]
fn every_rank_learns_who_could_not_and_why() {
    for over in ALL {
        for world in [1, 2, 3, 4, 8] {
            for caps in [BucketCaps::uniform(1), BucketCaps::ONE_HOST] {
                ranks(world, over, |group| {
                    let rank = group.rank();
                    let culprit = world - 1;
                    let mut reducer = reducer(group, caps);
                    for (param, bad) in [
                        (0, f32::NAN),
                        (1, f32::INFINITY),
                        (2, f32::NEG_INFINITY),
                        (2, -f32::NAN),
                    ] {
                        let commit = step(&mut reducer, |p, slot| {
                            if rank == culprit && p <= param {
                                // The first in backward's order is named.
                                slot[slot.len() - 1] = bad;
                            }
                        })
                        .expect("no rank is lost by a vote");
                        assert_eq!(
                            commit.to_string(),
                            format!(
                                "rank {culprit}: the gradient of layer{param}.weight is not finite"
                            ),
                            "{over:?}, world {world}"
                        );
                        assert!((0..3).all(|p| reducer.grad(p).is_empty()), "dropped");
                        // The next step is a clean one.
                        assert_eq!(step(&mut reducer, |_, _| ()).expect("step"), Commit::Yes);
                        assert!(reducer.grad(0).iter().all(|g| *g == 1.0));
                    }
                    assert_eq!(reducer.skipped_steps(), 4);
                });
            }
        }
    }
}

/// The mean over ranks may have an infinity where no rank has one: it reaches no optimizer either.
#[test]
fn a_mean_that_overflows_is_voted_down_and_large_numbers_are_not() {
    use phalanx_ddp::Exchange::{AllReduce, AtStep, ReduceScatter};
    for (over, exchange) in ALL.into_iter().flat_map(|over| {
        let each = [AllReduce, ReduceScatter, AtStep];
        each.map(|exchange| (over, exchange))
    }) {
        for world in [1, 2, 3, 4] {
            ranks(world, over, |group| {
                let rank = group.rank();
                let options = ReducerOptions {
                    caps: BucketCaps::uniform(100),
                    exchange,
                    ..ReducerOptions::default()
                };
                let mut reducer = Reducer::new(group, specs(), options);
                let at = format!("{over:?}, {exchange:?}, world {world}");
                let mut one = |param: usize, of: fn(usize) -> f32| {
                    let commit = step(&mut reducer, |p, slot| {
                        if p == param {
                            slot[slot.len() - 1] = of(rank);
                        }
                    });
                    let last = reducer.grad(param).last().copied();
                    (commit.expect("no rank is lost by a vote").to_string(), last)
                };
                for param in 0..3 {
                    let (text, _) = one(param, |_| f32::MAX);
                    let no = format!("the gradient of layer{param}.weight is not finite");
                    let each = (0..world).map(|rank| format!("rank {rank}: {no}"));
                    match world {
                        1 => assert_eq!(text, "", "{at}"),
                        _ => assert_eq!(text, each.collect::<Vec<_>>().join("; "), "{at}"),
                    }
                    // As large, but no sum of them is not finite.
                    let (text, mean) = one(param, |rank| if rank == 0 { f32::MAX } else { 0.0 });
                    assert_eq!(text, "", "{at}");
                    if exchange == AllReduce {
                        assert_eq!(mean, Some(f32::MAX * (1.0 / world as f32)), "{at}");
                    }
                    let signs = |rank: usize| f32::MAX * [-1.0, 1.0][rank % 2];
                    assert_eq!(one(param, signs).0, "", "{at}");
                }
            });
        }
    }
}

#[test]
fn a_rank_may_veto_for_its_own_reasons_and_several_at_once() {
    ranks(3, Over::Thread, |group| {
        let rank = group.rank();
        let mut reducer = reducer(group, BucketCaps::ONE_HOST);
        if rank == 1 {
            reducer.veto();
        }
        let commit = step(&mut reducer, |p, slot| {
            if rank == 2 && p == 1 {
                slot[0] = f32::NAN;
            }
        });
        assert_eq!(
            commit.expect("step").to_string(),
            "rank 1 asked for it; rank 2: the gradient of layer1.weight is not finite"
        );
        assert_eq!(step(&mut reducer, |_, _| ()).expect("step"), Commit::Yes);
    });
}

/// Whoever made a gradient may have looked: it is taken at its word, but only for what it made.
#[test]
fn gradients_seen_to_be_finite_are_not_read_again_unless_they_are_changed() {
    ranks(2, Over::Thread, |group| {
        let rank = group.rank();
        let mut reducer = reducer(group, BucketCaps::ONE_HOST);
        let step = |reducer: &mut Reducer, value: f32| {
            for param in [2, 1, 0] {
                reducer.slot(param).fill(1.0);
                if rank == 1 && param == 1 {
                    reducer.slot(param).fill(value);
                }
                reducer.ready_finite(param).expect("ready");
            }
        };
        step(&mut reducer, f32::NAN);
        assert_eq!(reducer.finish().expect("step"), Commit::Yes);

        let plan = |reducer: &mut Reducer, weights: &[f32]| {
            reducer.plan_step(weights, 1.0).expect("plan");
        };
        // Weighed, or added to another: it has become something else.
        for weights in [&[4.0][..], &[1.0, 1.0]] {
            plan(&mut reducer, weights);
            for micro in 0..weights.len() {
                if micro > 0 {
                    reducer.next_micro_batch().expect("planned");
                }
                step(&mut reducer, 0.75 * f32::MAX);
            }
            let commit = reducer.finish().expect("step").to_string();
            assert_eq!(
                commit,
                "rank 1: the gradient of layer1.weight is not finite"
            );
        }
    });
}

/// Nobody looks where that was asked for; a veto counts all the same.
#[test]
fn unchecked_gradients_go_through_and_a_veto_still_counts() {
    ranks(2, Over::Thread, |group| {
        let rank = group.rank();
        let options = ReducerOptions {
            unchecked: true,
            ..ReducerOptions::default()
        };
        let mut reducer = Reducer::new(group, specs(), options);
        let spoil = |_: usize, slot: &mut [f32]| {
            if rank == 1 {
                slot[0] = f32::NAN;
            }
        };
        assert_eq!(step(&mut reducer, spoil).expect("step"), Commit::Yes);
        assert!(reducer.grad(0)[0].is_nan());
        reducer.veto();
        let commit = step(&mut reducer, spoil).expect("step").to_string();
        assert_eq!(commit, "rank 0 asked for it; rank 1 asked for it");
    });
}

/// The optimizer refuses the gradients of a step that was voted down, so that
/// a caller who does not ask cannot apply it either.
#[test]
fn a_step_voted_down_changes_no_bit() {
    let bits =
        |params: &Params| -> Vec<u32> { params.flat().iter().map(|p| p.to_bits()).collect() };
    let trained = |group: ProcessGroup, spoiled: Option<usize>| {
        let rank = group.rank();
        let mut scope = Scope::new(Seed(3));
        Linear::new(scope.enter("head"), 5, 4);
        let mut params = scope.build().expect("model");
        let mut ddp = DistributedDataParallel::new(group, &mut params, DdpOptions::default())
            .expect("wrapped");
        let mut optimizer = Sgd::new(&params, 0.1).momentum(0.9);
        let mut taken = 0;
        for i in 0..6 {
            let ids: Vec<ParamId> = params.ids().collect();
            for id in ids.into_iter().rev() {
                let slot = ddp.slot(id);
                slot.fill(taken as f32 + rank as f32);
                if Some(i) == spoiled && rank == 1 {
                    slot[0] = f32::INFINITY;
                }
                ddp.ready(id).expect("ready");
            }
            let before = bits(&params);
            if ddp.finish().expect("finish").is_yes() {
                optimizer.step(&mut params, &ddp).expect("step");
                taken += 1;
            } else {
                optimizer.step(&mut params, &ddp).expect_err("no gradients");
                assert_eq!(bits(&params), before);
            }
            if taken == 5 {
                break;
            }
        }
        bits(&params)
    };
    let plain = ranks(2, Over::Shm, |group| trained(group, None));
    for spoiled in 0..5 {
        let voted = ranks(2, Over::Shm, |group| trained(group, Some(spoiled)));
        assert_eq!(voted, plain, "step {spoiled}");
    }
}
