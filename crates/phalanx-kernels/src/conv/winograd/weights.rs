//! Kernels to and from the transformed domain, where position p is one matrix
//! `[outputs / 16][inputs][16]`.

use super::phase::{Side, has, tap};
use super::transform::{self, POSITIONS};
use crate::Mode;
use crate::vector::{LANES, Vector};

/// Kernels in (tap, in, out) order, of the layer's inputs and outputs.
#[derive(Clone, Copy)]
pub(super) struct Kernels<'a> {
    pub w: &'a [f32],
    pub inp: Side,
    pub out: usize,
    /// For the input gradient: rotated by 180 degrees, inputs and outputs exchanged.
    pub rotated: bool,
}

/// Part of the kernels: `panels` of sixteen outputs from `panel` on, `inputs` from
/// `input` on, of all phases. (For rotated kernels "outputs" are the layer's inputs.)
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
unsafe fn forward_row<V: Vector>(k: Kernels<'_>, p: Part, i: usize, plane: usize, u: *mut f32) {
    let (phase, input) = k.inp.place(p.input + i);
    for panel in 0..p.panels {
        let place = place(plane);
        // SAFETY: part lies in the kernels, and `u` holds it.
        unsafe {
            let to = u.add((panel * p.inputs + i) * LANES);
            let from = (k.w.as_ptr()).add(input * k.out + (p.panel + panel) * LANES);
            transform::weight_tile::<V>(
                |y, x| match tap(phase, y, x) {
                    Some(tap) => V::load(from.add(tap * k.inp.channels * k.out)),
                    None => V::splat(0.0),
                },
                |y, x, v| {
                    if has(phase, y, x) {
                        v.store(to.add(place(y, x)));
                    }
                },
            );
        }
    }
}

/// Sixteen by sixteen kernels with inputs and outputs exchanged: `[tap][input][output]`.
type Block = [[[f32; LANES]; LANES]; TAPS];

#[inline(always)]
unsafe fn rotated_panel<V: Vector>(
    k: Kernels<'_>,
    p: Part,
    panel: usize,
    plane: usize,
    u: *mut f32,
) {
    let (phase, channel) = k.inp.place((p.panel + panel) * LANES);
    let mut block: Block = [[[0.0; LANES]; LANES]; TAPS];
    for first in (0..p.inputs).step_by(LANES) {
        // SAFETY: the part lies in the kernels, and `u` holds it.
        unsafe {
            let row = channel * k.out + p.input + first;
            for (tap, block) in block.iter_mut().enumerate() {
                let from = (k.w.as_ptr()).add(tap * k.inp.channels * k.out + row);
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
                    |y, x| match tap(phase, y, x) {
                        Some(tap) => V::load(block[TAPS - 1 - tap][i].as_ptr()),
                        None => V::splat(0.0),
                    },
                    |y, x, v| {
                        if has(phase, y, x) {
                            v.store(to.add(place(y, x)));
                        }
                    },
                );
            }
        }
    }
}

#[inline(always)]
unsafe fn transform_body<V: Vector>(k: Kernels<'_>, p: Part, plane: usize, u: *mut f32) {
    if k.rotated {
        for panel in 0..p.panels {
            // SAFETY: the caller's promise.
            unsafe { rotated_panel::<V>(k, p, panel, plane, u) };
        }
        return;
    }
    // Panels inside: a row of the part is one run of memory.
    for i in 0..p.inputs {
        // SAFETY: the caller's promise.
        unsafe { forward_row::<V>(k, p, i, plane, u) };
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
            let row = k.inp.place(p.panel * LANES).1 * k.out + p.input;
            (row, p.panels * LANES, p.inputs.div_ceil(LANES))
        } else {
            let row = k.inp.place(p.input).1 * k.out;
            (row + p.panel * LANES, p.inputs, p.panels)
        };
        Rows {
            first: k.w.as_ptr().wrapping_add(at),
            tap: k.inp.channels * k.out,
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

    /// Where the gradient of `part` of kernels goes.
    pub(super) fn of_gradient(dw: *const f32, (inp, out): (Side, usize), p: Part) -> Self {
        Rows {
            first: dw.wrapping_add(inp.place(p.input).1 * out + p.panel * LANES),
            tap: inp.channels * out,
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

/// Transformed gradients of a part.
#[derive(Clone, Copy)]
pub(super) struct Sums {
    /// The part's first value.
    pub first: *const f32,
    /// Floats from one position to the next, and from one panel of outputs to the next.
    pub plane: usize,
    pub stride: usize,
}

#[inline(always)]
unsafe fn gradient_row<V: Vector>(
    u: Sums,
    p: Part,
    i: usize,
    dw: *mut f32,
    (inp, out): (Side, usize),
    mode: Mode,
) {
    let (phase, input) = inp.place(p.input + i);
    for panel in 0..p.panels {
        let place = place(u.plane);
        // SAFETY: the part lies in both.
        unsafe {
            let from = u.first.add(panel * u.stride + i * LANES);
            let to = dw.add(input * out + (p.panel + panel) * LANES);
            transform::weight_gradient_tile::<V>(
                |y, x| match has(phase, y, x) {
                    true => V::load(from.add(place(y, x))),
                    false => V::splat(0.0),
                },
                |y, x, v| {
                    if let Some(tap) = tap(phase, y, x) {
                        let to = to.add(tap * inp.channels * out);
                        match mode {
                            Mode::Write => v.store(to),
                            Mode::Add => V::load(to).add(v).store(to),
                        }
                    }
                },
            );
        }
    }
}

#[inline(always)]
unsafe fn gradient_body<V: Vector>(
    u: Sums,
    p: Part,
    dw: *mut f32,
    size: (Side, usize),
    mode: Mode,
) {
    for i in 0..p.inputs {
        // SAFETY: the caller's promise.
        unsafe { gradient_row::<V>(u, p, i, dw, size, mode) };
    }
}

vectorised! {
    /// Transforms part of the kernels' gradients back.
    ///
    /// # Safety
    /// `u` holds the part, `dw` all `9 * inp * out` values, and no other code touches the
    /// part of `dw`.
    pub(super) unsafe fn gradient(
        u: Sums, p: Part, dw: *mut f32, size: (Side, usize), mode: Mode,
    ) = gradient_body
}
