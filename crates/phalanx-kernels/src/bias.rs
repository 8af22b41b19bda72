//! Biases: added to every row, their gradient is the sum over rows.

use crate::par::ThreadPool;

/// `v`, with `relu` at least 0; NaN stays.
#[inline(always)]
fn raised(v: f32, relu: bool) -> f32 {
    let floor = if relu { 0.0 } else { f32::NEG_INFINITY };
    if v < floor { floor } else { v }
}

simd! {
    /// `y = act(y + bias)`, row by row of `bias.len()`; an empty bias adds nothing.
    pub fn finish(y: &mut [f32], bias: &[f32], relu: bool) {
        if bias.is_empty() && !relu {
            return;
        }
        if bias.is_empty() {
            return y.iter_mut().for_each(|v| *v = raised(*v, relu));
        }
        for row in y.chunks_exact_mut(bias.len()) {
            row.iter_mut().zip(bias).for_each(|(v, b)| *v = raised(*v + b, relu));
        }
    }
}

/// Rows summed one after another before they join the total. A longer chain
/// of additions would lose digits.
const ROWS: usize = 128;
/// Columns whose running sums stay in registers.
const COLUMNS: usize = 32;

/// `sums[c] = sum of rows[.][c]`. *Order*: within blocks of `ROWS` rows in
/// row order, blocks in block order.
pub fn column_sums(threads: &ThreadPool, rows: &[f32], sums: &mut [f32]) {
    let n = sums.len();
    threads.split(sums, 2 * COLUMNS, |from, sums| {
        some_column_sums(rows, n, from, sums)
    });
}

simd! {
    /// Those of columns `from ..` of `n`.
    fn some_column_sums(rows: &[f32], n: usize, from: usize, sums: &mut [f32]) {
        sums.fill(0.0);
        for block in rows.chunks(ROWS * n) {
            let mut c = 0;
            while c + COLUMNS <= sums.len() {
                let mut acc = [0.0f32; COLUMNS];
                for row in block.chunks_exact(n) {
                    for (a, &v) in acc.iter_mut().zip(&row[from + c..][..COLUMNS]) {
                        *a += v;
                    }
                }
                for (s, a) in sums[c..c + COLUMNS].iter_mut().zip(acc) {
                    *s += a;
                }
                c += COLUMNS;
            }
            for (c, s) in sums.iter_mut().enumerate().skip(c) {
                *s += block[from + c..].iter().step_by(n).fold(0.0f32, |acc, v| acc + v);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::isa::on_each_isa;
    use crate::scalar::noise;

    #[test]
    fn sums_are_right_and_equal_on_every_isa() {
        for n in [1, 5, 32, 70] {
            let rows = noise(n * 333, 1);
            let mut first: Option<Vec<f32>> = None;
            on_each_isa(|isa| {
                let mut sums = vec![0.0; n];
                column_sums(&ThreadPool::default(), &rows, &mut sums);
                for (c, sum) in sums.iter().enumerate() {
                    let want: f64 = rows.iter().skip(c).step_by(n).map(|&v| f64::from(v)).sum();
                    assert!((f64::from(*sum) - want).abs() < 1e-4, "{isa:?}");
                }
                assert_eq!(first.get_or_insert_with(|| sums.clone()), &sums, "{isa:?}");
            });
        }
    }
}
