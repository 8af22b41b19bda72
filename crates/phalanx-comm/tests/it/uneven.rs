//! Collectives whose lengths differ by rank, against plain slicing.

use half::bf16;
use phalanx_comm::recorder::{Dump, Failure};
use phalanx_comm::{Bucket, Call, ErrorKind, ProcessGroup, ReduceOp};

use crate::common::{
    EVERYWHERE, Over, Value, assert_same_bits, groups, on_each, serial_fold, values,
};

/// Some ranks have nothing, some a little, some many frames.
fn lengths(world: usize, salt: usize) -> Vec<usize> {
    (0..world)
        .map(|rank| [7, 0, 2500, 1, 64, 333, 0, 1000][(rank + salt) % 8])
        .collect()
}

fn start(lengths: &[usize], rank: usize) -> usize {
    lengths[..rank].iter().sum()
}

fn check<T: Value>(group: &ProcessGroup, over: Over, salt: usize) {
    let (rank, world) = (group.rank(), group.world_size());
    let what = |name: &'static str| {
        move || format!("{over:?} {name}, salt {salt}, rank {rank} of {world}")
    };
    let lens = lengths(world, salt);
    let total = lens.iter().sum();
    let each: Vec<Vec<T>> = (0..world).map(|r| values(r, lens[r])).collect();
    let mut all = vec![T::default(); total];
    group.all_gather_v(&each[rank], &lens, &mut all).unwrap();
    assert_same_bits(&all, &each.concat(), what("all_gather_v"));
    let (input, output) = (Bucket::from_slice(&each[rank]), Bucket::zeroed(total));
    let work = group.all_gather_v_async(input, &lens, output, Call::default());
    let all = work.wait().unwrap().1;
    assert_same_bits(&all, &each.concat(), what("all_gather_v_async"));

    let long: Vec<Vec<T>> = (0..world).map(|r| values(r, total)).collect();
    for op in [ReduceOp::Sum, ReduceOp::Max] {
        let mut mine = vec![T::default(); lens[rank]];
        group
            .reduce_scatter_v(&long[rank], &lens, &mut mine, op)
            .unwrap();
        let sum = serial_fold(op, &long);
        let from = start(&lens, rank);
        assert_same_bits(
            &mine,
            &sum[from..from + lens[rank]],
            what("reduce_scatter_v"),
        );
        let (input, output) = (Bucket::from_slice(&long[rank]), Bucket::zeroed(lens[rank]));
        let work = group.reduce_scatter_v_async(input, &lens, output, op, Call::default());
        let again = work.wait().unwrap().1;
        assert_same_bits(&again, &mine, what("reduce_scatter_v_async"));
    }

    // Row r: what rank r sends to each.
    let rows: Vec<Vec<usize>> = (0..world).map(|r| lengths(world, salt + 3 * r)).collect();
    let column: Vec<usize> = rows.iter().map(|row| row[rank]).collect();
    let sent: Vec<Vec<T>> = (0..world)
        .map(|r| values(r, rows[r].iter().sum()))
        .collect();
    let mut got = vec![T::default(); column.iter().sum()];
    group
        .all_to_all_v(&sent[rank], &rows[rank], &mut got, &column)
        .unwrap();
    let want: Vec<T> = (0..world)
        .flat_map(|r| {
            let from = start(&rows[r], rank);
            sent[r][from..from + rows[r][rank]].to_vec()
        })
        .collect();
    assert_same_bits(&got, &want, what("all_to_all_v"));
    let (input, output) = (Bucket::from_slice(&sent[rank]), Bucket::zeroed(got.len()));
    let call = Call::default();
    let work = group.all_to_all_v_async(input, &rows[rank], output, &column, call);
    let got = work.wait().unwrap().1;
    assert_same_bits(&got, &want, what("all_to_all_v_async"));
}

#[test]
fn uneven_collectives_move_what_they_promise() {
    for over in EVERYWHERE {
        for world in 1..=8 {
            on_each(groups(over, world), |group| {
                for salt in [0, 1, 5] {
                    check::<f32>(&group, over, salt);
                    check::<u8>(&group, over, salt);
                }
                check::<bf16>(&group, over, 2);
            });
        }
    }
}

#[test]
fn even_lengths_give_what_the_plain_collectives_give() {
    on_each(groups(Over::Thread, 4), |group| {
        let rank = group.rank();
        let mine = values::<f32>(rank, 50);
        let (mut plain, mut uneven) = (vec![0f32; 200], vec![0f32; 200]);
        group.all_gather(&mine, &mut plain).unwrap();
        group.all_gather_v(&mine, &[50; 4], &mut uneven).unwrap();
        assert_eq!(plain, uneven);
        let long = values::<f32>(rank, 200);
        let (mut plain, mut uneven) = (vec![0f32; 50], vec![0f32; 50]);
        group
            .reduce_scatter(&long, &mut plain, ReduceOp::Mean)
            .unwrap();
        group
            .reduce_scatter_v(&long, &[50; 4], &mut uneven, ReduceOp::Mean)
            .unwrap();
        assert_eq!(plain, uneven);
    });
}

#[test]
fn lengths_that_differ_between_ranks_are_a_desync() {
    for (over, in_background) in EVERYWHERE.into_iter().zip([false, true, true]) {
        // The same sum, so that no buffer has a wrong size.
        let errors = on_each(groups(over, 2), |group| {
            let (lens, mine) = [([3, 4], 3), ([2, 5], 5)][group.rank()];
            let mut all = [0f32; 7];
            group.all_gather_v(&vec![0.; mine], &lens, &mut all)
        });
        assert_named(errors, "all_gather f32 of 7 elements in lengths #");
        let dir = tempfile::tempdir().unwrap();
        let errors = on_each(groups(over, 3), |group| {
            group.set_flight_dir(dir.path());
            // Rank 2 sends 4 to rank 0, which expects 5.
            let (sends, recvs) = [
                ([1, 1, 1], [1, 1, 5]),
                ([1; 3], [1; 3]),
                ([4, 1, 1], [1; 3]),
            ][group.rank()];
            let mut output = vec![0i32; recvs.iter().sum()];
            let input = vec![0i32; sends.iter().sum()];
            if in_background {
                let (input, output) = (Bucket::from_slice(&input), Bucket::from_slice(&output));
                let call = Call::default();
                let work = group.all_to_all_v_async(input, &sends, output, &recvs, call);
                return work.wait().map(drop);
            }
            group.all_to_all_v(&input, &sends, &mut output, &recvs)
        });
        let first = errors[0].as_ref().unwrap_err();
        assert_eq!((first.kind(), first.peer()), (ErrorKind::Desync, Some(2)));
        let text = first.to_string();
        let wanted = "all_to_all_v: rank 2 sends 4 elements to rank 0, which expects 5";
        assert!(text.contains(wanted), "{text}");
        // Who found it tells why, also when nobody reads its errors.
        let (dump, _) = Dump::read(&dir.path().join("rank-0.json")).unwrap();
        assert_eq!(dump.failure, Some(Failure::Desync));
        assert!(dump.reason.unwrap().contains(wanted));
        for other in errors[1..].iter().filter_map(|e| e.as_ref().err()) {
            assert_eq!(other.kind(), ErrorKind::Aborted, "{other}");
            assert!(other.to_string().contains("rank 2 sends 4"), "{other}");
        }
    }
}

/// One rank saw the desync first, all others heard of it.
fn assert_named(results: Vec<phalanx_comm::Result<()>>, text: &str) {
    let errors: Vec<_> = results.into_iter().map(Result::unwrap_err).collect();
    assert!(errors.iter().any(|e| e.kind() == ErrorKind::Desync));
    for error in errors {
        assert!(error.to_string().contains(text), "{error}");
    }
}

#[test]
fn mistakes_are_named_and_leave_the_group_usable() {
    on_each(groups(Over::Thread, 2), |group| {
        let mut out = [0f32; 4];
        let errors = [
            group.all_gather_v(&[0.], &[1], &mut out),
            group.all_gather_v(&[0., 0.], &[1, 1], &mut out),
            group.all_gather_v(&[0.], &[1, 1], &mut out),
            group.all_gather_v(&[0.], &[1, usize::MAX], &mut out),
            group.reduce_scatter_v(&[0.; 3], &[4, 4], &mut out, ReduceOp::Sum),
            group.reduce_scatter_v(&[0i32; 2], &[1, 1], &mut [0], ReduceOp::Mean),
            group.all_to_all_v(&[0.; 2], &[1, 1], &mut out, &[2, 2]),
        ];
        let names = [
            "all_gather_v: 1 lengths are given for 2 ranks",
            "all_gather_v: the input has 2 elements, the lengths ask for 1",
            "all_gather_v: the output has 4 elements, the lengths ask for 2",
            "all_gather_v: the lengths exceed the address space",
            "reduce_scatter_v: the input has 3 elements, the lengths ask for 8",
            "reduce_scatter_v: the mean of i32",
            "all_to_all_v: this rank gives itself 1 elements but expects 2",
        ];
        for (error, name) in errors.into_iter().zip(names) {
            let error = error.unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Usage, "{error}");
            assert!(error.to_string().contains(name), "{error}");
        }
        group.barrier().unwrap();
    });
}
