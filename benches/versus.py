#!/usr/bin/env python3
"""Ours against PyTorch and Gloo, interleaved in one run on the same cores.

    python3 -m venv /tmp/venv && /tmp/venv/bin/pip install torch numpy
    cargo build --release
    benches/versus.py mnist      --python /tmp/venv/bin/python --out benches/runs/DATE-WHAT
    benches/versus.py all-reduce --python /tmp/venv/bin/python --out benches/runs/DATE-WHAT

Each round runs ours, then the peer; figures are medians over rounds with the
smallest and largest in brackets. Writes raw.jsonl (one line a measurement),
summary.md and the exact commands. Nothing else may compute meanwhile.
"""
import argparse
import json
import os
import platform
import shlex
import statistics
import subprocess
from pathlib import Path

HERE = Path(__file__).resolve().parent
p = argparse.ArgumentParser()
p.add_argument("what", choices=["mnist", "all-reduce"])
p.add_argument("--python", required=True, help="interpreter with torch")
p.add_argument("--phalanx", default=str(HERE.parent / "target/release/phalanx"))
p.add_argument("--rounds", type=int, default=5)
p.add_argument("--out", required=True, type=Path)
args = p.parse_args()
args.out.mkdir(parents=True, exist_ok=True)

SIZES = "4,1024,1048576,26214400"
if args.what == "mnist":
    CASES = [(f"{w} rank{'s' * (w > 1)} x {t} thread{'s' * (t > 1)}, batch {b}",
              f"bench train mnist --world {w} --threads {t} --batch {b} --json",
              f"torch_train.py --world {w} --threads {t} --batch {b}")
             for w, t, b in [(1, 1, 64), (1, 2, 64), (2, 1, 64), (2, 1, 32)]]
else:
    CASES = [(f"{w} ranks, {t}", f"bench all-reduce --world {w} --transport {t} --bytes {SIZES} --json",
              f"gloo_allreduce.py --world {w} --bytes {SIZES}")
             for w in (2, 4) for t in ("shm", "tcp")]


def run(cmd, tries=3):
    """Runs a side; Gloo now and then aborts while it shuts down, so a failure is tried again."""
    print("+", shlex.join(cmd), flush=True)
    done = subprocess.run(cmd, capture_output=True, text=True)
    if done.returncode:
        print(f"  failed with status {done.returncode}: {done.stderr.strip()[-300:]}", flush=True)
        if tries > 1:
            return run(cmd, tries - 1)
        raise SystemExit("gave up")
    out = done.stdout
    return [json.loads(line[line.index("{"):]) for line in out.splitlines() if "{" in line]


raw, commands = [], []
for round_ in range(args.rounds):
    for name, ours, peer in CASES:
        for side, cmd in (("ours", [args.phalanx, *ours.split()]),
                          ("peer", [args.python, str(HERE / "peers" / peer.split()[0]), *peer.split()[1:]])):
            if round_ == 0:
                commands.append(shlex.join([Path(cmd[0]).name, *[c.replace(str(HERE), "benches") for c in cmd[1:]]]))
            for line in run(cmd):
                raw.append({"case": name, "side": side, "round": round_, **line})
    # Written round by round, so that a broken run still leaves its figures.
    (args.out / "raw.jsonl").write_text("".join(json.dumps(r) + "\n" for r in raw))


def figures(name, side, key, size=None):
    return [r[key] for r in raw if r["case"] == name and r["side"] == side and r.get("bytes") == size]


def cell(v, digits=1):
    return f"{statistics.median(v):.{digits}f} [{min(v):.{digits}f}..{max(v):.{digits}f}]"


rows = []
if args.what == "mnist":
    rows += ["| case | ours, ms a step | PyTorch, ms a step | images/s ratio | peak MiB ours / PyTorch | first step s |", "|---|---|---|---|---|---|"]
    for name, _, _ in CASES:
        a, b = figures(name, "ours", "step_ms_median"), figures(name, "peer", "step_ms_median")
        ratio = [y / x for x, y in zip(a, b)]
        mem = [statistics.median(figures(name, s, "peak_rss_mib")) for s in ("ours", "peer")]
        first = [statistics.median(figures(name, s, "first_step_s")) for s in ("ours", "peer")]
        rows.append(f"| {name} | {cell(a)} | {cell(b)} | {cell(ratio, 2)} | {mem[0]:.0f} / {mem[1]:.0f} | {first[0]:.2f} / {first[1]:.2f} |")
else:
    rows += ["| case | bytes | ours, µs | Gloo, µs | times faster |", "|---|---|---|---|---|"]
    for name, _, _ in CASES:
        for size in map(int, SIZES.split(",")):
            a, b = figures(name, "ours", "median_us", size), figures(name, "peer", "median_us", size)
            rows.append(f"| {name} | {size} | {cell(a)} | {cell(b)} | {cell([y / x for x, y in zip(a, b)], 2)} |")

cpu = next((line.split(":")[1].strip() for line in open("/proc/cpuinfo") if line.startswith("model name")), "?")
torch = subprocess.run([args.python, "-c", "import torch; print(torch.__version__)"], capture_output=True, text=True).stdout.strip()
rustc = subprocess.run(["rustc", "--version"], capture_output=True, text=True).stdout.strip()
text = [f"# {args.what}: ours against PyTorch {torch}", "",
        f"{os.cpu_count()} cores ({cpu}), {platform.system()} {platform.release()}, {rustc}, {args.rounds} interleaved rounds; "
        "median [smallest..largest].", "", *rows, "", "Commands of a round:", "", "```", *commands, "```", ""]
(args.out / "summary.md").write_text("\n".join(text))
print("\n".join(text))
