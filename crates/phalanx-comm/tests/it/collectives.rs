//! Collectives beyond the grid: messages in order, all in flight at once, and
//! mistakes.

use phalanx_comm::{Bucket, Call, ErrorKind, ReduceOp};

use crate::common::{EVERYWHERE, Over, Value, groups, on_each, serial_fold, values};

const COUNTS: [usize; 5] = [0, 1, 9, 1000, 10007];

fn inputs<T: Value>(world: usize, count: usize) -> Vec<Vec<T>> {
    (0..world).map(|rank| values(rank, count)).collect()
}

fn part<T: Value>(data: &[T], rank: usize, len: usize) -> &[T] {
    &data[rank * len..(rank + 1) * len]
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
                0 => (Some(group.send_async(bucket(&each[0]), 1, call())), None),
                1 => (None, Some(group.recv_async(group.bucket(n), 0, call()))),
                _ => (None, None),
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
            if let Some(sent) = message.0 {
                assert_eq!(&sent.wait().unwrap()[..], &each[0][..]);
            }
            if let Some(received) = message.1 {
                let (got, from) = received.wait().unwrap();
                assert_eq!((&got[..], from), (&each[0][..], 0));
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
            group.recv(&mut short, 7).map(drop),
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
