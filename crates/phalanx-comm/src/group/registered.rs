//! Blocking collectives on buckets.
//!
//! The same operations as on slices, but the other ranks may read and write registered
//! memory in place: references to a slice may exist meanwhile, but a bucket is moved
//! into the operation.
//!
//! After an error the bucket is replaced by a new one of zeros on the heap: a rank that
//! has not noticed the failure yet may still access the old memory, which is not used
//! again while the group lives.

use super::collectives::{both, in_place};
use super::{Call, ProcessGroup};
use crate::operation::Buffers;
use crate::operation::Operation;
use crate::{Bucket, Element, ErrorKind, ReduceOp, Result};

impl ProcessGroup {
    /// [`ProcessGroup::all_reduce`] on a bucket, without a copy when it
    /// is registered on all ranks.
    ///
    /// *Cost:* 2 synchronisations; each rank reads `1/P` of all ranks' data
    /// and writes it to all.
    ///
    /// # Errors
    ///
    /// As [`ProcessGroup::all_reduce`].
    pub fn all_reduce_bucket<T: Element>(
        &self,
        data: &mut Bucket<T>,
        op: ReduceOp,
        call: &Call,
    ) -> Result<()> {
        let operation = self.build_all_reduce::<T>(data.len(), op, call)?;
        self.run_on_bucket(&operation, data)
    }

    /// [`ProcessGroup::broadcast`] on a bucket, without staging when the
    /// root's is registered.
    ///
    /// # Errors
    ///
    /// As [`ProcessGroup::broadcast`].
    pub fn broadcast_bucket<T: Element>(&self, data: &mut Bucket<T>, root: usize) -> Result<()> {
        let operation = self.build_broadcast::<T>(data.len(), root, &Call::default())?;
        self.run_on_bucket(&operation, data)
    }

    /// [`ProcessGroup::reduce`] on a bucket, without a copy when it is
    /// registered on all ranks.
    ///
    /// # Errors
    ///
    /// As [`ProcessGroup::reduce`].
    pub fn reduce_bucket<T: Element>(
        &self,
        data: &mut Bucket<T>,
        op: ReduceOp,
        root: usize,
    ) -> Result<()> {
        let operation = self.build_reduce::<T>(data.len(), op, root, &Call::default())?;
        self.run_on_bucket(&operation, data)
    }

    /// [`ProcessGroup::all_gather`] on buckets, without staging when the input
    /// is registered.
    ///
    /// # Errors
    ///
    /// As [`ProcessGroup::all_gather`].
    pub fn all_gather_bucket<T: Element>(
        &self,
        input: &mut Bucket<T>,
        output: &mut Bucket<T>,
    ) -> Result<()> {
        let operation = self.build_all_gather::<T>(input.len(), output.len(), &Call::default())?;
        self.run_on_buckets(&operation, input, output)
    }

    /// [`ProcessGroup::reduce_scatter`] on buckets, without a copy when the
    /// input is registered on all ranks.
    ///
    /// # Errors
    ///
    /// As [`ProcessGroup::reduce_scatter`].
    pub fn reduce_scatter_bucket<T: Element>(
        &self,
        input: &mut Bucket<T>,
        output: &mut Bucket<T>,
        op: ReduceOp,
    ) -> Result<()> {
        let operation =
            self.build_reduce_scatter::<T>(input.len(), output.len(), op, &Call::default())?;
        self.run_on_buckets(&operation, input, output)
    }

    /// [`ProcessGroup::all_to_all`] on buckets, without staging when the input
    /// is registered.
    ///
    /// # Errors
    ///
    /// As [`ProcessGroup::all_to_all`].
    pub fn all_to_all_bucket<T: Element>(
        &self,
        input: &mut Bucket<T>,
        output: &mut Bucket<T>,
    ) -> Result<()> {
        let operation = self.build_all_to_all::<T>(input.len(), output.len(), &Call::default())?;
        self.run_on_buckets(&operation, input, output)
    }

    fn run_on_bucket<T: Element>(&self, operation: &Operation, data: &mut Bucket<T>) -> Result<()> {
        // Taken, so that no other code can access it meanwhile, even after a panic.
        let mut held = std::mem::take(data);
        let len = held.len();
        let result = self.run_owned(operation, in_place(&mut held));
        *data = after(&result, held, len);
        result
    }

    fn run_on_buckets<T: Element>(
        &self,
        operation: &Operation,
        input: &mut Bucket<T>,
        output: &mut Bucket<T>,
    ) -> Result<()> {
        let mut held = (std::mem::take(input), std::mem::take(output));
        let (input_len, output_len) = (held.0.len(), held.1.len());
        let result = self.run_owned(operation, both(&mut held));
        *input = after(&result, held.0, input_len);
        *output = after(&result, held.1, output_len);
        result
    }

    /// Runs an operation in this thread on buckets that the caller has taken.
    fn run_owned(&self, operation: &Operation, buffers: Buffers) -> Result<()> {
        self.core.queue.run(|runner| {
            // SAFETY: the memory belongs to buckets that the caller holds and does not
            // access until this returns; lengths were checked against the plan's. After
            // an error `after` drops them.
            unsafe { runner.run(operation, buffers, None) }
        })
    }
}

/// The bucket of `len` elements to return after an operation.
pub(super) fn after<T: Element>(result: &Result<()>, bucket: Bucket<T>, len: usize) -> Bucket<T> {
    match result {
        // Refused before it began: no rank has accessed it.
        Err(error) if error.kind() != ErrorKind::Usage => Bucket::zeroed(len),
        _ => bucket,
    }
}
