#!/usr/bin/env python3
"""Gloo's side of `versus.py collectives`: f32 over loopback, via PyTorch.

Prints one JSON line a size with the keys of `phalanx bench OP --json`; every
iteration begins with a barrier and counts with the time of its slowest rank,
as ours does. Bytes are those of the whole result (all-gather) or the whole
input (reduce-scatter, all-to-all). Ranks started by somebody else (RANK is
set) just take part.
"""
import argparse
import json
import os
import sys
import time

import ranks

p = argparse.ArgumentParser()
p.add_argument("op", choices=["all-reduce", "broadcast", "all-gather", "reduce-scatter", "all-to-all", "barrier"])
p.add_argument("--world", type=int, default=2)
p.add_argument("--bytes", default="4,1024,1048576,26214400")
p.add_argument("--seconds", type=float, default=1.0, help="time to spend on a size")
args = p.parse_args()


def operation(dist, torch, world, size):
    """The call to be timed, on memory that was written (pages of zeros may all be one page)."""
    part = max(1, size // 4 // world)
    whole = torch.ones(part * world)
    mine = torch.ones(part)
    return {
        "all-reduce": lambda x=torch.ones(max(1, size // 4)): dist.all_reduce(x),
        "broadcast": lambda x=torch.ones(max(1, size // 4)): dist.broadcast(x, 0),
        "all-gather": lambda: dist.all_gather_into_tensor(whole, mine),
        "reduce-scatter": lambda: dist.reduce_scatter_tensor(mine, whole),
        "all-to-all": lambda out=torch.ones(part * world): dist.all_to_all_single(out, whole),
        "barrier": dist.barrier,
    }[args.op]


def worker():
    import torch
    import torch.distributed as dist
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    for size in [0] if args.op == "barrier" else map(int, args.bytes.split(",")):
        once = operation(dist, torch, world, size)
        for _ in range(3):
            once()
        # A tenth of a second to settle on the cores, as ours.
        for settling in 0.1, 0:
            dist.barrier()
            t = time.perf_counter()
            for _ in range(3):
                once()
            each = (time.perf_counter() - t) / 3
            n = torch.tensor([int(settling / each)])
            dist.broadcast(n, 0)
            for _ in range(int(n)):
                once()
        n = torch.tensor([min(2000, max(5, int(args.seconds / each)))])
        dist.broadcast(n, 0)
        us = []
        for _ in range(int(n)):
            dist.barrier()
            t = time.perf_counter()
            once()
            us.append((time.perf_counter() - t) * 1e6)
        us = torch.tensor(us, dtype=torch.float64)
        dist.all_reduce(us, dist.ReduceOp.MAX)
        us = sorted(us.tolist())
        if rank == 0:
            at = lambda q: us[round((len(us) - 1) * q)]
            print(json.dumps({"op": args.op, "transport": "gloo", "world": world, "bytes": size,
                              "iters": len(us), "median_us": at(0.5), "p10_us": at(0.1), "p90_us": at(0.9)}),
                  flush=True)
    dist.barrier()
    dist.destroy_process_group()


if "RANK" in os.environ:
    worker()
    sys.exit()
ranks.start(args.world, 1)
