#!/usr/bin/env python3
"""What a checkpoint in the background costs the steps of a training: ResNet-18, two ranks of one thread, 64 images each.

    cargo build --release
    tools/bench/background_save.py                              # target/release/phalanx
    tools/bench/background_save.py --phalanx old/phalanx new/phalanx --rounds 2

Binaries take turns. A step's time is that between two records of metrics.jsonl; a checkpoint after step k was begun in the
time between the records of k and k + 1, and is counted if its file is there. Prints a table; `--out` keeps all metrics.
"""
import argparse
import json
import pathlib
import re
import shutil
import statistics
import subprocess
import tempfile

p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
p.add_argument("--phalanx", nargs="+", default=["target/release/phalanx"])
p.add_argument("--rounds", type=int, default=1)
p.add_argument("--steps", type=int, default=30)
p.add_argument("--every", type=int, default=5)
p.add_argument("--out", type=pathlib.Path)
args = p.parse_args()


def run(binary, out):
    subprocess.run([binary, "train", "resnet18", "--data", "synthetic:8192", "--nproc-per-node", "2",
                    "--threads", "1", "--batch-size", "64", "--epochs", "1", "--log-interval", "1", "--seed", "1", "--keep", "1000",
                    "--save-every", str(args.every), "--stop-after", str(args.steps), "--output-dir", out], check=True, capture_output=True)
    records = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    ends = [r["elapsed_s"] for r in records if "loss" in r]
    times = {k: 1e3 * (b - a) for k, (a, b) in enumerate(zip(ends, ends[1:]), 1)}
    saved = sorted(int(re.search(r"(\d+)\.json", f.name)[1]) for f in (out / "checkpoints").glob("*.json"))
    waited = [r.get("saving_total_ms", 0) for r in records]
    # The first two are those of warming up.
    return ([times[k] for k in saved if k in times], [t for k, t in times.items() if k > 2 and k not in saved],
            [waited[k] - waited[k - 1] for k in saved if k in times], saved)


print("| binary | checkpoints after steps | steps with a checkpoint begun, ms | waited for it, ms | median of the other steps, ms | mean of all, ms |\n"
      "|---|---|---|---|---|---|")
for turn in range(args.rounds):
    for binary in args.phalanx:
        with tempfile.TemporaryDirectory(prefix="phalanx-save-", dir=".") as folder:
            out = pathlib.Path(folder) / "run"
            begun, others, waited, saved = run(binary, out)
            if args.out:
                args.out.mkdir(parents=True, exist_ok=True)
                shutil.copy(out / "metrics.jsonl", args.out / f"{pathlib.Path(binary).name}-{turn}.jsonl")
        print(f"| {binary} | {', '.join(map(str, saved))} | {', '.join(f'{t:.0f}' for t in begun)} | {', '.join(f'{t:.0f}' for t in waited)} | "
              f"{statistics.median(others):.0f} | {statistics.mean(begun + others):.0f} |", flush=True)
