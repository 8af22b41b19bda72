//! Weights of convolutions in PyTorch's order and in the engine's.

use crate::aligned::ALIGN_ELEMS;

/// Calls `f(outside, inside)` for every element of `out` x `inp` x `taps`, in any order: its index in PyTorch's
/// row-major order and its index in the engine's memory, `(taps, inp, out)`.
#[inline(always)]
fn for_each_index([out, inp, taps]: [usize; 3], mut f: impl FnMut(usize, usize)) {
    // A cache line of outputs at a time: both sides are walked in lines.
    for from in (0..out).step_by(ALIGN_ELEMS) {
        let outputs = from..(from + ALIGN_ELEMS).min(out);
        for i in 0..inp {
            for t in 0..taps {
                for o in outputs.clone() {
                    f((o * inp + i) * taps + t, (t * inp + i) * out + o);
                }
            }
        }
    }
}

/// From PyTorch's order, `[out, inp, taps]`, to the engine's.
pub fn import(sizes: [usize; 3], from: &[f32], into: &mut [f32]) {
    for_each_index(sizes, |o, i| into[i] = from[o]);
}

/// From the engine's order to PyTorch's, `[out, inp, taps]`.
pub fn export(sizes: [usize; 3], from: &[f32], into: &mut [f32]) {
    for_each_index(sizes, |o, i| into[o] = from[i]);
}
