//! Directions in which patches of images vary equally: the first layer of the
//! speed records' networks.

use phalanx::nn::models::resnet9::{PATCH, PATCH_LEN};
use phalanx::prelude::*;

/// Images looked at; more change nothing that matters.
const IMAGES: usize = 2000;
/// Added to every variance, so that directions without any do not explode
/// (the records' value for patches of 2 x 2).
const EPSILON: f64 = 5e-4;
/// Sweeps of rotations; a dozen numbers are diagonal after six or so.
const SWEEPS: usize = 50;

type Matrix = [[f64; PATCH_LEN]; PATCH_LEN];

/// Eigenvectors of the covariance of 2 x 2 patches, each divided by the square root
/// of its variance, largest variance first. As ResNet-9 wants them: of each
/// channel, row by row.
///
/// # Errors
///
/// Images that cannot be read.
pub fn directions(data: &dyn ImageDataset) -> Result<Vec<[f32; PATCH_LEN]>> {
    let [h, w, c] = data.image_shape();
    let mut image = vec![0.0; h * w * c];
    let mut sums: Matrix = [[0.0; PATCH_LEN]; PATCH_LEN];
    let mut count = 0.0;
    for index in 0..data.len().min(IMAGES) {
        data.read(index, &mut image)?;
        for y in 0..h + 1 - PATCH {
            for x in 0..w + 1 - PATCH {
                let patch: [f64; PATCH_LEN] = std::array::from_fn(|i| {
                    let (channel, row, column) =
                        (i / (PATCH * PATCH), i / PATCH % PATCH, i % PATCH);
                    f64::from(image[((y + row) * w + x + column) * c + channel])
                });
                for (row, a) in sums.iter_mut().zip(&patch) {
                    for (sum, b) in row.iter_mut().zip(&patch) {
                        *sum += a * b;
                    }
                }
                count += 1.0;
            }
        }
    }
    for row in &mut sums {
        row.iter_mut().for_each(|sum| *sum /= count);
    }
    let (variances, vectors) = eigen(sums);
    let mut order: Vec<usize> = (0..PATCH_LEN).collect();
    order.sort_by(|a, b| variances[*b].total_cmp(&variances[*a]));
    let direction = |i: usize| {
        let scale = (variances[i].max(0.0) + EPSILON).sqrt();
        std::array::from_fn(|row| (vectors[row][i] / scale) as f32)
    };
    Ok(order.into_iter().map(direction).collect())
}

/// Eigenvalues and, in columns, eigenvectors of a symmetric matrix, by Jacobi's
/// rotations.
fn eigen(mut a: Matrix) -> ([f64; PATCH_LEN], Matrix) {
    let mut v: Matrix =
        std::array::from_fn(|i| std::array::from_fn(|j| f64::from(u8::from(i == j))));
    for _ in 0..SWEEPS {
        for p in 0..PATCH_LEN {
            for q in p + 1..PATCH_LEN {
                if a[p][q].abs() < 1e-300 {
                    continue;
                }
                let theta = (a[q][q] - a[p][p]) / (2.0 * a[p][q]);
                let t = theta.signum() / (theta.abs() + theta.hypot(1.0));
                let cos = 1.0 / t.hypot(1.0);
                let sin = t * cos;
                let rotate = |x: f64, y: f64| (cos * x - sin * y, sin * x + cos * y);
                for row in &mut a {
                    (row[p], row[q]) = rotate(row[p], row[q]);
                }
                let (above, below) = a.split_at_mut(q);
                for (x, y) in above[p].iter_mut().zip(&mut below[0]) {
                    (*x, *y) = rotate(*x, *y);
                }
                for row in &mut v {
                    (row[p], row[q]) = rotate(row[p], row[q]);
                }
            }
        }
    }
    (std::array::from_fn(|i| a[i][i]), v)
}

#[cfg(test)]
mod tests {
    use super::*;
    use phalanx::data::cifar10::Scaling;

    #[test]
    fn patches_are_white_in_these_directions() {
        let data = synthetic::pictures(0, 200, 1, Scaling::Normalised);
        let directions = directions(&data).expect("drawn");
        assert_eq!(directions.len(), PATCH_LEN);
        let mut image = vec![0.0; 3072];
        let mut products = [[0.0; PATCH_LEN]; PATCH_LEN];
        for i in 0..200 {
            data.read(i, &mut image).expect("drawn");
            for at in (0..31).flat_map(|y| (0..31).map(move |x| (y * 32 + x) * 3)) {
                let patch: Vec<f64> = (0..3)
                    .flat_map(|c| [0, 3, 96, 99].map(|o| f64::from(image[at + o + c])))
                    .collect();
                let white: Vec<f64> = directions
                    .iter()
                    .map(|d| d.iter().zip(&patch).map(|(a, b)| f64::from(*a) * b).sum())
                    .collect();
                for (row, a) in products.iter_mut().zip(&white) {
                    for (sum, b) in row.iter_mut().zip(&white) {
                        *sum += a * b / (200.0 * 961.0);
                    }
                }
            }
        }
        for (i, row) in products.iter().enumerate() {
            for (j, value) in row.iter().enumerate() {
                let expected = f64::from(u8::from(i == j));
                // A little below one where the variance is not much above epsilon.
                assert!((value - expected).abs() < 0.15, "{i} {j}: {value}");
            }
        }
    }
}
