"""What each rank does in ``test_torch.py``: ranks.py TEST RANK WORLD FILE."""

import contextlib
import gc
import multiprocessing.reduction
import os
import pickle
import signal
import socket
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist
if sys.argv[2] == "1" and "LATE_US" in os.environ:
    # The device of this rank is slower.
    os.environ["LATE_US"] += "0"
from late import library as LATE
import phalanx.torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.multiprocessing.reductions import StorageWeakRef, shared_cache
from torch.distributed.tensor import Shard, distribute_tensor

FLOATS = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
SIGNED = [torch.int8, torch.int16, torch.int32, torch.int64]
UNSIGNED = [torch.uint8, torch.uint16, torch.uint32, torch.uint64]
if LATE:
    # They take their time.
    FLOATS, SIGNED, UNSIGNED = FLOATS[::3], SIGNED[:1], UNSIGNED[:1]
MOVED = FLOATS + SIGNED + UNSIGNED + [torch.bool, torch.complex64, torch.complex128, torch.float8_e4m3fn, torch.float8_e5m2]
LENGTHS = [0, 7] if LATE else [0, 1, 7, 1000]
Op = dist.ReduceOp


def values(rank, count, dtype):
    """The elements of one rank, which every rank can compute."""
    generator = torch.Generator("cpu").manual_seed(1000 + rank)
    drawn = lambda low, high, *shape: torch.randint(low, high, shape, generator=generator, device="cpu").to(torch.get_default_device())
    if dtype == torch.bool:
        return drawn(0, 2, count).bool()
    if dtype.is_complex:
        return torch.view_as_complex(drawn(-8, 8, count, 2).to(torch.float64)).to(dtype)
    return drawn(0 if dtype in UNSIGNED else -8, 8, count).to(dtype)


def same(got, wanted):
    as_bytes = lambda t: t.cpu().contiguous().reshape(-1).view(torch.uint8)
    assert got.shape == wanted.shape and got.dtype == wanted.dtype, (got, wanted)
    assert torch.equal(as_bytes(got), as_bytes(wanted)), (got, wanted)


def fold(op, all_of, dtype):
    """The reduction of small numbers, exact in any order."""
    if dtype == torch.bool:
        table = torch.stack(all_of)
        if op in (Op.SUM, Op.MAX, Op.BOR):
            return table.any(0)
        if op in (Op.PRODUCT, Op.MIN, Op.BAND):
            return table.all(0)
        return table.sum(0) % 2 == 1
    if dtype.is_complex:
        return torch.stack(all_of).sum(0)
    if dtype in FLOATS:
        table = torch.stack([t.double() for t in all_of])
    else:
        table = torch.stack([t.long() for t in all_of])
    if op == Op.SUM:
        done = table.sum(0)
    elif op == Op.AVG:
        done = table.sum(0) * (1.0 / len(all_of))
    elif op == Op.PRODUCT:
        done = table.prod(0)
    elif op == Op.MIN:
        done = table.amin(0)
    elif op == Op.MAX:
        done = table.amax(0)
    else:
        step = {Op.BAND: torch.bitwise_and, Op.BOR: torch.bitwise_or, Op.BXOR: torch.bitwise_xor}[op]
        done = table[0]
        for row in table[1:]:
            done = step(done, row)
    return done.to(dtype)


def reductions(dtype):
    if dtype in FLOATS:
        # A product of up to three numbers below eight is exact in all of them but the short ones.
        return [Op.SUM, Op.MIN, Op.MAX] + ([Op.PRODUCT] if dtype in (torch.float32, torch.float64) else [])
    if dtype.is_complex:
        return [Op.SUM]
    return [Op.SUM, Op.PRODUCT, Op.MIN, Op.MAX, Op.BAND, Op.BOR, Op.BXOR]


def test_reductions(rank, world):
    for dtype in FLOATS + SIGNED + UNSIGNED + [torch.bool, torch.complex64, torch.complex128]:
        for op in reductions(dtype):
            for count in LENGTHS:
                own = values(rank, count, dtype)
                wanted = fold(op, [values(r, count, dtype) for r in range(world)], dtype)
                got = own.clone()
                dist.all_reduce(got, op)
                same(got, wanted)
                got = own.clone()
                dist.all_reduce(got, op, async_op=True).wait()
                same(got, wanted)
                got = own.clone()
                dist.reduce(got, world - 1, op)
                same(got, wanted if rank == world - 1 else own)
                whole = [values(rank + 10 * part, count, dtype) for part in range(world)]
                wanted = fold(op, [values(r + 10 * rank, count, dtype) for r in range(world)], dtype)
                got = torch.empty_like(own)
                dist.reduce_scatter(got, whole, op)
                same(got, wanted)
                got = torch.empty_like(own)
                dist.reduce_scatter_single(got, torch.cat(whole), op)
                same(got, wanted)
    mean = torch.full((3,), float(rank))
    dist.all_reduce(mean, Op.AVG)
    same(mean, torch.full((3,), (world - 1) / 2))
    # Parts of different lengths, and a tensor whose elements do not lie one behind the other.
    parts = [torch.full((part + 1,), float(rank + part)) for part in range(world)]
    got = torch.empty(rank + 1)
    dist.reduce_scatter(got, parts)
    same(got, torch.full((rank + 1,), float(sum(range(world)) + world * rank)))
    wide = torch.arange(12.0).reshape(3, 4)
    dist.all_reduce(wide.t())
    same(wide, world * torch.arange(12.0).reshape(3, 4))
    several = [torch.full((n,), float(rank)) for n in (1, 0, 5)]
    dist.all_reduce_coalesced(several)
    for tensor in several:
        same(tensor, torch.full(tensor.shape, float(sum(range(world)))))
    if LATE:
        return
    sparse = torch.sparse_coo_tensor([[rank, 9]], [1.0, 2.0], (10,))
    dist.all_reduce(sparse)
    wanted = torch.zeros(10)
    wanted[:world] += 1
    wanted[9] += 2 * world
    same(sparse.to_dense(), wanted)


def test_moves(rank, world):
    for dtype in MOVED:
        for count in LENGTHS:
            own = values(rank, count, dtype)
            all_of = [values(r, count, dtype) for r in range(world)]
            for root in range(world):
                got = own.clone()
                dist.broadcast(got, root)
                same(got, all_of[root])
                into = [torch.empty_like(own) for _ in range(world)] if rank == root else None
                dist.gather(own, into, root)
                for got, wanted in zip(into or [], all_of):
                    same(got, wanted)
                got = torch.empty_like(own)
                parts = [values(root + 10 * r, count, dtype) for r in range(world)]
                dist.scatter(got, parts if rank == root else None, root)
                same(got, parts[rank])
            into = [torch.empty_like(own) for _ in range(world)]
            dist.all_gather(into, own)
            for got, wanted in zip(into, all_of):
                same(got, wanted)
            got = torch.empty(world * count, dtype=dtype)
            dist.all_gather_single(got, own)
            same(got, torch.cat(all_of))
            # The input lies in the output, as in FSDP.
            got = torch.empty(world * count, dtype=dtype)
            part = got[rank * count : (rank + 1) * count]
            part.copy_(own)
            dist.all_gather_single(got, part)
            same(got, torch.cat(all_of))
            whole = torch.cat([values(rank + 10 * r, count, dtype) for r in range(world)])
            got = torch.empty_like(whole)
            dist.all_to_all_single(got, whole)
            same(got, torch.cat([values(r + 10 * rank, count, dtype) for r in range(world)]))
        # Rank r has r + 1 rows of two elements, and gives rank q as many as q + 1.
        into = [torch.empty(r + 1, dtype=dtype) for r in range(world)]
        dist.all_gather(into, values(rank, rank + 1, dtype))
        for r, got in enumerate(into):
            same(got, values(r, r + 1, dtype))
        rows = [q + 1 for q in range(world)]
        whole = values(rank, 2 * sum(rows), dtype).reshape(-1, 2)
        got = torch.empty(world * (rank + 1), 2, dtype=dtype)
        dist.all_to_all_single(got, whole, [rank + 1] * world, rows)
        before = sum(rows[:rank])
        same(got, torch.cat([values(r, 2 * sum(rows), dtype).reshape(-1, 2)[before : before + rank + 1] for r in range(world)]))
        into = [torch.empty(rank + 1, 2, dtype=dtype) for _ in range(world)]
        dist.all_to_all(into, list(whole.split(rows)))
        same(torch.cat(into), got)
    objects = [None] * world
    dist.all_gather_object(objects, {"rank": rank, "text": "x" * rank})
    assert objects == [{"rank": r, "text": "x" * r} for r in range(world)], objects
    objects = [rank, None]
    dist.broadcast_object_list(objects, 0)
    assert objects == [0, None], objects


def test_messages(rank, world):
    assert type(dist.group.WORLD).__name__ == "_Group"
    right, left = (rank + 1) % world, (rank - 1) % world
    for count in (0, 5, 300_000):
        # All send first.
        dist.send(torch.full((count,), float(rank)), right, tag=3) if world > 1 else None
        got = torch.empty(count)
        if world > 1:
            assert dist.recv(got, left, tag=3) == left
            same(got, torch.full((count,), float(left)))
    if world == 1:
        return
    sends = [dist.isend(torch.tensor([rank, tag]), right, tag=tag) for tag in range(5)]
    into = [torch.empty(2, dtype=torch.int64) for _ in range(5)]
    receives = [dist.irecv(into[tag], left, tag=tag) for tag in reversed(range(5))]
    for work in sends + receives:
        work.wait()
    for tag, got in enumerate(into):
        same(got, torch.tensor([left, tag]))
    ops = [dist.P2POp(dist.isend, torch.tensor([rank]), right), dist.P2POp(dist.irecv, into[0][:1], left)]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    assert into[0][0] == left
    # A receive in flight does not keep a collective.
    wide = torch.empty(1)
    receive = dist.irecv(wide, left)
    total = torch.ones(1)
    dist.all_reduce(total)
    dist.send(torch.full((1,), float(rank)), right)
    receive.wait()
    assert wide.item() == left and total.item() == world
    # From any sender: rank 0 gets one message of each other, and answers it.
    if rank == 0:
        senders = []
        for _ in range(1, world):
            got = torch.empty(1)
            senders.append(dist.recv(got, tag=9))
            same(got, torch.full((1,), float(senders[-1])))
            dist.send(got, senders[-1])
        assert sorted(senders) == list(range(1, world)), senders
    else:
        # Every second number of it, so that it is copied there.
        answer = torch.zeros(2)[::2]
        work = dist.irecv(answer, tag=0)
        assert not work.is_completed() and not work.is_success()
        dist.send(torch.full((1,), float(rank)), 0, tag=9)
        while not work.is_completed():
            pass
        assert answer.item() == rank
        work.wait()
        assert work.is_completed() and work.is_success() and work.exception() is None and work.result()[0] is answer
        assert work._source_rank() == 0 and answer.item() == rank


def operations(rank, world, group):
    """Asynchronous operations, each with the tensors that it writes."""
    own, whole = torch.full((6,), rank + 1.0), torch.arange(6.0 * world) + rank
    many = lambda: [torch.zeros(6) for _ in range(world)]
    one, two, three, four, five, six, seven, eight = own.clone(), own.clone(), own.clone(), torch.zeros(6 * world), torch.zeros(6), torch.zeros(6), torch.zeros(6), torch.zeros(6 * world)
    wide, parts, gathered, exchanged = torch.arange(12.0).reshape(3, 4).t(), many(), many(), many()
    call = dict(group=group, async_op=True)
    yield "all_reduce", dist.all_reduce(one, **call), [one]
    yield "not contiguous", dist.all_reduce(wide, **call), [wide]
    yield "broadcast", dist.broadcast(two, 0, **call), [two]
    yield "reduce", dist.reduce(three, 0, **call), [three] if rank == 0 else []
    yield "all_gather_single", dist.all_gather_single(four, own, **call), [four]
    yield "all_gather", dist.all_gather(parts, own, **call), parts
    yield "gather", dist.gather(own, gathered if rank == 0 else None, 0, **call), gathered if rank == 0 else []
    yield "scatter", dist.scatter(five, list(whole.chunk(world)) if rank == 0 else None, 0, **call), [five]
    yield "reduce_scatter", dist.reduce_scatter(six, list(whole.chunk(world)), **call), [six]
    yield "reduce_scatter_single", dist.reduce_scatter_single(seven, whole, **call), [seven]
    yield "all_to_all_single", dist.all_to_all_single(eight, whole, **call), [eight]
    yield "barrier", dist.barrier(**call), []


def test_handles(rank, world):
    """What a program asks the handle of an operation, as with Gloo; also where PyTorch looks on."""
    gloo = dist.new_group(range(world), backend="gloo")
    for watched in (False, True, False):
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) if watched else contextlib.nullcontext() as profile:
            for (name, work, written), (_, theirs, wanted) in zip(operations(rank, world, None), operations(rank, world, gloo)):
                begun = time.monotonic()
                theirs.wait()
                if not watched:
                    while not work.is_completed():
                        assert time.monotonic() - begun < 60, name
                    assert work.is_success() and work.exception() is None
                    result, own = work.result(), [w for w in written if name != "barrier"]
                    assert isinstance(result, list) and all(a is b or torch.equal(a, b) for a, b in zip(result, own)), (name, result, own)
                    if name in ("all_reduce", "broadcast"):
                        for got, want in zip(result, theirs.result(), strict=True):
                            same(got, want)
                assert work.wait() and work.get_future().done() and isinstance(work, dist.Work)
                for got, want in zip(written, wanted, strict=True):
                    same(got, want)
        if watched:
            seen = {event.name for event in profile.events()}
            assert {"c10d::allreduce_", "c10d::broadcast_", "c10d::barrier"} <= seen, seen
    with CommDebugMode() as counted:
        dist.all_reduce(torch.ones(1))
    assert counted.get_total_counts() == 1
    # Other forms of the calls, as C++ takes them.
    one = torch.ones(2)
    for work in (dist.group.WORLD.allreduce(one), dist.group.WORLD.allreduce([one], Op.MAX), dist.group.WORLD.broadcast(one, 0), dist.group.WORLD.barrier(), dist.group.WORLD.allreduce([one])):
        work.wait()
    same(one, torch.full((2,), float(world * world)))
    seen = []
    dist.group.WORLD.register_pre_hook(7, lambda args: seen.append(args.name))
    dist.all_reduce(one)
    assert len(seen) == 1, seen
    # PyTorch crashes where the interpreter ends before the hook.
    dist.group.WORLD.unregister_pre_hook(7)


def test_coalesced(rank, world):
    """Operations in a coalescing manager, and those after one that was left by an exception."""
    cpu, total = torch.device("cpu"), sum(range(world))
    own = lambda: torch.full((3,), float(rank))
    for device in (None, cpu):
        for is_async in (False, True):
            sums = [own() for _ in range(3)] + [torch.zeros(3, 2).t().fill_(rank)]
            with dist._coalescing_manager(device=device, async_ops=is_async) as manager:
                for tensor in sums:
                    dist.all_reduce(tensor)
            manager.wait()
            for tensor in sums:
                same(tensor, torch.full(tensor.shape, float(total)))
            wide, narrow = torch.zeros(2, 3 * world), torch.zeros(2, 3)
            with dist._coalescing_manager(device=device, async_ops=is_async) as manager:
                for row in wide:
                    dist.all_gather_single(row, own())
            manager.wait()
            with dist._coalescing_manager(device=device, async_ops=is_async) as manager:
                for row, tensor in zip(narrow, wide):
                    dist.reduce_scatter_single(row, tensor)
            manager.wait()
            same(wide, torch.arange(float(world)).repeat_interleave(3).expand(2, -1))
            same(narrow, torch.full((2, 3), float(world * rank)))
    # Blocking calls wait at the end only, so that ranks may all receive first.
    given, got, several = own(), torch.zeros(3), torch.zeros(3, 2)
    with dist._coalescing_manager(device=cpu):
        if world > 1:
            dist.recv(got, (rank - 1) % world)
            dist.send(own(), (rank + 1) % world)
        dist.broadcast(given, world - 1)
        dist.all_gather([several[:, 0]] * world, given)
        assert not dist.group.WORLD._backend._coalesced[1][-1]._finishing or several.eq(0).all()
    same(given, torch.full((3,), world - 1.0))
    same(several[:, 0], given)
    assert world == 1 or got.eq((rank - 1) % world).all()
    for device in (None, cpu):
        try:
            with dist._coalescing_manager(device=device):
                dist.all_reduce(own())
                raise KeyError("of the program")
        except KeyError:
            pass
        tensor = own()
        dist.all_reduce(tensor)
        same(tensor, torch.full((3,), float(total)))
        work = dist.broadcast(tensor, 0, async_op=True)
        assert work.wait()


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(7)
        self.layers = nn.Sequential(nn.Linear(20, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 3))

    def forward(self, x):
        return self.layers(x)


def batch(step, rank):
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(8, 20, generator=generator, dtype=torch.float64), torch.randint(0, 3, (8,), generator=generator)


def train(model, optimizer, steps, rank):
    for step in range(steps):
        optimizer.zero_grad()
        x, y = batch(step, rank)
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()


def test_ddp(rank, world):
    """The weights of an accumulation in one process, up to the last bits of f64."""
    for view in (False, True):
        model = nn.parallel.DistributedDataParallel(Net().double(), bucket_cap_mb=0.01, gradient_as_bucket_view=view)
        sgd = lambda params: torch.optim.SGD(params, 0.1, momentum=0.9)
        optimizer = sgd(model.parameters())
        train(model, optimizer, 6, rank)
        for mine, wanted in zip(model.module.parameters(), accumulated(6, world, sgd).parameters()):
            close(mine, wanted)
        weights = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
        everyones = [torch.empty_like(weights) for _ in range(world)]
        dist.all_gather(everyones, weights)
        for other in everyones:
            same(other, weights)


def accumulated(steps, world, optimizer):
    """The net after `steps` steps on the batches of all ranks, in this process alone."""
    alone = Net().double()
    steps_of = optimizer(alone.parameters())
    for step in range(steps):
        steps_of.zero_grad()
        for r in range(world):
            x, y = batch(step, r)
            (nn.functional.cross_entropy(alone(x), y) / world).backward()
        steps_of.step()
    return alone


def close(mine, wanted):
    assert torch.allclose(mine, wanted, rtol=1e-11, atol=1e-13), (mine - wanted).abs().max()


def test_sharded(rank, world):
    """FSDP2, DTensor and an optimizer cut over the ranks give what one process gives."""
    mesh = init_device_mesh("cpu", (world,))
    adam = lambda params: torch.optim.Adam(params, 0.01)
    wanted = list(accumulated(4, world, adam).parameters())

    model = Net().double()
    for layer in model.layers:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = adam(model.parameters())
    train(model, optimizer, 4, rank)
    for mine, right in zip(model.parameters(), wanted):
        close(mine.full_tensor(), right)

    model = nn.parallel.DistributedDataParallel(Net().double())
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=0.01)
    train(model, optimizer, 4, rank)
    for mine, right in zip(model.parameters(), wanted):
        close(mine, right)

    torch.manual_seed(3)
    a, b = torch.randn(6, 10, dtype=torch.float64), torch.randn(10, 7, dtype=torch.float64)
    product = distribute_tensor(a, mesh, [Shard(1)]) @ distribute_tensor(b, mesh, [Shard(0)])
    close(product.full_tensor(), a @ b)
    close(product.redistribute(mesh, [Shard(0)]).full_tensor(), a @ b)


def test_groups(rank, world):
    even = list(range(0, world, 2))
    group = dist.new_group(even)
    if rank in even:
        total = torch.ones(1)
        dist.all_reduce(total, group=group)
        assert total.item() == len(even)
        assert dist.get_process_group_ranks(group) == even
    # PyTorch 2.14 splits groups of GPUs only.
    splits = world > 1 and torch.__version__ >= "2.15"
    part = dist.split_group(split_ranks=[even, [r for r in range(world) if r not in even]]) if splits else None
    if part is not None:
        total = torch.ones(1)
        dist.all_reduce(total, group=part)
        mine = even if rank in even else [r for r in range(world) if r not in even]
        assert total.item() == len(mine) and dist.get_process_group_ranks(part) == mine
        # The first one learns of all others, whoever is first.
        if rank == mine[0]:
            senders = [dist.recv(torch.empty(1), group=part) for _ in mine[1:]]
            assert sorted(senders) == mine[1:], senders
        else:
            dist.send(torch.ones(1), mine[0], group=part)
    dist.barrier()
    dist.monitored_barrier(timeout=timedelta(seconds=20))
    work = dist.all_reduce(torch.ones(3), async_op=True)
    (tensor,) = work.get_future().wait()
    same(tensor, torch.full((3,), float(world)))


def test_futures(rank, world):
    """Also of operations whose result is copied, that are over, or that come after a receive without a message."""
    into = [torch.empty(3) for _ in range(world)]
    work = dist.all_gather(into, torch.full((3,), float(rank)), async_op=True)
    time.sleep(0.2)
    work.get_future().wait()
    for r, got in enumerate(into):
        same(got, torch.full((3,), float(r)))
    if world > 1:
        late = torch.empty(1)
        receive = dist.irecv(late, (rank - 1) % world)
        receive.get_future()
        dist.all_reduce(torch.ones(1), async_op=True).get_future().wait()
        dist.send(torch.full((1,), float(rank)), (rank + 1) % world)
        receive.wait()
        assert late.item() == (rank - 1) % world
    # What is called when a future is complete may wait for another one. With several buckets the order of the hook's
    # collectives differs by rank.
    model = nn.parallel.DistributedDataParallel(Net().double())
    state = powerSGD_hook.PowerSGDState(None, start_powerSGD_iter=2)
    model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    for step in range(5):
        x, y = batch(step, rank)
        nn.functional.cross_entropy(model(x), y).backward()
    weights = torch.cat([p.grad.reshape(-1) for p in model.parameters()])
    everyones = [torch.empty_like(weights) for _ in range(world)]
    dist.all_gather(everyones, weights)
    for other in everyones:
        same(other, weights)
    # Tensors of a caller in inference mode, and conjugate ones.
    with torch.inference_mode():
        wide = torch.ones(3, 4)
        work = dist.all_reduce(wide.t(), async_op=True)
    work.wait()
    same(wide, torch.full((3, 4), float(world)))
    # The device of the tests makes nothing of these.
    turned = torch.tensor([1 + 2j, 3j]) if LATE else torch.tensor([1 + 2j, 3j]).conj()
    into = [torch.empty(2, dtype=torch.complex64) for _ in range(world)] if rank == 0 else None
    dist.gather(turned, into)
    for got in into or []:
        same(got, turned.resolve_conj())
    odd = torch.tensor([2, 0, 1], dtype=torch.uint8).view(torch.bool)
    dist.all_reduce(odd, Op.BXOR)
    assert odd.view(torch.uint8).tolist() == [world % 2, 0, world % 2]


def test_device(rank, world):
    """Operations on tensors of a device wait for its streams, and its streams for them."""
    total, other = float(sum(range(world))), torch.Stream(device="late")
    # Called on one stream and waited for on another one.
    for step in range(5):
        with other:
            given = torch.empty(4)
            given.fill_(rank + step)
            work = dist.all_reduce(given, async_op=True)
        with torch.Stream(device="late"):
            work.wait()
        # For this stream.
        work.wait()
        same(given * 2, torch.full((4,), 2 * (total + world * step)))
        with torch.Stream(device="late"):
            # By a future, from which another one follows.
            given = torch.full((4,), float(rank))
            double = dist.all_reduce(given, async_op=True).get_future().then(lambda future: future.wait()[0] * 2)
            with other:
                same(double.wait() + 1, torch.full((4,), 2 * total + 1))
            # Nobody else holds the tensor.
            dist.all_reduce(torch.full((4,), 1.0), async_op=True)
    # In the order of the calls, whatever the device.
    sums = [torch.full((4,), float(rank + n), device=("cpu", "late")[n % 2]) for n in range(20)]
    for work in [dist.all_reduce(one, async_op=n % 3 > 0) for n, one in enumerate(sums)]:
        work and work.wait()
    for n, one in enumerate(sums):
        same(one, torch.full((4,), total + world * n))
    if world > 1:
        right, left = (rank + 1) % world, (rank - 1) % world
        sent = [dist.isend(torch.full((2,), float(n), device=("cpu", "late")[n % 2]), right) for n in range(6)]
        for n in range(6):
            got = torch.empty(2, device=("late", "cpu")[n // 2 % 2])
            assert dist.recv(got, left) == left
            same(got, torch.full((2,), float(n)))
        for work in sent:
            work.wait()
        # A limited wait; the operation continues.
        slow = torch.zeros(4)
        receive = dist.irecv(slow, left)
        try:
            receive.wait(timedelta(seconds=0.1))
        except RuntimeError as error:
            assert "it continues" in str(error), error
        else:
            raise AssertionError("no message was sent")
        dist.barrier()
        dist.send(torch.full((4,), float(rank)), right)
        receive.wait()
        same(slow, torch.full((4,), float(left)))
    # Of the ranks one is slower, so that a call which does not wait for its turn meets another one.
    for step in range(3):
        sums = [torch.full((4,), float(rank * (n + 1)), device=device) for n, device in enumerate(("late", "cpu", "late"))]
        for work in [dist.all_reduce(one, async_op=True) for one in sums] + [dist.barrier(async_op=True)]:
            work.wait()
        for n, one in enumerate(sums):
            same(one, torch.full((4,), total * (n + 1)))
    # Results as of the CPU, and nothing that only the garbage collection frees.
    gc.collect()
    gc.disable()
    for name, work, written in list(operations(rank, world, None)):
        while not work.is_completed():
            time.sleep(0.001)
        result, own = work.result(), [w for w in written if name != "barrier"]
        assert isinstance(result, list) and all(a is b or torch.equal(a, b) for a, b in zip(result, own)), (name, result, own)
    one = torch.ones(2)
    watched = StorageWeakRef(one.untyped_storage())
    dist.all_reduce(one)
    same(one, torch.full((2,), float(world)))
    del one
    assert watched.expired()
    gc.enable()
    # Some groups are for one of the devices.
    for backend, device in (("cpu:gloo,late:phalanx", "late"), ("cpu:phalanx,late:fake", "cpu"), ("late:phalanx", "late")):
        group = dist.new_group(backend=backend)
        given = torch.full((3,), float(rank), device=device)
        dist.all_reduce(given, group=group)
        work = dist.all_reduce(given, Op.MAX, group=group, async_op=True)
        work.wait()
        same(given, torch.full((3,), total))
    for call in (
        lambda: dist.all_gather([torch.empty(2, device="cpu") for _ in range(world)], torch.ones(2)),
        lambda: dist.all_gather_single(torch.empty(2 * world), torch.ones(2, device="cpu")),
        lambda: dist.all_reduce_coalesced([torch.ones(2, device="cpu"), torch.ones(2)]),
    ):
        try:
            call()
        except ValueError as error:
            assert "late:0" in str(error), error
        else:
            raise AssertionError("the tensors are on two devices")
    same(dist.all_reduce(given, async_op=True).result()[0], torch.full((3,), total * world))
    if world > 1 and rank == 0:
        dist.isend(torch.full((4,), 7.0), 1)
    elif rank == 1:
        dist.recv(given.resize_(4), 0)
        same(given, torch.full((4,), 7.0))
    world_group = dist.group.WORLD
    dist.destroy_process_group()
    for device in ("late", "cpu"):
        try:
            world_group.allreduce([torch.ones(1, device=device)]).wait()
        except RuntimeError as error:
            assert "shut down" in str(error), error
        else:
            raise AssertionError("the group is gone")


def hosted_store(rank):
    """A TCP store that rank 0 hosts."""
    if rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        with open(FILE + "-new", "w") as file:
            file.write(str(store.port))
        os.rename(FILE + "-new", FILE + "-port")
        return store
    while not os.path.exists(FILE + "-port"):
        time.sleep(0.01)
    port = int(open(FILE + "-port").read())
    return dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)


def test_again(rank, world):
    """Groups one after the other meet in the same store."""
    dist.destroy_process_group()
    for kind in ("file", "tcp"):
        if kind == "file":
            store = dist.FileStore(FILE + "-again", -1)
        else:
            store = hosted_store(rank)
        for _ in range(3):
            dist.init_process_group("phalanx", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=60))
            total = torch.ones(1)
            dist.all_reduce(total)
            assert total.item() == world
            dist.destroy_process_group()
    # The host of the store stays until the others are done.
    dist.init_process_group("phalanx", init_method=f"file://{FILE}-last", rank=rank, world_size=world)
    dist.barrier()


def test_shared(rank, world):
    """Memory that the ranks map of each other: the values of ordinary memory, until it is freed."""
    count = 50_000
    for turn in range(6):
        tensor = phalanx.torch.empty(count) if (turn + rank) % 3 else torch.empty(count)
        assert turn == 5 or tensor.untyped_storage().is_shared() == (world > 1 and (turn + rank) % 3 > 0)
        wanted = torch.stack([values(r, count, torch.float32) for r in range(world)]).sum(0)
        tensor.copy_(values(rank, count, torch.float32))
        dist.all_reduce(tensor)
        same(tensor, wanted)
        # A part of it, on a line of the cache and not.
        for start in (16, 17):
            tensor.copy_(values(rank, count, torch.float32))
            dist.all_reduce(tensor[start:-start], async_op=True).wait()
            same(tensor[start:-start], wanted[start:-start])
            own = values(rank, count, torch.float32)
            same(torch.cat([tensor[:start], tensor[-start:]]), torch.cat([own[:start], own[-start:]]))
        output = phalanx.torch.empty(world * count)
        tensor.copy_(values(rank, count, torch.float32))
        dist.all_gather_into_tensor(output, tensor)
        same(output, torch.cat([values(r, count, torch.float32) for r in range(world)]))
    if world > 1:
        # The first ones were freed. Memory at the same place is another tensor's.
        dist.barrier()
        tensors = [phalanx.torch.empty(1000, 100, dtype=torch.int64) for _ in range(3)]
        assert len(phalanx.torch._SHARED) <= 5, phalanx.torch._SHARED
        tensors[0].fill_(7)
        tensors[1].fill_(8)
        # Here they are what they are; for another process they are an error.
        pickled = [multiprocessing.reduction.ForkingPickler.dumps(tensor) for tensor in tensors[:2]]
        for tensor, data in zip(tensors, pickled):
            assert pickle.loads(data).data_ptr() == tensor.data_ptr()
        for tensor in tensors[:2]:
            data = multiprocessing.reduction.ForkingPickler.dumps(tensor)
            shared_cache.clear()
            try:
                pickle.loads(data)
            except RuntimeError as error:
                assert "resize" in str(error) or "truncate" in str(error), error
            else:
                raise AssertionError("the memory cannot be had by its file")
        # A process that was forked ends without it.
        child = os.fork()
        if child == 0:
            tensors.clear()
            # This one is none of them.
            private = phalanx.torch.empty(100_000).fill_(9)
            phalanx.torch._SHARED.clear()
            os._exit(int(private.untyped_storage().is_shared()))
        assert os.waitpid(child, 0)[1] == 0
        assert tensors[0].eq(7).all()
        dist.destroy_process_group()
        assert tensors[0].add_(1).eq(8).all()


def test_shared_buckets(rank, world):
    """DDP's buckets move where the ranks map them, and stay what they were."""
    def train(wrap, batches, view):
        torch.manual_seed(3)
        model = nn.Sequential(nn.Linear(64, 600), nn.ReLU(), nn.Linear(600, 64))
        model = wrap(model, view)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
        for step in range(5):
            for r in batches:
                generator = torch.Generator().manual_seed(10 * step + r)
                (model(torch.randn(4, 64, generator=generator)).square().mean() / len(batches)).backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=step % 2 == 0)
        return [p.detach().clone() for p in model.parameters()]

    ddp = lambda model, view: nn.parallel.DistributedDataParallel(model, bucket_cap_mb=0.1, gradient_as_bucket_view=view)
    wanted = train(lambda model, _: model, range(world), True)
    for view in (True, False):
        mine = train(ddp, [rank], view)
        for got, want in zip(mine, wanted):
            torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-7)
        # A hook of PyTorch's has its own buckets reduced, which are not moved.
        with_hook = train(lambda model, view: hooked(ddp(model, view)), [rank], view)
        for got, want in zip(with_hook, mine):
            # It divides where the reducer multiplies by a third.
            same(got, want) if world < 3 else torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-7)
    # Those of the last wrapper may be there, but not those of all.
    assert world == 1 or 0 < len(phalanx.torch._SHARED) <= 6, phalanx.torch._SHARED


def hooked(model):
    model.register_comm_hook(None, default_hooks.allreduce_hook)
    return model


def test_flight(rank, world):
    """The recorder that is written is that of the default group, also where another one has failed."""
    smaller = dist.new_group([0, 1])
    dist.all_reduce(torch.ones(4321))
    # The other rank is out of it, too.
    dist.barrier(group=smaller)
    phalanx.torch._ALIVE[0].abort()
    try:
        dist.all_reduce(torch.ones(1 + rank), group=smaller)
    except dist.DistBackendError as error:
        assert "2 elements" in str(error) and "bucket_cap_mb" in str(error), error
    else:
        raise AssertionError("the lengths differ")
    with open(os.path.join(os.environ["PHALANX_FLIGHT_DIR"], f"rank-{rank}.json")) as file:
        assert '4321' in file.read()


def test_raises(rank, world):
    """The others learn why a rank has died, which does not wait for them."""
    work = dist.isend(torch.ones(1), 0) if rank == 1 else None
    if rank == 1:
        dist.all_reduce(torch.ones(4), async_op=True)
        raise ValueError("no such file")
    try:
        dist.all_reduce(torch.ones(4))
        dist.all_reduce(torch.ones(4))
        dist.all_reduce(torch.ones(4))
    except dist.DistBackendError as error:
        assert "rank 1" in str(error) and "ValueError: no such file" in str(error), error
        assert error.lost_ranks == [1], error.lost_ranks
    else:
        raise AssertionError(f"rank 1 has failed, {work}")


def test_mistakes(rank, world):
    for call in (
        lambda: dist.all_reduce(torch.ones(2, dtype=torch.int32), Op.AVG),
        lambda: dist.all_reduce(torch.ones(2, dtype=torch.float8_e5m2)),
        lambda: dist.all_gather_single(torch.empty(3 * world + 1), torch.empty(3)),
        lambda: dist.all_to_all_single(torch.empty(world, 3), torch.empty(world, 3, dtype=torch.float64)),
        lambda: dist.scatter(torch.ones(7), [torch.ones(1 + r) for r in range(world + 1)][1:], rank),
    ):
        try:
            call()
        except (ValueError, RuntimeError) as error:
            assert str(error) and phalanx.torch.lost_ranks(error) is None, error
        else:
            raise AssertionError("this was a mistake")
    total = torch.ones(1)
    dist.all_reduce(total)
    assert total.item() == world


def test_killed(rank, world):
    """The others say which rank it was, and soon."""
    dist.all_reduce(torch.ones(1))
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    begun = time.monotonic()
    try:
        dist.all_reduce(torch.ones(1 << 20))
    except dist.DistBackendError as error:
        assert "rank 1" in str(error), error
        assert isinstance(error, phalanx.torch.RankLostError) and error.lost_ranks == [1], error
        try:
            raise ValueError("as a library does") from error
        except ValueError as outer:
            assert phalanx.torch.lost_ranks(outer) == [1]
            if sys.version_info >= (3, 11):
                assert phalanx.torch.lost_ranks(ExceptionGroup("several", [KeyError(1), outer])) == [1]
    else:
        raise AssertionError("a rank has died")
    assert time.monotonic() - begun < 20
    # A future keeps the text only.
    try:
        dist.all_reduce(torch.ones(1), async_op=True).get_future().wait()
    except RuntimeError as error:
        assert phalanx.torch.lost_ranks(error) == [1], error
    else:
        raise AssertionError("a rank has died")
    assert phalanx.torch.lost_ranks(KeyError("another one")) is None


def test_killed_in_backward(rank, world):
    """DDP's futures fail too."""
    model = nn.parallel.DistributedDataParallel(Net().double())
    if rank == 1:
        model.register_comm_hook(None, lambda state, bucket: os.kill(os.getpid(), signal.SIGKILL))
    x, y = batch(0, rank)
    try:
        nn.functional.cross_entropy(model(x), y).backward()
    except RuntimeError as error:
        assert "rank 1" in str(error) and phalanx.torch.lost_ranks(error) == [1], error
    else:
        raise AssertionError("a rank has died")


def test_late(rank, world):
    """A deadline names who did not come."""
    if rank != 1:
        try:
            dist.all_reduce(torch.ones(1))
        except dist.DistBackendError as error:
            assert "rank 1" in str(error) and phalanx.torch.lost_ranks(error) is None, error
        else:
            raise AssertionError("rank 1 has not come")
    else:
        time.sleep(8)


def exchanged(store, key, ranks):
    """The handles of these ranks, in their order."""
    store.set(f"{key}/{sys.argv[2]}", dist._get_reconfigure_handle())
    return [store.get(f"{key}/{rank}").decode() for rank in ranks]


def trained(group_rank):
    """Objects, messages, and two steps of DDP in the group as it is, on the parts of the batch that its ranks have."""
    world = dist.get_world_size()
    assert dist.get_rank() == group_rank and dist.get_process_group_ranks(None) == list(range(world))
    gathered = [None] * world
    dist.all_gather_object(gathered, f"rank {group_rank}")
    assert gathered == [f"rank {r}" for r in range(world)]
    if world > 1:
        sent, received = torch.tensor([float(group_rank)]), torch.zeros(1)
        requests = dist.batch_isend_irecv([dist.P2POp(dist.isend, sent, (group_rank + 1) % world), dist.P2POp(dist.irecv, received, (group_rank - 1) % world)])
        for request in requests:
            request.wait()
        assert received.item() == (group_rank - 1) % world
    model = nn.parallel.DistributedDataParallel(Net().double())
    sgd = lambda params: torch.optim.SGD(params, 0.1)
    train(model, sgd(model.parameters()), 2, group_rank)
    for mine, wanted in zip(model.parameters(), accumulated(2, world, sgd).parameters()):
        close(mine, wanted)


def test_parts(rank, world):
    """Groups of other sizes and orders, one after the other in one store, also of processes that have ended."""
    dist.destroy_process_group()
    file = FILE + "-parts"
    # What ranks of an earlier attempt, which have all been killed while they came, have left.
    if rank == 0:
        for other in range(1, 4):
            left = dist.PrefixStore("default_pg/0//cpu/", dist.FileStore(file, -1))
            for size in range(1, 4):
                left.set(f"phalanx/come/{size}/{other}", "a word")
                left.add(f"phalanx/come/{size}", 1)
        os.rename(file, file + "-left")
    while not os.path.exists(file + "-left"):
        time.sleep(0.01)
    hosted = hosted_store(rank)
    turn = 0
    for store in (dist.FileStore(file + "-left", -1), hosted):
        for ranks in ([0, 1, 2], [0, 1], [0, 1], [1], [1, 0], [2, 0, 1], [0, 2], [1, 2], [0, 1, 2]):
            ranks = [r for r in ranks if r < world]
            # One after the other.
            hosted.wait([f"turn/{turn}/{r}" for r in range(world)] if turn else [])
            turn += 1
            if rank in ranks:
                dist.init_process_group("phalanx", store=store, rank=ranks.index(rank), world_size=len(ranks), timeout=timedelta(seconds=60))
                group = dist.new_group(list(range(len(ranks)))[-2:])
                for within, members in ((None, ranks), (group, ranks[-2:])):
                    if rank in members:
                        total = torch.tensor([float(rank)])
                        dist.all_reduce(total, group=within)
                        assert total.item() == sum(members), (ranks, within, total)
                dist.destroy_process_group()
            hosted.set(f"turn/{turn}/{rank}", "done")
    dist.init_process_group("phalanx", init_method=f"file://{FILE}-last", rank=rank, world_size=world)
    dist.barrier()


def test_sizes(rank, world):
    """Groups of two and of three ranks form in one store at the same time."""
    dist.destroy_process_group()
    store = dist.FileStore(FILE + "-sizes", -1)
    first, ranks = (0, 2) if rank < 2 else (2, 3)
    for turn in range(5):
        dist.init_process_group("phalanx", store=store, rank=rank - first, world_size=ranks, timeout=timedelta(seconds=60))
        total = torch.tensor([10.0**first])
        dist.all_reduce(total)
        assert total.item() == ranks * 10**first, (turn, total)
        dist.destroy_process_group()


def test_absent(rank, world):
    """Rank 1 does not come, and rank 0, which has PyTorch's store, waits for it there."""
    if rank == 1:
        return
    port = FILE + "-port"
    if rank == 0:
        with socket.socket() as listener:
            listener.bind(("localhost", 0))
            number = listener.getsockname()[1]
        with open(port + "-new", "w") as file:
            file.write(str(number))
        os.rename(port + "-new", port)
    while not os.path.exists(port):
        time.sleep(0.01)
    with open(port) as file:
        method = f"tcp://localhost:{file.read()}"
    try:
        dist.init_process_group("phalanx", init_method=method, rank=rank, world_size=world, timeout=timedelta(seconds=20 if rank == 0 else 5))
    except dist.DistBackendError as error:
        assert rank == 2 and "PyTorch's store" in str(error) and "rank 1 did not arrive; arrived: rank 2" in str(error), error
    except dist.DistStoreError:
        assert rank == 0
    else:
        raise AssertionError("rank 1 has not come")


def test_numbers(rank, world):
    """Numbers that are none of a rank, a tag or a length."""
    other = (rank + 1) % world
    one = torch.ones(1)
    for said, call in (
        ("Tag must be nonnegative", lambda: dist.send(one, other, tag=-1)),
        ("Tag must be nonnegative", lambda: dist.isend(one, other, tag=-(2**31))),
        ("Tag must be nonnegative", lambda: dist.irecv(one, other, tag=-1)),
        ("Tag must be nonnegative", lambda: dist.recv(one, tag=-1)),
        ("Tag must be at most 4294967295", lambda: dist.isend(one, other, tag=2**32)),
        ("there is no rank -1", lambda: dist.isend(one, -1)),
        ("there is no rank -7", lambda: dist.irecv(one, group_src=-7)),
        ("there is no rank -1", lambda: dist.broadcast(one, -1)),
        ("there is no rank -1", lambda: dist.reduce(one, group_dst=-1)),
        ("there is no rank -2", lambda: dist.gather(one, None, -2)),
        ("there is no rank -1", lambda: dist.scatter(one, None, -1)),
        ("root 9 does not exist", lambda: dist.broadcast(one, 9)),
        ("must be at least 0", lambda: dist.all_to_all_single(torch.ones(1), torch.ones(1), [2, -1] + [0] * (world - 2), [2, -1] + [0] * (world - 2))),
        ("must not be negative", lambda: dist.new_group(range(world), timeout=timedelta(seconds=-1))),
    ):
        try:
            call()
        except (ValueError, RuntimeError) as error:
            assert said in str(error), error
        else:
            raise AssertionError(f"this was a mistake: {said}")
    dist.barrier()


def test_reconfigured(rank, world):
    """The ranks of a group leave it, are killed and come back."""
    store = dist.FileStore(FILE + ".handles", world)
    assert dist._supports_reconfigure() and dist.get_world_size() == world
    try:
        dist.all_reduce(torch.ones(1))
    except RuntimeError as error:
        assert "call torch.distributed._reconfigure" in str(error), error
    else:
        raise AssertionError("the group has no ranks")
    # Each alone, and all, in descending order.
    own = dist._get_reconfigure_handle()
    dist._reconfigure(100 + rank, [own]).wait()
    trained(0)
    handles = exchanged(store, "all", reversed(range(world)))
    dist._reconfigure(1, handles, timeout=timedelta(seconds=60)).wait()
    trained(world - 1 - rank)
    for uuid, wrong, message in [(1, handles, "already used"), (2, handles + handles, "handles must be unique"), (2, ["other"], "this rank's")]:
        try:
            dist._reconfigure(uuid, wrong)
        except (RuntimeError, ValueError) as error:
            assert message in str(error), error
        else:
            raise AssertionError(message)
    trained(world - 1 - rank)
    # Without rank 0 of before, which waits in vain for a group with one more; then all again.
    try:
        if rank == world - 1:
            dist._reconfigure(4, [own, "a handle whose rank does not come"], timeout=timedelta(seconds=2))
        else:
            dist._reconfigure(5, handles[1:])
            trained(world - 2 - rank)
    except dist.DistBackendError as error:
        assert rank == world - 1 and "rank 1 did not arrive" in str(error), error
        try:
            dist.all_reduce(torch.ones(1))
        except RuntimeError as error:
            assert "call torch.distributed._reconfigure" in str(error), error
    dist._reconfigure(6, handles).wait()
    # The last operations of a group complete, although some ranks leave it at once.
    given = torch.full((100_000,), float(rank))
    dist.broadcast(given, 0)
    assert given[0].item() == world - 1
    dist._reconfigure(7, handles, timeout=timedelta(seconds=30)).wait()
    trained(world - 1 - rank)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        dist.all_reduce(torch.ones(1 << 20))
    except dist.DistBackendError as error:
        assert f"rank {world - 2}" in str(error) and error.lost_ranks == [world - 2], error
    else:
        raise AssertionError("a rank has died")
    # A rank that has died is not waited for, and a wait can be interrupted.
    for uuid, others, ends in [(8, handles, phalanx.torch.RankLostError), (9, [own, "a handle whose rank does not come"], KeyboardInterrupt)]:
        begun = time.monotonic()
        if ends is KeyboardInterrupt:
            signal.signal(signal.SIGALRM, signal.default_int_handler)
            signal.alarm(1)
        try:
            dist._reconfigure(uuid, others, timeout=timedelta(seconds=90))
        except ends as error:
            assert ends is KeyboardInterrupt or error.lost_ranks == [world - 2], error
        else:
            raise AssertionError("a rank is missing")
        assert time.monotonic() - begun < 30
    left = [r for r in range(world) if r != 1]
    # A set: its order is ours to choose, and the same everywhere.
    handles = exchanged(store, "left", left)
    dist._reconfigure(3, set(handles)).wait()
    trained(sorted(handles).index(own))


if __name__ == "__main__":
    name, rank, world, FILE = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
    torch.set_num_threads(1)
    if name == "test_flight":
        os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), PHALANX_FLIGHT_DIR=os.path.dirname(FILE))
    timeout = timedelta(seconds=3 if name == "test_late" else 100)
    backend = "cpu:phalanx" if name == "test_groups" else "phalanx"
    more = {"enable_reconfigure": True} if name == "test_reconfigured" else {}
    if name != "test_absent":
        dist.init_process_group(backend, init_method=f"file://{FILE}", rank=rank, world_size=world, timeout=timeout, **more)
    if LATE:
        torch.set_default_device("late")
    globals()[name](rank, world)
    print("ok", flush=True)
    # Half of the tests end as programs do that forget it.
    if len(name) % 2 and dist.is_initialized():
        dist.destroy_process_group()
