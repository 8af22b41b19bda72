//! Kernels to and from the transformed domain, where position p is one matrix
//! `[outputs / 16][inputs][16]`.

use super::transform::{self, POSITIONS};
use crate::Mode;
use crate::vector::{LANES, Vector};

/// Kernels in (tap, in, out) order.
#[derive(Clone, Copy)]
pub(super) struct Kernels<'a> {
    pub w: &'a [f32],
    pub inp: usize,
    pub out: usize,
    /// For the input gradient: rotated by 180 degrees, inputs and outputs exchanged.
    pub rotated: bool,
}

/// Part of the kernels: `panels` of sixteen outputs from `panel` on, `inputs` from
/// `input` on. (For rotated kernels "outputs" are the layer's inputs.)
#[derive(Clone, Copy)]
pub(super) struct Part {
    pub panel: usize,
    pub panels: usize,
    pub input: usize,
    pub inputs: usize,
}

impl Part {
    /// Floats of one position, a line more than it holds (see `Domain::plane`).
    pub(super) fn plane(&self) -> usize {
        self.panels * self.inputs * LANES + LANES
    }

    /// Floats of all positions.
    pub(super) fn len(&self) -> usize {
        POSITIONS * self.plane()
    }
}

const TAPS: usize = 9;

/// Pointer to position (y, x) of squares whose positions lie `plane` floats apart.
/// `plane` is hidden from the optimiser, which would otherwise keep a pointer for
/// each of the 36 positions, all of them on the stack.
#[inline(always)]
fn place(plane: usize) -> impl Fn(usize, usize) -> usize {
    let plane = std::hint::black_box(plane);
    move |y, x| (y * 6 + x) * plane
}

#[inline(always)]
unsafe fn forward_body<V: Vector>(k: Kernels<'_>, p: Part, plane: usize, u: *mut f32) {
    // Panels inside: a row of the part is one run of memory.
    for i in 0..p.inputs {
        for panel in 0..p.panels {
            let place = place(plane);
            // SAFETY: part lies in the kernels, and `u` holds it.
            unsafe {
                let to = u.add((panel * p.inputs + i) * LANES);
                let from = (k.w.as_ptr()).add((p.input + i) * k.out + (p.panel + panel) * LANES);
                transform::weight_tile::<V>(
                    |y, x| V::load(from.add((y * 3 + x) * k.inp * k.out)),
                    |y, x, v| v.store(to.add(place(y, x))),
                );
            }
        }
    }
}

/// Sixteen by sixteen kernels with inputs and outputs exchanged: `[tap][input][output]`.
type Block = [[[f32; LANES]; LANES]; TAPS];

#[inline(always)]
unsafe fn rotated_body<V: Vector>(k: Kernels<'_>, p: Part, plane: usize, u: *mut f32) {
    let mut block: Block = [[[0.0; LANES]; LANES]; TAPS];
    for panel in 0..p.panels {
        for first in (0..p.inputs).step_by(LANES) {
            // SAFETY: the part lies in the kernels, and `u` holds it.
            unsafe {
                let row = (p.panel + panel) * LANES * k.out + p.input + first;
                for (tap, block) in block.iter_mut().enumerate() {
                    let from = k.w.as_ptr().add(tap * k.inp * k.out + row);
                    let mut rows = [V::splat(0.0); LANES];
                    for (o, row) in rows.iter_mut().enumerate() {
                        *row = V::load(from.add(o * k.out));
                    }
                    for (to, row) in block.iter_mut().zip(V::transpose(rows)) {
                        row.store(to.as_mut_ptr());
                    }
                }
                #[allow(clippy::needless_range_loop)] // of the inner of three arrays
                for i in 0..LANES {
                    let place = place(plane);
                    let to = u.add((panel * p.inputs + first + i) * LANES);
                    transform::weight_tile::<V>(
                        |y, x| V::load(block[TAPS - 1 - (y * 3 + x)][i].as_ptr()),
                        |y, x, v| v.store(to.add(place(y, x))),
                    );
                }
            }
        }
    }
}

#[inline(always)]
unsafe fn transform_body<V: Vector>(k: Kernels<'_>, p: Part, plane: usize, u: *mut f32) {
    // SAFETY: the caller's promise.
    unsafe {
        if k.rotated {
            rotated_body::<V>(k, p, plane, u);
        } else {
            forward_body::<V>(k, p, plane, u);
        }
    }
}

vectorised! {
    /// Transforms part of the kernels; positions lie `plane` floats apart.
    ///
    /// # Safety
    /// `u` holds the part in each position, the part lies in the kernels.
    pub(super) unsafe fn forward(k: Kernels<'_>, p: Part, plane: usize, u: *mut f32) = transform_body
}

/// Runs of memory, `lines` cache lines each, that hold part of the kernels (or of their
/// gradients, laid out alike), or of images.
#[derive(Clone, Copy)]
pub(super) struct Rows {
    first: *const f32,
    /// Floats from one tap to the next.
    tap: usize,
    /// Floats from one run to the next, and runs of a tap.
    stride: usize,
    count: usize,
    lines: usize,
}

impl Rows {
    /// Where `part` of the kernels lies.
    pub(super) fn of(k: Kernels<'_>, p: Part) -> Self {
        let (at, count, lines) = if k.rotated {
            let row = p.panel * LANES * k.out + p.input;
            (row, p.panels * LANES, p.inputs.div_ceil(LANES))
        } else {
            (p.input * k.out + p.panel * LANES, p.inputs, p.panels)
        };
        Rows {
            first: k.w.as_ptr().wrapping_add(at),
            tap: k.inp * k.out,
            stride: k.out,
            count,
            lines,
        }
    }

    /// `len` floats that lie one after another.
    pub(super) fn run(first: *const f32, len: usize) -> Self {
        Rows {
            first,
            tap: len / TAPS,
            stride: len / POSITIONS,
            count: POSITIONS / TAPS,
            lines: len.div_ceil(POSITIONS * LANES),
        }
    }

    /// Where the gradient of `part` of `inp` x `out` kernels goes.
    pub(super) fn of_gradient(dw: *const f32, [inp, out]: [usize; 2], p: Part) -> Self {
        Rows {
            first: dw.wrapping_add(p.input * out + p.panel * LANES),
            tap: inp * out,
            stride: out,
            count: p.inputs,
            lines: p.panels,
        }
    }
}

#[inline(always)]
unsafe fn fetch_body<V: Vector>(rows: Rows, share: usize) {
    let all = TAPS * rows.count;
    for row in share * all / POSITIONS..(share + 1) * all / POSITIONS {
        let at = row / rows.count * rows.tap + row % rows.count * rows.stride;
        for line in 0..rows.lines {
            // SAFETY: a hint.
            unsafe { V::fetch(rows.first.wrapping_add(at + line * LANES)) };
        }
    }
}

vectorised! {
    /// Prefetches one of [`POSITIONS`] shares of the rows: to be called once for each
    /// during other computation.
    ///
    /// # Safety
    /// No requirements: memory is not accessed.
    pub(super) unsafe fn fetch(rows: Rows, share: usize) = fetch_body
}

/// Transformed gradients of a part: partial sums to be added up in order.
#[derive(Clone, Copy)]
pub(super) struct Sums {
    /// The part's first value in the first sum.
    pub first: *const f32,
    pub parts: usize,
    /// Floats from one sum to the next, from one position to the next, and from one
    /// panel of outputs to the next.
    pub apart: usize,
    pub plane: usize,
    pub stride: usize,
}

#[inline(always)]
unsafe fn gradient_body<V: Vector>(u: Sums, p: Part, dw: *mut f32, size: [usize; 2], mode: Mode) {
    // One sum is the common case, and its loads need no loop.
    // SAFETY: the caller's promise.
    unsafe {
        match (u.parts, mode) {
            (1, Mode::Write) => gradient_part::<V, true, true>(u, p, dw, size),
            (1, Mode::Add) => gradient_part::<V, true, false>(u, p, dw, size),
            (_, Mode::Write) => gradient_part::<V, false, true>(u, p, dw, size),
            (_, Mode::Add) => gradient_part::<V, false, false>(u, p, dw, size),
        }
    }
}

#[inline(always)]
unsafe fn gradient_part<V: Vector, const ONE: bool, const WRITE: bool>(
    u: Sums,
    p: Part,
    dw: *mut f32,
    [inp, out]: [usize; 2],
) {
    for i in 0..p.inputs {
        for panel in 0..p.panels {
            let place = place(u.plane);
            // SAFETY: the part lies in both.
            unsafe {
                let from = u.first.add(panel * u.stride + i * LANES);
                let to = dw.add((p.input + i) * out + (p.panel + panel) * LANES);
                transform::weight_gradient_tile::<V>(
                    |y, x| {
                        let from = from.add(place(y, x));
                        let mut sum = V::load(from);
                        if !ONE {
                            for part in 1..u.parts {
                                sum = sum.add(V::load(from.add(part * u.apart)));
                            }
                        }
                        sum
                    },
                    |y, x, v| {
                        let to = to.add((y * 3 + x) * inp * out);
                        if WRITE {
                            v.store(to);
                        } else {
                            V::load(to).add(v).store(to);
                        }
                    },
                );
            }
        }
    }
}

vectorised! {
    /// Adds up partial sums of part of the kernels' gradients and transforms them back.
    ///
    /// # Safety
    /// `u` holds the part in each of its sums, `dw` all `9 * inp * out` values, and no
    /// other code touches the part of `dw`.
    pub(super) unsafe fn gradient(
        u: Sums, p: Part, dw: *mut f32, size: [usize; 2], mode: Mode,
    ) = gradient_body
}
