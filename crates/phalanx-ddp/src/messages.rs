//! One message per bucket, in memory that is reused from step to step.

use std::fmt;

use phalanx_comm::{Bucket, Call, Element, ProcessGroup, ReduceOp, Work};

use crate::bucket::GradBucket;
use crate::error::{Error, Result};

/// Messages of a hook, by bucket number.
pub(crate) struct Messages<T: Element> {
    slots: Vec<Slot<T>>,
}

enum Slot<T: Element> {
    Empty,
    Idle(Bucket<T>),
    InFlight(Work<Bucket<T>>),
}

impl<T: Element> Default for Messages<T> {
    fn default() -> Messages<T> {
        Messages { slots: Vec::new() }
    }
}

impl<T: Element> fmt::Debug for Messages<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "messages of {} buckets", self.slots.len())
    }
}

impl<T: Element> Messages<T> {
    /// Memory for the next message of bucket `index`, of `elems` elements.
    /// Contains the data of the previous message.
    pub(crate) fn prepare(&mut self, group: &ProcessGroup, index: usize, elems: usize) -> &mut [T] {
        while self.slots.len() <= index {
            self.slots.push(Slot::Empty);
        }
        let slot = &mut self.slots[index];
        if !matches!(slot, Slot::Idle(memory) if memory.len() == elems) {
            *slot = Slot::Empty; // before as much again is asked for
            *slot = Slot::Idle(group.bucket(elems));
        }
        match slot {
            Slot::Idle(memory) => memory,
            _ => &mut [],
        }
    }

    /// Starts the all-reduce of the message prepared for `bucket`. Does not block.
    pub(crate) fn launch(&mut self, group: &ProcessGroup, bucket: &GradBucket<'_>, op: ReduceOp) {
        let Some(slot) = self.slots.get_mut(bucket.index) else {
            return;
        };
        *slot = match std::mem::replace(slot, Slot::Empty) {
            Slot::Idle(memory) => {
                let call = Call {
                    label: Some(bucket.label.clone()),
                    ..Call::default()
                };
                Slot::InFlight(group.all_reduce_async(memory, op, call))
            }
            other => other,
        };
    }

    /// Waits for the message of `bucket`, records when it ran, and returns it; empty if
    /// none was launched. `what` names its contents in errors.
    pub(crate) fn wait(&mut self, bucket: &mut GradBucket<'_>, what: &str) -> Result<&[T]> {
        let Some(slot) = self.slots.get_mut(bucket.index) else {
            return Ok(&[]);
        };
        if let Slot::InFlight(work) = std::mem::replace(slot, Slot::Empty) {
            let (memory, times) = work.wait_traced().map_err(|e| {
                Error::comm_while(
                    format!("{what} could not be averaged ({})", bucket.label),
                    e,
                )
            })?;
            bucket.ran = Some(times);
            *slot = Slot::Idle(memory);
        }
        Ok(match slot {
            Slot::Idle(memory) => memory,
            _ => &[],
        })
    }
}
