//! Weight gradients: products over pixels, of transposed inputs and output
//! gradients in pairs.

use super::layout::Layout;
use super::pack::{self, BLOCK, Columns, LANES, Units};
use super::tile::{Block, Sums, Tiles};
use super::window::Window;
use super::{ConvShape, DEPTH, SIDE, WEIGHT_PIXELS};
use crate::Mode;
use crate::element::{Values, elements_mut};
use crate::elementwise::fold;
use crate::par::{Disjoint, ThreadPool, scratch};

/// Elements that all partial sums together may take.
const PARTIAL_ELEMS: usize = 1 << 20;
/// Partial sums at most.
const MAX_PARTIALS: usize = 8;
/// With fewer, weights are cut by input channels instead.
const MIN_PARTIALS: usize = 4;
/// Runs of pixels in one product at most.
const MAX_RUNS: usize = WEIGHT_PIXELS;

/// How a weight gradient is cut: by shape alone.
struct WeightChunks {
    layout: Layout,
    /// Chunks of units with sums of their own; one: chunks of channels instead.
    partials: usize,
    /// Units of one product.
    segment: usize,
    segments: usize,
    /// Channels of a slot that one chunk packs at a time.
    channels: usize,
    /// Blocks of 32 pixels in a segment.
    blocks: usize,
}

impl WeightChunks {
    fn of(w: &Window, s: &ConvShape) -> Self {
        let layout = Layout::new(w, DEPTH, WEIGHT_PIXELS);
        let segment = (WEIGHT_PIXELS / layout.pixels.max(1))
            .max(1)
            .min(layout.units.max(1));
        let segments = layout.units.div_ceil(segment);
        let partials = (PARTIAL_ELEMS / s.weight_len().max(1)).min(MAX_PARTIALS);
        let partials = if partials < MIN_PARTIALS {
            1
        } else {
            partials.min(segments.max(1))
        };
        WeightChunks {
            partials,
            segment,
            segments,
            channels: if partials > 1 { layout.slot } else { SIDE },
            blocks: (segment * layout.pixels).div_ceil(DEPTH),
            layout,
        }
    }

    /// Dwords of a segment's output gradients.
    fn pairs_len(&self, s: &ConvShape) -> usize {
        s.out.next_multiple_of(SIDE) / LANES * self.blocks * BLOCK
    }

    /// Bytes between rows of transposed inputs: an odd number of lines, so that rows
    /// of a tile lie in different sets of the cache.
    fn stride(&self) -> usize {
        let lines = (self.segment * self.layout.unit_slots() * 2).div_ceil(64);
        (lines | 1) * 64
    }

    fn segment(&self, i: usize) -> Units {
        let first = i * self.segment;
        Units {
            first,
            count: self.segment.min(self.layout.units - first),
        }
    }
}

/// Elements of `work`: partial sums, or all output gradients in pairs.
pub(super) fn work_len(s: &ConvShape) -> usize {
    let cut = WeightChunks::of(&Window::forward(s), s);
    if cut.partials > 1 {
        cut.partials * s.weight_len()
    } else {
        cut.segments * cut.pairs_len(s)
    }
}

/// `dw (+)=` the weight gradient. `work` holds [`work_len`](super::work_len) elements.
///
/// *Order*: segments of pixels one after another; partial sums over chunks of segments,
/// folded in order, where weights are few.
pub fn weight_gradient(
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
    let window = Window::forward(s);
    let cut = WeightChunks::of(&window, s);
    if cut.layout.units == 0 || cut.layout.pixels == 0 {
        if mode == Mode::Write {
            dw.fill(0.0);
        }
        return;
    }
    let job = Job {
        window: &window,
        cut: &cut,
        s,
        x,
        dy,
    };
    let pairs = cut.pairs_len(s);
    if cut.partials > 1 {
        let (len, per) = (s.weight_len(), cut.segments.div_ceil(cut.partials));
        let parts = &mut work[..cut.partials * len];
        threads.split(parts, len, |at, sums| {
            let from = at / len * per;
            let to = (from + per).min(cut.segments);
            if from >= to {
                return sums.fill(0.0);
            }
            let sums = Disjoint::new(sums);
            scratch(pairs, |memory| {
                job.channels(0, from..to, &sums, |i| {
                    job.pair_rows(i, memory);
                    memory.as_ptr()
                });
            });
        });
        return fold(threads, parts, dw, mode);
    }
    let shared = &mut work[..cut.segments * pairs];
    threads.split(shared, pairs, |at, to| job.pair_rows(at / pairs, to));
    let shared = &*shared;
    let out = Disjoint::new(dw);
    threads.run(cut.layout.slot / cut.channels, |i| {
        let first = i * cut.channels;
        let pairs = |i: usize| shared[i * pairs..].as_ptr();
        if mode == Mode::Write {
            return job.channels(first, 0..cut.segments, &out, pairs);
        }
        // The sum of this use is made first, then added.
        scratch(s.weight_len(), |sums| {
            let own = Disjoint::new(sums);
            job.channels(first, 0..cut.segments, &own, pairs);
            for row in job.rows(first) {
                let range = row * s.out..(row + 1) * s.out;
                // SAFETY: rows of these channels belong to this chunk alone.
                let (to, from) = unsafe { (out.range(range.clone()), own.range(range)) };
                to.iter_mut().zip(from).for_each(|(t, f)| *t += *f);
            }
        });
    });
}

struct Job<'a> {
    window: &'a Window,
    cut: &'a WeightChunks,
    s: &'a ConvShape,
    x: Values<'a>,
    dy: Values<'a>,
}

impl Job<'_> {
    /// Packs the output gradients of a segment.
    fn pair_rows(&self, segment: usize, to: &mut [f32]) {
        let (units, l) = (self.cut.segment(segment), &self.cut.layout);
        let len = l.pixels * self.s.out;
        let range = units.first * len..(units.first + units.count) * len;
        assert!(to.len() >= self.cut.pairs_len(self.s));
        let (out, blocks, to) = (self.s.out, self.cut.blocks, to.as_mut_ptr().cast());
        // SAFETY: `to` holds the panels of all columns.
        unsafe {
            match self.dy {
                Values::F32(dy) => pack::rows(&dy[range], out, blocks, to),
                Values::Bf16(dy) => pack::rows(&dy[range], out, blocks, to),
            }
        }
    }

    /// Packs channels of inputs.
    ///
    /// # Safety
    /// `to` holds all copies of their rows.
    unsafe fn columns(&self, columns: &Columns, temporary: &mut [f32], to: *mut u8) {
        let (l, w) = (&self.cut.layout, self.window);
        let len = temporary.len();
        // SAFETY: the caller's promise.
        unsafe {
            match self.x {
                Values::F32(x) => pack::columns(l, w, x, columns, temporary, to),
                Values::Bf16(x) => {
                    pack::columns(l, w, x, columns, elements_mut(temporary, len), to);
                }
            }
        }
    }

    /// Rows of the weights that a chunk of channels makes.
    fn rows(&self, first: usize) -> impl Iterator<Item = usize> {
        let (l, w, depth) = (&self.cut.layout, self.window, self.window.depth());
        let channels = self.cut.channels;
        (0..l.taps).flat_map(move |tap| {
            let from = usize::from(w.taps[tap]) * w.channels + first;
            from..(from + channels).min(depth)
        })
    }

    /// Writes the sums of some channels (of a slot, from `first` on) over some segments,
    /// whose output gradients `pairs` has or makes.
    fn channels(
        &self,
        first: usize,
        segments: std::ops::Range<usize>,
        sums: &Disjoint<'_, f32>,
        mut pairs: impl FnMut(usize) -> *const f32,
    ) {
        let (cut, l, s) = (self.cut, &self.cut.layout, self.s);
        let (stride, channels) = (cut.stride(), cut.channels);
        let temporary = if l.gathered {
            DEPTH * l.slot + 16
        } else {
            l.slot
        };
        let len = l.copies * channels * stride / 4;
        scratch(len + temporary, |memory| {
            let (packed, temporary) = memory.split_at_mut(len);
            if !l.gathered {
                temporary.fill(0.0);
            }
            let tiles = Tiles::new();
            for segment in segments.clone() {
                let units = cut.segment(segment);
                let pairs = pairs(segment);
                let columns = Columns {
                    units,
                    from: first,
                    to: first + channels,
                    stride,
                };
                let to = packed.as_mut_ptr().cast::<u8>();
                // SAFETY: `packed` holds all copies of the channels' rows.
                unsafe { self.columns(&columns, temporary, to) };
                let mut offsets = [0isize; MAX_RUNS];
                let (runs, run) = self.runs(units, &mut offsets);
                let add = segment > segments.start;
                for column in (0..s.out).step_by(SIDE) {
                    for c in (0..channels).step_by(SIDE) {
                        for tap in 0..l.taps {
                            let (copy, shift) = l.read(tap);
                            let a = to.wrapping_add((copy * channels + c) * stride + 2 * shift);
                            let mut b = Block {
                                a: [a, a.wrapping_add(16 * stride)],
                                a_stride: stride,
                                offsets: offsets.as_ptr(),
                                runs,
                                run,
                                b: pairs
                                    .wrapping_add(column / LANES * cut.blocks * BLOCK)
                                    .cast(),
                                b_panel: cut.blocks * BLOCK * 4,
                                c: [std::ptr::null_mut(); 2],
                                c_stride: s.out * 4,
                                add: add.into(),
                            };
                            let w = self.window;
                            let row = usize::from(w.taps[tap]) * w.channels + first + c;
                            self.block(&tiles, &mut b, row, column, sums);
                        }
                    }
                }
            }
        });
    }

    /// Where the blocks of a segment's pixels start in a row, in bytes; how many such
    /// runs there are and how long they are.
    fn runs(&self, units: Units, offsets: &mut [isize; MAX_RUNS]) -> (usize, usize) {
        let l = &self.cut.layout;
        let pixels = units.count * l.pixels;
        if l.flat {
            return (1, pixels.div_ceil(DEPTH));
        }
        // Rows of a unit lie apart, or all in one piece.
        let piece = if l.width * l.band == l.pixels {
            l.pixels
        } else {
            l.pixels / l.band
        };
        let runs = pixels / piece;
        for (i, to) in offsets.iter_mut().enumerate().take(runs) {
            *to = 2 * l.slot_of(i * piece) as isize;
        }
        (runs, piece / DEPTH)
    }

    /// Multiplies one block into its place. `b` is filled in place: a copy of what was just
    /// written would wait for the tiles that were stored before it.
    fn block(
        &self,
        tiles: &Tiles,
        b: &mut Block,
        row: usize,
        column: usize,
        sums: &Disjoint<'_, f32>,
    ) {
        let (s, depth) = (self.s, self.window.depth());
        let (rows, width) = (SIDE.min(depth - row), SIDE.min(s.out - column));
        let at = row * s.out + column;
        if rows == SIDE && width == SIDE {
            assert!(at + 31 * s.out + SIDE <= sums.len());
            b.c = [sums.pointer(at), sums.pointer(at + 16 * s.out)];
            // SAFETY: `a` and `b` point into packed memory of the sizes named; these
            // sums belong to this chunk.
            return unsafe { tiles.multiply(b) };
        }
        let (mut own, add) = (Sums::new(), b.add != 0);
        // SAFETY: as above.
        let own = unsafe { own.multiply(tiles, b) };
        for (r, own) in own.chunks_exact(SIDE).enumerate().take(rows) {
            let at = at + r * s.out;
            // SAFETY: these sums belong to this chunk.
            let to = unsafe { sums.range(at..at + width) };
            if add {
                to.iter_mut().zip(own).for_each(|(t, o)| *t += o);
            } else {
                to.copy_from_slice(&own[..width]);
            }
        }
    }
}
