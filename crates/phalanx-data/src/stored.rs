//! Images in memory, as read from the files of a data set.

use sha2::{Digest, Sha256};

use crate::dataset::{ImageDataset, check_read};
use phalanx_base::Result;

/// One split of a data set in memory, one byte per value. Values are scaled when read.
#[derive(Clone)]
pub struct StoredImages {
    pub(crate) name: &'static str,
    pub(crate) shape: [usize; 3],
    pub(crate) classes: usize,
    pub(crate) class_names: &'static [&'static str],
    pub(crate) pixels: Vec<u8>,
    pub(crate) labels: Vec<u8>,
    /// The scaled value of every byte, by channel.
    pub(crate) tables: Vec<[f32; 256]>,
}

impl StoredImages {
    fn elems(&self) -> usize {
        self.shape.iter().product()
    }

    /// The bytes of one image: rows of pixels, each with its channels. `None` beyond the end.
    pub fn pixels(&self, index: usize) -> Option<&[u8]> {
        self.pixels.chunks_exact(self.elems()).nth(index)
    }

    /// Keeps the first `samples` images.
    pub fn truncate(&mut self, samples: usize) {
        self.labels.truncate(samples);
        self.pixels.truncate(self.labels.len() * self.elems());
    }

    /// All labels in file order.
    pub fn labels(&self) -> &[u8] {
        &self.labels
    }

    /// SHA-256 of all pixels (as [`pixels`](Self::pixels)), then all labels, in hexadecimal.
    pub fn sha256(&self) -> String {
        let mut hash = Sha256::new();
        hash.update(&self.pixels);
        hash.update(&self.labels);
        hex::encode(hash.finalize())
    }
}

impl std::fmt::Debug for StoredImages {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} {}", self.name, self.labels.len())
    }
}

impl ImageDataset for StoredImages {
    fn name(&self) -> &str {
        self.name
    }

    fn len(&self) -> usize {
        self.labels.len()
    }

    fn image_shape(&self) -> [usize; 3] {
        self.shape
    }

    fn classes(&self) -> usize {
        self.classes
    }

    fn class_names(&self) -> Vec<String> {
        self.class_names.iter().map(ToString::to_string).collect()
    }

    fn content(&self) -> String {
        let sha256 = self.sha256();
        format!("{} {}, SHA-256 {sha256:.16}", self.name, self.len())
    }

    fn read(&self, index: usize, out: &mut [f32]) -> Result<u32> {
        check_read(self, index, out)?;
        scale(&self.tables, &self.pixels[index * out.len()..], out);
        Ok(u32::from(self.labels[index]))
    }
}

/// Scales the bytes of an image, each by the table of its channel.
pub(crate) fn scale(tables: &[[f32; 256]], pixels: &[u8], out: &mut [f32]) {
    match tables {
        [table] => (out.iter_mut().zip(pixels)).for_each(|(o, p)| *o = table[usize::from(*p)]),
        [red, green, blue] => {
            let (pixels, _) = pixels.as_chunks::<3>();
            for (out, [r, g, b]) in out.as_chunks_mut::<3>().0.iter_mut().zip(pixels) {
                *out = [
                    red[usize::from(*r)],
                    green[usize::from(*g)],
                    blue[usize::from(*b)],
                ];
            }
        }
        _ => {}
    }
}
