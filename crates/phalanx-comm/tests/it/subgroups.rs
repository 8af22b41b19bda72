//! Groups of some of the ranks.

use std::sync::Barrier;
use std::time::Instant;

use phalanx_comm::{Call, ErrorKind, ReduceOp};

use crate::common::{EVERYWHERE, Over, PATIENCE, SOON, groups, on_each};

#[test]
fn subgroups_reduce_among_themselves() {
    for over in EVERYWHERE {
        on_each(groups(over, 5), |group| {
            let rank = group.rank();
            // Given out of order; numbered in order.
            let even = group.new_group(&[4, 0, 2]).unwrap();
            let odd = group.new_group(&[1, 3]).unwrap();
            assert_eq!(even.is_some(), rank % 2 == 0);
            assert_eq!(odd.is_some(), rank % 2 == 1);
            let mine = even.or(odd).unwrap();
            assert_eq!(mine.rank(), rank / 2);
            assert_eq!(mine.world_size(), if rank % 2 == 0 { 3 } else { 2 });
            for _ in 0..5 {
                let mut data = vec![rank as i32; 3000];
                mine.all_reduce(&mut data, ReduceOp::Sum).unwrap();
                assert!(data.iter().all(|x| *x == if rank % 2 == 0 { 6 } else { 4 }));
                let mut data = vec![rank as i32; 3000];
                group.all_reduce(&mut data, ReduceOp::Sum).unwrap();
                assert!(data.iter().all(|x| *x == 10));
            }
            mine.shutdown().unwrap();
            group.shutdown().unwrap();
        });
    }
}

#[test]
fn members_form_groups_without_the_others() {
    for over in EVERYWHERE {
        on_each(groups(over, 4), |group| {
            let rank = group.rank();
            let not_mine = group.new_group_among(&[(rank + 1) % 4, (rank + 2) % 4]);
            assert_eq!(not_mine.unwrap_err().kind(), ErrorKind::Usage);
            for wrong in [&[][..], &[rank, rank], &[rank, 4]] {
                let refused = group.new_group_among(wrong).unwrap_err();
                assert_eq!(refused.kind(), ErrorKind::Usage);
            }
            // Rank 1 is in none, and the others are in groups in another order.
            let mut groups = Vec::new();
            for members in [&[3, 0][..], &[0, 2], &[2, 3], &[0, 3], &[3, 2, 0]] {
                if members.contains(&rank) {
                    let made = group.new_group_among(members).unwrap();
                    let mut sorted = members.to_vec();
                    sorted.sort_unstable();
                    assert_eq!(made.global_ranks(), sorted);
                    groups.push(made);
                }
            }
            for made in &groups {
                let mut sum = vec![rank as i32; 3000];
                made.all_reduce(&mut sum, ReduceOp::Sum).unwrap();
                let want = made.global_ranks().iter().sum::<usize>() as i32;
                assert!(sum.iter().all(|x| *x == want));
            }
            // Groups that all make are others still.
            let all = group.new_group(&[0, 1, 2, 3]).unwrap().unwrap();
            let mut sum = [1];
            all.all_reduce(&mut sum, ReduceOp::Sum).unwrap();
            assert_eq!(sum, [4]);
        });
    }
}

#[test]
fn ranks_of_one_color_are_a_group() {
    for over in EVERYWHERE {
        on_each(groups(over, 5), |group| {
            let rank = group.rank();
            let part = group.split((rank != 3).then_some(rank as u32 % 2)).unwrap();
            // Rank 1 is alone.
            let want: &[usize] = match rank {
                3 => &[],
                1 => &[1],
                _ => &[0, 2, 4],
            };
            assert_eq!(part.is_none(), want.is_empty());
            if let Some(part) = part {
                assert_eq!(part.global_ranks(), want);
                let mut sum = [rank as i32];
                part.all_reduce(&mut sum, ReduceOp::Sum).unwrap();
                assert_eq!(sum, [want.iter().sum::<usize>() as i32]);
                // The last two of them.
                let pair = part.split((part.rank() > 0).then_some(9)).unwrap();
                assert_eq!(
                    pair.map(|pair| pair.world_size()),
                    (part.rank() > 0).then_some(2)
                );
            }
            // Groups that are made otherwise count too.
            assert_eq!(group.new_group(&[0, 3]).unwrap().is_some(), rank % 3 == 0);
            assert_eq!(group.split(Some(0)).unwrap().unwrap().world_size(), 5);
            group.barrier().unwrap();
        });
    }
}

#[test]
fn subgroups_can_be_nested_and_repeated() {
    for over in EVERYWHERE {
        on_each(groups(over, 4), |group| {
            for _ in 0..2 {
                let Some(three) = group.new_group(&[1, 2, 3]).unwrap() else {
                    continue;
                };
                if let Some(two) = three.new_group(&[0, 2]).unwrap() {
                    let mut data = [group.rank() as u8];
                    two.all_reduce(&mut data, ReduceOp::Sum).unwrap();
                    assert_eq!(data, [4]);
                }
                let alone = three.new_group(&[1]).unwrap();
                assert_eq!(alone.is_some(), three.rank() == 1);
                if let Some(alone) = alone {
                    alone.barrier().unwrap();
                }
            }
            group.barrier().unwrap();
        });
    }
}

#[test]
fn subgroups_fail_without_their_parent() {
    for over in EVERYWHERE {
        on_each(groups(over, 3), |group| {
            let pair = group.new_group(&[0, 1]).unwrap();
            if let Some(pair) = &pair {
                if pair.rank() == 0 {
                    pair.abort("only the pair");
                }
                let error = pair.barrier().unwrap_err();
                assert!(error.to_string().contains("only the pair"), "{error}");
            }
            let mut data = [1i32];
            group.all_reduce(&mut data, ReduceOp::Sum).unwrap();
            assert_eq!(data, [3]);
        });
    }
}

#[test]
fn subgroups_that_differ_are_refused_on_all_ranks() {
    on_each(groups(Over::Thread, 3), |group| {
        let wanted: &[usize] = if group.rank() == 1 { &[0, 1] } else { &[0, 2] };
        let error = group.new_group(wanted).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Desync);
        assert!(
            error
                .to_string()
                .contains("ranks 0 and 1 ask for different groups"),
            "{error}"
        );
        // The parent is fine.
        group.barrier().unwrap();
    });
}

#[test]
fn subgroups_of_nobody_are_mistakes() {
    on_each(groups(Over::Thread, 2), |group| {
        for (ranks, text) in [
            (&[][..], "no ranks"),
            (&[0, 0][..], "rank 0 is given twice"),
            (&[0, 2][..], "rank 2 does not exist"),
        ] {
            let error = group.new_group(ranks).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Usage);
            assert!(error.to_string().contains(text), "{error}");
        }
        assert!(group.new_group(&[1]).is_ok());
    });
}

#[test]
fn subgroup_and_parent_run_at_the_same_time() {
    let gate = Barrier::new(3);
    on_each(groups(Over::Thread, 3), |group| {
        let pair = group.new_group(&[0, 1]).unwrap();
        let call = || Call {
            timeout: Some(PATIENCE),
            ..Call::default()
        };
        // The parent's operation waits for rank 2; the pair's does not.
        if group.rank() == 2 {
            gate.wait();
            group.barrier().unwrap();
            return;
        }
        let waiting = group.barrier_async(call());
        pair.unwrap().barrier().unwrap();
        assert!(!waiting.is_done());
        gate.wait();
        waiting.wait().unwrap();
    });
}

/// People know a rank by its number in the job's first generation, also in a
/// subgroup and in a subgroup's subgroup.
#[test]
fn a_subgroup_knows_the_first_ranks_of_its_members() {
    on_each(groups(Over::Thread, 4), |group| {
        let rank = group.rank();
        let Some(part) = group.new_group(&[1, 2, 3]).unwrap() else {
            return;
        };
        assert_eq!((part.rank(), part.global_rank()), (rank - 1, rank));
        let Some(pair) = part.new_group(&[0, 2]).unwrap() else {
            return;
        };
        assert_eq!((pair.rank(), pair.global_rank()), (rank / 2, rank));
        pair.barrier().unwrap();
        if rank == 1 {
            // Leaves when it is waited for.
            std::thread::sleep(std::time::Duration::from_millis(300));
            return;
        }
        let mut large = vec![0_f32; 100_000];
        pair.broadcast(&mut large, 0).unwrap_err();
        let newest = &pair.flight().entries[0];
        assert_eq!(newest.awaited, [1]);
    });
}

/// The abort comes from a rank that is not in the subgroup. Rank 0 waits there; either it has tied the subgroup
/// itself, or rank 1 has, which waits in the group of all.
#[test]
fn a_group_ends_with_one_that_was_aborted_from_outside() {
    for over in EVERYWHERE {
        for tied_by in [0, 1] {
            let all = Barrier::new(3);
            on_each(groups(over, 3), |group| {
                let sub = group.new_group(&[0, 1]).unwrap();
                if let Some(sub) = sub.as_ref().filter(|_| group.rank() == tied_by) {
                    sub.end_with(&group);
                }
                all.wait();
                let start = Instant::now();
                let ended = match (group.rank(), &sub) {
                    (0, Some(sub)) => sub.barrier().unwrap_err(),
                    (1, Some(_)) if tied_by == 1 => group.barrier().unwrap_err(),
                    (2, _) => {
                        group.abort("the disk is full");
                        group.barrier().unwrap_err()
                    }
                    _ => {
                        all.wait();
                        return;
                    }
                };
                assert!(start.elapsed() < SOON, "{over:?} {tied_by}: {ended}");
                assert_eq!(ended.kind(), ErrorKind::Aborted, "{ended}");
                assert!(ended.to_string().contains("the disk is full"), "{ended}");
                all.wait();
            });
        }
    }
}
