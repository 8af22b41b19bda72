//! The fixed 64-byte header in front of every payload between two ranks.
//!
//! | bytes | field | bytes | field |
//! |---|---|---|---|
//! | 0..4 | magic `PHLX` | 24..32 | seq |
//! | 4 | version | 32..40 | count |
//! | 5 | kind | 40..48 | offset |
//! | 6..8 | flags | 48..52 | length |
//! | 8, 9, 10, 11 | dtype, op, collective, plan | 52..56 | root |
//! | 12..16 | generation | 56..58 | stream |
//! | 16..20 | group | 58..60 | reserved, zero |
//! | 20..24 | step | 60..64 | CRC-32C of bytes 0..60 |
//!
//! A frame does not decide where its payload goes. The receiver knows from the plan
//! of its operation which header comes next, and compares.

use crate::bytes::{Reader, Writer};
use crate::{Error, ErrorKind, Result};

/// Maximum payload of one frame (16 MiB).
pub const MAX_FRAME_BYTES: u32 = 16 << 20;

/// Version of the frame layout.
pub const VERSION: u8 = 1;

/// First four bytes of every frame.
pub const MAGIC: [u8; 4] = *b"PHLX";

/// Offset of the checksum, which covers everything before it.
const CRC_AT: usize = Header::BYTES - 4;

/// Type of a frame. Codes 2 and 4 are not used.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
#[non_exhaustive]
pub enum Kind {
    /// Payload of a collective or of a send.
    Data = 1,
    /// The sender has failed; the payload is the cause as UTF-8 text.
    Abort = 3,
    /// The sender leaves normally; the end of the stream that follows is not a
    /// failure.
    Goodbye = 5,
}

crate::codes! { Kind as u8: Data, Abort, Goodbye }

/// One frame header. The codec does not interpret the fields after `kind`: the
/// receiver compares them with those its operation expects.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Header {
    /// Type of the frame.
    pub kind: Kind,
    /// Flags; their meaning depends on the kind.
    pub flags: u16,
    /// Code of the element type.
    pub dtype: u8,
    /// Code of the reduce operation.
    pub op: u8,
    /// Code of the collective.
    pub collective: u8,
    /// Code of the algorithm; both sides must use the same one.
    pub plan: u8,
    /// Generation of the job's groups: how often they were formed again.
    pub generation: u32,
    /// Number of the group within the generation.
    pub group: u32,
    /// Number of the operation within the group.
    pub seq: u64,
    /// Step of the plan within the operation.
    pub step: u32,
    /// Which connection of the pair: 0 for data, 1 for control.
    pub stream: u16,
    /// Root rank of a rooted collective, otherwise 0.
    pub root: u32,
    /// Number of elements of the whole collective.
    pub count: u64,
    /// Offset of the payload within its transfer, in bytes.
    pub offset: u64,
    /// Number of payload bytes that follow this header.
    pub length: u32,
}

impl Header {
    /// Encoded size in bytes.
    pub const BYTES: usize = 64;

    /// A header of this kind with all other fields zero.
    pub const fn new(kind: Kind) -> Self {
        Self {
            kind,
            flags: 0,
            dtype: 0,
            op: 0,
            collective: 0,
            plan: 0,
            generation: 0,
            group: 0,
            seq: 0,
            step: 0,
            stream: 0,
            root: 0,
            count: 0,
            offset: 0,
            length: 0,
        }
    }

    /// The header as bytes, checksum included. Does not check limits:
    /// [`decode`](Self::decode) refuses fields beyond them.
    pub fn encode(&self) -> [u8; Self::BYTES] {
        let mut out = [0; Self::BYTES];
        Writer::new(&mut out)
            .put(&MAGIC)
            .put(&[VERSION, self.kind as u8])
            .put(&self.flags.to_le_bytes())
            .put(&[self.dtype, self.op, self.collective, self.plan])
            .put(&self.generation.to_le_bytes())
            .put(&self.group.to_le_bytes())
            .put(&self.step.to_le_bytes())
            .put(&self.seq.to_le_bytes())
            .put(&self.count.to_le_bytes())
            .put(&self.offset.to_le_bytes())
            .put(&self.length.to_le_bytes())
            .put(&self.root.to_le_bytes())
            .put(&self.stream.to_le_bytes());
        seal(&mut out);
        out
    }

    /// Decodes a header.
    ///
    /// # Errors
    /// [`ErrorKind::BadMagic`], [`WrongVersion`](ErrorKind::WrongVersion),
    /// [`BadCrc`](ErrorKind::BadCrc), and, under a correct checksum,
    /// [`UnknownCode`](ErrorKind::UnknownCode),
    /// [`ReservedNotZero`](ErrorKind::ReservedNotZero),
    /// [`FrameTooLong`](ErrorKind::FrameTooLong),
    /// [`OffsetOverflow`](ErrorKind::OffsetOverflow).
    pub fn decode(bytes: &[u8; Self::BYTES]) -> Result<Header> {
        let mut r = Reader::new(bytes);
        r.start(MAGIC, VERSION)?;
        // Before any other field is used.
        let computed = crc32c::crc32c(&bytes[..CRC_AT]);
        let crc = bytes.last_chunk().map_or(0, |crc| u32::from_le_bytes(*crc));
        if crc != computed {
            return Err(Error::with(ErrorKind::BadCrc, crc, computed));
        }
        let header = Header {
            kind: Kind::from_code(r.u8()?)?,
            flags: r.u16()?,
            dtype: r.u8()?,
            op: r.u8()?,
            collective: r.u8()?,
            plan: r.u8()?,
            generation: r.u32()?,
            group: r.u32()?,
            step: r.u32()?,
            seq: r.u64()?,
            count: r.u64()?,
            offset: r.u64()?,
            length: r.u32()?,
            root: r.u32()?,
            stream: r.u16()?,
        };
        let Header { offset, length, .. } = header;
        let reserved = r.u16()?;
        if reserved != 0 {
            return Err(Error::with(ErrorKind::ReservedNotZero, reserved, 0u8));
        }
        if length > MAX_FRAME_BYTES {
            return Err(Error::with(
                ErrorKind::FrameTooLong,
                length,
                MAX_FRAME_BYTES,
            ));
        }
        if offset.checked_add(u64::from(length)).is_none() {
            return Err(Error::with(ErrorKind::OffsetOverflow, offset, length));
        }
        Ok(header)
    }
}

/// Writes the checksum into the last four bytes.
pub(crate) fn seal(bytes: &mut [u8; Header::BYTES]) {
    let crc = crc32c::crc32c(&bytes[..CRC_AT]);
    bytes[CRC_AT..].copy_from_slice(&crc.to_le_bytes());
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample() -> Header {
        Header {
            kind: Kind::Data,
            flags: 0x8001,
            dtype: 2,
            op: 3,
            collective: 4,
            plan: 5,
            generation: 6,
            group: 7,
            seq: u64::MAX,
            step: 9,
            stream: 10,
            root: 11,
            count: 1 << 40,
            offset: 1 << 33,
            length: MAX_FRAME_BYTES,
        }
    }

    /// Encodes a header, changes it, updates the checksum, and decodes it.
    fn decode_changed(change: impl FnOnce(&mut [u8; Header::BYTES])) -> ErrorKind {
        let mut bytes = sample().encode();
        change(&mut bytes);
        seal(&mut bytes);
        Header::decode(&bytes).unwrap_err().kind()
    }

    #[test]
    fn round_trip_of_every_kind() {
        for kind in Kind::ALL {
            let header = Header { kind, ..sample() };
            assert_eq!(Header::decode(&header.encode()).unwrap(), header);
            let empty = Header::new(kind);
            assert_eq!(Header::decode(&empty.encode()).unwrap(), empty);
        }
    }

    /// The layout is fixed: this fails when a field moves.
    #[test]
    fn layout_is_as_documented() {
        let bytes = sample().encode();
        assert_eq!(&bytes[0..8], b"PHLX\x01\x01\x01\x80");
        assert_eq!(bytes[8..12], [2, 3, 4, 5]);
        assert_eq!(bytes[12..16], 6u32.to_le_bytes());
        assert_eq!(bytes[16..20], 7u32.to_le_bytes());
        assert_eq!(bytes[20..24], 9u32.to_le_bytes());
        assert_eq!(bytes[24..32], [0xff; 8]);
        assert_eq!(bytes[32..40], (1u64 << 40).to_le_bytes());
        assert_eq!(bytes[40..48], (1u64 << 33).to_le_bytes());
        assert_eq!(bytes[48..52], MAX_FRAME_BYTES.to_le_bytes());
        assert_eq!(bytes[52..56], 11u32.to_le_bytes());
        assert_eq!(bytes[56..60], [10, 0, 0, 0]);
    }

    #[test]
    fn crc_is_crc_32c() {
        // The check value of the Castagnoli polynomial.
        assert_eq!(crc32c::crc32c(b"123456789"), 0xe306_9283);
    }

    #[test]
    fn bad_magic() {
        assert_eq!(decode_changed(|b| b[0] = b'Q'), ErrorKind::BadMagic);
        let mut http = [b' '; 64];
        http[..14].copy_from_slice(b"GET /metrics H");
        let error = Header::decode(&http).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::BadMagic);
        assert!(error.to_string().contains("47455420 \"GET \""), "{error}");
    }

    #[test]
    fn wrong_version() {
        assert_eq!(decode_changed(|b| b[4] = 2), ErrorKind::WrongVersion);
    }

    #[test]
    fn bad_crc_for_every_single_bit() {
        let good = sample().encode();
        for bit in 5 * 8..Header::BYTES * 8 {
            let mut bytes = good;
            bytes[bit / 8] ^= 1 << (bit % 8);
            let error = Header::decode(&bytes).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::BadCrc, "bit {bit}");
        }
    }

    #[test]
    fn unknown_kind() {
        for code in [0, 2, 4, 6, 255] {
            assert_eq!(decode_changed(|b| b[5] = code), ErrorKind::UnknownCode);
        }
    }

    #[test]
    fn reserved_not_zero() {
        assert_eq!(decode_changed(|b| b[58] = 1), ErrorKind::ReservedNotZero);
        assert_eq!(decode_changed(|b| b[59] = 0x80), ErrorKind::ReservedNotZero);
    }

    #[test]
    fn frame_too_long() {
        let long = (MAX_FRAME_BYTES + 1).to_le_bytes();
        assert_eq!(
            decode_changed(|b| b[48..52].copy_from_slice(&long)),
            ErrorKind::FrameTooLong
        );
    }

    #[test]
    fn offset_overflow() {
        assert_eq!(
            decode_changed(|b| b[40..48].copy_from_slice(&[0xff; 8])),
            ErrorKind::OffsetOverflow
        );
    }
}
