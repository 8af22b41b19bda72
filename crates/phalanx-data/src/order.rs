//! The order of shuffled samples that lie in shards.

use std::sync::Arc;

use phalanx_nn::rng::torch::Generator;

/// The order of shuffled samples of a data set that is read shard by shard: shards are shuffled, taken in groups with at
/// least as many samples as the shuffle buffer has, and the samples of a group are shuffled. It depends on the seed and the
/// sizes of the shards only. A reader needs the shards of one group at a time, and of two while one ends.
#[derive(Clone, Debug)]
pub struct ShardOrder {
    /// The number of samples up to the end of each shard.
    ends: Arc<[u64]>,
    buffer: usize,
}

impl ShardOrder {
    /// Of shards with these numbers of samples. `buffer` is the shuffle buffer, in samples.
    pub fn new(shards: impl IntoIterator<Item = u64>, buffer: usize) -> ShardOrder {
        let ends = shards.into_iter().scan(0_u64, |end, samples| {
            *end = end.saturating_add(samples);
            Some(*end)
        });
        ShardOrder {
            ends: ends.collect(),
            buffer: buffer.max(1),
        }
    }

    /// Number of samples.
    pub fn samples(&self) -> u64 {
        self.ends.last().copied().unwrap_or(0)
    }

    /// The shuffle buffer, in samples.
    pub fn buffer(&self) -> usize {
        self.buffer
    }

    /// Number of samples of each shard.
    pub fn shards(&self) -> impl Iterator<Item = u64> + '_ {
        (0..self.ends.len()).map(|shard| {
            let (start, end) = self.range(shard);
            end - start
        })
    }

    /// The shard of a sample, and the sample's number in it. Beyond [`samples`](Self::samples) there is no such shard.
    pub(crate) fn find(&self, sample: u64) -> (usize, u64) {
        let shard = self.ends.partition_point(|end| *end <= sample);
        let start = shard.checked_sub(1).map_or(0, |before| self.ends[before]);
        (shard, sample - start)
    }

    fn range(&self, shard: usize) -> (u64, u64) {
        let start = shard.checked_sub(1).map_or(0, |before| self.ends[before]);
        (start, self.ends[shard])
    }

    /// Of the first `samples` samples, drawn by `seed`. Computed group by group: 16 bytes per sample of a group are in memory.
    pub(crate) fn permutation(&self, seed: u64, samples: u64) -> impl Iterator<Item = u64> + use<> {
        let mut draws = Generator::new(seed);
        let order = self.clone();
        let mut shards = draws.randperm(order.ends.len()).into_iter();
        let groups = std::iter::from_fn(move || {
            let mut group: Vec<u64> = Vec::new();
            while group.len() < order.buffer
                && let Some(shard) = shards.next()
            {
                let (start, end) = order.range(shard as usize);
                group.extend(start..end.min(samples));
            }
            let drawn = draws.randperm(group.len()).into_iter();
            (!group.is_empty()).then(|| drawn.map(move |i| group[i as usize]))
        });
        groups.flatten()
    }
}
