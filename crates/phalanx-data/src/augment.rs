//! Augmentation of training images: random shifts, flips and cutout.
//!
//! The augmentation of a sample depends on (seed, epoch, sample) alone, not on the rank,
//! the loader thread or the batch. Loader threads do it ahead of the training step.

use std::sync::Arc;

use phalanx_nn::rng::philox::{philox4x32_10, unit_f32};

use crate::ImageDataset;
use crate::dataset::check_read;
use phalanx_base::{Result, refuse};

/// Separates these random numbers from others with the same seed.
const STREAM: u32 = 0x6175_676d; // "augm"

/// Values of pixels that a shift moves in from outside the image.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Edge {
    /// A constant for each channel (images of one channel use the first), for example a
    /// black pixel after scaling, as torchvision's `RandomCrop(padding=N)`.
    Constant([f32; 3]),
    /// The image reflected at its edge, without repeating the edge
    /// (`padding_mode="reflect"`).
    Reflected,
}

/// Horizontal flips.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Flip {
    /// No flips.
    Never,
    /// Each sample at random, with probability 1/2 in each epoch.
    Random,
    /// Each sample in every other epoch, half of the samples in the first (Jordan, "94% on
    /// CIFAR-10 in 3.29 seconds", 2024).
    Alternating,
}

/// Settings of the augmentation.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Augmentation {
    /// Maximum shift in pixels in each direction, as a random crop after padding by this
    /// number of pixels.
    pub shift: usize,
    /// Pixels from outside the image.
    pub edge: Edge,
    /// Horizontal flips.
    pub flip: Flip,
    /// Side of a square of zeros at a random position (cutout); 0 for none. Zero is the
    /// mean of normalized images.
    pub cutout: usize,
}

impl Augmentation {
    /// torchvision's `RandomCrop(32, padding=4)` and `RandomHorizontalFlip()`;
    /// `black` is a black pixel.
    pub fn standard(black: [f32; 3]) -> Augmentation {
        Augmentation {
            shift: 4,
            edge: Edge::Constant(black),
            flip: Flip::Random,
            cutout: 0,
        }
    }

    /// As in the CIFAR-10 speed records: shifts of 2 pixels, reflected edges, alternating
    /// flips.
    pub fn fast() -> Augmentation {
        Augmentation {
            shift: 2,
            edge: Edge::Reflected,
            flip: Flip::Alternating,
            cutout: 0,
        }
    }

    /// Draws the augmentation of `sample` in `epoch`.
    fn decide(&self, seed: u64, epoch: u64, sample: u64, [h, w, _]: [usize; 3]) -> Decision {
        let key = [seed as u32, (seed >> 32) as u32];
        let block = |epoch: u64, which: u32| {
            let counter = [
                sample as u32,
                (sample >> 32) as u32,
                epoch as u32,
                STREAM ^ which,
            ];
            philox4x32_10(counter, key)
        };
        let below = |word: u32, n: usize| (unit_f32(word) * n as f32) as usize;
        let now = block(epoch, 0);
        let side = 2 * self.shift + 1;
        let flip = match self.flip {
            Flip::Never => false,
            Flip::Random => now[2] & 1 == 1,
            // Random in the first epoch, then alternating.
            Flip::Alternating => (u64::from(block(0, 1)[0]) + epoch) & 1 == 1,
        };
        let hole = block(epoch, 2);
        let room = |extent: usize| extent.saturating_sub(self.cutout) + 1;
        Decision {
            down: below(now[0], side) as isize - self.shift as isize,
            right: below(now[1], side) as isize - self.shift as isize,
            flip,
            hole: [below(hole[0], room(h)), below(hole[1], room(w))],
        }
    }
}

/// Augmentation of one image.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Decision {
    /// Shift of the window in rows down and pixels to the right.
    down: isize,
    right: isize,
    flip: bool,
    /// Upper left corner of the cutout.
    hole: [usize; 2],
}

/// A data set whose images are augmented as they are read.
pub struct Augmented {
    inner: Arc<dyn ImageDataset>,
    augmentation: Augmentation,
    seed: u64,
}

impl Augmented {
    /// Augments the images of `inner`.
    ///
    /// # Errors
    ///
    /// `Usage` unless images have one to three channels and are large enough for shift and
    /// cutout.
    pub fn new(
        inner: Arc<dyn ImageDataset>,
        augmentation: Augmentation,
        seed: u64,
    ) -> Result<Augmented> {
        let [h, w, c] = inner.image_shape();
        let least = h.min(w);
        if !(1..=3).contains(&c) || augmentation.shift >= least || augmentation.cutout > least {
            refuse!(
                "images of {h} x {w} x {c} are too small for a shift of {} and a cutout of {}, or do not have one to three channels",
                augmentation.shift,
                augmentation.cutout
            );
        }
        Ok(Augmented {
            inner,
            augmentation,
            seed,
        })
    }

    fn change(&self, epoch: u64, index: usize, from: &[f32], out: &mut [f32]) {
        let shape = self.inner.image_shape();
        let [h, w, c] = shape;
        let decision = self
            .augmentation
            .decide(self.seed, epoch, index as u64, shape);
        let black = match self.augmentation.edge {
            Edge::Constant(black) => Some(black),
            Edge::Reflected => None,
        };
        for y in 0..h {
            let source_y = place(y as isize + decision.down, h, black.is_none());
            let row = &mut out[y * w * c..(y + 1) * w * c];
            for x in 0..w {
                let seen = if decision.flip { w - 1 - x } else { x };
                let source_x = place(seen as isize + decision.right, w, black.is_none());
                let pixel = &mut row[x * c..(x + 1) * c];
                match (source_y, source_x, black) {
                    (Some(y), Some(x), _) => {
                        pixel.copy_from_slice(&from[(y * w + x) * c..(y * w + x + 1) * c]);
                    }
                    (.., Some(black)) => pixel.copy_from_slice(&black[..c]),
                    (.., None) => pixel.fill(0.0),
                }
            }
        }
        let side = self.augmentation.cutout;
        let [top, left] = decision.hole;
        for y in top..top + side {
            out[(y * w + left) * c..(y * w + left + side) * c].fill(0.0);
        }
    }
}

/// Source of position `at` in a line of `len`: outside it is `None`, or the line reflected.
fn place(at: isize, len: usize, reflected: bool) -> Option<usize> {
    let last = len as isize - 1;
    let mirrored = if at < 0 { -at } else { at.min(2 * last - at) };
    let at = if reflected { mirrored } else { at };
    usize::try_from(at).ok().filter(|at| *at < len)
}

impl std::fmt::Debug for Augmented {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Augmented")
            .field("inner", &self.inner.name())
            .field("augmentation", &self.augmentation)
            .field("seed", &self.seed)
            .finish()
    }
}

impl ImageDataset for Augmented {
    fn name(&self) -> &str {
        self.inner.name()
    }

    fn len(&self) -> usize {
        self.inner.len()
    }

    fn image_shape(&self) -> [usize; 3] {
        self.inner.image_shape()
    }

    fn classes(&self) -> usize {
        self.inner.classes()
    }

    fn class_names(&self) -> Vec<String> {
        self.inner.class_names()
    }

    /// Reads the sample with the augmentation of epoch 0.
    fn read(&self, index: usize, out: &mut [f32]) -> Result<u32> {
        self.read_in_epoch(index, 0, out)
    }

    fn read_in_epoch(&self, index: usize, epoch: u64, out: &mut [f32]) -> Result<u32> {
        check_read(self, index, out)?;
        let mut image = vec![0.0; out.len()];
        let label = self.inner.read_in_epoch(index, epoch, &mut image)?;
        self.change(epoch, index, &image, out);
        Ok(label)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Images of 5 x 4 whose values encode row, column and channel.
    struct Grid;

    impl ImageDataset for Grid {
        fn name(&self) -> &str {
            "grid"
        }

        fn len(&self) -> usize {
            1000
        }

        fn image_shape(&self) -> [usize; 3] {
            [5, 4, 3]
        }

        fn classes(&self) -> usize {
            1
        }

        fn read(&self, _: usize, out: &mut [f32]) -> Result<u32> {
            for (i, value) in out.iter_mut().enumerate() {
                *value = (100 * (i / 12) + 10 * (i / 3 % 4) + i % 3 + 1) as f32;
            }
            Ok(0)
        }
    }

    fn read(set: &Augmented, sample: usize, epoch: u64) -> Vec<f32> {
        let mut out = vec![f32::NAN; 60];
        set.read_in_epoch(sample, epoch, &mut out).expect("read");
        out
    }

    fn augmented(augmentation: Augmentation) -> Augmented {
        Augmented::new(Arc::new(Grid), augmentation, 7).expect("possible")
    }

    const NOTHING: Augmentation = Augmentation {
        shift: 0,
        edge: Edge::Reflected,
        flip: Flip::Never,
        cutout: 0,
    };

    #[test]
    fn a_shift_shows_the_window_that_was_chosen() {
        let black = [-1., -2., -3.];
        for edge in [Edge::Constant(black), Edge::Reflected] {
            let set = augmented(Augmentation {
                shift: 2,
                edge,
                flip: Flip::Random,
                ..NOTHING
            });
            let mut seen = std::collections::BTreeSet::new();
            for sample in 0..600 {
                let d = set.augmentation.decide(7, 3, sample as u64, [5, 4, 3]);
                seen.insert((d.down, d.right, d.flip));
                let out = read(&set, sample, 3);
                for (i, value) in out.iter().enumerate() {
                    let (y, x, c) = (i / 12, i / 3 % 4, i % 3);
                    let x = if d.flip { 3 - x } else { x };
                    let (y, x) = (y as isize + d.down, x as isize + d.right);
                    let inside = (0..5).contains(&y) && (0..4).contains(&x);
                    let mirror = |at: isize, last: isize| {
                        if at < 0 {
                            -at
                        } else if at > last {
                            2 * last - at
                        } else {
                            at
                        }
                    };
                    let expected = match edge {
                        Edge::Constant(black) if !inside => black[c],
                        _ => (100 * mirror(y, 4) + 10 * mirror(x, 3) + c as isize + 1) as f32,
                    };
                    assert_eq!(*value, expected, "sample {sample}, element {i}, {d:?}");
                }
            }
            assert_eq!(
                seen.len(),
                5 * 5 * 2,
                "every window, mirrored or not, comes"
            );
        }
    }

    /// One image of 3 x 3 in shades of grey.
    struct Grey;

    impl ImageDataset for Grey {
        fn name(&self) -> &str {
            "grey"
        }

        fn len(&self) -> usize {
            100
        }

        fn image_shape(&self) -> [usize; 3] {
            [3, 3, 1]
        }

        fn classes(&self) -> usize {
            1
        }

        fn read(&self, _: usize, out: &mut [f32]) -> Result<u32> {
            (1..).zip(out).for_each(|(i, value)| *value = i as f32);
            Ok(0)
        }
    }

    #[test]
    fn images_of_one_channel_are_shifted_too() {
        let augmentation = Augmentation {
            shift: 1,
            edge: Edge::Constant([-1.0; 3]),
            ..NOTHING
        };
        let set = Augmented::new(Arc::new(Grey), augmentation, 7).expect("possible");
        let seen: std::collections::BTreeSet<_> = (0..100)
            .map(|sample| {
                let mut out = [f32::NAN; 9];
                set.read_in_epoch(sample, 0, &mut out).expect("read");
                out.map(|v| v as i32)
            })
            .collect();
        assert_eq!(seen.len(), 9, "every window comes");
        assert!(seen.contains(&[1, 2, 3, 4, 5, 6, 7, 8, 9]));
        assert!(seen.contains(&[5, 6, -1, 8, 9, -1, -1, -1, -1]));
    }

    #[test]
    fn a_sample_changes_with_epoch_and_seed_and_nothing_else() {
        let set = augmented(Augmentation::fast());
        let other = Augmented::new(Arc::new(Grid), Augmentation::fast(), 8).expect("possible");
        let all = |set: &Augmented, epoch| (0..50).map(|s| read(set, s, epoch)).collect::<Vec<_>>();
        assert_eq!(all(&set, 1), all(&augmented(Augmentation::fast()), 1));
        assert_ne!(all(&set, 1), all(&set, 2));
        assert_ne!(all(&set, 1), all(&other, 1));
        // Read alone and out of order.
        assert_eq!(read(&set, 41, 1), all(&set, 1)[41]);
    }

    #[test]
    fn alternating_flips_show_both_views_in_turn() {
        let set = augmented(Augmentation {
            flip: Flip::Alternating,
            ..NOTHING
        });
        let mut mirrored_first = 0;
        for sample in 0..1000 {
            let views: Vec<_> = (0..4).map(|epoch| read(&set, sample, epoch)).collect();
            assert_ne!(views[0], views[1]);
            assert_eq!((&views[0], &views[1]), (&views[2], &views[3]));
            mirrored_first += usize::from(views[0][0] == 31.0);
        }
        assert!((400..600).contains(&mirrored_first), "{mirrored_first}");
    }

    #[test]
    fn a_hole_has_its_size_and_lies_inside() {
        let set = augmented(Augmentation {
            cutout: 3,
            ..NOTHING
        });
        let mut corners = std::collections::BTreeSet::new();
        for sample in 0..100 {
            let out = read(&set, sample, 0);
            let holes: Vec<usize> = (0..20)
                .filter(|i| out[3 * i..3 * i + 3] == [0.0; 3])
                .collect();
            let first = holes[0];
            let expected: Vec<usize> = (0..3)
                .flat_map(|y| (0..3).map(move |x| first + 4 * y + x))
                .collect();
            assert_eq!(holes, expected);
            corners.insert(first);
        }
        assert_eq!(corners.len(), 3 * 2, "everywhere it fits");
    }

    #[test]
    fn impossible_settings_are_refused() {
        for impossible in [
            Augmentation {
                shift: 4,
                ..NOTHING
            },
            Augmentation {
                cutout: 5,
                ..NOTHING
            },
        ] {
            let error = Augmented::new(Arc::new(Grid), impossible, 0).expect_err("refused");
            assert!(error.to_string().contains("5 x 4 x 3"), "{error}");
        }
    }
}
