//! 3x3 kernels at stride 1 by F(4x4, 3x3): 36 products for 16 outputs where the
//! plain sum takes 144. `transform` has the arithmetic, `tiles` and `weights` move
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

mod tiles;
mod transform;
mod weights;

use super::ConvShape;
use crate::Mode;
use crate::element::{Element, Values, ValuesMut};
use crate::isa::l2_cache;
use crate::panel::{Panels, multiply, multiply_transposed};
use crate::par::{Disjoint, ThreadPool, scratch};
use crate::vector::LANES;
use tiles::{Domain, Finish, Grid, Span};
use transform::{POSITIONS, STEP};
use weights::{Kernels, Part, Rows, Sums};

/// Fewer channels than this on either side are faster without.
const MIN_CHANNELS: usize = 32;

/// Whether this method computes the layer.
pub(super) fn fits(s: &ConvShape) -> bool {
    let channels = |c: usize| c >= MIN_CHANNELS && c.is_multiple_of(LANES);
    s.kernel == [3, 3]
        && s.stride == [1, 1]
        && s.dilation == [1, 1]
        && s.groups == 1
        && s.padding[0] == s.padding[1]
        && s.padding[0] <= 2
        && channels(s.inp)
        && channels(s.out)
        && s.output.iter().all(|&o| o >= STEP - 1)
}

/// Whether this method is faster than `vdpbf16ps`, which multiplies twice as many values at a
/// time: it is where most tiles are whole. Measured on Zen 4, all passes, 32 to 512 channels:
/// 0.65 to 0.9 of the time with images of 4, 7 and more pixels a side.
#[cfg(target_arch = "x86_64")]
pub(super) fn beats_pairs(s: &ConvShape) -> bool {
    let tiles: usize = s.output.iter().map(|o| o.div_ceil(STEP)).product();
    fits(s) && 10 * tiles <= s.pixels()
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

/// One pass from images to images.
#[derive(Clone, Copy)]
struct TileMap {
    grid: Grid,
    inp: usize,
    out: usize,
}

impl TileMap {
    fn forward(s: &ConvShape) -> Self {
        TileMap {
            grid: Grid {
                images: s.images,
                input: s.input,
                output: s.output,
                padding: s.padding[0],
            },
            inp: s.inp,
            out: s.out,
        }
    }

    /// From output gradients to input gradients.
    fn back(s: &ConvShape) -> Self {
        Self::forward(&ConvShape {
            input: s.output,
            output: s.input,
            inp: s.out,
            out: s.inp,
            padding: s.padding.map(|p| 2 - p),
            ..*s
        })
    }

    fn keeps_tiles(&self) -> bool {
        self.inp * self.out >= STORED_WEIGHTS && self.grid.tiles() <= KEPT_TILES
    }

    fn all_weights(&self) -> Part {
        Part {
            panel: 0,
            panels: self.out / LANES,
            input: 0,
            inputs: self.inp,
        }
    }

    fn work_len(&self) -> usize {
        if self.keeps_tiles() {
            Domain::len(self.grid.tiles(), self.inp)
        } else {
            self.all_weights().len()
        }
    }
}

/// Elements of `work` of the three passes.
pub(super) fn work_len(s: &ConvShape) -> usize {
    let sums = weight_work(s);
    TileMap::forward(s)
        .work_len()
        .max(TileMap::back(s).work_len())
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
        inp: s.inp,
        out: s.out,
        rotated: false,
    };
    run(threads, TileMap::forward(s), x, kernels, finish, work, y);
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
        inp: s.inp,
        out: s.out,
        rotated: true,
    };
    run(threads, TileMap::back(s), dy, kernels, finish, work, dx);
}

fn run(
    threads: &ThreadPool,
    map: TileMap,
    x: Values<'_>,
    kernels: Kernels<'_>,
    finish: Finish<'_>,
    work: &mut [f32],
    y: ValuesMut<'_>,
) {
    use {Values as X, ValuesMut as Y};
    match (x, y) {
        (X::F32(x), Y::F32(y)) => run_on(threads, map, x, kernels, finish, work, y),
        (X::F32(x), Y::Bf16(y)) => run_on(threads, map, x, kernels, finish, work, y),
        (X::Bf16(x), Y::F32(y)) => run_on(threads, map, x, kernels, finish, work, y),
        (X::Bf16(x), Y::Bf16(y)) => run_on(threads, map, x, kernels, finish, work, y),
    }
}

fn run_on<S: Element, T: Element>(
    threads: &ThreadPool,
    map: TileMap,
    x: &[S],
    kernels: Kernels<'_>,
    finish: Finish<'_>,
    work: &mut [f32],
    y: &mut [T],
) {
    let (g, pixels) = (map.grid, |size: [usize; 2]| size[0] * size[1]);
    assert!(x.len() == g.images * pixels(g.input) * map.inp);
    assert!(y.len() == g.images * pixels(g.output) * map.out);
    assert!(kernels.w.len() == 9 * map.inp * map.out);
    assert!(work.len() >= map.work_len());
    assert!(finish.bias.is_empty() || finish.bias.len() == map.out);
    if map.keeps_tiles() {
        by_panels(threads, map, x, kernels, finish, work, y);
    } else {
        by_blocks(threads, map, x, kernels, finish, work, y);
    }
}

/// Many tiles: weights transformed once, then block by block of tiles.
fn by_blocks<S: Element, T: Element>(
    threads: &ThreadPool,
    map: TileMap,
    x: &[S],
    kernels: Kernels<'_>,
    finish: Finish<'_>,
    work: &mut [f32],
    y: &mut [T],
) {
    let whole = map.all_weights();
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
        let to = u.pointer(panel * map.inp * LANES);
        // SAFETY: this chunk alone writes its panels.
        unsafe { weights::forward(kernels, part, plane, to) };
    });
    let u: *const f32 = u.pointer(0);
    let u = SharedPtr(u);
    let tiles = map.grid.tiles();
    let block = block_tiles(map.inp.max(map.out)).min(tiles.max(1));
    let out = Disjoint::new(y);
    threads.run(tiles.div_ceil(block), |i| {
        let span = Span {
            first: i * block,
            count: block.min(tiles - i * block),
            row: 0,
        };
        let (a, c) = (Domain::len(block, map.inp), Domain::len(block, map.out));
        scratch(a + c + map.inp, |memory| {
            let (zeros, rest) = memory.split_at_mut(map.inp);
            zeros.fill(0.0);
            let (v, m) = rest.split_at_mut(a);
            let v = Domain::new(v, block, map.inp);
            let m = Domain::new(m, block, map.out);
            // What is read next and written last comes from memory while positions are multiplied.
            let next = map
                .grid
                .rows(span.next(), x.as_ptr(), map.grid.input, map.inp);
            let last = map
                .grid
                .rows(span, out.pointer(0), map.grid.output, map.out);
            // SAFETY: sizes were checked in `run`; these tiles' outputs belong to this chunk.
            unsafe {
                tiles::input(&map.grid, x.as_ptr(), zeros.as_ptr().cast(), span, v);
                for p in 0..POSITIONS {
                    weights::fetch(next, p);
                    weights::fetch(last, p);
                    multiply(&Panels {
                        a: v.data.add(p * v.plane),
                        a_panel: block * LANES,
                        b: u.get().add(p * plane),
                        b_panel: map.inp * LANES,
                        c: m.data.add(p * m.plane),
                        c_panel: block * LANES,
                        rows: span.count,
                        depth: map.inp,
                        columns: map.out / LANES,
                        add: false,
                    });
                }
                tiles::output(&map.grid, m, span, out.pointer(0), map.out, finish);
            }
        });
    });
}

/// Few tiles, large weights: all tiles transformed once, then panel by panel of
/// the weights, which never leave the cache.
fn by_panels<S: Element, T: Element>(
    threads: &ThreadPool,
    map: TileMap,
    x: &[S],
    kernels: Kernels<'_>,
    finish: Finish<'_>,
    work: &mut [f32],
    y: &mut [T],
) {
    let tiles = map.grid.tiles();
    let v = SharedPtr(Domain::new(work, tiles, map.inp));
    transform_all(threads, tiles, map.inp, |zeros, span| {
        // SAFETY: sizes were checked in `run`; these tiles belong to this chunk.
        unsafe { tiles::input(&map.grid, x.as_ptr(), zeros.cast(), span, v.get()) };
    });
    let panels = map.out / LANES;
    let out = Disjoint::new(y);
    threads.run(panels.div_ceil(PART_PANELS), |i| {
        let v = v.get();
        let panel = i * PART_PANELS;
        let part = Part {
            panel,
            panels: PART_PANELS.min(panels - panel),
            input: 0,
            inputs: PART_INPUTS.min(map.inp),
        };
        let channels = part.panels * LANES;
        let (a, c) = (part.len(), Domain::len(tiles, channels));
        scratch(a + c, |memory| {
            let (u, m) = memory.split_at_mut(a);
            let m = Domain::new(m, tiles, channels);
            for input in (0..map.inp).step_by(PART_INPUTS) {
                let part = Part {
                    input,
                    inputs: PART_INPUTS.min(map.inp - input),
                    ..part
                };
                // The next part comes from memory while this one is multiplied.
                let after = Part {
                    input: input + PART_INPUTS,
                    ..part
                };
                let next = (after.input < map.inp).then(|| Rows::of(kernels, after));
                // SAFETY: the part lies in the kernels, `u` has room for it, and
                // `m` belongs to this chunk.
                unsafe {
                    weights::forward(kernels, part, part.plane(), u.as_mut_ptr());
                    for p in 0..POSITIONS {
                        if let Some(next) = next {
                            weights::fetch(next, p);
                        }
                        multiply(&Panels {
                            a: v.data.add(p * v.plane + input * tiles),
                            a_panel: tiles * LANES,
                            b: u.as_ptr().add(p * part.plane()),
                            b_panel: part.inputs * LANES,
                            c: m.data.add(p * m.plane),
                            c_panel: tiles * LANES,
                            rows: tiles,
                            depth: part.inputs,
                            columns: part.panels,
                            add: input > 0,
                        });
                    }
                }
            }
            let first = panel * LANES;
            let span = Span {
                first: 0,
                count: tiles,
                row: 0,
            };
            let bias = finish.bias.get(first..).unwrap_or(&[]);
            let finish = Finish { bias, ..finish };
            // SAFETY: these channels of all tiles belong to this chunk.
            unsafe { tiles::output(&map.grid, m, span, out.pointer(first), map.out, finish) };
        });
    });
}

/// Inputs and panels of outputs of the weight gradient that one chunk makes
/// when all tiles are kept: its sums stay in L2.
const BLOCK_INPUTS: usize = 64;
const BLOCK_PANELS: usize = 4;

/// Tiles transformed at a time for a weight gradient.
fn gradient_block(s: &ConvShape) -> usize {
    if s.inp.max(s.out) <= 64 { 32 } else { 64 }
}

/// Whether a weight gradient keeps all tiles transformed.
fn gradient_keeps(s: &ConvShape) -> bool {
    s.inp * s.out >= STORED_WEIGHTS && TileMap::forward(s).grid.tiles() <= KEPT_TILES
}

/// Elements that all partial sums of a weight gradient may take: more would cost more
/// to fold than threads gain by not synchronising at every block of tiles.
const PARTIAL_ELEMS: usize = 640 * 1024;
/// Blocks of tiles that a partial sum is worth.
const PARTIAL_BLOCKS: usize = 8;

/// Partial sums of a weight gradient, over runs of whole blocks: by shape alone.
fn partials(s: &ConvShape) -> usize {
    let blocks = TileMap::forward(s).grid.tiles().div_ceil(gradient_block(s));
    let room = PARTIAL_ELEMS / TileMap::forward(s).all_weights().len();
    room.min(blocks / PARTIAL_BLOCKS).clamp(1, 8)
}

fn weight_work(s: &ConvShape) -> usize {
    let map = TileMap::forward(s);
    let domains = |rows| Domain::len(rows, s.inp) + Domain::len(rows, s.out);
    if gradient_keeps(s) {
        return domains(map.grid.tiles());
    }
    match partials(s) {
        1 => domains(gradient_block(s)) + map.all_weights().len(),
        parts => parts * map.all_weights().len(),
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
    let tiles = TileMap::forward(s).grid.tiles();
    if gradient_keeps(s) {
        let (v, z) = work.split_at_mut(Domain::len(tiles, s.inp));
        let (v, z) = (Domain::new(v, tiles, s.inp), Domain::new(z, tiles, s.out));
        both_domains(threads, s, x, dy, (0, tiles), v, z);
        gradient_by_parts(threads, s, v, z, tiles, dw, mode);
    } else {
        let parts = partials(s);
        if parts == 1 {
            gradient_by_blocks(threads, s, x, dy, work);
        } else {
            gradient_by_runs(threads, s, x, dy, &mut work[..], parts);
        }
        finish_gradient(threads, s, work, parts, dw, mode);
    }
}

/// Transforms inputs and output gradients of `count` tiles from `first` on.
fn both_domains(
    threads: &ThreadPool,
    s: &ConvShape,
    x: Values<'_>,
    dy: Values<'_>,
    (first, count): (usize, usize),
    v: Domain,
    z: Domain,
) {
    let grid = TileMap::forward(s).grid;
    let shared = SharedPtr((v, z));
    transform_all(threads, count, s.inp.max(s.out), |zeros, span| {
        let (v, z) = shared.get();
        let span = Span {
            first: first + span.first,
            ..span
        };
        // SAFETY: sizes were checked by the caller; these tiles belong to this chunk.
        unsafe {
            both_tiles(&grid, (x, dy), zeros, span, (v, z));
        }
    });
}

/// Inputs and output gradients of the tiles after a span, to be prefetched.
fn next_pixels(map: &TileMap, span: Span, x: Values<'_>, dy: Values<'_>) -> [Rows; 2] {
    let (g, next) = (map.grid, span.next());
    let rows = |values: Values<'_>, size, channels| match values {
        Values::F32(v) => g.rows(next, v.as_ptr(), size, channels),
        Values::Bf16(v) => g.rows(next, v.as_ptr(), size, channels),
    };
    [rows(x, g.input, map.inp), rows(dy, g.output, map.out)]
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
    s: &ConvShape,
    p: usize,
    (v, z): (Domain, Domain),
    count: usize,
    sums: *mut f32,
    add: bool,
) {
    // SAFETY: the caller's promise.
    unsafe {
        multiply_transposed(&Panels {
            a: v.data.add(p * v.plane),
            a_panel: v.rows * LANES,
            b: z.data.add(p * z.plane),
            b_panel: z.rows * LANES,
            c: sums,
            c_panel: s.inp * LANES,
            rows: s.inp,
            depth: count,
            columns: s.out / LANES,
            add,
        });
    }
}

/// Many tiles, weights of some size: their sums are kept, tiles come block by
/// block, and threads share a block's positions. `work` starts with the sums.
fn gradient_by_blocks(
    threads: &ThreadPool,
    s: &ConvShape,
    x: Values<'_>,
    dy: Values<'_>,
    work: &mut [f32],
) {
    let (map, block) = (TileMap::forward(s), gradient_block(s));
    let (whole, tiles) = (map.all_weights(), map.grid.tiles());
    let (sums, rest) = work.split_at_mut(whole.len());
    let (v, z) = rest.split_at_mut(Domain::len(block, s.inp));
    let (v, z) = (Domain::new(v, block, s.inp), Domain::new(z, block, s.out));
    let plane = whole.plane();
    if tiles == 0 {
        sums.fill(0.0);
    }
    let sums = Disjoint::new(sums);
    for first in (0..tiles).step_by(block) {
        let count = block.min(tiles - first);
        both_domains(threads, s, x, dy, (first, count), v, z);
        let span = Span {
            first,
            count,
            row: 0,
        };
        let shared = SharedPtr((v, z, next_pixels(&map, span, x, dy)));
        threads.run(POSITIONS, |p| {
            let (v, z, next) = shared.get();
            // SAFETY: position p of the sums belongs to this chunk.
            unsafe {
                for rows in next {
                    weights::fetch(rows, p);
                }
                let to = sums.pointer(p * plane);
                sum_position(s, p, (v, z), count, to, first > 0);
            }
        });
    }
}

/// Many tiles, small weights: each chunk goes over a run of blocks with sums of its
/// own, all in its core's cache. `work` receives the sums one after another.
fn gradient_by_runs(
    threads: &ThreadPool,
    s: &ConvShape,
    x: Values<'_>,
    dy: Values<'_>,
    work: &mut [f32],
    parts: usize,
) {
    let (map, block) = (TileMap::forward(s), gradient_block(s));
    let (whole, tiles) = (map.all_weights(), map.grid.tiles());
    let (len, plane) = (whole.len(), whole.plane());
    let run = tiles.div_ceil(block).div_ceil(parts) * block;
    threads.split(&mut work[..parts * len], len, |at, sums| {
        let from = at / len * run;
        let to = (from + run).min(tiles);
        if from >= to {
            return sums.fill(0.0);
        }
        let size = Domain::len(block, s.inp);
        let widest = s.inp.max(s.out);
        scratch(size + Domain::len(block, s.out) + widest, |memory| {
            let (v, rest) = memory.split_at_mut(size);
            let (z, zeros) = rest.split_at_mut(Domain::len(block, s.out));
            zeros.fill(0.0);
            let (v, z) = (Domain::new(v, block, s.inp), Domain::new(z, block, s.out));
            for first in (from..to).step_by(block) {
                let count = block.min(to - first);
                let span = Span {
                    first,
                    count,
                    row: 0,
                };
                let next = next_pixels(&map, span, x, dy);
                // SAFETY: sizes were checked by the caller; domains and sums are this chunk's.
                unsafe {
                    both_tiles(&map.grid, (x, dy), zeros.as_ptr(), span, (v, z));
                    for p in 0..POSITIONS {
                        for rows in next {
                            weights::fetch(rows, p);
                        }
                        let to = sums.as_mut_ptr().add(p * plane);
                        sum_position(s, p, (v, z), count, to, first > from);
                    }
                }
            }
        });
    });
}

/// Adds up `parts` sums in order, and transforms them back.
fn finish_gradient(
    threads: &ThreadPool,
    s: &ConvShape,
    sums: &[f32],
    parts: usize,
    dw: &mut [f32],
    mode: Mode,
) {
    let whole = TileMap::forward(s).all_weights();
    let (len, plane) = (whole.len(), whole.plane());
    assert!(sums.len() >= parts * len);
    let out = Disjoint::new(dw);
    threads.run(whole.panels.div_ceil(PART_PANELS), |i| {
        let panel = i * PART_PANELS;
        let part = Part {
            panel,
            panels: PART_PANELS.min(whole.panels - panel),
            ..whole
        };
        let stride = s.inp * LANES;
        let from = Sums {
            first: sums[panel * stride..].as_ptr(),
            parts,
            apart: len,
            plane,
            stride,
        };
        // SAFETY: these panels of outputs belong to this chunk.
        unsafe { weights::gradient(from, part, out.pointer(0), [s.inp, s.out], mode) };
    });
}

/// Few tiles: block by block of the weights, from start to end in cache.
fn gradient_by_parts(
    threads: &ThreadPool,
    s: &ConvShape,
    v: Domain,
    z: Domain,
    tiles: usize,
    dw: &mut [f32],
    mode: Mode,
) {
    let panels = s.out / LANES;
    let (down, across) = (s.inp.div_ceil(BLOCK_INPUTS), panels.div_ceil(BLOCK_PANELS));
    let shared = SharedPtr((v, z));
    let out = Disjoint::new(dw);
    threads.run(down * across, |i| {
        let (v, z) = shared.get();
        let (input, panel) = (i / across * BLOCK_INPUTS, i % across * BLOCK_PANELS);
        let part = Part {
            panel,
            panels: BLOCK_PANELS.min(panels - panel),
            input,
            inputs: BLOCK_INPUTS.min(s.inp - input),
        };
        let (plane, stride) = (part.plane(), part.inputs * LANES);
        scratch(part.len(), |sums| {
            let sums = sums.as_mut_ptr();
            // Prefetch the memory that is stored to in the end.
            let to = Rows::of_gradient(out.pointer(0), [s.inp, s.out], part);
            // SAFETY: the part lies in both domains; its weights belong to this chunk.
            unsafe {
                for p in 0..POSITIONS {
                    weights::fetch(to, p);
                    multiply_transposed(&Panels {
                        a: v.data.add(p * v.plane + input * tiles),
                        a_panel: tiles * LANES,
                        b: z.data.add(p * z.plane + panel * LANES * tiles),
                        b_panel: tiles * LANES,
                        c: sums.add(p * plane),
                        c_panel: stride,
                        rows: part.inputs,
                        depth: tiles,
                        columns: part.panels,
                        add: false,
                    });
                }
                let from = Sums {
                    first: sums,
                    parts: 1,
                    apart: 0,
                    plane,
                    stride,
                };
                weights::gradient(from, part, out.pointer(0), [s.inp, s.out], mode);
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
