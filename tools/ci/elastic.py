#!/usr/bin/env python3
"""Kills ranks of an elastic training at random moments; the result must be that of an undisturbed one.

    tools/ci/elastic.py --phalanx target/release/phalanx --kills 200 [--hosts 2] [--seed 1] [--data DIR] [--gap 1.5]

Four ranks train the MNIST CNN with --deterministic shards, on this host, or on two (network namespaces; needs root).
Killed ranks are started again and join. Checked: exit code 0; the hashes of weights, optimizer and metrics; each sample
once an epoch in the samples' logs; one loss a step. Reported: how long after a kill it was noticed, and how long it took
from there until the ranks went on with the step (without the step itself). Exits 1 when a check failed.
"""

import argparse
import collections
import glob
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time

HASHES = ["weights_sha256", "optimizer_sha256", "metrics_sha256"]


def ranks_of(folder):
    """The processes of ranks of the training that writes into `folder`."""
    found = []
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        try:
            with open(f"/proc/{name}/environ", "rb") as file:
                variables = file.read().split(b"\0")
        except OSError:
            continue
        if any(v.startswith(b"RANK=") for v in variables) and f"TMPDIR={folder}".encode() in variables:
            found.append(int(name))
    return found


def words(args, folder, run, epochs):
    return [args.phalanx, "train", "mnist", *(["--data", args.data] if args.data else ["--synthetic-samples", "4800"]),
            "--epochs", str(epochs), "--global-batch-size", "96", "--deterministic", "shards", "--shards", "8",
            "--threads", "1", "--log-interval", "1", "--output-dir", f"{folder}/{run}"]


def start(args, folder, epochs):
    elastic = ["--elastic", "--max-restarts", str(10 * args.kills), "--log-samples", f"{folder}/seen"]
    environment = {**os.environ, "TMPDIR": folder}
    jobs = []
    for node in range(args.hosts):
        line = words(args, folder, "run", epochs) + elastic + ["--nproc-per-node", str(4 // args.hosts)]
        if args.hosts > 1:
            line = ["ip", "netns", "exec", args.namespaces[node]] + line + [
                "--nnodes", "2", "--node-rank", str(node), "--master-addr", "10.78.0.1", "--token-file", f"{folder}/token"]
        out = open(f"{folder}/out.{node}", "w")
        jobs.append(subprocess.Popen(line, stdout=out, stderr=subprocess.STDOUT, env=environment))
    return jobs


def metrics(folder, run):
    with open(f"{folder}/{run}/metrics.jsonl") as file:
        return [json.loads(line) for line in file]


def check(args, folder, epochs, jobs):
    """What is wrong."""
    wrong = [f"node {node} ended with {job.returncode}" for node, job in enumerate(jobs) if job.returncode]
    if wrong:
        return wrong + [open(f"{folder}/out.{node}").read()[-3000:] for node in range(args.hosts)]
    line = words(args, folder, "base", epochs) + ["--nproc-per-node", "1"]
    subprocess.run(line, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    ours, base = (json.load(open(f"{folder}/{run}/summary.json")) for run in ("run", "base"))
    wrong += [f"{name}: {ours[name]} is not {base[name]}" for name in HASHES if ours[name] != base[name]]
    steps = collections.defaultdict(lambda: collections.defaultdict(list))
    for path in glob.glob(f"{folder}/seen.*"):
        for line in open(path):
            if line.endswith("\n"):
                record = json.loads(line)
                steps[record["epoch"], record["step"]][record.get("generation", 0)] += record["samples"]
    epochs_seen = collections.defaultdict(list)
    for (epoch, _), generations in steps.items():
        epochs_seen[epoch] += generations[max(generations)]
    for epoch in range(1, epochs + 1):
        if sorted(epochs_seen[epoch]) != list(range(4800)):
            wrong.append(f"epoch {epoch} has {len(epochs_seen[epoch])} samples")
    losses = [[(r["step"], r["loss"]) for r in metrics(folder, run) if "loss" in r] for run in ("run", "base")]
    if sorted(losses[0]) != sorted(losses[1]):
        wrong.append("the losses differ")
    return wrong


def percentile(values, share):
    values = sorted(values)
    return values[min(len(values) - 1, int(share * len(values)))] if values else float("nan")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--phalanx", required=True)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--hosts", type=int, choices=[1, 2], default=1)
    parser.add_argument("--namespaces", nargs=2)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--data")
    parser.add_argument("--gap", type=float, default=1.5, help="mean seconds between two kills")
    args = parser.parse_args()
    args.phalanx = os.path.realpath(args.phalanx)
    random.seed(args.seed)
    folder = tempfile.mkdtemp()
    epochs = max(2, int(args.kills * args.gap / 1.2))
    if args.hosts > 1:
        subprocess.run([args.phalanx, "token", "--out", f"{folder}/token"], check=True)
    began = time.time()
    jobs = start(args, folder, epochs)
    while not os.path.exists(f"{folder}/run/metrics.jsonl") and all(job.poll() is None for job in jobs):
        time.sleep(0.05)
    kills = []
    while len(kills) < args.kills and all(job.poll() is None for job in jobs):
        time.sleep(random.uniform(0.2, 1.8) * args.gap)
        ranks = ranks_of(folder)
        # One that is left must have the state.
        if len(ranks) > 1:
            kills.append(time.time() - began)
            os.kill(random.choice(ranks), signal.SIGKILL)
    for job in jobs:
        job.wait()
    wrong = check(args, folder, epochs, jobs)
    changes = [r for r in metrics(folder, "run") if "ranks" in r] if os.path.exists(f"{folder}/run/metrics.jsonl") else []
    losses = [r for r in changes if r["ranks"] < r["ranks_before"]]
    noticed = []
    for kill in kills:
        after = [r["noticed_s"] - kill for r in losses if r["noticed_s"] > kill - 0.02]
        if after and min(after) < 1:
            noticed.append(min(after))
    again = [r["state_s"] - r["noticed_s"] for r in losses]
    joined = [r["state_s"] - r["noticed_s"] for r in changes if r["ranks"] > r["ranks_before"]]
    print(f"{len(kills)} kills, {args.hosts} host(s), {epochs} epochs, seed {args.seed}")
    for name, values in [("noticed after the kill", noticed), ("from there to going on", again), ("a rank joins", joined)]:
        p50, p99 = (1e3 * percentile(values, share) for share in (0.5, 0.99))
        print(f"{name}: p50 {p50:.0f} ms, p99 {p99:.0f} ms, of {len(values)}")
    if wrong or len(kills) < args.kills:
        print("\n".join(wrong) or "the training ended before all kills", f"\nkept in {folder}")
        sys.exit(1)
    shutil.rmtree(folder)
    print("the result is that of an undisturbed run")


main()
