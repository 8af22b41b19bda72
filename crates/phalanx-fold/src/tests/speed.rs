//! Speed of the kernels compared with that of memory; see the README of the parent
//! directory for figures.

use std::hint::black_box;
use std::time::Instant;

use super::*;

/// Passes over the data of one timing, and timings of which the best counts:
/// other work on the machine only ever makes them longer.
const TIMINGS: usize = 7;

/// One cell: sources, and whether the result goes over the first, apart, or
/// over all of them.
const SHAPES: [(usize, Into); 7] = [
    (2, Into::Over(0)),
    (2, Into::Apart),
    (3, Into::Over(0)),
    (4, Into::Over(0)),
    (8, Into::Over(0)),
    (2, Into::Everywhere),
    (4, Into::Everywhere),
];

/// Seconds of the best of several timings of `f`.
fn best(bytes: usize, mut f: impl FnMut()) -> f64 {
    // Long enough for the clock, short enough for a table.
    let passes = (8 << 20) / bytes.max(1) + 1;
    f();
    (0..TIMINGS)
        .map(|_| {
            let start = Instant::now();
            for _ in 0..passes {
                f();
            }
            start.elapsed().as_secs_f64() / passes as f64
        })
        .fold(f64::INFINITY, f64::min)
}

/// GB/s of memory read and written by the fold.
fn fold_speed(isa: Isa, dtype: DType, op: ReduceOp, shape: (usize, Into), bytes: usize) -> f64 {
    let (ranks, into) = shape;
    let count = bytes / dtype.size_bytes();
    // Words, for their alignment.
    let mut apart = vec![0_u64; bytes / 8];
    let mut data = vec![apart.clone(); ranks];
    let all: Vec<*mut u8> = data.iter_mut().map(|d| d.as_mut_ptr().cast()).collect();
    let sources: Vec<Source> = all.iter().map(|p| p.cast_const()).collect();
    let written = match into {
        Into::Apart => vec![apart.as_mut_ptr().cast()],
        Into::Over(i) => vec![all[i]],
        Into::Everywhere => all.clone(),
    };
    let seconds = best(bytes * ranks, || {
        // SAFETY: all buckets hold `count` elements; those written are
        // sources or apart from all; the instruction set is one that is there.
        unsafe {
            fold_on(
                isa,
                dtype,
                op,
                black_box(&written),
                black_box(&sources),
                count,
                Some(ranks),
            );
        }
    });
    ((ranks + written.len()) * bytes) as f64 / seconds / 1e9
}

/// GB/s of memory read and written by `memcpy`, the yardstick.
fn copy_speed(bytes: usize) -> f64 {
    let from = vec![1_u8; bytes];
    let mut to = vec![0_u8; bytes];
    let seconds = best(bytes, || {
        black_box(&mut to).copy_from_slice(black_box(&from))
    });
    2.0 * bytes as f64 / seconds / 1e9
}

fn list(variable: &str, default: &str) -> Vec<String> {
    let text = std::env::var(variable).unwrap_or_else(|_| default.into());
    text.split_whitespace().map(str::to_owned).collect()
}

/// Prints a table of GB/s read and written. `KINDS`, `OPS` and `KIB` (per
/// source) choose rows; see the README for the command.
#[test]
#[ignore = "a benchmark: prints a table"]
fn speed() {
    let kinds = list("KINDS", "f32 f64 bf16 f16 i8 u8 i16 u16 i32 u32 i64 u64");
    let ops = list("OPS", "mean sum");
    for kib in list("KIB", "4 128 16384") {
        let bytes = kib.parse::<usize>().expect("KIB") << 10;
        println!("{kib} KiB per source; memcpy {:.1} GB/s", copy_speed(bytes));
        println!("  kind  op       isa     2 in   2 out  3 in   4 in   8 in   2 all  4 all");
        for dtype in DType::ALL {
            if !kinds.iter().any(|kind| kind == dtype.name()) {
                continue;
            }
            for op in ops
                .iter()
                .filter_map(|name| ReduceOp::ALL.into_iter().find(|op| op.name() == name))
                .filter(|op| op.supports(dtype))
            {
                for isa in Isa::available() {
                    print!("  {:5} {:8} {:6}", dtype.name(), op.name(), isa.to_string());
                    for shape in SHAPES {
                        print!(" {:6.1}", fold_speed(isa, dtype, op, shape, bytes));
                    }
                    println!();
                }
            }
        }
    }
}
