//! Reading and writing little-endian fields, one at a time.

use crate::{Error, ErrorKind, Result};

/// A cursor over received bytes; every read is checked.
pub(crate) struct Reader<'a> {
    all: &'a [u8],
    at: usize,
}

impl<'a> Reader<'a> {
    pub(crate) fn new(all: &'a [u8]) -> Self {
        Self { all, at: 0 }
    }

    pub(crate) fn take(&mut self, len: usize) -> Result<&'a [u8]> {
        let needed = (self.at as u64).saturating_add(len as u64);
        let short = || Error::with(ErrorKind::Truncated, self.all.len() as u64, needed);
        let end = self.at.checked_add(len).ok_or_else(short)?;
        let got = self.all.get(self.at..end).ok_or_else(short)?;
        self.at = end;
        Ok(got)
    }

    pub(crate) fn array<const N: usize>(&mut self) -> Result<[u8; N]> {
        let mut out = [0; N];
        out.copy_from_slice(self.take(N)?);
        Ok(out)
    }

    pub(crate) fn u8(&mut self) -> Result<u8> {
        Ok(u8::from_le_bytes(self.array()?))
    }

    pub(crate) fn u16(&mut self) -> Result<u16> {
        Ok(u16::from_le_bytes(self.array()?))
    }

    pub(crate) fn u32(&mut self) -> Result<u32> {
        Ok(u32::from_le_bytes(self.array()?))
    }

    pub(crate) fn u64(&mut self) -> Result<u64> {
        Ok(u64::from_le_bytes(self.array()?))
    }

    /// Reads the start of a message: `magic`, then `version`.
    pub(crate) fn start(&mut self, magic: [u8; 4], version: u8) -> Result<()> {
        let found: [u8; 4] = self.array()?;
        if found != magic {
            let [found, magic] = [found, magic].map(u32::from_be_bytes);
            return Err(Error::with(ErrorKind::BadMagic, found, magic));
        }
        match self.u8()? {
            found if found == version => Ok(()),
            found => Err(Error::with(ErrorKind::WrongVersion, found, version)),
        }
    }

    pub(crate) fn left(&self) -> usize {
        self.all.len() - self.at
    }

    /// Checks that nothing follows the last field.
    pub(crate) fn end(self) -> Result<()> {
        match self.left() {
            0 => Ok(()),
            left => Err(Error::with(ErrorKind::TrailingBytes, left as u64, 0u8)),
        }
    }
}

/// A cursor that fills a fixed array. Layouts are constants, so a field that does
/// not fit is a bug of this crate, which the round-trip tests find; it is dropped.
pub(crate) struct Writer<'a> {
    all: &'a mut [u8],
    at: usize,
}

impl<'a> Writer<'a> {
    pub(crate) fn new(all: &'a mut [u8]) -> Self {
        Self { all, at: 0 }
    }

    pub(crate) fn put(&mut self, bytes: &[u8]) -> &mut Self {
        let end = self.at + bytes.len();
        debug_assert!(end <= self.all.len(), "layout longer than its array");
        if let Some(room) = self.all.get_mut(self.at..end) {
            room.copy_from_slice(bytes);
            self.at = end;
        }
        self
    }
}
