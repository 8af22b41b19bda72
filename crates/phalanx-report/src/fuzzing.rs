//! Fuzz target for the reader of image files. The test here runs it on garbled seeds.

use std::fs::File;
use std::io::Write;
use std::os::fd::AsRawFd;
use std::path::PathBuf;

/// Name, function and seeds of a target.
pub type Target = (&'static str, fn(&[u8]), fn() -> Vec<Vec<u8>>);

/// All fuzz targets of this crate.
pub const TARGETS: &[Target] = &[("report_image", image, image_seeds)];

/// A memory file with these bytes, and a path to it.
fn file(bytes: &[u8]) -> Option<(File, PathBuf)> {
    let mut file = tempfile::tempfile().ok()?;
    file.write_all(bytes).ok()?;
    let path = format!("/proc/self/fd/{}", file.as_raw_fd()).into();
    Some((file, path))
}

fn image(data: &[u8]) {
    if let Some((_file, path)) = file(data) {
        for channels in [1, 3] {
            if let Ok(pixels) = crate::image::read(&path, [2, 2, channels]) {
                assert_eq!(pixels.len(), 4 * channels);
            }
        }
    }
}

fn image_seeds() -> Vec<Vec<u8>> {
    let png = || -> Option<Vec<u8>> {
        let mut out = Vec::new();
        let mut encoder = png::Encoder::new(&mut out, 2, 2);
        encoder.set_color(png::ColorType::Grayscale);
        let mut writer = encoder.write_header().ok()?;
        writer.write_image_data(&[1, 2, 3, 4]).ok()?;
        writer.finish().ok()?;
        Some(out)
    };
    let pgm = b"P5 # c\n2 2\n255\n\x01\x02\x03\x04".to_vec();
    png().into_iter().chain([pgm]).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_target_survives_garbled_seeds() {
        for (_, run, seeds) in TARGETS {
            phalanx_garble::feed(&seeds(), 1500, run);
        }
    }
}
