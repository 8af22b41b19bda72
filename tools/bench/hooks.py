#!/usr/bin/env python3
"""Accuracy on MNIST by what gradients travel as: float32, bf16, f16.

    cargo build --release
    tools/bench/hooks.py --data data/mnist --out tools/runs/DATE-gradient-types

Trains `phalanx train mnist` once for each seed and type, over tcp so that
bytes are counted, and compares test accuracies after the last epoch with
float32's of the same seed. Runs whose summary.json is in --work already are not
repeated. Prints a table; --out also keeps raw.jsonl, summary.md and commands.txt.
"""
import argparse
import json
import platform
import shlex
import statistics
import subprocess
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
p = argparse.ArgumentParser(formatter_class=argparse.RawDescriptionHelpFormatter, description=__doc__)
p.add_argument("--phalanx", default=str(HERE.parents[1] / "target/release/phalanx"))
p.add_argument("--data", required=True, help="folder with MNIST")
p.add_argument("--work", type=Path, default=Path("/tmp/phalanx-gradient-types"), help="folder for the runs")
p.add_argument("--seeds", default="1,2,3")
p.add_argument("--types", default="f32,bf16,f16")
p.add_argument("--epochs", type=int, default=2)
p.add_argument("--cosine", action="store_true", help="let the learning rate fall to zero, so that seeds spread less")
p.add_argument("--transport", default="tcp", help="tcp counts the bytes; shm is faster (accuracies are the same)")
p.add_argument("--ranks", type=int, default=2)
p.add_argument("--timeout", type=float, default=1800, help="seconds a run may take")
p.add_argument("--only-finished", action="store_true", help="start no run, tell of those that are there")
p.add_argument("--out", type=Path)
args = p.parse_args()
TYPES, SEEDS = args.types.split(","), [int(s) for s in args.seeds.split(",")]

raw, commands = [], []
for seed in SEEDS:
    for kind in TYPES:
        folder = args.work / f"{kind}-{seed}"
        command = [args.phalanx, "train", "mnist", "--data", args.data, "--nproc-per-node", str(args.ranks),
                   "--epochs", str(args.epochs), "--seed", str(seed), "--gradient-type", kind,
                   "--transport", args.transport, "--output-dir", str(folder)] + ["--cosine"] * args.cosine
        summary = folder / "summary.json"
        if not summary.exists():
            if args.only_finished:
                continue
            subprocess.run(command, check=True, timeout=args.timeout, stdout=subprocess.DEVNULL)
        s = json.loads(summary.read_text())
        commands.append(shlex.join(command))
        raw.append({"type": kind, "seed": seed, "accuracies": s["accuracies"], "test_loss": s["test_loss"],
                    "sent_bytes": s["sent_bytes"], "skipped_steps": s["skipped_steps"],
                    "epochs": s["epochs"], "world_size": s["world_size"], "weights_sha256": s["weights_sha256"]})

plain = [100 * r["accuracies"][-1] for r in raw if r["type"] == "f32"]
spread = f"float32's seeds spread over {max(plain) - min(plain):.2f} points" if plain else "no float32 run"
last = {(r["type"], r["seed"]): 100 * r["accuracies"][-1] for r in raw}
lines = ["| gradients as | accuracy by seed, % | less than f32, points | mean | bytes sent of f32's |", "|---|---|---|---|---|"]
for kind in TYPES:
    seeds = [s for s in SEEDS if (kind, s) in last]
    both = [s for s in seeds if ("f32", s) in last]
    if not both:
        continue
    less = [last["f32", s] - last[kind, s] for s in both]
    sent = {r["seed"]: r["sent_bytes"] for r in raw if r["type"] == kind}
    plain = {r["seed"]: r["sent_bytes"] for r in raw if r["type"] == "f32"}
    share = statistics.median(sent[s] / plain[s] for s in both)
    lines.append(f"| {kind} | {', '.join(f'{last[kind, s]:.2f}' for s in seeds)} | {', '.join(f'{d:+.2f}' for d in less)} "
                 f"| {statistics.mean(less):+.2f} | {100 * share:.1f} % |")
table = "\n".join(lines)
print(table + "\n" + spread)
if args.out:
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "raw.jsonl").write_text("".join(json.dumps(r) + "\n" for r in raw))
    (args.out / "commands.txt").write_text("\n".join(commands) + "\n")
    (args.out / "summary.md").write_text(
        f"# MNIST by what gradients travel as\n\n{args.ranks} ranks over {args.transport}, {args.epochs} epochs, global batch "
        f"{64 * args.ranks}, seeds {', '.join(map(str, SEEDS))}; {'cosine' if args.cosine else 'constant'} learning rate, {platform.processor() or platform.machine()}, "
        f"{time.strftime('%Y-%m-%d')}.\nAccuracy on the 10,000 test images after the last epoch; bytes are all that "
        f"rank 0 sent, the rest of the training's collectives included; {spread}.\n\n{table}\n")
