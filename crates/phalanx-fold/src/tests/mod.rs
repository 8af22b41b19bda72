//! Tests every instruction set against an independent oracle.

mod bounds;
mod conversions;
mod oracle;
mod speed;

use self::oracle::Oracle;
use super::*;
use half::{bf16, f16};

/// Where the results go.
#[derive(Clone, Copy, Debug)]
enum Into {
    /// To separate memory.
    Apart,
    /// Over the source of this number.
    Over(usize),
    /// Over all sources, and to separate memory.
    Everywhere,
}

/// Folds `sources` and returns everything that was written.
fn run<T: Oracle>(
    isa: Isa,
    op: ReduceOp,
    sources: &[Vec<T>],
    into: Into,
    finish: bool,
) -> Vec<Vec<T>> {
    let count = sources[0].len();
    let world = finish.then_some(sources.len());
    let mut sources = sources.to_vec();
    let mut apart = vec![T::default(); count];
    let addresses: Vec<*mut u8> = sources
        .iter_mut()
        .map(|s| s.as_mut_ptr().cast::<u8>())
        .collect();
    let written: Vec<*mut u8> = match into {
        Into::Apart => vec![apart.as_mut_ptr().cast()],
        Into::Over(i) => vec![addresses[i]],
        Into::Everywhere => {
            let mut all = addresses.clone();
            all.push(apart.as_mut_ptr().cast());
            all
        }
    };
    let from: Vec<Source> = addresses.iter().map(|a| a.cast_const()).collect();
    // SAFETY: all runs have `count` elements; those written are sources or
    // apart from all; the instruction set is one of this processor's.
    unsafe { fold_on(isa, T::dtype(), op, &written, &from, count, world) };
    match into {
        Into::Apart => vec![apart],
        Into::Over(i) => vec![sources.swap_remove(i)],
        Into::Everywhere => {
            sources.push(apart);
            sources
        }
    }
}

/// `count` values of every source: random bits, numbers of like size, and one
/// special value in four.
fn values<T: Oracle>(sources: usize, count: usize, seed: u64) -> Vec<Vec<T>> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let specials = T::specials();
    (0..sources)
        .map(|_| {
            (0..count)
                .map(|_| {
                    state ^= state << 13;
                    state ^= state >> 7;
                    state ^= state << 17;
                    match state >> 62 {
                        0 => specials[(state as usize >> 8) % specials.len()],
                        1 => T::from_bits(state >> 3),
                        _ => {
                            let unit = (state >> 20) as f64 / (1u64 << 44) as f64 - 0.5;
                            T::from_f64(unit * f64::from(1u32 << (state % 13) as u32))
                        }
                    }
                })
                .collect()
        })
        .collect()
}

#[track_caller]
fn check<T: Oracle>(isa: Isa, op: ReduceOp, sources: &[Vec<T>], into: Into, finish: bool) {
    let world = finish.then_some(sources.len());
    for got in run(isa, op, sources, into, finish) {
        for (i, got) in got.iter().enumerate() {
            let each: Vec<T> = sources.iter().map(|s| s[i]).collect();
            let want = T::fold(op, &each, world);
            assert_eq!(
                got.bits(),
                want.bits(),
                "{isa} {} {op} of {each:?} (element {i} of {}, {into:?}): {got:?}, not {want:?}",
                T::dtype(),
                sources[0].len(),
            );
        }
    }
}

fn ops<T: Oracle>() -> impl Iterator<Item = ReduceOp> {
    ReduceOp::ALL
        .into_iter()
        .filter(|op| op.supports(T::dtype()))
}

macro_rules! on_every_type {
    ($check:ident $(, $arg:expr)*) => {
        $check::<f32>($($arg),*);
        $check::<f64>($($arg),*);
        $check::<f16>($($arg),*);
        $check::<bf16>($($arg),*);
        $check::<i8>($($arg),*);
        $check::<u8>($($arg),*);
        $check::<i32>($($arg),*);
        $check::<i64>($($arg),*);
        $check::<i16>($($arg),*);
        $check::<u16>($($arg),*);
        $check::<u32>($($arg),*);
        $check::<u64>($($arg),*);
    };
}
use on_every_type;

#[test]
fn folds_equal_the_oracle_on_every_instruction_set() {
    fn grid<T: Oracle>(isa: Isa) {
        for op in ops::<T>() {
            for sources in [1usize, 2, 3, 4, 8, 9] {
                let wheres = [
                    Into::Apart,
                    Into::Over(0),
                    Into::Over(sources / 2),
                    Into::Over(sources - 1),
                    Into::Everywhere,
                ];
                // Whole blocks of four vectors, whole vectors, and parts, for
                // vectors of 1 to 64 elements.
                for (n, count) in [0usize, 1, 2, 3, 7, 15, 33, 63, 64, 100, 255, 256, 331, 700]
                    .into_iter()
                    .enumerate()
                {
                    let values = values::<T>(sources, count, (n + sources) as u64);
                    check(isa, op, &values, wheres[n % wheres.len()], n % 3 > 0);
                    check(isa, op, &values, wheres[(n + sources) % wheres.len()], true);
                }
            }
        }
    }
    for isa in Isa::available() {
        on_every_type!(grid, isa);
    }
}

#[test]
fn special_values_meet_one_another_on_every_instruction_set() {
    fn meet<T: Oracle>(isa: Isa) {
        let specials = T::specials();
        let n = specials.len();
        let third = |divide: usize| -> Vec<T> {
            let all = 0..n * n * n;
            all.map(|i| specials[i / divide % n]).collect()
        };
        let triples = [third(1), third(n), third(n * n)];
        for op in ops::<T>() {
            check(isa, op, &triples[..2], Into::Apart, true);
            check(isa, op, &triples, Into::Over(1), true);
            check(isa, op, &triples, Into::Everywhere, false);
        }
    }
    for isa in Isa::available() {
        on_every_type!(meet, isa);
    }
}

#[test]
fn addresses_need_no_alignment_but_the_types() {
    fn shifted<T: Oracle>(isa: Isa) {
        let values = values::<T>(2, 301, 5);
        for shift in 1..4 {
            let mut into = [T::default(); 301];
            let sources: Vec<Source> = values.iter().map(|s| s[shift..].as_ptr().cast()).collect();
            let to = into[3 - shift..].as_mut_ptr().cast();
            // SAFETY: 298 elements are left in each run.
            unsafe { fold_on(isa, T::dtype(), ReduceOp::Max, &[to], &sources, 298, None) };
            for i in 0..298 {
                let want = T::fold(
                    ReduceOp::Max,
                    &[values[0][shift + i], values[1][shift + i]],
                    None,
                );
                assert_eq!(
                    into[3 - shift + i].bits(),
                    want.bits(),
                    "{isa} {}",
                    T::dtype()
                );
            }
        }
    }
    for isa in Isa::available() {
        on_every_type!(shifted, isa);
    }
}

#[test]
fn sixteen_bit_types_round_once() {
    fn once<T: Oracle>(epsilon: f64) {
        let (one, tiny) = (T::from_f64(1.0), T::from_f64(epsilon));
        let sources = vec![
            vec![one; 70],
            vec![tiny; 70],
            vec![tiny; 70],
            vec![tiny; 70],
        ];
        for isa in Isa::available() {
            let got = run(isa, ReduceOp::Sum, &sources, Into::Over(1), false);
            // Rounding at every addition would lose each addend.
            assert_eq!(got[0], vec![T::from_f64(1.0 + 3.0 * epsilon); 70]);
            assert_ne!(got[0][0], one);
        }
    }
    once::<bf16>(1.0 / 512.0);
    once::<f16>(1.0 / 4096.0);
}

#[test]
fn nan_wins_min_and_max_wherever_it_sits() {
    for isa in Isa::available() {
        for at in 0..3 {
            let mut sources = vec![vec![1.0f32; 40], vec![-2.0; 40], vec![3.0; 40]];
            sources[at].fill(f32::from_bits(0xff80_1234));
            for op in [ReduceOp::Min, ReduceOp::Max] {
                let got = run(isa, op, &sources, Into::Over(at), false);
                assert!(got[0].iter().all(|x| x.to_bits() == 0x7fc0_0000));
            }
        }
    }
}

#[test]
fn lowest_ranks_zero_is_kept() {
    for isa in Isa::available() {
        for op in [ReduceOp::Min, ReduceOp::Max] {
            let sources = vec![vec![-0.0f32; 40], vec![0.0; 40]];
            for into in [Into::Apart, Into::Over(0), Into::Over(1)] {
                let got = run(isa, op, &sources, into, false);
                assert!(got[0].iter().all(|x| x.is_sign_negative()));
            }
        }
    }
}

#[test]
fn integers_wrap() {
    fn fold<T: Oracle>(op: ReduceOp, a: T, x: T) -> T {
        run(
            Isa::available()[0],
            op,
            &[vec![a], vec![x]],
            Into::Apart,
            false,
        )[0][0]
    }
    assert_eq!(fold(ReduceOp::Sum, 250u8, 10), 4);
    assert_eq!(fold(ReduceOp::Product, 250u8, 10), 196);
    assert_eq!(fold(ReduceOp::Sum, 100i8, 100), -56);
    assert_eq!(fold(ReduceOp::Sum, i64::MAX, 1), i64::MIN);
    assert_eq!(fold(ReduceOp::Sum, u16::MAX, 2), 1);
    assert_eq!(fold(ReduceOp::Product, u64::MAX, 2), u64::MAX - 1);
    assert_eq!(fold(ReduceOp::Max, u32::MAX, 1), u32::MAX);
    assert_eq!(fold(ReduceOp::Sum, i32::MIN, -1), i32::MAX);
}
