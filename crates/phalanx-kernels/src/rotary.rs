//! Rotary positions.

simd! {
    /// Rotates the points of a row's vectors by the angles of these cosines and sines.
    pub fn rotate(row: &mut [f32], cosines: &[f32], sines: &[f32], sign: f32) {
        let half = cosines.len();
        for vector in row.chunks_exact_mut(2 * half) {
            let (a, b) = vector.split_at_mut(half);
            for ((a, b), (c, s)) in a.iter_mut().zip(b).zip(cosines.iter().zip(sines)) {
                let s = s * sign;
                (*a, *b) = (*a * c - *b * s, *b * c + *a * s);
            }
        }
    }
}
