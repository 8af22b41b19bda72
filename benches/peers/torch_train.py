#!/usr/bin/env python3
"""PyTorch's side of `versus.py mnist`: steps of its basic MNIST CNN on the CPU.

One process (world 1) or DistributedDataParallel over Gloo. Prints one JSON line
with the keys of `phalanx bench train --json`. A step is forward, backward,
optimizer and loss.item(), on ready-made batches; with several ranks each step
counts with the time of its slowest rank, as ours does.
"""
import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import time

p = argparse.ArgumentParser()
p.add_argument("--world", type=int, default=1)
p.add_argument("--threads", type=int, default=1)
p.add_argument("--batch", type=int, default=64)
p.add_argument("--steps", type=int, default=50)
p.add_argument("--warmup", type=int, default=5)
args = p.parse_args()


def peak_rss_mib():
    with open("/proc/self/status") as f:
        return next(int(line.split()[1]) / 1024 for line in f if line.startswith("VmHWM"))


def worker():
    began = float(os.environ["PEER_T0"])
    rank = int(os.environ["RANK"])
    import torch
    import torch.nn as nn
    import torch.nn.functional as F
    torch.set_num_threads(args.threads)

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv1 = nn.Conv2d(1, 32, 3, 1)
            self.conv2 = nn.Conv2d(32, 64, 3, 1)
            self.dropout1 = nn.Dropout(0.25)
            self.dropout2 = nn.Dropout(0.5)
            self.fc1 = nn.Linear(9216, 128)
            self.fc2 = nn.Linear(128, 10)

        def forward(self, x):
            x = F.relu(self.conv1(x))
            x = F.max_pool2d(F.relu(self.conv2(x)), 2)
            x = torch.flatten(self.dropout1(x), 1)
            x = self.dropout2(F.relu(self.fc1(x)))
            return F.log_softmax(self.fc2(x), dim=1)

    import torch.distributed as dist
    torch.manual_seed(1)
    model = net = Net()
    if args.world > 1:
        dist.init_process_group("gloo")
        net = nn.parallel.DistributedDataParallel(model)
    opt = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    g = torch.Generator().manual_seed(rank)
    pool = [(torch.randn(args.batch, 1, 28, 28, generator=g), torch.randint(0, 10, (args.batch,), generator=g))
            for _ in range(4)]
    times, first = [], None
    for i in range(args.warmup + args.steps):
        x, y = pool[i % len(pool)]
        t = time.perf_counter()
        loss = F.nll_loss(net(x), y)
        opt.zero_grad()
        loss.backward()
        opt.step()
        loss.item()
        if i >= args.warmup:
            times.append((time.perf_counter() - t) * 1e3)
        if i == 0:
            first = time.time() - began
    if args.world > 1:
        slowest = torch.tensor(times, dtype=torch.float64)
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        times = slowest.tolist()
    if rank == 0:
        med = statistics.median(times)
        print(json.dumps({"model": "mnist", "world": args.world, "threads": args.threads, "batch": args.batch,
                          "steps": args.steps, "step_ms_median": med,
                          "images_per_s": args.batch * args.world / med * 1e3,
                          "peak_rss_mib": peak_rss_mib(), "first_step_s": first}), flush=True)
    if args.world > 1:
        dist.barrier()
        dist.destroy_process_group()


if "PEER_T0" in os.environ:
    worker()
    sys.exit()
with socket.socket() as s:
    s.bind(("127.0.0.1", 0))
    port = s.getsockname()[1]
env = dict(os.environ, PEER_T0=repr(time.time()), WORLD_SIZE=str(args.world), MASTER_ADDR="127.0.0.1",
           MASTER_PORT=str(port), OMP_NUM_THREADS=str(args.threads), GLOO_SOCKET_IFNAME="lo")
ranks = [subprocess.Popen([sys.executable, *sys.argv], env=dict(env, RANK=str(r))) for r in range(args.world)]
sys.exit(max(abs(r.wait()) for r in ranks))
