#!/usr/bin/env python3
"""Training programs of PyTorch with the back ends phalanx and gloo, on the ranks of one host; calls.py measures single calls.

    PYTHON tools/bench/torch/compare.py [--ranks 2] [--rounds 3] [--out FILE.json]

PYTHON has torch and the wheel of python/. The back ends take turns, `--rounds` times; the figures are medians over the
rounds of rank 0's. Prints a table, and writes what it has measured.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time

STEPS = 20


def rank_main():
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.distributed.fsdp import fully_shard

    sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "../peers"))
    from torch_models import Gpt, Mnist, ResNet18

    torch.set_num_threads(1)
    backend, rank, world, file = sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), sys.argv[5]
    dist.init_process_group(backend, init_method=f"file://{file}", rank=rank, world_size=world)
    out = {}

    def train(model, make, optimizer, name, steps=STEPS):
        """The time of a step, and with DDP how much longer forward and backward take than where nothing is averaged."""
        torch.manual_seed(rank)
        batches = [make() for _ in range(4)]
        losses, times, passes, alone = [], [], [], []

        def forward_and_backward(x, y):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x), y.reshape(-1))
            loss.backward()
            return loss

        for step in range(steps):
            x, y = batches[step % 4]
            if isinstance(model, nn.parallel.DistributedDataParallel):
                dist.barrier()
                begun = time.perf_counter()
                with model.no_sync():
                    forward_and_backward(x, y)
                alone.append(time.perf_counter() - begun)
            dist.barrier()
            begun = time.perf_counter()
            loss = forward_and_backward(x, y)
            passes.append(time.perf_counter() - begun)
            optimizer.step()
            times.append(time.perf_counter() - begun)
            losses.append(loss.item())
        out[f"{name}: a step"] = statistics.median(times[4:])
        if alone:
            out[f"{name}: communication that is not hidden"] = max(0.0, statistics.median(passes[4:]) - statistics.median(alone[4:]))
        out[f"{name}: losses"] = losses

    digits = lambda: (torch.randn(32, 1, 28, 28), torch.randint(0, 10, (32,)))
    pictures = lambda: (torch.randn(8, 3, 32, 32), torch.randint(0, 10, (8,)))
    text = lambda batch: lambda: (torch.randint(0, 65, (batch, 64)), torch.randint(0, 65, (batch, 64)))
    gpt = lambda width: Gpt(65, 64, 4, 4, width)
    sgd = lambda params: torch.optim.SGD(params, 0.05, momentum=0.9)
    adamw = lambda params: torch.optim.AdamW(params, 1e-3)
    for name, make, batch, optimizer, steps in (
        ("MNIST CNN", lambda: Mnist((0, 0)), digits, sgd, STEPS),
        ("ResNet-18", ResNet18, pictures, sgd, STEPS // 2),
        ("nanoGPT (128 wide, batch 12)", lambda: gpt(128), text(12), adamw, STEPS),
        ("GPT of 3.2 M", lambda: gpt(256), text(8), adamw, STEPS),
    ):
        torch.manual_seed(1)
        model = nn.parallel.DistributedDataParallel(make(), gradient_as_bucket_view=True)
        train(model, batch, optimizer(model.parameters()), f"DDP, {name}", steps)
    torch.manual_seed(1)
    model = gpt(256)
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    train(model, text(8), adamw(model.parameters()), "FSDP2, GPT of 3.2 M")
    dist.barrier()
    with open("/proc/self/smaps_rollup") as memory:
        # What several ranks map counts by its share.
        out["after all models: memory of rank 0"] = next(int(line.split()[1]) for line in memory if line.startswith("Pss:"))
    dist.barrier()
    if rank == 0:
        print("RESULT " + json.dumps(out), flush=True)
    dist.destroy_process_group()


def run(backend, world):
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, os.path.abspath(__file__), "--rank", backend]
        started = [
            subprocess.Popen([*command, str(rank), str(world), f"{folder}/store"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
            for rank in range(world)
        ]
        said = [process.communicate(timeout=600)[0] for process in started]
        if any(process.returncode for process in started):
            sys.exit(f"{backend}: ranks ended with {[process.returncode for process in started]}")
        return json.loads(said[0].split("RESULT ", 1)[1])


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out")
    args = parser.parse_args()
    rounds = {"phalanx": [], "gloo": []}
    for _ in range(args.rounds):
        for backend, results in rounds.items():
            results.append(run(backend, args.ranks))
    with open("/proc/cpuinfo") as info:
        cpu = next(line.split(":", 1)[1].strip() for line in info if line.startswith("model name"))
    print(f"{cpu}, {os.cpu_count()} cores, {args.ranks} ranks, medians of {args.rounds} rounds\n")
    print("| | phalanx | gloo | ratio |\n|---|---|---|---|")
    table = {}
    for name in rounds["gloo"][0]:
        if name.endswith("losses"):
            table[name] = rounds["phalanx"][0][name] == rounds["gloo"][0][name]
            print(f"| {name} | | | {'the same bits' if table[name] else 'differ'} |")
            continue
        if name.endswith("memory of rank 0"):
            table[name] = {b: statistics.median(result[name] for result in results) for b, results in rounds.items()}
            print(f"| {name} | {table[name]['phalanx'] / 1024:,.0f} MiB | {table[name]['gloo'] / 1024:,.0f} MiB | |")
            continue
        ours, theirs = (statistics.median(result[name] for result in rounds[b]) for b in ("phalanx", "gloo"))
        ratio = theirs / ours if ours else None
        table[name] = {"phalanx_s": ours, "gloo_s": theirs, "ratio": ratio}
        print(f"| {name} | {ours * 1e6:,.0f} µs | {theirs * 1e6:,.0f} µs | {f'{ratio:.2f}' if ratio else ''} |")
    if args.out:
        with open(args.out, "w") as file:
            json.dump({"cpu": cpu, "cores": os.cpu_count(), "ranks": args.ranks, "table": table, "rounds": rounds}, file, indent=1)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--rank"]:
        rank_main()
    else:
        main()
