//! A byte ring from one producer to one consumer over memory they share.
//!
//! ```text
//! offset 0     tail: bytes ever written   (written by the producer only)
//!        128   head: bytes ever read      (written by the consumer only)
//!        256   data, `capacity` bytes, a power of two
//! ```
//!
//! Positions only grow; the byte at position p lives at `p % capacity`. Each
//! side keeps its own position privately and never reads it back, so a peer
//! cannot move it. The other side's position is checked on every read: it may neither
//! decrease nor claim more than the ring holds. A violation is a protocol error, not a
//! memory error.

use std::fmt;
use std::sync::Arc;

use crate::region::Region;
use crate::sync::{AtomicU64, Ordering};

/// Distance between the positions, so that each has its own cache lines (two 64-byte
/// lines: x86 prefetches them in pairs).
const LINE_BYTES: usize = 128;
/// Size of the positions before the data.
const HEADER_BYTES: usize = 2 * LINE_BYTES;
/// A transfer is published in pieces of this size, so that the other side
/// works on the first piece while the second is copied.
const PIECE_BYTES: usize = 64 << 10;

/// Smallest and largest capacity a ring may have.
pub(crate) const MIN_CAPACITY_BYTES: usize = 64;
/// See [`MIN_CAPACITY_BYTES`].
pub(crate) const MAX_CAPACITY_BYTES: usize = 1 << 30;

/// Bytes that a ring with `capacity` bytes takes in a region.
pub(crate) const fn ring_bytes(capacity: usize) -> usize {
    HEADER_BYTES + capacity
}

/// The other side's position is invalid.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Corrupt {
    claimed: u64,
    lowest: u64,
    highest: u64,
}

impl fmt::Display for Corrupt {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "its ring position is {} where {} to {} is possible: the shared memory was overwritten",
            self.claimed, self.lowest, self.highest
        )
    }
}

/// The place and capacity of a ring, known to both ends.
struct Shape {
    region: Arc<Region>,
    offset: usize,
    capacity: usize,
}

impl Shape {
    /// # Panics
    ///
    /// When the ring is not inside the region or its capacity is not a power of two:
    /// layouts are computed here, never read from a peer.
    fn new(region: Arc<Region>, offset: usize, capacity: usize) -> Shape {
        assert!(capacity.is_power_of_two() && capacity >= MIN_CAPACITY_BYTES);
        assert!(offset.is_multiple_of(LINE_BYTES));
        assert!(region.len() >= ring_bytes(capacity));
        assert!(offset <= region.len() - ring_bytes(capacity));
        Shape {
            region,
            offset,
            capacity,
        }
    }

    fn tail(&self) -> &AtomicU64 {
        self.region.u64_at(self.offset)
    }

    fn head(&self) -> &AtomicU64 {
        self.region.u64_at(self.offset + LINE_BYTES)
    }

    /// The contiguous piece that starts at `position`: offset in the region
    /// and length, at most `wanted`.
    fn piece(&self, position: u64, wanted: usize) -> (usize, usize) {
        let at = (position & (self.capacity as u64 - 1)) as usize;
        let length = wanted.min(self.capacity - at);
        (self.offset + HEADER_BYTES + at, length)
    }
}

/// Reads the other side's position and refuses invalid ones.
fn checked(position: &AtomicU64, lowest: u64, highest: u64) -> Result<u64, Corrupt> {
    // SeqCst: also the re-check of the sleep protocol (wait/README.md, W2).
    let claimed = position.load(Ordering::SeqCst);
    if claimed < lowest || claimed > highest {
        return Err(Corrupt {
            claimed,
            lowest,
            highest,
        });
    }
    Ok(claimed)
}

/// The sending end. There must be only one per ring.
pub(crate) struct Producer {
    shape: Shape,
    /// Bytes ever written; the shared `tail` is a copy of it.
    tail: u64,
    /// The last `head` seen: saves reading the consumer's cache line while it leaves
    /// enough room.
    head: u64,
}

impl Producer {
    /// The sending end of the ring at `offset`, whose memory is still zero.
    pub(crate) fn new(region: Arc<Region>, offset: usize, capacity: usize) -> Producer {
        Producer {
            shape: Shape::new(region, offset, capacity),
            tail: 0,
            head: 0,
        }
    }

    fn room(&self) -> usize {
        self.shape.capacity - (self.tail - self.head) as usize
    }

    fn refresh(&mut self) -> Result<(), Corrupt> {
        self.head = checked(self.shape.head(), self.head, self.tail)?;
        Ok(())
    }

    /// Whether at least one byte can be written now.
    pub(crate) fn writable(&mut self) -> Result<bool, Corrupt> {
        if self.room() == 0 {
            self.refresh()?;
        }
        Ok(self.room() > 0)
    }

    /// Writes as much of `bytes` as fits and returns the number of bytes. `published`
    /// is called after each piece that the consumer can see.
    pub(crate) fn write(
        &mut self,
        bytes: &[u8],
        mut published: impl FnMut(),
    ) -> Result<usize, Corrupt> {
        let mut done = 0;
        while done < bytes.len() {
            let wanted = (bytes.len() - done).min(PIECE_BYTES);
            if self.room() < wanted {
                self.refresh()?;
            }
            let mut left = wanted.min(self.room());
            if left == 0 {
                break;
            }
            while left > 0 {
                let (target, length) = self.shape.piece(self.tail, left);
                // SAFETY: the piece is free: positions [tail, head + capacity)
                // belong to the producer until `tail` is published below, and
                // there is one producer.
                unsafe {
                    let region = &self.shape.region;
                    region.write_at(target, &bytes[done..done + length]);
                }
                self.tail += length as u64;
                done += length;
                left -= length;
            }
            // Publishes the bytes above; SeqCst for the bell (P1).
            self.shape.tail().store(self.tail, Ordering::SeqCst);
            published();
        }
        Ok(done)
    }
}

/// The receiving end. There must be only one per ring.
pub(crate) struct Consumer {
    shape: Shape,
    /// Bytes ever read; the shared `head` is a copy of it.
    head: u64,
    /// The last `tail` seen.
    tail: u64,
}

impl Consumer {
    /// The receiving end of the ring at `offset`, whose memory was zero when
    /// both ends were made.
    pub(crate) fn new(region: Arc<Region>, offset: usize, capacity: usize) -> Consumer {
        Consumer {
            shape: Shape::new(region, offset, capacity),
            head: 0,
            tail: 0,
        }
    }

    fn refresh(&mut self) -> Result<(), Corrupt> {
        let highest = self.head + self.shape.capacity as u64;
        self.tail = checked(self.shape.tail(), self.tail, highest)?;
        Ok(())
    }

    /// Whether at least one byte can be read now.
    pub(crate) fn readable(&mut self) -> Result<bool, Corrupt> {
        if self.tail == self.head {
            self.refresh()?;
        }
        Ok(self.tail != self.head)
    }

    /// Reads the available bytes, at most `into.len()`, and returns their number.
    /// `freed` is called after each piece that the producer may reuse.
    pub(crate) fn read(
        &mut self,
        into: &mut [u8],
        mut freed: impl FnMut(),
    ) -> Result<usize, Corrupt> {
        let mut done = 0;
        while done < into.len() {
            if self.tail == self.head {
                self.refresh()?;
            }
            let available = (self.tail - self.head) as usize;
            let mut left = available.min(into.len() - done).min(PIECE_BYTES);
            if left == 0 {
                break;
            }
            while left > 0 {
                let (source, length) = self.shape.piece(self.head, left);
                // SAFETY: positions [head, tail) belong to the consumer until
                // `head` is published below; the load of `tail` made the
                // producer's bytes visible.
                unsafe {
                    let region = &self.shape.region;
                    region.read_at(source, &mut into[done..done + length]);
                }
                self.head += length as u64;
                done += length;
                left -= length;
            }
            self.shape.head().store(self.head, Ordering::SeqCst);
            freed();
        }
        Ok(done)
    }
}

#[cfg(all(test, not(loom)))]
#[path = "ring_tests.rs"]
mod tests;
