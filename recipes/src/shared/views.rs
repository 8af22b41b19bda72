//! Views of one image whose scores are averaged.

use phalanx::nn::{Result, Tensor};

/// The views of an image that a network is tested on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum Views {
    /// The image
    One,
    /// The image and its mirror image
    Mirrored,
    /// Six views: the image and its shifts by one pixel (up and left, down and right), each also mirrored; unshifted views
    /// have twice the weight
    Shifted,
}

impl Views {
    /// Of an image (H, W, C): how far it is shifted down and right, whether it is mirrored, and its weight.
    fn list(self) -> &'static [(isize, bool, f32)] {
        match self {
            Views::One => &[(0, false, 1.0)],
            Views::Mirrored => &[(0, false, 0.5), (0, true, 0.5)],
            Views::Shifted => &[
                (0, false, 0.25),
                (0, true, 0.25),
                (-1, false, 0.125),
                (-1, true, 0.125),
                (1, false, 0.125),
                (1, true, 0.125),
            ],
        }
    }

    /// How many there are of an image.
    pub fn count(self) -> usize {
        self.list().len()
    }

    /// The mean of the scores that `forward` gives the views of images (N, H, W, C).
    ///
    /// # Errors
    ///
    /// Those of `forward`.
    pub fn scores<'s>(
        self,
        images: &[f32],
        [_, h, w, c]: [usize; 4],
        mut forward: impl FnMut(&[f32]) -> Result<Tensor<'s>>,
    ) -> Result<Tensor<'s>> {
        let mut sum: Option<Tensor<'s>> = None;
        for &(shift, is_mirrored, weight) in self.list() {
            if self == Views::One {
                return forward(images);
            }
            let view = view(images, [h, w, c], shift, is_mirrored);
            let scores = forward(&view)?.scale(weight)?;
            sum = Some(match sum {
                Some(sum) => sum.add(scores)?,
                None => scores,
            });
        }
        match sum {
            Some(sum) => Ok(sum),
            None => forward(images),
        }
    }
}

/// Images (N, H, W, C) shifted down and right by `shift`, their edges reflected, then mirrored.
fn view(images: &[f32], [h, w, c]: [usize; 3], shift: isize, is_mirrored: bool) -> Vec<f32> {
    let source = |at: usize, len: usize| {
        let last = len as isize - 1;
        let at = (at as isize - shift).abs();
        at.min(2 * last - at).unsigned_abs().min(len - 1)
    };
    let mut out = Vec::with_capacity(images.len());
    for image in images.chunks_exact((h * w * c).max(1)) {
        for y in 0..h {
            let row = &image[source(y, h) * w * c..][..w * c];
            for x in 0..w {
                let x = source(if is_mirrored { w - 1 - x } else { x }, w);
                out.extend_from_slice(&row[x * c..][..c]);
            }
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn views_are_shifted_and_mirrored() {
        // Two images of 1 x 2 pixels of 3 channels.
        let images: Vec<f32> = (0..12).map(|i| i as f32).collect();
        let mirrored = |images: &[f32]| view(images, [1, 2, 3], 0, true);
        let expected = [3., 4., 5., 0., 1., 2., 9., 10., 11., 6., 7., 8.];
        assert_eq!(mirrored(&images), expected);
        assert_eq!(mirrored(&mirrored(&images)), images);
        // One of 3 x 3 shades.
        let grey: Vec<f32> = (1..10).map(|i| i as f32).collect();
        let of = |shift, is_mirrored| view(&grey, [3, 3, 1], shift, is_mirrored);
        assert_eq!(of(0, false), grey);
        assert_eq!(of(1, false), [5., 4., 5., 2., 1., 2., 5., 4., 5.]);
        assert_eq!(of(-1, false), [5., 6., 5., 8., 9., 8., 5., 6., 5.]);
        assert_eq!(of(1, true), [5., 4., 5., 2., 1., 2., 5., 4., 5.]);
    }

    #[test]
    fn weights_sum_to_one() {
        for views in [Views::One, Views::Mirrored, Views::Shifted] {
            assert_eq!(views.list().iter().map(|view| view.2).sum::<f32>(), 1.0);
        }
    }
}
