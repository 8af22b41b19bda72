//! Many small tensors in one operation.
//!
//! A small collective costs one or two synchronisations, whatever its size; a hundred
//! of them cost a hundred times that. Packed one behind the other they cost as much as
//! one, and two copies of a few kilobytes.

use super::{Call, ProcessGroup, lengths_hash};
use crate::operation::Operation;
use crate::plan::Method;
use crate::{Bucket, Element, ReduceOp, Result};

impl ProcessGroup {
    /// [`all_reduce`](ProcessGroup::all_reduce) of every tensor, as one
    /// operation. All ranks must give the same number of tensors with the same lengths
    /// in the same order; that is checked. PyTorch: `all_reduce_coalesced`.
    ///
    /// ```
    /// use phalanx_comm::{GroupOptions, ProcessGroup, ReduceOp};
    ///
    /// let group = ProcessGroup::threads(1, GroupOptions::default()).remove(0);
    /// let (mut weights, mut bias) = ([1.0f32; 6], [2.0f32; 3]);
    /// group
    ///     .all_reduce_coalesced(&mut [&mut weights, &mut bias], ReduceOp::Mean)
    ///     .unwrap();
    /// assert_eq!((weights, bias), ([1.0; 6], [2.0; 3]));
    /// ```
    ///
    /// *Order:* see [`ReduceOp`]; the same bits as one by one. (The ring's result
    /// depends on how data is split, so with it tensors are reduced one by one.)
    ///
    /// # Errors
    ///
    /// As [`ProcessGroup::all_reduce`]; `Desync` where ranks have tensors of
    /// other lengths or in another order of lengths.
    pub fn all_reduce_coalesced<T: Element>(
        &self,
        tensors: &mut [&mut [T]],
        op: ReduceOp,
    ) -> Result<()> {
        let call = Call::default();
        let total = total_len(tensors);
        let operation = self.build_all_reduce::<T>(total, op, &call)?;
        if !operation.method.canonical() {
            return tensors
                .iter_mut()
                .try_for_each(|tensor| self.all_reduce(tensor, op));
        }
        self.packed(operation, tensors)
    }

    /// [`broadcast`](ProcessGroup::broadcast) of every tensor, as one
    /// operation, as PyTorch's `DistributedDataParallel` broadcasts buffers
    /// (`_broadcast_coalesced`).
    ///
    /// # Errors
    ///
    /// As [`ProcessGroup::broadcast`]; `Desync` where ranks have tensors of
    /// other lengths or in another order of lengths.
    pub fn broadcast_coalesced<T: Element>(
        &self,
        tensors: &mut [&mut [T]],
        root: usize,
    ) -> Result<()> {
        let call = Call::default();
        let operation = self.build_broadcast::<T>(total_len(tensors), root, &call)?;
        self.packed(operation, tensors)
    }

    /// [`all_gather`](ProcessGroup::all_gather) of every input into the output
    /// at the same index, as one operation. PyTorch: `all_gather_coalesced`.
    ///
    /// # Errors
    ///
    /// As [`ProcessGroup::all_gather`]; `Usage` where the numbers of outputs and inputs
    /// differ; `Desync` where ranks have tensors of other lengths or in another order
    /// of lengths.
    pub fn all_gather_coalesced<T: Element>(
        &self,
        inputs: &[&[T]],
        outputs: &mut [&mut [T]],
    ) -> Result<()> {
        const NAME: &str = "all_gather_coalesced";
        if inputs.len() != outputs.len() {
            return Err(self.usage(
                NAME,
                format!(
                    "{} inputs and {} outputs are given",
                    inputs.len(),
                    outputs.len()
                ),
            ));
        }
        let world = self.core.world;
        for (input, output) in inputs.iter().zip(outputs.iter()) {
            self.check_len(NAME, "output", output.len(), input.len() * world)?;
        }
        let lens = || inputs.iter().map(|input| input.len());
        let total: usize = lens().sum();
        let operation = Operation {
            lengths: lengths_hash(lens()),
            ..self.build::<T>(Method::AllGather, total, &Call::default())
        };
        let mut packed = Bucket::<T>::zeroed(total);
        let mut rest = &mut packed[..];
        for input in inputs {
            let (place, after) = rest.split_at_mut(input.len());
            place.copy_from_slice(input);
            rest = after;
        }
        let mut all = Bucket::<T>::zeroed(total * world);
        self.run_blocking(&operation, &packed, &mut all)?;
        let mut start = 0;
        for (input, output) in inputs.iter().zip(outputs.iter_mut()) {
            let len = input.len();
            for rank in 0..world {
                let from = rank * total + start;
                output[rank * len..(rank + 1) * len].copy_from_slice(&all[from..from + len]);
            }
            start += len;
        }
        Ok(())
    }

    /// Runs an in-place operation over all tensors, one behind the other.
    fn packed<T: Element>(&self, operation: Operation, tensors: &mut [&mut [T]]) -> Result<()> {
        let operation = Operation {
            lengths: lengths_hash(tensors.iter().map(|tensor| tensor.len())),
            ..operation
        };
        let mut packed = Bucket::<T>::zeroed(operation.count);
        let mut rest = &mut packed[..];
        for tensor in tensors.iter() {
            let (place, after) = rest.split_at_mut(tensor.len());
            place.copy_from_slice(tensor);
            rest = after;
        }
        self.run_blocking(&operation, &[], &mut packed)?;
        let mut rest = &packed[..];
        for tensor in tensors.iter_mut() {
            let (place, after) = rest.split_at(tensor.len());
            tensor.copy_from_slice(place);
            rest = after;
        }
        Ok(())
    }
}

fn total_len<T>(tensors: &[&mut [T]]) -> usize {
    tensors.iter().map(|tensor| tensor.len()).sum()
}
