//! What is done to an image before the model sees it.

use std::ops::Range;

use phalanx_base::{Error, Result, refuse};
use phalanx_image::Rgb;

use crate::words::Words;

/// Separates these random numbers from others with the same seed.
const SEED_MIX: u64 = 0x7472_616e_7366_6f72;

/// Means of the colors of ImageNet's images, from 0 to 1.
pub const IMAGENET_MEAN: [f32; 3] = [0.485, 0.456, 0.406];
/// Standard deviations of the colors of ImageNet's images.
pub const IMAGENET_STD: [f32; 3] = [0.229, 0.224, 0.225];

#[derive(Clone, Debug, PartialEq)]
enum Transform {
    Resize(usize),
    ResizeTo([usize; 2]),
    CenterCrop(usize),
    RandomResizedCrop {
        size: usize,
        scale: Range<f64>,
        ratio: Range<f64>,
    },
    RandomHorizontalFlip(f64),
    RandomRotation(f64),
    ColorJitter([f64; 4]),
}

/// Transforms of images, one after the other, with the names and the meaning of torchvision's (on its `PIL` images: bilinear
/// resizing with antialiasing, sums in whole numbers). The result is scaled to 0 to 1, and normalized last.
///
/// The random ones depend on (seed, epoch, sample) alone: not on the rank, the thread or the batch.
///
/// ```
/// use phalanx_data::folder::{IMAGENET_MEAN, IMAGENET_STD, Transforms};
///
/// let train = Transforms::new()
///     .random_resized_crop(64)
///     .random_horizontal_flip(0.5)
///     .color_jitter(0.2, 0.2, 0.2, 0.0)
///     .normalize(IMAGENET_MEAN, IMAGENET_STD);
/// let test = Transforms::new().resize(73).center_crop(64).normalize(IMAGENET_MEAN, IMAGENET_STD);
/// # let _ = (train, test);
/// ```
#[derive(Clone, Debug, PartialEq)]
pub struct Transforms {
    list: Vec<Transform>,
    mean: [f32; 3],
    std: [f32; 3],
}

impl Default for Transforms {
    fn default() -> Self {
        Transforms {
            list: Vec::new(),
            mean: [0.0; 3],
            std: [1.0; 3],
        }
    }
}

impl Transforms {
    /// None: images must then have one size, and become values from 0 to 1.
    pub fn new() -> Transforms {
        Transforms::default()
    }

    /// torchvision's preset for training: [`random_resized_crop`](Self::random_resized_crop) to `size` and a flip, normalized as
    /// ImageNet.
    pub fn training(size: usize) -> Transforms {
        let cut = Transforms::new().random_resized_crop(size);
        (cut.random_horizontal_flip(0.5)).normalize(IMAGENET_MEAN, IMAGENET_STD)
    }

    /// torchvision's preset for evaluation: the shorter side resized to 8/7 of `size` (256 for 224), and the center of `size`
    /// x `size`, normalized as ImageNet.
    pub fn evaluation(size: usize) -> Transforms {
        let cut = Transforms::new().resize(size * 8 / 7).center_crop(size);
        cut.normalize(IMAGENET_MEAN, IMAGENET_STD)
    }

    fn with(mut self, next: Transform) -> Transforms {
        self.list.push(next);
        self
    }

    /// Resizes the shorter side to `size` pixels; the aspect ratio stays.
    pub fn resize(self, size: usize) -> Transforms {
        self.with(Transform::Resize(size))
    }

    /// Resizes to `height` x `width`, whatever the aspect ratio.
    pub fn resize_to(self, height: usize, width: usize) -> Transforms {
        self.with(Transform::ResizeTo([height, width]))
    }

    /// The center of `size` x `size` pixels. What is outside a smaller image is black.
    pub fn center_crop(self, size: usize) -> Transforms {
        self.with(Transform::CenterCrop(size))
    }

    /// A random part of 8 to 100 % of the area and an aspect ratio of 3/4 to 4/3, resized to `size` x `size`.
    pub fn random_resized_crop(self, size: usize) -> Transforms {
        self.random_resized_crop_of(size, 0.08..1.0, 3.0 / 4.0..4.0 / 3.0)
    }

    /// A random part with a share of the area in `scale` and an aspect ratio (width by height) in `ratio`, resized to `size` x
    /// `size`.
    pub fn random_resized_crop_of(
        self,
        size: usize,
        scale: Range<f64>,
        ratio: Range<f64>,
    ) -> Transforms {
        self.with(Transform::RandomResizedCrop { size, scale, ratio })
    }

    /// Mirrors left and right with probability `p`.
    pub fn random_horizontal_flip(self, p: f64) -> Transforms {
        self.with(Transform::RandomHorizontalFlip(p))
    }

    /// Turns by a random angle of up to `degrees` in both directions about the center, with the nearest pixels; what comes from
    /// outside is black.
    pub fn random_rotation(self, degrees: f64) -> Transforms {
        self.with(Transform::RandomRotation(degrees))
    }

    /// Multiplies brightness, contrast and saturation by random factors of up to `1 - x` to `1 + x`, and turns the hue by up to
    /// `hue` (at most 0.5) of a circle in both directions, in random order.
    pub fn color_jitter(
        self,
        brightness: f64,
        contrast: f64,
        saturation: f64,
        hue: f64,
    ) -> Transforms {
        self.with(Transform::ColorJitter([
            brightness, contrast, saturation, hue,
        ]))
    }

    /// Subtracts `mean` from the values of each color, from 0 to 1, and divides by `std`.
    pub fn normalize(mut self, mean: [f32; 3], std: [f32; 3]) -> Transforms {
        (self.mean, self.std) = (mean, std);
        self
    }

    /// Height and width of every result, of images of size `first` if they all have one.
    ///
    /// # Errors
    ///
    /// `Usage` for a transform that is impossible, or if results differ in size.
    pub(crate) fn size(&self, first: Option<[usize; 2]>) -> Result<[usize; 2]> {
        let mut at = first;
        for next in &self.list {
            let good = match next {
                Transform::Resize(size) | Transform::CenterCrop(size) => *size > 0,
                Transform::ResizeTo(size) => !size.contains(&0),
                Transform::RandomResizedCrop { size, scale, ratio } => {
                    let is_share = scale.start > 0.0 && scale.end <= 1.0;
                    *size > 0 && is_share && ratio.start > 0.0 && ratio.end.is_finite()
                }
                Transform::RandomHorizontalFlip(p) => (0.0..=1.0).contains(p),
                Transform::RandomRotation(degrees) => (0.0..=180.0).contains(degrees),
                Transform::ColorJitter([rest @ .., hue]) => {
                    let is_factor = |x: &f64| x.is_finite() && *x >= 0.0;
                    rest.iter().all(is_factor) && (0.0..=0.5).contains(hue)
                }
            };
            if !good {
                refuse!("{next:?} is impossible");
            }
            at = match next {
                Transform::Resize(size) => at.map(|at| shorter_side(at, *size)),
                Transform::ResizeTo(size) => Some(*size),
                Transform::CenterCrop(size) | Transform::RandomResizedCrop { size, .. } => {
                    Some([*size; 2])
                }
                _ => at,
            };
        }
        let is_deviation = |std: &f32| std.is_finite() && *std > 0.0;
        if !self.std.iter().all(is_deviation) || !self.mean.iter().all(|mean| mean.is_finite()) {
            refuse!(
                "images cannot be normalized with a deviation of {:?}",
                self.std
            );
        }
        at.ok_or_else(|| {
            Error::usage("images of different sizes need a transform that makes them equal: center_crop, random_resized_crop or resize_to")
        })
    }

    /// Writes the transformed `image` of number `sample` to `out`: rows of pixels of three values.
    pub(crate) fn apply(
        &self,
        mut image: Rgb,
        seed: u64,
        [epoch, sample]: [u64; 2],
        out: &mut [f32],
    ) -> Result<()> {
        let epoch = epoch.wrapping_mul(0x9e37_79b9_7f4a_7c15);
        let mut words = Words::new(seed ^ SEED_MIX ^ epoch, sample);
        for next in &self.list {
            let whole = [0, 0, image.height, image.width];
            image = match next {
                Transform::Resize(size) => {
                    let to = shorter_side([image.height, image.width], *size);
                    resized(image, whole, to)?
                }
                Transform::ResizeTo(to) => resized(image, whole, *to)?,
                Transform::CenterCrop(size) => center(image, *size),
                Transform::RandomResizedCrop { size, scale, ratio } => {
                    let part = part([image.height, image.width], scale, ratio, &mut words);
                    resized(image, part, [*size; 2])?
                }
                Transform::RandomHorizontalFlip(p) => {
                    let is_flipped = f64::from(words.unit()) < *p;
                    if is_flipped { mirrored(&image) } else { image }
                }
                Transform::RandomRotation(degrees) => {
                    turned(&image, f64::from(words.around(1.0)) * degrees)
                }
                Transform::ColorJitter(most) => jittered(image, most, &mut words),
            };
        }
        if out.len() != image.pixels.len() {
            let (height, width) = (image.height, image.width);
            return Err(Error::data(format!(
                "it has {width} x {height} pixels after the transforms, expected {} values",
                out.len()
            )));
        }
        let (pixels, _) = image.pixels.as_chunks::<3>();
        for (out, pixel) in out.as_chunks_mut::<3>().0.iter_mut().zip(pixels) {
            let value = |c: usize| (f32::from(pixel[c]) / 255.0 - self.mean[c]) / self.std[c];
            *out = std::array::from_fn(value);
        }
        Ok(())
    }
}

/// The size in which the shorter side has `size` pixels.
fn shorter_side([height, width]: [usize; 2], size: usize) -> [usize; 2] {
    match height <= width {
        true => [size, (size * width / height.max(1)).max(1)],
        false => [(size * height / width.max(1)).max(1), size],
    }
}

/// The part [top, left, height, width] of `image`, resized.
pub(super) fn resized(image: Rgb, part: [usize; 4], to: [usize; 2]) -> Result<Rgb> {
    let image = cut(image, part);
    if [image.height, image.width] == to {
        return Ok(image);
    }
    let failed = |what| Error::internal(format!("an image cannot be resized: {what}"));
    phalanx_image::resized(&image, to).map_err(failed)
}

/// The part [top, left, height, width], which is inside.
fn cut(image: Rgb, [top, left, height, width]: [usize; 4]) -> Rgb {
    if [top, left, height, width] == [0, 0, image.height, image.width] {
        return image;
    }
    let mut pixels = Vec::with_capacity(height * width * 3);
    for y in top..top + height {
        pixels.extend_from_slice(&image.pixels[(y * image.width + left) * 3..][..width * 3]);
    }
    Rgb {
        width,
        height,
        pixels,
    }
}

fn center(image: Rgb, size: usize) -> Rgb {
    let (height, width) = (image.height, image.width);
    // Python rounds halves to even numbers, and pads more at the end.
    let before = |len: usize| ((len - size) as f64 / 2.0).round_ties_even() as usize;
    let taken = [height.min(size), width.min(size)];
    let from = [height, width].map(|len| if len > size { before(len) } else { 0 });
    let part = cut(image, [from[0], from[1], taken[0], taken[1]]);
    let [above, left] = taken.map(|len| (size - len) / 2);
    if taken == [size; 2] {
        return part;
    }
    let mut pixels = vec![0; size * size * 3];
    for (y, row) in part.pixels.chunks_exact((taken[1] * 3).max(1)).enumerate() {
        pixels[((above + y) * size + left) * 3..][..row.len()].copy_from_slice(row);
    }
    Rgb {
        width: size,
        height: size,
        pixels,
    }
}

/// The part [top, left, height, width] of a random resized crop, as torchvision draws it.
pub(super) fn part(
    [height, width]: [usize; 2],
    scale: &Range<f64>,
    ratio: &Range<f64>,
    words: &mut Words,
) -> [usize; 4] {
    let mut between =
        |range: Range<f64>| range.start + (range.end - range.start) * f64::from(words.unit());
    for _ in 0..10 {
        let area = (height * width) as f64 * between(scale.clone());
        let aspect = between(ratio.start.ln()..ratio.end.ln()).exp();
        let w = (area * aspect).sqrt().round_ties_even() as usize;
        let h = (area / aspect).sqrt().round_ties_even() as usize;
        if (1..=width).contains(&w) && (1..=height).contains(&h) {
            let top = between(0.0..(height - h + 1) as f64) as usize;
            let left = between(0.0..(width - w + 1) as f64) as usize;
            return [top.min(height - h), left.min(width - w), h, w];
        }
    }
    let has = width as f64 / height as f64;
    let (h, w) = if has < ratio.start {
        (
            (width as f64 / ratio.start).round_ties_even() as usize,
            width,
        )
    } else if has > ratio.end {
        (
            height,
            (height as f64 * ratio.end).round_ties_even() as usize,
        )
    } else {
        (height, width)
    };
    let (h, w) = (h.clamp(1, height), w.clamp(1, width));
    [(height - h) / 2, (width - w) / 2, h, w]
}

fn mirrored(image: &Rgb) -> Rgb {
    let mut pixels = Vec::with_capacity(image.pixels.len());
    for row in image.pixels.chunks_exact(image.width * 3) {
        pixels.extend(row.as_chunks::<3>().0.iter().rev().flatten());
    }
    Rgb { pixels, ..*image }
}

/// `image` turned counterclockwise, as Pillow's `rotate` does with the nearest pixels: in fixed point with 16 bits.
pub(super) fn turned(image: &Rgb, degrees: f64) -> Rgb {
    let (width, height) = (image.width, image.height);
    let angle = -degrees.rem_euclid(360.0).to_radians();
    let rounded = |x: f64| (x * 1e15).round() / 1e15;
    let (sin, cos) = (rounded(angle.sin()), rounded(angle.cos()));
    let (x, y) = (width as f64 / 2.0, height as f64 / 2.0);
    // Where the middle of the first pixel comes from.
    let first = [
        x - cos * x - sin * y + (cos + sin) * 0.5,
        y + sin * x - cos * y + (cos - sin) * 0.5,
    ];
    let fixed = |x: f64| (x * 65536.0 + 0.5).floor() as i64;
    let (first, sin, cos) = (first.map(fixed), [fixed(sin), fixed(-sin)], fixed(cos));
    let (from, _) = image.pixels.as_chunks::<3>();
    let mut pixels = vec![0; image.pixels.len()];
    let (to, _) = pixels.as_chunks_mut::<3>();
    for (i, to) in to.iter_mut().enumerate() {
        let (x, y) = ((i % width) as i64, (i / width) as i64);
        let place = [
            (first[0] + x * cos + y * sin[0]) >> 16,
            (first[1] + x * sin[1] + y * cos) >> 16,
        ];
        let [x, y] = place.map(|at| usize::try_from(at).unwrap_or(usize::MAX));
        if x < width && y < height {
            *to = from[y * width + x];
        }
    }
    Rgb { pixels, ..*image }
}

fn jittered(mut image: Rgb, most: &[f64; 4], words: &mut Words) -> Rgb {
    let mut order = [0, 1, 2, 3];
    for last in (1..4).rev() {
        order.swap(last, words.below(last as u32 + 1) as usize);
    }
    let drawn = most.map(|most| f64::from(words.around(1.0)) * most);
    for which in order {
        let change = drawn[which];
        if most[which] > 0.0 {
            match which {
                3 => turn_hue(&mut image.pixels, change),
                _ => adjust(&mut image.pixels, which, (1.0 + change).max(0.0) as f32),
            }
        }
    }
    image
}

/// Luma by the weights of ITU-R BT.601, as Pillow computes it.
fn luma([red, green, blue]: [u8; 3]) -> u8 {
    let sum = u32::from(red) * 19595 + u32::from(green) * 38470 + u32::from(blue) * 7471;
    ((sum + 0x8000) >> 16) as u8
}

/// Changes brightness (0), contrast (1) or saturation (2) by `factor`, as Pillow's `ImageEnhance`: a blend with black, with the
/// mean of gray, or with gray.
pub(super) fn adjust(pixels: &mut [u8], which: usize, factor: f32) {
    let (pixels, _) = pixels.as_chunks_mut::<3>();
    let sum: u64 = pixels.iter().map(|pixel| u64::from(luma(*pixel))).sum();
    let mean = (sum as f64 / pixels.len().max(1) as f64 + 0.5) as u8;
    for pixel in pixels {
        let other = f32::from(match which {
            0 => 0,
            1 => mean,
            _ => luma(*pixel),
        });
        // Truncated, and 0 to 255, by the conversion.
        *pixel = pixel.map(|value| (other + factor * (f32::from(value) - other)) as u8);
    }
}

/// Turns the hue by `turn` of a circle, as Pillow's conversions to HSV and back do, with 8 bits.
pub(super) fn turn_hue(pixels: &mut [u8], turn: f64) {
    let turn = (turn * 255.0) as i32 as u8;
    for pixel in pixels.as_chunks_mut::<3>().0 {
        let [r, g, b] = pixel.map(f32::from);
        let (most, least) = (r.max(g).max(b), r.min(g).min(b));
        let span = most - least;
        let (mut hue, mut saturation) = (0, 0);
        if span > 0.0 {
            let [rc, gc, bc] = [r, g, b].map(|c| f64::from((most - c) / span));
            let sixth = if r == most {
                bc - gc
            } else if g == most {
                2.0 + rc - bc
            } else {
                4.0 + gc - rc
            };
            // Pillow keeps these two as `float`.
            let turned = (f64::from(sixth as f32) / 6.0 + 1.0).fract() as f32;
            hue = (f64::from(turned) * 255.0) as u8;
            saturation = (f64::from(span / most) * 255.0) as u8;
        }
        let hue = f64::from(hue.wrapping_add(turn)) * 6.0 / 255.0;
        let share = f64::from(saturation) / 255.0;
        let rest = hue - hue.floor();
        let part = |x: f64| (f64::from(most) * (1.0 - x)).round() as u8;
        let (v, p) = (most as u8, part(share));
        let (q, t) = (part(share * rest), part(share * (1.0 - rest)));
        *pixel = match hue as u32 % 6 {
            0 => [v, t, p],
            1 => [q, v, p],
            2 => [p, v, t],
            3 => [p, q, v],
            4 => [t, p, v],
            _ => [v, p, q],
        };
    }
}
