//! The result grid: operation x type x reduction x transport x world x count,
//! every rank compared bit for bit with a serial fold.
//!
//! * Worlds 1 to 16, threads, shared memory and TCP: the full product of type,
//!   reduction, form (each collective, all-reduce with each algorithm) and
//!   count 0, 1, P−1, P, P+1; counts 1000 and 10007 with every type and
//!   reduction, the form going round.
//! * The way of asking goes round from case to case: blocking on slices, in
//!   the background on buckets of the caller's, and of the group's (which
//!   are registered where memory is shared). So does the root.
//! * Subgroups of the odd and the even ranks: one case in seven, another
//!   seventh in each. Seven divides none of the dimensions, so that all pairs
//!   of form and count come up.

use half::{bf16, f16};
use phalanx_comm::plan::{Method, Spec};
use phalanx_comm::{Algorithm, Bucket, Call, ProcessGroup, ReduceOp};

use crate::common::{
    EVERYWHERE, Over, Value, assert_same_bits, groups, on_each, serial_fold, wild_values,
};

/// Elements of every rank's data; a case takes the first so many.
const LONGEST: usize = 10007;

/// What is done with them.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Form {
    AllReduce(Algorithm),
    Reduce,
    ReduceScatter,
    Broadcast,
    AllGather,
    Gather,
    Scatter,
    AllToAll,
    Message,
}

const REDUCING: [Form; 6] = [
    Form::AllReduce(Algorithm::Auto),
    Form::AllReduce(Algorithm::Direct),
    Form::AllReduce(Algorithm::OneRound),
    Form::AllReduce(Algorithm::Ring),
    Form::Reduce,
    Form::ReduceScatter,
];

const MOVING: [Form; 6] = [
    Form::Broadcast,
    Form::AllGather,
    Form::Gather,
    Form::Scatter,
    Form::AllToAll,
    Form::Message,
];

impl Form {
    /// Whether its longer side has `count` elements for every rank.
    fn in_parts(self) -> bool {
        !matches!(
            self,
            Form::AllReduce(_) | Form::Reduce | Form::Broadcast | Form::Message
        )
    }
}

/// How it is asked for.
#[derive(Clone, Copy, Debug)]
enum Asked {
    OnSlices,
    OnOwnBuckets,
    OnGroupBuckets,
}

impl Asked {
    fn of(number: usize) -> Asked {
        [Asked::OnSlices, Asked::OnOwnBuckets, Asked::OnGroupBuckets][number % 3]
    }

    fn bucket<T: Value>(self, group: &ProcessGroup, data: &[T]) -> Bucket<T> {
        match self {
            Asked::OnGroupBuckets => {
                let mut bucket = group.bucket(data.len());
                bucket.copy_from_slice(data);
                bucket
            }
            _ => Bucket::from_slice(data),
        }
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
            push(REDUCING[(i + world) % 6], *op, 1000);
            push(REDUCING[(i + world + 3) % 6], *op, LONGEST);
            push(MOVING[(i + world) % 6], *op, [1000, LONGEST][i % 2]);
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
        let at_root = |data: Vec<T>| if rank == root { data } else { Vec::new() };
        let all = || -> Vec<T> { each(count).flatten().copied().collect() };
        let (got, want) = match form {
            Form::AllReduce(algorithm) => {
                let want = if algorithm == Algorithm::Ring {
                    ring_fold(op, &self.inputs, count)
                } else {
                    fold().to_vec()
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
        target: 0,
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

fn all_reduce<T: Value>(
    group: &ProcessGroup,
    asked: Asked,
    data: &[T],
    op: ReduceOp,
    algorithm: Algorithm,
) -> Vec<T> {
    let call = Call {
        algorithm,
        ..Call::default()
    };
    if let Asked::OnSlices = asked {
        let mut data = data.to_vec();
        group.all_reduce_with(&mut data, op, &call).unwrap();
        return data;
    }
    let work = group.all_reduce_async(asked.bucket(group, data), op, call);
    work.wait().unwrap().to_vec()
}

fn reduce<T: Value>(
    group: &ProcessGroup,
    asked: Asked,
    data: &[T],
    op: ReduceOp,
    root: usize,
) -> Vec<T> {
    if let Asked::OnSlices = asked {
        let mut data = data.to_vec();
        group.reduce(&mut data, op, root).unwrap();
        return data;
    }
    let work = group.reduce_async(asked.bucket(group, data), op, root, Call::default());
    work.wait().unwrap().to_vec()
}

fn reduce_scatter<T: Value>(
    group: &ProcessGroup,
    asked: Asked,
    data: &[T],
    op: ReduceOp,
) -> Vec<T> {
    let mut part = vec![T::default(); data.len() / group.world_size()];
    if let Asked::OnSlices = asked {
        group.reduce_scatter(data, &mut part, op).unwrap();
        return part;
    }
    let (input, output) = (asked.bucket(group, data), asked.bucket(group, &part));
    let work = group.reduce_scatter_async(input, output, op, Call::default());
    let (input, output) = work.wait().unwrap();
    assert_same_bits(&input, data, || format!("input of {op}"));
    output.to_vec()
}

fn broadcast<T: Value>(group: &ProcessGroup, asked: Asked, data: &[T], root: usize) -> Vec<T> {
    if let Asked::OnSlices = asked {
        let mut data = data.to_vec();
        group.broadcast(&mut data, root).unwrap();
        return data;
    }
    let work = group.broadcast_async(asked.bucket(group, data), root, Call::default());
    work.wait().unwrap().to_vec()
}

fn all_gather<T: Value>(group: &ProcessGroup, asked: Asked, data: &[T]) -> Vec<T> {
    let mut all = vec![T::default(); data.len() * group.world_size()];
    if let Asked::OnSlices = asked {
        group.all_gather(data, &mut all).unwrap();
        return all;
    }
    let (input, output) = (asked.bucket(group, data), asked.bucket(group, &all));
    let work = group.all_gather_async(input, output, Call::default());
    work.wait().unwrap().1.to_vec()
}

fn gather<T: Value>(group: &ProcessGroup, asked: Asked, data: &[T], root: usize) -> Vec<T> {
    let is_root = group.rank() == root;
    let mut all = vec![
        T::default();
        if is_root {
            data.len() * group.world_size()
        } else {
            0
        }
    ];
    if let Asked::OnSlices = asked {
        let output = is_root.then_some(&mut all[..]);
        group.gather(data, output, root).unwrap();
        return all;
    }
    let output = is_root.then(|| asked.bucket(group, &all));
    let work = group.gather_async(asked.bucket(group, data), output, root, Call::default());
    let (_, output) = work.wait().unwrap();
    output.map(|output| output.to_vec()).unwrap_or_default()
}

fn scatter<T: Value>(
    group: &ProcessGroup,
    asked: Asked,
    data: Option<&[T]>,
    count: usize,
    root: usize,
) -> Vec<T> {
    let mut part = vec![T::default(); count];
    if let Asked::OnSlices = asked {
        group.scatter(data, &mut part, root).unwrap();
        return part;
    }
    let input = data.map(|data| asked.bucket(group, data));
    let work = group.scatter_async(input, asked.bucket(group, &part), root, Call::default());
    work.wait().unwrap().1.to_vec()
}

fn all_to_all<T: Value>(group: &ProcessGroup, asked: Asked, data: &[T]) -> Vec<T> {
    let mut all = vec![T::default(); data.len()];
    if let Asked::OnSlices = asked {
        group.all_to_all(data, &mut all).unwrap();
        return all;
    }
    let (input, output) = (asked.bucket(group, data), asked.bucket(group, &all));
    let work = group.all_to_all_async(input, output, Call::default());
    work.wait().unwrap().1.to_vec()
}

/// Receives from `Ok(rank)`, or sends to `Err(rank)`; what was transferred.
fn message<T: Value>(
    group: &ProcessGroup,
    asked: Asked,
    data: &[T],
    peer: Result<usize, usize>,
) -> Vec<T> {
    let mut got = vec![T::default(); data.len()];
    let work = match (asked, peer) {
        (Asked::OnSlices, Ok(from)) => {
            group.recv(&mut got, from).unwrap();
            return got;
        }
        (Asked::OnSlices, Err(to)) => {
            group.send(data, to).unwrap();
            return data.to_vec();
        }
        (_, Ok(from)) => group.recv_async(asked.bucket(group, &got), from, Call::default()),
        (_, Err(to)) => group.send_async(asked.bucket(group, data), to, Call::default()),
    };
    work.wait().unwrap().to_vec()
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
    }
}

fn grid(over: Over) {
    for world in 1..=16 {
        let tables = Tables::new(world, 1);
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
