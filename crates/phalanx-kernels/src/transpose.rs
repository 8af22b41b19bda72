//! Transposes of small blocks: channels-last against PyTorch's order.

use super::vector::{LANES, Vector};

/// Transposes squares of sixteen rows of `from`, `from_stride` apart: square `i` begins at `i * LANES` there, and in `to`,
/// whose rows are `to_stride` apart, at `i * LANES * to_stride`.
#[inline(always)]
unsafe fn squares_body<V: Vector>(
    from: *const f32,
    from_stride: usize,
    to: *mut f32,
    to_stride: usize,
    squares: usize,
) {
    // SAFETY: the caller's promise.
    unsafe {
        for i in 0..squares {
            let (from, to) = (from.add(i * LANES), to.add(i * LANES * to_stride));
            let mut rows = [V::splat(0.0); LANES];
            for (l, row) in rows.iter_mut().enumerate() {
                *row = V::load(from.add(l * from_stride));
            }
            for (l, row) in V::transpose(rows).into_iter().enumerate() {
                row.store(to.add(l * to_stride));
            }
        }
    }
}

vectorised! {
    /// # Safety
    /// The squares lie in both matrices, and no other code touches those of `to`.
    unsafe fn squares(
        from: *const f32, from_stride: usize, to: *mut f32, to_stride: usize, squares: usize,
    ) = squares_body
}

/// `to[c][r] = from[r][c]` for a matrix of `rows` x `cols`.
pub fn transpose(from: &[f32], to: &mut [f32], rows: usize, cols: usize) {
    assert!(from.len() == rows * cols && to.len() == rows * cols);
    let whole = cols / LANES;
    for r0 in (0..rows).step_by(LANES) {
        let left = if r0 + LANES <= rows && whole > 0 {
            // SAFETY: sixteen rows and `whole` squares of columns exist in both.
            unsafe {
                squares(
                    from[r0 * cols..].as_ptr(),
                    cols,
                    to[r0..].as_mut_ptr(),
                    rows,
                    whole,
                )
            };
            whole * LANES
        } else {
            0
        };
        for c in left..cols {
            for r in r0..rows.min(r0 + LANES) {
                to[c * rows + r] = from[r * cols + c];
            }
        }
    }
}

/// `to[i][l] = from[l][i]` for sixteen rows of `len` elements, `stride` apart in `from`.
pub(crate) fn transpose_rows(from: &[f32], stride: usize, to: &mut [f32], len: usize) {
    assert!(to.len() == len * LANES && (len == 0 || 15 * stride + len <= from.len()));
    let whole = len / LANES;
    // SAFETY: the squares lie in both slices, checked above.
    unsafe { squares(from.as_ptr(), stride, to.as_mut_ptr(), LANES, whole) };
    let done = whole * LANES;
    for (i, out) in to.chunks_exact_mut(LANES).enumerate().skip(done) {
        for (l, o) in out.iter_mut().enumerate() {
            *o = from[l * stride + i];
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_shape() {
        for (r, c) in [
            (0, 3),
            (1, 1),
            (16, 16),
            (17, 35),
            (144, 64),
            (5, 40),
            (40, 0),
        ] {
            let from: Vec<f32> = (0..r * c).map(|i| i as f32).collect();
            let mut to = vec![0.0; r * c];
            transpose(&from, &mut to, r, c);
            for i in 0..r {
                for j in 0..c {
                    assert_eq!(to[j * r + i], from[i * c + j]);
                }
            }
        }
    }

    #[test]
    fn sixteen_rows_of_a_wider_matrix() {
        for len in [0, 1, 16, 37] {
            let stride = len + 3;
            let from: Vec<f32> = (0..LANES * stride).map(|i| i as f32).collect();
            let mut to = vec![0.0; len * LANES];
            transpose_rows(&from, stride, &mut to, len);
            for i in 0..len {
                for l in 0..LANES {
                    assert_eq!(to[i * LANES + l], from[l * stride + i]);
                }
            }
        }
    }
}
