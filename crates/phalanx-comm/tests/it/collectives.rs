//! The other collectives, over every transport, world size and root.

use half::{bf16, f16};
use phalanx_comm::{Bucket, Call, ErrorKind, ProcessGroup, ReduceOp};

use crate::common::{
    EVERYWHERE, Over, Value, assert_same_bits, groups, on_each, serial_fold, values,
};

const COUNTS: [usize; 5] = [0, 1, 9, 1000, 10007];

fn inputs<T: Value>(world: usize, count: usize) -> Vec<Vec<T>> {
    (0..world).map(|rank| values(rank, count)).collect()
}

fn part<T: Value>(data: &[T], rank: usize, len: usize) -> &[T] {
    &data[rank * len..(rank + 1) * len]
}

fn moves<T: Value>(group: &ProcessGroup, over: Over) {
    let (rank, world) = (group.rank(), group.world_size());
    for count in COUNTS {
        let what = |name: &'static str, root: usize| {
            move || format!("{over:?} {name} of {count}, root {root}, rank {rank} of {world}")
        };
        let each = inputs::<T>(world, count);
        let mine = &each[rank];
        let everything = each.concat();
        let mut all = vec![T::default(); count * world];
        group.all_gather(mine, &mut all).unwrap();
        assert_same_bits(&all, &everything, what("all_gather", 0));

        let long = inputs::<T>(world, count * world);
        group.all_to_all(&long[rank], &mut all).unwrap();
        let want: Vec<T> = long
            .iter()
            .flat_map(|l| part(l, rank, count).to_vec())
            .collect();
        assert_same_bits(&all, &want, what("all_to_all", 0));

        for root in [0, world - 1] {
            let mut data = mine.clone();
            group.broadcast(&mut data, root).unwrap();
            assert_same_bits(&data, &each[root], what("broadcast", root));

            let mut gathered = vec![T::default(); count * world];
            let output = (rank == root).then_some(&mut gathered[..]);
            group.gather(mine, output, root).unwrap();
            if rank == root {
                assert_same_bits(&gathered, &everything, what("gather", root));
            }

            let input = (rank == root).then_some(&everything[..]);
            let mut got = vec![T::default(); count];
            group.scatter(input, &mut got, root).unwrap();
            assert_same_bits(&got, mine, what("scatter", root));
        }
        group.barrier().unwrap();
    }
}

fn reductions<T: Value>(group: &ProcessGroup, over: Over) {
    let (rank, world) = (group.rank(), group.world_size());
    for count in COUNTS {
        for op in ReduceOp::ALL.into_iter().filter(|op| op.supports(T::DTYPE)) {
            let what = |name: &'static str| {
                move || format!("{over:?} {name} {op} of {count}, rank {rank} of {world}")
            };
            let each = inputs::<T>(world, count);
            let sum = serial_fold(op, &each);
            for root in [0, world - 1] {
                let mut data = each[rank].clone();
                group.reduce(&mut data, op, root).unwrap();
                // Other ranks' data is not touched.
                let want = if rank == root { &sum } else { &each[rank] };
                assert_same_bits(&data, want, what("reduce"));
            }
            let long = inputs::<T>(world, count * world);
            let sum = serial_fold(op, &long);
            let mut got = vec![T::default(); count];
            group.reduce_scatter(&long[rank], &mut got, op).unwrap();
            assert_same_bits(&got, part(&sum, rank, count), what("reduce_scatter"));
        }
    }
}

#[test]
fn every_collective_moves_what_it_promises() {
    for over in EVERYWHERE {
        for world in 1..=8 {
            on_each(groups(over, world), |group| {
                moves::<f32>(&group, over);
                moves::<u8>(&group, over);
                moves::<f64>(&group, over);
                moves::<bf16>(&group, over);
            });
        }
    }
}

#[test]
fn reduce_and_reduce_scatter_equal_the_serial_fold() {
    for over in EVERYWHERE {
        for world in 1..=8 {
            on_each(groups(over, world), |group| {
                reductions::<f32>(&group, over);
                reductions::<f16>(&group, over);
                reductions::<i64>(&group, over);
            });
        }
    }
}

#[test]
fn messages_between_two_ranks_arrive_in_order() {
    for over in EVERYWHERE {
        on_each(groups(over, 3), |group| {
            let rank = group.rank();
            for count in COUNTS {
                // Rank 1 takes part in nothing; collectives in between do.
                if rank == 0 {
                    group.send(&values::<i32>(0, count), 2).unwrap();
                    group.send(&values::<i32>(5, count), 2).unwrap();
                } else if rank == 2 {
                    let mut got = vec![0i32; count];
                    group.recv(&mut got, 0).unwrap();
                    assert_eq!(got, values::<i32>(0, count));
                    group.recv(&mut got, 0).unwrap();
                    assert_eq!(got, values::<i32>(5, count));
                }
                group.barrier().unwrap();
            }
        });
    }
}

#[test]
fn asynchronous_forms_equal_the_blocking_ones() {
    for over in EVERYWHERE {
        on_each(groups(over, 3), |group| {
            let (rank, n) = (group.rank(), 500);
            let each = inputs::<f32>(3, n);
            let long = inputs::<f32>(3, 3 * n);
            let call = Call::default;
            let bucket = |v: &[f32]| Bucket::from_slice(v);
            let root = rank == 1;

            let all_reduce = group.all_reduce_async(bucket(&each[rank]), ReduceOp::Sum, call());
            let broadcast = group.broadcast_async(bucket(&each[rank]), 1, call());
            let reduce = group.reduce_async(bucket(&each[rank]), ReduceOp::Max, 1, call());
            let all_gather =
                group.all_gather_async(bucket(&each[rank]), group.bucket(3 * n), call());
            let reduce_scatter = group.reduce_scatter_async(
                bucket(&long[rank]),
                group.bucket(n),
                ReduceOp::Sum,
                call(),
            );
            let gather = group.gather_async(
                bucket(&each[rank]),
                root.then(|| group.bucket(3 * n)),
                1,
                call(),
            );
            let scatter = group.scatter_async(
                root.then(|| bucket(&each.concat())),
                group.bucket(n),
                1,
                call(),
            );
            let all_to_all =
                group.all_to_all_async(bucket(&long[rank]), group.bucket(3 * n), call());
            let message = match rank {
                0 => Some(group.send_async(bucket(&each[0]), 1, call())),
                1 => Some(group.recv_async(group.bucket(n), 0, call())),
                _ => None,
            };
            let barrier = group.barrier_async(call());

            let sum = serial_fold(ReduceOp::Sum, &each);
            assert_eq!(&all_reduce.wait().unwrap()[..], &sum[..]);
            assert_eq!(&broadcast.wait().unwrap()[..], &each[1][..]);
            let max = serial_fold(ReduceOp::Max, &each);
            assert_eq!(
                &reduce.wait().unwrap()[..],
                if root { &max[..] } else { &each[rank][..] }
            );
            assert_eq!(&all_gather.wait().unwrap().1[..], &each.concat()[..]);
            let sum = serial_fold(ReduceOp::Sum, &long);
            assert_eq!(&reduce_scatter.wait().unwrap().1[..], part(&sum, rank, n));
            let gathered = gather.wait().unwrap().1;
            assert_eq!(gathered.is_some(), root);
            if let Some(gathered) = gathered {
                assert_eq!(&gathered[..], &each.concat()[..]);
            }
            assert_eq!(&scatter.wait().unwrap().1[..], &each[rank][..]);
            let want: Vec<f32> = long
                .iter()
                .flat_map(|l| part(l, rank, n).to_vec())
                .collect();
            assert_eq!(&all_to_all.wait().unwrap().1[..], &want[..]);
            if let Some(message) = message {
                assert_eq!(&message.wait().unwrap()[..], &each[0][..]);
            }
            barrier.wait().unwrap();
        });
    }
}

#[test]
fn mistakes_are_named_and_leave_the_group_usable() {
    on_each(groups(Over::Thread, 2), |group| {
        let mut short = [0f32; 3];
        let errors = [
            group.all_reduce(&mut [1i32], ReduceOp::Mean),
            group.all_reduce(&mut short, ReduceOp::BitAnd),
            group.reduce(&mut [1f64], ReduceOp::BitXor, 0),
            group.broadcast(&mut short, 2),
            group.all_gather(&[1f32], &mut short),
            group.reduce_scatter(&[1f32; 4], &mut short, ReduceOp::Sum),
            group.all_to_all(&[1f32; 3], &mut short),
            group.send(&short, group.rank()),
            group.recv(&mut short, 7),
            group.gather(&[1f32], None, group.rank()),
            group.scatter(Some(&[1f32; 5]), &mut short, group.rank()),
            group
                .all_reduce_async(Bucket::<u8>::zeroed(1), ReduceOp::Mean, Call::default())
                .wait()
                .map(drop),
        ];
        let names = [
            "all_reduce: the mean of i32 is not defined: use sum",
            "all_reduce: the bit_and of f32 is not defined: use an integer type",
            "reduce: the bit_xor of f64",
            "broadcast: root 2 does not exist",
            "all_gather: the output has 3 elements, 2 are needed",
            "reduce_scatter: the input has 4 elements, 6 are needed",
            "all_to_all: the input has 3 elements",
            "send: a rank does not talk to itself",
            "recv: rank 7 does not exist",
            "gather: the root needs an output",
            "scatter: the input has 5 elements, 6 are needed",
            "all_reduce: the mean of u8",
        ];
        for (error, name) in errors.into_iter().zip(names) {
            let error = error.unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Usage, "{error}");
            assert!(error.to_string().contains(name), "{error}");
        }
        let mut data = [1f32];
        group.all_reduce(&mut data, ReduceOp::Sum).unwrap();
        assert_eq!(data, [2.0]);
    });
}
