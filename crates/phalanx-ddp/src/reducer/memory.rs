//! Memory of one bucket.

use phalanx_comm::{Bucket, Call, OpTimes, ProcessGroup, ReduceOp, Work};

/// Memory of one bucket; the module doc of the reducer has the states.
pub(super) enum Memory {
    Filling(Bucket<f32>),
    InFlight(Work<Bucket<f32>>),
    /// With the chunk that this rank gets.
    Scattering(Work<(Bucket<f32>, Bucket<f32>)>),
    Reduced(Bucket<f32>),
    /// The all-reduce failed and took the memory with it.
    Lost,
}

impl Memory {
    /// Lets backward write.
    pub(super) fn begin(&mut self) {
        if let Memory::Reduced(bucket) = std::mem::replace(self, Memory::Lost) {
            *self = Memory::Filling(bucket);
        }
    }

    /// Treats what backward wrote as the mean.
    pub(super) fn left_alone(self) -> Memory {
        match self {
            Memory::Filling(bucket) => Memory::Reduced(bucket),
            other => other,
        }
    }

    /// Starts the mean over the ranks of what backward wrote.
    pub(super) fn all_reduced(self, group: &ProcessGroup, call: Call) -> Memory {
        match self {
            Memory::Filling(bucket) => {
                Memory::InFlight(group.all_reduce_async(bucket, ReduceOp::Mean, call))
            }
            other => other,
        }
    }

    /// Waits for the collective; returns when it ran.
    pub(super) fn collected(self) -> phalanx_comm::Result<(Memory, Option<OpTimes>)> {
        match self {
            Memory::InFlight(work) => {
                let (bucket, times) = work.wait_traced()?;
                Ok((Memory::Reduced(bucket), Some(times)))
            }
            other => Ok((other, None)),
        }
    }
}
