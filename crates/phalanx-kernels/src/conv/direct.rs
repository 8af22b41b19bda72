//! The plain sum without copying windows: tables of pixel pointers stand for
//! the rows of the window matrix, one table row per kernel tap. Any kernel,
//! stride, padding and dilation; channels in multiples of sixteen, one group.
//!
//! The input gradient is the same pass over output gradients, once per phase of
//! the stride: the input pixels of a phase meet the same taps, and no others.
//!
//! *Order*: an output element is one chain of fused multiply-adds over taps, then
//! channels (pixels, in weight gradients), ascending; blocks and threads do not enter.

use super::ConvShape;
use crate::Mode;
use crate::bias::finish;
use crate::par::{Disjoint, ThreadPool, scratch};
use crate::vector::{LANES, Vector};

/// Whether this method computes the layer.
pub(super) fn fits(s: &ConvShape) -> bool {
    s.groups == 1
        && s.inp.is_multiple_of(LANES)
        && s.out.is_multiple_of(LANES)
        && s.kernel[0] * s.kernel[1] <= MAX_TAPS
}

/// Kernel taps at most: tables of a block lie on the stack.
const MAX_TAPS: usize = 49;
/// Rows that a micro-kernel keeps in registers.
const ROWS: usize = 6;
/// Pixels of a block: its outputs stay in cache while taps go by.
const BLOCK: usize = 16 * ROWS;
/// Steps of the inner dimension between two visits of an output: the weights
/// they need stay in L1.
const DEPTH: usize = 128;

/// Table of one block: for each tap, where the pixels read; where they write.
struct Table {
    from: [*const f32; MAX_TAPS * BLOCK],
    to: [*mut f32; BLOCK],
}

/// One block's product: `to[r] (+)= sum over taps, i of from[tap][r][i] * b[tap][i]`.
#[derive(Clone, Copy)]
struct Product {
    taps: usize,
    /// Channels of a tap.
    run: usize,
    /// Weights in panels: `[columns][taps * run][16]`.
    b: *const f32,
    columns: usize,
    rows: usize,
    /// Adds to what the first visit finds, instead of overwriting it.
    add: bool,
}

#[inline(always)]
unsafe fn block_rows<V: Vector, const N: usize>(
    t: &Table,
    p: &Product,
    r: usize,
    j: usize,
    taps: std::ops::Range<usize>,
) {
    // SAFETY: the table's pointers hold `run` floats to read, `16 columns` to
    // write; panels j .. j + N exist.
    unsafe {
        let panel = p.taps * p.run * LANES;
        let mut sums = [[V::splat(0.0); N]; ROWS];
        if taps.start > 0 {
            for (m, sums) in sums.iter_mut().enumerate() {
                for (n, s) in sums.iter_mut().enumerate() {
                    *s = V::load(t.to[r + m].add((j + n) * LANES));
                }
            }
        }
        for tap in taps {
            let mut a = [std::ptr::null(); ROWS];
            a.copy_from_slice(
                t.from
                    .get_unchecked(tap * BLOCK + r..tap * BLOCK + r + ROWS),
            );
            let b = p.b.add(j * panel + tap * p.run * LANES);
            for i in 0..p.run {
                let mut row = [V::splat(0.0); N];
                for (n, v) in row.iter_mut().enumerate() {
                    *v = V::load(b.add(n * panel + i * LANES));
                }
                for (a, sums) in a.iter().zip(&mut sums) {
                    let v = V::splat(*a.add(i));
                    for (s, &b) in sums.iter_mut().zip(&row) {
                        *s = v.fma(b, *s);
                    }
                }
            }
        }
        for (m, sums) in sums.iter().enumerate() {
            for (n, &s) in sums.iter().enumerate() {
                let to = t.to[r + m].add((j + n) * LANES);
                let s = if p.add { V::load(to).add(s) } else { s };
                s.store(to);
            }
        }
    }
}

#[inline(always)]
unsafe fn columns<V: Vector, const N: usize>(t: &Table, p: &Product, j: usize) {
    // A sum that is added to something is made first, in registers.
    let group = if p.add {
        p.taps
    } else {
        (DEPTH / p.run).max(1)
    };
    for first in (0..p.taps).step_by(group) {
        for r in (0..p.rows).step_by(ROWS) {
            // SAFETY: as in `block_rows`; rows past the last read zeros and write nowhere.
            unsafe { block_rows::<V, N>(t, p, r, j, first..(first + group).min(p.taps)) };
        }
    }
}

#[inline(always)]
unsafe fn product_body<V: Vector>(t: &Table, p: &Product) {
    let mut j = 0;
    // SAFETY: the caller's promise.
    unsafe {
        while V::SPAN >= 4 && j + 4 <= p.columns {
            columns::<V, 4>(t, p, j);
            j += 4;
        }
        while j < p.columns {
            columns::<V, 1>(t, p, j);
            j += 1;
        }
    }
}

vectorised! {
    unsafe fn product(t: &Table, p: &Product) = product_body
}

/// Input pixel along dimension `d` of output `at` under tap `tap`, if inside.
#[inline(always)]
fn input_at(s: &ConvShape, d: usize, at: usize, tap: usize) -> Option<usize> {
    let i = (at * s.stride[d] + tap * s.dilation[d]).checked_sub(s.padding[d])?;
    (i < s.input[d]).then_some(i)
}

/// Output pixel along dimension `d` that input `at` reaches through tap `tap`;
/// `Err` when no input of this phase does.
#[inline(always)]
fn output_at(s: &ConvShape, d: usize, at: usize, tap: usize) -> Result<Option<usize>, ()> {
    let (padded, reach) = (at + s.padding[d], tap * s.dilation[d]);
    // Before the first output: of this phase too if the distance is a multiple.
    if padded.abs_diff(reach) % s.stride[d] != 0 {
        return Err(());
    }
    let o = padded.checked_sub(reach).map(|i| i / s.stride[d]);
    Ok(o.filter(|&o| o < s.output[d]))
}

/// Weights `[taps][in][out]` into panels `[out / 16][taps * in][16]`.
fn pack(threads: &ThreadPool, w: &[f32], out: usize, to: &mut [f32]) {
    let rows = w.len() / out;
    threads.split(&mut to[..w.len()], rows * LANES, |at, panel| {
        let column = at / rows;
        for (to, row) in panel.chunks_exact_mut(LANES).zip(w.chunks_exact(out)) {
            to.copy_from_slice(&row[column..column + LANES]);
        }
    });
}

/// Overwrites `y` with `act(conv(x, w) + bias)`. `packed` holds the weights' length.
pub(super) fn forward(
    threads: &ThreadPool,
    s: &ConvShape,
    x: &[f32],
    w: &[f32],
    (bias, relu): (&[f32], bool),
    packed: &mut [f32],
    y: &mut [f32],
) {
    assert!(x.len() == s.images * s.in_len() && y.len() == s.images * s.out_len());
    assert!(w.len() == s.weight_len());
    pack(threads, w, s.out, packed);
    let packed = &*packed;
    let pixels = s.pixels();
    threads.split(y, BLOCK * s.out, |at, y| {
        let (first, count) = (at / s.out, y.len() / s.out);
        scratch(s.inp + s.out, |spare| {
            let (zeros, nowhere) = spare.split_at_mut(s.inp);
            zeros.fill(0.0);
            let mut t = Table {
                from: [zeros.as_ptr(); MAX_TAPS * BLOCK],
                to: [nowhere.as_mut_ptr(); BLOCK],
            };
            for r in 0..count {
                let (image, p) = ((first + r) / pixels, (first + r) % pixels);
                let (oy, ox) = (p / s.output[1], p % s.output[1]);
                t.to[r] = y[r * s.out..].as_mut_ptr();
                let x = &x[image * s.in_len()..];
                for ky in 0..s.kernel[0] {
                    let Some(iy) = input_at(s, 0, oy, ky) else {
                        continue;
                    };
                    for kx in 0..s.kernel[1] {
                        if let Some(ix) = input_at(s, 1, ox, kx) {
                            t.from[(ky * s.kernel[1] + kx) * BLOCK + r] =
                                x[(iy * s.input[1] + ix) * s.inp..].as_ptr();
                        }
                    }
                }
            }
            let p = Product {
                taps: s.kernel[0] * s.kernel[1],
                run: s.inp,
                b: packed.as_ptr(),
                columns: s.out / LANES,
                rows: count,
                add: false,
            };
            // SAFETY: every pointer of the table is a pixel of `x` or `y`, or
            // `zeros` or `nowhere`; `packed` holds all panels.
            unsafe { product(&t, &p) };
        });
        finish(y, bias, relu);
    });
}

/// The input pixels of one phase, and the taps they meet.
struct Phase {
    start: [usize; 2],
    /// Pixels per column and row.
    size: [usize; 2],
    taps: [u8; MAX_TAPS],
    count: usize,
    /// Where its weights start among the packed ones.
    packed: usize,
}

/// Calls `f` for every phase; blocks of pixels are counted through.
fn phases(s: &ConvShape, mut f: impl FnMut(&Phase)) {
    let mut packed = 0;
    for a in 0..s.stride[0].min(s.input[0]) {
        for b in 0..s.stride[1].min(s.input[1]) {
            let mut phase = Phase {
                start: [a, b],
                size: [
                    (s.input[0] - a).div_ceil(s.stride[0]),
                    (s.input[1] - b).div_ceil(s.stride[1]),
                ],
                taps: [0; MAX_TAPS],
                count: 0,
                packed,
            };
            for ky in 0..s.kernel[0] {
                for kx in 0..s.kernel[1] {
                    if output_at(s, 0, a, ky).is_ok() && output_at(s, 1, b, kx).is_ok() {
                        phase.taps[phase.count] = (ky * s.kernel[1] + kx) as u8;
                        phase.count += 1;
                    }
                }
            }
            f(&phase);
            packed += phase.count * s.inp * s.out;
        }
    }
}

/// One phase's weights into panels `[in / 16][taps * out][16]`.
fn pack_transposed(threads: &ThreadPool, s: &ConvShape, phase: &Phase, w: &[f32], to: &mut [f32]) {
    let taps = &phase.taps[..phase.count];
    threads.split(to, taps.len() * s.out * LANES, |at, panel| {
        let input = at / (taps.len() * s.out);
        for (&tap, to) in taps.iter().zip(panel.chunks_exact_mut(s.out * LANES)) {
            let from = &w[(usize::from(tap) * s.inp + input) * s.out..][..LANES * s.out];
            crate::transpose::transpose(from, to, LANES, s.out);
        }
    });
}

/// `dx (+)=` the input gradient. `packed` holds the weights' length.
pub(super) fn input_gradient(
    threads: &ThreadPool,
    s: &ConvShape,
    w: &[f32],
    dy: &[f32],
    packed: &mut [f32],
    dx: &mut [f32],
    mode: Mode,
) {
    assert!(dx.len() == s.images * s.in_len() && dy.len() == s.images * s.out_len());
    assert!(w.len() == s.weight_len());
    phases(s, |phase| {
        let len = phase.count * s.inp * s.out;
        pack_transposed(threads, s, phase, w, &mut packed[phase.packed..][..len]);
    });
    let packed = &*packed;
    let len = dx.len();
    let out = Disjoint::new(dx);
    phases(s, |phase| {
        if phase.count == 0 && mode == Mode::Add {
            return;
        }
        let pixels = phase.size[0] * phase.size[1];
        let rows = s.images * pixels;
        threads.run(rows.div_ceil(BLOCK), |i| {
            let (first, count) = (i * BLOCK, BLOCK.min(rows - i * BLOCK));
            scratch(s.out + s.inp, |spare| {
                let (zeros, nowhere) = spare.split_at_mut(s.out);
                zeros.fill(0.0);
                let mut t = Table {
                    from: [zeros.as_ptr(); MAX_TAPS * BLOCK],
                    to: [nowhere.as_mut_ptr(); BLOCK],
                };
                for r in 0..count {
                    let (image, p) = ((first + r) / pixels, (first + r) % pixels);
                    let iy = phase.start[0] + p / phase.size[1] * s.stride[0];
                    let ix = phase.start[1] + p % phase.size[1] * s.stride[1];
                    let at = image * s.in_len() + (iy * s.input[1] + ix) * s.inp;
                    assert!(at + s.inp <= len);
                    t.to[r] = out.pointer(at);
                    let dy = &dy[image * s.out_len()..];
                    for (n, &tap) in phase.taps[..phase.count].iter().enumerate() {
                        let (ky, kx) = (tap as usize / s.kernel[1], tap as usize % s.kernel[1]);
                        if let (Ok(Some(oy)), Ok(Some(ox))) =
                            (output_at(s, 0, iy, ky), output_at(s, 1, ix, kx))
                        {
                            t.from[n * BLOCK + r] = dy[(oy * s.output[1] + ox) * s.out..].as_ptr();
                        }
                    }
                }
                let p = Product {
                    taps: phase.count,
                    run: s.out,
                    b: packed[phase.packed..].as_ptr(),
                    columns: s.inp / LANES,
                    rows: count,
                    add: mode == Mode::Add,
                };
                if phase.count == 0 {
                    for to in &t.to[..count] {
                        // SAFETY: a pixel of `dx` that only this block writes.
                        unsafe { to.write_bytes(0, s.inp) };
                    }
                    return;
                }
                // SAFETY: every pointer of the table is a pixel of `dy` or `dx`, or
                // `zeros` or `nowhere`; pixels of `dx` belong to one block of one
                // phase; `packed` holds the phase's panels.
                unsafe { product(&t, &p) };
            });
        });
    });
}

/// Pixels between two visits of a weight's sum.
const PIXELS: usize = 128;
/// Panels of sixteen outputs whose weight gradient one chunk makes.
const PANELS: usize = 4;

/// `sums[c][16 j] += sum over pixels of x[pixel][c] * dy[pixel][16 j]`.
#[derive(Clone, Copy)]
struct Outer {
    /// Channels.
    inp: usize,
    /// Floats between rows of `dy` and of `sums`: sixteen times the panels.
    wide: usize,
    count: usize,
    dy: *const f32,
    sums: *mut f32,
}

#[inline(always)]
unsafe fn outer_block<V: Vector, const M: usize, const N: usize>(
    x: &[*const f32; PIXELS],
    o: &Outer,
    c: usize,
    j: usize,
) {
    // SAFETY: pixels hold `inp` floats, `dy` `count` rows, `sums` `inp` rows.
    unsafe {
        let to = o.sums.add(c * o.wide + j * LANES);
        let mut sums = [[V::splat(0.0); N]; M];
        for (m, sums) in sums.iter_mut().enumerate() {
            for (n, s) in sums.iter_mut().enumerate() {
                *s = V::load(to.add(m * o.wide + n * LANES));
            }
        }
        let mut row = o.dy.add(j * LANES);
        for x in &x[..o.count] {
            let x = x.add(c);
            let mut d = [V::splat(0.0); N];
            for (n, d) in d.iter_mut().enumerate() {
                *d = V::load(row.add(n * LANES));
            }
            for (m, sums) in sums.iter_mut().enumerate() {
                let v = V::splat(*x.add(m));
                for (s, &d) in sums.iter_mut().zip(&d) {
                    *s = v.fma(d, *s);
                }
            }
            row = row.add(o.wide);
        }
        for (m, sums) in sums.iter().enumerate() {
            for (n, s) in sums.iter().enumerate() {
                s.store(to.add(m * o.wide + n * LANES));
            }
        }
    }
}

#[inline(always)]
unsafe fn outer_body<V: Vector>(x: &[*const f32; PIXELS], o: &Outer) {
    let panels = o.wide / LANES;
    // SAFETY: the caller's promise; channels are a multiple of sixteen.
    unsafe {
        if V::SPAN >= 4 && panels.is_multiple_of(2) {
            for c in (0..o.inp).step_by(8) {
                for j in (0..panels).step_by(2) {
                    outer_block::<V, 8, 2>(x, o, c, j);
                }
            }
        } else {
            for c in (0..o.inp).step_by(4) {
                for j in 0..panels {
                    outer_block::<V, 4, 1>(x, o, c, j);
                }
            }
        }
    }
}

vectorised! {
    unsafe fn outer(x: &[*const f32; PIXELS], o: &Outer) = outer_body
}

/// `dw (+)=` the weight gradient. A chunk owns some outputs and goes over all pixels.
pub(super) fn weight_gradient(
    threads: &ThreadPool,
    s: &ConvShape,
    x: &[f32],
    dy: &[f32],
    dw: &mut [f32],
    mode: Mode,
) {
    assert!(x.len() == s.images * s.in_len() && dy.len() == s.images * s.out_len());
    assert!(dw.len() == s.weight_len());
    let (taps, panels) = (s.kernel[0] * s.kernel[1], s.out / LANES);
    let (pixels, rows) = (s.pixels(), s.images * s.pixels());
    let out = Disjoint::new(dw);
    threads.run(panels.div_ceil(PANELS), |chunk| {
        let first = chunk * PANELS * LANES;
        let wide = (PANELS * LANES).min(s.out - first);
        let depth = s.depth();
        scratch(s.inp + PIXELS * wide + depth * wide, |memory| {
            let (zeros, rest) = memory.split_at_mut(s.inp);
            let (part, sums) = rest.split_at_mut(PIXELS * wide);
            zeros.fill(0.0);
            sums.fill(0.0);
            for start in (0..rows).step_by(PIXELS) {
                let count = PIXELS.min(rows - start);
                for (r, to) in part.chunks_exact_mut(wide).take(count).enumerate() {
                    to.copy_from_slice(&dy[(start + r) * s.out + first..][..wide]);
                }
                let mut places = [[0; 3]; PIXELS];
                for (r, place) in places.iter_mut().take(count).enumerate() {
                    let (image, p) = ((start + r) / pixels, (start + r) % pixels);
                    *place = [image, p / s.output[1], p % s.output[1]];
                }
                for tap in 0..taps {
                    let (ky, kx) = (tap / s.kernel[1], tap % s.kernel[1]);
                    let mut table = [zeros.as_ptr(); PIXELS];
                    for (to, &[image, oy, ox]) in table.iter_mut().zip(&places[..count]) {
                        if let (Some(iy), Some(ix)) =
                            (input_at(s, 0, oy, ky), input_at(s, 1, ox, kx))
                        {
                            let at = image * s.in_len() + (iy * s.input[1] + ix) * s.inp;
                            *to = x[at..at + s.inp].as_ptr();
                        }
                    }
                    let o = Outer {
                        inp: s.inp,
                        wide,
                        count,
                        dy: part.as_ptr(),
                        sums: sums[tap * s.inp * wide..].as_mut_ptr(),
                    };
                    // SAFETY: the table's pointers are pixels of `x` or `zeros`;
                    // `part` and `sums` have the sizes that `o` names.
                    unsafe { outer(&table, &o) };
                }
            }
            for (row, sums) in sums.chunks_exact(wide).enumerate() {
                let at = row * s.out + first;
                // SAFETY: these outputs of every row belong to this chunk.
                let to = unsafe { out.range(at..at + wide) };
                match mode {
                    Mode::Write => to.copy_from_slice(sums),
                    Mode::Add => to.iter_mut().zip(sums).for_each(|(t, s)| *t += s),
                }
            }
        });
    });
}
