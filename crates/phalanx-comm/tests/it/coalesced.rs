//! Many tensors in one operation: the same bits as one by one.

use half::f16;
use phalanx_comm::{Algorithm, Call, ErrorKind, ProcessGroup, ReduceOp};

use crate::common::{EVERYWHERE, Over, Value, assert_same_bits, groups, on_each, values};

const LENS: [usize; 7] = [3, 0, 1, 129, 4096, 17, 1];

fn tensors<T: Value>(rank: usize) -> Vec<Vec<T>> {
    LENS.iter()
        .enumerate()
        .map(|(i, &len)| values(rank * 31 + i, len))
        .collect()
}

fn slices<T>(tensors: &mut [Vec<T>]) -> Vec<&mut [T]> {
    tensors.iter_mut().map(Vec::as_mut_slice).collect()
}

fn check<T: Value>(group: &ProcessGroup, over: Over) {
    let (rank, world) = (group.rank(), group.world_size());
    let what = |name: &'static str| move || format!("{over:?} {name}, rank {rank} of {world}");
    for op in ReduceOp::ALL.into_iter().filter(|op| op.supports(T::DTYPE)) {
        let (mut together, mut alone) = (tensors::<T>(rank), tensors::<T>(rank));
        group.all_reduce(&mut slices(&mut together), op).unwrap();
        for tensor in &mut alone {
            group.all_reduce(tensor, op).unwrap();
        }
        for (a, b) in together.iter().zip(&alone) {
            assert_same_bits(a, b, what("all_reduce"));
        }
    }
    for root in [0, world - 1] {
        let (mut together, mut alone) = (tensors::<T>(rank), tensors::<T>(rank));
        let op = ReduceOp::Max;
        group.reduce(&mut slices(&mut together), op, root).unwrap();
        for (a, b) in together.iter().zip(&mut alone) {
            group.reduce(b, op, root).unwrap();
            assert_same_bits(a, b, what("reduce"));
        }
        let mut mine = tensors::<T>(rank);
        let mut all = slices(&mut mine);
        group.broadcast(&mut all, root).unwrap();
        for (a, b) in mine.iter().zip(&tensors::<T>(root)) {
            assert_same_bits(a, b, what("broadcast"));
        }
    }
    let mine = tensors::<T>(rank);
    let inputs: Vec<&[T]> = mine.iter().map(Vec::as_slice).collect();
    let mut outputs: Vec<Vec<T>> = LENS
        .iter()
        .map(|len| vec![T::default(); len * world])
        .collect();
    group
        .all_gather(&inputs, &mut slices(&mut outputs))
        .unwrap();
    for (i, output) in outputs.iter().enumerate() {
        let want: Vec<T> = (0..world).flat_map(|r| tensors(r)[i].clone()).collect();
        assert_same_bits(output, &want, what("all_gather"));
    }
    let whole = |i: usize| values::<T>(rank * 31 + i, LENS[i] * world);
    let wholes: Vec<Vec<T>> = (0..LENS.len()).map(whole).collect();
    let inputs: Vec<&[T]> = wholes.iter().map(Vec::as_slice).collect();
    let mut scattered: Vec<(ReduceOp, Vec<Vec<T>>)> = Vec::new();
    for op in ReduceOp::ALL.into_iter().filter(|op| op.supports(T::DTYPE)) {
        let mut parts = tensors::<T>(rank);
        let outputs = &mut slices(&mut parts);
        group.reduce_scatter(&inputs, outputs, op).unwrap();
        scattered.push((op, parts));
    }
    let mut exchanged = wholes.clone();
    group
        .all_to_all(&inputs, &mut slices(&mut exchanged))
        .unwrap();
    for (i, input) in wholes.iter().enumerate() {
        let mut all = input.clone();
        for (op, parts) in &scattered {
            let mut part = vec![T::default(); LENS[i]];
            group.reduce_scatter(input, &mut part, *op).unwrap();
            assert_same_bits(&parts[i], &part, what("reduce_scatter"));
        }
        group.all_to_all(input, &mut all).unwrap();
        assert_same_bits(&exchanged[i], &all, what("all_to_all"));
    }
}

#[test]
fn together_gives_the_bits_of_one_by_one() {
    for over in EVERYWHERE {
        for world in 1..=8 {
            on_each(groups(over, world), |group| {
                check::<f32>(&group, over);
                check::<f16>(&group, over);
                check::<i64>(&group, over);
            });
        }
    }
}

#[test]
fn the_ring_keeps_its_bits_too() {
    on_each(groups(Over::Thread, 4), |group| {
        let group = group.with_call(Call {
            algorithm: Algorithm::Ring,
            ..Call::default()
        });
        check::<f32>(&group, Over::Thread);
    });
}

#[test]
fn one_operation_carries_them_all() {
    let sent = on_each(groups(Over::Thread, 2), |group| {
        let mut mine = tensors::<f32>(group.rank());
        let mut all = slices(&mut mine);
        group.all_reduce(&mut all, ReduceOp::Sum)?;
        // No tensors are an operation, too.
        group.all_reduce(&mut [] as &mut [&mut [f32]], ReduceOp::Sum)?;
        Ok::<_, phalanx_comm::Error>(group.bytes_sent_to()[1 - group.rank()])
    });
    let bytes = 4 * LENS.iter().sum::<usize>() as u64;
    for sent in sent {
        assert!(sent.unwrap() <= bytes + 64);
    }
}

#[test]
fn another_order_of_tensors_is_a_desync() {
    for over in EVERYWHERE {
        let errors = on_each(groups(over, 2), |group| {
            let (mut a, mut b) = ([0f32; 10], [0f32; 20]);
            let mut all: [&mut [f32]; 2] = [&mut a, &mut b];
            if group.rank() == 1 {
                all.reverse();
            }
            group.all_reduce(&mut all, ReduceOp::Sum)
        });
        let gathers = on_each(groups(over, 2), |group| {
            let (a, b) = ([0f32; 10], [0f32; 20]);
            let (mut all_a, mut all_b) = ([0f32; 20], [0f32; 40]);
            let mut inputs: [&[f32]; 2] = [&a, &b];
            let mut outputs: [&mut [f32]; 2] = [&mut all_a, &mut all_b];
            if group.rank() == 1 {
                inputs.reverse();
                outputs.reverse();
            }
            group.all_gather(&inputs, &mut outputs)
        });
        for errors in [&errors, &gathers] {
            let kinds = errors.iter().map(|e| e.as_ref().map_err(|e| e.kind()));
            assert!(kinds.into_iter().any(|kind| kind == Err(ErrorKind::Desync)));
        }
        let errors: Vec<_> = errors.into_iter().map(Result::unwrap_err).collect();
        for error in errors {
            let text = error.to_string();
            assert!(text.contains("of 30 elements"), "{text}");
            assert!(text.contains("in lengths #"), "{text}");
        }
    }
}

#[test]
fn mistakes_are_named() {
    on_each(groups(Over::Thread, 2), |group| {
        let errors = [
            group.all_gather(&[&[1f32][..]], &mut []),
            group.all_gather(&[&[1f32][..]], &mut [&mut [0f32; 3]]),
            group.broadcast(&mut [] as &mut [&mut [f32]], 2),
            group.all_reduce(&mut [&mut [1i32][..]], ReduceOp::Mean),
        ];
        let names = [
            "all_gather: 1 inputs and 0 outputs are given",
            "all_gather: the output has 3 elements, 2 are needed",
            "root 2 does not exist",
            "the mean of i32",
        ];
        for (error, name) in errors.into_iter().zip(names) {
            let error = error.unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Usage);
            assert!(error.to_string().contains(name), "{error}");
        }
        group.barrier().unwrap();
    });
}
