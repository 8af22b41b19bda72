//! Every layout to every other one, compared with the serial tensor, bit for bit.

use phalanx_global::{Boxing, Fold, Layout, Placement, Sbp, StepKind};

use crate::common::{Over, coordinates, indices, number, on_mesh};

/// One element of rank `rank`'s part of a tensor: of sums, parts of different size and sign.
fn element(layout: &Layout, rank: usize, index: &[usize]) -> f32 {
    let at = coordinates(layout.mesh(), rank);
    let own: Vec<usize> = (0..at.len())
        .map(|d| match layout.sbp()[d] {
            Sbp::Partial(_) => 1 + at[d],
            _ => 0,
        })
        .collect();
    number(&[index, &own].concat()) * 10f32.powi(own.iter().sum::<usize>() as i32 - 2)
}

/// The serial tensor, from the parts of all ranks: folded over the dimensions `first`, the last one
/// first, then over the others. Ranks that should have equal parts must have.
fn whole(layout: &Layout, parts: &[Vec<f32>], first: &[usize]) -> Vec<f32> {
    let mesh = layout.mesh();
    let is_first = |d: &usize| first.contains(d);
    let (mut order, rest): (Vec<usize>, Vec<usize>) =
        (0..mesh.len()).rev().partition(|d| is_first(d));
    order.extend(rest);
    let full: Vec<_> = layout.shape().iter().map(|n| 0..*n).collect();
    let value = |index: &[usize]| {
        // Of each rank its element, if it has it.
        let mut cells: Vec<Option<f32>> = (0..parts.len())
            .map(|rank| {
                let block = layout.block(rank);
                let place = block.iter().zip(index).try_fold(0, |at, (range, i)| {
                    let inside = range.contains(i);
                    inside.then(|| at * range.len() + (i - range.start))
                });
                place.map(|at| parts[rank][at])
            })
            .collect();
        for &dim in &order {
            for start in 0..cells.len() {
                if coordinates(mesh, start)[dim] != 0 {
                    continue;
                }
                let step: usize = mesh[dim + 1..].iter().product();
                let line: Vec<Option<f32>> =
                    (0..mesh[dim]).map(|i| cells[start + i * step]).collect();
                let held: Vec<f32> = line.iter().flatten().copied().collect();
                cells[start] = match layout.sbp()[dim] {
                    Sbp::Split(_) => {
                        assert!(held.len() <= 1, "{layout}: {index:?} lies on several ranks");
                        held.first().copied()
                    }
                    Sbp::Broadcast => {
                        let bits = |v: &Option<f32>| v.map(f32::to_bits);
                        assert!(
                            line.iter().all(|v| bits(v) == bits(&line[0])),
                            "{layout}: {index:?}"
                        );
                        line[0]
                    }
                    Sbp::Partial(fold) => held.into_iter().reduce(|a, b| match fold {
                        Fold::Sum => a + b,
                        Fold::Min => a.min(b),
                        Fold::Max => a.max(b),
                    }),
                };
            }
        }
        cells[0].unwrap_or_else(|| panic!("{layout}: no rank has {index:?}"))
    };
    indices(&full).iter().map(|index| value(index)).collect()
}

fn parts(layout: &Layout) -> Vec<Vec<f32>> {
    let of = |rank| {
        let all = indices(&layout.block(rank));
        all.iter()
            .map(|index| element(layout, rank, index))
            .collect()
    };
    (0..layout.mesh().iter().product()).map(of).collect()
}

/// Every SBP of a tensor with two axes.
const ALL: [Sbp; 6] = [
    Sbp::Broadcast,
    Sbp::Split(0),
    Sbp::Split(1),
    Sbp::Partial(Fold::Sum),
    Sbp::Partial(Fold::Min),
    Sbp::Partial(Fold::Max),
];

/// Layouts of a shape over a mesh: all SBPs, with even ranges and, where something is split, uneven ones.
fn layouts(mesh: &[usize], shape: &[usize]) -> Vec<Layout> {
    let combinations = mesh.iter().fold(vec![Vec::new()], |all, _| {
        let longer = |one: &Vec<Sbp>| ALL.map(|s| [&one[..], &[s]].concat());
        all.iter().flat_map(longer).collect()
    });
    let mut all = Vec::new();
    for sbp in combinations {
        let even = Layout::even(mesh, shape, &sbp).unwrap();
        // The ranges of ranks with an odd number are empty, and the first of the others is longest.
        let uneven: Vec<(usize, Vec<usize>)> = (0..shape.len())
            .filter_map(|axis| {
                let parts = even.cuts(axis)?.len() - 1;
                let mut cuts = vec![0; parts + 1];
                for (i, cut) in cuts.iter_mut().enumerate().skip(1) {
                    *cut = (shape[axis] / 2 + i.div_ceil(2)).min(shape[axis]);
                }
                cuts[parts] = shape[axis];
                Some((axis, cuts))
            })
            .collect();
        let given: Vec<(usize, &[usize])> = uneven.iter().map(|(a, c)| (*a, &c[..])).collect();
        let uneven = Layout::uneven(mesh, shape, &sbp, &given).unwrap();
        if uneven != even {
            all.push(uneven);
        }
        all.push(even);
    }
    all
}

fn sent(placement: &Placement) -> u64 {
    let groups = match placement.sizes().len() {
        1 => vec![placement.group()],
        n => (0..n)
            .map(|d| placement.line(d))
            .chain([placement.group()])
            .collect(),
    };
    groups.iter().flat_map(|g| g.bytes_sent_to()).sum()
}

/// Converts a tensor from every layout to every other one. Returns how many pairs there were.
fn all_pairs(over: Over, mesh: &[usize], shapes: &[[usize; 2]]) -> usize {
    some_pairs(over, mesh, shapes, 1)
}

/// The same of every `every`-th pair, by a hash.
fn some_pairs(over: Over, mesh: &[usize], shapes: &[[usize; 2]], every: usize) -> usize {
    let mut pairs = Vec::new();
    for shape in shapes {
        let all = layouts(mesh, shape);
        for (i, from) in all.iter().enumerate() {
            let drawn = |j: &usize| ((number(&[i, *j]).abs() * 1e6) as usize).is_multiple_of(every);
            let to = (0..all.len()).filter(drawn).map(|j| all[j].clone());
            pairs.extend(to.map(|to| (from.clone(), to)));
        }
    }
    let made: Vec<Vec<Vec<f32>>> = on_mesh(over, mesh, |placement| {
        let rank = placement.group().rank();
        pairs
            .iter()
            .map(|(from, to)| {
                let boxing = Boxing::plan(placement, from, to).unwrap();
                let before = sent(placement);
                let part = boxing.run(placement, &parts(from)[rank]).unwrap();
                let really = sent(placement) - before;
                // Where memory is shared, these do not use messages if the lengths are equal.
                let shared = boxing.steps().iter().any(|s| {
                    matches!(
                        s.kind,
                        StepKind::AllReduce { .. }
                            | StepKind::AllGather { .. }
                            | StepKind::ReduceScatter { .. }
                    )
                });
                // Nor does the comparison of lengths before an exchange.
                let lengths: usize = boxing
                    .steps()
                    .iter()
                    .map(|s| match s.kind {
                        StepKind::Exchange { dim: Some(dim) } => 8 * (mesh[dim] - 1),
                        StepKind::Exchange { dim: None } => {
                            8 * (placement.group().world_size() - 1)
                        }
                        _ => 0,
                    })
                    .sum();
                let said = boxing.bytes_sent(rank);
                match over {
                    Over::Tcp => assert_eq!(really, said as u64, "{boxing}"),
                    _ if !shared => assert_eq!(really, (said - lengths) as u64, "{boxing}"),
                    _ => {}
                }
                part
            })
            .collect()
    });
    for (i, (from, to)) in pairs.iter().enumerate() {
        let ranks: Vec<Vec<f32>> = made.iter().map(|rank| rank[i].clone()).collect();
        // What the conversion folds comes first. A dimension that stays partial waits if those before it have the same fold.
        let mut folded: Vec<usize> = Vec::new();
        for d in (0..mesh.len()).filter(|d| matches!(from.sbp()[*d], Sbp::Partial(_))) {
            let differs = |other: &usize| from.sbp()[*other] != from.sbp()[d];
            if from.sbp()[d] != to.sbp()[d] || folded.iter().any(differs) {
                folded.push(d);
            }
        }
        let (want, got) = (whole(from, &parts(from), &folded), whole(to, &ranks, &[]));
        let bits = |v: &[f32]| v.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
        assert_eq!(
            bits(&want),
            bits(&got),
            "{mesh:?}, {over:?}: {from} to {to}"
        );
    }
    pairs.len()
}

/// Sizes of an axis: none, one, fewer than ranks, as many, more, a prime.
fn sizes(ranks: usize) -> Vec<usize> {
    let mut all = vec![0, 1, ranks - 1, ranks, ranks + 1, 7];
    all.sort_unstable();
    all.dedup();
    all
}

#[test]
fn all_pairs_in_one_dimension_keep_every_bit() {
    let mut count = 0;
    for over in [Over::Thread, Over::Shm, Over::Tcp] {
        for ranks in 1..=6 {
            let shapes: Vec<[usize; 2]> = sizes(ranks).into_iter().map(|n| [n, 3]).collect();
            count += all_pairs(over, &[ranks], &shapes);
        }
    }
    println!("{count} conversions");
}

#[test]
fn all_pairs_in_two_dimensions_keep_every_bit() {
    let mut count = 0;
    for over in [Over::Thread, Over::Shm, Over::Tcp] {
        for mesh in [[1, 2], [2, 1], [2, 2], [2, 3], [3, 2]] {
            count += all_pairs(over, &mesh, &[[5, 4]]);
        }
    }
    count += all_pairs(Over::Thread, &[2, 2], &[[0, 4], [1, 3], [3, 7]]);
    println!("{count} conversions");
}

/// Of more than a hundred thousand pairs a sample on each mesh.
#[test]
fn pairs_in_three_dimensions_keep_every_bit() {
    let mut count = 0;
    for mesh in [[2, 2, 2], [1, 2, 3], [3, 1, 2], [2, 2, 1]] {
        count += some_pairs(Over::Thread, &mesh, &[[5, 4]], 150);
    }
    for over in [Over::Shm, Over::Tcp] {
        count += some_pairs(over, &[2, 1, 2], &[[5, 4], [0, 3]], 400);
    }
    println!("{count} conversions");
}

#[test]
#[ignore = "takes minutes; the sample above runs always"]
fn all_pairs_in_three_dimensions_keep_every_bit() {
    println!(
        "{} conversions",
        all_pairs(Over::Thread, &[2, 2, 2], &[[9, 8]])
    );
}
