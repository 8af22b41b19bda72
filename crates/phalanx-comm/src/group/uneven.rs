//! Collectives whose lengths differ by rank.
//!
//! All ranks must agree on the lengths: every frame has a short hash of them, so a
//! difference is detected at once.

use std::sync::Arc;

use super::buffer::both;
use super::collectives::run_on;
use super::{Call, ProcessGroup, Work, lengths_hash};
use crate::backend::Runner;
use crate::operation::Operation;
use crate::plan::{Method, Uneven};
use crate::{Bucket, Element, Error, ErrorKind, ReduceOp, Result};

impl ProcessGroup {
    /// [`all_gather`](ProcessGroup::all_gather) of inputs that differ in
    /// length: rank `r` gives `lengths[r]` elements, and `output` gets all of them, one
    /// behind the other, on every rank. `lengths` must be the same everywhere.
    ///
    /// PyTorch: `all_gather` with tensors of different sizes in the list.
    ///
    /// *Cost:* 1 round, `(P − 1)` times its own input sent per rank.
    ///
    /// # Errors
    ///
    /// As for all operations, see [`ProcessGroup`]. `Usage` for lengths that
    /// do not fit the slices; `Desync` where ranks have different lengths.
    pub fn all_gather_v<T: Element>(
        &self,
        input: &[T],
        lengths: &[usize],
        output: &mut [T],
    ) -> Result<()> {
        let sizes = (input.len(), output.len());
        let operation = self.build_all_gather_v::<T>(sizes, lengths, &Call::default())?;
        self.run_blocking(&operation, input, output)
    }

    /// [`ProcessGroup::all_gather_v`] in the background.
    pub fn all_gather_v_async<T: Element>(
        &self,
        input: Bucket<T>,
        lengths: &[usize],
        output: Bucket<T>,
        call: Call,
    ) -> Work<(Bucket<T>, Bucket<T>)> {
        let operation = self.build_all_gather_v::<T>((input.len(), output.len()), lengths, &call);
        self.spawn(operation, (input, output), both)
    }

    fn build_all_gather_v<T: Element>(
        &self,
        (input, output): (usize, usize),
        lengths: &[usize],
        call: &Call,
    ) -> Result<Operation> {
        const NAME: &str = "all_gather_v";
        let total = self.check_lengths(NAME, lengths)?;
        self.check_exact(NAME, "input", input, lengths[self.core.rank])?;
        self.check_exact(NAME, "output", output, total)?;
        let kind = Uneven::AllGather { lengths };
        Ok(self.build_uneven::<T>(Method::AllGather, lengths, total, kind, call))
    }

    /// [`reduce_scatter`](ProcessGroup::reduce_scatter) into parts that differ
    /// in length: rank `r` gets `lengths[r]` elements of the reduction. The parts are
    /// one behind the other in `input`. `lengths` must be the same everywhere.
    ///
    /// PyTorch: `reduce_scatter` with tensors of different sizes in the list.
    ///
    /// *Order:* canonical, see [`ReduceOp`].
    /// *Cost:* 1 round, all but its own part sent per rank.
    ///
    /// # Errors
    ///
    /// As [`ProcessGroup::all_gather_v`], and `Usage` for a reduction that the type
    /// does not support.
    pub fn reduce_scatter_v<T: Element>(
        &self,
        input: &[T],
        lengths: &[usize],
        output: &mut [T],
        op: ReduceOp,
    ) -> Result<()> {
        let sizes = (input.len(), output.len());
        let operation = self.build_reduce_scatter_v::<T>(sizes, lengths, op, &Call::default())?;
        self.run_blocking(&operation, input, output)
    }

    /// [`ProcessGroup::reduce_scatter_v`] in the background.
    pub fn reduce_scatter_v_async<T: Element>(
        &self,
        input: Bucket<T>,
        lengths: &[usize],
        output: Bucket<T>,
        op: ReduceOp,
        call: Call,
    ) -> Work<(Bucket<T>, Bucket<T>)> {
        let sizes = (input.len(), output.len());
        let operation = self.build_reduce_scatter_v::<T>(sizes, lengths, op, &call);
        self.spawn(operation, (input, output), both)
    }

    fn build_reduce_scatter_v<T: Element>(
        &self,
        (input, output): (usize, usize),
        lengths: &[usize],
        op: ReduceOp,
        call: &Call,
    ) -> Result<Operation> {
        const NAME: &str = "reduce_scatter_v";
        self.check_op::<T>(NAME, op)?;
        let total = self.check_lengths(NAME, lengths)?;
        self.check_exact(NAME, "input", input, total)?;
        self.check_exact(NAME, "output", output, lengths[self.core.rank])?;
        let kind = Uneven::ReduceScatter { lengths };
        let operation = self.build_uneven::<T>(Method::ReduceScatter, lengths, total, kind, call);
        Ok(operation.reducing(op))
    }

    /// Gives `input_lengths[r]` elements of the input to rank `r` and receives
    /// `output_lengths[r]` from it; the parts are one behind the other, in rank order.
    /// The length that a rank sends to another must be the one expected there.
    ///
    /// PyTorch: `all_to_all_single` with `input_split_sizes` and
    /// `output_split_sizes`.
    ///
    /// *Cost:* 2 rounds, of which the first compares the lengths and has a deadline of its
    /// own; all but its own part sent per rank.
    ///
    /// # Errors
    ///
    /// As for all operations, see [`ProcessGroup`]. `Usage` for lengths that
    /// do not fit the slices. `Desync` where two ranks disagree about a length,
    /// before any data moves: the rank that expects another length names the sender,
    /// the others get `Aborted`.
    pub fn all_to_all_v<T: Element>(
        &self,
        input: &[T],
        input_lengths: &[usize],
        output: &mut [T],
        output_lengths: &[usize],
    ) -> Result<()> {
        let sizes = (input.len(), output.len());
        let lengths = (input_lengths, output_lengths);
        let (operation, compare) =
            self.build_all_to_all_v::<T>(sizes, lengths, &Call::default())?;
        // Both under one ticket: no operation of another thread comes between.
        self.core.queue.run(|runner| {
            compare(runner)?;
            run_on(runner, &operation, input, output)
        })
    }

    /// [`ProcessGroup::all_to_all_v`] in the background.
    pub fn all_to_all_v_async<T: Element>(
        &self,
        input: Bucket<T>,
        input_lengths: &[usize],
        output: Bucket<T>,
        output_lengths: &[usize],
        call: Call,
    ) -> Work<(Bucket<T>, Bucket<T>)> {
        let sizes = (input.len(), output.len());
        let lengths = (input_lengths, output_lengths);
        match self.build_all_to_all_v::<T>(sizes, lengths, &call) {
            Ok((operation, compare)) => {
                self.spawn_after(Ok(operation), compare, (input, output), both)
            }
            Err(error) => Work::failed(error),
        }
    }

    /// The exchange, and what compares the lengths before it.
    fn build_all_to_all_v<T: Element>(
        &self,
        (input, output): (usize, usize),
        (input_lengths, output_lengths): (&[usize], &[usize]),
        call: &Call,
    ) -> Result<(Operation, impl FnOnce(&mut Runner) -> Result<()> + use<T>)> {
        const NAME: &str = "all_to_all_v";
        let rank = self.core.rank;
        let sent = self.check_lengths(NAME, input_lengths)?;
        let received = self.check_lengths(NAME, output_lengths)?;
        self.check_exact(NAME, "input", input, sent)?;
        self.check_exact(NAME, "output", output, received)?;
        if input_lengths[rank] != output_lengths[rank] {
            return Err(self.usage(
                NAME,
                format!(
                    "this rank gives itself {} elements but expects {}",
                    input_lengths[rank], output_lengths[rank]
                ),
            ));
        }
        let world = self.core.world;
        let comparison = self.build_all_to_all::<i64>(world, world, call)?;
        let lens = |lengths: &[usize]| lengths.iter().map(|&n| n as i64).collect::<Vec<_>>();
        let (mine, expected) = (lens(input_lengths), lens(output_lengths));
        let kind = Uneven::AllToAll {
            sends: input_lengths,
            recvs: output_lengths,
        };
        let operation = Operation {
            // Not the same on all ranks; the lengths were compared.
            count: 0,
            lengths: 1,
            ..self.build_uneven::<T>(Method::AllToAll, &[], 0, kind, call)
        };
        let compare = move |runner: &mut Runner| {
            let mut theirs = vec![0; world];
            run_on(runner, &comparison, &mine, &mut theirs)?;
            let Some(peer) = (0..world).find(|&peer| theirs[peer] != expected[peer]) else {
                return Ok(());
            };
            let message = format!(
                "rank {peer} sends {} elements to rank {rank}, which expects {}",
                theirs[peer], expected[peer]
            );
            let error = Error::new(ErrorKind::Desync, message).with_peer(peer);
            let cause = format!("{} in {NAME}", error.message());
            Err(runner.fail(error, cause, |error| {
                error.with_rank(rank).with_operation(NAME)
            }))
        };
        Ok((operation, compare))
    }

    /// Moves bytes of different lengths when the ticket is served; all ranks know the lengths.
    pub(super) fn run_uneven(
        &self,
        runner: &mut Runner,
        (method, root): (Method, usize),
        lengths: &[usize],
        kind: Uneven<'_>,
        input: &[u8],
        output: &mut [u8],
    ) -> Result<()> {
        let total = lengths.iter().sum();
        let operation = self.build_uneven::<u8>(method, lengths, total, kind, &Call::default());
        run_on(runner, &operation.rooted(root), input, output)
    }

    pub(super) fn build_uneven<T: Element>(
        &self,
        method: Method,
        lengths: &[usize],
        total: usize,
        kind: Uneven<'_>,
        call: &Call,
    ) -> Operation {
        let plan = kind.plan(self.core.rank, self.core.world, size_of::<T>());
        Operation {
            lengths: lengths_hash(lengths.iter().copied()),
            plan: Some(Arc::new(plan)),
            ..self.build::<T>(method, total, call)
        }
    }

    /// One length for each rank; returns their sum.
    fn check_lengths(&self, name: &str, lengths: &[usize]) -> Result<usize> {
        if lengths.len() != self.core.world {
            return Err(self.usage(
                name,
                format!(
                    "{} lengths are given for {} ranks",
                    lengths.len(),
                    self.core.world
                ),
            ));
        }
        lengths
            .iter()
            .try_fold(0usize, |sum, len| sum.checked_add(*len))
            .ok_or_else(|| self.usage(name, "the lengths exceed the address space".into()))
    }

    fn check_exact(&self, name: &str, what: &str, len: usize, needed: usize) -> Result<()> {
        if len == needed {
            return Ok(());
        }
        Err(self.usage(
            name,
            format!("the {what} has {len} elements, the lengths ask for {needed}"),
        ))
    }
}
