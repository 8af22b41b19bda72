#!/usr/bin/env python3
"""PyTorch's side of `overlap.py`: one rank of DistributedDataParallel over Gloo.

Measures as `phalanx bench train --overhead` does and prints the same keys: blocks of four steps without communication
(`no_sync`), with it, and of communication alone (all-reduces of buckets as large as DDP's, all issued at once, and the
division), in turn. RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT say who it is.
"""
import argparse
import contextlib
import json
import statistics
import time

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

from torch_models import MODELS

BLOCK = 4

p = argparse.ArgumentParser()
p.add_argument("model", choices=["mnist", "resnet18", "mobilenetv2"])
p.add_argument("--threads", type=int, default=1)
p.add_argument("--batch", type=int, default=64)
p.add_argument("--steps", type=int, default=40)
p.add_argument("--warmup", type=int, default=5)
args = p.parse_args()

torch.set_num_threads(args.threads)
build, image = MODELS[args.model]
torch.manual_seed(1)
dist.init_process_group("gloo")
net = nn.parallel.DistributedDataParallel(build())
opt = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)
g = torch.Generator().manual_seed(dist.get_rank())
pool = [(torch.randn(args.batch, *image, generator=g), torch.randint(0, 10, (args.batch,), generator=g)) for _ in range(4)]


def step(i, synced, times=None):
    x, y = pool[i % len(pool)]
    with contextlib.nullcontext() if synced else net.no_sync():
        loss = F.cross_entropy(net(x), y)
        opt.zero_grad()
        if times is not None:
            times["began"] = time.perf_counter()
        loss.backward()
        if times is not None:
            times["ended"] = time.perf_counter()
    opt.step()
    loss.item()


def communicate(buckets):
    for work, bucket in [(dist.all_reduce(b, async_op=True), b) for b in buckets]:
        work.wait()
        bucket.div_(dist.get_world_size())


def fits(buckets, communication, backward):
    """As in crates/phalanx-cli/src/bench/overhead.rs."""
    total = sum(b for _, b in buckets)
    free = fit = 0.0
    for full, size in buckets:
        start = max(free, full)
        free = start + communication * size / total
        fit += max(0.0, min(free, backward) - start)
    return fit


def backward_times():
    """Milliseconds of one backward, and when each bucket of DDP was full in it."""
    ready = {}
    hooks = [q.register_post_accumulate_grad_hook(lambda q: ready.__setitem__(q, time.perf_counter())) for q in net.parameters()]
    times = {}
    step(0, False, times)
    for hook in hooks:
        hook.remove()
    order = sorted(ready, key=ready.get)
    full, at = [], 0
    for size in sizes:
        filled = 0
        while filled < size:
            filled += order[at].numel() * 4
            at += 1
        full.append((1e3 * (ready[order[at - 1]] - times["began"]), size))
    return 1e3 * (times["ended"] - times["began"]), full


for i in range(max(args.warmup, 2)):
    step(i, True)
    step(i, False)
log = net._get_ddp_logging_data()
sizes = [int(s) for s in (log.get("rebuilt_bucket_sizes") or log["bucket_sizes"]).split(",")]
buckets = [torch.zeros(size // 4) for size in sizes]
communicate(buckets)
figures = []
for block in range((args.steps + BLOCK - 1) // BLOCK):
    pair = {}
    for synced in (block % 2 == 0, block % 2 != 0):
        dist.barrier()
        t = time.perf_counter()
        for i in range(BLOCK):
            step(i, synced)
        pair[synced] = (time.perf_counter() - t) * 1e3 / BLOCK
    dist.barrier()
    t = time.perf_counter()
    for _ in range(BLOCK):
        communicate(buckets)
    communication = (time.perf_counter() - t) * 1e3 / BLOCK
    backward, full = backward_times()
    figures.append([pair[True], pair[False], communication, backward, backward - full[0][0], fits(full, communication, backward)])
figures = torch.tensor(figures, dtype=torch.float64)
dist.all_reduce(figures)
figures /= dist.get_world_size()
if dist.get_rank() == 0:
    synced, alone, communication, backward, after_first, fit = ([row[i] for row in figures.tolist()] for i in range(6))
    hidden = sorted(100 * (a + c - s) / f for s, a, c, f in zip(synced, alone, communication, fit))
    quarter, tenth = len(hidden) // 4, len(hidden) // 10
    low = lambda values: sorted(values)[tenth]
    med = statistics.median
    print(json.dumps({
        "model": args.model, "world": dist.get_world_size(), "threads": args.threads, "batch": args.batch,
        "blocks": len(hidden), "block_steps": BLOCK, "step_ms_median": med(synced), "alone_ms_median": med(alone),
        "bucket_bytes": sizes, "communication_alone_ms_median": med(communication),
        "backward_ms_median": med(backward), "backward_after_first_bucket_ms_median": med(after_first), "fits_ms_median": med(fit),
        "hidden_percent": med(hidden), "hidden_percent_quartiles": [hidden[quarter], hidden[-1 - quarter]],
        "hidden_percent_undisturbed": 100 * (low(alone) + low(communication) - low(synced)) / low(fit)}), flush=True)
dist.barrier()
dist.destroy_process_group()
