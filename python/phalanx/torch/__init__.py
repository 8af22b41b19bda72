"""The ``torch.distributed`` back end ``"phalanx"``: for CPU tensors, and for those of a GPU by copies in the host's memory.

    torch.distributed.init_process_group("phalanx")

PyTorch finds it by its name.
"""

import atexit
import concurrent.futures
import contextlib
import fcntl
import os
import queue
import re
import sys
import threading
import time
from datetime import timedelta

import torch
import torch.distributed as dist
import torch._C._distributed_c10d as c10d
from torch.multiprocessing.reductions import StorageWeakRef

from phalanx._phalanx import Group, new_handle

__all__ = ["PhalanxBackend", "RankLostError", "empty", "lost_ranks", "register", "replace_gloo"]

_NAME = "phalanx"

# The names that PyTorch calls changed in 2.14; an earlier one takes no back end that is written in Python.
if not all(hasattr(c10d.Backend, name) for name in ("all_gather_single", "all_to_all_single", "reduce_scatter_single", "reconfigure")):
    raise ImportError(f"phalanx needs PyTorch 2.14 or 2.15, and this is {torch.__version__}")


class RankLostError(dist.DistBackendError):
    """Another rank has died, or has ended while data was expected from it. ``lost_ranks`` are those that are known, as
    they are numbered in the group of the operation.
    """

    def __init__(self, message="", lost_ranks=()):
        super().__init__(message)
        self.lost_ranks = list(lost_ranks)


def lost_ranks(error):
    """The ranks whose loss has led to ``error``, also where it came out of DDP's backward or a future, which keep the text of
    an error only. Nothing where it is another error; an empty list where it is not known which ranks. Ask before the group
    is formed again or destroyed.
    """
    causes = [error]
    # Causes may be a circle.
    for cause in causes:
        if isinstance(cause, RankLostError):
            return list(cause.lost_ranks)
        more = (cause.__cause__, cause.__context__, *getattr(cause, "exceptions", ()))
        causes += [one for one in more if one is not None and all(one is not other for other in causes)]
    if any(isinstance(cause, RuntimeError) for cause in causes):
        # The default group is the first.
        for backend in list(_ALIVE):
            lost = backend._group.lost_ranks() if backend._pid == os.getpid() else None
            if lost is not None:
                return lost
    return None


# The types whose elements Phalanx reduces. All others are moved as bytes.
_NATIVE = {
    torch.float32: "f32",
    torch.float64: "f64",
    torch.float16: "f16",
    torch.bfloat16: "bf16",
    torch.int32: "i32",
    torch.int64: "i64",
    torch.uint8: "u8",
    torch.int8: "i8",
    torch.int16: "i16",
    torch.uint16: "u16",
    torch.uint32: "u32",
    torch.uint64: "u64",
}

_SUM = dist.ReduceOp.SUM
_REDUCTIONS = {
    dist.ReduceOp.SUM: "sum",
    dist.ReduceOp.AVG: "mean",
    dist.ReduceOp.MIN: "min",
    dist.ReduceOp.MAX: "max",
    dist.ReduceOp.PRODUCT: "product",
    dist.ReduceOp.BAND: "bit_and",
    dist.ReduceOp.BOR: "bit_or",
    dist.ReduceOp.BXOR: "bit_xor",
}

# Of two truth values; a sum is true where one is.
_OF_BOOL = {"sum": "max", "max": "max", "bit_or": "max", "product": "min", "min": "min", "bit_and": "min", "bit_xor": "bit_xor"}


def _check(tensor):
    """Refuses what is not in this process's memory, or not dense."""
    if tensor.device.type != "cpu":
        raise ValueError(f"this operation of the phalanx back end takes tensors of the CPU or of one GPU, and one is on {tensor.device}")
    if tensor.layout != torch.strided:
        raise ValueError(f"this operation of the phalanx back end takes dense tensors, and this one is {tensor.layout}")
    return tensor.detach()


def _memory(tensor):
    """A contiguous tensor as the compiled part takes it."""
    shared = _shared(tensor) if _SHARED else None
    name = _NATIVE.get(tensor.dtype)
    if name is not None:
        return (tensor.data_ptr(), tensor.numel(), name, tensor, shared)
    return (tensor.data_ptr(), tensor.numel() * tensor.element_size(), "u8", tensor, shared)


def _quick(tensor):
    """The memory of a tensor that is taken as it is; nothing where it has to be looked at."""
    name = _NATIVE.get(tensor.dtype)
    if name is None or not tensor.is_cpu or tensor.layout is not torch.strided or tensor.is_neg() or not tensor.is_contiguous():
        return None
    address = tensor.data_ptr()
    if address % tensor.itemsize:
        return None
    # The storage, which the program may take from the tensor meanwhile.
    return (address, tensor.numel(), name, tensor.untyped_storage(), _shared(tensor) if _SHARED else None)


# Storages that were moved to memory that the other ranks map, by address: a `_Moved`. Changed with `_MOVING` held.
_SHARED = {}
_MOVING = threading.Lock()

# Smaller ones are not worth pages of their own.
_LEAST_SHARED = 1 << 16

# After this many that were moved for one operation only, none is moved any more.
_MOST_WASTED = 1000
_wasted = 0


class _Moved:
    """A storage that was moved, or that could not be: then there is no ``memory``."""

    __slots__ = ("storage", "start", "memory", "uses")

    def __init__(self, storage, memory):
        # While there is a weak reference, no other storage has the address.
        self.storage = StorageWeakRef(storage)
        self.start = storage.data_ptr()
        self.memory = memory
        self.uses = 0


def _shared(tensor):
    """What keeps the memory of ``tensor`` that the other ranks map; nothing where they do not."""
    storage = tensor.untyped_storage()
    found = _SHARED.get(storage._cdata)
    if found is None or found.start != storage.data_ptr():
        return None
    found.uses += 1
    return found.memory


def _purge():
    """Gives the memory of storages back that have been freed."""
    global _wasted
    for address, found in list(_SHARED.items()):
        if found.storage.expired():
            _wasted = _wasted + 1 if found.uses < 2 else 0
            del _SHARED[address]


def _share(backend, tensor):
    """Moves the storage of ``tensor``, which nothing else uses now, to memory that the other ranks map, if it is as long
    as the tensor and that is possible.
    """
    # A forked process has the memory of the one that forked.
    if not backend._shares or backend._pid != os.getpid():
        return
    storage = tensor.untyped_storage()
    bytes = storage.nbytes()
    if tensor.device.type != "cpu" or not _LEAST_SHARED <= bytes <= tensor.nbytes or storage._cdata in _SHARED:
        return
    if storage.is_shared() or not storage.resizable():
        return
    with _MOVING:
        _purge()
        if _wasted > _MOST_WASTED or not backend._group.shares():
            return
        memory = None
        try:
            # It gets pages of its own, and a file of them.
            file, _ = storage._share_fd_cpu_()
        except RuntimeError:
            # /dev/shm has no room, or there are too many files. It is not tried again, when others may look at the storage.
            pass
        else:
            memory = backend._group.share(storage.data_ptr(), bytes)
        if memory is not None:
            # The file is not the memory any more: an empty one, which cannot grow, so that it is an error to send the
            # storage to another process.
            empty = os.memfd_create("phalanx-moved", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            fcntl.fcntl(empty, fcntl.F_ADD_SEALS, fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK)
            os.dup2(empty, file, inheritable=False)
            os.close(empty)
        _SHARED[storage._cdata] = _Moved(storage, memory)


def empty(*size, dtype=None, group=None):
    """Like ``torch.empty``, for CPU tensors that many operations use: the other ranks of ``group`` read and write the memory
    in place, if all of them are on one host. Their collectives copy nothing, and large ones take a third of the time.

    Not all ranks need to call it. The tensor cannot be resized, and sending it through ``torch.multiprocessing`` raises an
    error: send a ``clone()``. A forked process shares its memory. After a failed operation make a new one: a rank that is
    late may still write to it.
    """
    tensor = torch.empty(*size, dtype=dtype, device="cpu")
    group = dist.distributed_c10d._get_default_group() if group is None else group
    backend = group._get_backend(torch.device("cpu"))
    if not isinstance(backend, PhalanxBackend):
        raise ValueError(f"the back end of the group for CPU tensors is {backend.name()}, not phalanx")
    _share(backend, tensor)
    return tensor


def _calls_reducer():
    """Whether backward itself calls the operation that asks, as the C++ of DistributedDataParallel does."""
    frame = sys._getframe(1).f_back
    if frame is not None and frame.f_code.co_name == "allreduce":
        # Of `_anywhere` or `_Group`.
        frame = frame.f_back
    return frame is None or frame.f_code.co_name == "_engine_run_backward"


# `_exception_logger` wraps them.
_BLOCKING = [dist.send.__wrapped__.__code__, dist.recv.__wrapped__.__code__]


def _is_plain(tensor):
    """Whether the elements lie one behind the other, as they are, at addresses for their type."""
    is_as_stored = not (tensor.is_conj() or tensor.is_neg())
    return is_as_stored and tensor.is_contiguous() and tensor.data_ptr() % tensor.element_size() == 0


def _source(tensor):
    """The elements of a tensor, contiguous."""
    tensor = _check(tensor)
    return tensor if _is_plain(tensor) else _like(tensor).copy_(tensor)


def _like(tensor):
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")


def _target(tensor, after):
    """A contiguous tensor to write, from which ``after`` copies to ``tensor`` unless it is the same."""
    tensor = _check(tensor)
    if _is_plain(tensor):
        return tensor
    into = _like(tensor)
    after.append(lambda: tensor.copy_(into))
    return into


def _in_place(tensor, after):
    """A contiguous tensor with the elements of ``tensor``, to which ``after`` copies them back."""
    into = _target(tensor, after)
    if after:
        into.copy_(tensor)
    return into


def _name_of(op):
    """The name of a reduction."""
    name = _REDUCTIONS.get(getattr(op, "op", op))
    if name is None:
        raise ValueError(f"the phalanx back end has no reduction {op}; multiply before the call instead of PREMUL_SUM")
    return name


def _as_reduced(tensor, name):
    """A tensor of a type that Phalanx reduces, the reduction for it, and what gives the elements back: nothing where
    they share the memory of ``tensor``.
    """
    dtype = tensor.dtype
    if dtype in _NATIVE:
        return tensor, name, None
    if dtype == torch.bool:
        if name not in _OF_BOOL:
            raise ValueError("the mean of bool tensors is not defined")
        if name == "bit_xor":
            # A byte that is neither 0 nor 1 is true too.
            return tensor.view(torch.uint8).ne(0).view(torch.uint8), name, lambda done: done.view(torch.bool)
        return tensor.view(torch.uint8), _OF_BOOL[name], None
    if dtype.is_complex:
        if name not in ("sum", "mean"):
            raise ValueError(f"the {name} of {dtype} is not defined for the phalanx back end; use SUM or AVG")
        return torch.view_as_real(tensor), name, None
    raise ValueError(f"the phalanx back end does not reduce {dtype}; convert it before the call")


def _flat(tensors):
    """The elements of all tensors, one behind the other."""
    tensors = [_check(tensor).reshape(-1) for tensor in tensors]
    if not tensors:
        raise ValueError("the list of tensors is empty")
    if any(tensor.dtype != tensors[0].dtype for tensor in tensors):
        raise ValueError(f"the tensors of one list must have the same type, not {sorted({str(t.dtype) for t in tensors})}")
    return torch.cat(tensors)


def _spread(tensors, after):
    """A tensor of all elements of ``tensors``, from which ``after`` copies to them."""
    tensors = [_check(tensor) for tensor in tensors]
    if not tensors:
        raise ValueError("the list of tensors is empty")
    flat = torch.empty(sum(t.numel() for t in tensors), dtype=tensors[0].dtype, device="cpu")
    parts = flat.split([tensor.numel() for tensor in tensors])

    def copy():
        for tensor, part in zip(tensors, parts):
            tensor.copy_(part.view(tensor.shape))

    after.append(copy)
    return flat


def _alike(a, b):
    """Refuses an input and an output of different types."""
    if a.dtype != b.dtype:
        raise ValueError(f"the input is {a.dtype} and the output {b.dtype}; they must have the same type")


def _each_as(tensors, tensor):
    """Refuses a list for one part of each rank where a part differs from this rank's in length."""
    for part in tensors:
        _alike(part, tensor)
        if part.numel() != tensor.numel():
            raise ValueError(f"a tensor of the list has {part.numel()} elements and the other tensor {tensor.numel()}; all must have as many")


def _lengths(tensors):
    """How many of the units of `_memory` each tensor has."""
    unit = 1 if tensors[0].dtype in _NATIVE else tensors[0].element_size()
    return [tensor.numel() * unit for tensor in tensors]


# Held for a moment only.
_FUTURES = threading.Lock()


class _Work(dist.Work):
    """An operation in flight, made of the ``parts`` that run; ``after`` gives the result to the caller's tensors.

    Of those that C++ has asked for, as a group of several back ends does, PyTorch passes on ``wait`` and ``get_future`` only.
    """

    __slots__ = ("_waiters", "_parts", "_result", "_after", "_failed", "_future", "_finishing", "_sides")

    def __init__(self, waiters, parts, result, after, sides=()):
        super().__init__()
        self._waiters = waiters
        # Without those that are over.
        self._parts = [part for part in parts if part is not None]
        self._result = result
        self._after = after
        self._failed = self._future = None
        self._finishing = threading.Lock() if after else None
        # Streams of GPUs on which the tensors are written.
        self._sides = sides

    def wait(self, timeout=None):
        seconds = timeout.total_seconds() if timeout is not None else 0
        until = time.monotonic() + seconds if seconds > 0 else None
        for part in self._parts:
            part.wait(None if until is None else max(0.0, until - time.monotonic()))
        if self._after or self._failed:
            self._finish()
        for side in self._sides:
            torch.accelerator.current_stream(side.device).wait_stream(side)
        return True

    def synchronize(self):
        self.wait()

    block_current_stream = synchronize

    def is_completed(self):
        if not all(part.is_done() for part in self._parts):
            return False
        if self._after or self._sides:
            try:
                self.wait()
            except Exception:  # `wait` and `exception` give it.
                pass
        return True

    def is_success(self):
        return self.is_completed() and self.exception() is None

    def exception(self):
        if self.is_completed():
            try:
                self.wait()
            except Exception as error:
                return error
        return None

    def result(self):
        self.wait()
        # As Gloo, whose work has one list.
        is_nested = isinstance(self._result, list) and self._result and isinstance(self._result[0], list)
        return self._result[0] if is_nested else self._result

    def _source_rank(self):
        self.wait()
        sender = self._parts[0].sender() if self._parts else None
        if sender is None:
            raise RuntimeError("only a receive has a source rank")
        return sender

    def _finish(self):
        with self._finishing:
            if self._failed is None:
                try:
                    # The tensors of a caller in this mode are written in it only.
                    with torch.inference_mode():
                        for step in self._after:
                            step()
                    self._after = []
                except Exception as error:
                    self._failed = error
            if self._failed is not None:
                raise self._failed

    def get_future(self):
        with _FUTURES:
            future, done = self._future, None
            if future is None:
                done = torch.futures.Future(devices=[side.device for side in self._sides])
                # In C++ a future with an exception has succeeded, with the exception as its value; not the next one.
                future = self._future = done.then(lambda done: done.wait())
        if done is not None:
            if self.is_completed():
                self._complete(done)
            else:
                self._waiters.complete(self, done)
        return future

    def _complete(self, future):
        with contextlib.ExitStack() as streams:
            for side in self._sides:
                torch.accelerator.set_device_index(side.device.index)
                streams.enter_context(_entered(side))
            try:
                self.wait()
            except Exception as error:  # For the caller, who waits for the future.
                future.set_exception(error)
            else:
                future.set_result(self.result())


def _entered(stream):
    """``stream`` for a ``with``: PyTorch keeps the stream that was current before in the object, whatever the thread."""
    return torch.Stream(stream_id=stream.stream_id, device_index=stream.device_index, device_type=stream.device_type)


class _Copied:
    """A part of a `_Work`: an operation on copies of tensors of a GPU, which starts when the copies are there."""

    def __init__(self, started):
        self._started = started

    def wait(self, limit=None):
        until = None if limit is None else time.monotonic() + limit
        try:
            work = self._started.result(limit)
        except concurrent.futures.TimeoutError:
            raise dist.DistBackendError(f"the operation is not over after the {limit:g} s that wait was given; it continues") from None
        work.wait(None if until is None else timedelta(seconds=max(1e-3, until - time.monotonic())))

    def is_done(self):
        return self._started.done() and (self._started.exception() is not None or self._started.result().is_completed())

    def sender(self):
        return self._started.result()._source_rank()


class _Starts:
    """The thread that starts operations on copies of tensors of a GPU, in the order of the calls."""

    def __init__(self):
        self._queue = queue.Queue()
        self._thread = threading.Thread(target=self._run, name="phalanx-start", daemon=True)
        self._thread.start()

    def add(self, start):
        """A future of what ``start`` returns."""
        started = concurrent.futures.Future()
        self._queue.put((started, start))
        return started

    def _run(self):
        for started, start in iter(self._queue.get, None):
            try:
                started.set_result(start())
            except BaseException as error:  # For who waits for it.
                started.set_exception(error)
            del started, start
            self._queue.task_done()

    def reach(self):
        """Waits until all are started; whether this is another thread than theirs."""
        if threading.current_thread() is self._thread:
            return False
        self._queue.join()
        return True

    def end(self):
        self._queue.put(None)
        self._thread.join()


class _Waiters:
    """Threads that complete futures: as many as there are futures at a time, since what is called then may wait for
    another one, and a message may never come.
    """

    def __init__(self):
        self._lock = threading.Lock()
        self._works = queue.SimpleQueue()
        self._threads = []
        self._idle = 0

    def complete(self, work, future):
        with self._lock:
            if self._idle > 0:
                self._idle -= 1
            else:
                thread = threading.Thread(target=self._run, name="phalanx-future", daemon=True)
                thread.start()
                self._threads.append(thread)
            self._works.put((work, future))

    def _run(self):
        for work, future in iter(self._works.get, None):
            work._complete(future)
            del work, future
            with self._lock:
                self._idle += 1

    def end(self):
        """When all operations are over."""
        with self._lock:
            threads, self._threads = self._threads, []
            for _ in threads:
                self._works.put(None)
        for thread in threads:
            if thread is not threading.current_thread():
                thread.join()


class _NoGroup:
    """In the place of the compiled part of a group that ``_reconfigure`` has not formed."""

    def __getattr__(self, name):
        raise RuntimeError("process group not formed yet; call torch.distributed._reconfigure")

    def abort(self, cause):
        pass

    def leave(self):
        pass

    def has_failed(self):
        return False

    def lost_ranks(self):
        return None


class PhalanxBackend(c10d.Backend):
    """Made by ``torch.distributed.init_process_group("phalanx")``."""

    def __init__(self, store, rank, size, timeout, is_formed=True, group=None):
        super().__init__(rank, size)
        self._me = rank
        self._world = size
        self._default = None
        self._forming = timeout
        self._group = _NoGroup()
        # Whether ranks map memory of each other.
        self._shares = False
        # Of a group that is formed by `reconfigure`, as often as its ranks change.
        self._store = None if is_formed or group else store
        self._handle = None if is_formed or group else new_handle()
        self._uuids = set()
        if group is not None:
            self._group, self._shares = group, group.shares()
        elif is_formed:
            self._form(store, rank, size, timeout)
        self._options = c10d.Backend.Options(_NAME, timeout)
        self._sequence = 0
        # The thread that coalesces, and what it has begun.
        self._coalesced = None
        # Of operations on tensors of GPUs: the thread, and two streams for each GPU.
        self._starts = None
        self._streams = {}
        self._waiters = _Waiters()
        self._pid = os.getpid()
        # C++ may have the only other reference, which does not keep what is written in Python.
        _ALIVE.append(self)

    def _form(self, store, rank, size, timeout, handles=()):
        seconds = timeout.total_seconds(), self._forming.total_seconds()
        self._group = Group(store, rank, size, seconds, torch.get_num_threads(), handles)
        self._me, self._world = rank, size
        self._shares = self._group.shares()

    # What the back end can do. A property that is not overridden calls itself without end in PyTorch 2.15.

    @property
    def supports_splitting(self):
        return True

    @property
    def supports_coalescing(self):
        return False

    @property
    def supports_shrinking(self):
        return False

    @property
    def supports_reconfigure(self):
        return self._store is not None

    @property
    def supports_window(self):
        return False

    @property
    def _supports_time_estimate(self):
        return False

    # As 2.14 calls it.
    supports_time_estimate = _supports_time_estimate

    @property
    def options(self):
        return self._options

    def getBackendName(self):
        return _NAME

    def set_timeout(self, timeout):
        self._default = timeout.total_seconds()

    _set_default_timeout = set_timeout

    def _set_sequence_number_for_group(self):
        self._sequence = 0

    def _get_sequence_number_for_group(self):
        return self._sequence

    # Internals.

    def _how(self, opts):
        """The deadline of a collective that begins, and whether its caller runs it: who waits for it at once, or a rank alone."""
        self._sequence += 1
        seconds = opts.timeout.total_seconds()
        runs = not opts.asyncOp and not self._collects() or self._world == 1
        return (seconds if seconds > 0 else self._default, self._reach_starts() and runs)

    def _reach_starts(self):
        """Waits until the operations before are started; whether this is a thread of the program."""
        return self._starts is None or self._starts.reach()

    def _work(self, parts, result, after, sides=()):
        work = _Work(self._waiters, parts, result, after, sides)
        if not self._collects():
            return work
        self._coalesced[1].append(work)
        # Nobody may wait for it yet.
        return None

    def _collects(self):
        coalesced = self._coalesced
        return coalesced is not None and coalesced[0] == threading.get_ident()

    def start_coalescing(self):
        self._coalesced = (threading.get_ident(), [])

    def end_coalescing(self):
        if not self._collects():
            raise RuntimeError("endCoalescing without a startCoalescing of this thread")
        (_, works), self._coalesced = self._coalesced, None
        parts = [part for work in works for part in work._parts]
        sides = tuple({side for work in works for side in work._sides})
        return self._work(parts, [work._result for work in works], [work._finish for work in works if work._after], sides)

    def _stage(self, name, args):
        """The operation ``name`` on copies of tensors of a GPU in pinned memory. Its copies wait for the caller's stream, and the
        stream of who waits for the operation waits for the copies back.
        """
        device, pairs = _first(args[:2]).device, []
        caller = torch.accelerator.current_stream(device)
        if caller.is_capturing():
            raise RuntimeError("an operation of the phalanx back end cannot be part of a graph that is captured")

        def copy_of(tensor):
            if tensor.device != device:
                raise ValueError(f"the tensors of one operation must be on one device, and these are on {device} and {tensor.device}")
            if tensor.layout != torch.strided:
                raise ValueError(f"the phalanx back end takes dense tensors of a GPU, and this one is {tensor.layout}")
            pairs.append((tensor.detach(), torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True)))
            return pairs[-1][1]

        moved = [_mapped(copy_of, args[0])]
        read = written = pairs[:]
        moved += [_mapped(copy_of, one) for one in args[1:]]
        root = getattr(args[-1], "rootRank", None)
        if isinstance(args[1], (list, torch.Tensor)):
            read = pairs[len(written) :]
        elif name == "recv" or name == "broadcast" and root != self._me:
            read = []
        elif name == "send" or name == "broadcast" or name == "reduce" and root != self._me:
            written = []
        if device not in self._streams:
            self._streams[device] = torch.Stream(device=device), torch.Stream(device=device)
        there, back = self._streams[device]
        there.wait_stream(caller)
        with _entered(there):
            for tensor, host in read:
                host.copy_(tensor, non_blocking=True)
                tensor.record_stream(there)
            copied = there.record_event()

        def start():
            torch.accelerator.set_device_index(device.index)
            copied.synchronize()
            return getattr(self, name)(*moved)

        def copy_back():
            with _entered(back):
                for tensor, host in written:
                    tensor.copy_(host, non_blocking=True)
                    tensor.record_stream(back)

        self._starts = self._starts or _Starts()
        result = args[0] if isinstance(args[0], list) else [args[0]]
        return self._work([_Copied(self._starts.add(start))], result, [copy_back], (back,))

    def _reduce(self, tensor, op, after):
        """The memory to reduce, and the name of the reduction."""
        name = "sum" if op == _SUM else _name_of(op)
        memory = _quick(tensor)
        if memory is not None:
            return memory, name
        whole = _in_place(tensor, after)
        reduced, name, back = _as_reduced(whole, name)
        if back is not None:
            after.insert(0, lambda: whole.copy_(back(reduced)))
        return _memory(reduced), name

    # Collectives.

    def broadcast(self, tensors, opts):
        after = []
        data = _quick(tensors[0]) or _memory(_in_place(tensors[0], after))
        part = self._group.broadcast(data, opts.rootRank, self._how(opts))
        return self._work([part], tensors, after)

    def allreduce(self, tensors, opts):
        if tensors[0].layout == torch.sparse_coo:
            return self.allreduce_sparse(tensors, opts)
        if self._shares and _calls_reducer():
            _share(self, tensors[0])
        after = []
        data, name = self._reduce(tensors[0], opts.reduceOp, after)
        part = self._group.all_reduce(data, name, self._how(opts))
        return self._work([part], tensors, after)

    def allreduce_coalesced(self, tensors, opts):
        after, parts = [], []
        kinds = {}
        for tensor in tensors:
            kinds.setdefault(tensor.dtype, []).append(tensor)
        for kind in kinds.values():
            steps = []
            flat = kind[0]
            if len(kind) > 1:
                flat = _spread(kind, steps)
                torch.cat([_check(tensor).reshape(-1) for tensor in kind], out=flat)
            before = []
            data, name = self._reduce(flat, opts.reduceOp, before)
            parts.append(self._group.all_reduce(data, name, self._how(opts)))
            after += before + steps
        return self._work(parts, tensors, after)

    def allreduce_sparse(self, tensors, opts):
        """The sum of sparse tensors: all ranks gather the elements of all, and add them by rank."""
        if _name_of(opts.reduceOp) != "sum":
            raise ValueError("the phalanx back end reduces sparse tensors by SUM only")
        tensor = tensors[0]
        if tensor.layout != torch.sparse_coo:
            raise ValueError(f"the sparse all-reduce takes sparse COO tensors, and this one is {tensor.layout}")
        if not tensor.is_cpu:
            raise ValueError(f"the sparse all-reduce takes tensors of the CPU, and this one is on {tensor.device}")
        own = tensor.coalesce()
        indices, values = own.indices().contiguous(), own.values().contiguous()
        counts = torch.empty(self._world, dtype=torch.int64, device="cpu")
        count = torch.tensor([values.shape[0]], device="cpu")
        _Work(self._waiters, [self._group.all_gather(_memory(count), _memory(counts), self._how(opts))], None, []).wait()
        counts = counts.tolist()
        row = values.shape[1:].numel()
        all_values = values.new_empty((sum(counts), *values.shape[1:]))
        all_indices = torch.empty(sum(counts), indices.shape[0], dtype=torch.int64, device="cpu")
        turned = indices.t().contiguous()
        unit = 1 if values.dtype in _NATIVE else values.element_size()
        parts = [
            self._group.all_gather_v(_memory(turned), [n * indices.shape[0] for n in counts], _memory(all_indices), self._how(opts)),
            self._group.all_gather_v(_memory(values), [n * row * unit for n in counts], _memory(all_values), self._how(opts)),
        ]

        def add():
            total = torch.sparse_coo_tensor(all_indices.t(), all_values, tensor.shape).coalesce()
            tensor.copy_(total)

        return self._work(parts, tensors, [add])

    def reduce(self, tensors, opts):
        after = []
        data, name = self._reduce(tensors[0], opts.reduceOp, after)
        part = self._group.reduce(data, name, opts.rootRank, self._how(opts))
        if self._me != opts.rootRank:
            after = []
        return self._work([part], tensors, after)

    def _gathered(self, output, lengths, tensor, opts):
        """An all-gather of ``tensor`` into the contiguous ``output``, which has parts of ``lengths``."""
        _alike(tensor, output)
        source = _source(tensor)
        if len(set(lengths)) == 1:
            return self._group.all_gather(_memory(source), _memory(output), self._how(opts))
        return self._group.all_gather_v(_memory(source), lengths, _memory(output), self._how(opts))

    def allgather(self, outputs, inputs, opts):
        after, (parts_of, tensor) = [], (outputs[0], inputs[0])
        flat = _spread(parts_of, after)
        part = self._gathered(flat, _lengths(parts_of), tensor, opts)
        return self._work([part], outputs, after)

    def all_gather_single(self, output, tensor, opts):
        return self.all_gather_single_coalesced([output], [tensor], opts)

    def allgather_coalesced(self, outputs, inputs, opts):
        after, parts = [], []
        for at, tensor in enumerate(inputs):
            of_ranks = [tensors[at] for tensors in outputs]
            flat = _spread(of_ranks, after)
            parts.append(self._gathered(flat, _lengths(of_ranks), tensor, opts))
        return self._work(parts, outputs, after)

    def all_gather_single_coalesced(self, outputs, inputs, opts):
        after, parts = [], []
        for output, tensor in zip(outputs, inputs):
            _alike(tensor, output)
            into = _quick(output) or _memory(_target(output, after))
            parts.append(self._group.all_gather(_quick(tensor) or _memory(_source(tensor)), into, self._how(opts)))
        return self._work(parts, outputs, after)

    def gather(self, outputs, inputs, opts):
        after, into = [], None
        if self._me == opts.rootRank:
            _each_as(outputs[0], inputs[0])
            into = _memory(_spread(outputs[0], after))
        part = self._group.gather(_memory(_source(inputs[0])), into, opts.rootRank, self._how(opts))
        return self._work([part], outputs, after)

    def scatter(self, outputs, inputs, opts):
        after = []
        into, source = _target(outputs[0], after), None
        if self._me == opts.rootRank:
            _each_as(inputs[0], outputs[0])
            source = _memory(_flat(inputs[0]))
        part = self._group.scatter(source, _memory(into), opts.rootRank, self._how(opts))
        return self._work([part], outputs, after)

    def _scattered(self, output, whole, lengths, opts, after):
        """A reduce-scatter of the contiguous ``whole``, which has parts of ``lengths``."""
        _alike(whole, output)
        name = _name_of(opts.reduceOp)
        source, kind, _ = _as_reduced(whole, name)
        into = _target(output, after)
        target, _, back = _as_reduced(into, name)
        if back is not None:
            after.insert(0, lambda: into.copy_(back(target)))
        # As many as two numbers for one complex one.
        factor = source.numel() // whole.numel() if whole.numel() else 1
        how = self._how(opts)
        if lengths is None or len(set(lengths)) == 1:
            return self._group.reduce_scatter(_memory(source), _memory(target), kind, how)
        lengths = [length * factor for length in lengths]
        return self._group.reduce_scatter_v(_memory(source), lengths, _memory(target), kind, how)

    def reduce_scatter(self, outputs, inputs, opts):
        after = []
        lengths = [tensor.numel() for tensor in inputs[0]]
        part = self._scattered(outputs[0], _flat(inputs[0]), lengths, opts, after)
        return self._work([part], outputs, after)

    def reduce_scatter_single(self, output, tensor, opts):
        return self.reduce_scatter_single_coalesced([output], [tensor], opts)

    def reduce_scatter_single_coalesced(self, outputs, inputs, opts):
        after, parts = [], []
        for output, tensor in zip(outputs, inputs):
            steps = []
            parts.append(self._scattered(output, _source(tensor), None, opts, steps))
            after += steps
        return self._work(parts, outputs, after)

    def all_to_all_single(self, output, tensor, output_splits, input_splits, opts):
        after = []
        _alike(tensor, output)
        source, into = _source(tensor), _target(output, after)
        if not output_splits and not input_splits and source.numel() == into.numel():
            self._rows([], source)
            part = self._group.all_to_all(_memory(source), _memory(into), self._how(opts))
        else:
            sent, received = self._rows(input_splits, source), self._rows(output_splits, into)
            part = self._group.all_to_all_v(_memory(source), sent, _memory(into), received, self._how(opts))
        return self._work([part], [output], after)

    def _rows(self, splits, whole):
        """The lengths of ``splits``, rows of ``whole``; of as many rows for each rank where there are none."""
        rows = whole.shape[0] if whole.dim() else 1
        if not splits:
            if rows % self._world:
                raise ValueError(f"the {rows} rows of the tensor cannot be cut into {self._world} equal parts; give the split sizes")
            splits = [rows // self._world] * self._world
        if sum(splits) != rows or min(splits) < 0:
            raise ValueError(f"the split sizes {list(splits)} must be at least 0 and add up to the {rows} rows of the tensor")
        row = _memory(whole)[1] // rows if rows else 0
        return [split * row for split in splits]

    def alltoall(self, outputs, inputs, opts):
        after = []
        whole, into = _flat(inputs), _spread(outputs, after)
        _alike(whole, into)
        sent, received = _lengths(inputs), _lengths(outputs)
        how = self._how(opts)
        part = self._group.all_to_all_v(_memory(whole), sent, _memory(into), received, how)
        return self._work([part], outputs, after)

    # Messages.

    def _how_message(self):
        """As `_how`: ``torch.distributed.send`` and ``recv`` wait at once for the message that they begin."""
        frame = sys._getframe(1).f_back
        frame = frame and frame.f_back
        waits = frame is not None and any(frame.f_code is code for code in _BLOCKING) and not self._collects()
        return (self._default, self._reach_starts() and waits)

    def send(self, tensors, to, tag):
        if not (tensors[0].is_cpu or tensors[0].is_meta):
            return self._stage("send", (tensors, to, tag))
        data = _quick(tensors[0]) or _memory(_source(tensors[0]))
        part = self._group.send(data, to, tag, self._how_message())
        return self._work([part], tensors, [])

    def recv(self, tensors, source, tag):
        if not (tensors[0].is_cpu or tensors[0].is_meta):
            return self._stage("recv", (tensors, source, tag))
        after = []
        into = _quick(tensors[0]) or _memory(_target(tensors[0], after))
        part = self._group.recv(into, source, tag, self._how_message())
        return self._work([part], tensors, after)

    def recv_anysource(self, tensors, tag):
        return self.recv(tensors, None, tag)

    # Barriers.

    def barrier(self, opts):
        return self._work([self._group.barrier(self._how(opts))], [], [])

    def monitored_barrier(self, opts, wait_all_ranks=False):
        seconds = opts.timeout.total_seconds()
        if seconds < 0:
            seconds = self._default or self._forming.total_seconds()
        self._reach_starts()
        try:
            self._group.monitored_barrier(seconds)
        except dist.DistBackendError as error:
            # In front of our sentence PyTorch's, which programs look for.
            late = re.search(r"ranks? ([-0-9, ]+) did not arrive", str(error))
            if self._me != 0:
                said = f"Rank {self._me} successfully reached monitoredBarrier, but received errors while waiting for send/recv from rank 0"
            elif seconds == 0:
                said = "Rank 0 timed out in monitoredBarrier"
            elif late:
                ranks = []
                for part in late.group(1).split(", "):
                    first, _, last = part.partition("-")
                    ranks += map(str, range(int(first), int(last or first) + 1))
                named = f"Ranks {', '.join(ranks)}" if wait_all_ranks and len(ranks) > 1 else f"Rank {ranks[0]}"
                said = f"{named} failed to pass monitoredBarrier in {seconds * 1000:.0f} ms"
            else:
                raise
            raise dist.DistBackendError(f"{said}: {error}") from None

    # The end.

    def split(self, store, ranks, opts, timeout=None):
        if self._me not in ranks:
            return None
        if timeout is None:
            timeout = opts._timeout if opts is not None else self._forming
        return PhalanxBackend(store, list(ranks).index(self._me), len(ranks), timeout)

    # New ranks.

    def get_reconfigure_handle(self):
        return self._handle

    def reconfigure(self, opts):
        """Forms the group again, of the ranks whose handles are given, and waits for them."""
        if self._store is None:
            raise RuntimeError("init_process_group(enable_reconfigure=True) makes a process group that can be reconfigured")
        # The order of a list is that of the ranks; all have to derive the same one from a set.
        handles = opts.handles if isinstance(opts.handles, list) else sorted(opts.handles)
        if handles.count(self._handle) != 1 or len(set(handles)) != len(handles):
            raise ValueError("handles must be unique and include this rank's")
        if opts.uuid in self._uuids:
            raise RuntimeError(f"the uuid {opts.uuid} was already used; each reconfiguration needs a new one")
        self._uuids.add(opts.uuid)
        self._reach_starts()
        group, self._group, self._shares = self._group, _NoGroup(), False
        if group.has_failed():
            # What is in flight does not end otherwise.
            group.abort(f"a rank reconfigures the process group (uuid {opts.uuid})")
        group.leave()
        store = dist.PrefixStore(f"reconfigure/{opts.uuid}", self._store)
        self._form(store, handles.index(self._handle), len(handles), opts.timeout or self._forming, handles)
        return self._work([], [], [])

    def perform_nocolor_split(self, device):
        """Called where this rank is not in a new group."""

    def abort(self):
        if self in _ALIVE:
            self._group.abort("the program called abort")

    def shutdown(self):
        if self in _ALIVE:
            _ALIVE.remove(self)
            if self._starts is not None:
                self._starts.end()
                self._starts = None
            self._group.leave()
            self._waiters.end()
            with _MOVING:
                _purge()


_ALIVE = []


def _leave():
    """No thread may need Python when its interpreter ends."""
    error = getattr(sys, "last_value", None)
    for backend in list(_ALIVE):
        # A forked process has none of the threads.
        if backend._pid == os.getpid():
            if error is not None:
                # No rank waits for this one any more, nor this one for others.
                backend._group.abort(f"the program ended with {type(error).__name__}: {error}")
            backend.shutdown()
    for found in _SHARED.values():
        # Code that looks at a tensor still finds its old values.
        if found.memory is not None:
            found.memory.keep()


atexit.register(_leave)


# The operations of a process group, and the type of their options.
_OPERATIONS = {
    "allreduce": c10d.AllreduceOptions,
    "allreduce_coalesced": c10d.AllreduceCoalescedOptions,
    "broadcast": c10d.BroadcastOptions,
    "reduce": c10d.ReduceOptions,
    "allgather": c10d.AllgatherOptions,
    "all_gather_single": c10d.AllgatherOptions,
    "allgather_coalesced": c10d.AllgatherOptions,
    "all_gather_single_coalesced": c10d.AllgatherOptions,
    "gather": c10d.GatherOptions,
    "scatter": c10d.ScatterOptions,
    "reduce_scatter": c10d.ReduceScatterOptions,
    "reduce_scatter_single": c10d.ReduceScatterOptions,
    "reduce_scatter_single_coalesced": c10d.ReduceScatterOptions,
    "all_to_all_single": c10d.AllToAllOptions,
    "alltoall": c10d.AllToAllOptions,
    "barrier": c10d.BarrierOptions,
}
_PLAIN = frozenset({torch.Tensor, torch.nn.Parameter})


def _plain(given):
    kind = type(given)
    return kind is int or kind in _PLAIN and given.is_cpu or kind is list and all(map(_plain, given))


def _is_watched():
    """Whether PyTorch's dispatcher has something to do in this thread but to call the back end."""
    return (
        torch._C._autograd._profiler_enabled()
        or torch._C._len_torch_dispatch_stack() > 0
        or c10d._allow_inflight_collective_as_graph_input()
    )


def _first(given):
    """The first tensor; nothing where there is none, as on ranks that are not the root."""
    if not isinstance(given, (list, tuple)):
        return given if isinstance(given, torch.Tensor) else None
    return next((one for one in map(_first, given) if one is not None), None)


def _mapped(call, given):
    """``given`` with ``call`` of each tensor in its place."""
    if isinstance(given, list):
        return [_mapped(call, one) for one in given]
    return call(given) if isinstance(given, torch.Tensor) else given


def _anywhere(name, direct):
    """``direct``, the method ``name`` of `PhalanxBackend`, also for tensors of a GPU."""

    def call(self, *args):
        first = args[0][0] if type(args[0]) is list and args[0] else args[0]
        if type(first) not in _PLAIN or not first.is_cpu:
            first = _first(args[:2])
            if first is not None and first.device.type not in ("cpu", "meta"):
                return self._stage(name, args)
        return direct(self, *args)

    # As `_calls_reducer` looks for it.
    call.__code__ = call.__code__.replace(co_name=name)
    return call


def _operation(name, options):
    """The method ``name`` of `_Group`."""
    direct, dispatched = getattr(PhalanxBackend, name), getattr(dist.ProcessGroup, name)
    count = direct.__code__.co_argcount - 1

    def call(self, *args, **named):
        if "opts" in named and len(named) == 1:
            args, named = (*args, named["opts"]), {}
        if len(args) == count and type(args[-1]) is options and not named and self._is_direct and not _is_watched():
            if all(map(_plain, args[:-1])):
                return direct(self._backend, *args)
            first = _first(args[:2])
            if type(first) in _PLAIN and not first.is_meta:
                return getattr(self._backend, name)(*args)
        return dispatched(self, *args, **named)

    # The dispatched one calls this one again, unless it comes from a frame of the same name.
    call.__code__ = call.__code__.replace(co_name=name)
    return call


class _Group(dist.ProcessGroup):
    """A process group with this back end only.

    PyTorch's own wraps each operation that a back end in Python returns, and passes on ``wait`` and ``get_future`` only; and it
    asks the back end for rank and size, which in C++ stay the same. So operations go from here to the back end, without the
    dispatcher of PyTorch where nobody looks at what passes it.
    """

    def __init__(self, backend, store):
        # The only constructor for classes in Python has no store.
        super().__init__(backend._me, backend._world)
        self._backend = backend
        self._store = store
        kind = dist.ProcessGroup.BackendType.CUSTOM
        for device in _devices():
            self._register_backend(torch.device(device), kind, backend)
        self._set_default_backend(kind)
        self.send = backend.send
        self.recv = backend.recv
        self.recv_anysource = backend.recv_anysource
        self._is_direct = True

    def _start_coalescing(self, device):
        self._backend.start_coalescing()

    def _end_coalescing(self, device):
        return self._backend.end_coalescing()

    def reconfigure(self, opts):
        work = self._backend.reconfigure(opts)
        ranks = dist.distributed_c10d._world.pg_group_ranks
        if self in ranks:
            ranks[self] = {rank: rank for rank in range(self._backend._world)}
        return work

    def getRank(self):
        return self._backend._me

    def getSize(self):
        return self._backend._world

    def getBackendName(self):
        return _NAME

    def get_group_store(self):
        return self._store

    def split_group(self, new_ranks, timeout=None, opts=None, group_name=None, group_desc=None, device_types=None):
        store = dist.PrefixStore(f"{group_name}/", self._store)
        backend = self._backend.split(store, sorted(new_ranks), opts, timeout)
        if backend is None:
            return None
        group = _Group(backend, store)
        group._set_group_name(group_name)
        group._set_group_desc(group_desc or "undefined")
        return group

    # As in the back end, it would call itself.
    @property
    def supports_reconfigure(self):
        return self._backend.supports_reconfigure


for _name, _options in _OPERATIONS.items():
    setattr(_Group, _name, _operation(_name, _options))
    if _name != "barrier":
        setattr(PhalanxBackend, _name, _anywhere(_name, getattr(PhalanxBackend, _name)))

# PyTorch's flight recorder looks at what passes the dispatcher. It is on without being asked; Phalanx has its own.
_RECORDED = any((os.environ.get(name) or "0") != "0" for name in ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE"))
if not _RECORDED:
    getattr(dist.distributed_c10d, "_FR_SELF_RECORDING_BACKENDS", set()).add(_NAME)


def _attached(attach):
    def call(group, *args, **named):
        if isinstance(group, _Group):
            group._is_direct = False
        return attach(group, *args, **named)

    return call


_Group.register_pre_hook = _attached(dist.ProcessGroup.register_pre_hook)
_Group.register_post_hook = _attached(dist.ProcessGroup.register_post_hook)
# C++ registers these past the methods of `_Group`.
for _hook in (getattr(c10d, name) for name in ("NanCheckHook", "FlightRecorderHook") if hasattr(c10d, name)):
    _hook.attach = staticmethod(_attached(_hook.attach))

_coalescing_manager = dist.distributed_c10d._coalescing_manager


@contextlib.contextmanager
def _coalescing(group=None, *args, **named):
    """PyTorch's, which after an exception would collect the operations of the group for ever and carry out none."""
    group = group or dist.distributed_c10d._get_default_group()
    try:
        with _coalescing_manager(group, *args, **named) as manager:
            yield manager
    except BaseException:
        if isinstance(group, _Group):
            dist.distributed_c10d._world.pg_coalesce_state.pop(group, None)
            group._backend._coalesced = None
        raise


dist._coalescing_manager = dist.distributed_c10d._coalescing_manager = _coalescing


class Formed(c10d.Backend.Options):
    """The ``pg_options`` of a default group whose ranks have met already."""

    def __init__(self, group):
        super().__init__(_NAME)
        self.group = group


def _create(options, own):
    config = sys._getframe(1).f_locals.get("backend_config")
    # A back end does not learn from PyTorch of the others in its group; this is where it makes all of them.
    is_alone = config is not None and len(set(config.get_device_backend_map().values())) == 1
    changes = getattr(options, "enable_reconfigure", False)
    if changes and not is_alone:
        why = "it has several back ends" if config is not None else "this version of PyTorch makes process groups in another way than 2.15"
        raise ValueError(f"the process group cannot be reconfigured: {why}")
    timeout = timedelta(seconds=options.timeout.total_seconds())
    backend = PhalanxBackend(options.store, options.group_rank, options.group_size, timeout, is_formed=not changes, group=own.group if isinstance(own, Formed) else None)
    return _Group(backend, options.process_group.get_group_store()) if is_alone else backend


def _devices():
    """The devices whose tensors the back end takes."""
    accelerator = torch.accelerator.current_accelerator()
    return ["cpu"] if accelerator is None else ["cpu", accelerator.type]


def register():
    """Makes the back end known to ``torch.distributed``; more than once does no harm."""
    if _NAME.upper() not in dist.Backend._plugins:
        dist.Backend.register_backend(_NAME, _create, extended_api=True, devices=["cpu"])
        # So that it is not the default one of an accelerator.
        dist.Backend.backend_capability[_NAME] = _devices()


def replace_gloo():
    """Makes this back end wherever a program or a library asks for Gloo, also in the processes that this one starts; more than
    once does no harm. Groups that exist stay as they are.
    """
    os.environ["PHALANX_AS_GLOO"] = "1"
    dist.Backend._plugins["GLOO"] = dist.Backend._plugins[_NAME.upper()]
    if _RECORDED:
        # Gloo has a flight recorder of its own.
        getattr(dist.distributed_c10d, "_FR_SELF_RECORDING_BACKENDS", set()).discard("gloo")


register()
if os.environ.get("PHALANX_AS_GLOO", "0") not in ("", "0"):
    replace_gloo()
