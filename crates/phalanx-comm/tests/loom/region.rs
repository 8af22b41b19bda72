//! The model of `region`: two positions and a few cells of data.
//! Cells complain when one is read while another thread may write it.

use loom::cell::UnsafeCell;

use crate::sync::AtomicU64;

/// Data bytes that share one cell; transfers of the tests are multiples.
pub(crate) const CELL_BYTES: usize = 32;
/// Bytes in front of the data.
const HEADER_BYTES: usize = 256;

/// Memory for one ring at offset 0. In place of `CELL_BYTES` bytes only the
/// first is kept.
pub(crate) struct Region {
    bytes: usize,
    tail: AtomicU64,
    head: AtomicU64,
    cells: Vec<UnsafeCell<u8>>,
}

impl Region {
    pub(crate) fn with_ring(capacity: usize) -> Region {
        Region {
            bytes: HEADER_BYTES + capacity,
            tail: AtomicU64::new(0),
            head: AtomicU64::new(0),
            cells: (0..capacity / CELL_BYTES)
                .map(|_| UnsafeCell::new(0))
                .collect(),
        }
    }

    pub(crate) fn len(&self) -> usize {
        self.bytes
    }

    pub(crate) fn u64_at(&self, offset: usize) -> &AtomicU64 {
        match offset {
            0 => &self.tail,
            128 => &self.head,
            _ => panic!("no position at {offset}"),
        }
    }

    fn cells(&self, offset: usize, bytes: usize) -> &[UnsafeCell<u8>] {
        let first = (offset - HEADER_BYTES) / CELL_BYTES;
        assert!(offset.is_multiple_of(CELL_BYTES) && bytes.is_multiple_of(CELL_BYTES));
        &self.cells[first..first + bytes / CELL_BYTES]
    }

    pub(crate) unsafe fn write_at(&self, offset: usize, bytes: &[u8]) {
        for (cell, run) in self
            .cells(offset, bytes.len())
            .iter()
            .zip(bytes.chunks(CELL_BYTES))
        {
            // SAFETY: loom fails the test if anybody else uses the cell now.
            cell.with_mut(|at| unsafe { *at = run[0] });
        }
    }

    pub(crate) unsafe fn read_at(&self, offset: usize, into: &mut [u8]) {
        for (cell, run) in self
            .cells(offset, into.len())
            .iter()
            .zip(into.chunks_mut(CELL_BYTES))
        {
            // SAFETY: loom fails the test if anybody writes the cell now.
            run.fill(cell.with(|at| unsafe { *at }));
        }
    }
}
