//! Memory layout of source pixels in bf16: the sixteen (or 32) outputs of a tile read
//! them at constant distances, under every tap.
//!
//! The grid is cut into *units*: images, or bands of large ones. Pixels stand in
//! *slots*; a layout holds one or several *copies* of a unit's pixels, shifted
//! against each other, so that output p under tap t reads slot
//! `slot_of(p) + shift(t)`.
//!
//! Where slots are neighbours in a tile's row (weight gradients), rows that do not begin
//! on a cache line take twice as long to load: lines are added until every unit begins
//! on one, and shifts that are not whole lines get separate copies.

use super::DEPTH;
use super::window::{MAX_TAPS, Window};

/// Outputs of a unit at most, in forward passes and input gradients.
pub(super) const FORWARD_PIXELS: usize = 2048;
/// The same in weight gradients: both packed operands stay in the L1 cache.
pub(super) const WEIGHT_PIXELS: usize = 512;

pub(super) struct Layout {
    /// Windows of few channels are gathered: a slot holds all taps of an output.
    pub gathered: bool,
    /// Outputs in a row after which the next tile may start anywhere; units lie
    /// one after another without a gap.
    pub flat: bool,
    /// Units of the whole batch.
    pub units: usize,
    /// Units of an image.
    bands: usize,
    /// Rows of the grid in a unit.
    pub band: usize,
    /// Outputs of a unit.
    pub pixels: usize,
    /// Columns of the grid.
    columns: usize,
    /// Rows and slots of a row, of each unit in a copy.
    pub lines: usize,
    pub width: usize,
    /// All copies, and how many of them are packed from the source: the others are earlier
    /// ones shifted.
    pub copies: usize,
    pub packed: usize,
    /// For each shifted copy: the packed copy, and by how many slots it is shifted.
    shifted: [(usize, usize); MAX_TAPS],
    /// Source row and column of each copy's first slot, in the first band.
    first: [[isize; 2]; MAX_TAPS],
    /// Rows and columns of the source between slots.
    steps: [usize; 2],
    /// Channels of a slot, a multiple of 32.
    pub slot: usize,
    /// Values from a slot to the next, where slots are rows of a tile: not a multiple of
    /// 512 bytes, or the rows would share few sets of the L1 cache.
    pub pitch: usize,
    /// Products over slots: taps, or one when gathered.
    pub taps: usize,
    /// Copy and slots' distance in it, for each tap.
    reads: [(usize, usize); MAX_TAPS],
}

fn pitch(slot: usize) -> usize {
    if slot.is_multiple_of(256) {
        slot + DEPTH
    } else {
        slot
    }
}

impl Layout {
    /// For tiles of `tile` outputs, units of `most` outputs if rows allow.
    pub(super) fn new(w: &Window, tile: usize, most: usize) -> Self {
        let [rows, columns] = w.grid;
        let band = (1..=rows)
            .rev()
            .find(|b| rows.is_multiple_of(*b) && (b * columns <= most || *b == 1))
            .unwrap_or(1);
        let bands = rows / band.max(1);
        let mut l = Layout {
            gathered: w.gathered(),
            flat: true,
            units: w.images * bands,
            bands: bands.max(1),
            band,
            pixels: band * columns,
            columns: columns.max(1),
            lines: band,
            width: columns,
            copies: 0,
            packed: 0,
            shifted: [(0, 0); MAX_TAPS],
            first: [[0; 2]; MAX_TAPS],
            steps: w.step,
            slot: w.channels,
            pitch: pitch(w.channels),
            taps: w.count,
            reads: [(0, 0); MAX_TAPS],
        };
        if l.gathered {
            l.slot = w.depth().next_multiple_of(DEPTH);
            l.pitch = pitch(l.slot);
            (l.copies, l.packed, l.taps) = (1, 1, 1);
            return l;
        }
        let offsets = &w.offsets[..w.count];
        if w.count == 1 || !l.pixels.is_multiple_of(tile) {
            for (t, &o) in offsets.iter().enumerate() {
                l.first[t] = o;
                l.reads[t] = (t, 0);
            }
            (l.copies, l.packed) = (w.count, w.count);
            return l;
        }
        l.flat = false;
        let low = |d: usize| offsets.iter().map(|o| o[d]).min().unwrap_or(0);
        let high = |d: usize| offsets.iter().map(|o| o[d]).max().unwrap_or(0);
        let padded = tile == 16 && columns.is_multiple_of(tile) && w.step[1] == 1;
        if padded {
            l.width += (high(1) - low(1)) as usize;
        }
        for (t, o) in offsets.iter().enumerate() {
            let down = (o[0] - low(0)) as usize;
            let (phase, shift) = (down % w.step[0], down / w.step[0]);
            l.lines = l.lines.max(band + shift);
            let column = if padded { low(1) } else { o[1] };
            let first = [low(0) + phase as isize, column];
            let copy = l.first[..l.copies].iter().position(|f| *f == first);
            let copy = copy.unwrap_or_else(|| {
                l.first[l.copies] = first;
                l.copies += 1;
                l.copies - 1
            });
            l.reads[t] = (copy, shift * l.width + (o[1] - column) as usize);
        }
        l.packed = l.copies;
        if tile == DEPTH {
            l.align();
        }
        l
    }

    /// Aligns every unit to cache lines, under every tap.
    fn align(&mut self) {
        while !(self.lines * self.width).is_multiple_of(DEPTH) {
            self.lines += 1;
        }
        for tap in 0..self.taps {
            let read = self.reads[tap];
            if read.1.is_multiple_of(DEPTH) {
                continue;
            }
            let known = self.copies - self.packed;
            let copy = self.shifted[..known].iter().position(|s| *s == read);
            if copy.is_none() {
                self.shifted[known] = read;
                self.copies += 1;
            }
            let copy = copy.unwrap_or(known);
            self.reads[tap] = (self.packed + copy, 0);
        }
    }

    /// The packed copy of a shifted copy, and by how many slots it is shifted.
    pub(super) fn shifted(&self, copy: usize) -> (usize, usize) {
        self.shifted[copy - self.packed]
    }

    /// Slots of one unit in one copy.
    pub(super) fn unit_slots(&self) -> usize {
        self.lines * self.width
    }

    /// Slot of output `p`, counted over units from the first one packed.
    pub(super) fn slot_of(&self, p: usize) -> usize {
        let (unit, p) = (p / self.pixels, p % self.pixels);
        unit * self.unit_slots() + p / self.columns * self.width + p % self.columns
    }

    /// Copy that a tap reads, and how many slots from an output's own.
    pub(super) fn read(&self, tap: usize) -> (usize, usize) {
        self.reads[tap]
    }

    /// Image of a unit, and its first row in the grid.
    pub(super) fn place(&self, unit: usize) -> (usize, usize) {
        (unit / self.bands, unit % self.bands * self.band)
    }

    /// Source row of a copy's line, for a unit that starts at `row` of the grid.
    pub(super) fn row(&self, copy: usize, row: usize, line: usize) -> isize {
        self.first[copy][0] + ((row + line) * self.steps[0]) as isize
    }

    /// Source column of a copy's slot in a line.
    pub(super) fn column(&self, copy: usize, at: usize) -> isize {
        self.first[copy][1] + (at * self.steps[1]) as isize
    }

    /// If this copy is an unshifted copy moved by one pixel: that copy, and whether it moves
    /// left.
    pub(super) fn moved(&self, w: &Window, copy: usize) -> Option<(usize, bool)> {
        let [row, column] = self.first[copy];
        let whole = self.dense() && self.width == w.source[1] && DEPTH.is_multiple_of(self.width);
        if self.gathered || !whole || column.abs() != 1 {
            return None;
        }
        let from = self.first[..self.packed]
            .iter()
            .position(|f| *f == [row, 0])?;
        Some((from, column == 1))
    }

    /// Whether the slots of a line are neighbours in the source.
    pub(super) fn dense(&self) -> bool {
        self.steps[1] == 1
    }
}
