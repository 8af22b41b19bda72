//! Scaled dot-product attention, head by head and by blocks of queries: no matrix of all queries and keys is in memory.
//!
//! *Order*: for finite numbers, the bits of the products, the softmax and their gradients one after the other: the weights
//! of later keys, which are 0 if it is causal, would only add zeros. (Zero times infinity would be NaN.) Backward makes the
//! weights again. A block of queries belongs to one thread, in backward a head.

use super::Mode;
use super::dropout::{MaskKey, Rate, draw, multiply};
use super::product::{Begin, Mat, product, product_at};
use super::softmax_dim::{Open, rows, rows_backward};
use crate::par::{Disjoint, PIECE, ThreadPool, scratch};

/// Queries of a block; half as many with at most twice as many keys, because a causal block
/// multiplies by all keys up to that of its last query.
const BLOCK: usize = 64;

/// Dropout of the attention weights, which are (heads, queries, keys) in each sample.
#[derive(Clone, Copy)]
pub struct Dropped<'a> {
    /// Key of the mask.
    pub key: MaskKey,
    /// How many are dropped.
    pub rate: Rate,
    /// Ids of the batch's samples.
    pub samples: &'a [u64],
}

/// Queries (samples, queries, heads x each) and keys (samples, keys, heads x each).
#[derive(Clone, Copy)]
pub struct Sizes {
    /// Samples of the batch.
    pub samples: usize,
    /// Queries of a sample.
    pub queries: usize,
    /// Keys of a sample.
    pub keys: usize,
    /// Heads.
    pub heads: usize,
    /// Width of a head.
    pub each: usize,
    /// The queries are the last positions of the keys, and each sees the keys up to its own.
    pub causal: bool,
}

/// A block of queries of one head.
#[derive(Clone, Copy)]
struct Block {
    sample: usize,
    head: usize,
    first: usize,
    rows: usize,
    /// Keys that some of its queries see.
    reach: usize,
}

impl Block {
    /// A matrix of the block's queries and the keys that some of them see.
    fn square(self, x: &[f32]) -> Mat<'_> {
        Mat::rows(x, self.rows, self.reach, self.reach)
    }
}

impl Sizes {
    fn width(self) -> usize {
        self.heads * self.each
    }

    /// Of queries or keys, of which each sample has `rows`.
    fn elements(self, rows: usize) -> usize {
        let sizes = [self.samples, rows, self.heads, self.each];
        let product = |all: usize, size| all.checked_mul(size);
        sizes
            .into_iter()
            .try_fold(1, product)
            .expect("a size that fits in memory")
    }

    /// Floating-point operations of the product of all queries and all keys.
    pub fn product_flops(self) -> u64 {
        2 * (self.samples * self.queries * self.keys * self.width()) as u64
    }

    fn heads(self) -> usize {
        self.samples * self.heads
    }

    /// Where the head's element of row `row` of a sample of `rows` rows is.
    fn at(self, block: Block, rows: usize, row: usize) -> usize {
        (block.sample * rows + row) * self.width() + block.head * self.each
    }

    /// Keys before those of the queries, if it is causal.
    fn before(self) -> usize {
        self.keys - self.queries
    }

    /// Queries of a block, the last one's fewer.
    fn rows(self) -> usize {
        BLOCK >> usize::from(self.keys <= 2 * BLOCK)
    }

    /// Blocks of a head.
    fn blocks(self) -> usize {
        self.queries.div_ceil(self.rows())
    }

    /// Block `i` of a head of all samples'.
    fn block(self, head: usize, i: usize) -> Block {
        let first = i * self.rows();
        let rows = self.rows().min(self.queries - first);
        Block {
            sample: head / self.heads,
            head: head % self.heads,
            first,
            rows,
            reach: if self.causal {
                self.before() + first + rows
            } else {
                self.keys
            },
        }
    }

    /// Keys that the queries of the block see.
    fn open(self, block: Block) -> Open {
        let first = if self.causal {
            self.before() + block.first + 1
        } else {
            self.keys
        };
        Open {
            first,
            more: usize::from(self.causal),
        }
    }

    /// The block's rows of what queries have.
    fn of_queries(self, block: Block, x: &[f32]) -> Mat<'_> {
        let from = &x[self.at(block, self.queries, block.first)..];
        Mat::rows(from, block.rows, self.each, self.width())
    }

    /// The rows of keys or values that the block sees.
    fn of_keys(self, block: Block, x: &[f32]) -> Mat<'_> {
        let from = &x[self.at(block, self.keys, 0)..];
        Mat::rows(from, block.reach, self.each, self.width())
    }

    /// The scaled queries of the block, and their weights.
    fn weigh(
        self,
        block: Block,
        (q, k): (&[f32], &[f32]),
        scaled: &mut [f32],
        weights: &mut [f32],
    ) {
        let factor = self.factor();
        for (i, scaled) in scaled.chunks_exact_mut(self.each).enumerate() {
            let at = self.at(block, self.queries, block.first + i);
            scaled_row(&q[at..at + self.each], scaled, factor);
        }
        let queries = Mat::rows(scaled, block.rows, self.each, self.each);
        let keys = self.of_keys(block, k).t();
        product(weights, block.reach, queries, keys, Mode::Write);
        rows(weights, block.reach, self.open(block), false);
    }

    /// The factors of dropout of the block's weights.
    fn draw(self, block: Block, drop: Dropped<'_>, factors: &mut [f32]) {
        let (mask, open) = ((drop.key, drop.rate), self.open(block));
        let sample = drop.samples[block.sample] as u32;
        for (i, row) in factors.chunks_exact_mut(block.reach).enumerate() {
            let seen = (open.first + i * open.more).min(block.reach);
            let (seen, others) = row.split_at_mut(seen);
            let query = block.head * self.queries + block.first + i;
            draw(seen, mask, sample, query * self.keys);
            others.fill(0.0);
        }
    }

    fn factor(self) -> f32 {
        1.0 / (self.each as f32).sqrt()
    }
}

/// Rows are short: with `simd!` the call would take longer than the loop.
fn scaled_row(from: &[f32], to: &mut [f32], factor: f32) {
    to.iter_mut().zip(from).for_each(|(t, f)| *t = f * factor);
}

/// `y` is the sum of the values, weighted by the softmax of queries times keys.
pub fn forward(
    threads: &ThreadPool,
    z: Sizes,
    [q, k, v]: [&[f32]; 3],
    drop: Option<Dropped<'_>>,
    y: &mut [f32],
) {
    assert!(y.len() == z.elements(z.queries), "the size of the output");
    if z.keys == 0 || z.each == 0 {
        return y.fill(0.0);
    }
    let out = Disjoint::new(y);
    let blocks = z.blocks();
    threads.run(z.heads() * blocks, |i| {
        let block = z.block(i / blocks, i % blocks);
        let (few, many) = (block.rows * z.each, block.rows * block.reach);
        let drawn = if drop.is_some() { many } else { 0 };
        scratch(few + many + drawn, |own| {
            let (scaled, own) = own.split_at_mut(few);
            let (weights, factors) = own.split_at_mut(many);
            z.weigh(block, (q, k), scaled, weights);
            if let Some(drop) = drop {
                z.draw(block, drop, factors);
                multiply(weights, factors);
            }
            let to = out.pointer(z.at(block, z.queries, block.first));
            let weights = block.square(weights);
            let values = z.of_keys(block, v);
            // SAFETY: this head's columns of the block's rows, which no other block touches.
            unsafe { product_at(to, z.width(), weights, values.into(), Begin::Zero, &[]) };
        });
    });
}

/// The gradients of queries, keys and values, of those that are wanted.
pub fn backward(
    threads: &ThreadPool,
    z: Sizes,
    [q, k, v]: [&[f32]; 3],
    drop: Option<Dropped<'_>>,
    dy: &[f32],
    grads: [Option<&mut [f32]>; 3],
) {
    for (grad, rows) in grads.iter().zip([z.queries, z.keys, z.keys]) {
        let fits = |grad: &&mut [f32]| grad.len() == z.elements(rows);
        assert!(grad.as_ref().is_none_or(fits), "the size of a gradient");
    }
    // Sums of keys and values continue from block to block.
    let [dq, dk, dv] = grads.map(|grad| {
        grad.map(|grad| {
            threads.split(grad, PIECE, |_, grad| grad.fill(0.0));
            Disjoint::new(grad)
        })
    });
    if z.keys == 0 || z.each == 0 {
        return;
    }
    let factor = z.factor();
    threads.run(z.heads(), |head| {
        for i in 0..z.blocks() {
            let block = z.block(head, i);
            let (few, many) = (block.rows * z.each, block.rows * block.reach);
            let drawn = if drop.is_some() { many } else { 0 };
            scratch(2 * (few + many) + drawn, |own| {
                let (scaled, own) = own.split_at_mut(few);
                let (query_grad, own) = own.split_at_mut(few);
                let (weights, own) = own.split_at_mut(many);
                let (grad, factors) = own.split_at_mut(many);
                z.weigh(block, (q, k), scaled, weights);
                if let Some(drop) = drop {
                    z.draw(block, drop, factors);
                }
                let above = z.of_queries(block, dy);
                let to = z.at(block, z.keys, 0);
                if let Some(dv) = &dv {
                    let used = if drop.is_some() {
                        grad.copy_from_slice(weights);
                        multiply(grad, factors);
                        &*grad
                    } else {
                        &*weights
                    };
                    let (to, used) = (dv.pointer(to), block.square(used).t());
                    // SAFETY: this head's columns of the values, which no other head touches.
                    unsafe { product_at(to, z.width(), used, above.into(), Begin::Continue, &[]) };
                }
                if dq.is_none() && dk.is_none() {
                    return;
                }
                let values = z.of_keys(block, v).t();
                product(grad, block.reach, above, values, Mode::Write);
                if drop.is_some() {
                    multiply(grad, factors);
                }
                rows_backward(weights, grad, block.reach, z.open(block), false);
                let grad = block.square(grad);
                let scaled = Mat::rows(scaled, block.rows, z.each, z.each);
                if let Some(dk) = &dk {
                    let (to, grad) = (dk.pointer(to), grad.t());
                    // SAFETY: as above, of the keys.
                    unsafe { product_at(to, z.width(), grad, scaled.into(), Begin::Continue, &[]) };
                }
                let Some(dq) = &dq else { return };
                product(query_grad, z.each, grad, z.of_keys(block, k), Mode::Write);
                for (i, from) in query_grad.chunks_exact(z.each).enumerate() {
                    let at = z.at(block, z.queries, block.first + i);
                    // SAFETY: this head's part of the query, which no other head touches.
                    let to = unsafe { dq.range(at..at + z.each) };
                    scaled_row(from, to, factor);
                }
            });
        }
    });
}
