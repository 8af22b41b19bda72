//! Every operation with operands that lie in every way, against one rank's own operation: forward
//! and backward, without conversions where the table says so and refused where it does not.
//!
//! Operands are multiples of 1/32, whose sums and products are exact, so most results must have
//! the serial bits (but for the sign of zero); those of which the table says so are within a part of
//! the largest element: functions and means 2e-6, normalisations and losses 2e-5, products in bf16 3e-2.

mod ops;
mod run;
mod table;

use phalanx_global::Sbp;
use phalanx_nn::{Precision, Tape, Threads};

use crate::common::{Over, number, on_mesh};
use run::{Bench, Lay, serial};
use table::{Row, rows};

/// Sizes of an axis: none, one, fewer than ranks, as many, more, a prime.
fn sizes(ranks: usize) -> Vec<usize> {
    let mut all = vec![0, 1, ranks - 1, ranks, ranks + 1, 7];
    all.sort_unstable();
    all.dedup();
    all
}

/// In how many ways one operand lies over one mesh dimension.
fn ways(row: &Row) -> Vec<Vec<Sbp>> {
    let splits = |shape: &[usize]| (0..shape.len()).map(Sbp::Split).collect::<Vec<_>>();
    let mut all = Vec::new();
    for (shape, _) in &row.operands {
        let mut own = vec![Sbp::Broadcast, Sbp::partial_sum()];
        own.extend(splits(shape));
        all.push(own);
    }
    for shape in row
        .numbers
        .iter()
        .map(|n| &n.0)
        .chain(row.params.iter().map(|p| &p.0))
    {
        all.push([vec![Sbp::Broadcast], splits(shape)].concat());
    }
    all
}

/// All combinations of one mesh dimension.
fn combinations(row: &Row) -> Vec<Vec<Sbp>> {
    ways(row).iter().fold(vec![Vec::new()], |all, own| {
        let longer = |one: Vec<Sbp>| own.iter().map(move |s| [&one[..], &[*s]].concat());
        all.into_iter().flat_map(longer).collect()
    })
}

#[derive(Clone, Copy, Debug, Default)]
struct Counts {
    combinations: usize,
    direct: usize,
    refused: usize,
}

impl std::ops::AddAssign for Counts {
    fn add_assign(&mut self, other: Counts) {
        self.combinations += other.combinations;
        self.direct += other.direct;
        self.refused += other.refused;
    }
}

/// Which of the combinations run: every `every`-th, by a hash.
#[derive(Clone, Copy)]
struct Choice {
    every: usize,
    uneven: bool,
    precision: Precision,
    most: usize,
    /// Every how manyth operation runs.
    rows: usize,
}

/// How many times as often declared combinations are drawn, in each mesh dimension.
const DECLARED: usize = 3;

const FULL: Choice = Choice {
    every: 1,
    uneven: false,
    precision: Precision::F32,
    most: usize::MAX,
    rows: 1,
};

/// Runs what was chosen on one mesh.
fn on(mesh: &[usize], sizes: &[usize], choice: Choice) -> Counts {
    let ranks: usize = mesh.iter().product();
    let made = on_mesh(Over::Thread, mesh, |placement| {
        let mut bench = Bench::new(placement, choice.precision);
        let mut tape = Tape::new(Threads(1));
        for &n in sizes {
            for (i, row) in rows(n, ranks).iter().enumerate() {
                // On three dimensions one operation that must convert prices hundreds of layouts.
                if (choice.precision == Precision::Bf16 && !row.is_product)
                    || !(i + n).is_multiple_of(choice.rows)
                {
                    continue;
                }
                let mut want = None;
                let one = combinations(row);
                let number_of = one.len().pow(mesh.len() as u32);
                let declared: Vec<usize> = (0..one.len())
                    .filter(|c| row.direct.contains(&one[*c]))
                    .collect();
                for k in 0..number_of.min(choice.most) {
                    // Over three dimensions there are too many to look at each: some are drawn, half of them of declared ones.
                    let code = match mesh.len() {
                        1 | 2 => k,
                        _ => (0..mesh.len()).fold(0, |code, d| {
                            let drawn = (number(&[ranks, n, i, k, d]).abs() * 1e6) as usize;
                            let digit = match k.is_multiple_of(2) && !declared.is_empty() {
                                true => declared[drawn % declared.len()],
                                false => drawn % one.len(),
                            };
                            code * one.len() + digit
                        }),
                    };
                    let key = [ranks, n, i, code, usize::from(choice.uneven)];
                    let drawn = (number(&key).abs() * 1e6) as usize;
                    let digit = |d: usize| code / one.len().pow(d as u32) % one.len();
                    let own: Vec<usize> = (0..mesh.len()).map(digit).collect();
                    // Of combinations that run as they are more are drawn: they are few.
                    let more = if own.iter().all(|c| declared.contains(c)) {
                        DECLARED.pow(mesh.len() as u32)
                    } else {
                        1
                    };
                    if !drawn.is_multiple_of((choice.every / more).max(1)) {
                        continue;
                    }
                    let operands = one[0].len();
                    let sbp = (0..operands).map(|o| own.iter().map(|c| one[*c][o]).collect());
                    let lay = Lay {
                        sbp: sbp.collect(),
                        uneven: choice.uneven,
                    };
                    let want = want.get_or_insert_with(|| serial(&mut tape, row, choice.precision));
                    bench.check(row, want, &lay);
                }
                let drawn = (number(&[ranks, n, i]).abs() * 1e6) as usize;
                if mesh.len() == 1 && !choice.uneven && drawn.is_multiple_of(choice.every) {
                    let want = want.get_or_insert_with(|| serial(&mut tape, row, choice.precision));
                    bench.check_extremes(row, want);
                }
            }
        }
        let counts = Counts {
            combinations: bench.combinations,
            direct: bench.direct,
            refused: bench.refused,
        };
        (bench.failures, counts)
    });
    // What follows a rank's first failure may be no more than that it fell out of step.
    let first: Vec<String> = (made.iter().enumerate())
        .filter_map(|(rank, m)| Some(format!("\n  rank {rank}: {}", m.0.first()?)))
        .collect();
    let count = made.iter().map(|m| m.0.len()).max().unwrap_or(0);
    assert!(
        first.is_empty(),
        "{count} failures; the first ones:{}",
        first.concat()
    );
    made[0].1
}

fn in_one_dimension(ranks: usize, every: usize) -> Counts {
    let all = sizes(ranks);
    let mut counts = on(&[ranks], &all, Choice { every, ..FULL });
    let uneven = Choice {
        every: every * 4,
        uneven: true,
        ..FULL
    };
    counts += on(&[ranks], &[ranks + 1, 7], uneven);
    counts
}

fn report(name: &str, counts: Counts) {
    println!("{name}: {counts:?}");
}

#[test]
fn sample_on_one_to_three_ranks() {
    for ranks in 1..=3 {
        report(&format!("{ranks} ranks"), in_one_dimension(ranks, 10));
    }
}

#[test]
fn sample_on_four_to_six_ranks() {
    for ranks in 4..=6 {
        report(&format!("{ranks} ranks"), in_one_dimension(ranks, 24));
    }
}

/// Products round their operands; a sample of combinations.
fn in_bf16(every: usize) -> Counts {
    let choice = Choice {
        every,
        precision: Precision::Bf16,
        ..FULL
    };
    let mut counts = Counts::default();
    for ranks in 1..=6 {
        // One rank's own products in bf16 must not be empty.
        let some: Vec<usize> = sizes(ranks).into_iter().filter(|n| *n > 0).collect();
        counts += on(&[ranks], &some, choice);
    }
    counts
}

#[test]
fn sample_in_bf16() {
    report("bf16", in_bf16(16));
}

/// Pairs of combinations over both dimensions of a mesh.
fn in_two_dimensions(every: usize) -> Counts {
    let mut counts = Counts::default();
    for mesh in [[2, 2], [2, 3]] {
        for uneven in [false, true] {
            let choice = Choice {
                every: every << usize::from(uneven),
                uneven,
                ..FULL
            };
            counts += on(&mesh, &[1, 4, 7, 8], choice);
        }
    }
    counts
}

#[test]
fn sample_in_two_dimensions() {
    report("2x2 and 2x3", in_two_dimensions(2000));
}

/// Triples of combinations over the dimensions of a mesh: of every `rows`-th operation `most`, of which half are declared.
fn in_three_dimensions(mesh: [usize; 3], uneven: bool, [most, rows]: [usize; 2]) -> Counts {
    let choice = Choice {
        uneven,
        most,
        rows,
        ..FULL
    };
    on(&mesh, &[4, 7], choice)
}

#[test]
fn sample_in_three_dimensions() {
    let mut counts = in_three_dimensions([2, 1, 2], false, [2, 8]);
    counts += in_three_dimensions([1, 3, 1], true, [1, 9]);
    report("three dimensions", counts);
}

/// All combinations of one dimension, every fourth in bf16, and more pairs over two.
#[test]
#[ignore = "takes minutes; the samples above run always"]
fn all_combinations() {
    let mut all = Counts::default();
    for ranks in 1..=6 {
        let counts = in_one_dimension(ranks, 1);
        report(&format!("{ranks} ranks"), counts);
        all += counts;
    }
    let bf16 = in_bf16(4);
    report("bf16", bf16);
    all += bf16;
    let two = in_two_dimensions(200);
    report("2x2 and 2x3", two);
    all += two;
    let mut three = in_three_dimensions([2, 2, 2], false, [4, 1]);
    three += in_three_dimensions([3, 2, 1], true, [2, 1]);
    report("three dimensions", three);
    all += three;
    report("all", all);
}
