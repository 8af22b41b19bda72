//! Parts of a data set, and samples drawn from it, as `torch.utils.data` has them.

use std::sync::Arc;

use phalanx_base::{Result, refuse};
use phalanx_nn::rng::philox::philox4x32_10;
use phalanx_nn::rng::torch::Generator;
use sha2::{Digest, Sha256};

use crate::Dataset;

/// Some samples of a data set, in an order of their own. PyTorch: `Subset`.
///
/// ```
/// use phalanx_data::{Dataset, Subset, random_split};
/// use std::sync::Arc;
///
/// let all = Arc::new((0..100).collect::<Vec<i32>>());
/// let first = Subset::new(&all, 0..10)?;
/// let [train, test] = random_split(&all, [0.9, 0.1], 1)?;
/// assert_eq!((first.len(), train.len(), test.len()), (10, 90, 10));
/// # Ok::<(), phalanx_base::Error>(())
/// ```
#[derive(Debug)]
pub struct Subset<D: ?Sized> {
    of: Arc<D>,
    indices: Vec<u64>,
}

impl<D: Dataset + ?Sized> Subset<D> {
    /// The samples of `of` with these numbers.
    ///
    /// # Errors
    ///
    /// `Usage`, when there is no sample of a number.
    pub fn new(of: &Arc<D>, indices: impl IntoIterator<Item = u64>) -> Result<Subset<D>> {
        let indices: Vec<u64> = indices.into_iter().collect();
        match indices.iter().find(|index| **index >= of.len() as u64) {
            None => Ok(Subset {
                of: Arc::clone(of),
                indices,
            }),
            Some(index) => refuse!(
                "{} has {} samples, so there is no sample {index}",
                of.describe(),
                of.len()
            ),
        }
    }

    /// The numbers of the samples in the whole data set.
    pub fn indices(&self) -> &[u64] {
        &self.indices
    }
}

/// Divides `of` at random into parts with these shares of its samples, which add up to 1. With the same seed they are those of
/// PyTorch's `random_split` with fractions and a generator.
///
/// # Errors
///
/// `Usage`, when the shares do not add up to 1.
pub fn random_split<D: Dataset + ?Sized, const N: usize>(
    of: &Arc<D>,
    shares: [f64; N],
    seed: u64,
) -> Result<[Subset<D>; N]> {
    let (n, sum) = (of.len(), shares.iter().sum::<f64>());
    if shares.iter().any(|share| !(0.0..=1.0).contains(share)) || (sum - 1.0).abs() > 1e-6 {
        refuse!("random_split: the shares {shares:?} must be from 0 to 1 and add up to 1");
    }
    let mut sizes = shares.map(|share| (n as f64 * share) as usize);
    // What is left of rounding down.
    let left = n.saturating_sub(sizes.iter().sum());
    (0..left).for_each(|i| sizes[i % N] += 1);
    let mut order = Generator::new(seed).randperm(n).into_iter();
    Ok(sizes.map(|size| Subset {
        of: Arc::clone(of),
        indices: order.by_ref().take(size).collect(),
    }))
}

impl<D: Dataset + ?Sized> Dataset for Subset<D> {
    type Batch = D::Batch;

    fn len(&self) -> usize {
        self.indices.len()
    }

    fn read_batch(&self, epoch: u64, indices: &[u64], batch: &mut D::Batch) -> Result<()> {
        let of = |index: &u64| self.indices.get(usize::try_from(*index).ok()?).copied();
        match indices.iter().map(of).collect::<Option<Vec<u64>>>() {
            Some(indices) => self.of.read_batch(epoch, &indices, batch),
            None => refuse!(
                "a part of {} has {} samples; of {indices:?} one is missing",
                self.of.describe(),
                self.len()
            ),
        }
    }

    fn describe(&self) -> String {
        self.of.describe()
    }

    fn content(&self) -> String {
        let hash = self.indices.iter().fold(Sha256::new(), |hash, index| {
            hash.chain_update(index.to_le_bytes())
        });
        let hash = hex::encode(hash.finalize());
        format!("samples {hash:.16} of {}", self.of.content())
    }

    fn class_names(&self) -> Vec<String> {
        self.of.class_names()
    }
}

/// Samples drawn from a data set with replacement, each in proportion to its weight. PyTorch: `WeightedRandomSampler`. Which
/// sample a place of an epoch has depends on the seed, the epoch and the place only.
#[derive(Debug)]
pub struct Weighted<D: ?Sized> {
    of: Arc<D>,
    samples: usize,
    seed: u64,
    /// The sum of the weights up to and with each.
    sums: Vec<f64>,
}

impl<D: Dataset + ?Sized> Weighted<D> {
    /// `samples` an epoch, with a weight for each sample of `of`.
    ///
    /// # Errors
    ///
    /// `Usage`, when there are not as many weights as samples, one is negative or no number, or all are 0.
    pub fn new(of: &Arc<D>, weights: &[f64], samples: usize, seed: u64) -> Result<Weighted<D>> {
        let mut sum = 0.0;
        let sums = weights.iter().map(|weight| {
            sum += weight;
            sum
        });
        let sums: Vec<f64> = sums.collect();
        let are_weights = weights.iter().all(|weight| *weight >= 0.0) && sum.is_finite();
        if weights.len() != of.len() || !are_weights || (sum == 0.0 && samples > 0) {
            refuse!(
                "{} needs {} weights, none negative and not all 0; given are {}, their sum is {sum}",
                of.describe(),
                of.len(),
                weights.len()
            );
        }
        Ok(Weighted {
            of: Arc::clone(of),
            samples,
            seed,
            sums,
        })
    }

    fn draw(&self, epoch: u64, place: u64) -> u64 {
        let counter = [place, place >> 32, epoch, epoch >> 32].map(|n| n as u32);
        let words = philox4x32_10(counter, [self.seed as u32, (self.seed >> 32) as u32]);
        // 53 bits: from 0 to below 1.
        let bits = (u64::from(words[0]) << 32 | u64::from(words[1])) >> 11;
        let number = bits as f64 / (1u64 << 53) as f64;
        let total = self.sums.last().copied().unwrap_or_default();
        // Below the total whatever was rounded: a sample whose weight is 0 is never drawn.
        let number = (number * total).min(total.next_down());
        self.sums.partition_point(|sum| *sum <= number) as u64
    }
}

impl<D: Dataset + ?Sized> Dataset for Weighted<D> {
    type Batch = D::Batch;

    fn len(&self) -> usize {
        self.samples
    }

    fn read_batch(&self, epoch: u64, indices: &[u64], batch: &mut D::Batch) -> Result<()> {
        let drawn = indices.iter().map(|place| self.draw(epoch, *place));
        self.of
            .read_batch(epoch, &drawn.collect::<Vec<u64>>(), batch)
    }

    fn describe(&self) -> String {
        self.of.describe()
    }

    fn content(&self) -> String {
        let hash = self.sums.iter().fold(Sha256::new(), |hash, sum| {
            hash.chain_update(sum.to_le_bytes())
        });
        let hash = hex::encode(hash.finalize());
        let (samples, seed) = (self.samples, self.seed);
        format!(
            "{samples} drawn by weights {hash:.16} and seed {seed} of {}",
            self.of.content()
        )
    }

    fn class_names(&self) -> Vec<String> {
        self.of.class_names()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read<D: Dataset<Batch = Vec<u64>>>(set: &D, epoch: u64) -> Vec<u64> {
        let all: Vec<u64> = (0..set.len() as u64).collect();
        let mut batch = Vec::new();
        set.read_batch(epoch, &all, &mut batch).expect("a batch");
        batch
    }

    #[test]
    fn parts_are_those_of_pytorch() {
        let all = Arc::new((0..10u64).collect::<Vec<_>>());
        let first = Subset::new(&all, [7, 2, 2]).expect("samples");
        assert_eq!(read(&first, 0), [7, 2, 2]);
        assert!(Subset::new(&all, 5..11).is_err());
        let beyond = first.read_batch(0, &[3], &mut Vec::new());
        assert!(beyond.is_err());
        // random_split(range(10), [0.5, 0.25, 0.25], generator=torch.Generator().manual_seed(42)), PyTorch 2.15.
        let parts = random_split(&all, [0.5, 0.25, 0.25], 42).expect("parts");
        let [a, b, c] = parts.each_ref().map(|part| read(part, 0));
        assert_eq!(
            (&a[..], &b[..], &c[..]),
            (&SPLIT.0[..], &SPLIT.1[..], &SPLIT.2[..])
        );
        assert_ne!(parts[1].content(), parts[2].content());
        for shares in [[0.5, 0.6], [1.5, -0.5], [f64::NAN, 1.0]] {
            assert!(random_split(&all, shares, 0).is_err(), "{shares:?}");
        }
    }

    const SPLIT: ([u64; 6], [u64; 2], [u64; 2]) = ([2, 6, 1, 8, 4, 5], [0, 9], [3, 7]);

    #[test]
    fn samples_are_drawn_by_weight() {
        let all = Arc::new((0..5u64).collect::<Vec<_>>());
        let weights = [0.0, 1.0, 0.0, 3.0, 0.0];
        let drawn = Weighted::new(&all, &weights, 10_000, 7).expect("weights");
        let epoch = read(&drawn, 0);
        let ones = epoch.iter().filter(|sample| **sample == 1).count();
        assert!(epoch.iter().all(|sample| [1, 3].contains(sample)));
        assert!((2_350..2_650).contains(&ones), "{ones}");
        assert_ne!(read(&drawn, 1), epoch);
        // Any batch of any rank has the same samples.
        let mut part = Vec::new();
        drawn
            .read_batch(0, &[9_999, 3], &mut part)
            .expect("a batch");
        assert_eq!(part, [epoch[9_999], epoch[3]]);
        for weights in [
            &[1.0; 4][..],
            &[0.0; 5],
            &[1.0, -1.0, 1.0, 1.0, 1.0],
            &[f64::NAN; 5],
        ] {
            assert!(Weighted::new(&all, weights, 1, 0).is_err(), "{weights:?}");
        }
    }
}
