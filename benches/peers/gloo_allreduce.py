#!/usr/bin/env python3
"""Gloo's side of `versus.py all-reduce`: f32 sums over loopback, via PyTorch.

Prints one JSON line a size with the keys of `phalanx bench all-reduce --json`;
an iteration counts with the time of its slowest rank, as ours does.
"""
import argparse
import json
import os
import socket
import subprocess
import sys
import time

p = argparse.ArgumentParser()
p.add_argument("--world", type=int, default=2)
p.add_argument("--bytes", default="4,1024,1048576,26214400")
args = p.parse_args()


def worker():
    import torch
    import torch.distributed as dist
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    for size in map(int, args.bytes.split(",")):
        x = torch.zeros(max(1, size // 4))
        for _ in range(3):
            dist.all_reduce(x)
        dist.barrier()
        t = time.perf_counter()
        for _ in range(3):
            dist.all_reduce(x)
        each = (time.perf_counter() - t) / 3
        n = torch.tensor([min(2000, max(5, int(1 / each)))])
        dist.broadcast(n, 0)
        us = []
        for _ in range(int(n)):
            dist.barrier()
            t = time.perf_counter()
            dist.all_reduce(x)
            us.append((time.perf_counter() - t) * 1e6)
        us = torch.tensor(us, dtype=torch.float64)
        dist.all_reduce(us, dist.ReduceOp.MAX)
        us = sorted(us.tolist())
        if rank == 0:
            at = lambda q: us[round((len(us) - 1) * q)]
            print(json.dumps({"op": "all-reduce", "transport": "gloo", "world": args.world, "bytes": size,
                              "iters": len(us), "median_us": at(0.5), "p10_us": at(0.1), "p90_us": at(0.9)}),
                  flush=True)
    dist.barrier()
    dist.destroy_process_group()


if "RANK" in os.environ:
    worker()
    sys.exit()
with socket.socket() as s:
    s.bind(("127.0.0.1", 0))
    port = s.getsockname()[1]
env = dict(os.environ, WORLD_SIZE=str(args.world), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port),
           OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo")
ranks = [subprocess.Popen([sys.executable, *sys.argv], env=dict(env, RANK=str(r))) for r in range(args.world)]
sys.exit(max(abs(r.wait()) for r in ranks))
