//! Collectives in shared memory: buckets that all ranks read and write in
//! place, ordinary memory, and both in one operation; bit for bit against the
//! serial fold.

use std::ptr::NonNull;
use std::sync::Barrier;
use std::time::Duration;

use half::{bf16, f16};
use phalanx_comm::{Bucket, Call, ErrorKind, GroupOptions, InitOptions, ProcessGroup, ReduceOp};

use crate::common::{Over, Value, assert_same_bits, formed, groups, on_each, serial_fold, values};

const ON_ONE_HOST: [Over; 2] = [Over::Thread, Over::Shm];

/// Which ranks have registered memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Who {
    All,
    Nobody,
    Even,
    AllButTheLast,
}

impl Who {
    const ALL: [Who; 4] = [Who::All, Who::Nobody, Who::Even, Who::AllButTheLast];

    fn has(self, rank: usize, world: usize) -> bool {
        match self {
            Who::All => true,
            Who::Nobody => false,
            Who::Even => rank.is_multiple_of(2),
            Who::AllButTheLast => rank + 1 < world,
        }
    }

    fn bucket<T: Value>(self, group: &ProcessGroup, data: &[T]) -> Bucket<T> {
        if !self.has(group.rank(), group.world_size()) {
            return Bucket::from_slice(data);
        }
        let mut bucket = group.bucket(data.len());
        assert!(bucket.is_registered() || data.is_empty() || group.world_size() == 1);
        bucket.copy_from_slice(data);
        bucket
    }
}

/// Around the sizes where the method changes: in the cell, in one stage (960
/// bytes here), in many.
fn counts(world: usize) -> Vec<usize> {
    vec![0, 1, 3, world + 1, 20, 239, 241, 2003]
}

fn inputs<T: Value>(world: usize, count: usize) -> Vec<Vec<T>> {
    (0..world).map(|rank| values(rank, count)).collect()
}

/// Every count with `each` of the four `who`, others for the next count and in the next world. The reduction goes
/// round from case to case: of f32, with two `who`, each comes up with each count and each `who` in worlds 1 to 8.
/// (The product of types and reductions is in `grid`.)
fn reductions<T: Value>(group: &ProcessGroup, over: Over, each: usize) {
    let (rank, world) = (group.rank(), group.world_size());
    let all_ops: Vec<_> = ReduceOp::ALL
        .into_iter()
        .filter(|op| op.supports(T::DTYPE))
        .collect();
    let mut ops = all_ops.iter().cycle().skip(world);
    for (i, count) in counts(world).into_iter().enumerate() {
        let (short, long) = (inputs::<T>(world, count), inputs::<T>(world, count * world));
        let step = Who::ALL.len() / each;
        let some = Who::ALL.into_iter().skip((i + world) % step).step_by(step);
        for (who, &op) in some.zip(&mut ops) {
            let (sum, long_sum) = (serial_fold(op, &short), serial_fold(op, &long));
            let what = |name: &'static str| {
                let t = T::DTYPE;
                move || {
                    format!("{over:?} {who:?} {name} {t} {op} of {count}, rank {rank} of {world}")
                }
            };
            let mut data = who.bucket(group, &short[rank]);
            group.all_reduce(&mut data, op).unwrap();
            assert_same_bits(&data, &sum, what("all_reduce"));

            let root = count % world;
            let mut data = who.bucket(group, &short[rank]);
            group.reduce(&mut data, op, root).unwrap();
            let want = if rank == root { &sum } else { &short[rank] };
            assert_same_bits(&data, want, what("reduce"));

            let mut data = who.bucket(group, &long[rank]);
            let mut part = who.bucket(group, &vec![T::default(); count]);
            group.reduce_scatter(&mut data, &mut part, op).unwrap();
            let want = &long_sum[rank * count..(rank + 1) * count];
            assert_same_bits(&part, want, what("reduce_scatter"));
            assert_same_bits(&data, &long[rank], what("reduce_scatter's input"));
        }
    }
}

fn moves(group: &ProcessGroup, over: Over) {
    let (rank, world) = (group.rank(), group.world_size());
    for (i, count) in counts(world).into_iter().enumerate() {
        let (each, long) = (
            inputs::<f32>(world, count),
            inputs::<f32>(world, count * world),
        );
        let everything = each.concat();
        for (j, who) in Who::ALL.into_iter().enumerate() {
            let what = |name: &'static str| {
                move || format!("{over:?} {who:?} {name} of {count}, rank {rank} of {world}")
            };
            let nothing = vec![0f32; count * world];
            // Each count and each `who` with both.
            let root = [0, world - 1][(i + j) % 2];
            let mut data = who.bucket(group, &each[rank]);
            group.broadcast(&mut data, root).unwrap();
            assert_same_bits(&data, &each[root], what("broadcast"));
            // Freed, and its pages with it, while others may be slower.
            drop(data);

            let output = (rank == root).then(|| who.bucket(group, &nothing));
            let work = group.gather_async(
                who.bucket(group, &each[rank]),
                output,
                root,
                Call::default(),
            );
            if let (_, Some(output)) = work.wait().unwrap() {
                assert_same_bits(&output, &everything, what("gather"));
            }
            let input = (rank == root).then(|| who.bucket(group, &everything));
            let output = who.bucket(group, &nothing[..count]);
            let work = group.scatter_async(input, output, root, Call::default());
            assert_same_bits(&work.wait().unwrap().1, &each[rank], what("scatter"));
            let mut input = who.bucket(group, &each[rank]);
            let mut output = who.bucket(group, &nothing);
            group.all_gather(&mut input, &mut output).unwrap();
            assert_same_bits(&output, &everything, what("all_gather"));

            let mut input = who.bucket(group, &long[rank]);
            group.all_to_all(&mut input, &mut output).unwrap();
            let want: Vec<f32> = long
                .iter()
                .flat_map(|l| l[rank * count..(rank + 1) * count].to_vec())
                .collect();
            assert_same_bits(&output, &want, what("all_to_all"));
        }
        group.barrier().unwrap();
    }
}

/// Groups whose rank r has its input read where it lies from `min_bytes[r]` on.
fn reading_groups(min_bytes: &[usize]) -> Vec<ProcessGroup> {
    formed(Over::Shm, min_bytes.len(), |rank, options| InitOptions {
        single_copy_min_bytes: Some(min_bytes[rank]),
        ..options
    })
}

#[test]
fn moves_promise_the_same_where_the_kernel_reads() {
    // From the first byte, from somewhere in the middle, never, and not alike on all ranks.
    for min_bytes in [
        vec![0; 2],
        vec![0; 3],
        vec![0; 8],
        vec![1000; 4],
        vec![0, usize::MAX, 100],
        vec![usize::MAX, 0, 0, 5000, 1],
    ] {
        on_each(reading_groups(&min_bytes), |group| moves(&group, Over::Shm));
    }
}

/// Whether the system lets processes read each other: some containers do not.
fn kernel_reads() -> bool {
    let (from, mut into) = (7_u64, 0_u64);
    let at = |place: *mut u64| libc::iovec {
        iov_base: place.cast(),
        iov_len: 8,
    };
    let (local, remote) = (at(&raw mut into), at((&raw const from).cast_mut()));
    // SAFETY: both are eight bytes of ours; only `into` is written.
    let got = unsafe { libc::process_vm_readv(libc::getpid(), &local, 1, &remote, 1, 0) };
    got == 8 && into == 7
}

#[test]
fn what_the_kernel_reads_is_not_staged() {
    if !kernel_reads() {
        eprintln!("skipped: this system forbids process_vm_readv, so everything is staged");
        return;
    }
    const COUNT: usize = 300_000;
    on_each(reading_groups(&[1 << 20; 3]), |group| {
        let input = vec![group.rank() as f32; COUNT];
        let mut output = vec![0f32; 3 * COUNT];
        group.all_gather(&input, &mut output).unwrap();
        let want = |i: usize| (i / COUNT) as f32;
        assert!(output.iter().enumerate().all(|(i, x)| *x == want(i)));
        let bytes = group.counters();
        assert_eq!(bytes.staged_bytes, 0);
        assert_eq!(bytes.moved_bytes, 3 * 4 * COUNT as u64);
        // Below the limit it is.
        group
            .all_gather(&input[..1000], &mut output[..3000])
            .unwrap();
        assert!(group.counters().staged_bytes > 0);
    });
}

#[test]
fn reductions_equal_the_serial_fold_wherever_data_lies() {
    for over in ON_ONE_HOST {
        for world in 1..=8 {
            on_each(groups(over, world), |group| {
                reductions::<f32>(&group, over, 2);
                if [1, 2, 3, 8].contains(&world) {
                    reductions::<f64>(&group, over, 1);
                    reductions::<f16>(&group, over, 1);
                    reductions::<bf16>(&group, over, 1);
                    reductions::<i32>(&group, over, 1);
                    reductions::<i64>(&group, over, 1);
                    reductions::<u8>(&group, over, 1);
                }
                group.shutdown().unwrap();
            });
        }
    }
}

#[test]
fn moves_promise_the_same_wherever_data_lies() {
    for over in ON_ONE_HOST {
        for world in (1..=8).chain([16]) {
            on_each(groups(over, world), |group| moves(&group, over));
        }
    }
}

#[test]
fn sixteen_ranks_equal_the_serial_fold() {
    on_each(groups(Over::Thread, 16), |group| {
        reductions::<f32>(&group, Over::Thread, 2);
    });
}

#[test]
fn long_data_equals_the_serial_fold_with_default_sizes() {
    const WORLD: usize = 3;
    // Several stages of the default size, the last one short.
    let count = 700_001;
    let inputs = inputs::<f32>(WORLD, count);
    let want = serial_fold(ReduceOp::Mean, &inputs);
    on_each(
        ProcessGroup::threads(WORLD, GroupOptions::default()),
        |group| {
            for who in Who::ALL {
                let mut data = who.bucket(&group, &inputs[group.rank()]);
                group.all_reduce(&mut data, ReduceOp::Mean).unwrap();
                assert_same_bits(&data, &want, || format!("{who:?}, rank {}", group.rank()));
            }
        },
    );
}

#[test]
fn registered_data_is_never_copied() {
    for over in ON_ONE_HOST {
        on_each(groups(over, 4), |group| {
            const COUNT: usize = 50_000;
            let mut data = group.bucket::<f32>(COUNT);
            group.all_reduce(&mut data, ReduceOp::Mean).unwrap();
            let work = group.all_reduce_async(data, ReduceOp::Mean, Call::default());
            let mut data = work.wait().unwrap();
            let bytes = group.counters();
            assert_eq!((bytes.staged_bytes, bytes.moved_bytes), (0, 0), "{over:?}");
            // Twice a quarter of four ranks' data, but for whole lines.
            assert!(bytes.folded_bytes.abs_diff(2 * 4 * COUNT as u64) < 4 * 64 * 2 * 4);

            // A slice of the same bucket is borrowed: it is staged, what the
            // three others own of it, and their results are fetched.
            group.all_reduce(&mut data[..], ReduceOp::Mean).unwrap();
            let staged = group.counters().staged_bytes;
            assert!(
                staged.abs_diff(2 * 3 * COUNT as u64) < 1000 * 64,
                "{staged}"
            );
        });
    }
}

#[test]
fn what_does_not_fit_the_arena_lies_on_the_heap() {
    let options = GroupOptions {
        arena_bytes: Some(2 << 20),
        ..GroupOptions::default()
    };
    on_each(ProcessGroup::threads(2, options), |group| {
        let fits = group.bucket::<f32>(400 << 10);
        let mut does_not = group.bucket::<f32>(200 << 10);
        assert!(fits.is_registered() && !does_not.is_registered());
        does_not.fill(1.0);
        group.all_reduce(&mut does_not, ReduceOp::Sum).unwrap();
        assert!(does_not.iter().all(|x| *x == 2.0));
        drop(fits);
        // Given back, and zeroed.
        let again = group.bucket::<f32>(400 << 10);
        assert!(again.is_registered() && again.iter().all(|x| *x == 0.0));
    });
    let none = GroupOptions {
        arena_bytes: Some(0),
        ..GroupOptions::default()
    };
    on_each(ProcessGroup::threads(2, none), |group| {
        assert!(!group.bucket::<f32>(10).is_registered());
    });
}

/// `bytes` mapped as PyTorch maps the storage of a tensor that was moved to shared memory.
fn mapped(bytes: usize) -> NonNull<u8> {
    let (access, shared) = (
        libc::PROT_READ | libc::PROT_WRITE,
        libc::MAP_SHARED | libc::MAP_ANONYMOUS,
    );
    // SAFETY: a new mapping.
    let at = unsafe { libc::mmap(std::ptr::null_mut(), bytes, access, shared, -1, 0) };
    assert_ne!(at, libc::MAP_FAILED);
    NonNull::new(at.cast()).unwrap()
}

#[test]
fn memory_of_others_is_reduced_where_it_lies() {
    const COUNT: usize = 100_000;
    const SKIP: usize = 16;
    let world = 3;
    let data = inputs::<f32>(world, COUNT);
    let sums = serial_fold(ReduceOp::Sum, &data);
    let results = on_each(formed(Over::Shm, world, |_, options| options), |group| {
        let bytes = (SKIP + COUNT) * size_of::<f32>();
        let start = mapped(bytes);
        let floats: NonNull<f32> = start.cast();
        // SAFETY: a mapping of this rank alone, of this many floats, which no bucket has.
        let theirs =
            || unsafe { std::slice::from_raw_parts_mut(floats.as_ptr(), bytes / size_of::<f32>()) };
        theirs()[SKIP..].copy_from_slice(&data[group.rank()]);
        theirs()[0] = 7.0;
        // SAFETY: as above; it is unmapped below, before `registered` is dropped.
        let registered = unsafe { group.register(start, bytes) }.unwrap();
        assert_eq!(theirs()[0], 7.0);
        // SAFETY: nothing uses the memory while there is a bucket.
        let bucket = |offset: usize, len| unsafe { registered.bucket::<f32>(offset, len, ()) };
        assert!(bucket(4, COUNT).is_none() && bucket(64, COUNT + 1).is_none());
        let mut sum = bucket(SKIP * size_of::<f32>(), COUNT).unwrap();
        assert!(sum.is_registered());
        let before = group.counters().staged_bytes;
        group.all_reduce(&mut sum, ReduceOp::Sum).unwrap();
        assert_eq!(group.counters().staged_bytes, before);
        drop(sum);
        let result = theirs().to_vec();
        // Written at the old address, and read there, a second time.
        theirs()[SKIP..].fill(group.rank() as f32);
        let again = bucket(SKIP * size_of::<f32>(), COUNT).unwrap();
        let work = group.all_reduce_async(again, ReduceOp::Sum, Call::default());
        drop(work.wait().unwrap());
        assert!(theirs()[SKIP..].iter().all(|sum| *sum == 3.0));
        assert_eq!(theirs()[0], 7.0);
        // SAFETY: mapped above; nothing refers to it any more.
        unsafe { libc::munmap(start.as_ptr().cast(), bytes) };
        result
    });
    for result in results {
        assert_same_bits(&result[SKIP..], &sums, || "registered".to_owned());
    }
}

#[test]
fn memory_of_others_stays_where_ranks_share_none() {
    for over in [Over::Thread, Over::Tcp] {
        on_each(groups(over, 2), |group| {
            let start = mapped(100);
            // SAFETY: a mapping of this rank alone.
            unsafe {
                start.write(7);
                // Not on a page, either.
                assert!(group.register(start.add(64), 10).is_none());
                assert!(group.register(start, 100).is_none());
                assert_eq!(start.read(), 7);
                libc::munmap(start.as_ptr().cast(), 100);
            }
        });
    }
}

#[test]
fn tcp_has_no_registered_buckets() {
    on_each(groups(Over::Tcp, 2), |group| {
        let mut bucket = group.bucket::<f32>(1000);
        assert!(!bucket.is_registered());
        bucket.fill(1.0);
        group.all_reduce(&mut bucket, ReduceOp::Sum).unwrap();
        assert!(bucket.iter().all(|x| *x == 2.0));
        assert_eq!(group.counters().folded_bytes, 0);
    });
}

#[test]
fn a_bucket_of_another_group_is_ordinary_memory() {
    on_each(groups(Over::Thread, 4), |group| {
        let rank = group.rank();
        let halves = group.new_group(&[rank / 2 * 2, rank / 2 * 2 + 1]);
        // All ranks must make the same groups in the same order.
        assert!(halves.is_err());
        let low = group.new_group(&[0, 1]).unwrap();
        let mut bucket = group.bucket::<f32>(5000);
        bucket.fill(1.0);
        if let Some(low) = low {
            low.all_reduce(&mut bucket, ReduceOp::Sum).unwrap();
            assert!(bucket.iter().all(|x| *x == 2.0));
            assert!(low.counters().staged_bytes > 0);
        }
        let before = group.counters().staged_bytes;
        group.all_reduce(&mut bucket, ReduceOp::Max).unwrap();
        assert!(bucket.iter().all(|x| *x == 2.0));
        assert_eq!(group.counters().staged_bytes, before);
    });
}

#[test]
fn a_bucket_outlives_its_group() {
    let buckets = on_each(groups(Over::Shm, 2), |group| {
        let mut bucket = group.bucket::<f32>(3000);
        bucket.fill(group.rank() as f32);
        group.all_reduce(&mut bucket, ReduceOp::Sum).unwrap();
        group.shutdown().unwrap();
        bucket
    });
    for mut bucket in buckets {
        assert!(bucket.iter().all(|x| *x == 1.0));
        bucket.fill(7.0);
    }
}

#[test]
fn ranks_with_different_stage_sizes_agree() {
    let inputs = inputs::<f32>(3, 4000);
    let want = serial_fold(ReduceOp::Sum, &inputs);
    let groups = formed(Over::Shm, 3, |rank, options| InitOptions {
        segment_bytes: [1, 5000, 1 << 20][rank],
        ..options
    });
    on_each(groups, |group| {
        let mut data = inputs[group.rank()].clone();
        group.all_reduce(&mut data, ReduceOp::Sum).unwrap();
        assert_same_bits(&data, &want, || format!("rank {}", group.rank()));
        group.shutdown().unwrap();
    });
}

/// A peer that left, was late, or does something else is noticed in every
/// step; what was in flight is replaced.
#[test]
fn a_bucket_in_a_failed_operation_is_replaced() {
    for over in ON_ONE_HOST {
        let gate = Barrier::new(2);
        on_each(groups(over, 2), |group| {
            group.barrier().unwrap();
            gate.wait();
            if group.rank() == 1 {
                // Until the other one has given up.
                gate.wait();
                return;
            }
            let mut bucket = group.bucket::<f32>(3000);
            bucket.fill(1.0);
            let call = Call {
                timeout: Some(Duration::from_millis(100)),
                ..Call::default()
            };
            let error = group
                .with_call(call)
                .all_reduce(&mut bucket, ReduceOp::Sum)
                .unwrap_err();
            gate.wait();
            assert_eq!(error.kind(), ErrorKind::Timeout);
            assert!(error.to_string().contains("rank 1 to send data"), "{error}");
            assert!(!bucket.is_registered());
            assert_eq!(bucket.len(), 3000);
            // The group makes ordinary buckets from now on.
            assert!(!group.bucket::<f32>(10).is_registered());
        });
    }
}

#[test]
fn a_mistake_leaves_the_bucket_alone() {
    on_each(groups(Over::Thread, 2), |group| {
        let mut bucket = group.bucket::<i32>(300);
        bucket.fill(3);
        let error = group.all_reduce(&mut bucket, ReduceOp::Mean).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Usage);
        assert!(bucket.is_registered() && bucket.iter().all(|x| *x == 3));
    });
}

#[test]
fn every_rank_of_a_desync_reads_both_sides() {
    for over in ON_ONE_HOST {
        let errors = on_each(groups(over, 4), |group| {
            let mut bucket = group.bucket::<f32>(3000 + usize::from(group.rank() == 2));
            group.all_reduce(&mut bucket, ReduceOp::Sum).unwrap_err()
        });
        for error in errors {
            let text = error.to_string();
            assert!(
                matches!(error.kind(), ErrorKind::Desync | ErrorKind::Aborted),
                "{error}"
            );
            assert!(
                text.contains("called all_reduce f32 sum of 3000 elements"),
                "{text}"
            );
            assert!(
                text.contains("rank 2 called all_reduce f32 sum of 3001"),
                "{text}"
            );
        }
    }
}

/// Many operations of all kinds back to back, with ranks that stall at random:
/// stages, results and cells are reused as early as possible. Each length with each `who` five times.
#[test]
fn nothing_is_overwritten_too_early() {
    for over in ON_ONE_HOST {
        for world in [2, 3, 5] {
            on_each(groups(over, world), |group| {
                let rank = group.rank();
                let mut state = 77 + rank as u64;
                let mut stall = move || {
                    state = state
                        .wrapping_mul(6_364_136_223_846_793_005)
                        .wrapping_add(1);
                    match state >> 60 {
                        0..8 => {}
                        8..14 => std::thread::yield_now(),
                        _ => std::thread::sleep(Duration::from_micros(state >> 57)),
                    }
                };
                for round in 0..120usize {
                    let value = (rank + round) as i64;
                    let sum = (0..world).map(|r| (r + round) as i64).sum::<i64>();
                    let len = [1, 9, 100, 130, 500, 1500][round % 6];
                    let who = Who::ALL[round / 6 % 4];
                    stall();
                    let mut data = who.bucket(&group, &vec![value; len]);
                    group.all_reduce(&mut data, ReduceOp::Sum).unwrap();
                    assert!(
                        data.iter().all(|x| *x == sum),
                        "{over:?} {who:?} all_reduce {len}"
                    );
                    stall();
                    let root = round % world;
                    data.fill(value);
                    group.broadcast(&mut data, root).unwrap();
                    let want = (root + round) as i64;
                    assert!(
                        data.iter().all(|x| *x == want),
                        "{over:?} {who:?} broadcast {len}"
                    );
                    stall();
                    let mut mine = who.bucket(&group, &vec![value; len]);
                    let mut all = Bucket::zeroed(len * world);
                    group.all_gather(&mut mine, &mut all).unwrap();
                    for (r, part) in all.chunks(len).enumerate() {
                        let want = (r + round) as i64;
                        assert!(
                            part.iter().all(|x| *x == want),
                            "{over:?} {who:?} all_gather {len}"
                        );
                    }
                    mine.fill(-1);
                    stall();
                    let mut long = who.bucket(&group, &vec![value; len * world]);
                    group
                        .reduce_scatter(&mut long, &mut mine, ReduceOp::Sum)
                        .unwrap();
                    long.fill(-1);
                    assert!(
                        mine.iter().all(|x| *x == sum),
                        "{over:?} {who:?} reduce_scatter {len}"
                    );
                }
                group.shutdown().unwrap();
            });
        }
    }
}
