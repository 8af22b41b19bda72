#!/usr/bin/env python3
"""PyTorch's side of `versus.py training`: steps of a network on the CPU.

One process (world 1) or DistributedDataParallel over Gloo. Prints one JSON line
with the keys of `phalanx bench train --json`. A step is forward, backward,
optimizer and loss.item(), on ready-made batches; with several ranks each step
counts with the time of its slowest rank, as ours does. bf16 is autocast.
"""
import argparse
import contextlib
import json
import os
import statistics
import sys
import time

import ranks

p = argparse.ArgumentParser()
p.add_argument("model", choices=["mnist", "resnet18", "mobilenetv2", "gpt", "gpt2"])
p.add_argument("--world", type=int, default=1)
p.add_argument("--threads", type=int, default=1)
p.add_argument("--batch", type=int, default=64)
p.add_argument("--precision", choices=["fp32", "bf16"], default="fp32")
p.add_argument("--channels-last", action="store_true")
p.add_argument("--compile", action="store_true")
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
    import torch.distributed as dist
    import torch.nn as nn
    import torch.nn.functional as F
    from torch_models import MODELS
    torch.set_num_threads(args.threads)
    build, shape = MODELS[args.model]
    is_text = args.model.startswith("gpt")
    layout = {"memory_format": torch.channels_last} if args.channels_last else {}
    torch.manual_seed(1)
    model = net = build().to(**layout) if layout else build()
    if args.world > 1:
        dist.init_process_group("gloo")
        net = nn.parallel.DistributedDataParallel(model)
    if args.compile:
        net = torch.compile(net)
    g = torch.Generator().manual_seed(rank)
    if is_text:
        length, vocab = shape
        opt = torch.optim.Adam(model.parameters(), lr=6e-4, betas=(0.9, 0.99), fused=True)
        draw = lambda: torch.randint(0, vocab, (args.batch, length), generator=g)
        pool = [(draw(), draw().view(-1)) for _ in range(4)]
    else:
        opt = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
        pool = [(torch.randn(args.batch, *shape, generator=g).contiguous(**layout),
                 torch.randint(0, 10, (args.batch,), generator=g)) for _ in range(4)]
    # The network of MNIST ends with the logarithm.
    loss_of = F.nll_loss if args.model == "mnist" else F.cross_entropy
    # Without autocast nothing of it is in the step.
    precision = lambda: torch.autocast("cpu", dtype=torch.bfloat16) if args.precision == "bf16" else contextlib.nullcontext()
    times, first = [], None
    for i in range(args.warmup + args.steps):
        x, y = pool[i % len(pool)]
        t = time.perf_counter()
        with precision():
            loss = loss_of(net(x), y)
        opt.zero_grad()
        loss.backward()
        if is_text:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
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
        print(json.dumps({"model": args.model, "precision": args.precision, "channels_last": args.channels_last,
                          "world": args.world, "threads": args.threads, "batch": args.batch, "steps": args.steps,
                          "step_ms_median": med, "compiled": args.compile,
                          "tokens_per_s" if is_text else "images_per_s":
                              args.batch * (length if is_text else 1) * args.world / med * 1e3,
                          "peak_rss_mib": peak_rss_mib(), "first_step_s": first}), flush=True)
    if args.world > 1:
        dist.barrier()
        dist.destroy_process_group()


if "PEER_T0" in os.environ:
    worker()
    sys.exit()
ranks.start(args.world, args.threads, PEER_T0=repr(time.time()))
