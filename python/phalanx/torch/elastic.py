"""Training that continues when ranks are lost or join.

    import phalanx.torch.elastic as elastic

    sampler = elastic.Sampler(dataset, global_batch_size=96)
    loader = DataLoader(dataset, batch_sampler=sampler)
    state = elastic.State(model=model, optimizer=optimizer, sampler=sampler)

    @elastic.run(state)
    def train(state):
        ddp = DistributedDataParallel(state.model)
        for epoch in range(sampler.epoch, 3):
            sampler.set_epoch(epoch)
            for x, y in loader:
                sampler.weighted(loss_of(ddp(x), y)).backward()
                optimizer.step()
                optimizer.zero_grad()
                state.between_steps()

    train()

under ``phalanx launch --elastic --max-restarts 10 --nproc-per-node 3 -- python train.py``. With any other launcher, and with
none, the same program is a plain training loop.
"""

import functools
import gc
import io
import json
import os
import pickle
import random
import shutil
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist

from phalanx._phalanx import JobError, Member
from phalanx.torch import _ALIVE, Formed, RankLostError, lost_ranks

__all__ = ["Sampler", "State", "run"]

# Where rank 0 writes what must be the same on all ranks.
_AGREED = "torch/agreed"

# How often a wait looks at the store, in seconds.
_LOOK = 0.005


class _Changed(BaseException):
    """The ranks have changed between two steps. No ``except Exception`` of a program takes it."""


class _Store(dist.Store):
    """The launcher's store, in which ``new_group`` meets. It outlives the loss of any rank or node."""

    def __init__(self, member, timeout):
        super().__init__()
        self._member = member
        self._timeout = timeout

    def set(self, key, value):
        self._member.set(key, value if isinstance(value, bytes) else value.encode())

    def get(self, key):
        self.wait([key])
        return self._member.get(key)

    def add(self, key, value):
        return self._member.add(key, value)

    def compare_set(self, key, expected, desired):
        return self._member.compare_set(key, bytes(expected), bytes(desired))

    def check(self, keys):
        if self._member.has_lost():
            raise RankLostError("a rank was lost")
        return all(self._member.get(key) is not None for key in keys)

    def wait(self, keys, timeout=None):
        until = time.monotonic() + (timeout or self._timeout).total_seconds()
        while not self.check(keys):
            if time.monotonic() > until:
                raise dist.DistStoreError(f"timed out waiting for the keys {keys} in the launcher's store")
            time.sleep(_LOOK)

    def multi_get(self, keys):
        return [self.get(key) for key in keys]

    def set_timeout(self, timeout):
        self._timeout = timeout

    def clone(self):
        return self


class Sampler(torch.utils.data.Sampler):
    """The batches of this rank, as lists of indices: ``DataLoader(dataset, batch_sampler=sampler)``.

    All ranks together take ``global_batch_size`` samples in a step, whatever their number, so that a change of ranks changes
    neither the number of steps nor what a step is made of. Each sample is taken once in an epoch, without padding; the last
    batch is smaller, or left out with ``drop_last``. The order is that of PyTorch's ``DistributedSampler`` with the same ``seed``
    and epoch, and rank ``r`` of ``n`` takes the samples ``r``, ``r + n``, ``r + 2n``, ... of a batch.

    ``data`` is a dataset or its length. ``State.between_steps`` counts the batches that were trained on, so that the loader may
    read ahead with any number of workers.
    """

    def __init__(self, data, global_batch_size, shuffle=True, seed=0, drop_last=False):
        self.samples = data if isinstance(data, int) else len(data)
        if global_batch_size < 1 or self.samples < 1:
            raise ValueError(f"a sampler needs samples and a batch size of at least 1, not {self.samples} and {global_batch_size}")
        self.global_batch_size = global_batch_size
        self.shuffle = shuffle
        self.seed = seed
        self.drop_last = drop_last
        self.epoch = 0
        # Batches of this epoch that were trained on.
        self.done = 0

    def __len__(self):
        """The number of batches in an epoch."""
        whole, rest = divmod(self.samples, self.global_batch_size)
        return whole + (rest > 0 and not self.drop_last)

    def set_epoch(self, epoch):
        """Begins the epoch; continues it where it is the current one."""
        if epoch != self.epoch:
            self.epoch, self.done = epoch, 0

    def __iter__(self):
        """The batches of this epoch that are left. A rank without a sample of a batch gets the first one, with weight 0."""
        rank, world = _rank_and_world()
        order = range(self.samples)
        if self.shuffle:
            generator = torch.Generator()
            generator.manual_seed(self.seed + self.epoch)
            order = torch.randperm(self.samples, generator=generator).tolist()
        for batch in range(self.done, len(self)):
            start = batch * self.global_batch_size
            whole = order[start : start + self.global_batch_size]
            yield list(whole[rank::world] or whole[:1])

    def weighted(self, loss, batch=0):
        """``loss``, the mean over this rank's samples, as its part in the mean over the global batch.

        ``DistributedDataParallel`` divides by the number of ranks, which is right where all have as many samples. With this
        factor it is right for every number of ranks. With gradient accumulation ``batch`` counts the batches since the last
        ``between_steps``.
        """
        rank, world = _rank_and_world()
        left = self.samples - (self.done + batch) * self.global_batch_size
        size = max(1, min(self.global_batch_size, left))
        own = len(range(rank, size, world))
        return loss if own * world == size else loss * (own * world / size)

    def state_dict(self):
        return {"epoch": self.epoch, "done": self.done}

    def load_state_dict(self, state):
        self.epoch, self.done = state["epoch"], state["done"]

    def __repr__(self):
        how = f"shuffle={self.shuffle}, seed={self.seed}, drop_last={self.drop_last}"
        return f"Sampler({self.samples}, global_batch_size={self.global_batch_size}, {how})"


def _rank_and_world():
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def _is_zero(part):
    """Whether it is a ``ZeroRedundancyOptimizer``, which takes a second to import."""
    return type(part).__name__ == "ZeroRedundancyOptimizer"


def _is_split(model):
    """Whether the model has sharded parameters, which are `DTensor`."""
    return any(hasattr(parameter, "device_mesh") for parameter in model.parameters())


def _to_bytes(part):
    file = io.BytesIO()
    torch.save(part, file)
    return file.getvalue()


class _Pickler(pickle.Pickler):
    """Leaves the tensors out."""

    def __init__(self, file):
        super().__init__(file, protocol=5)
        self.tensors = []

    def persistent_id(self, value):
        if isinstance(value, (torch.nn.Module, torch.optim.Optimizer, torch.nn.Parameter)):
            raise TypeError(f"a {type(value).__name__} inside another value has no state: make it an attribute of the State")
        if not isinstance(value, torch.Tensor):
            return None
        self.tensors.append(value.detach())
        return len(self.tensors) - 1


class _Unpickler(pickle.Unpickler):
    def __init__(self, text, tensors):
        super().__init__(io.BytesIO(text))
        self.persistent_load = tensors.__getitem__


class State:
    """What a training continues with when its ranks change.

    Each keyword is an object with ``state_dict`` and ``load_state_dict`` (a model, which is not wrapped, an optimizer, a
    scheduler, a ``Sampler``), or a value that can be pickled, like ``best=0.0``. All are attributes, and so are those that the
    program adds.

    ``between_steps`` keeps a copy of all of it in memory. After the loss of a rank the others continue from it.

    With ``folder`` the ranks also write a ``torch.distributed.checkpoint`` into ``folder/step-N`` after every ``save_every`` steps,
    and keep the last ``keep``; with ``resume=True`` a training that is started again continues from the last one. All ranks must
    reach the folder.

    No rank has the whole state of models with sharded parameters (``fully_shard``) and of ``ZeroRedundancyOptimizer``. Make them in
    the function of ``run``, give them to ``attach``, and give the state a ``folder``: after the loss of a rank the others continue
    from the last checkpoint. Before ranks join or leave they write one.
    """

    def __init__(self, *, folder=None, save_every=None, keep=2, resume=False, timeout=timedelta(minutes=30), **parts):
        if (save_every or resume) and folder is None:
            raise ValueError("save_every and resume need a folder")
        if keep < 1:
            raise ValueError(f"keep is {keep}, and must be at least 1")
        self._folder, self._save_every, self._keep, self._resume = folder, save_every, keep, resume
        self._timeout = timeout
        self._member = None
        self._is_new = False
        self._hook = None
        # Steps that this rank has completed; below 0 it has no state.
        self._done = 0
        self._kept = self._generators = self._change = None
        # The names of parts whose state no rank has whole, and the model and optimizers whose tensors are sharded.
        self._in_checkpoints = set()
        self._split = None
        for name, part in parts.items():
            setattr(self, name, part)

    def attach(self, **parts):
        """Gives the state objects that the function of ``run`` has made, in place of those of the same names, and gives these
        objects the state. Needed for sharded models and their optimizers, and possible for all. *Blocks* until all ranks call it.
        """
        models = [part for part in parts.values() if isinstance(part, torch.nn.Module)]
        is_split = any(_is_split(model) for model in models)
        if is_split and len(models) != 1:
            raise ValueError("attach a sharded model and its optimizers in one call, without other models")
        in_checkpoints = {name for name, part in parts.items() if is_split or _is_zero(part)}
        if in_checkpoints and self._folder is None:
            raise ValueError("the state of sharded models and optimizers needs checkpoints: State(folder=..., save_every=...)")
        if is_split:
            self._split = models[0], [part for part in parts.values() if isinstance(part, torch.optim.Optimizer)]
        old = {name: vars(self).get(name) for name in parts}
        self._in_checkpoints |= in_checkpoints
        vars(self).update(parts)
        for name in parts.keys() - in_checkpoints:
            if old[name] is not None:
                parts[name].load_state_dict(old[name].state_dict() if hasattr(old[name], "state_dict") else old[name])
        if in_checkpoints and self._done > 0:
            self._go_back(in_checkpoints)

    def _parts(self, names=None):
        """The state of the attributes of the user that all ranks have, or of those with these names."""
        parts = {name: part for name, part in vars(self).items() if not name.startswith("_")}
        names = parts.keys() - self._in_checkpoints if names is None else names
        return {name: part.state_dict() if hasattr(part, "state_dict") else part for name, part in parts.items() if name in names}

    def _shards(self):
        """The sharded model and its optimizers, for ``torch.distributed.checkpoint``."""
        from torch.distributed.checkpoint.state_dict import get_state_dict

        model, optimizers = self._split
        return dict(zip(("model", "optimizers"), get_state_dict(model, optimizers)))

    def _go_back(self, names):
        """Goes back to the last checkpoint on all ranks; ``names`` have no state yet."""
        found = [None, {}]
        if _rank_and_world()[0] == 0:
            path, parts = self._restore(True)
            found = [path, {name: parts[name] for name in names & parts.keys()}]
        dist.broadcast_object_list(found, 0)
        path, parts = found
        if path is None:
            raise JobError(f"a part of the state was lost with its rank, and there is no checkpoint in {self._folder}", 1, False)
        self._give(0)
        self._load(parts)
        if self._split:
            import torch.distributed.checkpoint as dcp
            from torch.distributed.checkpoint.state_dict import set_state_dict

            shards = self._shards()
            dcp.load({"_shards": shards}, checkpoint_id=path)
            set_state_dict(*self._split, model_state_dict=shards["model"], optim_state_dict=shards["optimizers"])

    def _load(self, parts):
        for name, part in parts.items():
            own = getattr(self, name, None)
            if hasattr(own, "load_state_dict"):
                own.load_state_dict(part)
            else:
                setattr(self, name, part)

    def _commit(self):
        """Copies the state."""
        file = io.BytesIO()
        pickler = _Pickler(file)
        pickler.dump(self._parts())
        kept = self._kept[1] if self._kept else []
        if [(t.shape, t.dtype) for t in kept] != [(t.shape, t.dtype) for t in pickler.tensors]:
            kept = [torch.empty_like(tensor, memory_format=torch.contiguous_format) for tensor in pickler.tensors]
        for copy, tensor in zip(kept, pickler.tensors):
            copy.copy_(tensor)
        self._kept = file.getvalue(), kept
        self._generators = torch.get_rng_state(), random.getstate()

    def _roll_back(self):
        """Makes the state what it was after the last step."""
        text, tensors = self._kept
        # Some `load_state_dict` keep the tensors that they are given.
        self._load(_Unpickler(text, [tensor.clone() for tensor in tensors]).load())
        torch.set_rng_state(self._generators[0])
        random.setstate(self._generators[1])

    # Between two steps.

    def between_steps(self, batches=1):
        """Call this on all ranks after each step, when the optimizer has stepped. ``batches`` is the number of batches of the
        sampler that the step has used.

        Here ranks join and leave: then the function of ``run`` is called again. A rank that is asked to leave (SIGTERM to its
        launcher) ends with ``SystemExit(0)``. *Blocks* until all ranks call it, and copies the state.
        """
        samplers = [part for part in vars(self).values() if isinstance(part, Sampler)]
        if len(samplers) > 1:
            raise ValueError("a State has one Sampler, whose batches it counts; use DistributedSampler for other data")
        for sampler in samplers:
            sampler.done += batches
        if self._member is not None:
            self._commit()
        self._done += 1
        # Not before the first step: PyTorch would count one more for the optimizer.
        if self._done == 1 and self._in_checkpoints or self._save_every and self._done % self._save_every == 0:
            self.save()
        if self._member is None:
            return
        if self._change is not None:
            self._report()
        if self._is_new:
            self._is_new = False
            self._member.announce_joined(True)
        before, began = dist.get_world_size(), time.monotonic()
        # Those that leave take their shards with them.
        before_change = lambda all_leave: (self._in_checkpoints or all_leave and self._folder) and self.save()
        what = self._member.between(self._say, before_change)
        if what == "left":
            raise SystemExit(0)
        if what == "changed":
            self._change = [before, began, time.monotonic()]
            raise _Changed

    def _say(self, text):
        print(f"elastic  {text}", file=sys.stderr, flush=True)

    def _report(self):
        before, began, formed, ready = self._change
        self._change = None
        rank, world = _rank_and_world()
        if rank == 0:
            took = [1000 * (b - a) for a, b in ((began, formed), (formed, ready), (ready, time.monotonic()))]
            times = ", ".join(f"{name} {ms:.0f} ms" for name, ms in zip(("regroup", "state", "step"), took))
            self._say(f"step {self._done}: world size {before} -> {world} ({times})")

    # Checkpoints.

    def save(self):
        """Writes a checkpoint of the state into ``folder/step-N``. *Blocks* until all ranks call it."""
        import torch.distributed.checkpoint as dcp

        if self._folder is None:
            raise ValueError("save needs a folder: State(folder=...)")
        path = os.path.join(self._folder, f"step-{self._done}")
        is_there = [any(path == saved for _, saved in self._saved())]
        dist.broadcast_object_list(is_there, 0)
        if is_there[0]:
            return
        parts = self._parts()
        for name in self._in_checkpoints:
            if _is_zero(getattr(self, name)):
                getattr(self, name).consolidate_state_dict(0)
                parts |= self._parts([name]) if _rank_and_world()[0] == 0 else {}
        # All but models as `torch.save` writes it: a checkpoint makes texts of the numbers that an optimizer has as keys.
        parts = {name: part if isinstance(getattr(self, name), torch.nn.Module) else _to_bytes(part) for name, part in parts.items()}
        parts["_done"] = self._done
        if self._split:
            parts["_shards"] = self._shards()
        dcp.save(parts, checkpoint_id=path)
        if _rank_and_world()[0] == 0:
            for _, old in self._saved()[: -self._keep]:
                shutil.rmtree(old, ignore_errors=True)

    def _saved(self):
        """The complete checkpoints, as (step, path)."""
        found = []
        for name in os.listdir(self._folder) if self._folder and os.path.isdir(self._folder) else []:
            path = os.path.join(self._folder, name)
            # It is written last.
            if name.startswith("step-") and os.path.exists(os.path.join(path, ".metadata")):
                found.append((int(name[5:]), path))
        return sorted(found)

    def _restore(self, is_needed=False):
        """Reads all but sharded tensors from the last checkpoint, if there is one; returns its path, and what it has read."""
        from torch.distributed.checkpoint import FileSystemReader
        from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
        from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

        saved = self._saved()
        if not saved:
            return None, {}
        path, parts = saved[-1][1], {}
        if not self._resume and not is_needed:
            raise ValueError(f"{self._folder} has checkpoints of another training: give State resume=True, or another folder")
        reader = FileSystemReader(path)
        keys = {place[0] for place in reader.read_metadata().planner_data.values()} - {"_shards"}
        _load_state_dict(parts, storage_reader=reader, planner=_EmptyStateDictLoadPlanner(keys=keys), no_dist=True)
        parts = {name: torch.load(io.BytesIO(part), weights_only=False) if isinstance(part, bytes) else part for name, part in parts.items()}
        self._done = parts.pop("_done")
        self._load({name: part for name, part in parts.items() if name not in self._in_checkpoints})
        if _rank_and_world()[0] == 0:
            self._say(f"continues from {path}")
        return path, parts

    # The job.

    def _facts(self):
        """What a process that joins must have as the others do, one a line."""
        lines = []
        for name, part in vars(self).items():
            if isinstance(part, torch.nn.Module):
                lines += [f"{name}.{key}: {t.dtype} {list(t.shape)}" for key, t in part.state_dict().items() if isinstance(t, torch.Tensor)]
            elif not name.startswith("_"):
                lines.append(f"{name}: {part if isinstance(part, Sampler) else type(part).__name__}")
        return lines

    def _compare(self):
        """Refuses to join others that train something else."""
        agreed = self._member.get(_AGREED)
        own = sorted(self._facts())
        theirs = sorted(agreed.decode().split("\n")) if agreed else own
        if own != theirs:
            differs = [[line for line in a if line not in b] or ["nothing"] for a, b in ((theirs, own), (own, theirs))]
            raise JobError(f"this process cannot join the job: the others have {differs[0][0]}, and this process has {differs[1][0]}", 2, False)

    def _join(self):
        """Meets the other ranks; whether this process takes part."""
        if dist.is_initialized():
            raise RuntimeError("elastic.run makes the process group: do not call init_process_group before it, nor run a second time")
        number = os.environ.get("PHALANX_JOIN")
        bind = os.environ.get("PHALANX_BIND") or None
        first = int(os.environ["PHALANX_ELASTIC"])
        self._member = Member(first, int(number) if number else None, self._timeout.total_seconds(), bind, torch.get_num_threads())
        if number:
            self._compare()
            self._is_new, self._done = True, -1
            return self._member.join()
        if self._member.rank() > 0:
            self._done = -1
        else:
            # As the program has made it, which is what a process that joins has too.
            facts = "\n".join(self._facts())
            self._restore()
            self._member.set(_AGREED, facts.encode())
        return True

    def _enter(self):
        """Makes the group of now PyTorch's, and the state that of the furthest rank."""
        member = self._member
        if dist.is_initialized():
            dist.destroy_process_group()
            # PyTorch takes a mesh of the ranks 0 to 2 for the same in each group, also where this is another of them now.
            if "torch.distributed.tensor" in sys.modules:
                from torch.distributed.tensor.debug import _clear_sharding_prop_cache

                _clear_sharding_prop_cache()
        # Otherwise each process group adds a prefix to the lines of the last error.
        self._hook = sys.excepthook = self._hook or sys.excepthook
        os.environ.update(RANK=str(member.rank()), WORLD_SIZE=str(member.world()))
        prefix = f"torch/{member.generation()}"
        if member.rank() == 0:
            member.delete(f"torch/{member.generation() - 1}/")
        store = dist.PrefixStore(prefix, _Store(member, self._timeout))
        options = Formed(member.group())
        dist.init_process_group("phalanx", store=store, rank=member.rank(), world_size=member.world(), timeout=self._timeout, pg_options=options)
        self._take()
        if self._is_new:
            member.announce_joined(False)
        member.announce()
        member.watch()
        if self._change is not None:
            self._change.append(time.monotonic())

    def _take(self):
        """Takes the state over from the furthest rank."""
        # A backward that was cut short has left gradients.
        for part in vars(self).values():
            if isinstance(part, (torch.nn.Module, torch.optim.Optimizer)):
                part.zero_grad()
        steps = self._member.gather(self._done)
        most = max(steps)
        donor = steps.index(most)
        if most < 0:
            raise JobError("all ranks that had the state were lost", 1, False)
        if self._done == most and self._kept:
            self._roll_back()
        if min(steps) < most:
            self._give(donor)
        elif not self._kept:
            self._commit()

    def _give(self, donor):
        """Gives all ranks the state of the rank ``donor``."""
        is_donor = dist.get_rank() == donor
        if is_donor:
            self._commit()
        text, tensors = self._kept if is_donor else (None, [])
        given = [self._done, text, [(tensor.shape, tensor.dtype, tensor.device.type) for tensor in tensors]]
        dist.broadcast_object_list(given, donor)
        if not is_donor:
            tensors = [torch.empty(shape, dtype=dtype, device=kind) for shape, dtype, kind in given[2]]
        for tensor in tensors:
            dist.broadcast(tensor, donor)
        if not is_donor:
            self._load(_Unpickler(given[1], tensors).load())
            self._done = given[0]
            self._commit()

    def _is_loss(self, error):
        """Whether ``error`` is, or follows from, the loss of a rank."""
        return lost_ranks(error) is not None or self._member.has_lost()

    def _run(self, train):
        if not os.environ.get("PHALANX_ELASTIC", "0").strip("0"):
            if not dist.is_initialized():
                alone = {} if "RANK" in os.environ else {"store": dist.HashStore(), "rank": 0, "world_size": 1}
                dist.init_process_group("phalanx", timeout=self._timeout, **alone)
            self._restore()
            return train()
        try:
            # What was imported is not looked through after each loss.
            gc.collect()
            gc.freeze()
            if not self._join():
                raise SystemExit(0)
            return self._run_elastic(train)
        except JobError as error:
            message, code, _ = error.args
            path = os.environ.get("TORCHELASTIC_ERROR_FILE")
            if path and os.environ.get("PHALANX_ERRORS") == str(os.getpid()):
                # The launcher prints it.
                with open(path, "w") as file:
                    json.dump({"phalanx_exit_code": code, "message": message}, file)
            else:
                print(f"error: {message}", file=sys.stderr, flush=True)
            raise SystemExit(code) from None
        finally:
            gc.unfreeze()

    def _run_elastic(self, train):
        member, failed, is_complete, last, tries = self._member, False, False, None, 0
        while True:
            began, before = time.monotonic(), member.world()
            try:
                if failed:
                    failed = False
                    member.shrink()
                    self._change = [before, began, time.monotonic()]
                self._enter()
                result, is_complete = train(), True
                # No rank ends before all have the result.
                member.gather(self._done)
                member.end()
                return result
            except _Changed:
                pass
            except Exception as error:
                is_job = isinstance(error, JobError)
                if is_job and is_complete and member.is_over():
                    return result
                # Ranks that are all there, and fail again and again before the next step, do not fail for a loss.
                here = member.world(), self._done
                tries = tries + 1 if here == last else 0
                if tries > 1 or not (member.has_lost() if is_job else self._is_loss(error)):
                    raise
                failed, last = True, here
                for backend in _ALIVE:
                    backend._group.abort("a rank was lost")
            # The hooks of an old DistributedDataParallel would run in the next backward.
            gc.collect()
            for one in gc.get_objects():
                if issubclass(type(one), torch.nn.parallel.DistributedDataParallel):
                    one.reducer._remove_autograd_hooks()


def run(state):
    """Decorates a function that trains: it is called with ``state``, and called again with the state of the last step and another
    process group after each change of ranks. Make the ``DistributedDataParallel`` and other objects of the process group in it.

    An error that is not the loss of a rank passes through. Without ``phalanx launch --elastic`` the function is called once, with
    the process group of whatever has started the ranks.
    """

    def decorate(train):
        @functools.wraps(train)
        def call(*args, **kwargs):
            return state._run(lambda: train(state, *args, **kwargs))

        return call

    return decorate
