#!/usr/bin/env python3
"""Faults of an elastic training at random moments; the result must be that of an undisturbed one.

    tools/ci/elastic.py --phalanx target/release/phalanx --kills 200 [--hosts 3 --faults kill,stop,node,term,blink,cut]
                        [--seed 1] [--recipe resnet18] [--data DIR] [--gap 1.5]
    tools/ci/elastic.py --phalanx target/release/phalanx --minutes 30 --gap 29 --epochs 60 --hosts 4 --ranks 8 ...
    tools/ci/elastic.py --phalanx target/release/phalanx --python PYTHON --kills 100 --ranks 3 ...

Ranks train with --deterministic shards on this host, or on several, which are network namespaces (needs root) and
launchers with --nnodes 1:HOSTS. Faults, of which there are as many as --kills says: `kill` and `stop` (up to 1.4 s) a rank;
`node` kills all processes of a host, `freeze` stops them for longer than --lost-after, `launcher` kills its launcher only,
`term` ends that by SIGTERM, `blink` and `cut` take its link down for up to 0.9 s, or for longer than --lost-after; `deaf` and
`mute` lose all that comes to it, or from it, for as long as `cut`; `join` starts a launcher on it that differs from the
others, which must be refused with code 2 and end nothing else. Killed ranks
are started again and join, and so do launchers. Checked: exit codes; the hashes of weights, optimizer and metrics; each sample once an epoch in the samples' logs; one loss a step.
With --python a PyTorch program trains (python/tests/elastic_job.py); its weights and losses are those of an undisturbed run up to
rounding. Reported: how long after a kill it was noticed, and how long it took from there until the ranks went on with the step
(without the step itself). With --minutes, faults end after that time; reported and checked besides are the longest time
between two steps, and the open files, threads and memory of the processes that lived longest. Exits 1 when a check failed.
"""

import argparse
import collections
import contextlib
import glob
import json
import os
import random
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time

sys.path.insert(0, os.path.join(os.path.dirname(os.path.realpath(__file__)), ".."))
from hosts import Hosts, processes  # noqa: E402

# Seconds between two steps, with --minutes.
MOST_PAUSE = 10
HASHES = ["weights_sha256", "optimizer_sha256", "metrics_sha256"]


def processes_of(folder):
    """The processes of the training that writes into `folder`, each with what it is."""
    return [(pid, "rank" if b"RANK" in variables else "launcher") for pid, variables in processes(f"TMPDIR={folder}")]


def ranks_of(folder):
    return [pid for pid, kind in processes_of(folder) if kind == "rank"]


class Usage:
    """What the processes of a job have open, by process and time: files, threads and KiB of memory."""

    def __init__(self, folder):
        self.seen, self.over = collections.defaultdict(list), threading.Event()
        self.thread = threading.Thread(target=self.watch, args=[folder], daemon=True)
        self.thread.start()

    def watch(self, folder):
        while not self.over.wait(2):
            for pid, kind in processes_of(folder):
                with contextlib.suppress(OSError, StopIteration):
                    with open(f"/proc/{pid}/status") as file:
                        status = file.read().splitlines()
                    # A process that has just ended has no memory.
                    threads, memory = [int(next(line for line in status if line.startswith(key)).split()[1])
                                       for key in ("Threads:", "VmRSS:")]
                    self.seen[kind, pid].append((len(os.listdir(f"/proc/{pid}/fd")), threads, memory))

    def check(self):
        """Prints how it grew in the longest lives, and gives what grew too much."""
        self.over.set()
        self.thread.join()
        wrong = []
        for kind in ["launcher", "rank"]:
            lives = [(len(used), pid, used) for (k, pid), used in self.seen.items() if k == kind and len(used) >= 20]
            if not lives:
                wrong.append(f"no {kind} lived long enough to see what it uses")
            for length, pid, used in sorted(lives, reverse=True)[:2]:
                fifth = length // 5
                begin, end = ([statistics.median(values) for values in zip(*part)]
                              for part in (used[fifth:2 * fifth], used[-fifth:]))
                line = (f"{kind} {pid}, {2 * length} s: open files {begin[0]:.0f} to {end[0]:.0f}, threads {begin[1]:.0f} to "
                        f"{end[1]:.0f}, memory {begin[2] / 1024:.0f} to {end[2] / 1024:.0f} MiB")
                print(line)
                # A launcher that the store moves to, and a rank that becomes rank 0, open more than others.
                if end[0] > begin[0] + 60 or end[1] > begin[1] + 20 or end[2] > 1.5 * begin[2] + 32768:
                    wrong.append(f"it grew: {line}")
        return wrong


def words(args, folder, run, epochs):
    """The program, without what starts its ranks."""
    if args.python:
        program = os.path.join(os.path.dirname(os.path.realpath(__file__)), "../../python/tests/elastic_job.py")
        return [args.python, program, f"{folder}/{run}", str(args.samples), str(args.batch), str(epochs), "0", args.pause if run == "run" else "0"]
    return [args.phalanx, "train", args.recipe, "--data", args.data or f"synthetic:{args.samples}",
            "--epochs", str(epochs), "--global-batch-size", str(args.batch), "--deterministic", "shards", "--shards", "8",
            "--threads", "1", "--log-interval", "1", "--output-dir", f"{folder}/{run}"]


def lose(hosts, n, is_deaf, action):
    """Packets to host `n`, or from it, are all larger than what may be sent at a time."""
    where = [hosts.switch, f"port{n}"] if is_deaf else [hosts.names[n], "eth0"]
    limit = ["tbf", "rate", "8bit", "burst", "1", "limit", "1"] if action == "add" else []
    subprocess.run(["tc", "-n", where[0], "qdisc", action, "dev", where[1], "root", *limit], check=True)


class Job:
    def __init__(self, args, folder, epochs):
        self.args, self.folder, self.epochs = args, folder, epochs
        self.hosts, self.launchers, self.wrong, self.log = Hosts(args.hosts), {}, [], []
        # One that differs has a place, too.
        self.most = args.hosts + ("join" in args.faults.split(","))
        for node in range(args.hosts):
            self.start(node)

    def line(self, node):
        args, folder = self.args, self.folder
        program, how = words(args, folder, "run", self.epochs), ["--log-samples", f"{folder}/seen"]
        if args.python:
            program, how = [args.phalanx, "launch"], ["--", *program]
        line = [*self.hosts.prefix(node), *program, "--elastic", "--max-restarts", "100000"]
        line += ["--nproc-per-node", str(args.ranks // args.hosts)]
        if args.hosts > 1:
            line += ["--nnodes", f"1:{self.most}", "--master-addr", "10.79.0.1", "--token-file", f"{folder}/token"]
        return line + how

    def start(self, node):
        out = open(f"{self.folder}/out.{node}", "a")
        self.note(f"a launcher starts on host {node}")
        self.launchers[node] = subprocess.Popen(self.line(node), stdout=out, stderr=subprocess.STDOUT,
                                                env={**os.environ, "TMPDIR": self.folder})

    def join(self, node):
        """A launcher that differs in one thing comes to host `node`."""
        line = self.line(node)
        words = [["--lr", "0.3"], ["--precision", "bf16"], ["--bucket-cap-mb", "1"], ["--seed", "9"], ["--epochs", "1"],
                 ["--shards", "4"], ["--nnodes", f"2:{self.most}"], ["--data", f"synthetic:{self.args.samples + 96}"], ["launch"]]
        flag, *value = random.choice(words)
        if flag == "launch":
            start = line.index("--nproc-per-node")
            line = [*line[:line.index("train")], "launch", "--elastic", *line[start:], "--", "sleep", "60"]
        elif flag in line:
            line[line.index(flag) + 1] = value[0]
        else:
            line += [flag, *value]
        self.note(f"a launcher with {flag} {value} comes to host {node}")
        came = subprocess.run(line, capture_output=True, text=True, env={**os.environ, "TMPDIR": self.folder + "/."})
        if came.returncode != 2 and not self.is_over():
            self.wrong.append(f"a launcher with {flag} {value} ended with {came.returncode}: {came.stdout[-900:]}{came.stderr[-900:]}")

    def again(self, node, codes):
        """The launcher ends with one of `codes`, and another one comes."""
        code = self.launchers.pop(node).wait()
        self.note(f"the launcher of host {node} has ended with {code}")
        if code not in codes and not self.is_over():
            self.wrong.append(f"the launcher of host {node} ended with {code}, not one of {codes}")
        time.sleep(random.uniform(0, 1))
        if not self.is_over():
            self.start(node)

    def note(self, what):
        """Remembers an event, with the time that the ranks' events have too."""
        self.log.append(f"{time.time():.3f} {what}")

    def is_over(self):
        """A launcher that nobody has ended has ended."""
        return any(launcher.poll() is not None for launcher in self.launchers.values())

    def is_whole(self):
        """All hosts are part of the training."""
        changes = [r["after"] for r in changes_of_ranks(self.folder)]
        return not changes or changes[-1] == self.args.ranks

    def fault(self, kind):
        """Gives whether there was one."""
        node = random.randrange(self.args.hosts)
        ranks = ranks_of(self.folder)
        # Of two hosts that are cut off from one another, the wrong one might go on.
        if (kind in ["cut", "deaf", "freeze", "mute", "node"] or self.args.python) and not self.is_whole():
            return False
        if kind in ["kill", "stop"]:
            # One that is left must have the state.
            if len(ranks) < 2:
                return False
            pid = random.choice(ranks)
            self.note(f"{kind} of process {pid}")
            os.kill(pid, signal.SIGKILL if kind == "kill" else signal.SIGSTOP)
            if kind == "stop":
                time.sleep(random.uniform(0.1, 1.4))
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGCONT)
            return True
        self.note(f"{kind} of host {node}")
        if kind == "node":
            self.hosts.signal_all(node, signal.SIGKILL)
            self.again(node, [-9])
        elif kind == "freeze":
            self.hosts.signal_all(node, signal.SIGSTOP)
            time.sleep(random.uniform(4, 7))
            self.hosts.signal_all(node, signal.SIGCONT)
            self.again(node, [3])
        elif kind == "join":
            self.join(node)
        elif kind == "launcher":
            self.launchers[node].kill()
            self.again(node, [-9])
        elif kind == "term":
            self.launchers[node].terminate()
            # 130: before its ranks had joined.
            self.again(node, [0, 130])
        elif kind in ["deaf", "mute"]:
            lose(self.hosts, node, kind == "deaf", "add")
            time.sleep(random.uniform(4, 7))
            lose(self.hosts, node, kind == "deaf", "del")
            self.again(node, [3])
        else:
            self.hosts.link(node, "down")
            time.sleep({"blink": random.uniform(0.1, 0.9), "cut": random.uniform(4, 7)}[kind])
            self.hosts.link(node, "up")
            self.note(f"the link of host {node} is up")
            if kind == "cut":
                self.again(node, [3])
            elif self.launchers[node].poll() is not None:
                self.wrong.append(f"a link that was down for a moment ended host {node}")
                self.again(node, [3])
        return True


def changes_of_ranks(folder):
    """What the ranks say of each change: of a PyTorch program on standard error."""
    said = re.compile(r"elastic  step (\d+): world size (\d+) -> (\d+) \(regroup (\d+) ms, state (\d+) ms")
    found = []
    for path in glob.glob(f"{folder}/out.*"):
        for line in open(path, errors="replace"):
            if match := said.search(line):
                step, before, after, regroup, state = map(int, match.groups())
                found.append({"step": step, "before": before, "after": after, "noticed_s": 0, "state_s": (regroup + state) / 1e3})
    found.sort(key=lambda r: r["step"])
    return found + [r for r in metrics(folder, "run", "events") if r["kind"] == "ranks"]


def metrics(folder, run, file="metrics"):
    path = f"{folder}/{run}/{file}.jsonl"
    if not os.path.exists(path):
        return []
    with open(path) as file:
        return [json.loads(line) for line in file]


def check(args, folder, epochs, job):
    """What is wrong."""
    codes = [(node, launcher.wait()) for node, launcher in job.launchers.items()]
    wrong = job.wrong + [f"node {node} ended with {code}" for node, code in codes if code]
    if wrong:
        return [open(f"{folder}/out.{node}").read()[-3000:] for node in range(args.hosts)] + job.log + wrong
    line = words(args, folder, "base", epochs) + ([] if args.python else ["--nproc-per-node", "1"])
    subprocess.run(line, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    ours, base = (json.load(open(f"{folder}/{run}/summary.json")) for run in ("run", "base"))
    if args.python:
        wrong += [f"{name} differ" for name in base if not are_close(ours[name], base[name])]
    else:
        wrong += [f"{name}: {ours[name]} is not {base[name]}" for name in HASHES if ours[name] != base[name]]
    steps = collections.defaultdict(lambda: collections.defaultdict(list))
    for path in glob.glob(f"{folder}/seen.*") + glob.glob(f"{folder}/run.seen.*"):
        for line in open(path):
            record = json.loads(line) if line.endswith("\n") else {}
            if "samples" in record:
                steps[record["epoch"], record["step"]][record.get("generation", 0)] += record["samples"]
    epochs_seen = collections.defaultdict(list)
    for (epoch, _), generations in steps.items():
        epochs_seen[epoch] += generations[max(generations)]
    for epoch in range(1, epochs + 1):
        if sorted(epochs_seen[epoch]) != list(range(len(epochs_seen[1]))) or len(epochs_seen[1]) < args.batch:
            wrong.append(f"epoch {epoch} has {len(epochs_seen[epoch])} samples")
    losses = [[(r["step"], r["loss"]) for r in metrics(folder, run) if "loss" in r] for run in ("run", "base")]
    ours, base = map(sorted, losses)
    if len(ours) != len(base) or not are_close(sum(ours, ()), sum(base, ()), 1e-6 if args.python else 0):
        wrong.append("the losses differ")
    return wrong


def are_close(ours, base, most=1e-6):
    return len(ours) == len(base) and all(abs(a - b) <= most * max(1, abs(b)) for a, b in zip(ours, base))


def epochs_of(args, folder):
    """How many epochs of this machine fill --seconds."""
    took = []
    for epochs in (1, 4):
        began = time.time()
        line = words(args, folder, f"timed-{epochs}", epochs)
        ranks = ["--nproc-per-node", str(args.ranks)]
        line = [args.phalanx, "launch", *ranks, "--", *line] if args.python else line + ranks
        subprocess.run(line, check=True, stdout=subprocess.DEVNULL)
        took.append(time.time() - began)
    seconds = args.seconds or 60 * (args.minutes or 0) or 2 * args.kills * args.gap
    return max(4, int(3 * seconds / max(0.1, took[1] - took[0])))


def percentile(values, share):
    values = sorted(values)
    return values[min(len(values) - 1, int(share * len(values)))] if values else float("nan")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--phalanx", required=True)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--hosts", type=int, default=1)
    parser.add_argument("--ranks", type=int, default=4, help="of all hosts")
    parser.add_argument("--faults", default="kill", help="kill, stop: of a rank; node, freeze, launcher, term, blink, cut, deaf, mute, join: of a host")
    parser.add_argument("--recipe", default="mnist")
    parser.add_argument("--python", help="an interpreter that has PyTorch and the package phalanx")
    parser.add_argument("--pause", default="0.01", help="of the PyTorch program in each step, in seconds")
    parser.add_argument("--samples", type=int, default=4800)
    parser.add_argument("--batch", type=int, default=96)
    parser.add_argument("--epochs", type=int, help="default: as many as fill --seconds")
    parser.add_argument("--seconds", type=float, help="of the undisturbed training, about; default: --minutes, or twice --kills times --gap")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--data")
    parser.add_argument("--minutes", type=float, help="faults end after that time, however many there were")
    parser.add_argument("--gap", type=float, default=1.5, help="mean seconds between two faults")
    args = parser.parse_args()
    args.phalanx = os.path.realpath(args.phalanx)
    random.seed(args.seed)
    folder = tempfile.mkdtemp()
    epochs = args.epochs or epochs_of(args, folder)
    if args.hosts > 1:
        subprocess.run([args.phalanx, "token", "--out", f"{folder}/token"], check=True)
    began = time.time()
    job = Job(args, folder, epochs)
    try:
        run(args, folder, epochs, job, began)
    finally:
        job.hosts.remove()


def run(args, folder, epochs, job, began):
    while not os.path.exists(f"{folder}/run/metrics.jsonl") and not job.is_over():
        time.sleep(0.05)
    faults, kills = collections.Counter(), []
    usage = Usage(folder) if args.minutes else None

    def is_enough():
        return time.time() - began > 60 * args.minutes if args.minutes else sum(faults.values()) >= args.kills

    while not is_enough() and not job.is_over():
        time.sleep(random.uniform(0.2, 1.8) * args.gap)
        kind, now = random.choice(args.faults.split(",")), time.time() - began
        if not job.is_over() and job.fault(kind):
            faults[kind] += 1
            kills += [now] if kind == "kill" else []
    took, is_early = time.time() - began, not is_enough()
    grown = usage.check() if usage else []
    wrong = check(args, folder, epochs, job) + grown
    changes = changes_of_ranks(folder)
    losses = [r for r in changes if r["after"] < r["before"]]
    noticed = []
    for kill in kills if args.python else []:
        # The first step of the next group.
        times = [json.loads(line) for path in glob.glob(f"{folder}/run.seen.*") for line in open(path) if "time" in line]
        before = max((r["generation"] for r in times if r["time"] < began + kill), default=0)
        after = [r["time"] - began - kill for r in times if r["generation"] == before + 1]
        noticed += [min(after)] if after and min(after) < 2 else []
    for kill in kills:
        after = [r["noticed_s"] - kill for r in losses if r["noticed_s"] > kill - 0.02]
        if after and min(after) < 1:
            noticed.append(min(after))
    again = [r["state_s"] - r["noticed_s"] for r in losses]
    joined = [r["state_s"] - r["noticed_s"] for r in changes if r["after"] > r["before"]]
    print(f"{dict(faults)}, {args.hosts} host(s), {epochs} epochs, seed {args.seed}")
    for name, values in [("next step after the kill" if args.python else "noticed after the kill", noticed), ("from there to going on", again), ("a rank joins", joined)]:
        p50, p99 = (1e3 * percentile(values, share) for share in (0.5, 0.99))
        print(f"{name}: p50 {p50:.0f} ms, p99 {p99:.0f} ms, of {len(values)}")
    if args.minutes:
        times = [r["elapsed_s"] for r in metrics(folder, "run") if "loss" in r]
        pause = max((after - before for before, after in zip(times, times[1:])), default=0)
        print(f"faults for {took:.0f} s, training for {max(times, default=0):.0f} s, {len(changes)} changes of ranks; longest time between two steps {pause:.1f} s")
        wrong += [f"{pause:.1f} s without a step"] if pause > MOST_PAUSE else []
    if wrong or is_early:
        print("\n".join(wrong) or "the training ended before all faults", f"\nkept in {folder}")
        sys.exit(1)
    shutil.rmtree(folder)
    print("the result is that of an undisturbed run")


main()
