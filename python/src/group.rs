//! Process groups whose operations take addresses of tensors.

use std::mem::ManuallyDrop;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::channel;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use half::{bf16, f16};
use phalanx_comm::{
    Bucket, Call, DType, Element, Error, InitOptions, Peer, ProcessGroup, ReduceOp, Registered,
    Result, Work,
};
use phalanx_store::Store;
use phalanx_wire::Token;
use pyo3::exceptions::{PyRuntimeError, PyTypeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::PyAny;

use crate::pending::Pending;
use crate::store::TorchStore;
use crate::{lost, process_of, raise, raised};

/// Where the ranks agree on the secret of the group.
const TOKEN_KEY: &str = "token";

/// The memory of a contiguous tensor.
struct Memory {
    address: usize,
    count: usize,
    dtype: DType,
    /// Keeps the memory.
    tensor: Py<PyAny>,
    /// Where the other ranks map it.
    shared: Option<Py<Shared>>,
}

/// The memory of a storage that other ranks map.
#[pyclass(frozen)]
pub(crate) struct Shared {
    memory: ManuallyDrop<Registered>,
    start: usize,
    process: u32,
    is_kept: AtomicBool,
}

#[pymethods]
impl Shared {
    /// The memory stays until the process ends.
    fn keep(&self) {
        self.is_kept.store(true, Ordering::Relaxed);
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        // In a forked process it is the memory of the one that forked.
        if self.process == std::process::id() && !*self.is_kept.get_mut() {
            // SAFETY: dropped here only.
            unsafe { ManuallyDrop::drop(&mut self.memory) }
        }
    }
}

impl<'py> FromPyObject<'_, 'py> for Memory {
    type Error = PyErr;

    /// Of (address, number of elements, type, tensor, what [`Group::share`] returned or nothing).
    fn extract(object: Borrowed<'_, 'py, PyAny>) -> PyResult<Memory> {
        type Parts = (usize, usize, String, Py<PyAny>, Option<Py<Shared>>);
        let (address, count, name, tensor, shared): Parts = object.extract()?;
        let dtype = DType::ALL.into_iter().find(|dtype| dtype.name() == name);
        let dtype =
            dtype.ok_or_else(|| PyTypeError::new_err(format!("no element type {name:?}")))?;
        if !address.is_multiple_of(dtype.size_bytes()) {
            let message = format!("the tensor's memory is not aligned for {dtype}");
            return Err(PyValueError::new_err(message));
        }
        if address == 0 && count > 0 {
            return Err(PyValueError::new_err("the tensor has no memory"));
        }
        Ok(Memory {
            address,
            count,
            dtype,
            tensor,
            shared,
        })
    }
}

impl Memory {
    /// As a bucket that keeps the tensor. An empty tensor has no address.
    ///
    /// # Safety
    ///
    /// The tensor has `count` elements of type `T` there, which nothing else uses before the bucket is dropped.
    unsafe fn bucket<T: Element>(self) -> Bucket<T> {
        if let Some(shared) = self.shared.as_ref().map(Py::get) {
            let offset = self.address.wrapping_sub(shared.start);
            let tensor = Python::attach(|py| self.tensor.clone_ref(py));
            // SAFETY: as this function's.
            let bucket = unsafe { shared.memory.bucket(offset, self.count, tensor) };
            if let Some(bucket) = bucket {
                return bucket;
            }
        }
        match NonNull::new(std::ptr::with_exposed_provenance_mut::<T>(self.address)) {
            // SAFETY: as this function's.
            Some(start) if self.count > 0 => unsafe {
                Bucket::from_owner(start, self.count, self.tensor)
            },
            _ => Bucket::zeroed(0),
        }
    }

    /// As [`bucket`](Memory::bucket) to read from, of a copy where it overlaps with `other`, which is written.
    ///
    /// # Safety
    ///
    /// As for `bucket`.
    unsafe fn paired<T: Element>(self, other: &Memory) -> Bucket<T> {
        let bytes = |memory: &Memory| memory.count * memory.dtype.size_bytes();
        let is_before = |a: &Memory, b: &Memory| a.address + bytes(a) <= b.address;
        let is_apart = is_before(&self, other) || is_before(other, &self);
        // SAFETY: as this function's.
        let bucket = unsafe { self.bucket::<T>() };
        match is_apart {
            true => bucket,
            false => Bucket::from_slice(&bucket),
        }
    }
}

/// Runs `$body` with `$T` as the type of `$dtype`'s elements.
macro_rules! typed {
    ($dtype:expr, $T:ident => $body:expr) => {
        typed! { $dtype, $T => $body;
            F32 f32, F64 f64, F16 f16, Bf16 bf16, I32 i32, I64 i64, U8 u8, I8 i8, I16 i16, U16 u16, U32 u32, U64 u64
        }
    };
    ($dtype:expr, $T:ident => $body:expr; $($variant:ident $element:ty),*) => {
        match $dtype {
            $(DType::$variant => {
                type $T = $element;
                $body
            })*
            other => return Err(PyTypeError::new_err(format!("no operations on {other}"))),
        }
    };
}

fn reduction(name: &str) -> PyResult<ReduceOp> {
    let op = ReduceOp::ALL.into_iter().find(|op| op.name() == name);
    op.ok_or_else(|| PyValueError::new_err(format!("no reduction {name:?}")))
}

/// Two tensors of one operation have the same type.
fn same(a: &Memory, b: &Memory) -> PyResult<DType> {
    if a.dtype == b.dtype {
        return Ok(a.dtype);
    }
    let message = format!("the input is of type {}, the output {}", a.dtype, b.dtype);
    Err(PyTypeError::new_err(message))
}

pub(crate) fn span(seconds: f64) -> Duration {
    Duration::try_from_secs_f64(seconds).unwrap_or(Duration::MAX)
}

/// How one operation is called: its deadline in seconds, and whether it runs in the caller, who would do nothing else but
/// wait.
#[derive(FromPyObject)]
struct How(Option<f64>, bool);

impl How {
    fn call(&self) -> Call {
        Call {
            timeout: self.0.map(span),
            ..Call::default()
        }
    }
}

/// A rank that a program names. One that is too large is refused by the operation.
struct RankOf(usize);

impl<'py> FromPyObject<'_, 'py> for RankOf {
    type Error = PyErr;

    fn extract(object: Borrowed<'_, 'py, PyAny>) -> PyResult<RankOf> {
        let rank: i64 = object.extract()?;
        let valid = usize::try_from(rank);
        valid
            .map(RankOf)
            .map_err(|_| raise(format!("there is no rank {rank}: ranks count from 0")))
    }
}

/// Of a message.
struct Tag(u32);

impl<'py> FromPyObject<'_, 'py> for Tag {
    type Error = PyErr;

    fn extract(object: Borrowed<'_, 'py, PyAny>) -> PyResult<Tag> {
        let tag: i64 = object.extract()?;
        u32::try_from(tag).map(Tag).map_err(|_| match tag < 0 {
            // PyTorch's words.
            true => PyRuntimeError::new_err("Tag must be nonnegative"),
            false => PyRuntimeError::new_err(format!("Tag must be at most {}", u32::MAX)),
        })
    }
}

/// A process group of this rank.
#[pyclass(frozen)]
pub(crate) struct Group {
    /// Nothing after the shutdown.
    group: Mutex<Option<ProcessGroup>>,
    /// PyTorch's, in which the ranks have met, if they have met there.
    store: Option<TorchStore>,
    rank: usize,
    process: u32,
}

/// What an operation gives: nothing where it is over.
type Begun = PyResult<Option<Pending>>;

impl Group {
    /// A group that has formed elsewhere.
    pub(crate) fn of(group: ProcessGroup) -> Group {
        Group {
            rank: group.rank(),
            group: Mutex::new(Some(group)),
            store: None,
            process: std::process::id(),
        }
    }

    fn lock(&self) -> MutexGuard<'_, Option<ProcessGroup>> {
        self.group.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn get(&self) -> PyResult<ProcessGroup> {
        let group = self.lock().clone();
        let rank = self.rank;
        group.ok_or_else(|| raise(format!("rank {rank}: the process group was shut down")))
    }

    /// The group for an operation of which `how` says that the caller runs it.
    fn in_caller(&self, how: &How) -> PyResult<Option<ProcessGroup>> {
        match how.1 {
            true => Ok(Some(self.get()?.with_call(how.call()))),
            false => Ok(None),
        }
    }

    fn pending<B: Send + 'static>(work: Work<B>) -> Begun {
        Ok(Some(Pending::new(work)))
    }
}

/// Runs an operation in this thread, which is over then.
fn run(py: Python<'_>, operation: impl FnOnce() -> Result<()> + Send) -> Begun {
    py.detach(operation).map_err(|error| raised(&error))?;
    Ok(None)
}

#[pymethods]
impl Group {
    /// Forms the group of `world` ranks that meet in `store`, a `torch.distributed.Store`. All wait for each other, for at
    /// most the first of `times`, in seconds, or until the process of one of the `handles`, by rank, has died; the second is the deadline of
    /// each operation. The rank computes with `threads` threads.
    #[new]
    fn new(
        py: Python<'_>,
        store: &Bound<'_, PyAny>,
        rank: usize,
        world: usize,
        times: (f64, f64),
        threads: usize,
        handles: Vec<String>,
    ) -> PyResult<Group> {
        if rank >= world {
            let message = format!("rank {rank} does not exist in a group of {world}");
            return Err(PyValueError::new_err(message));
        }
        let (forming, timeout) = times;
        if forming < 0.0 || timeout < 0.0 {
            return Err(PyValueError::new_err("the timeout must not be negative"));
        }
        let store = TorchStore::new(store, rank, handles.iter().map(|h| process_of(h)).collect());
        let form = || -> Result<ProcessGroup> {
            let (forming, timeout) = (span(forming), span(timeout));
            let own = store.of_group((rank, world), forming)?;
            let token = agree_on_token(&own)?;
            let options = InitOptions {
                token: Some(token),
                generation: Some(0),
                timeout: forming,
                op_timeout: timeout,
                first_op_timeout: timeout,
                compute_threads: Some(threads),
                ..InitOptions::default()
            };
            std::thread::scope(|scope| {
                let (forms, formed) = channel();
                if rank == 0 && world > 1 {
                    let thread = std::thread::Builder::new().name("phalanx-welcome".into());
                    let (store, own) = (&store, &own);
                    let welcome =
                        thread.spawn_scoped(scope, move || store.welcome(own, world, &formed));
                    welcome.map_err(|error| Error::io("starting a thread", error))?;
                }
                let group = ProcessGroup::from_store(Arc::new(own.clone()), rank, world, options);
                drop(forms);
                group
            })
        };
        let formed = py.detach(form);
        let stopped = store.formed();
        let group = formed.map_err(|error| stopped.unwrap_or_else(|| raised(&error)))?;
        Ok(Group {
            group: Mutex::new(Some(group)),
            store: Some(store),
            rank,
            process: std::process::id(),
        })
    }

    /// Whether [`share`](Group::share) may succeed.
    fn shares(&self) -> PyResult<bool> {
        let group = self.get()?;
        Ok(group.world_size() > 1 && group.bucket::<u8>(1).is_registered())
    }

    /// Moves the `bytes` of the storage at `address` to memory that the other ranks map, which they read and write in
    /// place. The storage has been moved to shared memory, which no other process has seen. What is returned must be kept
    /// until the storage has been freed; nothing is where the memory stays as it is.
    fn share(&self, py: Python<'_>, address: usize, bytes: usize) -> PyResult<Option<Shared>> {
        if self.process != std::process::id() {
            return Ok(None);
        }
        let group = self.get()?;
        let memory = py.detach(|| {
            let start = NonNull::new(std::ptr::with_exposed_provenance_mut::<u8>(address))?;
            // SAFETY: PyTorch's shared memory is a mapping of its own, and the caller says the rest.
            unsafe { group.register(start, bytes) }
        });
        Ok(memory.map(|memory| Shared {
            memory: ManuallyDrop::new(memory),
            start: address,
            process: self.process,
            is_kept: AtomicBool::new(false),
        }))
    }

    fn all_reduce(&self, py: Python<'_>, data: Memory, op: &str, how: How) -> Begun {
        let (group, op) = (self.get()?, reduction(op)?);
        typed!(data.dtype, T => {
            // SAFETY: PyTorch's users leave a tensor alone that an operation has.
            let data = unsafe { data.bucket::<T>() };
            if let Some(group) = self.in_caller(&how)? {
                let mut data = data;
                return run(py, || group.all_reduce(&mut data, op));
            }
            Self::pending(group.all_reduce_async(data, op, how.call()))
        })
    }

    fn broadcast(&self, py: Python<'_>, data: Memory, root: RankOf, how: How) -> Begun {
        let group = self.get()?;
        typed!(data.dtype, T => {
            // SAFETY: as in `all_reduce`.
            let data = unsafe { data.bucket::<T>() };
            if let Some(group) = self.in_caller(&how)? {
                let mut data = data;
                return run(py, || group.broadcast(&mut data, root.0));
            }
            Self::pending(group.broadcast_async(data, root.0, how.call()))
        })
    }

    fn reduce(&self, py: Python<'_>, data: Memory, op: &str, root: RankOf, how: How) -> Begun {
        let (group, op) = (self.get()?, reduction(op)?);
        typed!(data.dtype, T => {
            // SAFETY: as in `all_reduce`.
            let data = unsafe { data.bucket::<T>() };
            if let Some(group) = self.in_caller(&how)? {
                let mut data = data;
                return run(py, || group.reduce(&mut data, op, root.0));
            }
            Self::pending(group.reduce_async(data, op, root.0, how.call()))
        })
    }

    fn all_gather(&self, py: Python<'_>, input: Memory, output: Memory, how: How) -> Begun {
        let group = self.get()?;
        typed!(same(&input, &output)?, T => {
            // SAFETY: as in `all_reduce`.
            let (input, output) = unsafe { (input.paired::<T>(&output), output.bucket::<T>()) };
            if let Some(group) = self.in_caller(&how)? {
                let (mut input, mut output) = (input, output);
                return run(py, || group.all_gather(&mut input, &mut output));
            }
            Self::pending(group.all_gather_async(input, output, how.call()))
        })
    }

    /// Of inputs with these `lengths`, by rank.
    fn all_gather_v(&self, input: Memory, lengths: Vec<usize>, output: Memory, how: How) -> Begun {
        let group = self.get()?;
        typed!(same(&input, &output)?, T => {
            // SAFETY: as in `all_reduce`.
            let (input, output) = unsafe { (input.paired::<T>(&output), output.bucket::<T>()) };
            Self::pending(group.all_gather_v_async(input, &lengths, output, how.call()))
        })
    }

    fn reduce_scatter(
        &self,
        py: Python<'_>,
        input: Memory,
        output: Memory,
        op: &str,
        how: How,
    ) -> Begun {
        let (group, op) = (self.get()?, reduction(op)?);
        typed!(same(&input, &output)?, T => {
            // SAFETY: as in `all_reduce`.
            let (input, output) = unsafe { (input.paired::<T>(&output), output.bucket::<T>()) };
            if let Some(group) = self.in_caller(&how)? {
                let (mut input, mut output) = (input, output);
                return run(py, || group.reduce_scatter(&mut input, &mut output, op));
            }
            Self::pending(group.reduce_scatter_async(input, output, op, how.call()))
        })
    }

    /// Into parts with these `lengths`, by rank.
    fn reduce_scatter_v(
        &self,
        input: Memory,
        lengths: Vec<usize>,
        output: Memory,
        op: &str,
        how: How,
    ) -> Begun {
        let (group, op) = (self.get()?, reduction(op)?);
        typed!(same(&input, &output)?, T => {
            // SAFETY: as in `all_reduce`.
            let (input, output) = unsafe { (input.paired::<T>(&output), output.bucket::<T>()) };
            Self::pending(group.reduce_scatter_v_async(input, &lengths, output, op, how.call()))
        })
    }

    /// The output is that of the root only.
    fn gather(&self, input: Memory, output: Option<Memory>, root: RankOf, how: How) -> Begun {
        let group = self.get()?;
        let dtype = output
            .as_ref()
            .map_or(Ok(input.dtype), |output| same(&input, output))?;
        typed!(dtype, T => {
            // SAFETY: as in `all_reduce`.
            let (input, output) = unsafe {
                match output {
                    Some(output) => (input.paired::<T>(&output), Some(output.bucket::<T>())),
                    None => (input.bucket::<T>(), None),
                }
            };
            Self::pending(group.gather_async(input, output, root.0, how.call()))
        })
    }

    /// The input is that of the root only.
    fn scatter(&self, input: Option<Memory>, output: Memory, root: RankOf, how: How) -> Begun {
        let group = self.get()?;
        let dtype = input
            .as_ref()
            .map_or(Ok(output.dtype), |input| same(input, &output))?;
        typed!(dtype, T => {
            // SAFETY: as in `all_reduce`.
            let (input, output) = unsafe {
                (input.map(|input| input.paired::<T>(&output)), output.bucket::<T>())
            };
            Self::pending(group.scatter_async(input, output, root.0, how.call()))
        })
    }

    fn all_to_all(&self, py: Python<'_>, input: Memory, output: Memory, how: How) -> Begun {
        let group = self.get()?;
        typed!(same(&input, &output)?, T => {
            // SAFETY: as in `all_reduce`.
            let (input, output) = unsafe { (input.paired::<T>(&output), output.bucket::<T>()) };
            if let Some(group) = self.in_caller(&how)? {
                let (mut input, mut output) = (input, output);
                return run(py, || group.all_to_all(&mut input, &mut output));
            }
            Self::pending(group.all_to_all_async(input, output, how.call()))
        })
    }

    /// Of parts with these lengths, by rank.
    fn all_to_all_v(
        &self,
        input: Memory,
        input_lengths: Vec<usize>,
        output: Memory,
        output_lengths: Vec<usize>,
        how: How,
    ) -> Begun {
        let group = self.get()?;
        typed!(same(&input, &output)?, T => {
            // SAFETY: as in `all_reduce`.
            let (input, output) = unsafe { (input.paired::<T>(&output), output.bucket::<T>()) };
            let (sent, received) = (&input_lengths, &output_lengths);
            Self::pending(group.all_to_all_v_async(input, sent, output, received, how.call()))
        })
    }

    fn send(&self, py: Python<'_>, data: Memory, to: RankOf, tag: Tag, how: How) -> Begun {
        let group = self.get()?;
        typed!(data.dtype, T => {
            // SAFETY: as in `all_reduce`.
            let data = unsafe { data.bucket::<T>() };
            if let Some(group) = self.in_caller(&how)? {
                return run(py, || group.send(&data, Peer::rank(to.0).tag(tag.0)));
            }
            Self::pending(group.send_async(data, Peer::rank(to.0).tag(tag.0), how.call()))
        })
    }

    /// From any rank where `from` is not given.
    fn recv(
        &self,
        py: Python<'_>,
        data: Memory,
        from: Option<RankOf>,
        tag: Tag,
        how: How,
    ) -> Begun {
        let group = self.get()?;
        let from = from
            .map_or_else(Peer::any, |from| Peer::rank(from.0))
            .tag(tag.0);
        typed!(data.dtype, T => {
            // SAFETY: as in `all_reduce`.
            let data = unsafe { data.bucket::<T>() };
            if let Some(group) = self.in_caller(&how)? {
                let mut data = data;
                let sender = py.detach(|| group.recv(&mut data, from));
                return Ok(Some(Pending::received(sender.map_err(|error| raised(&error))?)));
            }
            Ok(Some(Pending::receive(group.recv_async(data, from, how.call()))))
        })
    }

    fn barrier(&self, py: Python<'_>, how: How) -> Begun {
        if let Some(group) = self.in_caller(&how)? {
            return run(py, || group.barrier());
        }
        Self::pending(self.get()?.barrier_async(how.call()))
    }

    /// Names the ranks that do not come within `timeout` seconds.
    fn monitored_barrier(&self, py: Python<'_>, timeout: f64) -> PyResult<()> {
        let group = self.get()?;
        let result = py.detach(|| group.monitored_barrier(span(timeout)));
        result.map_err(|error| raised(&error))
    }

    /// Ends all operations of the group on all ranks, with an error that says `cause`.
    fn abort(&self, py: Python<'_>, cause: &str) -> PyResult<()> {
        let group = self.get()?;
        py.detach(|| group.abort(cause));
        Ok(())
    }

    /// Whether an operation has failed, on this rank or another one.
    fn has_failed(&self, py: Python<'_>) -> PyResult<bool> {
        let group = self.get()?;
        Ok(py.detach(|| group.check().is_err()))
    }

    /// The ranks whose loss has ended the group; nothing where it works, or has ended for another reason.
    fn lost_ranks(&self, py: Python<'_>) -> PyResult<Option<Vec<usize>>> {
        let group = self.get()?;
        let ended = py.detach(|| group.check().err());
        Ok(ended.as_ref().and_then(lost))
    }

    /// Finishes what was issued and leaves the group; ranks that still wait for this one then get an error.
    fn leave(&self, py: Python<'_>) {
        // Threads of the group may ask PyTorch's store.
        py.detach(|| {
            let group = self.lock().take();
            drop(group);
            if let Some(store) = &self.store {
                store.close();
            }
        });
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        if self.process == std::process::id() {
            return Python::attach(|py| self.leave(py));
        }
        // A forked process has none of the group's threads.
        std::mem::forget(self.lock().take());
    }
}

/// The first rank makes the secret.
fn agree_on_token(store: &TorchStore) -> Result<Token> {
    let refused = |error: phalanx_wire::Error| Error::usage(format!("the group's token: {error}"));
    let own = Token::generate().map_err(refused)?;
    let agreed = store.compare_set(TOKEN_KEY, None, own.to_hex().as_bytes())?;
    Token::from_hex(&String::from_utf8_lossy(&agreed)).map_err(refused)
}
