#!/usr/bin/env python3
"""What single calls of torch.distributed cost with the back ends phalanx and gloo, on the ranks of one host.

    PYTHON tools/bench/torch/calls.py [--ranks 1 2 4] [--blocks 40] [--out FILE.json]

PYTHON has torch and the wheel of python/. The ranks have a group of each back end, whose blocks of calls take turns. The
figures are the minimum and the lower quartile over rank 0's blocks of the time of one call, in microseconds.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time


def calls(dist, torch, phalanx, group, rank, world):
    """Names, calls, and how many operations a call is."""
    # Several operations of a call need memory of their own.
    sizes = [("4 B", 1, 100), ("1 KiB", 256, 100), ("64 KiB", 16384, 20), ("1 MiB", 1 << 18, 4), ("25 MiB", 25 << 18, 1)]
    other = (rank + 1) % world
    for name, count, flying in sizes:
        data, wide = torch.ones(count), torch.ones(count * world)
        several = [torch.ones(count) for _ in range(flying)]

        def fly():
            for work in [dist.all_reduce(one, group=group, async_op=True) for one in several]:
                work.wait()

        def there_and_back():
            for is_mine in (rank == 0, rank != 0):
                dist.send(data, other, group=group) if is_mine else dist.recv(data, other, group=group)

        yield f"all_reduce {name}", lambda: dist.all_reduce(data, group=group), 1
        if count >= 1 << 18:
            # Gloo's is in ordinary memory.
            mapped = phalanx.torch.empty(count, group=group).fill_(1) if group.name() == "phalanx" else data
            yield f"all_reduce {name}, phalanx.torch.empty", lambda: dist.all_reduce(mapped, group=group), 1
        yield f"all_reduce {name}, async_op and wait", lambda: dist.all_reduce(data, group=group, async_op=True).wait(), 1
        yield f"all_reduce {name}, {flying} in flight, each", fly, flying
        yield f"broadcast {name}", lambda: dist.broadcast(data, 0, group=group), 1
        yield f"all_gather_single {name}", lambda: dist.all_gather_single(wide, data, group=group), 1
        if world == 2:
            yield f"send, recv {name}, there and back", there_and_back, 1
    objects = [None] * world
    yield "barrier", lambda: dist.barrier(group=group), 1
    yield "all_gather_object", lambda: dist.all_gather_object(objects, {"rank": rank}, group=group), 1
    yield "broadcast_object_list", lambda: dist.broadcast_object_list([rank], 0, group=group), 1


def rank_main(rank, world, file, blocks):
    import torch
    import torch.distributed as dist

    import phalanx.torch

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=world)
    groups = {name: dist.new_group(range(world), backend=name) for name in ("phalanx", "gloo")}
    out = {}
    for (name, ours, operations), (_, theirs, _) in zip(*(calls(dist, torch, phalanx, group, rank, world) for group in groups.values())):
        took = {"phalanx": [], "gloo": []}
        # As many calls as take some milliseconds, the same on all ranks.
        begun = time.perf_counter()
        ours(), theirs(), theirs()
        times = torch.tensor([max(1, min(200, int(0.01 / (time.perf_counter() - begun))))])
        dist.broadcast(times, 0)
        for _ in range(blocks):
            for backend, call in (("phalanx", ours), ("gloo", theirs)):
                dist.barrier(group=groups["gloo"])
                begun = time.perf_counter()
                for _ in range(times.item()):
                    call()
                took[backend].append((time.perf_counter() - begun) / times.item() / operations * 1e6)
        out[name] = {backend: [min(list_), sorted(list_)[len(list_) // 4]] for backend, list_ in took.items()}
    if rank == 0:
        print("RESULT " + json.dumps(out), flush=True)
    dist.barrier()
    dist.destroy_process_group()


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--blocks", type=int, default=40)
    parser.add_argument("--out")
    args = parser.parse_args()
    with open("/proc/cpuinfo") as info:
        cpu = next(line.split(":", 1)[1].strip() for line in info if line.startswith("model name"))
    tables = {}
    for world in args.ranks:
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, os.path.abspath(__file__), "--rank"]
            more = [str(world), f"{folder}/store", str(args.blocks)]
            started = [subprocess.Popen([*command, str(rank), *more], stdout=subprocess.PIPE, text=True) for rank in range(world)]
            said = [process.communicate(timeout=1800)[0] for process in started]
        if any(process.returncode for process in started):
            sys.exit(f"ranks ended with {[process.returncode for process in started]}")
        tables[world] = json.loads(said[0].split("RESULT ", 1)[1])
        print(f"\n{cpu}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, ranks: {world}\n")
        print("| µs, minimum and lower quartile | phalanx | gloo | ratio |\n|---|---|---|---|")
        for name, took in tables[world].items():
            ours, theirs = took["phalanx"], took["gloo"]
            ratios = " / ".join(f"{b / a:.2f}" for a, b in zip(ours, theirs))
            print(f"| {name} | {ours[0]:,.1f} / {ours[1]:,.1f} | {theirs[0]:,.1f} / {theirs[1]:,.1f} | {ratios} |", flush=True)
    if args.out:
        with open(args.out, "w") as file:
            json.dump({"cpu": cpu, "cores": os.cpu_count(), "blocks": args.blocks, "ranks": tables}, file, indent=1)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--rank"]:
        rank, world, file, blocks = sys.argv[2:]
        rank_main(int(rank), int(world), file, int(blocks))
    else:
        main()
