//! Products of two tensors, matrix by matrix. Saves both.
//!
//! *Order*: a matrix of the result belongs to one thread; a single matrix is split into
//! rows or columns, by shape.

use crate::pool::Buf;
use crate::tape::{BackwardContext, Compute, Operation, SlotId, Slots};
use crate::{Result, Tensor, refuse};
use phalanx_kernels::Mode;
use phalanx_kernels::par::ThreadPool;
use phalanx_kernels::product::{Mat, product, product_threaded};

pub(crate) struct Bmm(Sizes);

/// `count` products of m x k by k x n; `transposed`: the second is stored as n x k.
#[derive(Clone, Copy)]
struct Sizes {
    count: usize,
    m: usize,
    k: usize,
    n: usize,
    transposed: bool,
}

fn a_of(s: Sizes, a: &[f32]) -> Mat<'_> {
    Mat::rows(a, s.m, s.k, s.k)
}

fn b_of(s: Sizes, b: &[f32]) -> Mat<'_> {
    if s.transposed {
        Mat::rows(b, s.n, s.k, s.k).t()
    } else {
        Mat::rows(b, s.k, s.n, s.n)
    }
}

fn c_of(s: Sizes, c: &[f32]) -> Mat<'_> {
    Mat::rows(c, s.m, s.n, s.n)
}

/// Matrix `i` of `count` equal ones.
fn at(x: &[f32], i: usize, len: usize) -> &[f32] {
    &x[i * len..(i + 1) * len]
}

/// `to = f(i)` for every matrix of `len` elements in rows of `wide`.
fn each<'m>(
    threads: &ThreadPool,
    (count, len, wide): (usize, usize, usize),
    to: &mut [f32],
    f: impl Fn(usize) -> (Mat<'m>, Mat<'m>) + Sync,
) {
    if count == 1 {
        let (a, b) = f(0);
        product_threaded(threads, to, a, b, Mode::Write);
        return;
    }
    threads.split(to, len, |from, to| {
        let (a, b) = f(from / len);
        product(to, wide, a, b, Mode::Write);
    });
}

impl<'s> Tensor<'s> {
    /// Matrix products: (…, m, k) times (…, k, n), all outer dimensions equal.
    /// Products with a parameter are [`matmul`](Tensor::matmul) and [`linear`](Tensor::linear).
    ///
    /// # Errors
    /// `Usage` when the sizes do not fit or the steps differ.
    pub fn bmm(self, other: Tensor<'s>) -> Result<Tensor<'s>> {
        self.products(other, false)
    }

    /// As [`bmm`](Tensor::bmm) with the second operand's matrices transposed:
    /// (…, m, k) times (…, n, k).
    ///
    /// # Errors
    /// As [`bmm`](Tensor::bmm).
    pub fn bmm_transposed(self, other: Tensor<'s>) -> Result<Tensor<'s>> {
        self.products(other, true)
    }

    fn products(self, other: Tensor<'s>, transposed: bool) -> Result<Tensor<'s>> {
        let (step, a, b) = (self.step(), self.slot(), other.slot());
        let (da, db) = (self.dims(), other.dims());
        let rank = da.len();
        let fits = std::ptr::eq(step, other.step())
            && rank >= 2
            && db.len() == rank
            && da[..rank - 2] == db[..rank - 2]
            && da[rank - 1] == db[if transposed { rank - 1 } else { rank - 2 }];
        if !fits {
            refuse!(
                "bmm of shapes {da:?} and {db:?} (second transposed: {transposed}) does not fit, or the steps differ"
            );
        }
        let s = Sizes {
            count: da[..rank - 2].iter().product(),
            m: da[rank - 2],
            k: da[rank - 1],
            n: db[if transposed { rank - 2 } else { rank - 1 }],
            transposed,
        };
        let shape = da.with(rank - 1, s.n)?;
        step.apply([a, b], shape, Bmm(s))
    }
}

impl Operation<2> for Bmm {
    fn saves(&self) -> [bool; 2] {
        [true; 2]
    }

    fn flops(&self) -> u64 {
        let Sizes { count, m, k, n, .. } = self.0;
        2 * (count * m * k * n) as u64
    }

    fn forward(&self, c: &mut Compute<'_>, [a, b]: [SlotId; 2]) -> Result<(Buf, Option<Buf>)> {
        let s = self.0;
        let len = s.m * s.n;
        let mut buf = c.state.pool.get(s.count * len);
        let (x, y) = (c.state.value(a), c.state.value(b));
        each(c.threads, (s.count, len, s.n), buf.slice_mut(), |i| {
            (a_of(s, at(x, i, s.m * s.k)), b_of(s, at(y, i, s.k * s.n)))
        });
        Ok((buf, None))
    }

    fn backward(&self, ctx: &mut BackwardContext<'_>, slots: &Slots<2>, dy: Buf) -> Result<()> {
        let [x, y] = slots.x;
        let (s, threads) = (self.0, ctx.threads);
        let (a, b, d) = (ctx.value(x), ctx.value(y), dy.slice());
        let (la, lb, lc) = (s.m * s.k, s.k * s.n, s.m * s.n);
        if ctx.wants(x) {
            let mut da = ctx.pool().get(a.len());
            each(threads, (s.count, la, s.k), da.slice_mut(), |i| {
                (c_of(s, at(d, i, lc)), b_of(s, at(b, i, lb)).t())
            });
            ctx.give(x, da);
        }
        if ctx.wants(y) {
            let mut db = ctx.pool().get(b.len());
            let wide = if s.transposed { s.k } else { s.n };
            each(threads, (s.count, lb, wide), db.slice_mut(), |i| {
                let (a, d) = (a_of(s, at(a, i, la)), c_of(s, at(d, i, lc)));
                if s.transposed { (d.t(), a) } else { (a.t(), d) }
            });
            ctx.give(y, db);
        }
        ctx.pool().put(dy);
        Ok(())
    }
}
