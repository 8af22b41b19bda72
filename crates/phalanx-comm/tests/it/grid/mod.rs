//! The result grid: operation x type x reduction x transport x world x count,
//! every rank compared bit for bit with a serial fold.
//!
//! * Worlds 1 to 8, threads, shared memory and TCP: the full product of type,
//!   reduction, form (each collective, all-reduce with each algorithm) and
//!   count 0, 1, P−1, P, P+1; counts 1000 and 10007 with every type and
//!   reduction, the form going round.
//! * Worlds 9 to 16: one case in seven, each in one of these worlds at least.
//! * The way of asking goes round from case to case: blocking on slices, in
//!   the background on buckets of the caller's, and of the group's (which
//!   are registered where memory is shared); uneven and coalesced forms only
//!   block. So does the root.
//! * Subgroups of the odd and the even ranks: one case in seven, another
//!   seventh in each. Seven divides neither the forms nor the counts, so that all pairs
//!   of them come up.

mod asked;

use half::{bf16, f16};
use phalanx_comm::plan::{Method, Spec};
use phalanx_comm::{Algorithm, ProcessGroup, ReduceOp};

use self::asked::*;

use crate::common::{
    EVERYWHERE, Over, Value, assert_same_bits, groups, on_each, serial_fold, wild_values,
};

/// Elements of every rank's data; a case takes the first so many.
const LONGEST: usize = 10007;

/// What is done with them.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Form {
    AllReduce(Algorithm),
    AllReduceCoalesced,
    Reduce,
    ReduceScatter,
    ReduceScatterUneven,
    Broadcast,
    AllGather,
    AllGatherUneven,
    Gather,
    Scatter,
    AllToAll,
    AllToAllUneven,
    Message,
}

const REDUCING: [Form; 8] = [
    Form::AllReduce(Algorithm::Auto),
    Form::AllReduce(Algorithm::Direct),
    Form::AllReduce(Algorithm::OneRound),
    Form::AllReduce(Algorithm::Ring),
    Form::AllReduceCoalesced,
    Form::Reduce,
    Form::ReduceScatter,
    Form::ReduceScatterUneven,
];

const MOVING: [Form; 8] = [
    Form::Broadcast,
    Form::AllGather,
    Form::AllGatherUneven,
    Form::Gather,
    Form::Scatter,
    Form::AllToAll,
    Form::AllToAllUneven,
    Form::Message,
];

impl Form {
    /// Whether its longer side has `count` elements for every rank.
    fn in_parts(self) -> bool {
        !matches!(
            self,
            Form::AllReduce(_)
                | Form::AllReduceCoalesced
                | Form::Reduce
                | Form::Broadcast
                | Form::Message
        )
    }
}

struct Case {
    number: usize,
    form: Form,
    /// For forms that reduce.
    op: ReduceOp,
    count: usize,
}

/// One type's inputs and what becomes of them. Elements are folded one by
/// one, so the fold of fewer is the beginning of the fold of all.
struct Table<T> {
    /// By rank.
    inputs: Vec<Vec<T>>,
    folds: Vec<(ReduceOp, Vec<T>)>,
    cases: Vec<Case>,
}

impl<T: Value> Table<T> {
    /// One case in `thin`.
    fn new(world: usize, thin: usize) -> Self {
        let inputs: Vec<Vec<T>> = (0..world).map(|r| wild_values(r, LONGEST)).collect();
        let ops = ReduceOp::ALL.into_iter().filter(|op| op.supports(T::DTYPE));
        let folds: Vec<_> = ops.map(|op| (op, serial_fold(op, &inputs))).collect();
        let mut cases = Vec::new();
        let mut push = |form: Form, op, count: usize| {
            let most = if form.in_parts() {
                LONGEST / world
            } else {
                LONGEST
            };
            let number = cases.len();
            let count = count.min(most);
            cases.push(Case {
                number,
                form,
                op,
                count,
            });
        };
        let short = [0, 1, world - 1, world, world + 1];
        for (op, _) in &folds {
            for form in REDUCING {
                short.into_iter().for_each(|count| push(form, *op, count));
            }
        }
        for form in MOVING {
            short
                .into_iter()
                .for_each(|count| push(form, ReduceOp::Sum, count));
        }
        for (i, (op, _)) in folds.iter().enumerate() {
            push(REDUCING[(i + world) % REDUCING.len()], *op, 1000);
            push(REDUCING[(i + world + 3) % REDUCING.len()], *op, LONGEST);
            push(
                MOVING[(i + world) % MOVING.len()],
                *op,
                [1000, LONGEST][i % 2],
            );
        }
        cases.retain(|case| case.number % thin == world % thin);
        Table {
            inputs,
            folds,
            cases,
        }
    }

    fn run(&self, group: &ProcessGroup, over: Over) {
        for case in &self.cases {
            self.run_case(group, over, case);
        }
    }

    fn run_case(&self, group: &ProcessGroup, over: Over, case: &Case) {
        let Case {
            number,
            form,
            op,
            count,
        } = *case;
        let (rank, world) = (group.rank(), group.world_size());
        let (asked, root) = (Asked::of(number), number / 3 % world);
        let long = if form.in_parts() {
            count * world
        } else {
            count
        };
        let each = |len: usize| self.inputs.iter().map(move |input| &input[..len]);
        let mine = &self.inputs[rank];
        let part = |data: &[T]| data[rank * count..(rank + 1) * count].to_vec();
        let fold = || {
            let (_, fold) = self.folds.iter().find(|(of, _)| *of == op).unwrap();
            &fold[..long]
        };
        // What rank `from` has for each rank, where that is uneven.
        let row = |from: usize| -> Vec<usize> {
            (0..world)
                .map(|to| [count, 0, count / 2][(number + from + 2 * to) % 3])
                .collect()
        };
        let at_root = |data: Vec<T>| if rank == root { data } else { Vec::new() };
        let all = || -> Vec<T> { each(count).flatten().copied().collect() };
        let (got, want) = match form {
            Form::AllReduce(algorithm) => {
                let want = match algorithm {
                    Algorithm::Ring => ring_fold(op, &self.inputs, count),
                    _ => fold().to_vec(),
                };
                (
                    all_reduce(group, asked, &mine[..count], op, algorithm),
                    want,
                )
            }
            Form::Reduce => {
                // Other ranks' data is not touched.
                let want = if rank == root { fold() } else { &mine[..count] };
                (
                    reduce(group, asked, &mine[..count], op, root),
                    want.to_vec(),
                )
            }
            Form::ReduceScatter => {
                let got = reduce_scatter(group, asked, &mine[..long], op);
                (got, part(fold()))
            }
            Form::AllReduceCoalesced => {
                let mut data = mine[..count].to_vec();
                let (a, b) = data.split_at_mut(count / 3);
                group.all_reduce(&mut [b, &mut [], a], op).unwrap();
                (data, fold().to_vec())
            }
            Form::ReduceScatterUneven => {
                let lengths = row(0);
                let before: usize = lengths[..rank].iter().sum();
                let input = &mine[..lengths.iter().sum()];
                let mut got = vec![T::default(); lengths[rank]];
                group
                    .reduce_scatter_v(input, &lengths, &mut got, op)
                    .unwrap();
                (got, fold()[before..][..lengths[rank]].to_vec())
            }
            Form::AllGatherUneven => {
                let lengths = row(0);
                let want: Vec<T> = self
                    .inputs
                    .iter()
                    .zip(&lengths)
                    .flat_map(|(input, len)| input[..*len].to_vec())
                    .collect();
                let mut got = vec![T::default(); want.len()];
                group
                    .all_gather_v(&mine[..lengths[rank]], &lengths, &mut got)
                    .unwrap();
                (got, want)
            }
            Form::AllToAllUneven => {
                let sends = row(rank);
                let recvs: Vec<usize> = (0..world).map(|from| row(from)[rank]).collect();
                let want: Vec<T> = (0..world)
                    .flat_map(|from| {
                        let before: usize = row(from)[..rank].iter().sum();
                        self.inputs[from][before..][..recvs[from]].to_vec()
                    })
                    .collect();
                let mut got = vec![T::default(); want.len()];
                let input = &mine[..sends.iter().sum()];
                group.all_to_all_v(input, &sends, &mut got, &recvs).unwrap();
                (got, want)
            }
            Form::Broadcast => {
                let want = self.inputs[root][..count].to_vec();
                (broadcast(group, asked, &mine[..count], root), want)
            }
            Form::AllGather => (all_gather(group, asked, &mine[..count]), all()),
            Form::Gather => (gather(group, asked, &mine[..count], root), at_root(all())),
            Form::Scatter => {
                let input = (rank == root).then_some(&mine[..long]);
                (
                    scatter(group, asked, input, count, root),
                    part(&self.inputs[root]),
                )
            }
            Form::AllToAll => {
                let want = each(long).flat_map(part).collect();
                (all_to_all(group, asked, &mine[..long]), want)
            }
            Form::Message => {
                // From the root to the next, if there is one.
                let to = (root + 1) % world;
                if to == root || ![root, to].contains(&rank) {
                    return;
                }
                let peer = if rank == root { Err(to) } else { Ok(root) };
                let got = message(group, asked, &mine[..count], peer);
                (got, self.inputs[root][..count].to_vec())
            }
        };
        assert_same_bits(&got, &want, || {
            let t = T::DTYPE;
            format!(
                "{over:?} {form:?} {t} {op} of {count} {asked:?}, root {root}, rank {rank} of {world}"
            )
        });
    }
}

/// What the ring computes: chunk `c` is folded from rank `c` on round the
/// ring, and rounded at every hop.
fn ring_fold<T: Value>(op: ReduceOp, inputs: &[Vec<T>], count: usize) -> Vec<T> {
    let world = inputs.len();
    let spec = Spec {
        method: Method::AllReduceRing,
        world,
        count,
        elem_bytes: size_of::<T>(),
        root: 0,
        short_segments: false,
    };
    let mut result = inputs[0][..count].to_vec();
    for chunk in (0..world).filter(|_| world > 1) {
        for i in spec.chunks().range(chunk) {
            let mut a = inputs[chunk][i];
            for hop in 1..world {
                let x = inputs[(chunk + hop) % world][i];
                let mut wide = T::combine(op, a.widen(), x.widen());
                if op == ReduceOp::Mean && hop == world - 1 {
                    wide = T::scale(wide, world);
                }
                a = T::narrow(wide);
            }
            result[i] = a;
        }
    }
    result
}

/// The tables of all types for one world.
struct Tables {
    f32s: Table<f32>,
    f64s: Table<f64>,
    f16s: Table<f16>,
    bf16s: Table<bf16>,
    i8s: Table<i8>,
    u8s: Table<u8>,
    i32s: Table<i32>,
    i64s: Table<i64>,
    i16s: Table<i16>,
    u64s: Table<u64>,
}

impl Tables {
    fn new(world: usize, thin: usize) -> Self {
        Tables {
            f32s: Table::new(world, thin),
            f64s: Table::new(world, thin),
            f16s: Table::new(world, thin),
            bf16s: Table::new(world, thin),
            i8s: Table::new(world, thin),
            u8s: Table::new(world, thin),
            i32s: Table::new(world, thin),
            i64s: Table::new(world, thin),
            i16s: Table::new(world, 5 * thin),
            u64s: Table::new(world, 5 * thin),
        }
    }

    fn run(&self, group: &ProcessGroup, over: Over) {
        self.f32s.run(group, over);
        self.f64s.run(group, over);
        self.f16s.run(group, over);
        self.bf16s.run(group, over);
        self.i8s.run(group, over);
        self.u8s.run(group, over);
        self.i32s.run(group, over);
        self.i64s.run(group, over);
        self.i16s.run(group, over);
        self.u64s.run(group, over);
    }
}

fn grid(over: Over) {
    for world in 1..=16 {
        let tables = Tables::new(world, if world <= 8 { 1 } else { 7 });
        on_each(groups(over, world), |group| {
            tables.run(&group, over);
            group.shutdown().unwrap();
        });
    }
}

#[test]
fn results_equal_the_serial_fold_over_threads() {
    grid(Over::Thread);
}

#[test]
fn results_equal_the_serial_fold_over_shm() {
    grid(Over::Shm);
}

#[test]
fn results_equal_the_serial_fold_over_tcp() {
    grid(Over::Tcp);
}

#[test]
fn results_equal_the_serial_fold_in_subgroups() {
    for world in [3usize, 5, 13] {
        // Of the even and of the odd ranks.
        let tables = [world.div_ceil(2), world / 2].map(|part| Tables::new(part, 7));
        for over in EVERYWHERE {
            on_each(groups(over, world), |group| {
                let ranks = |odd| (odd..world).step_by(2).collect::<Vec<_>>();
                let even = group.new_group(&ranks(0)).unwrap();
                let odd = group.new_group(&ranks(1)).unwrap();
                tables[group.rank() % 2].run(&even.or(odd).unwrap(), over);
                group.barrier().unwrap();
            });
        }
    }
}
