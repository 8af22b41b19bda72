//! Data sets one after the other.

use std::fmt;
use std::sync::Arc;

use phalanx_base::{Result, refuse};

use crate::dataset::Dataset;
use crate::order::ShardOrder;

/// Several data sets as one, as PyTorch's `ConcatDataset`: the samples of the first, then those of the second, and so on. Where
/// one of them is read shard by shard, shuffled samples are drawn from the shards of all.
pub struct Concat<T> {
    sets: Vec<Arc<dyn Dataset<Batch = Vec<T>>>>,
    /// The number of samples up to the end of each.
    ends: ShardOrder,
}

impl<T: Send + 'static> Concat<T> {
    /// The samples of `sets`.
    pub fn new(sets: Vec<Arc<dyn Dataset<Batch = Vec<T>>>>) -> Concat<T> {
        let ends = ShardOrder::new(sets.iter().map(|set| set.len() as u64), 1);
        Concat { sets, ends }
    }

    fn all(&self, of: impl Fn(&dyn Dataset<Batch = Vec<T>>) -> String) -> String {
        let texts = self.sets.iter().map(|set| of(&**set));
        texts.collect::<Vec<_>>().join(" + ")
    }

    /// The places in `indices` of samples of set `wanted`, and their numbers there.
    fn of_set(&self, wanted: usize, indices: &[u64]) -> (Vec<usize>, Vec<u64>) {
        let found = indices.iter().enumerate();
        let found = found.map(|(place, index)| (place, self.ends.find(*index)));
        let own = found.filter(|(_, (set, _))| *set == wanted);
        own.map(|(place, (_, number))| (place, number)).unzip()
    }
}

impl<T> fmt::Debug for Concat<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} data sets", self.sets.len())
    }
}

impl<T: Send + 'static> Dataset for Concat<T> {
    type Batch = Vec<T>;

    fn len(&self) -> usize {
        usize::try_from(self.ends.samples()).unwrap_or(usize::MAX)
    }

    fn read_batch(&self, epoch: u64, indices: &[u64], batch: &mut Vec<T>) -> Result<()> {
        if let Some(index) = indices.iter().find(|i| **i >= self.ends.samples()) {
            refuse!("there is no sample {index}");
        }
        let mut slots: Vec<Option<T>> = indices.iter().map(|_| None).collect();
        for (set, data) in self.sets.iter().enumerate() {
            let (places, numbers) = self.of_set(set, indices);
            if !numbers.is_empty() {
                data.read_batch(epoch, &numbers, batch)?;
                if batch.len() != numbers.len() {
                    let (name, has, wanted) = (data.describe(), batch.len(), numbers.len());
                    refuse!("{name} gave {has} samples of {wanted}");
                }
                for (place, sample) in places.into_iter().zip(batch.drain(..)) {
                    slots[place] = Some(sample);
                }
            }
        }
        batch.clear();
        batch.extend(slots.into_iter().flatten());
        Ok(())
    }

    fn describe(&self) -> String {
        self.all(|set| set.describe())
    }

    fn content(&self) -> String {
        self.all(|set| set.content())
    }

    /// Sets that are read in any order are cut into shards of the others' mean size.
    fn order(&self) -> Option<ShardOrder> {
        let orders: Vec<_> = self.sets.iter().map(|set| set.order()).collect();
        let known = || orders.iter().flatten();
        let buffer = known().map(ShardOrder::buffer).max()?;
        let sizes: Vec<u64> = known().flat_map(ShardOrder::shards).collect();
        let mean = (sizes.iter().sum::<u64>() / sizes.len().max(1) as u64).max(1);
        let sets = orders.iter().zip(&self.sets);
        let shards = sets.flat_map(|(order, set)| match order {
            Some(order) => order.shards().collect::<Vec<_>>(),
            None => {
                let len = set.len() as u64;
                let starts = (0..len).step_by(mean as usize);
                starts.map(|at| mean.min(len - at)).collect()
            }
        });
        Some(ShardOrder::new(shards, buffer))
    }
}
