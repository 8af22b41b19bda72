//! Averages of weights.

use super::lerp;

simd! {
    /// Moves averages towards `values` by this share of the difference.
    pub fn average(averages: &mut [f32], values: &[f32], weight: f32) {
        for (average, &value) in averages.iter_mut().zip(values) {
            *average = lerp(*average, value, weight);
        }
    }
}
