#!/usr/bin/env python3
"""Global tensors beside PyTorch's DTensor: the same GPT, weights, batches and meshes; losses, time a step and memory.

    cargo build --release && cargo build -p phalanx-global --release --examples
    tools/runs/2026-11-24-dtensor/run.py --python VENV/bin/python --text DIR/input.txt --out results.json

See repeat.md. Exits with 1 when losses differ by more than the limits.
"""
import argparse
import json
import os
import platform
import shlex
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
BUILT = Path(os.environ.get("CARGO_TARGET_DIR", HERE.parents[2] / "target")) / "release"
p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
p.add_argument("--python", default=sys.executable, help="interpreter with torch, numpy and safetensors")
p.add_argument("--phalanx", default=str(BUILT / "phalanx"), help="the launcher")
p.add_argument("--example", default=str(BUILT / "examples/gpt_bench"))
p.add_argument("--text", required=True)
p.add_argument("--cases", default="single:1,ddp:2,tensor:2,fsdp:2,ddp:4,fsdp:4,mesh2d:4", help="MODE:RANKS, separated by commas")
p.add_argument("--rounds", type=int, default=3, help="runs of each case and side, in turn")
p.add_argument("--layers", type=int, default=2)
p.add_argument("--heads", type=int, default=4)
p.add_argument("--width", type=int, default=64)
p.add_argument("--context", type=int, default=32)
p.add_argument("--batch", type=int, default=8, help="sequences of a step on all ranks together")
p.add_argument("--steps", type=int, default=20)
p.add_argument("--lr", type=float, default=1e-3)
p.add_argument("--sgd", action="store_true", help="instead of Adam")
p.add_argument("--no-fused", action="store_true", help="PyTorch's plain optimizer loop instead of its fused kernel")
p.add_argument("--limit", type=float, default=1e-5, help="relative difference of our losses from our single rank's")
p.add_argument("--peer-limit", type=float, default=1e-4, help="relative difference of PyTorch's losses from ours")
p.add_argument("--seconds", type=float, default=1800, help="that one run may take")
p.add_argument("--out", type=Path)
args = p.parse_args()
cases = [(mode, int(ranks)) for mode, ranks in (case.split(":") for case in args.cases.split(","))]
if ("single", 1) not in cases:
    cases.insert(0, ("single", 1))
scratch = tempfile.TemporaryDirectory(prefix="phalanx-dtensor-")
INIT = Path(scratch.name) / "init.safetensors"
MODEL = [f"--{name}={getattr(args, name)}" for name in ("text", "layers", "heads", "width", "context", "batch", "steps", "lr")]
MODEL += ["--sgd"] * args.sgd


def run(command, **variables):
    one = {**os.environ, "OMP_NUM_THREADS": "1", **variables}
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, timeout=args.seconds, env=one)
    if done.returncode != 0:
        sys.exit(f"{shlex.join(command)}\nended with {done.returncode}\n{done.stdout}\n{done.stderr}")
    return {"command": shlex.join(command), **json.loads(done.stdout.splitlines()[-1])}


def ours(mode, ranks):
    command = [args.example, "--mode", mode, *MODEL]
    if mode == "single":
        return run([*command, f"--save-init={INIT}"])
    return run([args.phalanx, "launch", "--no-prefix", "--nproc-per-node", str(ranks), "--", *command])


def theirs(mode, ranks, **variables):
    command = [str(HERE / "dtensor_gpt.py"), "--mode", mode, *MODEL, f"--init={INIT}"]
    command += ["--no-fused"] * args.no_fused
    if mode == "single":
        return run([args.python, *command], **variables)
    return run([args.python, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), *command], **variables)


def apart(a, b):
    """Relative differences of losses, step by step."""
    return [abs(x - y) / abs(y) for x, y in zip(a, b, strict=True)]


def shown(differences):
    return " ".join(f"{d:.0e}" for d in differences)


def processor():
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.machine()


results = {case: {"ours": [], "torch": [], "torch_returning": []} for case in cases}
failures = []
for number in range(args.rounds):
    for mode, ranks in cases:
        print(f"round {number + 1}, {mode} on {ranks}", file=sys.stderr, flush=True)
        both = results[mode, ranks]
        both["ours"].append(ours(mode, ranks))
        both["torch"].append(theirs(mode, ranks))
for mode, ranks in cases:
    print(f"memory, {mode} on {ranks}", file=sys.stderr, flush=True)
    # glibc keeps most of what fully_shard frees, unless each large piece is a mapping of its own.
    results[mode, ranks]["torch_returning"].append(theirs(mode, ranks, MALLOC_MMAP_THRESHOLD_="131072"))

single = {side: results["single", 1][side][0]["losses"] for side in ("ours", "torch")}
print("Relative differences of losses, step by step\n")
for (mode, ranks), both in results.items():
    for side in both:
        if any(r["losses"] != both[side][0]["losses"] for r in both[side]):
            print(f"{mode} on {ranks}, {side}: losses differ from round to round")
    first = {side: both[side][0]["losses"] for side in both}
    for what, differences, limit in [
        ("ours from our single rank", apart(first["ours"], single["ours"]), args.limit),
        ("PyTorch from its single rank", apart(first["torch"], single["torch"]), None),
        ("PyTorch from ours", apart(first["torch"], first["ours"]), args.peer_limit),
    ]:
        print(f"{mode} on {ranks}, {what}: largest {max(differences):.1e}; {shown(differences)}")
        if limit is not None and not max(differences) <= limit:
            failures.append(f"{mode} on {ranks}, {what}: {max(differences):.1e} is more than {limit:.0e}")

rows = []
for (mode, ranks), both in results.items():
    row = {"mode": mode, "ranks": ranks}
    for side, runs in both.items():
        row[f"{side}_ms"] = statistics.median(r["median_ms"] for r in runs)
        row[f"{side}_ms_range"] = [f(r["median_ms"] for r in runs) for f in (min, max)]
        # Of each rank before the model, and the most.
        for place, what in enumerate(["base_rss_mib", "peak_rss_mib"]):
            row[f"{side}_{what}"] = statistics.median(max(m[place] for m in r["memory_mib"]) for r in runs)
    rows.append(row)
config = {name: getattr(args, name) for name in ("layers", "heads", "width", "context", "batch", "steps", "lr", "sgd")}
machine = f"{processor()}, {os.cpu_count()} processors"
parameters = results["single", 1]["ours"][0]["parameters"]
torch = results["single", 1]["torch"][0]["torch"]
print(f"\n{machine}; PyTorch {torch}; {parameters:,} parameters; medians of {args.rounds} rounds; {config}\n")
print("| mode | ranks | ours, ms | PyTorch, ms | PyTorch / ours | ours, peak MiB | PyTorch, peak MiB | returning |\n|---|---|---|---|---|---|---|---|")
for r in rows:
    print(f"| {r['mode']} | {r['ranks']} | {r['ours_ms']:.2f} | {r['torch_ms']:.2f} | {r['torch_ms'] / r['ours_ms']:.2f} "
          f"| {r['ours_peak_rss_mib']:.0f} | {r['torch_peak_rss_mib']:.0f} | {r['torch_returning_peak_rss_mib']:.0f} |")
ddp = {r["ranks"]: r for r in rows if r["mode"] == "ddp"}
print("\n| against DDP on as many ranks | ours, time | PyTorch, time | ours, peak | PyTorch, peak | returning | returning, above its start |\n|---|---|---|---|---|---|---|")
for r in rows:
    if r["mode"] not in ("single", "ddp") and r["ranks"] in ddp:
        d = ddp[r["ranks"]]
        above = [x["torch_returning_peak_rss_mib"] - x["torch_returning_base_rss_mib"] for x in (r, d)]
        print(f"| {r['mode']} on {r['ranks']} | {r['ours_ms'] / d['ours_ms']:.2f} | {r['torch_ms'] / d['torch_ms']:.2f} "
              f"| {r['ours_peak_rss_mib'] / d['ours_peak_rss_mib']:.0%} | {r['torch_peak_rss_mib'] / d['torch_peak_rss_mib']:.0%} "
              f"| {r['torch_returning_peak_rss_mib'] / d['torch_returning_peak_rss_mib']:.0%} | {above[0] / above[1]:.0%} |")
if args.out:
    runs = [{"mode": mode, "ranks": ranks, **both} for (mode, ranks), both in results.items()]
    whole = {"processor": machine, "torch": torch, "parameters": parameters, "config": config,
             "rows": rows, "failures": failures, "runs": runs}
    args.out.write_text(json.dumps(whole, indent=1) + "\n")
for failure in failures:
    print(f"FAILED: {failure}")
sys.exit(bool(failures))
