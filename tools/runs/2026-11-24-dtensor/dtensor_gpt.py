#!/usr/bin/env python3
"""PyTorch's side of `run.py`: the GPT of crates/phalanx-nn/src/models/gpt.rs on Gloo and processors, one thread a rank.

    dtensor_gpt.py --mode single --text input.txt --init weights.safetensors
    torchrun --standalone --nproc-per-node 2 dtensor_gpt.py --mode fsdp --text input.txt --init weights.safetensors

single  no process group
ddp     DistributedDataParallel
tensor  parallelize_module: columns of q, k, v, fc and lm_head, rows of both proj and of wte; the loss of split logits
        (loss_parallel)
fsdp    fully_shard of each block and of the rest
mesh2d  tensor, then fully_shard, over a mesh of 2 x 2

Row r of step i starts at character ((i * batch + r) * 7919) % (len - context - 1) of the text; a token is the number of
its character in the order of code points. Rank 0 prints JSON.
"""
import argparse
import contextlib
import json
import os
import statistics
import sys
import time

import numpy
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel, PrepareModuleInput, RowwiseParallel, loss_parallel, parallelize_module)
from torch.nn import functional as F

p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
p.add_argument("--mode", choices=["single", "ddp", "tensor", "fsdp", "mesh2d"], required=True)
p.add_argument("--text", required=True)
p.add_argument("--init", required=True, help="safetensors with the initial weights")
p.add_argument("--layers", type=int, default=2)
p.add_argument("--heads", type=int, default=4)
p.add_argument("--width", type=int, default=64)
p.add_argument("--context", type=int, default=32)
p.add_argument("--batch", type=int, default=8, help="sequences of a step on all ranks together")
p.add_argument("--steps", type=int, default=20)
p.add_argument("--lr", type=float, default=1e-3)
p.add_argument("--sgd", action="store_true", help="instead of Adam")
p.add_argument("--no-fused", dest="fused", action="store_false", help="the optimizer's plain loop instead of its fused kernel")
args = p.parse_args()


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.proj = (nn.Linear(args.width, args.width) for _ in range(4))

    def forward(self, x):
        # As many heads as this rank has.
        q, k, v = (f(x).unflatten(-1, (-1, args.width // args.heads)).transpose(1, 2) for f in (self.q, self.k, self.v))
        return self.proj(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(args.width, 4 * args.width)
        self.proj = nn.Linear(4 * args.width, args.width)

    def forward(self, x):
        return self.proj(F.gelu(self.fc(x), approximate="tanh"))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.ln_1, self.attn = nn.LayerNorm(args.width), Attention()
        self.ln_2, self.mlp = nn.LayerNorm(args.width), Mlp()

    def forward(self, x):
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class Gpt(nn.Module):
    def __init__(self, vocab):
        super().__init__()
        self.transformer = nn.ModuleDict({
            "wte": nn.Embedding(vocab, args.width),
            "wpe": nn.Embedding(args.context, args.width),
            "h": nn.ModuleList(Block() for _ in range(args.layers)),
            "ln_f": nn.LayerNorm(args.width),
        })
        self.lm_head = nn.Linear(args.width, vocab, bias=False)

    def forward(self, tokens):
        parts = self.transformer
        x = parts["wte"](tokens) + parts["wpe"](torch.arange(tokens.shape[1]))
        for block in parts["h"]:
            x = block(x)
        return self.lm_head(parts["ln_f"](x))


def tensor_parallel(model, mesh):
    copied = {"input_layouts": (Replicate(),), "desired_input_layouts": (Replicate(),)}
    parallelize_module(model, mesh, {
        "transformer.wte": RowwiseParallel(input_layouts=Replicate()),
        "lm_head": ColwiseParallel(output_layouts=Shard(-1), use_local_output=False),
    })
    for block in model.transformer["h"]:
        parallelize_module(block, mesh, {
            # Once for q, k and v: backward adds their gradients before one all-reduce.
            "attn": PrepareModuleInput(**copied),
            "attn.q": ColwiseParallel(), "attn.k": ColwiseParallel(), "attn.v": ColwiseParallel(),
            "attn.proj": RowwiseParallel(),
            "mlp.fc": ColwiseParallel(), "mlp.proj": RowwiseParallel(),
        })


def shard(model, mesh):
    for block in model.transformer["h"]:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)


def memory(line):
    """A line of /proc/self/status in MiB: VmRSS, or VmHWM for the most so far."""
    with open("/proc/self/status") as file:
        return next(int(l.split()[1]) for l in file if l.startswith(line)) / 1024


torch.set_num_threads(1)
rank, world, mesh = 0, 1, None
if args.mode != "single":
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
base = memory("VmRSS:")
with open(args.text) as file:
    text = file.read()
number = {c: i for i, c in enumerate(sorted(set(text)))}
tokens = torch.from_numpy(numpy.fromiter((number[c] for c in text), dtype=numpy.int64, count=len(text)))

with torch.device("meta"):
    model = Gpt(len(number))
weights = load_file(args.init)
model.load_state_dict(weights, strict=True, assign=True)
del weights
parameters = sum(w.numel() for w in model.parameters())
rows, losses_of = range(args.batch), contextlib.nullcontext
if args.mode == "ddp":
    model = nn.parallel.DistributedDataParallel(model)
elif args.mode == "tensor":
    tensor_parallel(model, init_device_mesh("cpu", (world,), mesh_dim_names=("tensor",)))
elif args.mode == "fsdp":
    shard(model, init_device_mesh("cpu", (world,), mesh_dim_names=("data",)))
elif args.mode == "mesh2d":
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    tensor_parallel(model, mesh["tensor"])
    shard(model, mesh["data"])
if args.mode in ("tensor", "mesh2d"):
    losses_of = loss_parallel
if args.mode in ("ddp", "fsdp", "mesh2d"):
    parts = 2 if args.mode == "mesh2d" else world
    here = rank // (world // parts)
    rows = range(here * args.batch // parts, (here + 1) * args.batch // parts)
# One kernel updates all tensors of a group, if all are DTensors of one mesh or none is.
groups = {}
for w in model.parameters():
    groups.setdefault(str(w.device_mesh) if isinstance(w, DTensor) else "", []).append(w)
rule = torch.optim.SGD if args.sgd else torch.optim.Adam
optimizer = rule([{"params": group} for group in groups.values()], lr=args.lr, fused=args.fused)

losses, times = [], []
for i in range(args.steps):
    began = time.perf_counter()
    starts = [((i * args.batch + r) * 7919) % (len(text) - args.context - 1) for r in rows]
    x = torch.stack([tokens[s:s + args.context] for s in starts])
    y = torch.stack([tokens[s + 1:s + 1 + args.context] for s in starts])
    optimizer.zero_grad()
    with losses_of():
        loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
        loss.backward()
    optimizer.step()
    loss = loss.detach()
    loss = loss.to_local() if isinstance(loss, DTensor) else loss
    if len(rows) < args.batch:
        loss = loss.clone()
        dist.all_reduce(loss)
        loss /= world
    losses.append(loss.item())
    times.append(time.perf_counter() - began)

own = (base, memory("VmHWM:"))
everyone = [own] * world
if world > 1:
    dist.all_gather_object(everyone, own)
if rank == 0:
    print(json.dumps({
        "ranks": world,
        "parameters": parameters,
        "losses": losses,
        # The first two find memory for the others.
        "median_ms": statistics.median(times[min(2, len(times) - 1):]) * 1e3,
        "memory_mib": everyone,
        "torch": torch.__version__,
    }))
if world > 1:
    # DDP on Gloo sometimes ends in "terminate called without an active exception" (2 of 5 runs with PyTorch 2.15).
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)
