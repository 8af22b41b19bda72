#!/usr/bin/env python3
"""Usage: tools/bench/tracking.py --phalanx PHALANX [--rounds 5] [--out FILE.jsonl]

What it costs to track and show a run: `train mnist` on two ranks with the least that is logged, with the defaults, and
with everything on, interleaved. A line of --out is one run. Prints the median of images a second and each one's ratio.
"""
import argparse
import json
import os
import pathlib
import statistics
import subprocess
import tempfile

TRAIN = "train mnist --nproc-per-node 2 --threads 1 --data synthetic:25600 --epochs 1 --test-batch-size 500".split()
# Losses are recorded, but not printed, and nothing of what the ranks use.
LEAST = ["--log-interval", "1000000"]
# A tracker that is away costs as much as one that is there, but for its server's own work on the same cores.
EVERYTHING = ["--watch", "100", "--wandb", "--live", "--mlflow", "http://127.0.0.1:9"]
WAYS = {"least": LEAST, "defaults": [], "everything": EVERYTHING}


def once(phalanx, way):
    with tempfile.TemporaryDirectory() as folder:
        out = pathlib.Path(folder) / "out"
        interval = "1000000" if way == "least" else "5"
        subprocess.run(
            [phalanx, *TRAIN, *WAYS[way], "--output-dir", str(out)],
            check=True, cwd=folder, env={**os.environ, "PHALANX_SYSTEM_INTERVAL_S": interval},
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )
        summary = json.loads((out / "summary.json").read_text())
        return {"way": way, **{name: summary[name] for name in ("images_per_s", "train_s", "total_s", "weights_sha256")}}


parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--phalanx", type=lambda path: str(pathlib.Path(path).resolve()), required=True)
parser.add_argument("--rounds", type=int, default=5)
parser.add_argument("--out", type=pathlib.Path)
args = parser.parse_args()
runs = []
for number in range(args.rounds):
    ways = list(WAYS) if number % 2 == 0 else list(reversed(WAYS))
    for way in ways:
        runs.append({"round": number, **once(args.phalanx, way)})
        print(json.dumps(runs[-1]), flush=True)
if args.out:
    args.out.write_text("".join(json.dumps(run) + "\n" for run in runs))
assert len({run["weights_sha256"] for run in runs}) == 1, "other weights"
speed = lambda way: statistics.median(run["images_per_s"] for run in runs if run["way"] == way)
for way in WAYS:
    print(f"{way:<11} {speed(way):7.0f} images/s  {speed(way) / speed('least'):.3f}")
