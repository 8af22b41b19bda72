//! Rounding to bf16, and the packed orders of the tiles' operands.

use super::layout::Layout;
use super::window::{MAX_RUNS, Window};
use super::{DEPTH, SIDE};
use crate::element::{Bf16, Element};
use crate::par::{Disjoint, ThreadPool};
use crate::vector::transpose;
use crate::{Mode, Precision};
use std::arch::x86_64::*;

/// Columns of a panel, and of a vector.
pub(super) const LANES: usize = 16;
/// Dwords of a panel's block: sixteen rows of sixteen pairs.
pub(super) const BLOCK: usize = LANES * LANES;

// Sixteen pairs of bf16 in a register. The functions below run in functions compiled for AVX-512 with bf16 only, on
// processors that have it (all of [`Family`](crate::Family) that multiply bf16). Pointers are valid for what is read
// or written.

/// Words 0, 16, 1, 17, …
#[repr(align(64))]
struct Words([u16; 32]);
static INTERLEAVED: Words = {
    let mut w = [0; 32];
    let mut i = 0;
    while i < 16 {
        w[2 * i] = i as u16;
        w[2 * i + 1] = (16 + i) as u16;
        i += 1;
    }
    Words(w)
};

/// Lane i: `low[i]` below `high[i]`, of sixteen values each.
#[inline(always)]
unsafe fn pair<S: Element>(low: *const S, high: *const S) -> __m512i {
    // SAFETY: see above; the values are of the type that `S` says.
    unsafe {
        let order = _mm512_load_si512((&raw const INTERLEAVED.0).cast());
        let both = match S::PRECISION {
            Precision::F32 => {
                let (low, high) = (low.cast(), high.cast());
                let both = _mm512_cvtne2ps_pbh(_mm512_loadu_ps(high), _mm512_loadu_ps(low));
                std::mem::transmute::<__m512bh, __m512i>(both)
            }
            Precision::Bf16 => {
                let both = _mm512_castsi256_si512(_mm256_loadu_si256(low.cast()));
                _mm512_inserti64x4::<1>(both, _mm256_loadu_si256(high.cast()))
            }
        };
        _mm512_permutexvar_epi16(order, both)
    }
}

/// 32 values in their order.
#[inline(always)]
unsafe fn narrow<S: Element>(from: *const S) -> __m512i {
    // SAFETY: see above; the values are of the type that `S` says.
    unsafe {
        match S::PRECISION {
            Precision::F32 => {
                let from = from.cast::<f32>();
                let (low, high) = (_mm512_loadu_ps(from), _mm512_loadu_ps(from.add(LANES)));
                std::mem::transmute::<__m512bh, __m512i>(_mm512_cvtne2ps_pbh(high, low))
            }
            Precision::Bf16 => _mm512_loadu_si512(from.cast()),
        }
    }
}

/// 32 values in their order, each added to the value in `to`.
#[inline(always)]
unsafe fn add_narrow(from: *const f32, to: *const Bf16) -> __m512i {
    // SAFETY: see above.
    unsafe {
        let sum = |i: usize| {
            let t = _mm256_loadu_si256(to.add(i).cast());
            let t = _mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(t));
            _mm512_add_ps(_mm512_castsi512_ps(t), _mm512_loadu_ps(from.add(i)))
        };
        std::mem::transmute::<__m512bh, __m512i>(_mm512_cvtne2ps_pbh(sum(LANES), sum(0)))
    }
}

/// Stores 64 bytes.
#[inline(always)]
unsafe fn store(r: __m512i, to: *mut u32) {
    // SAFETY: see above.
    unsafe { _mm512_storeu_si512(to.cast(), r) }
}

/// Prefetches a line that will be read soon; any address is allowed.
#[inline(always)]
unsafe fn fetch<S: Element>(at: *const S) {
    // SAFETY: a hint.
    unsafe { _mm_prefetch::<_MM_HINT_T0>(at.cast()) }
}

static ZEROS: [f32; DEPTH] = [0.0; DEPTH];

/// 32 zeros: of either type they are zero bytes.
#[inline(always)]
fn zeros<S: Element>() -> *const S {
    ZEROS.as_ptr().cast()
}

/// Dwords of the packed weights of a window with `columns` outputs.
pub(super) fn weights_len(w: &Window, columns: usize) -> usize {
    columns.next_multiple_of(SIDE) / LANES * panel_len(w)
}

/// Dwords of one panel.
pub(super) fn panel_len(w: &Window) -> usize {
    w.depth().div_ceil(DEPTH) * BLOCK
}

/// Blocks of 32 weights' rows that one chunk packs.
const ROW_BLOCKS: usize = 4;

/// Packs a layer's weights `[taps][inputs][outputs]` into panels of sixteen
/// outputs (inputs, if they enter transposed), columns past the last zero.
/// Memory is read in its own order: weights of large layers come from far away.
pub(super) fn weights(
    threads: &ThreadPool,
    w: &Window,
    from: &[f32],
    columns: usize,
    to: &mut [f32],
) {
    let to = &mut to[..weights_len(w, columns)];
    if w.transposed {
        let len = panel_len(w);
        return threads.split(to, len, |at, panel| {
            let to = panel.as_mut_ptr().cast();
            // SAFETY: the panel holds `len` dwords.
            unsafe { transposed_panel(w, from, columns, at / len * LANES, to) };
        });
    }
    let blocks = w.depth().div_ceil(DEPTH);
    let out = Disjoint::new(to);
    threads.run(blocks.div_ceil(ROW_BLOCKS), |i| {
        let first = i * ROW_BLOCKS;
        let to = out.pointer(0).cast();
        for block in first..(first + ROW_BLOCKS).min(blocks) {
            // SAFETY: these blocks of every panel belong to this chunk.
            unsafe { row_block(w, from, columns, block, to) };
        }
    });
}

/// Tap of the kernel and channel at place `k` of the inner dimension.
#[inline(always)]
fn element(w: &Window, k: usize) -> (usize, usize) {
    let run = w.run();
    let (tap, c) = if w.gathered() {
        (k / w.channels, k % w.channels)
    } else {
        let (tap, channel) = w.run_at(k / run);
        (tap, channel + k % run)
    };
    (usize::from(w.taps[tap]), c)
}

/// # Safety
/// `to` holds all panels; no other code touches this block of them.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")]
unsafe fn row_block(w: &Window, from: &[f32], columns: usize, block: usize, to: *mut u32) {
    let (depth, panel) = (w.depth(), panel_len(w));
    let row = |k: usize| {
        let (tap, c) = (k < depth).then(|| element(w, k))?;
        let row = tap * w.channels + c;
        Some(&from[row * columns..(row + 1) * columns])
    };
    for r in 0..LANES {
        let k = block * DEPTH + 2 * r;
        // SAFETY: the panels hold row `r` of this block.
        unsafe {
            pair_row::<f32>(
                [row(k), row(k + 1)],
                columns,
                to.add(block * BLOCK + r * LANES),
                panel,
            )
        };
    }
}

/// Stores pairs of two rows' values, sixteen columns to a panel, up to whole 32s.
///
/// # Safety
/// `to` holds sixteen dwords in every panel, `panel` dwords apart.
#[inline(always)]
unsafe fn pair_row<S: Element>(
    rows: [Option<&[S]>; 2],
    columns: usize,
    to: *mut u32,
    panel: usize,
) {
    let [low, high] = rows;
    for (n, first) in (0..columns.next_multiple_of(SIDE))
        .step_by(LANES)
        .enumerate()
    {
        // SAFETY: sources hold sixteen values; the rest is the caller's promise.
        unsafe {
            let value = if first + LANES <= columns {
                let at = |r: Option<&[S]>| r.map_or(zeros(), |r| r[first..][..LANES].as_ptr());
                pair(at(low), at(high))
            } else {
                let mut ends = [[S::default(); LANES]; 2];
                let rest = columns.saturating_sub(first);
                for (end, row) in ends.iter_mut().zip([low, high]) {
                    if let Some(row) = row {
                        end[..rest].copy_from_slice(&row[first.min(columns)..columns]);
                    }
                }
                pair(ends[0].as_ptr(), ends[1].as_ptr())
            };
            store(value, to.add(n * panel));
        }
    }
}

/// # Safety
/// `to` holds a panel.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")]
unsafe fn transposed_panel(w: &Window, from: &[f32], columns: usize, first: usize, to: *mut u32) {
    let width = LANES.min(columns.saturating_sub(first));
    let depth = w.depth();
    // Element (k, column) of the product's second operand.
    let at = |(tap, c): (usize, usize), column: usize| (tap * columns + column) * w.channels + c;
    if w.gathered() {
        for block in 0..depth.div_ceil(DEPTH) {
            let k = block * DEPTH;
            if w.count == 1 && width == LANES && k + DEPTH <= depth {
                let row = |j: usize| from[at(element(w, k), first + j)..][..DEPTH].as_ptr();
                // SAFETY: 32 values each; the panel holds this block.
                unsafe { transposed_block(row, to.add(block * BLOCK)) };
                continue;
            }
            let mut parts = [ZEROS; LANES];
            for (j, part) in parts.iter_mut().enumerate().take(width) {
                for (i, v) in part.iter_mut().enumerate().take(depth - k) {
                    *v = from[at(element(w, k + i), first + j)];
                }
            }
            let row = |j: usize| parts[j].as_ptr();
            // SAFETY: 32 values each; the panel holds this block.
            unsafe { transposed_block(row, to.add(block * BLOCK)) };
        }
        return;
    }
    // Taps and channels in memory's order, and which run of the panel each is.
    let run = w.run();
    let runs = depth / run;
    let mut order = [((0, 0), 0); MAX_RUNS];
    for (i, entry) in order.iter_mut().enumerate().take(runs) {
        *entry = (element(w, i * run), i);
    }
    order[..runs].sort_unstable();
    for &((tap, c), i) in &order[..runs] {
        for part in (0..run).step_by(DEPTH) {
            let (channel, k) = (c + part, i * run + part);
            let row = |j: usize| {
                if j >= width {
                    return ZEROS.as_ptr();
                }
                let values = from[at((tap, channel), first + j)..][..DEPTH].as_ptr();
                // SAFETY: a hint; four lines on.
                unsafe {
                    fetch(values.wrapping_add(4 * LANES));
                    fetch(values.wrapping_add(5 * LANES));
                }
                values
            };
            // SAFETY: 32 values each; the panel holds this block.
            unsafe { transposed_block(row, to.add(k / DEPTH * BLOCK)) };
        }
    }
}

/// Rounds 32 values of each of sixteen columns, and stores them pair by pair.
///
/// # Safety
/// `column` gives pointers to 32 values; `to` holds a block.
#[inline(always)]
unsafe fn transposed_block(column: impl Fn(usize) -> *const f32, to: *mut u32) {
    // SAFETY: the caller's promise.
    unsafe {
        let mut rows = [_mm512_setzero_si512(); LANES];
        for (j, row) in rows.iter_mut().enumerate() {
            *row = narrow(column(j));
        }
        for (j, row) in transpose(rows).into_iter().enumerate() {
            store(row, to.add(j * LANES));
        }
    }
}

/// Rows of `dy`, `[rows][columns]`, in pairs: panels of sixteen columns, each of
/// `blocks` blocks of 32 rows; rows past the last are zero.
///
/// # Safety
/// `to` holds the panels of `columns` (in 32s).
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")]
pub(super) unsafe fn rows<S: Element>(rows: &[S], columns: usize, blocks: usize, to: *mut u32) {
    let count = rows.len() / columns;
    let row = |r: usize| (r < count).then(|| &rows[r * columns..(r + 1) * columns]);
    for pair in 0..blocks * LANES {
        let rows = [row(2 * pair), row(2 * pair + 1)];
        // SAFETY: the panels hold this row.
        unsafe { pair_row::<S>(rows, columns, to.add(pair * LANES), blocks * BLOCK) };
    }
}

/// Which units of a batch are packed.
#[derive(Clone, Copy)]
pub(super) struct Units {
    pub first: usize,
    pub count: usize,
}

/// The pixel that a slot shows, if it lies inside the source.
#[inline(always)]
fn pixel(w: &Window, image: usize, y: isize, x: isize) -> Option<usize> {
    let inside = y >= 0 && x >= 0 && y < w.source[0] as isize && x < w.source[1] as isize;
    inside.then(|| (image * w.source[0] + y as usize) * w.source[1] + x as usize)
}

/// All taps of output `(j, i)` one after another, then zeros up to the slot's size.
/// `to` holds sixteen values more than the slot.
#[inline(always)]
fn gather<S: Element>(w: &Window, source: &[S], image: usize, j: usize, i: usize, to: &mut [S]) {
    let c = w.channels;
    let mut at = 0;
    let mut tap = 0;
    while tap < w.count {
        let [dy, dx] = w.offsets[tap];
        let (y, x) = ((j * w.step[0]) as isize + dy, (i * w.step[1]) as isize + dx);
        // Neighbouring taps of a row are neighbours in the source.
        let mut run = 1;
        while tap + run < w.count && w.offsets[tap + run] == [dy, dx + run as isize] {
            run += 1;
        }
        let ends = pixel(w, image, y, x).zip(pixel(w, image, y, x + run as isize - 1));
        match ends {
            Some((p, _)) if run * c <= LANES && p * c + LANES <= source.len() => {
                // What is copied too much is overwritten next.
                to[at..at + LANES].copy_from_slice(&source[p * c..p * c + LANES]);
            }
            Some((p, _)) => to[at..at + run * c].copy_from_slice(&source[p * c..(p + run) * c]),
            None => {
                for (n, to) in to[at..at + run * c].chunks_exact_mut(c).enumerate() {
                    match pixel(w, image, y, x + n as isize) {
                        Some(p) => to.copy_from_slice(&source[p * c..(p + 1) * c]),
                        None => to.fill(S::default()),
                    }
                }
            }
        }
        at += run * c;
        tap += run;
    }
    to[at..].fill(S::default());
}

#[inline(always)]
unsafe fn narrow_all<S: Element>(from: &[S], to: *mut u16) {
    for (i, from) in from.chunks_exact(DEPTH).enumerate() {
        // SAFETY: the caller's memory holds as many values as `from`.
        unsafe { store(narrow(from.as_ptr()), to.add(i * DEPTH).cast()) };
    }
}

/// Fills all slots of some units: `[copy][unit][line][slot][channel]`. `temporary`
/// holds a gathered slot and sixteen values.
///
/// # Safety
/// `to` holds all slots.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")]
pub(super) unsafe fn slots<S: Element>(
    l: &Layout,
    w: &Window,
    source: &[S],
    units: Units,
    temporary: &mut [S],
    to: *mut u16,
) {
    let mut to = to;
    for copy in 0..l.copies {
        for unit in units.first..units.first + units.count {
            let (image, row) = l.place(unit);
            for line in 0..l.lines {
                // SAFETY: lines follow one another, as the caller's memory does.
                unsafe {
                    if l.gathered {
                        for i in 0..l.width {
                            gather(w, source, image, row + line, i, temporary);
                            narrow_all::<S>(&temporary[..l.slot], to.add(i * l.pitch));
                        }
                    } else if l.dense() {
                        let first = [l.row(copy, row, line), l.column(copy, 0)];
                        dense_line::<S>(l, w, source, image, first, to);
                    } else {
                        let y = l.row(copy, row, line);
                        for i in 0..l.width {
                            let to = to.add(i * l.pitch);
                            match pixel(w, image, y, l.column(copy, i)) {
                                Some(p) => {
                                    narrow_all::<S>(&source[p * l.slot..(p + 1) * l.slot], to);
                                }
                                None => to.write_bytes(0, l.slot),
                            }
                        }
                    }
                    to = to.add(l.width * l.pitch);
                }
            }
        }
    }
}

/// A line whose slots are neighbours in the source.
#[inline(always)]
unsafe fn dense_line<S: Element>(
    l: &Layout,
    w: &Window,
    source: &[S],
    image: usize,
    [y, x]: [isize; 2],
    to: *mut u16,
) {
    let width = l.width as isize;
    let left = (-x).clamp(0, width) as usize;
    let end = (w.source[1] as isize - x).clamp(left as isize, width) as usize;
    // SAFETY: the caller's memory holds the line.
    unsafe {
        match pixel(w, image, y, x + left as isize) {
            Some(p) => {
                to.write_bytes(0, left * l.pitch);
                let from = &source[p * l.slot..(p + end - left) * l.slot];
                if l.pitch == l.slot {
                    narrow_all::<S>(from, to.add(left * l.slot));
                } else {
                    for (i, from) in from.chunks_exact(l.slot).enumerate() {
                        narrow_all::<S>(from, to.add((left + i) * l.pitch));
                    }
                }
                let right = (l.width - end) * l.pitch;
                to.add(end * l.pitch).write_bytes(0, right);
            }
            None => to.write_bytes(0, l.width * l.pitch),
        }
    }
}

/// What [`columns`] packs.
#[derive(Clone, Copy)]
pub(super) struct Columns {
    pub units: Units,
    /// Channels (of a slot) from where to where, in sixteens.
    pub from: usize,
    pub to: usize,
    /// Bytes between two channels' rows.
    pub stride: usize,
}

/// The slots of some units transposed: `[copy][channel][slot]`, rows in 32s of
/// slots, zeros past the last. `temporary` holds 32 gathered slots and sixteen
/// values, or zeros for the channels of one slot.
///
/// # Safety
/// `to` holds all rows.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")]
pub(super) unsafe fn columns<S: Element>(
    l: &Layout,
    w: &Window,
    source: &[S],
    c: &Columns,
    temporary: &mut [S],
    to: *mut u8,
) {
    let slots = c.units.count * l.unit_slots();
    // Of one tap, only these channels are gathered: a slot may have many more.
    let one = l.gathered && w.count == 1;
    let (base, width) = if one {
        (c.from, c.to - c.from)
    } else {
        (0, l.slot)
    };
    for copy in (0..l.packed).filter(|copy| l.moved(w, *copy).is_none()) {
        let (mut unit, mut line, mut i) = (0, 0, 0);
        let (mut image, mut row, mut y) = (0, 0, 0);
        for block in 0..slots.div_ceil(DEPTH) {
            let mut rows = [zeros::<S>(); DEPTH];
            if l.gathered {
                temporary[..DEPTH * width].fill(S::default());
            } else {
                rows = [temporary.as_ptr(); DEPTH];
            }
            for (q, from) in rows.iter_mut().enumerate() {
                if i == 0 {
                    // Divisions take longer than all else here: once a line.
                    (image, row) = l.place(c.units.first + unit);
                    y = l.row(copy, row, line);
                }
                if l.gathered {
                    let to = &mut temporary[q * width..];
                    *from = to.as_ptr();
                    if one && unit < c.units.count {
                        let [dy, dx] = w.offsets[0];
                        let (y, x) = ((row + line) * w.step[0], i * w.step[1]);
                        if let Some(p) = pixel(w, image, y as isize + dy, x as isize + dx) {
                            let channels = c.from..c.to.min(w.channels);
                            to[..channels.len()]
                                .copy_from_slice(&source[p * w.channels..][channels]);
                        }
                    } else if unit < c.units.count {
                        gather(w, source, image, row + line, i, &mut to[..l.slot + LANES]);
                    }
                } else if unit < c.units.count
                    && let Some(p) = pixel(w, image, y, l.column(copy, i))
                {
                    *from = source[p * l.slot..(p + 1) * l.slot].as_ptr();
                }
                i += 1;
                if i == l.width {
                    (i, line) = (0, line + 1);
                    if line == l.lines {
                        (line, unit) = (0, unit + 1);
                    }
                }
            }
            for first in (c.from..c.to).step_by(LANES) {
                // SAFETY: each pointer has the channels of a slot behind it; the
                // caller's memory holds 64 bytes of every channel's row for this block.
                unsafe {
                    let mut tile = [_mm512_setzero_si512(); LANES];
                    for (r, tile) in tile.iter_mut().enumerate() {
                        let at = first - base;
                        let (low, high) = (rows[2 * r].add(at), rows[2 * r + 1].add(at));
                        fetch(low.wrapping_add(DEPTH * l.slot));
                        fetch(high.wrapping_add(DEPTH * l.slot));
                        *tile = pair(low, high);
                    }
                    let channel = copy * (c.to - c.from) + first - c.from;
                    let to = to.add(channel * c.stride + block * 64);
                    for (r, row) in transpose(tile).into_iter().enumerate() {
                        store(row, to.add(r * c.stride).cast());
                    }
                }
            }
        }
    }
    for copy in 0..l.packed {
        let Some((from, left)) = l.moved(w, copy) else {
            continue;
        };
        // Columns whose neighbour lies outside of the source: one in every line.
        let step = (0..DEPTH).step_by(l.width).fold(0, |m, i| m | 1u32 << i);
        let mask = if left {
            !(step << (l.width - 1))
        } else {
            !step
        };
        let channels = c.to - c.from;
        for channel in 0..channels {
            // SAFETY: both copies' rows lie in the caller's memory; of the words before
            // the first and past the last the mask shows none.
            unsafe {
                let from = to.add((from * channels + channel) * c.stride).cast::<u16>();
                let from = if left {
                    from.wrapping_add(1)
                } else {
                    from.wrapping_sub(1)
                };
                let to = to.add((copy * channels + channel) * c.stride);
                for block in 0..slots.div_ceil(DEPTH) {
                    let row =
                        _mm512_maskz_loadu_epi16(mask, from.wrapping_add(block * DEPTH).cast());
                    store(row, to.add(block * 64).cast());
                }
            }
        }
    }
    for copy in l.packed..l.copies {
        let (from, shift) = l.shifted(copy);
        let channels = c.to - c.from;
        for channel in 0..channels {
            // SAFETY: both copies' rows lie in the caller's memory, the first before the
            // second: what is read behind a row's end is memory, too, and no output reads it.
            unsafe {
                let from = to.add((from * channels + channel) * c.stride + 2 * shift);
                let to = to.add((copy * channels + channel) * c.stride);
                for block in 0..slots.div_ceil(DEPTH) {
                    let row = narrow(from.add(block * 64).cast::<Bf16>());
                    store(row, to.add(block * 64).cast());
                }
            }
        }
    }
}

/// Rounds rows of a block's sums: `width` values of row r to `to + at[r]`, or added to
/// what lies there.
///
/// # Safety
/// The places are valid, and no other code touches them.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")]
pub(super) unsafe fn outputs(
    sums: &[f32; SIDE * SIDE],
    at: &[usize],
    width: usize,
    to: *mut Bf16,
    mode: Mode,
) {
    for (sums, at) in sums.chunks_exact(SIDE).zip(at) {
        // SAFETY: the caller's promise; a whole row is 32 values.
        unsafe {
            let to = to.add(*at);
            if width == SIDE {
                let row = match mode {
                    Mode::Write => narrow(sums.as_ptr()),
                    Mode::Add => add_narrow(sums.as_ptr(), to),
                };
                store(row, to.cast());
                continue;
            }
            for (i, s) in sums.iter().enumerate().take(width) {
                let v = match mode {
                    Mode::Write => *s,
                    Mode::Add => to.add(i).read().wide() + s,
                };
                to.add(i).write(Bf16::of(v));
            }
        }
    }
}
