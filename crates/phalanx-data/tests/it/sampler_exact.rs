//! The exact order: each sample once per epoch, for every world size.

use phalanx_base::ErrorKind;
use phalanx_data::sampler::{Cursor, EpochPlan, Sampler, SamplerConfig};
use phalanx_nn::rng::torch::Generator;

const SEED: u64 = 11;

fn sampler(samples: usize, world: usize, rank: usize, global_batch: usize) -> Sampler {
    let config = SamplerConfig {
        samples,
        world,
        rank,
        shuffle: true,
        seed: SEED,
    };
    Sampler::exact(config, global_batch).unwrap()
}

/// The plans of all ranks woven together again: the global batches.
fn global_batches(plans: &[EpochPlan]) -> Vec<Vec<u64>> {
    let steps = plans[0].len();
    assert!(plans.iter().all(|p| p.len() == steps));
    (0..steps)
        .map(|step| {
            let parts: Vec<_> = plans.iter().map(|p| p.step(step).unwrap()).collect();
            let global_len = parts[0].global_len;
            assert!(parts.iter().all(|p| p.global_len == global_len));
            let woven: Vec<u64> = (0..global_len)
                .map(|i| parts[i % plans.len()].indices[i / plans.len()])
                .collect();
            let held: usize = parts.iter().map(|p| p.indices.len()).sum();
            assert_eq!(held, global_len);
            woven
        })
        .collect()
}

fn all_ranks(n: usize, world: usize, batch: usize, epoch: u64) -> Vec<EpochPlan> {
    (0..world)
        .map(|rank| sampler(n, world, rank, batch).epoch(epoch))
        .collect()
}

#[test]
fn ranks_together_hold_every_sample_exactly_once() {
    for n in 0..=100 {
        for world in 1..=8 {
            for batch in [1, world, 7, 32, 1000] {
                let plans = all_ranks(n, world, batch, 4);
                let mut seen: Vec<u64> = global_batches(&plans).concat();
                seen.sort_unstable();
                let expected: Vec<u64> = (0..n as u64).collect();
                assert_eq!(seen, expected, "n {n} world {world} batch {batch}");
            }
        }
    }
}

#[test]
fn global_batches_are_the_same_for_every_world_size() {
    for (n, batch) in [(100, 16), (37, 8), (5, 8), (64, 64), (9, 1)] {
        let permutation = Generator::new(SEED + 2).randperm(n);
        let expected: Vec<Vec<u64>> = permutation.chunks(batch).map(<[u64]>::to_vec).collect();
        for world in 1..=8 {
            let plans = all_ranks(n, world, batch, 2);
            assert_eq!(global_batches(&plans), expected, "n {n} world {world}");
        }
    }
}

#[test]
fn a_short_last_batch_leaves_late_ranks_empty_handed() {
    let plans = all_ranks(10, 4, 8, 0);
    let lengths: Vec<usize> = plans
        .iter()
        .map(|p| p.step(1).unwrap().indices.len())
        .collect();
    assert_eq!(lengths, [1, 1, 0, 0]);
    assert_eq!(plans[3].step(1).unwrap().global_len, 2);
    assert_eq!(plans[3].step(2), None);
}

#[test]
fn any_cursor_resumes_at_any_world_size_and_batch() {
    let n = 50;
    let permutation = Generator::new(SEED + 3).randperm(n);
    for done in 0..=n {
        for world in [1, 2, 3, 5, 8] {
            for batch in [4, 7] {
                let cursor = Cursor {
                    epoch: 3,
                    samples: done as u64,
                };
                let plans: Vec<EpochPlan> = (0..world)
                    .map(|r| sampler(n, world, r, batch).resume(cursor).unwrap())
                    .collect();
                let rest = global_batches(&plans).concat();
                assert_eq!(rest, permutation[done..], "done {done} world {world}");
            }
        }
    }
}

#[test]
fn the_cursor_after_each_step_is_where_the_next_begins() {
    let whole = sampler(50, 2, 0, 8).epoch(1);
    let mut cursors = vec![];
    for steps in 0..=whole.len() {
        cursors.push(whole.cursor_after(steps));
    }
    let samples: Vec<u64> = cursors.iter().map(|c| c.samples).collect();
    assert_eq!(samples, [0, 8, 16, 24, 32, 40, 48, 0]);
    assert_eq!(cursors.last().unwrap().epoch, 2);
    // A cursor taken inside a resumed plan counts from the epoch's beginning.
    let rest = sampler(50, 3, 1, 8).resume(cursors[2]).unwrap();
    assert_eq!(rest.cursor_after(1).samples, 24);
}

#[test]
fn the_iterator_owns_the_epoch_so_no_permutation_repeats() {
    let sampler = sampler(40, 1, 0, 8);
    let mut orders: Vec<Vec<u64>> = sampler
        .epochs(Cursor::START)
        .unwrap()
        .take(5)
        .enumerate()
        .map(|(e, plan)| {
            assert_eq!(plan.epoch(), e as u64);
            plan.iter().flat_map(|s| s.indices).collect()
        })
        .collect();
    orders.sort();
    orders.dedup();
    assert_eq!(orders.len(), 5);
}

#[test]
fn a_resumed_run_finishes_its_epoch_and_goes_on_with_the_next() {
    let sampler = sampler(40, 2, 1, 8);
    let start = Cursor {
        epoch: 6,
        samples: 24,
    };
    let mut epochs = sampler.epochs(start).unwrap();
    let rest = epochs.next().unwrap();
    assert_eq!((rest.epoch(), rest.len()), (6, 2));
    let next = epochs.next().unwrap();
    assert_eq!((next.epoch(), next.len()), (7, 5));
    let again: Vec<_> = sampler.epoch(7).iter().collect();
    assert_eq!(next.iter().collect::<Vec<_>>(), again);
}

#[test]
fn without_shuffling_the_order_is_the_data_sets() {
    let config = SamplerConfig {
        samples: 5,
        world: 2,
        rank: 1,
        shuffle: false,
        seed: 1,
    };
    let plan = Sampler::exact(config, 4).unwrap().epoch(9);
    let steps: Vec<_> = plan.iter().map(|s| s.indices).collect();
    assert_eq!(steps, [vec![1, 3], vec![]]);
}

#[test]
fn a_short_last_batch_can_be_left_out_for_every_world_size_and_cursor() {
    for n in [0, 5, 12, 50, 53] {
        for world in 1..=5 {
            for rank in 0..world {
                let all = sampler(n, world, rank, 12);
                let dropped = all.clone().drop_last(true);
                let (whole, plan) = (all.epoch(3), dropped.epoch(3));
                assert_eq!(plan.len(), n / 12);
                assert!(plan.iter().eq(whole.iter().take(n / 12)), "the same steps");
                for step in 0..plan.len() {
                    let cursor = plan.cursor_after(step);
                    let rest = dropped.resume(cursor).unwrap();
                    assert!(rest.iter().eq(plan.iter().skip(step)), "{n} {world} {step}");
                }
                assert_eq!(plan.cursor_after(plan.len()).epoch, 4);
            }
        }
    }
}

#[test]
fn impossible_settings_are_refused() {
    let config = SamplerConfig {
        samples: 5,
        world: 2,
        rank: 1,
        shuffle: true,
        seed: 0,
    };
    let refused = |config, batch| {
        let error = Sampler::exact(config, batch).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Usage);
        error.to_string()
    };
    assert!(refused(SamplerConfig { world: 0, ..config }, 4).contains("at least one rank"));
    assert!(refused(SamplerConfig { rank: 2, ..config }, 4).contains("rank 2"));
    assert!(refused(config, 0).contains("batch size"));
    let sampler = Sampler::exact(config, 4).unwrap();
    let beyond = Cursor {
        epoch: 0,
        samples: 6,
    };
    let error = sampler.resume(beyond).unwrap_err();
    assert!(error.to_string().contains("6 samples: it has 5"), "{error}");
    assert!(sampler.epochs(beyond).is_err());
}

#[test]
fn interleaved_parts_are_each_parts_steps_in_turn_and_keep_the_cursor() {
    let plans: Vec<EpochPlan> = (1..4)
        .map(|part| sampler(50, 5, part, 12).epoch(2))
        .collect();
    let all = EpochPlan::interleave(&plans);
    assert_eq!((all.parts(), all.len(), all.epoch()), (3, 15, 2));
    for (i, step) in all.iter().enumerate() {
        assert_eq!(Some(step), plans[i % 3].step(i / 3));
    }
    for steps in 0..=5 {
        assert_eq!(all.cursor_after(3 * steps), plans[0].cursor_after(steps));
    }
    assert!(EpochPlan::interleave(&[]).is_empty());
}
