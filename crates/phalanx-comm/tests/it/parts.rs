//! Parts of one run of memory: gathered in place, and shown as they are reduced.

use phalanx_comm::{Bucket, Call, ErrorKind, ProcessGroup, ReduceOp};

use crate::common::{
    EVERYWHERE, Over, PATIENCE, SOON, Value, assert_same_bits, groups, on_each, serial_fold, values,
};

/// In the cell, in one stage (960 bytes here), in many, read through the kernel.
const LENGTHS: [usize; 9] = [0, 1, 3, 16, 20, 241, 1000, 5003, 60_011];

fn gathers<T: Value>(group: &ProcessGroup, over: Over) {
    let (rank, world) = (group.rank(), group.world_size());
    for len in LENGTHS {
        let least = len.div_ceil(world);
        // Just enough; in whole lines; and one that leaves the last ranks nothing.
        for part in [least, least.next_multiple_of(16), least + len / 2] {
            let what = || format!("{over:?}: {len} by {part}, rank {rank} of {world}");
            let each: Vec<Vec<T>> = (0..world).map(|r| values(r, len)).collect();
            let mut data = each[rank].clone();
            group.all_gather_in_place(&mut data, part).unwrap();
            let want: Vec<T> = (0..len).map(|i| each[i / part][i]).collect();
            assert_same_bits(&data, &want, what);
        }
    }
}

fn shows<T: Value>(group: &ProcessGroup, over: Over) {
    let (rank, world) = (group.rank(), group.world_size());
    // The last is shown in several pieces.
    for part in [0, 1, 20, 241, 5003, (600 << 10) / size_of::<T>()] {
        let inputs: Vec<Vec<T>> = (0..world).map(|r| values(r, part * world)).collect();
        let want = serial_fold(ReduceOp::Sum, &inputs);
        // Nobody's registered, everybody's, one rank's.
        for registered in [0, world, 1] {
            let what =
                || format!("{over:?}: {part} x {world}, {registered} registered, rank {rank}");
            let mut input = match rank < registered {
                true => group.bucket(part * world),
                false => Bucket::zeroed(part * world),
            };
            input.copy_from_slice(&inputs[rank]);
            let (mut room, mut got) = (vec![T::default(); part], Vec::new());
            let visit = &mut |at: usize, piece: &mut [T]| {
                assert_eq!(at, got.len(), "{}", what());
                got.extend_from_slice(piece);
                piece.fill(T::default());
            };
            group
                .reduce_scatter_visited(
                    &mut input,
                    &mut room,
                    ReduceOp::Sum,
                    &Call::default(),
                    visit,
                )
                .unwrap();
            assert_same_bits(&got, &want[rank * part..(rank + 1) * part], what);
            assert_same_bits(&input, &inputs[rank], what);
        }
    }
}

#[test]
fn parts_are_gathered_where_they_lie() {
    for (over, world) in EVERYWHERE
        .into_iter()
        .flat_map(|o| [1, 2, 3, 5].map(|w| (o, w)))
    {
        on_each(groups(over, world), |group| {
            gathers::<f32>(&group, over);
            gathers::<u8>(&group, over);
        });
    }
}

#[test]
fn a_reduction_is_shown_piece_by_piece() {
    for (over, world) in EVERYWHERE
        .into_iter()
        .flat_map(|o| [1, 2, 3].map(|w| (o, w)))
    {
        on_each(groups(over, world), |group| {
            shows::<f32>(&group, over);
            shows::<half::bf16>(&group, over);
        });
    }
}

/// A rank that gathers by other parts is found out, not waited for.
#[test]
fn other_parts_are_a_desync_and_too_few_are_refused() {
    for over in EVERYWHERE {
        on_each(groups(over, 2), |group| {
            let mut data = vec![0f32; 100];
            let error = group.all_gather_in_place(&mut data, 49).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Usage);
            assert!(error.to_string().contains("do not cover 100"), "{error}");
            let part = [51, 64][group.rank()];
            let error = group.all_gather_in_place(&mut data, part).unwrap_err();
            let kinds = [ErrorKind::Desync, ErrorKind::Aborted];
            assert!(kinds.contains(&error.kind()), "{over:?}: {error}");
        });
    }
}

/// Who is shown a piece holds the group's turn: it is told so instead of
/// waiting for itself, and the group goes on.
#[test]
fn a_visitor_that_calls_its_group_is_refused() {
    for over in [Over::Thread, Over::Shm] {
        let (says, heard) = std::sync::mpsc::channel();
        let world = 2;
        for group in groups(over, world) {
            let says = says.clone();
            // Not joined: nobody waits for it if it waits for itself.
            std::thread::spawn(move || {
                let mut input = group.bucket::<f32>(2 * 5003);
                let mut room = vec![0_f32; 5003];
                let mut answers = Vec::new();
                let visit = &mut |_: usize, _: &mut [f32]| {
                    answers.push(group.barrier().unwrap_err());
                    answers.push(group.monitored_barrier(PATIENCE).unwrap_err());
                    let bucket = Bucket::from_slice(&[1_u8]);
                    let work = group.all_reduce_async(bucket, ReduceOp::Max, Call::default());
                    answers.push(work.wait().unwrap_err());
                    group.check().unwrap();
                };
                let call = Call::default();
                group
                    .reduce_scatter_visited(&mut input, &mut room, ReduceOp::Sum, &call, visit)
                    .unwrap();
                group.barrier().unwrap();
                says.send(answers).unwrap();
            });
        }
        for _ in 0..world {
            let answers = heard.recv_timeout(SOON).expect("a rank waits for itself");
            assert!(
                !answers.is_empty(),
                "the visitor was called within the turn"
            );
            for error in answers {
                assert_eq!(error.kind(), ErrorKind::Usage, "{over:?}: {error}");
                assert!(error.to_string().contains("from inside"), "{error}");
            }
        }
    }
}
