//! Compressed files.

use std::io::{BufRead, Error, ErrorKind, Read, Result};

use flate2::bufread::GzDecoder;

/// Unpacks one gzip stream after another. Zero bytes after a stream are skipped, as `gzip` does:
/// copies from tapes and block devices end with them.
pub(crate) struct Gzip<R>(Option<GzDecoder<R>>);

impl<R: BufRead> Gzip<R> {
    pub(crate) fn new(raw: R) -> Self {
        Gzip(Some(GzDecoder::new(raw)))
    }
}

impl<R: BufRead> Read for Gzip<R> {
    fn read(&mut self, buffer: &mut [u8]) -> Result<usize> {
        while let Some(stream) = &mut self.0 {
            let taken = stream.read(buffer)?;
            if taken > 0 || buffer.is_empty() {
                return Ok(taken);
            }
            if skip_zeros(stream.get_mut())? {
                break;
            }
            self.0 = self
                .0
                .take()
                .map(|stream| GzDecoder::new(stream.into_inner()));
        }
        Ok(0)
    }
}

/// First byte of a gzip stream.
const GZIP: u8 = 0x1f;

/// Whether `raw` ends after its zero bytes.
///
/// # Errors
///
/// `InvalidData` when something else than gzip follows.
fn skip_zeros(raw: &mut impl BufRead) -> Result<bool> {
    loop {
        let there = raw.fill_buf()?;
        let (zeros, len) = (there.iter().take_while(|b| **b == 0).count(), there.len());
        let next = there.get(zeros).copied();
        raw.consume(zeros);
        match next {
            _ if len == 0 => return Ok(true),
            Some(GZIP) => return Ok(false),
            Some(_) => {
                let why = "after the end of the compressed data there are bytes that are neither gzip nor zero";
                return Err(Error::new(ErrorKind::InvalidData, why));
            }
            None => {}
        }
    }
}
