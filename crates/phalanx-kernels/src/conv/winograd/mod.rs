//! 3x3 kernels by F(4x4, 3x3): 36 products for 16 outputs where the plain sum takes 144, 81 at
//! stride 2 (see `phase`). `transform` has the arithmetic, `tiles` and `weights` move
//! data between the domains, the products in between are `panel`'s.
//!
//! The input gradient is a forward pass over the output gradient with rotated
//! kernels. Weight gradients are summed in the transformed domain over all
//! tiles and transformed once.
//!
//! *Order*: an element of a product is one chain over channels (tiles, in weight
//! gradients) in ascending order, whatever the blocking: threads, blocks and
//! instruction sets give equal bits. *Error* against the exact sum: relative
//! L2 at most 5e-6, largest at most 2e-5 of the largest value.

mod phase;
mod tiles;
mod transform;
mod weights;

use super::ConvShape;
use crate::Mode;
use crate::element::{Element, Values, ValuesMut};
use crate::elementwise::add;
use crate::isa::l2_cache;
use crate::panel::{Panels, multiply, multiply_transposed};
use crate::par::{Disjoint, ThreadPool, scratch};
use crate::vector::LANES;
use phase::Side;
use tiles::{Domain, Finish, Grid, Span};
use transform::{POSITIONS, STEP};
use weights::{Kernels, Part, Rows, Sums};

/// Fewer channels than this on either side are faster without.
const MIN_CHANNELS: usize = 32;

/// Whether this method computes the layer.
pub(super) fn fits(s: &ConvShape) -> bool {
    let channels = |c: usize| c >= MIN_CHANNELS && c.is_multiple_of(LANES);
    let steps = match (s.stride, s.padding) {
        ([1, 1], [a, b]) => a == b && a <= 2,
        // With more pixels outside the image, the plain sum is faster.
        ([2, 2], padding) => padding == [1, 1] && 13 * tiles_of_image(s) <= s.pixels(),
        _ => false,
    };
    steps
        && s.kernel == [3, 3]
        && s.dilation == [1, 1]
        && s.groups == 1
        && channels(s.inp)
        && channels(s.out)
        && s.output.iter().all(|&o| o >= STEP - 1)
}

/// Whether this method is faster than `vdpbf16ps`, which multiplies twice as many values at a
/// time: it is where most tiles are whole. Measured on Zen 4, all passes, 32 to 512 channels:
/// 0.65 to 0.9 of the time with images of 4, 7 and more pixels a side.
#[cfg(target_arch = "x86_64")]
pub(super) fn beats_pairs(s: &ConvShape) -> bool {
    fits(s) && s.stride == [1, 1] && 10 * tiles_of_image(s) <= s.pixels()
}

fn tiles_of_image(s: &ConvShape) -> usize {
    s.output.iter().map(|o| o.div_ceil(STEP)).product()
}

/// Tiles of a block whose transforms fit into L2 together.
fn block_tiles(channels: usize) -> usize {
    match channels {
        ..=64 if l2_cache() < 2 << 20 => 24,
        ..=128 => 48,
        _ => 96,
    }
}

/// Weights of more elements than this are transformed panel by panel, in
/// cache, if there are few tiles; smaller ones once, into memory.
const STORED_WEIGHTS: usize = 256 * 256;
/// Tiles at most when all of them are kept transformed.
const KEPT_TILES: usize = 256;
/// Panels of sixteen outputs, and inputs, of the weights transformed at a time.
const PART_PANELS: usize = 4;
const PART_INPUTS: usize = 64;
/// Tiles transformed in one go when threads share them.
const GROUP: usize = 8;

impl Grid {
    fn forward(s: &ConvShape) -> Self {
        let [inp, out] = Side::both(s.stride[0], [s.inp, s.out]);
        Grid {
            images: s.images,
            input: s.input,
            output: s.output,
            padding: s.padding[0],
            inp,
            out,
        }
    }

    /// From output gradients to input gradients.
    fn back(s: &ConvShape) -> Self {
        let g = Self::forward(s);
        Grid {
            input: g.output,
            output: g.input,
            padding: 2 - g.padding,
            inp: g.out,
            out: g.inp,
            ..g
        }
    }

    fn keeps_tiles(&self) -> bool {
        self.inp.all() * self.out.all() >= STORED_WEIGHTS && self.tiles() <= KEPT_TILES
    }

    fn all_weights(&self) -> Part {
        Part {
            panel: 0,
            panels: self.out.all() / LANES,
            input: 0,
            inputs: self.inp.all(),
        }
    }

    fn work_len(&self) -> usize {
        if self.keeps_tiles() {
            Domain::len(self.tiles(), self.inp.all())
        } else {
            self.all_weights().len()
        }
    }
}

/// Elements of `work` of the three passes.
pub(super) fn work_len(s: &ConvShape) -> usize {
    let sums = weight_work(&Grid::forward(s));
    Grid::forward(s)
        .work_len()
        .max(Grid::back(s).work_len())
        .max(sums)
}

pub(super) fn forward(
    threads: &ThreadPool,
    s: &ConvShape,
    x: Values<'_>,
    w: &[f32],
    (bias, relu): (&[f32], bool),
    work: &mut [f32],
    y: ValuesMut<'_>,
) {
    let finish = Finish {
        bias,
        relu,
        add: false,
    };
    let kernels = Kernels {
        w,
        inp: Grid::forward(s).inp,
        out: s.out,
        rotated: false,
    };
    run(threads, Grid::forward(s), x, kernels, finish, work, y);
}

pub(super) fn input_gradient(
    threads: &ThreadPool,
    s: &ConvShape,
    w: &[f32],
    dy: Values<'_>,
    work: &mut [f32],
    dx: ValuesMut<'_>,
    mode: Mode,
) {
    let finish = Finish {
        bias: &[],
        relu: false,
        add: mode == Mode::Add,
    };
    let kernels = Kernels {
        w,
        inp: Grid::forward(s).inp,
        out: s.out,
        rotated: true,
    };
    run(threads, Grid::back(s), dy, kernels, finish, work, dx);
}

fn run(
    threads: &ThreadPool,
    g: Grid,
    x: Values<'_>,
    kernels: Kernels<'_>,
    finish: Finish<'_>,
    work: &mut [f32],
    y: ValuesMut<'_>,
) {
    use {Values as X, ValuesMut as Y};
    match (x, y) {
        (X::F32(x), Y::F32(y)) => run_on(threads, g, x, kernels, finish, work, y),
        (X::F32(x), Y::Bf16(y)) => run_on(threads, g, x, kernels, finish, work, y),
        (X::Bf16(x), Y::F32(y)) => run_on(threads, g, x, kernels, finish, work, y),
        (X::Bf16(x), Y::Bf16(y)) => run_on(threads, g, x, kernels, finish, work, y),
    }
}

fn run_on<S: Element, T: Element>(
    threads: &ThreadPool,
    g: Grid,
    x: &[S],
    kernels: Kernels<'_>,
    finish: Finish<'_>,
    work: &mut [f32],
    y: &mut [T],
) {
    let (inp, out) = (g.inp.channels, g.out.channels);
    let pixels = |size: [usize; 2]| size[0] * size[1];
    assert!(x.len() == g.images * pixels(g.input) * inp);
    assert!(y.len() == g.images * pixels(g.output) * out);
    assert!(kernels.w.len() == 9 * inp * out);
    assert!(work.len() >= g.work_len());
    assert!(finish.bias.is_empty() || finish.bias.len() == out);
    if g.keeps_tiles() {
        by_panels(threads, g, x, kernels, finish, work, y);
    } else {
        by_blocks(threads, g, x, kernels, finish, work, y);
    }
}

/// Many tiles: weights transformed once, then block by block of tiles.
fn by_blocks<S: Element, T: Element>(
    threads: &ThreadPool,
    g: Grid,
    x: &[S],
    kernels: Kernels<'_>,
    finish: Finish<'_>,
    work: &mut [f32],
    y: &mut [T],
) {
    let (whole, inp, channels) = (g.all_weights(), g.inp.all(), g.out.all());
    let plane = whole.plane();
    let u = Disjoint::new(work);
    threads.run(whole.panels.div_ceil(PART_PANELS), |i| {
        let panel = i * PART_PANELS;
        let part = Part {
            panel,
            panels: PART_PANELS.min(whole.panels - panel),
            ..whole
        };
        // In each position these panels come after those before them.
        let to = u.pointer(panel * inp * LANES);
        // SAFETY: this chunk alone writes its panels.
        unsafe { weights::forward(kernels, part, plane, to) };
    });
    let u: *const f32 = u.pointer(0);
    let u = SharedPtr(u);
    let tiles = g.tiles();
    let block = block_tiles(inp.max(channels)).min(tiles.max(1));
    let out = Disjoint::new(y);
    threads.run(tiles.div_ceil(block), |i| {
        let span = Span {
            first: i * block,
            count: block.min(tiles - i * block),
            row: 0,
        };
        let (a, c) = (Domain::len(block, inp), Domain::len(block, channels));
        scratch(a + c + inp, |memory| {
            let (zeros, rest) = memory.split_at_mut(inp);
            zeros.fill(0.0);
            let (v, m) = rest.split_at_mut(a);
            let v = Domain::new(v, block, inp);
            let m = Domain::new(m, block, channels);
            // What is read next and written last comes from memory while positions are multiplied.
            let next = g.rows(span.next(), x.as_ptr(), g.input, g.inp);
            let last = g.rows(span, out.pointer(0), g.output, g.out);
            // SAFETY: sizes were checked in `run`; these tiles' outputs belong to this chunk.
            unsafe {
                tiles::input(&g, x.as_ptr(), zeros.as_ptr().cast(), span, v);
                for p in 0..POSITIONS {
                    weights::fetch(next, p);
                    weights::fetch(last, p);
                    let depth = g.inp.at(p, 0, inp);
                    let columns = g.out.panels_at(p, 0, whole.panels);
                    multiply(&Panels {
                        a: v.channel(p, depth.start),
                        a_panel: block * LANES,
                        b: (u.get()).add(p * plane + (columns.start * inp + depth.start) * LANES),
                        b_panel: inp * LANES,
                        c: m.channel(p, columns.start * LANES),
                        c_panel: block * LANES,
                        rows: span.count,
                        depth: depth.len(),
                        columns: columns.len(),
                        add: false,
                    });
                }
                tiles::output(&g, m, span, out.pointer(0), finish);
            }
        });
    });
}

/// Few tiles, large weights: all tiles transformed once, then panel by panel of
/// the weights, which never leave the cache.
fn by_panels<S: Element, T: Element>(
    threads: &ThreadPool,
    g: Grid,
    x: &[S],
    kernels: Kernels<'_>,
    finish: Finish<'_>,
    work: &mut [f32],
    y: &mut [T],
) {
    let tiles = g.tiles();
    let inp = g.inp.all();
    let v = SharedPtr(Domain::new(work, tiles, inp));
    transform_all(threads, tiles, inp, |zeros, span| {
        // SAFETY: sizes were checked in `run`; these tiles belong to this chunk.
        unsafe { tiles::input(&g, x.as_ptr(), zeros.cast(), span, v.get()) };
    });
    let panels = g.out.all() / LANES;
    let out = Disjoint::new(y);
    threads.run(panels.div_ceil(PART_PANELS), |i| {
        let v = v.get();
        let panel = i * PART_PANELS;
        let part = Part {
            panel,
            panels: PART_PANELS.min(panels - panel),
            input: 0,
            inputs: PART_INPUTS.min(inp),
        };
        let channels = part.panels * LANES;
        let (a, c) = (part.len(), Domain::len(tiles, channels));
        scratch(a + c, |memory| {
            let (u, m) = memory.split_at_mut(a);
            let m = Domain {
                first: panel * LANES,
                ..Domain::new(m, tiles, channels)
            };
            for input in (0..inp).step_by(PART_INPUTS) {
                let part = Part {
                    input,
                    inputs: PART_INPUTS.min(inp - input),
                    ..part
                };
                // The next part comes from memory while this one is multiplied.
                let after = Part {
                    input: input + PART_INPUTS,
                    ..part
                };
                let next = (after.input < inp).then(|| Rows::of(kernels, after));
                // SAFETY: the part lies in the kernels, `u` has room for it, and
                // `m` belongs to this chunk.
                unsafe {
                    weights::forward(kernels, part, part.plane(), u.as_mut_ptr());
                    for p in 0..POSITIONS {
                        if let Some(next) = next {
                            weights::fetch(next, p);
                        }
                        let depth = g.inp.at(p, input, part.inputs);
                        let columns = g.out.panels_at(p, panel, part.panels);
                        if depth.is_empty() || columns.is_empty() {
                            continue;
                        }
                        let row = (columns.start - panel) * part.inputs + depth.start - input;
                        multiply(&Panels {
                            a: v.channel(p, depth.start),
                            a_panel: tiles * LANES,
                            b: u.as_ptr().add(p * part.plane() + row * LANES),
                            b_panel: part.inputs * LANES,
                            c: m.channel(p, columns.start * LANES),
                            c_panel: tiles * LANES,
                            rows: tiles,
                            depth: depth.len(),
                            columns: columns.len(),
                            add: depth.start > g.inp.at(p, 0, inp).start,
                        });
                    }
                }
            }
            let span = Span {
                first: 0,
                count: tiles,
                row: 0,
            };
            // SAFETY: these channels of all tiles belong to this chunk.
            unsafe { tiles::output(&g, m, span, out.pointer(0), finish) };
        });
    });
}

/// Inputs and panels of outputs of the weight gradient that one chunk makes
/// when all tiles are kept: its sums stay in L2.
const BLOCK_INPUTS: usize = 64;
const BLOCK_PANELS: usize = 4;

/// Tiles transformed at a time for a weight gradient.
fn gradient_block(g: &Grid) -> usize {
    if g.inp.all().max(g.out.channels) <= 64 {
        32
    } else {
        64
    }
}

/// Elements that all partial sums of a weight gradient may take: more would cost more
/// to fold than threads gain by not synchronising at every block of tiles.
const PARTIAL_ELEMS: usize = 640 * 1024;
/// Blocks of tiles that a partial sum is worth.
const PARTIAL_BLOCKS: usize = 8;

/// Partial sums of a weight gradient, over runs of whole blocks: by shape alone.
fn partials(g: &Grid) -> usize {
    let blocks = g.tiles().div_ceil(gradient_block(g));
    let room = PARTIAL_ELEMS / g.all_weights().len();
    room.min(blocks / PARTIAL_BLOCKS).clamp(1, 8)
}

fn weight_work(g: &Grid) -> usize {
    let domains = |rows| Domain::len(rows, g.inp.all()) + Domain::len(rows, g.out.channels);
    if g.keeps_tiles() {
        return domains(g.tiles());
    }
    match partials(g) {
        1 => domains(gradient_block(g)) + g.all_weights().len(),
        parts => parts * g.all_weights().len(),
    }
}

pub(super) fn weight_gradient(
    threads: &ThreadPool,
    s: &ConvShape,
    x: Values<'_>,
    dy: Values<'_>,
    work: &mut [f32],
    dw: &mut [f32],
    mode: Mode,
) {
    assert!(x.len() == s.images * s.in_len() && dy.len() == s.images * s.out_len());
    assert!(dw.len() == s.weight_len());
    let g = Grid::forward(s);
    let (tiles, inp) = (g.tiles(), g.inp.all());
    if g.keeps_tiles() {
        let (v, z) = work.split_at_mut(Domain::len(tiles, inp));
        let (v, z) = (Domain::new(v, tiles, inp), Domain::new(z, tiles, s.out));
        both_domains(threads, g, x, dy, (0, tiles), v, z);
        gradient_by_parts(threads, g, v, z, tiles, dw, mode);
    } else {
        let parts = partials(&g);
        if parts == 1 {
            gradient_by_blocks(threads, g, x, dy, work);
        } else {
            gradient_by_runs(threads, g, x, dy, &mut work[..], parts);
        }
        finish_gradient(threads, g, work, parts, dw, mode);
    }
}

/// Transforms inputs and output gradients of `count` tiles from `first` on.
fn both_domains(
    threads: &ThreadPool,
    g: Grid,
    x: Values<'_>,
    dy: Values<'_>,
    (first, count): (usize, usize),
    v: Domain,
    z: Domain,
) {
    let shared = SharedPtr((v, z));
    transform_all(threads, count, v.channels.max(z.channels), |zeros, span| {
        let (v, z) = shared.get();
        let span = Span {
            first: first + span.first,
            ..span
        };
        // SAFETY: sizes were checked by the caller; these tiles belong to this chunk.
        unsafe {
            both_tiles(&g, (x, dy), zeros, span, (v, z));
        }
    });
}

/// Inputs and output gradients of the tiles after a span, to be prefetched.
fn next_pixels(g: &Grid, span: Span, x: Values<'_>, dy: Values<'_>) -> [Rows; 2] {
    let next = span.next();
    let rows = |values: Values<'_>, size, side| match values {
        Values::F32(v) => g.rows(next, v.as_ptr(), size, side),
        Values::Bf16(v) => g.rows(next, v.as_ptr(), size, side),
    };
    [rows(x, g.input, g.inp), rows(dy, g.output, g.out)]
}

/// Transforms some tiles of inputs and of output gradients.
///
/// # Safety
/// As [`tiles::input`] and [`tiles::gradient`]. Zeros of f32 are zeros of bf16.
unsafe fn both_tiles(
    g: &Grid,
    (x, dy): (Values<'_>, Values<'_>),
    zeros: *const f32,
    s: Span,
    (v, z): (Domain, Domain),
) {
    // SAFETY: the caller's promise.
    unsafe {
        match x {
            Values::F32(x) => tiles::input(g, x.as_ptr(), zeros, s, v),
            Values::Bf16(x) => tiles::input(g, x.as_ptr(), zeros.cast(), s, v),
        }
        match dy {
            Values::F32(dy) => tiles::gradient(g, dy.as_ptr(), zeros, s, z),
            Values::Bf16(dy) => tiles::gradient(g, dy.as_ptr(), zeros.cast(), s, z),
        }
    }
}

/// `sums (+)=` the products of one position's tiles, the first `count` of a block.
///
/// # Safety
/// The domains hold `block` tiles of the layer's inputs and outputs, and no other code
/// touches the position's sums.
unsafe fn sum_position(
    g: &Grid,
    p: usize,
    (v, z): (Domain, Domain),
    count: usize,
    sums: *mut f32,
    add: bool,
) {
    let rows = g.inp.at(p, 0, v.channels);
    // SAFETY: the caller's promise.
    unsafe {
        multiply_transposed(&Panels {
            a: v.channel(p, rows.start),
            a_panel: v.rows * LANES,
            b: z.channel(p, 0),
            b_panel: z.rows * LANES,
            c: sums.add(rows.start * LANES),
            c_panel: v.channels * LANES,
            rows: rows.len(),
            depth: count,
            columns: z.channels / LANES,
            add,
        });
    }
}

/// Many tiles, weights of some size: their sums are kept, tiles come block by
/// block, and threads share a block's positions. `work` starts with the sums.
fn gradient_by_blocks(
    threads: &ThreadPool,
    g: Grid,
    x: Values<'_>,
    dy: Values<'_>,
    work: &mut [f32],
) {
    let (block, inp, channels) = (gradient_block(&g), g.inp.all(), g.out.channels);
    let (whole, tiles) = (g.all_weights(), g.tiles());
    let (sums, rest) = work.split_at_mut(whole.len());
    let (v, z) = rest.split_at_mut(Domain::len(block, inp));
    let (v, z) = (Domain::new(v, block, inp), Domain::new(z, block, channels));
    let plane = whole.plane();
    if tiles == 0 {
        sums.fill(0.0);
    }
    let sums = Disjoint::new(sums);
    for first in (0..tiles).step_by(block) {
        let count = block.min(tiles - first);
        both_domains(threads, g, x, dy, (first, count), v, z);
        let span = Span {
            first,
            count,
            row: 0,
        };
        let shared = SharedPtr((v, z, next_pixels(&g, span, x, dy)));
        threads.run(POSITIONS, |p| {
            let (v, z, next) = shared.get();
            // SAFETY: position p of the sums belongs to this chunk.
            unsafe {
                for rows in next {
                    weights::fetch(rows, p);
                }
                let to = sums.pointer(p * plane);
                sum_position(&g, p, (v, z), count, to, first > 0);
            }
        });
    }
}

/// Many tiles, small weights: each chunk goes over a run of blocks with sums of its
/// own, all in its core's cache. `work` receives the sums one after another.
fn gradient_by_runs(
    threads: &ThreadPool,
    g: Grid,
    x: Values<'_>,
    dy: Values<'_>,
    work: &mut [f32],
    parts: usize,
) {
    let (block, inp, channels) = (gradient_block(&g), g.inp.all(), g.out.channels);
    let (whole, tiles) = (g.all_weights(), g.tiles());
    let (len, plane) = (whole.len(), whole.plane());
    let run = tiles.div_ceil(block).div_ceil(parts) * block;
    threads.split(&mut work[..parts * len], len, |at, sums| {
        let from = at / len * run;
        let to = (from + run).min(tiles);
        if from >= to {
            return sums.fill(0.0);
        }
        let size = Domain::len(block, inp);
        let widest = inp.max(channels);
        scratch(size + Domain::len(block, channels) + widest, |memory| {
            let (v, rest) = memory.split_at_mut(size);
            let (z, zeros) = rest.split_at_mut(Domain::len(block, channels));
            zeros.fill(0.0);
            let (v, z) = (Domain::new(v, block, inp), Domain::new(z, block, channels));
            for first in (from..to).step_by(block) {
                let count = block.min(to - first);
                let span = Span {
                    first,
                    count,
                    row: 0,
                };
                let next = next_pixels(&g, span, x, dy);
                // SAFETY: sizes were checked by the caller; domains and sums are this chunk's.
                unsafe {
                    both_tiles(&g, (x, dy), zeros.as_ptr(), span, (v, z));
                    for p in 0..POSITIONS {
                        for rows in next {
                            weights::fetch(rows, p);
                        }
                        let to = sums.as_mut_ptr().add(p * plane);
                        sum_position(&g, p, (v, z), count, to, first > from);
                    }
                }
            }
        });
    });
}

/// Adds up `parts` sums in order, and transforms them back.
fn finish_gradient(
    threads: &ThreadPool,
    g: Grid,
    work: &mut [f32],
    parts: usize,
    dw: &mut [f32],
    mode: Mode,
) {
    let whole = g.all_weights();
    let (sums, others) = work[..parts * whole.len()].split_at_mut(whole.len());
    for other in others.chunks_exact(sums.len()) {
        add(threads, sums, other);
    }
    let sums = &*sums;
    let out = Disjoint::new(dw);
    threads.run(whole.panels.div_ceil(PART_PANELS), |i| {
        let panel = i * PART_PANELS;
        let part = Part {
            panel,
            panels: PART_PANELS.min(whole.panels - panel),
            ..whole
        };
        let stride = whole.inputs * LANES;
        let from = Sums {
            first: sums[panel * stride..].as_ptr(),
            plane: whole.plane(),
            stride,
        };
        let size = (g.inp, g.out.channels);
        // SAFETY: these panels of outputs belong to this chunk.
        unsafe { weights::gradient(from, part, out.pointer(0), size, mode) };
    });
}

/// Few tiles: block by block of the weights, from start to end in cache.
fn gradient_by_parts(
    threads: &ThreadPool,
    g: Grid,
    v: Domain,
    z: Domain,
    tiles: usize,
    dw: &mut [f32],
    mode: Mode,
) {
    let (inp, panels) = (g.inp.all(), g.out.channels / LANES);
    let (down, across) = (inp.div_ceil(BLOCK_INPUTS), panels.div_ceil(BLOCK_PANELS));
    let size = (g.inp, g.out.channels);
    let shared = SharedPtr((v, z));
    let out = Disjoint::new(dw);
    threads.run(down * across, |i| {
        let (v, z) = shared.get();
        let (input, panel) = (i / across * BLOCK_INPUTS, i % across * BLOCK_PANELS);
        let part = Part {
            panel,
            panels: BLOCK_PANELS.min(panels - panel),
            input,
            inputs: BLOCK_INPUTS.min(inp - input),
        };
        let (plane, stride) = (part.plane(), part.inputs * LANES);
        scratch(part.len(), |sums| {
            let sums = sums.as_mut_ptr();
            // Prefetch the memory that is stored to in the end.
            let to = Rows::of_gradient(out.pointer(0), size, part);
            // SAFETY: the part lies in both domains; its weights belong to this chunk.
            unsafe {
                for p in 0..POSITIONS {
                    weights::fetch(to, p);
                    let rows = g.inp.at(p, input, part.inputs);
                    if rows.is_empty() {
                        continue;
                    }
                    multiply_transposed(&Panels {
                        a: v.channel(p, rows.start),
                        a_panel: tiles * LANES,
                        b: z.channel(p, panel * LANES),
                        b_panel: tiles * LANES,
                        c: sums.add(p * plane + (rows.start - input) * LANES),
                        c_panel: stride,
                        rows: rows.len(),
                        depth: tiles,
                        columns: part.panels,
                        add: false,
                    });
                }
                let from = Sums {
                    first: sums,
                    plane,
                    stride,
                };
                weights::gradient(from, part, out.pointer(0), size, mode);
            }
        });
    });
}

/// Calls `f(zeros, span)` for groups of tiles, with a pixel of zeros.
fn transform_all(
    threads: &ThreadPool,
    tiles: usize,
    channels: usize,
    f: impl Fn(*const f32, Span) + Sync,
) {
    threads.run(tiles.div_ceil(GROUP), |i| {
        let first = i * GROUP;
        let span = Span {
            first,
            count: GROUP.min(tiles - first),
            row: first,
        };
        scratch(channels, |zeros| {
            zeros.fill(0.0);
            f(zeros.as_ptr(), span);
        });
    });
}

/// A pointer that chunks read through, or write through to disjoint places.
#[derive(Clone, Copy)]
struct SharedPtr<T>(T);

// SAFETY: every use states which part of the memory belongs to which chunk.
unsafe impl<T> Sync for SharedPtr<T> {}

impl<T: Copy> SharedPtr<T> {
    fn get(&self) -> T {
        self.0
    }
}

#[cfg(test)]
mod tests;
