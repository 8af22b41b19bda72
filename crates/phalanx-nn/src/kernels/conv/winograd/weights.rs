//! Kernels to and from the transformed domain, where position p is one matrix
//! `[outputs / 16][inputs][16]`.

use super::transform::{self, POSITIONS};
use crate::kernels::Mode;
use crate::kernels::vector::{LANES, Vector};

/// Kernels in (tap, in, out) order.
#[derive(Clone, Copy)]
pub(super) struct Kernels<'a> {
    pub w: &'a [f32],
    pub inp: usize,
    pub out: usize,
    /// For the input gradient: turned by 180 degrees, inputs and outputs exchanged.
    pub turned: bool,
}

/// Part of the kernels: `panels` of sixteen outputs from `panel` on, `inputs` from
/// `input` on. (For turned kernels "outputs" are the layer's inputs.)
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

#[inline(always)]
unsafe fn forward_body<V: Vector>(k: Kernels<'_>, p: Part, plane: usize, u: *mut f32) {
    // Panels inside: a row of the part is one run of memory.
    for i in 0..p.inputs {
        for panel in 0..p.panels {
            // SAFETY: part lies in the kernels, and `u` holds it.
            unsafe {
                let to = u.add((panel * p.inputs + i) * LANES);
                let from = (k.w.as_ptr()).add((p.input + i) * k.out + (p.panel + panel) * LANES);
                transform::weight_tile::<V>(
                    |y, x| V::load(from.add((y * 3 + x) * k.inp * k.out)),
                    |y, x, v| v.store(to.add((y * 6 + x) * plane)),
                );
            }
        }
    }
}

/// Sixteen by sixteen kernels with inputs and outputs exchanged: `[tap][input][output]`.
type Block = [[[f32; LANES]; LANES]; TAPS];

#[inline(always)]
unsafe fn turned_body<V: Vector>(k: Kernels<'_>, p: Part, plane: usize, u: *mut f32) {
    let mut block: Block = [[[0.0; LANES]; LANES]; TAPS];
    for panel in 0..p.panels {
        for first in (0..p.inputs).step_by(LANES) {
            for (tap, block) in block.iter_mut().enumerate() {
                #[allow(clippy::needless_range_loop)] // two indices change places
                for o in 0..LANES {
                    let at =
                        (tap * k.inp + (p.panel + panel) * LANES + o) * k.out + p.input + first;
                    for (i, &v) in k.w[at..at + LANES].iter().enumerate() {
                        block[i][o] = v;
                    }
                }
            }
            #[allow(clippy::needless_range_loop)] // of the inner of three arrays
            for i in 0..LANES {
                // SAFETY: `u` holds the part.
                unsafe {
                    let to = u.add((panel * p.inputs + first + i) * LANES);
                    transform::weight_tile::<V>(
                        |y, x| V::load(block[TAPS - 1 - (y * 3 + x)][i].as_ptr()),
                        |y, x, v| v.store(to.add((y * 6 + x) * plane)),
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
        if k.turned {
            turned_body::<V>(k, p, plane, u);
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
    let [inp, out] = size;
    for i in 0..p.inputs {
        for panel in 0..p.panels {
            // SAFETY: the part lies in both.
            unsafe {
                let from = u.first.add(panel * u.stride + i * LANES);
                let to = dw.add((p.input + i) * out + (p.panel + panel) * LANES);
                transform::weight_gradient_tile::<V>(
                    |y, x| {
                        let from = from.add((y * 6 + x) * u.plane);
                        (1..u.parts).fold(V::load(from), |sum, part| {
                            sum.add(V::load(from.add(part * u.apart)))
                        })
                    },
                    |y, x, v| {
                        let to = to.add((y * 3 + x) * inp * out);
                        match mode {
                            Mode::Write => v.store(to),
                            Mode::Add => V::load(to).add(v).store(to),
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
    /// `u` holds the part in each of its sums, `dw` all `9 * inp * out` values, and
    /// nobody else touches the part of `dw`.
    pub(super) unsafe fn gradient(
        u: Sums, p: Part, dw: *mut f32, size: [usize; 2], mode: Mode,
    ) = gradient_body
}
