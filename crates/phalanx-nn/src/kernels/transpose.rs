//! Transposes of small blocks: channels-last against PyTorch's order.

/// Side of the blocks that are transposed at a time: both sides stay in L1.
const BLOCK: usize = 16;

simd! {
    /// `to[c][r] = from[r][c]` for a matrix of `rows` x `cols`.
    pub(crate) fn transpose(from: &[f32], to: &mut [f32], rows: usize, cols: usize) {
        assert!(from.len() == rows * cols && to.len() == rows * cols);
        let mut c0 = 0;
        while c0 < cols {
            let c1 = (c0 + BLOCK).min(cols);
            let mut r0 = 0;
            while r0 < rows {
                let r1 = (r0 + BLOCK).min(rows);
                if c1 - c0 == BLOCK && r1 - r0 == BLOCK {
                    let mut tile = [[0.0f32; BLOCK]; BLOCK];
                    for (r, row) in tile.iter_mut().enumerate() {
                        row.copy_from_slice(&from[(r0 + r) * cols + c0..][..BLOCK]);
                    }
                    for c in 0..BLOCK {
                        let out = &mut to[(c0 + c) * rows + r0..][..BLOCK];
                        for (r, o) in out.iter_mut().enumerate() {
                            *o = tile[r][c];
                        }
                    }
                } else {
                    for c in c0..c1 {
                        for r in r0..r1 {
                            to[c * rows + r] = from[r * cols + c];
                        }
                    }
                }
                r0 = r1;
            }
            c0 = c1;
        }
    }
}

simd! {
    /// `to[i][l] = from[l][i]` for sixteen rows of `len` elements, `stride` apart in `from`.
    pub(crate) fn transpose_rows(from: &[f32], stride: usize, to: &mut [f32], len: usize) {
        assert!(to.len() == len * BLOCK);
        let (blocks, rest) = to.as_chunks_mut::<{ BLOCK * BLOCK }>();
        for (at, block) in blocks.iter_mut().enumerate() {
            let mut tile = [[0.0f32; BLOCK]; BLOCK];
            for (l, row) in tile.iter_mut().enumerate() {
                row.copy_from_slice(&from[l * stride + at * BLOCK..][..BLOCK]);
            }
            for (i, out) in block.chunks_exact_mut(BLOCK).enumerate() {
                for (l, o) in out.iter_mut().enumerate() {
                    *o = tile[l][i];
                }
            }
        }
        let done = blocks.len() * BLOCK;
        for (i, out) in rest.chunks_exact_mut(BLOCK).enumerate() {
            for (l, o) in out.iter_mut().enumerate() {
                *o = from[l * stride + done + i];
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_shape() {
        for (r, c) in [(0, 3), (1, 1), (16, 16), (17, 35), (144, 64), (5, 40)] {
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
            let from: Vec<f32> = (0..BLOCK * stride).map(|i| i as f32).collect();
            let mut to = vec![0.0; len * BLOCK];
            transpose_rows(&from, stride, &mut to, len);
            for i in 0..len {
                for l in 0..BLOCK {
                    assert_eq!(to[i * BLOCK + l], from[l * stride + i]);
                }
            }
        }
    }
}
