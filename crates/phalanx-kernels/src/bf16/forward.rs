//! Outputs from inputs, and input gradients from output gradients: the same
//! product over other windows.

use super::layout::Layout;
use super::pack::{self, Units};
use super::tile::{Block, Sums, Tiles};
use super::window::{MAX_RUNS, Place, Window};
use super::{ConvShape, DEPTH, FORWARD_PIXELS, SIDE};
use crate::Mode;
use crate::bias::finish;
use crate::element::{Bf16, Element, Values, ValuesMut, elements_mut};
use crate::par::{Disjoint, ThreadPool, scratch};

/// Outputs of a chunk, about: its packed pixels stay in the L2 cache next to two
/// panels of weights, which serve all of them.
const CHUNK: usize = 256;
/// Chunks from which on outputs are not cut by columns too.
const ENOUGH: usize = 4;

/// `y = act(conv(x, w) + bias)`; outputs in bf16 have neither. `work` holds [`work_len`](super::work_len) elements.
pub fn forward(
    threads: &ThreadPool,
    s: &ConvShape,
    x: Values<'_>,
    w: &[f32],
    (bias, relu): (&[f32], bool),
    work: &mut [f32],
    y: ValuesMut<'_>,
) {
    assert!(x.len() == s.images * s.in_len() && y.len() == s.images * s.out_len());
    assert!(w.len() == s.weight_len());
    let window = Window::forward(s);
    pack::weights(threads, &window, w, s.out, work);
    let job = Job {
        window: &window,
        weights: work,
        columns: s.out,
        place: None,
        mode: Mode::Write,
        finish: (bias, relu),
        out: &Out::of(y),
    };
    job.run(threads, x);
}

/// Outputs in memory, of which chunks write parts of their own.
enum Out<'a> {
    F32(Disjoint<'a, f32>),
    /// Without bias or activation.
    Bf16(Disjoint<'a, Bf16>),
}

impl<'a> Out<'a> {
    fn of(values: ValuesMut<'a>) -> Self {
        match values {
            ValuesMut::F32(v) => Out::F32(Disjoint::new(v)),
            ValuesMut::Bf16(v) => Out::Bf16(Disjoint::new(v)),
        }
    }

    /// Adds the bias to finished rows, and applies the activation.
    ///
    /// # Safety
    /// The elements of `range` belong to the caller.
    unsafe fn finish(&self, range: std::ops::Range<usize>, (bias, relu): (&[f32], bool)) {
        match self {
            // SAFETY: the caller's promise.
            Out::F32(out) => finish(unsafe { out.range(range) }, bias, relu),
            Out::Bf16(_) => unreachable!("a bias or an activation after rounding"),
        }
    }
}

/// `dx (+)=` the input gradient. `work` as in [`forward`].
pub fn input_gradient(
    threads: &ThreadPool,
    s: &ConvShape,
    w: &[f32],
    dy: Values<'_>,
    work: &mut [f32],
    dx: ValuesMut<'_>,
    mode: Mode,
) {
    assert!(dx.len() == s.images * s.in_len() && dy.len() == s.images * s.out_len());
    assert!(w.len() == s.weight_len());
    let (whole, out) = (s.stride == [1, 1], Out::of(dx));
    let mut used = 0;
    Window::phases(s, |window, place| {
        let weights = &mut work[used..][..pack::weights_len(window, s.inp)];
        used += weights.len();
        if window.count > 0 {
            pack::weights(threads, window, w, s.inp, weights);
        } else if mode == Mode::Write {
            return blank(threads, s, place, window.grid, &out);
        } else {
            return;
        }
        let job = Job {
            window,
            weights,
            columns: s.inp,
            place: (!whole).then_some(place),
            mode,
            finish: (&[], false),
            out: &out,
        };
        job.run(threads, dy);
    });
}

/// Pixels of a phase that no output reads have no gradient.
fn blank(threads: &ThreadPool, s: &ConvShape, place: Place, grid: [usize; 2], out: &Out<'_>) {
    threads.run(s.images, |image| {
        for p in 0..grid[0] * grid[1] {
            let at = place.pixel(image, p / grid[1], p % grid[1]) * s.inp;
            // SAFETY: this chunk alone touches this image's pixels of this phase.
            unsafe {
                match out {
                    Out::F32(out) => out.range(at..at + s.inp).fill(0.0),
                    Out::Bf16(out) => out.range(at..at + s.inp).fill(Bf16::default()),
                }
            }
        }
    });
}

impl Place {
    /// Pixel of the batch where output (j, i) of an image lies.
    fn pixel(&self, image: usize, j: usize, i: usize) -> usize {
        let [y, x] = [
            self.start[0] + j * self.step[0],
            self.start[1] + i * self.step[1],
        ];
        (image * self.size[0] + y) * self.size[1] + x
    }
}

struct Job<'a> {
    window: &'a Window,
    weights: &'a [f32],
    columns: usize,
    /// Where outputs lie, unless one after another.
    place: Option<Place>,
    mode: Mode,
    finish: (&'a [f32], bool),
    out: &'a Out<'a>,
}

impl Job<'_> {
    fn run(&self, threads: &ThreadPool, source: Values<'_>) {
        match source {
            Values::F32(source) => self.run_on(threads, source),
            Values::Bf16(source) => self.run_on(threads, source),
        }
    }

    fn run_on<S: Element>(&self, threads: &ThreadPool, source: &[S]) {
        let l = Layout::new(self.window, 16, FORWARD_PIXELS);
        if l.units == 0 || l.pixels == 0 {
            return;
        }
        let per = (CHUNK / l.pixels).max(1);
        let chunks = l.units.div_ceil(per);
        let wide = self.columns.div_ceil(SIDE);
        let parts = if chunks < ENOUGH { wide.min(2) } else { 1 };
        let part = wide.div_ceil(parts);
        threads.run(chunks * parts, |i| {
            let first = i / parts * per;
            let units = Units {
                first,
                count: per.min(l.units - first),
            };
            let from = (i % parts) * part;
            self.chunk(&l, source, units, from..(from + part).min(wide));
        });
        let (bias, relu) = self.finish;
        if parts > 1 && (relu || !bias.is_empty()) {
            threads.run(chunks, |i| {
                let rows = i * per * l.pixels..((i + 1) * per).min(l.units) * l.pixels;
                let c = self.columns;
                // SAFETY: these rows belong to this chunk.
                unsafe { self.out.finish(rows.start * c..rows.end * c, self.finish) };
            });
        }
    }

    fn chunk<S: Element>(
        &self,
        l: &Layout,
        source: &[S],
        units: Units,
        blocks: std::ops::Range<usize>,
    ) {
        let slots = l.copies * units.count * l.unit_slots();
        let temporary = if l.gathered { l.slot + 16 } else { 0 };
        // Reads of a last, partial tile end in the slots behind.
        let len = (slots + SIDE) * l.pitch / 2;
        scratch(temporary + len, |memory| {
            let (packed, temporary) = memory.split_at_mut(len);
            let temporary = elements_mut(temporary, temporary.len());
            let a = packed.as_mut_ptr().cast::<u16>();
            // SAFETY: `packed` holds all slots.
            unsafe { pack::slots(l, self.window, source, units, temporary, a) };
            let tiles = Tiles::new();
            let mut offsets = [0isize; MAX_RUNS];
            let w = self.window;
            let run = if l.gathered { l.slot } else { w.run() };
            let runs = l.taps * l.slot / run;
            if !l.gathered {
                for (i, to) in offsets.iter_mut().enumerate().take(runs) {
                    let (tap, channel) = w.run_at(i);
                    let (copy, shift) = l.read(tap);
                    let slot = copy * units.count * l.unit_slots() + shift;
                    *to = ((slot * l.pitch + channel) * 2) as isize;
                }
            }
            let panel = pack::panel_len(self.window);
            let count = units.count * l.pixels;
            for j in blocks.clone() {
                for p in (0..count).step_by(SIDE) {
                    let tile = |p: usize| {
                        let slot = l.slot_of(if p < count { p } else { 0 });
                        packed[slot * l.pitch / 2..].as_ptr().cast::<u8>()
                    };
                    let mut b = Block {
                        a: [tile(p), tile(p + 16)],
                        a_stride: l.pitch * 2,
                        offsets: offsets.as_ptr(),
                        runs,
                        run: run / DEPTH,
                        b: self.weights[2 * j * panel..].as_ptr().cast(),
                        b_panel: panel * 4,
                        c: [std::ptr::null_mut(); 2],
                        c_stride: self.columns * 4,
                        add: 0,
                    };
                    self.block(&tiles, &mut b, (units.first * l.pixels, p, count), j);
                }
            }
        });
        let (bias, relu) = self.finish;
        let whole = blocks.len() == self.columns.div_ceil(SIDE);
        if whole && (relu || !bias.is_empty()) {
            let first = units.first * l.pixels * self.columns;
            let len = units.count * l.pixels * self.columns;
            // SAFETY: these rows belong to this chunk.
            unsafe { self.out.finish(first..first + len, self.finish) };
        }
    }

    /// Multiplies the block of outputs `p ..` of a chunk of `count` that starts at
    /// output `first`, and columns `32 j ..`.
    fn block(
        &self,
        tiles: &Tiles,
        b: &mut Block,
        (first, p, count): (usize, usize, usize),
        j: usize,
    ) {
        let (c, column) = (self.columns, j * SIDE);
        let (rows, width) = (SIDE.min(count - p), SIDE.min(c - column));
        let whole = rows == SIDE && width == SIDE;
        if let Out::F32(out) = self.out
            && whole
            && self.place.is_none()
            && self.mode == Mode::Write
        {
            let at = (first + p) * c + column;
            b.c = [out.pointer(at), out.pointer(at + 16 * c)];
            assert!(at + 31 * c + SIDE <= out.len());
            // SAFETY: `a` and `b` point into packed memory of the sizes named; these
            // sums belong to this chunk.
            return unsafe { tiles.multiply(b) };
        }
        let mut sums = Sums::new();
        // SAFETY: as above.
        let sums = unsafe { sums.multiply(tiles, b) };
        let [h, w] = self.window.grid;
        let mut at = [0; SIDE];
        for (r, at) in at.iter_mut().enumerate().take(rows) {
            let n = first + p + r;
            let pixel = match &self.place {
                Some(place) => place.pixel(n / (h * w), n / w % h, n % w),
                None => n,
            };
            *at = pixel * c + column;
        }
        let at = &at[..rows];
        let out = match self.out {
            Out::F32(out) => out,
            Out::Bf16(out) => {
                assert!(at.iter().all(|at| at + width <= out.len()));
                // SAFETY: places inside the outputs, which belong to this chunk.
                return unsafe { pack::outputs(sums, at, width, out.pointer(0), self.mode) };
            }
        };
        for (sums, &at) in sums.chunks_exact(SIDE).zip(at) {
            // SAFETY: this output's columns belong to this chunk.
            let to = unsafe { out.range(at..at + width) };
            match self.mode {
                Mode::Write => to.copy_from_slice(&sums[..width]),
                Mode::Add => to.iter_mut().zip(sums).for_each(|(t, s)| *t += s),
            }
        }
    }
}
