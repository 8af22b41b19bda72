//! Two-dimensional convolution, channels-last, weights in (kh, kw, in, out) order.
//!
//! A layer's method is a function of its shape alone ([`Method::of`]), never
//! of a timing: another method means other bits.
//!
//! * `unit`: stride 1, no dilation, no groups: products straight over the
//!   image, whose overlapping windows are rows of a matrix with a short stride.
//! * `gather`: everything else: windows copied into a block that fits the L2
//!   cache, then one product.

mod gather;
mod shape;
mod unit;

pub(crate) use shape::ConvShape;

use super::Mode;
use super::bias::{column_sums, finish};
use super::elementwise::fold;
use crate::par::{Disjoint, Team};

/// How a layer is computed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Method {
    Unit,
    Gather,
}

/// A window row shorter than this makes products too thin to run over the image.
const MIN_WINDOW_ROW: usize = 16;

impl Method {
    fn of(s: &ConvShape) -> Self {
        let plain = s.stride == [1, 1] && s.dilation == [1, 1] && s.groups == 1;
        if plain && s.kernel[1] * s.inp >= MIN_WINDOW_ROW {
            Method::Unit
        } else {
            Method::Gather
        }
    }
}

/// `y = act(conv(x, w) + bias)`. One chunk an image.
pub(crate) fn forward(
    team: &Team,
    s: &ConvShape,
    x: &[f32],
    w: &[f32],
    bias: Option<&[f32]>,
    relu: bool,
    y: &mut [f32],
) {
    let (il, ol) = (s.in_len(), s.out_len());
    let (method, bias) = (Method::of(s), bias.unwrap_or(&[]));
    let out = Disjoint::new(y);
    team.run(s.images, |i| {
        // SAFETY: chunk i alone touches image i.
        let y = unsafe { out.range(i * ol..(i + 1) * ol) };
        let x = &x[i * il..(i + 1) * il];
        match method {
            Method::Unit => unit::forward(s, x, w, bias, relu, y),
            Method::Gather => {
                gather::forward(s, x, w, y);
                finish(y, bias, relu); // the image is still in cache
            }
        }
    });
}

/// Elements that all partial weight gradients together may take.
const PARTIAL_ELEMS: usize = 1 << 20;
/// Partial sums at most.
const MAX_PARTIALS: usize = 8;

/// Number of partial sums of a weight gradient: by shape alone.
pub(crate) fn partials(s: &ConvShape) -> usize {
    (PARTIAL_ELEMS / s.weight_len().max(1))
        .clamp(1, MAX_PARTIALS)
        .min(s.images.max(1))
}

/// `dw (+)=` the weight gradient. `work` holds `partials(s) * weight_len`
/// elements.
///
/// *Order*: images of a chunk one after another, chunks folded in order.
pub(crate) fn weight_gradient(
    team: &Team,
    s: &ConvShape,
    x: &[f32],
    dy: &[f32],
    work: &mut [f32],
    dw: &mut [f32],
    mode: Mode,
) {
    let chunks = partials(s);
    let per = s.images.div_ceil(chunks);
    let len = s.weight_len();
    let (il, ol) = (s.in_len(), s.out_len());
    let method = Method::of(s);
    let parts = &mut work[..chunks * len];
    team.split(parts, len, |at, dw| {
        let chunk = at / len;
        let images = (chunk * per).min(s.images)..((chunk + 1) * per).min(s.images);
        dw.fill(0.0);
        for i in images {
            let (x, dy) = (&x[i * il..(i + 1) * il], &dy[i * ol..(i + 1) * ol]);
            match method {
                Method::Unit => unit::weight_gradient(s, x, dy, dw),
                Method::Gather => gather::weight_gradient(s, x, dy, dw),
            }
        }
    });
    fold(team, parts, dw, mode);
}

/// `db (+)=` the sum of `dy` over images and pixels. `work` holds
/// `partials(s) * out` elements.
pub(crate) fn bias_gradient(
    team: &Team,
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
    team.split(parts, s.out, |at, db| {
        let chunk = at / s.out;
        let images = (chunk * per).min(s.images)..((chunk + 1) * per).min(s.images);
        column_sums(&dy[images.start * ol..images.end * ol], db);
    });
    fold(team, parts, db, mode);
}

/// Overwrites `dx` with the input gradient. `turned` holds `weight_len`
/// elements for the weights in the order that this pass wants.
pub(crate) fn input_gradient(
    team: &Team,
    s: &ConvShape,
    w: &[f32],
    dy: &[f32],
    turned: &mut [f32],
    dx: &mut [f32],
) {
    let method = Method::of(s);
    match method {
        Method::Unit => unit::turn(s, w, turned),
        Method::Gather => gather::turn(s, w, turned),
    }
    let turned = &*turned;
    let (il, ol) = (s.in_len(), s.out_len());
    team.split(dx, il, |at, dx| {
        let i = at / il;
        let dy = &dy[i * ol..(i + 1) * ol];
        match method {
            Method::Unit => unit::input_gradient(s, turned, dy, dx),
            Method::Gather => gather::input_gradient(s, turned, dy, dx),
        }
    });
}

#[cfg(test)]
mod tests;
