//! Rounding to bf16, and the packed orders of the tiles' operands.

use super::layout::Layout;
use super::window::{MAX_RUNS, Window};
use super::{DEPTH, SIDE};
use crate::Mode;
use crate::element::{Bf16, Element};
use crate::par::{Disjoint, ThreadPool};

/// Columns of a panel, and of a vector.
pub(super) const LANES: usize = 16;
/// Dwords of a panel's block: sixteen rows of sixteen pairs.
pub(super) const BLOCK: usize = LANES * LANES;

/// Sixteen pairs of bf16 in a register.
///
/// # Safety
/// Methods of [`Wide`] run in functions compiled for AVX-512 with bf16 only, on
/// processors that have it. Pointers are valid for what is read or written.
pub(super) trait Pack {
    type Reg: Copy;
    unsafe fn zero() -> Self::Reg;
    /// Lane i: `low[i]` below `high[i]`, of sixteen values each.
    unsafe fn pair<S: Element>(low: *const S, high: *const S) -> Self::Reg;
    /// 32 values in their order.
    unsafe fn narrow<S: Element>(from: *const S) -> Self::Reg;
    /// 32 values in their order, each added to the value in `to`.
    unsafe fn add_narrow(from: *const f32, to: *const Bf16) -> Self::Reg;
    /// Stores 64 bytes.
    unsafe fn store(r: Self::Reg, to: *mut u32);
    /// 32 words, zero where the mask is.
    unsafe fn masked(from: *const u16, mask: u32) -> Self::Reg;
    /// Prefetches a line that will be read soon; any address is allowed.
    unsafe fn fetch<S: Element>(at: *const S);
    /// Transposes sixteen registers of sixteen lanes.
    unsafe fn transpose(rows: [Self::Reg; LANES]) -> [Self::Reg; LANES];
}

/// A value rounded, in the lower half of a word.
#[inline(always)]
fn word(v: f32) -> u32 {
    u32::from(Bf16::of(v).bits())
}

/// Without instructions of its own.
struct Plain;

impl Pack for Plain {
    type Reg = [u32; LANES];

    #[inline(always)]
    unsafe fn zero() -> Self::Reg {
        [0; LANES]
    }
    #[inline(always)]
    unsafe fn pair<S: Element>(low: *const S, high: *const S) -> Self::Reg {
        // SAFETY: sixteen values each, by the trait's contract.
        let (low, high) = unsafe {
            (
                low.cast::<[S; LANES]>().read_unaligned(),
                high.cast::<[S; LANES]>().read_unaligned(),
            )
        };
        std::array::from_fn(|i| word(low[i].wide()) | word(high[i].wide()) << 16)
    }
    #[inline(always)]
    unsafe fn narrow<S: Element>(from: *const S) -> Self::Reg {
        // SAFETY: 32 values, by the trait's contract.
        let v = unsafe { from.cast::<[S; 2 * LANES]>().read_unaligned() };
        std::array::from_fn(|i| word(v[2 * i].wide()) | word(v[2 * i + 1].wide()) << 16)
    }
    #[inline(always)]
    unsafe fn add_narrow(from: *const f32, to: *const Bf16) -> Self::Reg {
        // SAFETY: 32 values each, by the trait's contract.
        let (v, t) = unsafe {
            (
                from.cast::<[f32; 2 * LANES]>().read_unaligned(),
                to.cast::<[Bf16; 2 * LANES]>().read_unaligned(),
            )
        };
        let sum = |i: usize| word(t[i].wide() + v[i]);
        std::array::from_fn(|i| sum(2 * i) | sum(2 * i + 1) << 16)
    }
    #[inline(always)]
    unsafe fn store(r: Self::Reg, to: *mut u32) {
        // SAFETY: 64 bytes, by the trait's contract.
        unsafe { to.cast::<Self::Reg>().write_unaligned(r) }
    }
    #[inline(always)]
    unsafe fn masked(from: *const u16, mask: u32) -> Self::Reg {
        let word = |i: usize| {
            // SAFETY: words that the mask shows are valid, by the trait's contract.
            (mask >> i & 1 == 1).then(|| u32::from(unsafe { from.wrapping_add(i).read() }))
        };
        let word = |i: usize| word(i).unwrap_or(0);
        std::array::from_fn(|i| word(2 * i) | word(2 * i + 1) << 16)
    }
    #[inline(always)]
    unsafe fn fetch<S: Element>(_: *const S) {}
    #[inline(always)]
    unsafe fn transpose(rows: [Self::Reg; LANES]) -> [Self::Reg; LANES] {
        std::array::from_fn(|i| std::array::from_fn(|j| rows[j][i]))
    }
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use super::{Bf16, Element, LANES, Pack};
    use crate::Precision;
    use crate::vector::transpose;
    use std::arch::x86_64::*;

    /// AVX-512 with its bf16 conversions.
    pub(super) struct Wide;

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

    // SAFETY (every block below): the trait's contract.
    impl Pack for Wide {
        type Reg = __m512i;

        #[inline(always)]
        unsafe fn zero() -> __m512i {
            // SAFETY: see the impl.
            unsafe { _mm512_setzero_si512() }
        }
        #[inline(always)]
        unsafe fn pair<S: Element>(low: *const S, high: *const S) -> __m512i {
            // SAFETY: see the impl; the values are of the type that `S` says.
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
        #[inline(always)]
        unsafe fn narrow<S: Element>(from: *const S) -> __m512i {
            // SAFETY: see the impl; the values are of the type that `S` says.
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
        #[inline(always)]
        unsafe fn add_narrow(from: *const f32, to: *const Bf16) -> __m512i {
            // SAFETY: see the impl.
            unsafe {
                let sum = |i: usize| {
                    let t = _mm256_loadu_si256(to.add(i).cast());
                    let t = _mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(t));
                    _mm512_add_ps(_mm512_castsi512_ps(t), _mm512_loadu_ps(from.add(i)))
                };
                let sums = _mm512_cvtne2ps_pbh(sum(LANES), sum(0));
                std::mem::transmute::<__m512bh, __m512i>(sums)
            }
        }
        #[inline(always)]
        unsafe fn store(r: __m512i, to: *mut u32) {
            // SAFETY: see the impl.
            unsafe { _mm512_storeu_si512(to.cast(), r) }
        }
        #[inline(always)]
        unsafe fn masked(from: *const u16, mask: u32) -> __m512i {
            // SAFETY: see the impl; what the mask hides is not read.
            unsafe { _mm512_maskz_loadu_epi16(mask, from.cast()) }
        }
        #[inline(always)]
        unsafe fn fetch<S: Element>(at: *const S) {
            // SAFETY: a hint.
            unsafe { _mm_prefetch::<_MM_HINT_T0>(at.cast()) }
        }
        #[inline(always)]
        unsafe fn transpose(rows: [__m512i; LANES]) -> [__m512i; LANES] {
            // SAFETY: see the impl.
            unsafe { transpose(rows) }
        }
    }

    /// Whether this processor converts to bf16 by itself, and may here.
    pub(super) fn wide(isa: crate::isa::Isa) -> bool {
        isa.is_avx512() && std::arch::is_x86_feature_detected!("avx512bf16")
    }
}

/// Defines `unsafe fn name(args)` that calls `body::<P>` compiled for what this processor has.
macro_rules! packing {
    ($(#[$meta:meta])* unsafe fn $name:ident $(<$g:ident: $bound:ident>)? ($($arg:ident: $ty:ty),* $(,)?) = $body:ident) => {
        $(#[$meta])*
        #[allow(clippy::too_many_arguments)]
        pub(super) unsafe fn $name $(<$g: $bound>)? ($($arg: $ty),*) {
            dispatch! {
                [$(<$g: $bound>)?] ($($arg: $ty),*) [];
                "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx2,fma" if x86::wide =>
                // SAFETY: compiled for it; the rest is the caller's promise.
                unsafe { $body::<x86::Wide $(, $g)?>($($arg),*) };
                // SAFETY: plain code; the rest is the caller's promise.
                unsafe { $body::<Plain $(, $g)?>($($arg),*) };
                // SAFETY: the caller's promise.
                unsafe { $body::<Plain $(, $g)?>($($arg),*) }
            }
        }
    };
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

packing! {
    /// # Safety
    /// `to` holds all panels; no other code touches this block of them.
    unsafe fn row_block(w: &Window, from: &[f32], columns: usize, block: usize, to: *mut u32) = row_block_body
}

#[inline(always)]
unsafe fn row_block_body<P: Pack>(
    w: &Window,
    from: &[f32],
    columns: usize,
    block: usize,
    to: *mut u32,
) {
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
            pair_row::<P, f32>(
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
unsafe fn pair_row<P: Pack, S: Element>(
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
                P::pair(at(low), at(high))
            } else {
                let mut ends = [[S::default(); LANES]; 2];
                let rest = columns.saturating_sub(first);
                for (end, row) in ends.iter_mut().zip([low, high]) {
                    if let Some(row) = row {
                        end[..rest].copy_from_slice(&row[first.min(columns)..columns]);
                    }
                }
                P::pair(ends[0].as_ptr(), ends[1].as_ptr())
            };
            P::store(value, to.add(n * panel));
        }
    }
}

packing! {
    /// # Safety
    /// `to` holds a panel.
    unsafe fn transposed_panel(w: &Window, from: &[f32], columns: usize, first: usize, to: *mut u32) = transposed_panel_body
}

#[inline(always)]
unsafe fn transposed_panel_body<P: Pack>(
    w: &Window,
    from: &[f32],
    columns: usize,
    first: usize,
    to: *mut u32,
) {
    let width = LANES.min(columns.saturating_sub(first));
    let depth = w.depth();
    // Element (k, column) of the product's second operand.
    let at = |(tap, c): (usize, usize), column: usize| (tap * columns + column) * w.channels + c;
    if w.gathered() {
        for block in 0..depth.div_ceil(DEPTH) {
            let k = block * DEPTH;
            let mut parts = [ZEROS; LANES];
            for (j, part) in parts.iter_mut().enumerate().take(width) {
                for (i, v) in part.iter_mut().enumerate().take(depth - k) {
                    *v = from[at(element(w, k + i), first + j)];
                }
            }
            let row = |j: usize| parts[j].as_ptr();
            // SAFETY: 32 values each; the panel holds this block.
            unsafe { transposed_block::<P>(row, to.add(block * BLOCK)) };
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
                    P::fetch(values.wrapping_add(4 * LANES));
                    P::fetch(values.wrapping_add(5 * LANES));
                }
                values
            };
            // SAFETY: 32 values each; the panel holds this block.
            unsafe { transposed_block::<P>(row, to.add(k / DEPTH * BLOCK)) };
        }
    }
}

/// Rounds 32 values of each of sixteen columns, and stores them pair by pair.
///
/// # Safety
/// `column` gives pointers to 32 values; `to` holds a block.
#[inline(always)]
unsafe fn transposed_block<P: Pack>(column: impl Fn(usize) -> *const f32, to: *mut u32) {
    // SAFETY: the caller's promise.
    unsafe {
        let mut rows = [P::zero(); LANES];
        for (j, row) in rows.iter_mut().enumerate() {
            *row = P::narrow(column(j));
        }
        for (j, row) in P::transpose(rows).into_iter().enumerate() {
            P::store(row, to.add(j * LANES));
        }
    }
}

/// Rows of `dy`, `[rows][columns]`, in pairs: panels of sixteen columns, each of
/// `blocks` blocks of 32 rows; rows past the last are zero.
///
/// # Safety
/// `to` holds the panels of `columns` (in 32s).
#[inline(always)]
unsafe fn rows_body<P: Pack, S: Element>(rows: &[S], columns: usize, blocks: usize, to: *mut u32) {
    let count = rows.len() / columns;
    let row = |r: usize| (r < count).then(|| &rows[r * columns..(r + 1) * columns]);
    for pair in 0..blocks * LANES {
        let rows = [row(2 * pair), row(2 * pair + 1)];
        // SAFETY: the panels hold this row.
        unsafe { pair_row::<P, S>(rows, columns, to.add(pair * LANES), blocks * BLOCK) };
    }
}

packing! {
    /// # Safety
    /// As `rows_body`.
    unsafe fn rows<S: Element>(rows: &[S], columns: usize, blocks: usize, to: *mut u32) = rows_body
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

packing! {
    /// Fills all slots of some units: `[copy][unit][line][slot][channel]`. `temporary`
    /// holds a gathered slot and sixteen values.
    ///
    /// # Safety
    /// `to` holds all slots.
    unsafe fn slots<S: Element>(l: &Layout, w: &Window, source: &[S], units: Units, temporary: &mut [S], to: *mut u16) = slots_body
}

#[inline(always)]
unsafe fn narrow_all<P: Pack, S: Element>(from: &[S], to: *mut u16) {
    for (i, from) in from.chunks_exact(DEPTH).enumerate() {
        // SAFETY: the caller's memory holds as many values as `from`.
        unsafe { P::store(P::narrow(from.as_ptr()), to.add(i * DEPTH).cast()) };
    }
}

#[inline(always)]
unsafe fn slots_body<P: Pack, S: Element>(
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
                            narrow_all::<P, S>(&temporary[..l.slot], to.add(i * l.pitch));
                        }
                    } else if l.dense() {
                        let first = [l.row(copy, row, line), l.column(copy, 0)];
                        dense_line::<P, S>(l, w, source, image, first, to);
                    } else {
                        let y = l.row(copy, row, line);
                        for i in 0..l.width {
                            let to = to.add(i * l.pitch);
                            match pixel(w, image, y, l.column(copy, i)) {
                                Some(p) => {
                                    narrow_all::<P, S>(&source[p * l.slot..(p + 1) * l.slot], to);
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
unsafe fn dense_line<P: Pack, S: Element>(
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
                    narrow_all::<P, S>(from, to.add(left * l.slot));
                } else {
                    for (i, from) in from.chunks_exact(l.slot).enumerate() {
                        narrow_all::<P, S>(from, to.add((left + i) * l.pitch));
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

packing! {
    /// The slots of some units transposed: `[copy][channel][slot]`, rows in 32s of
    /// slots, zeros past the last. `temporary` holds 32 gathered slots and sixteen
    /// values, or zeros for the channels of one slot.
    ///
    /// # Safety
    /// `to` holds all rows.
    unsafe fn columns<S: Element>(l: &Layout, w: &Window, source: &[S], c: &Columns, temporary: &mut [S], to: *mut u8) = columns_body
}

#[inline(always)]
unsafe fn columns_body<P: Pack, S: Element>(
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
                    let mut tile = [P::zero(); LANES];
                    for (r, tile) in tile.iter_mut().enumerate() {
                        let at = first - base;
                        let (low, high) = (rows[2 * r].add(at), rows[2 * r + 1].add(at));
                        P::fetch(low.wrapping_add(DEPTH * l.slot));
                        P::fetch(high.wrapping_add(DEPTH * l.slot));
                        *tile = P::pair(low, high);
                    }
                    let channel = copy * (c.to - c.from) + first - c.from;
                    let to = to.add(channel * c.stride + block * 64);
                    for (r, row) in P::transpose(tile).into_iter().enumerate() {
                        P::store(row, to.add(r * c.stride).cast());
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
                    let row = P::masked(from.wrapping_add(block * DEPTH), mask);
                    P::store(row, to.add(block * 64).cast());
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
                    let row = P::narrow(from.add(block * 64).cast::<Bf16>());
                    P::store(row, to.add(block * 64).cast());
                }
            }
        }
    }
}

packing! {
    /// Rounds rows of a block's sums: `width` values of row r to `to + at[r]`, or added to
    /// what lies there.
    ///
    /// # Safety
    /// The places are valid, and no other code touches them.
    unsafe fn outputs(sums: &[f32; SIDE * SIDE], at: &[usize], width: usize, to: *mut Bf16, mode: Mode) = outputs_body
}

#[inline(always)]
unsafe fn outputs_body<P: Pack>(
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
                    Mode::Write => P::narrow(sums.as_ptr()),
                    Mode::Add => P::add_narrow(sums.as_ptr(), to),
                };
                P::store(row, to.cast());
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
