//! Image files in memory to RGB, and RGB in another size. Apart from its users, which would compile the decoder and the kernels of the
//! libraries anew with each change of theirs.
#![forbid(unsafe_code)]

use std::io::Cursor;

use fast_image_resize::images::{TypedImage, TypedImageRef};
use fast_image_resize::pixels::U8x3;
use fast_image_resize::{FilterType, ResizeAlg, ResizeOptions, Resizer};
use phalanx_base::files::image_kind;
use zune_core::colorspace::ColorSpace;
use zune_core::options::DecoderOptions;
use zune_jpeg::JpegDecoder;

/// Most pixels of an image. A file of a few bytes can claim any number.
const MAX_PIXELS: usize = 1 << 27;

/// An image: rows of pixels of three bytes, red, green and blue.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rgb {
    /// Pixels of a row.
    pub width: usize,
    /// Rows.
    pub height: usize,
    /// The bytes.
    pub pixels: Vec<u8>,
}

/// Decodes a JPEG or PNG file, as Pillow's `convert("RGB")`: gray is copied to three channels, transparency is dropped, CMYK is
/// converted, and the orientation in EXIF is not applied. Of 16 bits a value, the upper 8 are taken.
///
/// # Errors
///
/// What is wrong with the file.
pub fn decode(bytes: &[u8]) -> Result<Rgb, String> {
    match image_kind(bytes) {
        "JPEG" => jpeg(bytes),
        "PNG" => png(bytes),
        _ if bytes.is_empty() => Err("the file is empty".to_owned()),
        "" => Err("it is no image; only JPEG and PNG images are read".to_owned()),
        kind => Err(format!("it is {kind}; only JPEG and PNG images are read")),
    }
}

/// `image` with `height` x `width` pixels, as Pillow resizes: bilinear, with antialiasing.
///
/// # Errors
///
/// Sizes that the library refuses.
pub fn resized(image: &Rgb, [height, width]: [usize; 2]) -> Result<Rgb, String> {
    let size = (image.width as u32, image.height as u32);
    // Of one type of pixels: all others would be compiled, too.
    let from = TypedImageRef::<U8x3>::from_buffer(size.0, size.1, &image.pixels);
    let from = from.map_err(|error| error.to_string())?;
    let mut to = TypedImage::<U8x3>::new(width as u32, height as u32);
    let bilinear = ResizeAlg::Convolution(FilterType::Bilinear);
    let options = ResizeOptions::new().resize_alg(bilinear);
    (Resizer::new().resize_typed(&from, &mut to, &options)).map_err(|error| error.to_string())?;
    Ok(Rgb {
        width,
        height,
        pixels: to.pixels().iter().flat_map(|pixel| pixel.0).collect(),
    })
}

fn check_size(width: usize, height: usize) -> Result<(), String> {
    match width.saturating_mul(height) {
        0 => Err("it has no pixels".to_owned()),
        pixels if pixels > MAX_PIXELS => Err(format!(
            "it has {width} x {height} pixels; the limit is {MAX_PIXELS}"
        )),
        _ => Ok(()),
    }
}

fn jpeg(bytes: &[u8]) -> Result<Rgb, String> {
    let options = DecoderOptions::default()
        .jpeg_set_out_colorspace(ColorSpace::RGB)
        .set_strict_mode(true);
    let mut decoder = JpegDecoder::new_with_options(Cursor::new(bytes), options);
    let damaged = |error| format!("it is no whole JPEG: {error}");
    decoder.decode_headers().map_err(damaged)?;
    let info = decoder.info().ok_or("it is no whole JPEG")?;
    let (width, height) = (usize::from(info.width), usize::from(info.height));
    check_size(width, height)?;
    let pixels = decoder.decode().map_err(damaged)?;
    // The decoder does not miss the end of the last row.
    if !bytes.windows(2).rev().any(|end| end == [0xff, 0xd9]) {
        return Err("it is no whole JPEG: its end is missing".to_owned());
    }
    let expected = width * height * 3;
    match pixels.len() == expected {
        true => Ok(Rgb {
            width,
            height,
            pixels,
        }),
        false => Err(format!(
            "it has {} bytes of pixels, expected {expected}",
            pixels.len()
        )),
    }
}

fn png(bytes: &[u8]) -> Result<Rgb, String> {
    let damaged = |error| format!("it is no whole PNG: {error}");
    let mut decoder = png::Decoder::new(Cursor::new(bytes));
    decoder.set_transformations(png::Transformations::normalize_to_color8());
    let mut reader = decoder.read_info().map_err(damaged)?;
    let (width, height) = reader.info().size();
    let (width, height) = (width as usize, height as usize);
    check_size(width, height)?;
    let length = reader.output_buffer_size().ok_or("it is too large")?;
    let mut pixels = vec![0; length];
    let frame = reader.next_frame(&mut pixels).map_err(damaged)?;
    pixels.truncate(frame.buffer_size());
    let channels = frame.color_type.samples();
    if channels != 3 {
        let of = |pixel: &[u8]| match pixel {
            [red, green, blue, _] => [*red, *green, *blue],
            [gray, ..] => [*gray; 3],
            [] => [0; 3],
        };
        pixels = pixels.chunks_exact(channels).flat_map(of).collect();
    }
    Ok(Rgb {
        width,
        height,
        pixels,
    })
}
