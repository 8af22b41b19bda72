//! Products of two tensors, matrix by matrix. Saves both.
//!
//! *Order*: a matrix of the result belongs to one thread, or (of a single one)
//! its rows or columns do, cut by shape.

use crate::kernels::Mode;
use crate::kernels::product::{Mat, product, product_team};
use crate::par::Team;
use crate::pool::Buf;
use crate::tape::{Compute, Pass, Recorded, SlotId, Visit};
use crate::tensor::Shape;
use crate::{Error, Result, Tensor};

pub(crate) struct Bmm {
    a: SlotId,
    b: SlotId,
    out: SlotId,
    sizes: Sizes,
}

/// `count` products of m x k by k x n; `turned`: the second lies as n x k.
#[derive(Clone, Copy)]
struct Sizes {
    count: usize,
    m: usize,
    k: usize,
    n: usize,
    turned: bool,
}

fn a_of(s: Sizes, a: &[f32]) -> Mat<'_> {
    Mat::rows(a, s.m, s.k, s.k)
}

fn b_of(s: Sizes, b: &[f32]) -> Mat<'_> {
    if s.turned {
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
    team: &Team,
    (count, len, wide): (usize, usize, usize),
    to: &mut [f32],
    f: impl Fn(usize) -> (Mat<'m>, Mat<'m>) + Sync,
) {
    if count == 1 {
        let (a, b) = f(0);
        product_team(team, to, a, b, Mode::Write);
        return;
    }
    team.split(to, len, |from, to| {
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

    fn products(self, other: Tensor<'s>, turned: bool) -> Result<Tensor<'s>> {
        let (step, a, b) = (self.step(), self.slot(), other.slot());
        let (da, db) = (self.dims(), other.dims());
        let rank = da.len();
        let fits = std::ptr::eq(step, other.step())
            && rank >= 2
            && db.len() == rank
            && da[..rank - 2] == db[..rank - 2]
            && da[rank - 1] == db[if turned { rank - 1 } else { rank - 2 }];
        if !fits {
            return Err(Error::usage(format!(
                "bmm of shapes {da:?} and {db:?} (second transposed: {turned}) does not fit, or the steps differ"
            )));
        }
        let s = Sizes {
            count: da[..rank - 2].iter().product(),
            m: da[rank - 2],
            k: da[rank - 1],
            n: db[if turned { rank - 2 } else { rank - 1 }],
            turned,
        };
        let mut sizes = [0; 6];
        sizes[..rank].copy_from_slice(&da);
        sizes[rank - 1] = s.n;
        let shape = Shape::new(&sizes[..rank])?;
        let out = {
            let mut st = step.state();
            let buf = compute(&mut step.compute(&mut st), a, b, s);
            let wants = st.wants_grad(a) || st.wants_grad(b);
            let out = st.add_output(shape, buf, wants);
            if wants {
                st.record(Bmm {
                    a,
                    b,
                    out,
                    sizes: s,
                });
            }
            out
        };
        Ok(Tensor::new(step, out))
    }
}

fn compute(c: &mut Compute<'_>, a: SlotId, b: SlotId, s: Sizes) -> Buf {
    let len = s.m * s.n;
    let mut buf = c.state.pool.get(s.count * len);
    let (x, y) = (c.state.value(a), c.state.value(b));
    each(c.team, (s.count, len, s.n), buf.slice_mut(), |i| {
        (a_of(s, at(x, i, s.m * s.k)), b_of(s, at(y, i, s.k * s.n)))
    });
    buf
}

impl Recorded for Bmm {
    fn visit(&self, f: &mut dyn FnMut(Visit)) {
        f(Visit::Output(self.out));
        f(Visit::Input(self.a));
        f(Visit::Input(self.b));
        f(Visit::Saved(self.a));
        f(Visit::Saved(self.b));
    }

    fn backward(&self, pass: &mut Pass<'_>, dy: Buf) -> Result<()> {
        let (s, team) = (self.sizes, pass.team);
        let (a, b, d) = (pass.value(self.a), pass.value(self.b), dy.slice());
        let (la, lb, lc) = (s.m * s.k, s.k * s.n, s.m * s.n);
        if pass.wants(self.a) {
            let mut da = pass.pool().get(a.len());
            each(team, (s.count, la, s.k), da.slice_mut(), |i| {
                (c_of(s, at(d, i, lc)), b_of(s, at(b, i, lb)).t())
            });
            pass.give(self.a, da);
        }
        if pass.wants(self.b) {
            let mut db = pass.pool().get(b.len());
            let wide = if s.turned { s.k } else { s.n };
            each(team, (s.count, lb, wide), db.slice_mut(), |i| {
                let (a, d) = (a_of(s, at(a, i, la)), c_of(s, at(d, i, lc)));
                if s.turned { (d.t(), a) } else { (a.t(), d) }
            });
            pass.give(self.b, db);
        }
        pass.pool().put(dy);
        Ok(())
    }

    fn repeats(&self) -> bool {
        true
    }

    fn again(&self, c: &mut Compute<'_>) -> Result<Buf> {
        Ok(compute(c, self.a, self.b, self.sizes))
    }
}
