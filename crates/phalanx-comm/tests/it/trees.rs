//! Reductions over trees, bit for bit against folds in the order that their
//! files state, on data of many segments; and what they send where.

use std::sync::Arc;

use half::bf16;
use phalanx_comm::{Algorithm, Call, ReduceOp};
use phalanx_store::MemStore;
use phalanx_wire::Token;

use crate::common::{
    EVERYWHERE, Over, Value, assert_same_bits, groups, init_options, on_each, serial_fold, values,
};

/// Data up to so many bytes goes over the first tree alone.
const ONE_TREE_BYTES: usize = 32 << 10;

/// Element `i` of the ranks in `order`: the root is the largest power of two less
/// one; what is left of it is folded first, then itself, then what is right of
/// it; rounded at every inner node.
fn fold_tree<T: Value>(op: ReduceOp, inputs: &[Vec<T>], order: &[usize], i: usize) -> T {
    fold_below(
        op,
        inputs,
        order,
        i,
        (op == ReduceOp::Mean).then_some(order.len()),
    )
}

fn fold_below<T: Value>(
    op: ReduceOp,
    inputs: &[Vec<T>],
    order: &[usize],
    i: usize,
    mean_of: Option<usize>,
) -> T {
    if let [leaf] = order {
        return inputs[*leaf][i];
    }
    let mut root = 1;
    while 2 * root <= order.len() {
        root *= 2;
    }
    let (left, right) = (&order[..root - 1], &order[root..]);
    let mut sum = fold_below(op, inputs, left, i, None).widen();
    sum = T::combine(op, sum, inputs[order[root - 1]][i].widen());
    if !right.is_empty() {
        sum = T::combine(op, sum, fold_below(op, inputs, right, i, None).widen());
    }
    T::narrow(mean_of.map_or(sum, |world| T::scale(sum, world)))
}

/// What an all-reduce over two trees computes: the first half in rank order, the
/// second with the last rank first.
pub fn all_reduce_tree_fold<T: Value>(op: ReduceOp, inputs: &[Vec<T>], count: usize) -> Vec<T> {
    let world = inputs.len();
    let bytes = count * size_of::<T>();
    let lines = bytes.div_ceil(64).div_ceil(2);
    let half = if bytes <= ONE_TREE_BYTES {
        count
    } else {
        lines * 64 / size_of::<T>()
    };
    let first: Vec<usize> = (0..world).collect();
    let second: Vec<usize> = (0..world)
        .map(|place| (place + world - 1) % world)
        .collect();
    (0..count)
        .map(|i| fold_tree(op, inputs, if i < half { &first } else { &second }, i))
        .collect()
}

/// What a reduce over one tree computes: its root is the tree's.
fn reduce_tree_fold<T: Value>(op: ReduceOp, inputs: &[Vec<T>], root: usize) -> Vec<T> {
    let world = inputs.len();
    let mut top = 1;
    while 2 * top <= world {
        top *= 2;
    }
    let order: Vec<usize> = (0..world)
        .map(|place| (place + root + world - (top - 1)) % world)
        .collect();
    (0..inputs[0].len())
        .map(|i| fold_tree(op, inputs, &order, i))
        .collect()
}

fn check<T: Value>(over: Over, world: usize, count: usize, op: ReduceOp) {
    let inputs: Vec<Vec<T>> = (0..world).map(|r| values(r, count)).collect();
    let want = all_reduce_tree_fold(op, &inputs, count);
    let canonical = serial_fold(op, &inputs);
    on_each(groups(over, world), |group| {
        for (algorithm, want) in [(Algorithm::Tree, &want), (Algorithm::Doubling, &canonical)] {
            let mut data = inputs[group.rank()].clone();
            let call = Call {
                algorithm,
                ..Call::default()
            };
            group.all_reduce_with(&mut data, op, &call).unwrap();
            assert_same_bits(&data, want, || {
                format!(
                    "{algorithm} over {over:?}, rank {} of {world}",
                    group.rank()
                )
            });
        }
        group.shutdown().unwrap();
    });
}

#[test]
fn long_data_is_folded_by_subtrees() {
    for over in EVERYWHERE {
        for world in [2, 3, 5, 8] {
            // More segments than fit in flight, the last one short.
            check::<f32>(over, world, 130_003, ReduceOp::Mean);
            check::<bf16>(over, world, 40_001, ReduceOp::Sum);
        }
    }
}

#[test]
fn a_reduce_is_folded_by_subtrees_and_leaves_other_data_alone() {
    const COUNT: usize = 70_003;
    for over in [Over::Tcp, Over::Shm] {
        for world in [2, 3, 6, 9] {
            let inputs: Vec<Vec<f32>> = (0..world).map(|r| values(r, COUNT)).collect();
            let store = Arc::new(MemStore::new());
            let token = Token::generate().unwrap();
            std::thread::scope(|scope| {
                for (rank, input) in inputs.iter().enumerate() {
                    let (store, mut options) = (store.clone(), init_options(over, &token));
                    options.rules = "reduce=tree".parse().unwrap();
                    let inputs = &inputs;
                    scope.spawn(move || {
                        let group =
                            phalanx_comm::ProcessGroup::from_store(store, rank, world, options)
                                .unwrap();
                        for root in [0, world / 2, world - 1] {
                            let mut data = input.clone();
                            group.reduce(&mut data, ReduceOp::Mean, root).unwrap();
                            let want = if rank == root {
                                reduce_tree_fold(ReduceOp::Mean, inputs, root)
                            } else {
                                input.clone()
                            };
                            assert_same_bits(&data, &want, || {
                                format!("reduce to {root} over {over:?}, rank {rank} of {world}")
                            });
                        }
                        group.shutdown().unwrap();
                    });
                }
            });
        }
    }
}

#[test]
fn trees_share_the_load() {
    for world in [4, 7, 8] {
        on_each(groups(Over::Tcp, world), |group| {
            const BYTES: u64 = 400_000;
            let mut data = vec![1f32; BYTES as usize / 4];
            let call = Call {
                algorithm: Algorithm::Tree,
                ..Call::default()
            };
            group
                .all_reduce_with(&mut data, ReduceOp::Sum, &call)
                .unwrap();
            assert!(data.iter().all(|x| *x == world as f32));
            // Inside one tree at most 3/2 n, a leaf of the other 1/2 n.
            let sent: u64 = group.bytes_sent_to().iter().sum();
            assert!(sent <= 2 * BYTES + 64, "rank {}: {sent}", group.rank());
        });
    }
}
