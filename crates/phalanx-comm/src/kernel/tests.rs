use super::*;

/// Numbers of mixed sign and size whose sums depend on the order.
fn noise(seed: u64, n: usize) -> Vec<f64> {
    let mut s = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    (0..n)
        .map(|_| {
            s ^= s << 13;
            s ^= s >> 7;
            s ^= s << 17;
            let unit = (s >> 11) as f64 / (1u64 << 53) as f64 - 0.5;
            unit * f64::from(1u32 << (s % 13) as u32)
        })
        .collect()
}

/// Runs `fold` on vectors; `alias` makes the destination equal to a source.
fn run<T: crate::Element>(
    op: ReduceOp,
    sources: &[Vec<T>],
    alias: Option<usize>,
    mean: bool,
) -> Vec<T> {
    let n = sources[0].len();
    let mut dst = match alias {
        Some(i) => sources[i].clone(),
        None => vec![T::default(); n],
    };
    let out = dst.as_mut_ptr();
    let addresses: Vec<Source> = sources
        .iter()
        .enumerate()
        .map(|(i, s)| {
            if Some(i) == alias {
                out.cast_const().cast()
            } else {
                s.as_ptr().cast()
            }
        })
        .collect();
    // SAFETY: all runs have `n` elements; the aliased source equals `dst`.
    unsafe {
        fold(
            T::DTYPE,
            op,
            out.cast(),
            &addresses,
            n,
            mean.then_some(sources.len()),
        );
    }
    dst
}

fn bits32(v: &[f32]) -> Vec<u32> {
    v.iter().map(|x| x.to_bits()).collect()
}

#[test]
fn f32_sum_is_the_left_fold_bit_for_bit() {
    for k in [1usize, 2, 3, 5, 8] {
        for n in [0usize, 1, 7, 2047, 2048, 2049, 5000] {
            let sources: Vec<Vec<f32>> = (0..k)
                .map(|r| noise(r as u64 + 1, n).iter().map(|x| *x as f32).collect())
                .collect();
            let want: Vec<f32> = (0..n)
                .map(|i| {
                    let mut a = sources[0][i];
                    for s in &sources[1..] {
                        a += s[i];
                    }
                    a
                })
                .collect();
            let mean: Vec<f32> = want.iter().map(|x| x * (1.0 / k as f32)).collect();
            for alias in [None, Some(0), Some(k / 2), Some(k - 1)] {
                assert_eq!(
                    bits32(&run(ReduceOp::Sum, &sources, alias, false)),
                    bits32(&want),
                    "k={k} n={n} alias={alias:?}"
                );
                assert_eq!(
                    bits32(&run(ReduceOp::Mean, &sources, alias, true)),
                    bits32(&mean),
                    "k={k} n={n} alias={alias:?}"
                );
            }
        }
    }
}

#[test]
fn sixteen_bit_types_round_once() {
    // 1 + 2⁻⁹ + 2⁻⁹ + 2⁻⁹ in bf16 (8 bits): rounding at every addition would
    // lose each addend, rounding once keeps their sum.
    let one = bf16::from_f32(1.0);
    let tiny = bf16::from_f32(1.0 / 512.0);
    let sources = vec![vec![one; 3], vec![tiny; 3], vec![tiny; 3], vec![tiny; 3]];
    let got = run(ReduceOp::Sum, &sources, Some(1), false);
    assert_eq!(got[0], bf16::from_f32(1.0 + 3.0 / 512.0));
    assert_ne!(got[0], one);
    let one = f16::from_f32(1.0);
    let tiny = f16::from_f32(1.0 / 4096.0);
    let sources = vec![
        vec![one; 70],
        vec![tiny; 70],
        vec![tiny; 70],
        vec![tiny; 70],
    ];
    let got = run(ReduceOp::Sum, &sources, None, false);
    assert_eq!(got[69], f16::from_f32(1.0 + 3.0 / 4096.0));
    assert_ne!(got[69], one);
}

#[test]
fn bf16_conversion_equals_the_half_crate() {
    for high in 0..=u16::MAX {
        let b = bf16::from_bits(high);
        if !b.is_nan() {
            assert_eq!(lane::bf16_to_f32(b).to_bits(), b.to_f32().to_bits());
        }
        for low in [0u32, 1, 0x7fff, 0x8000, 0x8001, 0xffff] {
            let x = f32::from_bits(u32::from(high) << 16 | low);
            let (got, want) = (lane::bf16_from_f32(x), bf16::from_f32(x));
            assert_eq!(got.to_bits(), want.to_bits(), "{x:e} {:08x}", x.to_bits());
        }
    }
}

#[test]
fn nan_wins_min_and_max_wherever_it_sits() {
    for at in 0..3 {
        let mut sources = vec![vec![1.0f32], vec![-2.0], vec![3.0]];
        sources[at][0] = f32::NAN;
        for alias in [None, Some(0), Some(2)] {
            assert!(run(ReduceOp::Min, &sources, alias, false)[0].is_nan());
            assert!(run(ReduceOp::Max, &sources, alias, false)[0].is_nan());
        }
    }
    let clean = vec![vec![1.0f64], vec![-2.0], vec![3.0]];
    assert_eq!(run(ReduceOp::Min, &clean, None, false), [-2.0]);
    assert_eq!(run(ReduceOp::Max, &clean, None, false), [3.0]);
}

#[test]
fn lowest_ranks_zero_is_kept() {
    let sources = vec![vec![-0.0f32], vec![0.0]];
    for alias in [None, Some(0), Some(1)] {
        for op in [ReduceOp::Min, ReduceOp::Max] {
            assert!(run(op, &sources, alias, false)[0].is_sign_negative());
        }
    }
}

#[test]
fn integers_wrap() {
    let sources = vec![vec![250u8, 16], vec![10, 16]];
    assert_eq!(run(ReduceOp::Sum, &sources, None, false), [4, 32]);
    assert_eq!(run(ReduceOp::Product, &sources, Some(0), false), [196, 0]);
    let sources = vec![vec![i64::MAX], vec![1]];
    assert_eq!(run(ReduceOp::Sum, &sources, Some(1), false), [i64::MIN]);
    let sources = vec![vec![i32::MIN, 5], vec![-1, 6]];
    assert_eq!(run(ReduceOp::Sum, &sources, None, false), [i32::MAX, 11]);
    assert_eq!(run(ReduceOp::Min, &sources, None, false), [i32::MIN, 5]);
}

#[cfg(target_arch = "x86_64")]
#[test]
fn all_instruction_sets_give_the_same_bits() {
    fn check<T: crate::Element + isa::Fold>(make: impl Fn(f64) -> T) {
        let n = 4099;
        let sources: Vec<Vec<T>> = (0..5)
            .map(|r| noise(r + 40, n).into_iter().map(&make).collect())
            .collect();
        let addresses: Vec<Source> = sources.iter().map(|s| s.as_ptr().cast()).collect();
        let mut plain = vec![T::default(); n];
        let mut wide = plain.clone();
        // SAFETY: all runs have `n` elements and are disjoint.
        unsafe { isa::baseline::<T, lane::Sum>(plain.as_mut_ptr(), &addresses, n, Some(5)) };
        if std::arch::is_x86_feature_detected!("avx2") {
            // SAFETY: as above, and the feature is there.
            unsafe { isa::avx2::<T, lane::Sum>(wide.as_mut_ptr(), &addresses, n, Some(5)) };
            assert_eq!(plain, wide);
        }
        if std::arch::is_x86_feature_detected!("avx512f")
            && std::arch::is_x86_feature_detected!("avx512bw")
            && std::arch::is_x86_feature_detected!("avx512dq")
            && std::arch::is_x86_feature_detected!("avx512vl")
        {
            wide.fill(T::default());
            // SAFETY: as above, and the features are there.
            unsafe { isa::avx512::<T, lane::Sum>(wide.as_mut_ptr(), &addresses, n, Some(5)) };
            assert_eq!(plain, wide);
        }
    }
    check::<f32>(|x| x as f32);
    check::<f64>(|x| x);
    check::<bf16>(bf16::from_f64);
    check::<f16>(f16::from_f64);
    check::<i32>(|x| x as i32);
}
