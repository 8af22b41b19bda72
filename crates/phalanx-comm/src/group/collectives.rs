//! The collectives, typed: lengths and ranks are checked here, then the
//! runner works on bytes.
//!
//! Every collective has a blocking form, the most used ones on any [`Buffer`], and an
//! asynchronous one on [`Bucket`]s, which it takes and gives back. Mistakes found here are `Usage` errors:
//! nothing was sent and the group stays usable, but the *other* ranks, if they made no
//! mistake, wait for this one.

use std::sync::Arc;

use super::buffer::{both, exposed, in_place};
use super::{Buffer, Call, Input, ProcessGroup, Work};
use crate::backend::Runner;
use crate::operation::{Buffers, Operation};
use crate::plan::{Collective, Method};
use crate::select::Algorithm;
use crate::{Bucket, Element, ReduceOp, Result};
use phalanx_fold::Isa;

impl ProcessGroup {
    /// Replaces `data` on every rank by the reduction of all ranks' data.
    ///
    /// *Order:* see [`ReduceOp`]; the same bits on all ranks.
    /// *Cost:* direct: 2 rounds, about `2·n·(P − 1)/P` bytes sent per rank;
    /// small data: 1 round, `(P − 1)·n`.
    ///
    /// # Errors
    ///
    /// As for all operations, see [`ProcessGroup`]. `Usage` for the mean of
    /// integers or the bits of floats.
    pub fn all_reduce<B: Buffer + ?Sized>(&self, data: &mut B, op: ReduceOp) -> Result<()> {
        self.run_over(data, &|len| {
            self.build_all_reduce::<B::Element>(len, op, &Call::default())
        })
    }

    /// [`ProcessGroup::all_reduce`] in the background.
    pub fn all_reduce_async<T: Element>(
        &self,
        data: Bucket<T>,
        op: ReduceOp,
        call: Call,
    ) -> Work<Bucket<T>> {
        let operation = self.build_all_reduce::<T>(data.len(), op, &call);
        self.spawn(operation, data, in_place)
    }

    pub(super) fn build_all_reduce<T: Element>(
        &self,
        count: usize,
        op: ReduceOp,
        call: &Call,
    ) -> Result<Operation> {
        const NAME: &str = "all_reduce";
        self.check_op::<T>(NAME, op)?;
        let algorithm = match call.algorithm {
            Algorithm::Auto => self.algorithm(),
            own => own,
        };
        let bytes = count * size_of::<T>();
        let method = self.core.selector.all_reduce(algorithm, bytes, T::DTYPE);
        let operation = self.build::<T>(method, count, call).reducing(op);
        Ok(Operation {
            automatic: algorithm == Algorithm::Auto && operation.automatic,
            ..operation
        })
    }

    /// Replaces `data` on every rank by that of rank `root`.
    ///
    /// *Cost:* small data: `⌈log₂ P⌉` rounds, at most `⌈log₂ P⌉·n` bytes sent
    /// per rank; large data: 2 rounds, at most `2n`. Where several hosts have several
    /// ranks each, every host receives the data once.
    ///
    /// # Errors
    ///
    /// As for all operations, see [`ProcessGroup`].
    pub fn broadcast<B: Buffer + ?Sized>(&self, data: &mut B, root: usize) -> Result<()> {
        self.run_over(data, &|len| {
            self.build_broadcast::<B::Element>(len, root, &Call::default())
        })
    }

    /// [`ProcessGroup::broadcast`] in the background.
    pub fn broadcast_async<T: Element>(
        &self,
        data: Bucket<T>,
        root: usize,
        call: Call,
    ) -> Work<Bucket<T>> {
        let operation = self.build_broadcast::<T>(data.len(), root, &call);
        self.spawn(operation, data, in_place)
    }

    pub(super) fn build_broadcast<T: Element>(
        &self,
        count: usize,
        root: usize,
        call: &Call,
    ) -> Result<Operation> {
        self.check_peer("broadcast", "root", root)?;
        let method = self.choose::<T>(Collective::Broadcast, count);
        Ok(self.build::<T>(method, count, call).rooted(root))
    }

    /// Replaces `data` on rank `root` by the reduction of all ranks' data; the
    /// other ranks' data stays as it is.
    ///
    /// *Order:* canonical, see [`ReduceOp`].
    /// *Cost:* 1 round for small data, otherwise 2; `n` bytes sent per rank; where hosts
    /// have several ranks each, large data goes from host to host once, in order.
    ///
    /// # Errors
    ///
    /// As for all operations, see [`ProcessGroup`]. `Usage` for the mean of
    /// integers or the bits of floats.
    pub fn reduce<B: Buffer + ?Sized>(
        &self,
        data: &mut B,
        op: ReduceOp,
        root: usize,
    ) -> Result<()> {
        self.run_over(data, &|len| {
            self.build_reduce::<B::Element>(len, op, root, &Call::default())
        })
    }

    /// [`ProcessGroup::reduce`] in the background.
    pub fn reduce_async<T: Element>(
        &self,
        data: Bucket<T>,
        op: ReduceOp,
        root: usize,
        call: Call,
    ) -> Work<Bucket<T>> {
        let operation = self.build_reduce::<T>(data.len(), op, root, &call);
        self.spawn(operation, data, in_place)
    }

    pub(super) fn build_reduce<T: Element>(
        &self,
        count: usize,
        op: ReduceOp,
        root: usize,
        call: &Call,
    ) -> Result<Operation> {
        self.check_op::<T>("reduce", op)?;
        self.check_peer("reduce", "root", root)?;
        let method = self.choose::<T>(Collective::Reduce, count);
        Ok(self
            .build::<T>(method, count, call)
            .reducing(op)
            .rooted(root))
    }

    /// Writes the inputs of all ranks, in rank order, to `output` on every
    /// rank; `output` is `world_size` times as long as `input`.
    ///
    /// *Cost:* 1 round, `(P − 1)·n` bytes sent per rank; where hosts have several
    /// ranks each, every part goes to every other host once.
    ///
    /// # Errors
    ///
    /// As for all operations, see [`ProcessGroup`]. `Usage` for a wrong length.
    pub fn all_gather<I: Input>(&self, input: I, output: &mut I::Output) -> Result<()> {
        self.run_from(input, output, &|input, output| {
            self.build_all_gather::<I::Element>(input, output, &Call::default())
        })
    }

    /// [`ProcessGroup::all_gather`] in the background.
    pub fn all_gather_async<T: Element>(
        &self,
        input: Bucket<T>,
        output: Bucket<T>,
        call: Call,
    ) -> Work<(Bucket<T>, Bucket<T>)> {
        let operation = self.build_all_gather::<T>(input.len(), output.len(), &call);
        self.spawn(operation, (input, output), both)
    }

    pub(super) fn build_all_gather<T: Element>(
        &self,
        input: usize,
        output: usize,
        call: &Call,
    ) -> Result<Operation> {
        self.check_len("all_gather", "output", output, input * self.core.world)?;
        let method = self.choose::<T>(Collective::AllGather, input);
        Ok(self.build::<T>(method, input, call))
    }

    /// Reduces the inputs of all ranks and gives part `r` of the result to
    /// rank `r`; `input` is `world_size` times as long as `output`.
    ///
    /// *Order:* canonical, see [`ReduceOp`].
    /// *Cost:* 1 round, `(P − 1)·n` bytes sent per rank, `n` being one part; where hosts
    /// have several ranks each, large data goes from host to host once, in order.
    ///
    /// # Errors
    ///
    /// As for all operations, see [`ProcessGroup`]. `Usage` for a wrong length,
    /// the mean of integers or the bits of floats.
    pub fn reduce_scatter<I: Input>(
        &self,
        input: I,
        output: &mut I::Output,
        op: ReduceOp,
    ) -> Result<()> {
        self.run_from(input, output, &|input, output| {
            self.build_reduce_scatter::<I::Element>(input, output, op, &Call::default())
        })
    }

    /// [`ProcessGroup::reduce_scatter`] in the background.
    pub fn reduce_scatter_async<T: Element>(
        &self,
        input: Bucket<T>,
        output: Bucket<T>,
        op: ReduceOp,
        call: Call,
    ) -> Work<(Bucket<T>, Bucket<T>)> {
        let operation = self.build_reduce_scatter::<T>(input.len(), output.len(), op, &call);
        self.spawn(operation, (input, output), both)
    }

    pub(super) fn build_reduce_scatter<T: Element>(
        &self,
        input: usize,
        output: usize,
        op: ReduceOp,
        call: &Call,
    ) -> Result<Operation> {
        const NAME: &str = "reduce_scatter";
        self.check_op::<T>(NAME, op)?;
        self.check_len(NAME, "input", input, output * self.core.world)?;
        let method = self.choose::<T>(Collective::ReduceScatter, output);
        Ok(self.build::<T>(method, output, call).reducing(op))
    }

    /// Writes the inputs of all ranks, in rank order, to `output` on rank
    /// `root`, where it must be given and be `world_size` times as long as
    /// `input`; elsewhere it is not used.
    ///
    /// *Cost:* 1 round, `n` bytes sent by every rank but the root.
    ///
    /// # Errors
    ///
    /// As for all operations, see [`ProcessGroup`]. `Usage` for a missing
    /// output or a wrong length.
    pub fn gather<T: Element>(
        &self,
        input: &[T],
        output: Option<&mut [T]>,
        root: usize,
    ) -> Result<()> {
        let len = output.as_ref().map(|output| output.len());
        let operation = self.build_gather::<T>(input.len(), len, root, &Call::default())?;
        self.run_blocking(&operation, input, output.unwrap_or_default())
    }

    /// [`ProcessGroup::gather`] in the background.
    pub fn gather_async<T: Element>(
        &self,
        input: Bucket<T>,
        output: Option<Bucket<T>>,
        root: usize,
        call: Call,
    ) -> Work<(Bucket<T>, Option<Bucket<T>>)> {
        let len = output.as_ref().map(|output| output.len());
        let operation = self.build_gather::<T>(input.len(), len, root, &call);
        self.spawn(operation, (input, output), |(input, output)| {
            let output = output
                .as_mut()
                .map_or(std::ptr::null_mut(), |o| o.as_mut_ptr());
            exposed(input.as_ptr(), output)
        })
    }

    fn build_gather<T: Element>(
        &self,
        input: usize,
        output: Option<usize>,
        root: usize,
        call: &Call,
    ) -> Result<Operation> {
        const NAME: &str = "gather";
        self.check_peer(NAME, "root", root)?;
        if self.core.rank == root {
            self.check_given(NAME, "output", output, input * self.core.world)?;
        }
        Ok(self.build::<T>(Method::Gather, input, call).rooted(root))
    }

    /// Gives part `r` of the input of rank `root` to rank `r`. The input must
    /// be given on the root and be `world_size` times as long as `output`;
    /// elsewhere it is not used.
    ///
    /// *Cost:* 1 round, `(P − 1)·n` bytes sent by the root, `n` being one part.
    ///
    /// # Errors
    ///
    /// As for all operations, see [`ProcessGroup`]. `Usage` for a missing
    /// input or a wrong length.
    pub fn scatter<T: Element>(
        &self,
        input: Option<&[T]>,
        output: &mut [T],
        root: usize,
    ) -> Result<()> {
        let len = input.map(<[T]>::len);
        let operation = self.build_scatter::<T>(len, output.len(), root, &Call::default())?;
        self.run_blocking(&operation, input.unwrap_or_default(), output)
    }

    /// [`ProcessGroup::scatter`] in the background.
    pub fn scatter_async<T: Element>(
        &self,
        input: Option<Bucket<T>>,
        output: Bucket<T>,
        root: usize,
        call: Call,
    ) -> Work<(Option<Bucket<T>>, Bucket<T>)> {
        let len = input.as_ref().map(|input| input.len());
        let operation = self.build_scatter::<T>(len, output.len(), root, &call);
        self.spawn(operation, (input, output), |(input, output)| {
            let input = input.as_ref().map_or(std::ptr::null(), |i| i.as_ptr());
            exposed(input, output.as_mut_ptr())
        })
    }

    fn build_scatter<T: Element>(
        &self,
        input: Option<usize>,
        output: usize,
        root: usize,
        call: &Call,
    ) -> Result<Operation> {
        const NAME: &str = "scatter";
        self.check_peer(NAME, "root", root)?;
        if self.core.rank == root {
            self.check_given(NAME, "input", input, output * self.core.world)?;
        }
        Ok(self.build::<T>(Method::Scatter, output, call).rooted(root))
    }

    /// Gives part `r` of the input to rank `r` and receives one part from
    /// each, in rank order. Input and output have the same length, a multiple
    /// of `world_size`.
    ///
    /// *Cost:* 1 round, `(P − 1)·n` bytes sent per rank, `n` being one part.
    ///
    /// # Errors
    ///
    /// As for all operations, see [`ProcessGroup`]. `Usage` for a wrong length.
    pub fn all_to_all<I: Input>(&self, input: I, output: &mut I::Output) -> Result<()> {
        self.run_from(input, output, &|input, output| {
            self.build_all_to_all::<I::Element>(input, output, &Call::default())
        })
    }

    /// [`ProcessGroup::all_to_all`] in the background.
    pub fn all_to_all_async<T: Element>(
        &self,
        input: Bucket<T>,
        output: Bucket<T>,
        call: Call,
    ) -> Work<(Bucket<T>, Bucket<T>)> {
        let operation = self.build_all_to_all::<T>(input.len(), output.len(), &call);
        self.spawn(operation, (input, output), both)
    }

    pub(super) fn build_all_to_all<T: Element>(
        &self,
        input: usize,
        output: usize,
        call: &Call,
    ) -> Result<Operation> {
        const NAME: &str = "all_to_all";
        let world = self.core.world;
        if !input.is_multiple_of(world) {
            return Err(self.usage(
                NAME,
                format!("the input has {input} elements, which {world} ranks cannot share equally"),
            ));
        }
        self.check_len(NAME, "output", output, input)?;
        Ok(self.build::<T>(Method::AllToAll, input / world, call))
    }

    /// Waits until all ranks have reached the barrier.
    ///
    /// *Cost:* `⌈log₂ P⌉` rounds of empty messages.
    ///
    /// # Errors
    ///
    /// As for all operations, see [`ProcessGroup`].
    pub fn barrier(&self) -> Result<()> {
        self.run_blocking::<u8>(&self.build_barrier(&Call::default()), &[], &mut [])
    }

    /// [`ProcessGroup::barrier`] in the background.
    pub fn barrier_async(&self, call: Call) -> Work<()> {
        self.spawn(Ok(self.build_barrier(&call)), (), |()| Buffers::none())
    }

    fn build_barrier(&self, call: &Call) -> Operation {
        Operation {
            dtype: None,
            ..self.build::<u8>(Method::Barrier, 0, call)
        }
    }

    /// The barrier at the end of the group.
    pub(super) fn goodbye(&self) -> Result<()> {
        let operation = Operation {
            collective: Collective::Shutdown,
            ..self.build_barrier(&Call::default())
        };
        self.run_blocking::<u8>(&operation, &[], &mut [])
    }

    fn choose<T: Element>(&self, collective: Collective, count: usize) -> Method {
        let bytes = count * size_of::<T>();
        self.core.selector.choose(collective, bytes, T::DTYPE)
    }

    /// An operation without root or reduction.
    pub(super) fn build<T: Element>(&self, method: Method, count: usize, call: &Call) -> Operation {
        let bytes = count * size_of::<T>();
        let selector = &self.core.selector;
        let prescribed = selector.rules().method(method.collective(), bytes);
        Operation {
            short_segments: selector.has_short_segments(method, bytes),
            automatic: prescribed.is_none() && selector.hosts().count() <= 1,
            label: call.label.clone().or_else(|| self.defaults.label.clone()),
            timeout: call.timeout.or(self.defaults.timeout),
            ..Operation::new(method.collective(), Some(method), Some(T::DTYPE), count)
        }
    }

    /// Runs an operation in this thread. The slices have the lengths that the
    /// operation's plan needs: the `build_` functions have checked.
    pub(super) fn run_blocking<T: Element>(
        &self,
        operation: &Operation,
        input: &[T],
        output: &mut [T],
    ) -> Result<()> {
        self.core
            .queue
            .run(|runner| run_on(runner, operation, input, output))
    }

    /// Runs an operation on the communication thread, or a thread that waits for it. It owns `held`
    /// meanwhile. `buffers` points into memory that `held` owns, with the lengths of
    /// the plan.
    pub(super) fn spawn<B: Send + 'static>(
        &self,
        operation: Result<Operation>,
        held: B,
        buffers: impl FnOnce(&mut B) -> Buffers + Send + 'static,
    ) -> Work<B> {
        self.spawn_after(operation, |_| Ok(()), held, buffers)
    }

    /// [`spawn`](Self::spawn) after `first`, under the same ticket, unless that fails.
    pub(super) fn spawn_after<B: Send + 'static>(
        &self,
        operation: Result<Operation>,
        first: impl FnOnce(&mut Runner) -> Result<()> + Send + 'static,
        held: B,
        buffers: impl FnOnce(&mut B) -> Buffers + Send + 'static,
    ) -> Work<B> {
        let operation = match operation {
            Ok(operation) => operation,
            Err(error) => return Work::failed(error),
        };
        let (work, completer) = Work::new(self.core.callers.clone());
        let rank = self.core.rank;
        let recorder = Arc::clone(&self.core.recorder);
        let ticket = recorder.queued(self.core.generation, self.core.id, &operation);
        let issued = self.core.queue.submit(Box::new(move |runner| {
            let runner = match runner {
                Ok(runner) => runner,
                Err(error) => {
                    recorder.abandon(ticket);
                    let name = operation.collective.name();
                    return completer.finish(Err(error.with_rank(rank).with_operation(name)));
                }
            };
            completer.start();
            if let Err(error) = first(runner) {
                recorder.abandon(ticket);
                return completer.finish(Err(error));
            }
            runner.adopt(ticket);
            let mut held = held;
            let buffers = buffers(&mut held);
            // SAFETY: the memory belongs to `held`, which this closure owns until the
            // run is over, and drops unread after an error; lengths were checked
            // against the plan's.
            let result = unsafe { runner.run(&operation, buffers, None) };
            completer.finish(result.map(|()| held));
        }));
        work.issued(issued)
    }

    pub(super) fn check_op<T: Element>(&self, name: &str, op: ReduceOp) -> Result<()> {
        if op.supports(T::DTYPE) {
            // Ranks that are threads have no other place to report it.
            return match Isa::chosen() {
                Ok(_) => Ok(()),
                Err(message) => Err(self.usage(name, message.into())),
            };
        }
        let instead = if T::DTYPE.is_float() {
            "use an integer type"
        } else {
            "use sum, or a float type"
        };
        Err(self.usage(
            name,
            format!("the {op} of {} is not defined: {instead}", T::DTYPE),
        ))
    }

    pub(super) fn check_peer(&self, name: &str, role: &str, rank: usize) -> Result<()> {
        if rank < self.core.world {
            return Ok(());
        }
        let world = self.core.world;
        Err(self.usage(
            name,
            format!("{role} {rank} does not exist in a group of {world}"),
        ))
    }

    pub(super) fn check_other(&self, name: &str, rank: usize) -> Result<()> {
        self.check_peer(name, "rank", rank)?;
        if rank == self.core.rank {
            return Err(self.usage(name, "a rank does not talk to itself: copy the data".into()));
        }
        Ok(())
    }

    pub(super) fn check_len(
        &self,
        name: &str,
        what: &str,
        len: usize,
        needed: usize,
    ) -> Result<()> {
        if len == needed {
            return Ok(());
        }
        let world = self.core.world;
        Err(self.usage(
            name,
            format!("the {what} has {len} elements, {needed} are needed with {world} ranks"),
        ))
    }

    pub(super) fn check_given(
        &self,
        name: &str,
        what: &str,
        len: Option<usize>,
        needed: usize,
    ) -> Result<()> {
        match len {
            Some(len) => self.check_len(name, what, len, needed),
            None => Err(self.usage(name, format!("the root needs an {what}"))),
        }
    }
}

/// Runs an operation whose ticket is served. The slices have the lengths that its plan
/// needs: the caller has checked.
pub(super) fn run_on<T: Element>(
    runner: &mut Runner,
    operation: &Operation,
    input: &[T],
    output: &mut [T],
) -> Result<()> {
    let buffers = Buffers {
        input: input.as_ptr().cast(),
        output: output.as_mut_ptr().cast(),
        exposed: false,
    };
    // SAFETY: both slices are borrowed until this returns, the output
    // exclusively; their lengths were checked against the plan's.
    unsafe { runner.run(operation, buffers, None) }
}

impl Operation {
    pub(super) fn reducing(self, op: ReduceOp) -> Self {
        Operation {
            op: Some(op),
            ..self
        }
    }

    pub(super) fn rooted(self, root: usize) -> Self {
        Operation { root, ..self }
    }
}
