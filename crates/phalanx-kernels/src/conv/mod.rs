//! Two-dimensional convolution, channels-last, weights in (kh, kw, in, out) order.
//!
//! A layer's method is a function of its shape alone (`Method::of`), never
//! of a timing: another method means other bits.
//!
//! * `bf16`: one group, where bf16 is asked for and the processor's [`Family`] multiplies it.
//! * `winograd`: 3x3 at stride 1 or 2 with 32 channels and more, in sixteens.
//! * `depthwise`: a kernel for each channel.
//! * `pointwise`: 1x1 at stride 1 with few weights or pixels, or with channels not in sixteens: one product.
//! * `direct`: other kernels and strides with channels in sixteens, through
//!   tables of pixel pointers.
//! * `gather`: everything else: windows copied into a block that fits the L2
//!   cache, then one product.
//!
//! Values stored as bf16 are widened by the transforms of `winograd`, and in memory of their
//! own for the other methods of f32.

mod depthwise;
mod direct;
mod gather;
mod pointwise;
mod shape;
mod winograd;

pub use shape::ConvShape;

use super::bias::{column_sums, finish};
use super::element::{Values, ValuesMut, convert};
use super::elementwise::{add, fold};
#[cfg(target_arch = "x86_64")]
use super::{Family, bf16};
use super::{Mode, Precision};
use crate::par::{ThreadPool, scratch};
use crate::transpose::transpose;

/// The method that computes a layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Method {
    #[cfg(target_arch = "x86_64")]
    Bf16,
    Winograd,
    Depthwise,
    Direct,
    Pointwise,
    Gather,
}

impl Method {
    fn of(s: &ConvShape) -> Self {
        #[cfg(target_arch = "x86_64")]
        if s.precision == Precision::Bf16 {
            let is_faster = match Family::here() {
                Family::Amx => true,
                Family::Avx512Bf16 => !winograd::beats_pairs(s),
                Family::Other => false,
            };
            if is_faster && bf16::fits(s) {
                return Method::Bf16;
            }
        }
        if winograd::fits(s) {
            Method::Winograd
        } else if depthwise::fits(s) {
            Method::Depthwise
        } else if pointwise::fits(s) && (pointwise::beats_tables(s) || !direct::fits(s)) {
            Method::Pointwise
        } else if direct::fits(s) {
            Method::Direct
        } else {
            Method::Gather
        }
    }
}

/// Whether a layer's operands and results may be stored as bf16.
pub fn may_be_bf16(s: &ConvShape) -> bool {
    s.precision == Precision::Bf16 && s.groups == 1
}

/// Whether outputs should be stored as bf16: 1x1 convolutions of f32 have too few products for each
/// value that is widened.
pub fn stores_bf16(s: &ConvShape) -> bool {
    may_be_bf16(s) && (s.kernel != [1, 1] || multiplies_bf16(s))
}

/// Whether this processor multiplies the layer's operands as bf16.
pub fn multiplies_bf16(s: &ConvShape) -> bool {
    match Method::of(s) {
        #[cfg(target_arch = "x86_64")]
        Method::Bf16 => true,
        _ => false,
    }
}

/// Values as f32: bf16 widened into the start of `work`, and the rest of it.
fn widened<'a>(
    threads: &ThreadPool,
    v: Values<'a>,
    work: &'a mut [f32],
) -> (&'a [f32], &'a mut [f32]) {
    match v {
        Values::F32(v) => (v, work),
        Values::Bf16(v) => {
            let (wide, work) = work.split_at_mut(v.len());
            convert(threads, v, wide);
            (wide, work)
        }
    }
}

/// `y = act(conv(x, w) + bias)`. One chunk an image. Values may be bf16 where [`may_be_bf16`]
/// says so; outputs in bf16 have neither bias nor activation.
pub fn forward(
    threads: &ThreadPool,
    s: &ConvShape,
    x: Values<'_>,
    w: &[f32],
    (bias, relu): (Option<&[f32]>, bool),
    work: &mut [f32],
    y: ValuesMut<'_>,
) {
    if s.images == 0 {
        return;
    }
    let (il, ol) = (s.in_len(), s.out_len());
    let (method, bias) = (Method::of(s), bias.unwrap_or(&[]));
    #[cfg(target_arch = "x86_64")]
    if method == Method::Bf16 {
        return bf16::forward(threads, s, x, w, (bias, relu), work, y);
    }
    if method == Method::Winograd {
        return winograd::forward(threads, s, x, w, (bias, relu), work, y);
    }
    let (x, work) = widened(threads, x, work);
    let y = match y {
        ValuesMut::F32(y) => y,
        ValuesMut::Bf16(y) => {
            let (wide, work) = work.split_at_mut(y.len());
            let (x, to) = (Values::F32(x), ValuesMut::F32(wide));
            forward(threads, s, x, w, (None, false), work, to);
            return convert(threads, wide, y);
        }
    };
    match method {
        Method::Direct => direct::forward(threads, s, x, w, (bias, relu), work, y),
        Method::Depthwise => depthwise::forward(threads, s, x, w, (bias, relu), y, Mode::Write),
        Method::Pointwise => pointwise::forward(threads, s, x, w, (bias, relu), y),
        _ => threads.split(y, ol, |at, y| {
            gather::forward(s, &x[at / ol * il..][..il], w, y);
            finish(y, bias, relu); // the image is still in cache
        }),
    }
}

/// Elements that all partial weight gradients together may take.
const PARTIAL_ELEMS: usize = 1 << 20;
/// Partial sums at most.
const MAX_PARTIALS: usize = 8;

/// Elements of `work` of all four passes.
pub fn work_len(s: &ConvShape) -> usize {
    let len = match Method::of(s) {
        #[cfg(target_arch = "x86_64")]
        Method::Bf16 => return bf16::work_len(s).max(partials(s) * s.out),
        Method::Winograd => return winograd::work_len(s).max(partials(s) * s.out),
        _ if direct::fits(s) => partials(s) * s.out,
        _ => partials(s) * s.weight_len().max(s.out),
    };
    let wide = match may_be_bf16(s) {
        true => s.images * (s.in_len() + s.out_len()),
        false => 0,
    };
    len.max(s.weight_len()) + wide
}

/// Number of partial sums of a weight gradient: by shape alone.
fn partials(s: &ConvShape) -> usize {
    (PARTIAL_ELEMS / s.weight_len().max(1))
        .clamp(1, MAX_PARTIALS)
        .min(s.images.max(1))
}

/// `dw (+)=` the weight gradient. `work` holds [`work_len`] elements.
///
/// *Order*: images of a chunk one after another, chunks folded in order.
pub fn weight_gradient(
    threads: &ThreadPool,
    s: &ConvShape,
    x: Values<'_>,
    dy: Values<'_>,
    work: &mut [f32],
    dw: &mut [f32],
    mode: Mode,
) {
    if s.images == 0 {
        if mode == Mode::Write {
            dw.fill(0.0);
        }
        return;
    }
    let method = Method::of(s);
    #[cfg(target_arch = "x86_64")]
    if method == Method::Bf16 {
        return bf16::weight_gradient(threads, s, x, dy, work, dw, mode);
    }
    if method == Method::Winograd {
        return winograd::weight_gradient(threads, s, x, dy, work, dw, mode);
    }
    let (x, work) = widened(threads, x, work);
    let (dy, work) = widened(threads, dy, work);
    match method {
        Method::Direct => return direct::weight_gradient(threads, s, x, dy, dw, mode),
        Method::Pointwise if direct::fits(s) => {
            return pointwise::weight_gradient(threads, s, x, dy, dw, mode);
        }
        _ => {}
    }
    let chunks = partials(s);
    let per = s.images.div_ceil(chunks);
    let len = s.weight_len();
    let (il, ol) = (s.in_len(), s.out_len());
    let parts = &mut work[..chunks * len];
    threads.split(parts, len, |at, dw| {
        let chunk = at / len;
        let images = (chunk * per).min(s.images)..((chunk + 1) * per).min(s.images);
        let x = &x[images.start * il..images.end * il];
        let dy = &dy[images.start * ol..images.end * ol];
        match method {
            Method::Depthwise => return depthwise::weight_gradient(s, x, dy, dw),
            Method::Pointwise => {
                return pointwise::weight_gradient(threads, s, x, dy, dw, Mode::Write);
            }
            _ => dw.fill(0.0),
        }
        for (x, dy) in x.chunks_exact(il.max(1)).zip(dy.chunks_exact(ol.max(1))) {
            gather::weight_gradient(s, x, dy, dw);
        }
    });
    fold(threads, parts, dw, mode);
}

/// `db (+)=` the sum of `dy` over images and pixels. `work` holds [`work_len`]
/// elements.
pub fn bias_gradient(
    threads: &ThreadPool,
    s: &ConvShape,
    dy: &[f32],
    work: &mut [f32],
    db: &mut [f32],
    mode: Mode,
) {
    let chunks = partials(s);
    let per = s.images.div_ceil(chunks);
    let ol = s.out_len();
    let parts = &mut work[..chunks * s.out];
    threads.split(parts, s.out, |at, db| {
        let chunk = at / s.out;
        let images = (chunk * per).min(s.images)..((chunk + 1) * per).min(s.images);
        column_sums(threads, &dy[images.start * ol..images.end * ol], db);
    });
    fold(threads, parts, db, mode);
}

/// `dx (+)=` the input gradient. `work` holds [`work_len`] elements.
pub fn input_gradient(
    threads: &ThreadPool,
    s: &ConvShape,
    w: &[f32],
    dy: Values<'_>,
    (work, dx): (&mut [f32], ValuesMut<'_>),
    mode: Mode,
) {
    if s.images == 0 {
        return;
    }
    let method = Method::of(s);
    #[cfg(target_arch = "x86_64")]
    if method == Method::Bf16 {
        return bf16::input_gradient(threads, s, w, dy, work, dx, mode);
    }
    if method == Method::Winograd {
        return winograd::input_gradient(threads, s, w, dy, work, dx, mode);
    }
    let (dy, work) = widened(threads, dy, work);
    let dx = match dx {
        ValuesMut::F32(dx) => dx,
        ValuesMut::Bf16(dx) => {
            let (wide, work) = work.split_at_mut(dx.len());
            let (dy, to) = (Values::F32(dy), ValuesMut::F32(wide));
            input_gradient(threads, s, w, dy, (work, to), Mode::Write);
            return match mode {
                Mode::Write => convert(threads, wide, dx),
                Mode::Add => add(threads, dx, wide),
            };
        }
    };
    let weights = &mut work[..s.weight_len()];
    match method {
        Method::Direct => return direct::input_gradient(threads, s, w, dy, work, dx, mode),
        Method::Pointwise => return pointwise::input_gradient(threads, s, w, dy, dx, mode),
        Method::Depthwise => {
            return depthwise::input_gradient(threads, s, w, dy, weights, dx, mode);
        }
        _ => transpose(w, weights, s.depth(), s.out),
    }
    let weights = &*weights;
    let (il, ol) = (s.in_len(), s.out_len());
    let image = |i: usize, dx: &mut [f32]| {
        gather::input_gradient(s, weights, &dy[i * ol..(i + 1) * ol], dx)
    };
    threads.split(dx, il, |at, dx| match mode {
        Mode::Write => image(at / il, dx),
        Mode::Add => scratch(il, |own| {
            image(at / il, own);
            dx.iter_mut().zip(own).for_each(|(d, o)| *d += *o);
        }),
    });
}

#[cfg(test)]
pub(crate) mod tests;
