#!/usr/bin/env python3
"""Ours against PyTorch and Gloo, interleaved in one run on the same cores.

    python3 -m venv /tmp/venv && /tmp/venv/bin/pip install torch numpy
    cargo build --release
    tools/bench/versus.py training    --python /tmp/venv/bin/python --out tools/runs/DATE-WHAT
    tools/bench/versus.py training    --models resnet18 --precisions fp32,bf16 --layouts channels-last ...
    tools/bench/versus.py collectives --python /tmp/venv/bin/python --out tools/runs/DATE-WHAT
    tools/bench/versus.py collectives --ops all-reduce --worlds 2 --bytes 1048576 ...

Each round runs every side of a case, one after the other; figures are medians
over rounds with the smallest and largest in brackets. Writes raw.jsonl (one
line a measurement), summary.md and the exact commands. Nothing else may
compute meanwhile.
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
OPS = ["all-reduce", "broadcast", "all-gather", "reduce-scatter", "all-to-all", "barrier"]
p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
p.add_argument("what", choices=["training", "collectives"])
p.add_argument("--python", required=True, help="interpreter with torch")
p.add_argument("--phalanx", default=str(HERE.parents[1] / "target/release/phalanx"))
p.add_argument("--rounds", type=int, default=5)
p.add_argument("--out", required=True, type=Path)
p.add_argument("--models", default="mnist,resnet18,mobilenetv2", help="training: which networks")
p.add_argument("--precisions", default="fp32", help="training: fp32, bf16 (PyTorch: autocast)")
p.add_argument("--layouts", default="nchw,channels-last", help="training: PyTorch's (nchw, channels-last; of GPTs: eager, compiled)")
p.add_argument("--steps", type=int, help="training: steps that are timed [default: 50 of mnist and gpt, 5 of gpt2, 15 of the others]")
p.add_argument("--ops", default=",".join(OPS), help="collectives: which ones")
p.add_argument("--worlds", default="2,4,8", help="collectives: numbers of ranks")
p.add_argument("--transports", default="shm,tcp", help="collectives: ours (peers run beside each)")
p.add_argument("--bytes", default="4,1024,1048576,26214400,46871552", help="collectives: sizes")
p.add_argument("--seconds", type=float, default=0.5, help="collectives: seconds a peer spends on a size")
args = p.parse_args()
args.out.mkdir(parents=True, exist_ok=True)

# Ranks, threads of each, samples of each: as the project's marks name them.
SHAPES = {"mnist": [(1, 1, 64), (1, 2, 64), (2, 1, 64), (2, 1, 32)],
          "resnet18": [(2, 1, 64), (1, 2, 32), (1, 2, 128)],
          "mobilenetv2": [(1, 1, 64), (1, 2, 64), (2, 1, 64)],
          "gpt": [(1, 1, 12), (1, 2, 12), (2, 1, 6)],
          "gpt2": [(1, 2, 4), (2, 1, 2)]}
FLAGS = {"nchw": [], "eager": [], "channels-last": ["--channels-last"], "compiled": ["--compile"]}


def training_cases():
    """Name, then side -> command, for every case."""
    for model in args.models.split(","):
        for precision in args.precisions.split(","):
            for w, t, b in SHAPES[model]:
                steps = args.steps or {"mnist": 50, "gpt": 50, "gpt2": 5}.get(model, 15)
                asked = [model, *f"--world {w} --threads {t} --batch {b} --precision {precision} --steps {steps}".split()]
                peer = [args.python, f"{HERE}/peers/torch_train.py", *asked]
                sides = {"ours": [args.phalanx, "bench", "train", *asked, "--json"]}
                sides |= {layout: peer + FLAGS[layout] for layout in args.layouts.split(",")}
                yield f"{model} {precision}, {w} rank{'s' * (w > 1)} x {t} thread{'s' * (t > 1)}, batch {b}", sides


def collective_cases():
    for op in args.ops.split(","):
        for world in args.worlds.split(","):
            for transport in args.transports.split(","):
                ours = [args.phalanx, "bench", op, "--world", world, "--transport", transport, "--json"]
                sized = ["--bytes", args.bytes] if op != "barrier" else []
                gloo = [args.python, f"{HERE}/peers/gloo_collectives.py", op, "--world", world, "--bytes", args.bytes,
                        "--seconds", str(args.seconds)]
                sides = {"ours": ours + sized}
                if transport == "shm" and op != "barrier":
                    sides["registered"] = ours + sized + ["--registered"]
                sides["Gloo"] = gloo
                yield f"{op}, {world} ranks, {transport}", sides


CASES = list(training_cases() if args.what == "training" else collective_cases())


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
    for name, sides in CASES:
        for side, cmd in sides.items():
            if round_ == 0:
                shown = [c.replace(str(HERE), "tools/bench") for c in cmd[1:]]
                commands.append(shlex.join([Path(cmd[0]).name, *shown]))
            # A part per rank may round a size up or down: sizes are told by their order.
            asked = [0] if name.startswith("barrier") else map(int, args.bytes.split(","))
            for size, line in zip(asked, run(cmd)):
                raw.append({"case": name, "side": side, "round": round_, "asked": size, **line})
    # Written round by round, so that a broken run still leaves its figures.
    (args.out / "raw.jsonl").write_text("".join(json.dumps(r) + "\n" for r in raw))


def figures(name, side, key, size=None):
    return [r[key] for r in raw if r["case"] == name and r["side"] == side and size in (None, r["asked"])]


def cell(v, digits=1):
    return f"{statistics.median(v):.{digits}f} [{min(v):.{digits}f}..{max(v):.{digits}f}]"


rows = []
if args.what == "training":
    layouts = args.layouts.split(",")
    times = [f"PyTorch {layout}, ms a step" for layout in layouts]
    ratios = [f"speed: x {layout}" for layout in layouts]
    columns = ["case", "ours, ms a step", *times, *ratios, "peak MiB a rank: ours / PyTorch", "first step s: ours / PyTorch"]
    rows += [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for name, sides in CASES:
        ms = {side: figures(name, side, "step_ms_median") for side in sides}
        faster = [cell([y / x for x, y in zip(ms["ours"], ms[layout])], 2) for layout in layouts]
        # Of several layouts, the better one's.
        best = lambda key: (statistics.median(figures(name, "ours", key)),
                            min(statistics.median(figures(name, layout, key)) for layout in layouts))
        (mem, first) = (best("peak_rss_mib"), best("first_step_s"))
        rows.append(f"| {name} | {' | '.join(map(cell, ms.values()))} | {' | '.join(faster)} | {mem[0]:.0f} / {mem[1]:.0f} | "
                    f"{first[0]:.2f} / {first[1]:.2f} |")
else:
    # Per case and size: every side's time; then, round by round, how many times faster than Gloo.
    rows += ["| case | bytes | ours, µs | registered, µs | Gloo, µs | ours: x Gloo | registered: x Gloo |", "|---" * 7 + "|"]
    for name, sides in CASES:
        for size in sorted({r["asked"] for r in raw if r["case"] == name}):
            t = {side: figures(name, side, "median_us", size) for side in sides}
            ratio = lambda side: f"{statistics.median(y / x for x, y in zip(t[side], t['Gloo'])):.2f}" if t.get(side) else "–"
            shown = [cell(t[s]) if t.get(s) else "–" for s in ("ours", "registered", "Gloo")]
            rows.append(f"| {name} | {size} | {' | '.join(shown)} | {ratio('ours')} | {ratio('registered')} |")

cpu = next((line.split(":")[1].strip() for line in open("/proc/cpuinfo") if line.startswith("model name")), "?")
torch = subprocess.run([args.python, "-c", "import torch; print(torch.__version__)"], capture_output=True, text=True).stdout.strip()
rustc = subprocess.run(["rustc", "--version"], capture_output=True, text=True).stdout.strip()
text = [f"# {args.what}: ours against PyTorch {torch}", "",
        f"{os.cpu_count()} cores ({cpu}), {platform.system()} {platform.release()}, {rustc}, {args.rounds} interleaved rounds; "
        "median [smallest..largest].", "", *rows, "", "Commands of a round:", "", "```", *commands, "```", ""]
(args.out / "summary.md").write_text("\n".join(text))
print("\n".join(text))
