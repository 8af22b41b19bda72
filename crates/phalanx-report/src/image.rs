//! Image files: PNG, and netpbm's binary PGM and PPM.

use std::io::{BufRead, BufReader, Read};
use std::path::Path;

use crate::{IMAGES_PER_ROW, png_size};
use phalanx_base::files::open_regular;
use phalanx_base::{Error, ErrorKind, Result};

/// Maximum length of a netpbm header, comments included.
const MAX_HEADER_BYTES: usize = 4096;

/// Reads the image at `path` as height x width x channels bytes. Gray is copied to three
/// channels if three are requested; colors are converted to gray by the weights of ITU-R
/// BT.601; transparency is dropped.
///
/// # Errors
///
/// `Usage` when the file does not exist; `System` when it cannot be read; `Data`, naming the
/// file and what was expected, when it has another format or size, or is damaged.
pub fn read(path: &Path, shape: [usize; 3]) -> Result<Vec<u8>> {
    let file = open_regular(path).map_err(|source| Error::not_opened("image", path, source))?;
    let mut start = Vec::new();
    let mut file = BufReader::new(file);
    (&mut file)
        .take(2)
        .read_to_end(&mut start)
        .map_err(|source| Error::io("cannot read", path, source))?;
    let whole = start.chain(file);
    let (pixels, channels) = match &start[..] {
        [0x89, b'P'] => png(path, whole, shape)?,
        b"P5" | b"P6" => netpbm(path, whole, shape)?,
        [_, _] => {
            return Err(wrong(
                path,
                format!(
                    "it is neither PNG nor binary PGM or PPM: it starts with {}, expected 8950, 5035 or 5036",
                    hex::encode(&start)
                ),
            ));
        }
        short => {
            let has = short.len();
            return Err(wrong(
                path,
                format!("it ends after {has} bytes; expected PNG, or binary PGM or PPM"),
            ));
        }
    };
    Ok(to_channels(&pixels, channels, shape[2]))
}

fn wrong(path: &Path, what: String) -> Error {
    Error::data(format!("{}: {what}", path.display()))
}

/// Checks that the image has the model's size.
fn check_size(path: &Path, width: usize, height: usize, [h, w, _]: [usize; 3]) -> Result<()> {
    if (height, width) == (h, w) {
        return Ok(());
    }
    Err(wrong(
        path,
        format!("it has {width} x {height} pixels, but the model takes {w} x {h}"),
    ))
}

fn png(path: &Path, data: impl Read, shape: [usize; 3]) -> Result<(Vec<u8>, usize)> {
    // The library needs a seekable reader.
    let mut bytes = Vec::new();
    data.take(64 << 20)
        .read_to_end(&mut bytes)
        .map_err(|source| Error::io("cannot read", path, source))?;
    let size_bytes = bytes.len();
    let damaged = |e: png::DecodingError| {
        wrong(
            path,
            format!("its {size_bytes} bytes are not a PNG, as expected from its first two: {e}"),
        )
        .with_source(e)
    };
    let mut decoder = png::Decoder::new(std::io::Cursor::new(bytes));
    decoder.set_transformations(png::Transformations::normalize_to_color8());
    let mut reader = decoder.read_info().map_err(damaged)?;
    let (width, height) = reader.info().size();
    check_size(path, width as usize, height as usize, shape)?;
    let size_bytes = reader
        .output_buffer_size()
        .ok_or_else(|| wrong(path, "it is larger than memory".to_owned()))?;
    let mut pixels = vec![0; size_bytes];
    let frame = reader.next_frame(&mut pixels).map_err(damaged)?;
    pixels.truncate(frame.buffer_size());
    let channels = frame.color_type.samples();
    Ok((pixels, channels))
}

/// `P5` (gray) or `P6` (color): width, height, maximum value, one space, pixels.
fn netpbm(path: &Path, data: impl BufRead, shape: [usize; 3]) -> Result<(Vec<u8>, usize)> {
    let mut bytes = data.bytes();
    let mut at = 0;
    let mut next = || match bytes.next() {
        Some(Ok(byte)) => {
            at += 1;
            Ok(byte)
        }
        Some(Err(source)) => Err(Error::io("cannot read", path, source)),
        None => Err(wrong(
            path,
            format!("it ends after {at} bytes; expected width, height and 255 there"),
        )),
    };
    let channels = match [next()?, next()?] {
        [_, b'6'] => 3,
        _ => 1,
    };
    let mut numbers = [0usize; 3];
    let (mut found, mut digits, mut comment) = (0, false, false);
    for _ in 0..MAX_HEADER_BYTES {
        let byte = next()?;
        match byte {
            _ if comment => comment = byte != b'\n',
            b'0'..=b'9' => {
                digits = true;
                numbers[found] = numbers[found]
                    .saturating_mul(10)
                    .saturating_add(usize::from(byte - b'0'));
            }
            _ if digits => {
                digits = false;
                found += 1;
                comment = byte == b'#';
                if found == 3 {
                    break;
                }
            }
            b'#' => comment = true,
            _ if byte.is_ascii_whitespace() => {}
            _ => return Err(wrong(path, "its header is not a netpbm header".to_owned())),
        }
    }
    let [width, height, largest] = numbers;
    if found < 3 || largest != 255 {
        return Err(wrong(
            path,
            format!("its maximum value is {largest}; only 255 is supported"),
        ));
    }
    check_size(path, width, height, shape)?;
    let expected = width * height * channels;
    let mut pixels = Vec::with_capacity(expected);
    for i in 0..expected {
        pixels.push(next().map_err(|e| match e.kind() {
            ErrorKind::Data => wrong(
                path,
                format!("it ends after {i} bytes of pixels, expected {expected}"),
            ),
            _ => e,
        })?);
    }
    match next() {
        Ok(b'P') => Err(wrong(path, "another image follows in it".to_owned())),
        _ => Ok((pixels, channels)),
    }
}

/// Longest side of an image in a [`sheet`]; of larger ones, every second or third pixel is there.
const MAX_SHEET_SIDE: usize = 64;

/// Red, for frames.
const FRAME: [u8; 3] = [220, 38, 38];

/// Images (N, H, W, C) of any values as one PNG picture, [`IMAGES_PER_ROW`] in a row. The least value of
/// an image is black, its greatest white. Gray for one channel, RGB for three, otherwise the first
/// channel.
///
/// # Errors
///
/// `Internal`, when the picture cannot be encoded.
pub fn sheet(images: &[f32], [h, w, c]: [usize; 3]) -> Result<Vec<u8>> {
    let every = h.max(w).div_ceil(MAX_SHEET_SIDE).max(1);
    let (high, wide) = (h.div_ceil(every), w.div_ceil(every));
    let channels = if c == 3 { 3 } else { 1 };
    let each = (h * w * c).max(1);
    let count = images.len() / each;
    let (rows, row_bytes) = (
        count.div_ceil(IMAGES_PER_ROW) * high,
        IMAGES_PER_ROW * wide * channels,
    );
    let mut pixels = vec![0u8; rows * row_bytes];
    for (number, image) in images.chunks_exact(each).enumerate() {
        let low = image.iter().copied().fold(f32::INFINITY, f32::min);
        let range = image.iter().copied().fold(f32::NEG_INFINITY, f32::max) - low;
        let scale = if range > 0.0 { 255.0 / range } else { 0.0 };
        for (y, x) in (0..high).flat_map(|y| (0..wide).map(move |x| (y, x))) {
            let from = (y * w + x) * every * c;
            let to = (number / IMAGES_PER_ROW * high + y) * row_bytes
                + (number % IMAGES_PER_ROW * wide + x) * channels;
            for channel in 0..channels {
                pixels[to + channel] = ((image[from + channel] - low) * scale).round() as u8;
            }
        }
    }
    encode(&pixels, [rows, IMAGES_PER_ROW * wide], channels)
}

/// Pixels of 1 (gray) or 3 channels as a PNG.
fn encode(pixels: &[u8], [height, width]: [usize; 2], channels: usize) -> Result<Vec<u8>> {
    let mut out = Vec::new();
    let mut encoder = png::Encoder::new(&mut out, width as u32, height as u32);
    encoder.set_color(match channels {
        3 => png::ColorType::Rgb,
        _ => png::ColorType::Grayscale,
    });
    encoder.set_depth(png::BitDepth::Eight);
    let written = encoder.write_header().and_then(|mut writer| {
        writer.write_image_data(pixels)?;
        writer.finish()
    });
    written.map_err(|e| Error::internal("an image cannot be encoded").with_source(e))?;
    Ok(out)
}

/// The images of a picture that [`sheet`] has made.
#[derive(Debug, Clone)]
pub struct Sheet {
    /// Of the whole picture.
    pixels: Vec<u8>,
    channels: usize,
    /// Height and width of an image.
    size: [usize; 2],
}

impl Sheet {
    /// Reads the PNG `bytes` of the file at `path`, which has `count` images.
    ///
    /// # Errors
    ///
    /// `Data`, naming the file, when it is not such a PNG.
    pub fn read(path: &Path, bytes: &[u8], count: usize) -> Result<Sheet> {
        let [width, height] = png_size(bytes)
            .unwrap_or_default()
            .map(|side| side as usize);
        let rows = count.div_ceil(IMAGES_PER_ROW);
        let size = [
            height.checked_div(rows).unwrap_or(0),
            width / IMAGES_PER_ROW,
        ];
        if size.contains(&0) {
            return Err(wrong(path, format!("it does not have {count} images")));
        }
        let (pixels, channels) = png(path, bytes, [height, width, 1])?;
        let to = if channels < 3 { 1 } else { 3 };
        Ok(Sheet {
            pixels: to_channels(&pixels, channels, to),
            channels: to,
            size,
        })
    }

    /// Height and width of an image.
    pub fn size(&self) -> [usize; 2] {
        self.size
    }

    /// The image `number`, from 0, as a PNG.
    ///
    /// # Errors
    ///
    /// `Internal`, when it cannot be encoded.
    ///
    /// # Panics
    ///
    /// If there is no such image.
    pub fn image(&self, number: usize) -> Result<Vec<u8>> {
        let rows = (0..self.size[0]).map(|y| self.row(number, y));
        let pixels: Vec<u8> = rows.flat_map(|row| &self.pixels[row]).copied().collect();
        encode(&pixels, self.size, self.channels)
    }

    /// The whole picture as a PNG, with a red frame around the images whose numbers are in `marked`.
    ///
    /// # Errors
    ///
    /// `Internal`, when it cannot be encoded.
    ///
    /// # Panics
    ///
    /// If there is no such image.
    pub fn framed(&self, marked: impl Iterator<Item = usize>) -> Result<Vec<u8>> {
        let mut pixels = to_channels(&self.pixels, self.channels, 3);
        let [high, wide] = self.size;
        for number in marked {
            for (y, x) in (0..high).flat_map(|y| (0..wide).map(move |x| (y, x))) {
                if [0, high - 1].contains(&y) || [0, wide - 1].contains(&x) {
                    let at = (self.row(number, y).start / self.channels + x) * 3;
                    pixels[at..at + 3].copy_from_slice(&FRAME);
                }
            }
        }
        let width = IMAGES_PER_ROW * wide;
        encode(&pixels, [pixels.len() / 3 / width, width], 3)
    }

    /// Where row `y` of the image `number` is.
    fn row(&self, number: usize, y: usize) -> std::ops::Range<usize> {
        let ([high, wide], channels) = (self.size, self.channels);
        let (row, column) = (number / IMAGES_PER_ROW, number % IMAGES_PER_ROW);
        let first = ((row * high + y) * IMAGES_PER_ROW + column) * wide * channels;
        first..first + wide * channels
    }
}

/// Converts gray, gray and alpha, RGB, or RGBA to 1 or 3 channels.
fn to_channels(pixels: &[u8], from: usize, to: usize) -> Vec<u8> {
    let each = pixels.chunks_exact(from.max(1));
    each.flat_map(|pixel| {
        let colours: [u8; 3] = match *pixel {
            [r, g, b, ..] => [r, g, b],
            [grey, ..] => [grey; 3],
            [] => [0; 3],
        };
        let [r, g, b] = colours.map(u32::from);
        // Rounded to nearest; equal channels do not change.
        let grey = ((299 * r + 587 * g + 114 * b + 500) / 1000) as u8;
        if to == 1 {
            vec![grey]
        } else {
            colours.to_vec()
        }
    })
    .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read_bytes(bytes: &[u8], shape: [usize; 3]) -> Result<Vec<u8>> {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("x.img");
        std::fs::write(&path, bytes).unwrap();
        read(&path, shape)
    }

    #[test]
    fn images_of_any_values_are_one_picture() {
        // 33 RGB images of 2 x 1 pixels, each from -1 (black) to its number + 1 (white).
        let image = |i: usize| [-1.0, -1.0, -1.0, i as f32 + 1.0, -1.0, i as f32 / 2.0];
        let images: Vec<f32> = (0..33).flat_map(image).collect();
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("x.png");
        std::fs::write(&path, sheet(&images, [2, 1, 3]).unwrap()).unwrap();
        let pixels = read(&path, [4, IMAGES_PER_ROW, 3]).unwrap();
        let at = |x: usize, y: usize| &pixels[(y * IMAGES_PER_ROW + x) * 3..][..3];
        for (x, y) in [(0, 0), (31, 0), (0, 2)] {
            assert_eq!(at(x, y), [0, 0, 0]);
            assert_eq!(at(x, y + 1), [255, 0, 128], "{x} {y}");
        }
        assert_eq!(at(1, 3), [0, 0, 0], "no image");
        // 100 x 50 gray: every second pixel. One value only, or none, is black.
        let large: Vec<f32> = (0..5000).map(|i| (i / 50) as f32).collect();
        std::fs::write(&path, sheet(&large, [100, 50, 1]).unwrap()).unwrap();
        let pixels = read(&path, [50, 25 * IMAGES_PER_ROW, 1]).unwrap();
        let column: Vec<u8> = pixels
            .iter()
            .step_by(25 * IMAGES_PER_ROW)
            .copied()
            .collect();
        assert_eq!((column[0], column[1], column[49]), (0, 5, 252));
        assert!(
            sheet(&[f32::NAN; 4], [2, 2, 1])
                .unwrap()
                .starts_with(b"\x89PNG")
        );
    }

    #[test]
    fn a_sheet_gives_its_images_again_and_frames_those_that_are_named() {
        // 33 gray images of 3 x 4 pixels, whose values grow from one to the next.
        let image = |i: usize| (0..12).map(move |at| (at * (i + 1)) as f32);
        let images: Vec<f32> = (0..33).flat_map(image).collect();
        let picture = sheet(&images, [3, 4, 1]).unwrap();
        let path = Path::new("x.png");
        let whole = Sheet::read(path, &picture, 33).unwrap();
        assert_eq!(whole.size(), [3, 4]);
        for number in [0, 31, 32] {
            let one = whole.image(number).unwrap();
            let shown = |at: usize| (at as f32 * (255.0 / 11.0)).round() as u8;
            let expected: Vec<u8> = (0..12).map(shown).collect();
            assert_eq!(read_bytes(&one, [3, 4, 1]).unwrap(), expected, "{number}");
        }
        let framed = whole.framed([32].into_iter()).unwrap();
        let pixels = read_bytes(&framed, [6, 4 * IMAGES_PER_ROW, 3]).unwrap();
        let row = |y: usize| &pixels[y * 12 * IMAGES_PER_ROW..][..15];
        // Of the picture's second row of images.
        for (y, inside) in [(3, [FRAME; 2]), (4, [[116; 3], [139; 3]]), (5, [FRAME; 2])] {
            let [left, right] = inside;
            assert_eq!(row(y), [FRAME, left, right, FRAME, [0; 3]].concat(), "{y}");
        }
        assert_eq!(row(0)[..3], [0; 3], "an image that is not named");
        for (bytes, count) in [(&picture[..], 0), (&picture[..40], 33), (b"GIF89a", 33)] {
            let refused = Sheet::read(path, bytes, count).unwrap_err();
            assert_eq!(refused.kind(), ErrorKind::Data);
        }
    }

    fn png_of(color: png::ColorType, width: u32, pixels: &[u8]) -> Vec<u8> {
        let mut out = Vec::new();
        let rows = pixels.len() / color.samples() / width as usize;
        let mut encoder = png::Encoder::new(&mut out, width, rows as u32);
        encoder.set_color(color);
        encoder.set_depth(png::BitDepth::Eight);
        let mut writer = encoder.write_header().unwrap();
        writer.write_image_data(pixels).unwrap();
        writer.finish().unwrap();
        out
    }

    #[test]
    fn all_kinds_of_pixels_become_what_the_model_takes() {
        use png::ColorType::{Grayscale, GrayscaleAlpha, Rgb, Rgba};
        let grey = png_of(Grayscale, 2, &[0, 100, 200, 255]);
        assert_eq!(read_bytes(&grey, [2, 2, 1]).unwrap(), [0, 100, 200, 255]);
        assert_eq!(
            read_bytes(&grey, [2, 2, 3]).unwrap(),
            [0, 0, 0, 100, 100, 100, 200, 200, 200, 255, 255, 255]
        );
        let alpha = png_of(GrayscaleAlpha, 1, &[7, 0, 9, 255]);
        assert_eq!(read_bytes(&alpha, [2, 1, 1]).unwrap(), [7, 9]);
        let rgb = png_of(Rgb, 2, &[255, 0, 0, 0, 0, 255]);
        assert_eq!(read_bytes(&rgb, [1, 2, 1]).unwrap(), [76, 29]);
        let rgba = png_of(Rgba, 1, &[1, 2, 3, 4]);
        assert_eq!(read_bytes(&rgba, [1, 1, 3]).unwrap(), [1, 2, 3]);
        let pgm = b"P5 # a comment\n2 2\n# another\n255\n\x00\x64\xc8\xff";
        assert_eq!(read_bytes(pgm, [2, 2, 1]).unwrap(), [0, 100, 200, 255]);
        let ppm = b"P6\n1 1 255\n\x01\x02\x03";
        assert_eq!(read_bytes(ppm, [1, 1, 3]).unwrap(), [1, 2, 3]);
    }

    #[test]
    fn other_files_are_refused_by_name() {
        let why = |bytes: &[u8]| read_bytes(bytes, [2, 2, 1]).unwrap_err().to_string();
        let good = png_of(png::ColorType::Grayscale, 2, &[0; 4]);
        for (bytes, reason) in [
            (&b"GIF89a"[..], "neither PNG nor binary"),
            (
                b"P5 3 2 255\n",
                "it has 3 x 2 pixels, but the model takes 2 x 2",
            ),
            (b"P5 99999999999999999999 2 255\n", "the model takes 2 x 2"),
            (b"P5 2 2 65535\n", "only 255 is supported"),
            (b"", "it ends after 0 bytes; expected PNG, or binary PGM"),
            (b"P5 2", "it ends after 4 bytes"),
            (
                b"P5 2 2 255\nab",
                "it ends after 2 bytes of pixels, expected 4",
            ),
            (
                b"P5 2 2 255\nabcdP5 2 2 255\nabcd",
                "another image follows in it",
            ),
            (b"P5 2 x", "not a netpbm header"),
            (&good[..good.len() - 20], "bytes are not a PNG"),
            (
                &png_of(png::ColorType::Grayscale, 1, &[0; 4]),
                "it has 1 x 4 pixels",
            ),
        ] {
            let text = why(bytes);
            assert!(text.contains("x.img") && text.contains(reason), "{text}");
        }
        let missing = read(Path::new("/nowhere/x.png"), [1, 1, 1]).unwrap_err();
        assert!(missing.to_string().contains("no image /nowhere/x.png"));
    }
}
