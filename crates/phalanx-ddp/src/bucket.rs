//! The assignment of gradients to buckets. Pure arithmetic, except [`all_share_memory`].

use std::ops::Range;
use std::sync::Arc;

use phalanx_comm::{OpTimes, ProcessGroup, ReduceOp, TransportKind};

use crate::error::{Error, Result};

/// Bytes of a line: every gradient starts on its own line, so neither
/// SIMD nor the chunk owners of an all-reduce ever share one.
const LINE_BYTES: usize = 64;
/// Elements of a line.
const LINE_ELEMS: usize = LINE_BYTES / size_of::<f32>();

/// Size limits of buckets, in bytes of gradient (padding not counted).
///
/// A bucket is closed as soon as it has *reached* its cap, so it may exceed the
/// cap by one tensor (PyTorch's rule). The first bucket is small so that
/// communication starts early, the last so that little of it remains once
/// backward has ended (docs/design/collectives.md §7).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BucketCaps {
    /// Cap of the bucket that fills first.
    pub first_bytes: usize,
    /// Cap of the others.
    pub cap_bytes: usize,
    /// The last bucket is split so that the part reduced last is at most this large, if
    /// tensor borders allow it. `None` does not split it.
    pub last_bytes: Option<usize>,
}

/// `buckets of 1048576, then 4194304 bytes, the last of at most 1048576`, for messages.
impl std::fmt::Display for BucketCaps {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let (first, cap) = (self.first_bytes, self.cap_bytes);
        write!(f, "buckets of {first}, then {cap} bytes")?;
        match self.last_bytes {
            Some(last) => write!(f, ", the last of at most {last}"),
            None => Ok(()),
        }
    }
}

impl BucketCaps {
    /// Defaults for ranks on one host: 1 MiB, 4 MiB, last 1 MiB.
    pub const ONE_HOST: BucketCaps = BucketCaps {
        first_bytes: 1 << 20,
        cap_bytes: 4 << 20,
        last_bytes: Some(1 << 20),
    };
    /// Defaults across hosts: 1 MiB, 8 MiB, last 1 MiB.
    pub const ACROSS_HOSTS: BucketCaps = BucketCaps {
        first_bytes: 1 << 20,
        cap_bytes: 8 << 20,
        last_bytes: Some(1 << 20),
    };
    /// PyTorch's defaults: 1 MiB, 25 MiB.
    pub const PYTORCH: BucketCaps = BucketCaps {
        first_bytes: 1 << 20,
        cap_bytes: 25 << 20,
        last_bytes: None,
    };

    /// [`ONE_HOST`](Self::ONE_HOST) where all ranks reach each other through memory, else
    /// [`ACROSS_HOSTS`](Self::ACROSS_HOSTS): communication across hosts has a higher fixed cost.
    ///
    /// *Blocks* until all ranks of the group call it.
    pub(crate) fn of_group(group: &ProcessGroup) -> Result<BucketCaps> {
        Ok(match all_share_memory(group)? {
            true => BucketCaps::ONE_HOST,
            false => BucketCaps::ACROSS_HOSTS,
        })
    }

    /// One cap for every bucket, as `bucket_cap_mb` given explicitly in PyTorch.
    pub fn uniform(cap_bytes: usize) -> BucketCaps {
        BucketCaps {
            first_bytes: cap_bytes,
            cap_bytes,
            last_bytes: None,
        }
    }
}

/// The assignment of parameters to buckets and of gradients to places in them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BucketPlan {
    buckets: Vec<Vec<usize>>,
    /// Per parameter: bucket and element range in it.
    places: Vec<(usize, Range<usize>)>,
    /// Elements per bucket, padding included.
    bucket_elems: Vec<usize>,
}

impl BucketPlan {
    /// Fills buckets with the parameters in `order` (indices into `lens`, each
    /// exactly once); `lens` are element counts of gradients.
    ///
    /// Before the true order is known, `order` is the reverse of registration.
    pub fn new(lens: &[usize], order: &[usize], caps: BucketCaps) -> BucketPlan {
        let bytes = |p: usize| lens[p] * size_of::<f32>();
        let mut buckets: Vec<Vec<usize>> = Vec::new();
        let (mut open, mut open_bytes) = (Vec::new(), 0);
        for &param in order {
            open.push(param);
            open_bytes += bytes(param);
            let cap = if buckets.is_empty() {
                caps.first_bytes
            } else {
                caps.cap_bytes
            };
            if open_bytes >= cap {
                buckets.push(std::mem::take(&mut open));
                open_bytes = 0;
            }
        }
        if !open.is_empty() {
            buckets.push(open);
        }
        if let (Some(last_bytes), Some(last)) = (caps.last_bytes, buckets.last_mut()) {
            let tail = tail_within(last, last_bytes, bytes);
            if tail > 0 && tail < last.len() {
                let tail = last.split_off(last.len() - tail);
                buckets.push(tail);
            }
        }
        Self::lay_out(lens, buckets)
    }

    /// The same buckets with the parameters of each in the order of their numbers, as in a model: a rank's part
    /// of a bucket is then one run of the model's memory, except for parameters that are in no bucket.
    pub(crate) fn into_model_order(self) -> BucketPlan {
        let lens: Vec<usize> = self.places.iter().map(|(_, range)| range.len()).collect();
        let mut buckets = self.buckets;
        buckets.iter_mut().for_each(|params| params.sort_unstable());
        Self::lay_out(&lens, buckets)
    }

    fn lay_out(lens: &[usize], buckets: Vec<Vec<usize>>) -> BucketPlan {
        let mut places = vec![(0, 0..0); lens.len()];
        let mut bucket_elems = Vec::with_capacity(buckets.len());
        for (b, params) in buckets.iter().enumerate() {
            let mut at = 0;
            for &p in params {
                places[p] = (b, at..at + lens[p]);
                at = (at + lens[p]).next_multiple_of(LINE_ELEMS);
            }
            bucket_elems.push(at);
        }
        BucketPlan {
            buckets,
            places,
            bucket_elems,
        }
    }

    /// Parameters of each bucket, in their order in the bucket.
    pub fn buckets(&self) -> &[Vec<usize>] {
        &self.buckets
    }

    /// Bucket of a parameter and the element range of its gradient in it.
    pub fn place(&self, param: usize) -> (usize, Range<usize>) {
        let (bucket, range) = &self.places[param];
        (*bucket, range.clone())
    }

    /// Elements of bucket `bucket`, padding to 64-byte lines included.
    pub fn bucket_elems(&self, bucket: usize) -> usize {
        self.bucket_elems[bucket]
    }

    /// Elements of bucket `bucket` that each of `world` ranks gets when it is
    /// scattered: whole lines, of which the last rank's may be padding.
    pub fn chunk_elems(&self, bucket: usize, world: usize) -> usize {
        self.bucket_elems[bucket]
            .div_ceil(LINE_ELEMS * world.max(1))
            .saturating_mul(LINE_ELEMS)
    }

    /// The gradients that `rank` of `world` gets when buckets are scattered: parameters
    /// and runs of their elements, bucket by bucket.
    pub fn scattered(&self, world: usize, rank: usize) -> Vec<(usize, Range<usize>)> {
        let mut pieces = Vec::new();
        for bucket in 0..self.buckets.len() {
            let chunk = self.chunk_elems(bucket, world);
            pieces.extend(self.within(bucket, rank * chunk..(rank + 1) * chunk));
        }
        pieces
    }

    /// The gradients in the elements `run` of a bucket.
    pub(crate) fn within(
        &self,
        bucket: usize,
        run: Range<usize>,
    ) -> impl Iterator<Item = (usize, Range<usize>)> {
        self.buckets[bucket].iter().filter_map(move |&param| {
            let place = &self.places[param].1;
            let (from, to) = (place.start.max(run.start), place.end.min(run.end));
            (from < to).then(|| (param, from - place.start..to - place.start))
        })
    }

    /// Bytes of gradient in bucket `bucket`, padding not counted.
    pub fn bucket_bytes(&self, bucket: usize) -> usize {
        self.buckets[bucket]
            .iter()
            .map(|&p| self.places[p].1.len() * size_of::<f32>())
            .sum()
    }
}

/// How many parameters at the end of `bucket` fit into `limit_bytes` together.
fn tail_within(bucket: &[usize], limit_bytes: usize, bytes: impl Fn(usize) -> usize) -> usize {
    let mut sum = 0;
    bucket
        .iter()
        .rev()
        .take_while(|&&p| {
            sum += bytes(p);
            sum <= limit_bytes
        })
        .count()
}

/// Whether all ranks of `group` reach each other through memory. A rank sees only its own links; the ranks
/// agree by maximum, since all must decide alike.
///
/// *Blocks* until all ranks of the group call it.
///
/// # Errors
///
/// `Comm` when a peer is lost or late.
pub fn all_share_memory(group: &ProcessGroup) -> Result<bool> {
    let remote = group
        .transports()
        .iter()
        .any(|(_, kind)| *kind == TransportKind::Tcp);
    let mut any_remote = [u8::from(remote)];
    group
        .all_reduce(&mut any_remote, ReduceOp::Max)
        .map_err(|e| {
            Error::comm_while("the ranks could not agree on how to exchange gradients", e)
        })?;
    Ok(any_remote[0] == 0)
}

/// One gradient in a bucket.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct GradTensor<'a> {
    /// Number of the parameter among those reduced; it does not change when buckets are rebuilt.
    pub param: usize,
    /// Name of the parameter.
    pub name: &'a str,
    /// The place of its gradient in the bucket.
    pub range: Range<usize>,
    /// Length of a row of the tensor as a matrix in memory; 1 if it is not a matrix.
    pub columns: usize,
}

/// One bucket of gradients in a step, as a hook sees it.
#[derive(Debug)]
#[non_exhaustive]
pub struct GradBucket<'a> {
    /// Its number, in the order of launching.
    pub index: usize,
    /// This rank's own gradients; after [`GradientHook::average`](crate::GradientHook::average) the gradients for the
    /// optimizer. Gaps between tensors are zeros or other finite values.
    pub gradients: &'a mut [f32],
    /// The gradients in the bucket.
    pub tensors: &'a [GradTensor<'a>],
    /// Its name in error messages.
    pub label: &'a Arc<str>,
    /// The factor by which the reducer will multiply the mean, the same on all ranks (1
    /// except for accumulation and uneven data).
    pub scale: f32,
    /// When its communication ran, for traces; the hook may set it.
    pub ran: Option<OpTimes>,
}

#[cfg(test)]
mod tests {
    use super::*;

    fn reversed(n: usize) -> Vec<usize> {
        (0..n).rev().collect()
    }

    /// Sizes of PyTorch's basic MNIST CNN.
    const MNIST: [usize; 8] = [288, 32, 18_432, 64, 1_179_648, 128, 1_280, 10];

    #[test]
    fn mnist_cnn_has_pytorchs_two_buckets() {
        // ../shared/parity/buckets.json, "mnist cnn", defaults, later iterations.
        let plan = BucketPlan::new(&MNIST, &reversed(8), BucketCaps::PYTORCH);
        assert_eq!(plan.buckets(), [vec![7, 6, 5, 4], vec![3, 2, 1, 0]]);
        assert_eq!(plan.bucket_bytes(0), 4_724_264);
        assert_eq!(plan.bucket_bytes(1), 75_264);
        let one = BucketPlan::new(&MNIST, &reversed(8), BucketCaps::uniform(25 << 20));
        assert_eq!(one.buckets().len(), 1);
    }

    #[test]
    fn assignment_is_pytorchs() {
        // ../shared/parity/buckets.json, "assignment": float counts and caps.
        let counts = [300_000, 10, 200_000, 10, 10, 7_000_000, 10, 10];
        let order: Vec<usize> = (0..8).collect();
        let plan = |caps| BucketPlan::new(&counts, &order, caps).buckets().to_vec();
        let small = vec![vec![0], vec![1, 2, 3, 4, 5], vec![6, 7]];
        assert_eq!(plan(BucketCaps::PYTORCH), small);
        assert_eq!(
            plan(BucketCaps::uniform(25 << 20)),
            [vec![0, 1, 2, 3, 4, 5], vec![6, 7]]
        );
        assert_eq!(plan(BucketCaps::uniform(1 << 20)), small);
    }

    #[test]
    fn last_bucket_is_cut_to_its_cap() {
        let caps = BucketCaps {
            first_bytes: 4,
            cap_bytes: 1 << 30,
            last_bytes: Some(400),
        };
        let plan = BucketPlan::new(&[50, 50, 500, 1], &reversed(4), caps);
        assert_eq!(plan.buckets(), [vec![3], vec![2], vec![1, 0]]);
        // A last tensor above the cap cannot be split.
        let plan = BucketPlan::new(&[500, 50, 1], &reversed(3), caps);
        assert_eq!(plan.buckets(), [vec![2], vec![1, 0]]);
    }

    #[test]
    fn scattered_pieces_are_each_element_once_and_evenly_cut() {
        for cap in [1, 5_000, 1 << 20, usize::MAX] {
            let plan = BucketPlan::new(&MNIST, &reversed(8), BucketCaps::uniform(cap));
            for world in 1..=8 {
                let mut seen: Vec<Vec<u8>> = MNIST.iter().map(|n| vec![0; *n]).collect();
                for rank in 0..world {
                    let pieces = plan.scattered(world, rank);
                    for (param, elems) in &pieces {
                        assert_eq!(elems.start % LINE_ELEMS, 0);
                        seen[*param][elems.clone()].iter_mut().for_each(|s| *s += 1);
                    }
                    let own: usize = pieces.iter().map(|p| p.1.len()).sum();
                    let all: usize = MNIST.iter().sum();
                    let most = all.div_ceil(world) + 2 * LINE_ELEMS * 8;
                    assert!(own <= most, "{own} of {all} on {world}");
                }
                assert!(seen.iter().flatten().all(|s| *s == 1), "{cap} on {world}");
            }
        }
    }

    #[test]
    fn every_gradient_has_its_own_lines() {
        for cap in [1, 100, 5_000, 1 << 20, usize::MAX] {
            let plan = BucketPlan::new(&MNIST, &reversed(8), BucketCaps::uniform(cap));
            let mut seen = vec![0; 8];
            for (b, params) in plan.buckets().iter().enumerate() {
                let mut end = 0;
                for &p in params {
                    seen[p] += 1;
                    let (bucket, range) = plan.place(p);
                    assert_eq!(bucket, b);
                    assert_eq!(range.len(), MNIST[p]);
                    assert_eq!(range.start % LINE_ELEMS, 0);
                    assert!(range.start >= end);
                    end = range.end;
                }
                assert!(plan.bucket_elems(b) >= end);
            }
            assert_eq!(seen, [1; 8]);
        }
    }
}
