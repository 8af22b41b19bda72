//! Matrices as products of two thin ones. Thin matrices are kept column by
//! column (`k` runs of `n`), matrices row by row, so that every loop runs over contiguous memory.
//!
//! The compiler contracts and reorders no operation here: the same input gives the same
//! bits on all ranks, whatever their processors.

/// Number of partial sums, so that a dot product is not one long chain.
const LANES: usize = 16;

/// `a · b`: sixteen sums, folded in order.
fn dot(a: &[f32], b: &[f32]) -> f32 {
    let mut lanes = [0.0f32; LANES];
    let (a_rows, b_rows) = (a.chunks_exact(LANES), b.chunks_exact(LANES));
    let rest = a_rows.remainder().iter().zip(b_rows.remainder());
    let rest: f32 = rest.map(|(x, y)| x * y).sum();
    for (x, y) in a_rows.zip(b_rows) {
        for l in 0..LANES {
            lanes[l] += x[l] * y[l];
        }
    }
    lanes.iter().sum::<f32>() + rest
}

fn dot_f64(a: &[f32], b: &[f32]) -> f64 {
    let mut lanes = [0.0f64; LANES];
    for (x, y) in a.chunks(LANES).zip(b.chunks(LANES)) {
        for (l, (x, y)) in lanes.iter_mut().zip(x.iter().zip(y)) {
            *l += f64::from(*x) * f64::from(*y);
        }
    }
    lanes.iter().sum()
}

fn add_scaled(to: &mut [f32], factor: f32, from: &[f32]) {
    to.iter_mut().zip(from).for_each(|(t, f)| *t += factor * f);
}

/// `p = m · q`: column `k` of `p` is `m` times column `k` of `q`.
pub(crate) fn multiply(m: &[f32], columns: usize, q: &[f32], p: &mut [f32]) {
    let rows = m.len() / columns;
    for (i, row) in m.chunks_exact(columns).enumerate() {
        for (k, q) in q.chunks_exact(columns).enumerate() {
            p[k * rows + i] = dot(row, q);
        }
    }
}

/// `q = mᵀ · p`.
pub(crate) fn multiply_transposed(m: &[f32], columns: usize, p: &[f32], q: &mut [f32]) {
    let rows = m.len() / columns;
    q.fill(0.0);
    for (i, row) in m.chunks_exact(columns).enumerate() {
        for (k, q) in q.chunks_exact_mut(columns).enumerate() {
            add_scaled(q, p[k * rows + i], row);
        }
    }
}

/// `m = p · qᵀ`.
pub(crate) fn product(p: &[f32], q: &[f32], columns: usize, m: &mut [f32]) {
    let rows = m.len() / columns;
    for (i, row) in m.chunks_exact_mut(columns).enumerate() {
        row.fill(0.0);
        for (k, q) in q.chunks_exact(columns).enumerate() {
            add_scaled(row, p[k * rows + i], q);
        }
    }
}

/// Makes the columns of length `n` orthonormal, each against those before
/// (Gram and Schmidt, in float64, twice: Giraud et al., "The loss of
/// orthogonality in the Gram-Schmidt orthogonalization process", 2005). A column that
/// depends on those before becomes zeros, which `replace` may fill with new values,
/// once.
pub(crate) fn orthonormalize(
    columns: &mut [f32],
    n: usize,
    mut replace: impl FnMut(usize, &mut [f32]),
) {
    /// The relative rounding error in float32 of a column in the span of the others.
    const DEPENDENT: f64 = 1e-6;
    for k in 0..columns.len() / n.max(1) {
        let (before, rest) = columns.split_at_mut(k * n);
        let column = &mut rest[..n];
        for attempt in 0..2 {
            let whole = dot_f64(column, column).sqrt();
            for _ in 0..2 {
                for other in before.chunks_exact(n) {
                    let along = dot_f64(other, column);
                    let pairs = column.iter_mut().zip(other);
                    pairs.for_each(|(c, o)| *c = (f64::from(*c) - along * f64::from(*o)) as f32);
                }
            }
            let left = dot_f64(column, column).sqrt();
            // A NaN is kept, so that the vote finds it.
            if left > DEPENDENT * whole || left.is_nan() {
                column
                    .iter_mut()
                    .for_each(|c| *c = (f64::from(*c) / left) as f32);
                break;
            }
            column.fill(0.0);
            if attempt == 0 {
                replace(k, column);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn value(i: usize) -> f32 {
        let mixed = (i as u32 + 17).wrapping_mul(0x9E37_79B9);
        ((mixed ^ (mixed >> 15)) % 2001) as f32 / 1000.0 - 1.0
    }

    fn matrix(rows: usize, columns: usize) -> Vec<f32> {
        (0..rows * columns).map(value).collect()
    }

    #[test]
    fn products_equal_those_in_float64() {
        for (rows, columns, rank) in [(1, 1, 1), (3, 50, 2), (40, 33, 4), (5, 16, 5)] {
            let m = matrix(rows, columns);
            let q: Vec<f32> = (0..rank * columns).map(|i| value(i + 7)).collect();
            let at = |i: usize, j: usize| f64::from(m[i * columns + j]);
            let mut p = vec![0.0; rank * rows];
            multiply(&m, columns, &q, &mut p);
            for k in 0..rank {
                for i in 0..rows {
                    let want: f64 = (0..columns)
                        .map(|j| at(i, j) * f64::from(q[k * columns + j]))
                        .sum();
                    assert!((f64::from(p[k * rows + i]) - want).abs() < 1e-5);
                }
            }
            let mut back = vec![9.0; rank * columns];
            multiply_transposed(&m, columns, &p, &mut back);
            let mut whole = vec![9.0; rows * columns];
            product(&p, &q, columns, &mut whole);
            for j in 0..columns {
                for k in 0..rank {
                    let want: f64 = (0..rows)
                        .map(|i| at(i, j) * f64::from(p[k * rows + i]))
                        .sum();
                    let got = f64::from(back[k * columns + j]);
                    assert!(
                        (got - want).abs() < 1e-4 * (1.0 + want.abs()),
                        "{got} {want}"
                    );
                }
                for i in 0..rows {
                    let want: f64 = (0..rank)
                        .map(|k| f64::from(p[k * rows + i]) * f64::from(q[k * columns + j]))
                        .sum();
                    let got = f64::from(whole[i * columns + j]);
                    assert!((got - want).abs() < 1e-5 * (1.0 + want.abs()));
                }
            }
        }
    }

    #[test]
    fn columns_become_orthonormal_and_span_what_they_spanned() {
        for (n, k) in [(1, 1), (7, 3), (100, 8), (6, 6)] {
            let before = matrix(k, n);
            let mut columns = before.clone();
            orthonormalize(&mut columns, n, |_, _| ());
            for a in 0..k {
                for b in 0..k {
                    let (a_, b_) = (&columns[a * n..(a + 1) * n], &columns[b * n..(b + 1) * n]);
                    let want = if a == b { 1.0 } else { 0.0 };
                    assert!((dot_f64(a_, b_) - want).abs() < 1e-6, "{n} {a} {b}");
                }
            }
            // A vector in the span of the columns is its own projection.
            for column in before.chunks_exact(n) {
                let mut rest = column.to_vec();
                for c in columns.chunks_exact(n) {
                    add_scaled(&mut rest, -dot(column, c), c);
                }
                assert!(dot_f64(&rest, &rest).sqrt() < 1e-5);
            }
        }
    }

    #[test]
    fn dependent_columns_become_zeros_or_what_is_put_for_them() {
        let mut columns = [1.0, 2.0, 3.0, 2.0, 4.0, 6.0, 0.0, 0.0, 0.0];
        orthonormalize(&mut columns, 3, |_, _| ());
        assert_eq!(columns[3..], [0.0; 6]);
        let mut asked = Vec::new();
        let mut columns = [1.0, 2.0, 3.0, 2.0, 4.0, 6.0];
        orthonormalize(&mut columns, 3, |k, column| {
            asked.push(k);
            column.copy_from_slice(&[0.0, 1.0, 5.0]);
        });
        assert_eq!(asked, [1]);
        assert!((dot_f64(&columns[3..], &columns[3..]) - 1.0).abs() < 1e-6);
        assert!(dot_f64(&columns[..3], &columns[3..]).abs() < 1e-6);
        let mut columns = [f32::NAN, 1.0];
        orthonormalize(&mut columns, 2, |_, _| ());
        assert!(columns[0].is_nan());
    }
}
