//! The memory that blocking collectives work on.
//!
//! The other ranks may read and write a registered [`Bucket`] in place, because it is moved into the operation:
//! references to a slice may exist meanwhile, so that a slice is copied in and out.
//!
//! After an error a bucket is replaced by a new one of zeros on the heap: a rank that has not noticed the failure yet may
//! still access the old memory, which is not used again while the group lives.

use super::{ProcessGroup, lengths_hash};
use crate::operation::{Buffers, Operation};
use crate::{Bucket, Element, ErrorKind, Result};

mod sealed {
    use super::{Operation, ProcessGroup, Result};

    /// Makes an operation for this many elements.
    #[derive(Clone, Copy)]
    pub struct Build<'a>(pub(super) &'a dyn Fn(usize) -> Result<Operation>);
    /// Makes an operation for an input and an output of these lengths.
    #[derive(Clone, Copy)]
    pub struct BuildPair<'a>(pub(super) &'a dyn Fn(usize, usize) -> Result<Operation>);

    pub trait InPlace {
        fn run(&mut self, group: &ProcessGroup, build: Build<'_>) -> Result<()>;
    }

    pub trait Read<O: ?Sized> {
        fn run(self, group: &ProcessGroup, output: &mut O, build: BuildPair<'_>) -> Result<()>;
    }
}
use sealed::{Build, BuildPair};

/// Memory that a collective replaces by its result. Sealed.
///
/// | memory | how |
/// |---|---|
/// | `[T]`, `[T; N]`, `Vec<T>` | copied to and from memory that the ranks share |
/// | [`Bucket<T>`](Bucket) | not copied where it is [registered](Bucket::is_registered) on all ranks; replaced by a new bucket of zeros after an error |
/// | `[&mut [T]]`, `[&mut [T]; N]`, `Vec<&mut [T]>` | many tensors in one operation, packed one behind the other: a hundred small ones cost about as much as one. The bits are those of one by one. All ranks must give the same number of tensors with the same lengths in the same order, which is checked (`Desync`). With the ring ([`Algorithm::Ring`](crate::Algorithm::Ring)), whose result depends on how data is cut, each is an operation of its own. PyTorch: `all_reduce_coalesced`, `_broadcast_coalesced` |
///
/// ```
/// use phalanx_comm::{GroupOptions, ProcessGroup, ReduceOp};
///
/// let group = ProcessGroup::threads(1, GroupOptions::default()).remove(0);
/// let mut bucket = group.bucket::<f32>(3);
/// group.all_reduce(&mut bucket, ReduceOp::Sum).unwrap();
/// let (mut weights, mut bias) = ([1.0f32; 6], [2.0f32; 3]);
/// group
///     .all_reduce(&mut [&mut weights[..], &mut bias], ReduceOp::Mean)
///     .unwrap();
/// assert_eq!((weights, bias), ([1.0; 6], [2.0; 3]));
/// ```
pub trait Buffer: sealed::InPlace {
    /// The type of its elements.
    type Element: Element;
}

/// Memory that a collective reads: the input for an output of type `O`. Sealed.
///
/// | input | output |
/// |---|---|
/// | `&[T]`, `&[T; N]`, `&Vec<T>`, `&Bucket<T>` | `[T]`, or what dereferences to it |
/// | `&mut Bucket<T>` | `Bucket<T>`; both as [`Buffer`] says |
/// | `&[&[T]]`, `&[&[T]; N]`, `&Vec<&[T]>` | `[&mut [T]]`; many tensors in one operation, each input for the output at the same index. PyTorch: `all_gather_coalesced`, `reduce_scatter_tensor_coalesced` |
pub trait Input: sealed::Read<Self::Output> {
    /// The type of its elements.
    type Element: Element;
    /// The memory for the result.
    type Output: ?Sized;
}

impl ProcessGroup {
    /// The blocking form of an operation in place.
    pub(super) fn run_over<B: Buffer + ?Sized>(
        &self,
        data: &mut B,
        build: &dyn Fn(usize) -> Result<Operation>,
    ) -> Result<()> {
        data.run(self, Build(build))
    }

    /// The blocking form of an operation with an input and an output.
    pub(super) fn run_from<I: Input>(
        &self,
        input: I,
        output: &mut I::Output,
        build: &dyn Fn(usize, usize) -> Result<Operation>,
    ) -> Result<()> {
        input.run(self, output, BuildPair(build))
    }

    /// Runs an operation in this thread on buckets that the caller has taken.
    fn run_owned(&self, operation: &Operation, buffers: Buffers) -> Result<()> {
        self.core.queue.run(|runner| {
            // SAFETY: the memory belongs to buckets that the caller holds and does not access until this returns; lengths
            // were checked against the plan's. After an error `after` drops them.
            unsafe { runner.run(operation, buffers, None) }
        })
    }
}

impl<T: Element> sealed::InPlace for [T] {
    fn run(&mut self, group: &ProcessGroup, build: Build<'_>) -> Result<()> {
        group.run_blocking(&(build.0)(self.len())?, &[], self)
    }
}

impl<T: Element> Buffer for [T] {
    type Element = T;
}

impl<T: Element> sealed::InPlace for Bucket<T> {
    fn run(&mut self, group: &ProcessGroup, build: Build<'_>) -> Result<()> {
        let operation = (build.0)(self.len())?;
        // Taken, so that no other code can access it meanwhile, even after a panic.
        let mut held = std::mem::take(self);
        let len = held.len();
        let result = group.run_owned(&operation, in_place(&mut held));
        *self = after(&result, held, len);
        result
    }
}

impl<T: Element> Buffer for Bucket<T> {
    type Element = T;
}

impl<T: Element> sealed::InPlace for [&mut [T]] {
    fn run(&mut self, group: &ProcessGroup, build: Build<'_>) -> Result<()> {
        let operation = (build.0)(self.iter().map(|tensor| tensor.len()).sum())?;
        // The ring's result depends on how data is split.
        if operation.op.is_some() && !operation.method.is_some_and(|m| m.canonical()) {
            return self
                .iter_mut()
                .try_for_each(|tensor| tensor.run(group, build));
        }
        let operation = Operation {
            lengths: lengths_hash(self.iter().map(|tensor| tensor.len())),
            ..operation
        };
        let mut packed = pack(operation.count, 1, self);
        group.run_blocking(&operation, &[], &mut packed)?;
        unpack(&packed, 1, self);
        Ok(())
    }
}

impl<T: Element> Buffer for [&mut [T]] {
    type Element = T;
}

impl<T: Element> sealed::Read<[T]> for &[T] {
    fn run(self, group: &ProcessGroup, output: &mut [T], build: BuildPair<'_>) -> Result<()> {
        group.run_blocking(&(build.0)(self.len(), output.len())?, self, output)
    }
}

impl<T: Element> Input for &[T] {
    type Element = T;
    type Output = [T];
}

impl<T: Element> sealed::Read<Bucket<T>> for &mut Bucket<T> {
    fn run(self, group: &ProcessGroup, output: &mut Bucket<T>, build: BuildPair<'_>) -> Result<()> {
        let (len, output_len) = (self.len(), output.len());
        let operation = (build.0)(len, output_len)?;
        // As in place.
        let mut held = (std::mem::take(self), std::mem::take(output));
        let result = group.run_owned(&operation, both(&mut held));
        *self = after(&result, held.0, len);
        *output = after(&result, held.1, output_len);
        result
    }
}

impl<T: Element> Input for &mut Bucket<T> {
    type Element = T;
    type Output = Bucket<T>;
}

impl<'o, T: Element> sealed::Read<[&'o mut [T]]> for &[&[T]] {
    fn run(
        self,
        group: &ProcessGroup,
        outputs: &mut [&'o mut [T]],
        build: BuildPair<'_>,
    ) -> Result<()> {
        let (mut input_len, mut output_len) = (0, 0);
        for (input, output) in self.iter().zip(outputs.iter()) {
            // For its checks.
            (build.0)(input.len(), output.len())?;
            input_len += input.len();
            output_len += output.len();
        }
        let operation = (build.0)(input_len, output_len)?;
        if self.len() != outputs.len() {
            let why = format!(
                "{} inputs and {} outputs are given",
                self.len(),
                outputs.len()
            );
            return Err(group.usage(operation.collective.name(), why));
        }
        let operation = Operation {
            lengths: lengths_hash(self.iter().map(|input| input.len())),
            ..operation
        };
        let parts = |len: usize| len.checked_div(operation.count).unwrap_or(1);
        let packed = pack(input_len, parts(input_len), self);
        let mut result = Bucket::zeroed(output_len);
        group.run_blocking(&operation, &packed, &mut result)?;
        unpack(&result, parts(output_len), outputs);
        Ok(())
    }
}

impl<'o, T: Element> Input for &'o [&[T]] {
    type Element = T;
    type Output = [&'o mut [T]];
}

/// Part 0 of every tensor, one behind the other, then part 1 and so on.
fn pack<T: Element>(
    total: usize,
    parts: usize,
    tensors: &[impl std::ops::Deref<Target = [T]>],
) -> Bucket<T> {
    let mut packed = Bucket::zeroed(total);
    let mut rest = &mut packed[..];
    for part in 0..parts {
        for tensor in tensors {
            let len = tensor.len() / parts;
            let (place, after) = rest.split_at_mut(len);
            place.copy_from_slice(&tensor[part * len..][..len]);
            rest = after;
        }
    }
    packed
}

/// The inverse of [`pack`].
fn unpack<T: Element>(packed: &[T], parts: usize, tensors: &mut [&mut [T]]) {
    let mut rest = packed;
    for part in 0..parts {
        for tensor in tensors.iter_mut() {
            let len = tensor.len() / parts;
            let (place, after) = rest.split_at(len);
            tensor[part * len..][..len].copy_from_slice(place);
            rest = after;
        }
    }
}

/// What works as its slice does.
macro_rules! as_slice {
    ($([$($generics:tt)*] $own:ty as $slice:ty, for $output:ty;)*) => {$(
        impl<'o, $($generics)*> sealed::Read<$output> for &'o $own {
            fn run(self, group: &ProcessGroup, output: &mut $output, build: BuildPair<'_>) -> Result<()> {
                <&$slice as sealed::Read<$output>>::run(self, group, output, build)
            }
        }
        impl<'o, $($generics)*> Input for &'o $own {
            type Element = T;
            type Output = $output;
        }
    )*};
    ($([$($generics:tt)*] mut $own:ty as $slice:ty;)*) => {$(
        impl<$($generics)*> sealed::InPlace for $own {
            fn run(&mut self, group: &ProcessGroup, build: Build<'_>) -> Result<()> {
                <$slice as sealed::InPlace>::run(self, group, build)
            }
        }
        impl<$($generics)*> Buffer for $own {
            type Element = T;
        }
    )*};
}
as_slice! {
    [T: Element, const N: usize] mut [T; N] as [T];
    [T: Element] mut Vec<T> as [T];
    ['a, T: Element, const N: usize] mut [&'a mut [T]; N] as [&'a mut [T]];
    ['a, T: Element] mut Vec<&'a mut [T]> as [&'a mut [T]];
}
as_slice! {
    [T: Element, const N: usize] [T; N] as [T], for [T];
    [T: Element] Vec<T> as [T], for [T];
    [T: Element] Bucket<T> as [T], for [T];
    [T: Element, const N: usize] [&[T]; N] as [&[T]], for [&'o mut [T]];
    [T: Element] Vec<&[T]> as [&[T]], for [&'o mut [T]];
}

/// The bucket of `len` elements to return after an operation.
pub(super) fn after<T: Element>(result: &Result<()>, bucket: Bucket<T>, len: usize) -> Bucket<T> {
    match result {
        // Refused before it began: no rank has accessed it.
        Err(error) if error.kind() != ErrorKind::Usage => Bucket::zeroed(len),
        _ => bucket,
    }
}

/// Buffers that the process group owns while it works on them.
pub(super) fn exposed<T: Element>(input: *const T, output: *mut T) -> Buffers {
    Buffers {
        input: input.cast(),
        output: output.cast(),
        exposed: true,
    }
}

pub(super) fn in_place<T: Element>(data: &mut Bucket<T>) -> Buffers {
    exposed(std::ptr::null(), data.as_mut_ptr())
}

pub(super) fn both<T: Element>((input, output): &mut (Bucket<T>, Bucket<T>)) -> Buffers {
    exposed(input.as_ptr(), output.as_mut_ptr())
}
