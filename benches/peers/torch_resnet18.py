#!/usr/bin/env python3
"""Steps of the CIFAR ResNet-18 in PyTorch on the CPU, channels-last, fp32 or bf16 autocast.

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
p.add_argument("--precision", choices=["fp32", "bf16"], default="fp32")
p.add_argument("--steps", type=int, default=10)
p.add_argument("--warmup", type=int, default=2)
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

    class Block(nn.Module):
        def __init__(self, inputs, outputs, stride):
            super().__init__()
            self.residual_function = nn.Sequential(
                nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU(inplace=True),
                nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False), nn.BatchNorm2d(outputs))
            self.shortcut = nn.Sequential()
            if stride != 1 or inputs != outputs:
                self.shortcut = nn.Sequential(
                    nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

        def forward(self, x):
            return F.relu(self.residual_function(x) + self.shortcut(x), inplace=True)

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            layers = [nn.Conv2d(3, 64, 3, 1, 1, bias=False), nn.BatchNorm2d(64), nn.ReLU(inplace=True)]
            inputs = 64
            for outputs, first in ((64, 1), (128, 2), (256, 2), (512, 2)):
                for stride in (first, 1):
                    layers.append(Block(inputs, outputs, stride))
                    inputs = outputs
            self.features = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten())
            self.dense_layer = nn.Linear(512, 10)

        def forward(self, x):
            return self.dense_layer(self.features(x))

    import torch.distributed as dist
    torch.manual_seed(1)
    model = net = Net().to(memory_format=torch.channels_last)
    if args.world > 1:
        dist.init_process_group("gloo")
        net = nn.parallel.DistributedDataParallel(model)
    opt = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    g = torch.Generator().manual_seed(rank)
    pool = [(torch.randn(args.batch, 3, 32, 32, generator=g).contiguous(memory_format=torch.channels_last),
             torch.randint(0, 10, (args.batch,), generator=g)) for _ in range(4)]
    times, first = [], None
    for i in range(args.warmup + args.steps):
        x, y = pool[i % len(pool)]
        t = time.perf_counter()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=args.precision == "bf16"):
            loss = F.cross_entropy(net(x), y)
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
        print(json.dumps({"model": "resnet18", "precision": args.precision, "world": args.world, "threads": args.threads, "batch": args.batch,
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
