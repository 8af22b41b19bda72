//! Dropout masks from a counter-based generator, recomputed instead of stored.
//!
//! Word `i % 4` of Philox block `i / 4` decides element `i` of a sample, under
//! key (seed, operation) and counter (epoch, step, sample, block). A sample's
//! mask therefore depends neither on its rank nor on its place in the batch.

use crate::par::{Disjoint, ThreadPool};

/// The key of one dropout operation's mask.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct MaskKey {
    /// The generator's key: seed and operation.
    pub key: [u32; 2],
    /// First word of the counter.
    pub epoch: u32,
    /// Second word of the counter.
    pub step: u32,
}

/// Probability of dropping, as the kernels need it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Rate {
    /// Kept iff the word is at most this.
    last_kept: u32,
    /// Factor of the elements that are kept: 1 / f32(1 - p), or 0 where none are.
    scale: f32,
}

impl Rate {
    /// `p` in [0, 1]. PyTorch's scale is one f32 division; at p = 1 nothing is kept.
    pub fn new(p: f64) -> Self {
        let keep = 1.0 - p;
        let words = (keep * 4_294_967_296.0) as u64;
        Rate {
            last_kept: words.saturating_sub(1) as u32,
            scale: if words == 0 { 0.0 } else { 1.0 / (keep as f32) },
        }
    }
}

/// How many elements share one draw.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Share {
    /// Every element has its own.
    Element,
    /// All pixels of a channel share one (the innermost dimension counts channels).
    Channel(usize),
}

/// Blocks computed side by side.
const LANES: usize = 16;
/// Elements decided by them.
const GROUP: usize = LANES * 4;

/// Ten Philox rounds on 16 consecutive blocks (counter word 3), in columns: the lower halves of the results.
#[inline(always)]
fn philox_lanes(key: MaskKey, sample: u32, first_block: u32) -> [[u64; LANES]; 4] {
    // The upper halves are left as they come: a product of lower halves is one instruction.
    let low = |v: u64| v & 0xFFFF_FFFF;
    let [epoch, step, sample] = [key.epoch, key.step, sample].map(u64::from);
    let (mut c0, mut c1, mut c2) = ([epoch; LANES], [step; LANES], [sample; LANES]);
    let mut c3 = [0; LANES];
    for (i, b) in c3.iter_mut().enumerate() {
        *b = u64::from(first_block.wrapping_add(i as u32));
    }
    let mut k = key.key;
    for _ in 0..10 {
        let [k0, k1] = k.map(u64::from);
        for i in 0..LANES {
            let a = 0xD251_1F53 * low(c0[i]);
            let b = 0xCD9E_8D57 * low(c2[i]);
            c0[i] = (b >> 32) ^ c1[i] ^ k0;
            c1[i] = b;
            c2[i] = (a >> 32) ^ c3[i] ^ k1;
            c3[i] = a;
        }
        k = [
            k[0].wrapping_add(0x9E37_79B9),
            k[1].wrapping_add(0xBB67_AE85),
        ];
    }
    [c0, c1, c2, c3]
}

simd! {
    /// The factors (0 or scale) of elements `first ..` of a sample; `first` is a
    /// multiple of 4.
    fn factors(out: &mut [f32], key: MaskKey, sample: u32, first: usize, rate: Rate) {
        for (g, group) in out.chunks_mut(GROUP).enumerate() {
            let words = philox_lanes(key, sample, ((first + g * GROUP) / 4) as u32);
            let mut kept = [[0.0f32; LANES]; 4];
            for (kept, words) in kept.iter_mut().zip(&words) {
                for (kept, word) in kept.iter_mut().zip(words) {
                    *kept = if *word as u32 <= rate.last_kept { rate.scale } else { 0.0 };
                }
            }
            let mut full = [0.0f32; GROUP];
            for i in 0..LANES {
                for w in 0..4 {
                    full[i * 4 + w] = kept[w][i];
                }
            }
            group.copy_from_slice(&full[..group.len()]);
        }
    }
}

simd! {
    pub(super) fn multiply(data: &mut [f32], factors: &[f32]) {
        for (v, &f) in data.iter_mut().zip(factors) {
            // A product, not a choice: a dropped infinity becomes NaN, as in PyTorch.
            *v *= f;
        }
    }
}

/// The factors of elements `first ..` of a sample.
pub(super) fn draw(out: &mut [f32], (key, rate): (MaskKey, Rate), sample: u32, first: usize) {
    // Whole blocks of the generator are drawn.
    let before = first % 4;
    let (head, rest) = out.split_at_mut(((4 - before) % 4).min(out.len()));
    if !head.is_empty() {
        let mut block = [0.0; 4];
        factors(&mut block, key, sample, first - before, rate);
        head.copy_from_slice(&block[before..before + head.len()]);
    }
    factors(rest, key, sample, first + head.len(), rate);
}

/// Elements of a piece: a multiple of [`GROUP`] whose factors stay in L1.
const PIECE: usize = GROUP * 64;

/// Where the elements of an array lie in the samples of a larger one: runs that follow one
/// another in both.
#[derive(Clone, Copy, Debug)]
pub struct Block {
    /// Elements of a run.
    run: usize,
    /// Place in the sample of the first run.
    first: usize,
    /// Number of runs along each of the outer dimensions, and their distance in the sample.
    outer: [(usize, usize); 6],
}

impl Block {
    /// Samples as a whole.
    pub fn whole(per: usize) -> Self {
        Block {
            run: per,
            first: 0,
            outer: [(1, 0); 6],
        }
    }

    /// The block of sizes `own` that begins at `start` of samples of shape `full` (6
    /// dimensions at most).
    pub fn new(full: &[usize], start: &[usize], own: &[usize]) -> Self {
        let mut block = Block::whole(1);
        let mut stride = 1;
        let mut outer = block.outer.iter_mut().rev();
        for ((&full, &start), &own) in full.iter().zip(start).zip(own).rev() {
            block.first += start * stride;
            if block.run == stride {
                block.run *= own; // everything inside is whole
            } else if let Some(outer) = outer.next() {
                *outer = (own, stride);
            }
            stride *= full;
        }
        block
    }

    /// Place in the sample of run `i`.
    fn place(&self, mut i: usize) -> usize {
        let mut place = self.first;
        for (count, stride) in self.outer.iter().rev() {
            place += i % count * stride;
            i /= count;
        }
        place
    }
}

/// Multiplies each sample of `data` by its mask, in place; forward and
/// backward are the same operation. `samples[i]` is the id of row i. `block` has the places of
/// a row's elements in the sample, or of its channels where these share a draw.
pub fn apply(
    threads: &ThreadPool,
    data: &mut [f32],
    samples: &[u64],
    (key, rate): (MaskKey, Rate),
    (share, block): (Share, &Block),
) {
    let per = data.len().checked_div(samples.len()).unwrap_or(0);
    if per == 0 {
        return;
    }
    let out = Disjoint::new(data);
    threads.run(samples.len(), |s| {
        // SAFETY: chunk s alone touches sample s.
        let row = unsafe { out.range(s * per..(s + 1) * per) };
        let sample = samples[s] as u32;
        match share {
            Share::Element => {
                let mut f = [0.0f32; PIECE];
                for (i, run) in row.chunks_mut(block.run).enumerate() {
                    let first = block.place(i);
                    for (i, piece) in run.chunks_mut(PIECE).enumerate() {
                        let f = &mut f[..piece.len()];
                        draw(f, (key, rate), sample, first + i * PIECE);
                        multiply(piece, f);
                    }
                }
            }
            Share::Channel(channels) => {
                crate::par::scratch(channels, |f| {
                    draw(f, (key, rate), sample, block.first);
                    for pixel in row.chunks_exact_mut(channels) {
                        multiply(pixel, f);
                    }
                });
            }
        }
    });
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::isa::on_each_isa;
    use crate::par::Threads;
    use crate::rng::philox::philox4x32_10;

    const KEY: MaskKey = MaskKey {
        key: [7, 9],
        epoch: 2,
        step: 3,
    };

    #[test]
    fn equals_the_scalar_generator_on_every_isa() {
        let per = PIECE + 77;
        on_each_isa(|isa| {
            let mut data = vec![1.0; 2 * per];
            apply(
                &ThreadPool::new(Threads(1)),
                &mut data,
                &[40, 41],
                (KEY, Rate::new(0.25)),
                (Share::Element, &Block::whole(per)),
            );
            for (i, v) in data.iter().enumerate() {
                let (s, e) = (i / per, i % per);
                let w = philox4x32_10([2, 3, 40 + s as u32, (e / 4) as u32], KEY.key)[e % 4];
                let want = if f64::from(w) < 0.75 * 4_294_967_296.0 {
                    1.0f32 / 0.75
                } else {
                    0.0
                };
                assert_eq!(*v, want, "{isa:?} {i}");
            }
        });
    }

    #[test]
    fn rates_at_their_ends_and_channels() {
        let threads = ThreadPool::new(Threads(2));
        let mut data = vec![2.0; 64];
        apply(
            &threads,
            &mut data,
            &[0],
            (KEY, Rate::new(0.0)),
            (Share::Element, &Block::whole(64)),
        );
        assert!(data.iter().all(|&v| v == 2.0));
        let mut some = vec![1.0; 3 * 10 * 8];
        apply(
            &threads,
            &mut some,
            &[0, 1, 2],
            (KEY, Rate::new(0.5)),
            (Share::Channel(8), &Block::whole(8)),
        );
        for sample in some.chunks(80) {
            assert!(sample.chunks(8).all(|p| p == &sample[..8]));
        }
        assert_ne!(some[..80], some[80..160]);
        // p = 1: PyTorch multiplies by zero.
        data[0] = f32::INFINITY;
        apply(
            &threads,
            &mut data,
            &[0],
            (KEY, Rate::new(1.0)),
            (Share::Element, &Block::whole(64)),
        );
        assert!(data[0].is_nan() && data[1..].iter().all(|&v| v == 0.0));
        let nothing = (Share::Element, &Block::whole(0));
        apply(&threads, &mut [], &[], (KEY, Rate::new(0.5)), nothing);
    }
}
