#!/usr/bin/env python3
"""Goodput of a training whose ranks are killed: Phalanx --elastic, torchft (Gloo) and torchrun --max-restarts, side by side.

    goodput.py --time 120 --kills 15,60 --out DIR [--systems phalanx torchft torchft-fast torchrun] [--seed 1]

torchft needs a Python that has it and torch, here one that borrows torch from that of torchrun (/tmp/torch):

    python3 -m venv /tmp/torchft && echo /tmp/torch/lib/python3.11/site-packages > /tmp/torchft/lib/python3.11/site-packages/torch.pth
    /tmp/torchft/bin/pip install --no-deps torchft

All train the MNIST CNN of PyTorch's basic example (SGD, momentum 0.9, lr 0.05) on 2 ranks of one thread and read the loss after each step. The test
set is cut to 1,000 images, as ours evaluates after each epoch. Each system runs for --time / 2 undisturbed, for --time with SIGKILL of a random rank
in the middle of each interval of --kills (+/- a sixth of it, at most 2.5 s), for --time / 2 undisturbed again and for --time / 4 on one rank. Ranks
are killed only while all train; a kill that is due earlier waits. Launchers and torchft's lighthouse are never killed. Killed ranks come back: ours
by its launcher; torchft's are started again at once by this tool; torchrun starts all again from the last checkpoint, saved by rank 0 every 5 s.

committed    samples of which the update is part of the state at the end of the window: of the last step, less what torchrun goes back to; of
             torchft, what its manager counts as committed
goodput      committed samples per second, of those undisturbed (mean of the run before and the run after)
of alive     committed samples, of what the living ranks can do: the undisturbed rate while both are alive, the rate of one while one is.
             A rank is dead from its kill until its new process was started: the start-up is the system's loss
of joined    the same, but a rank is alive again when its new process has loaded all and asks to join
own pace     committed samples per second, of those in the same run while all ranks train, from 1 s after one is back to the next kill
lost         seconds lost per kill, by that pace
stall        longest time without a newly committed step after a kill (median of the kills)
whole        from the kill to the first step with all ranks (median); loss: mean training loss of the last 50 steps

torchft has the timeouts of its README and example, torchft-fast a lighthouse with --heartbeat_timeout_ms 500 --quorum_tick_ms 20.
Writes goodput.json, with all kills and rates, and goodput.txt. With two --kills a system takes about 4 times --time.
"""

import argparse
import contextlib
import ctypes
import gzip
import json
import os
import pathlib
import random
import re
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time


sys.path.insert(0, os.path.join(os.path.dirname(os.path.realpath(__file__)), ".."))
from hosts import processes  # noqa: E402


def worker():
    """A rank of torchrun or torchft; appends what it does to a file."""
    system, folder = os.environ["GOODPUT_SYSTEM"], os.environ["GOODPUT_FOLDER"]
    rank, batch = int(os.environ["RANK"]), int(os.environ["GOODPUT_BATCH"])
    import datetime
    import numpy
    import torch
    import torch.distributed as dist
    sys.path.insert(0, os.environ["GOODPUT_MODELS"])
    sys.dont_write_bytecode = True
    import models
    def idx(name, skip):
        file = pathlib.Path(os.environ["GOODPUT_DATA"], f"train-{name}.gz").read_bytes()
        return torch.from_numpy(numpy.frombuffer(gzip.decompress(file)[skip:], dtype=numpy.uint8).copy())
    out = open(f"{folder}/log.{rank}", "a", buffering=1)
    log = lambda **record: out.write(json.dumps({"time": time.time(), **record}) + "\n")
    images, labels = idx("images-idx3-ubyte", 16).view(-1, 1, 28, 28), idx("labels-idx1-ubyte", 8).long()
    torch.set_num_threads(1)
    torch.manual_seed(1)
    net = models.Mnist()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    first, saved, path, state = 0, time.time(), f"{folder}/checkpoint.pt", {"net": net, "optimizer": optimizer}
    save = lambda: {name: part.state_dict() for name, part in state.items()}
    load = lambda new: [part.load_state_dict(new[name]) for name, part in state.items()]
    if system == "torchrun":
        dist.init_process_group("gloo")
        world = dist.get_world_size()
        ddp = torch.nn.parallel.DistributedDataParallel(net)
        if os.path.exists(path):
            load(checkpoint := torch.load(path))
            first = checkpoint["step"]
        log(loop=True, samples=first * batch * world)
    else:
        import torchft
        store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
        world, seconds = 2, lambda count: datetime.timedelta(seconds=count)
        manager = torchft.Manager(
            pg=torchft.ProcessGroupGloo(timeout=seconds(5)), timeout=seconds(30), load_state_dict=load, state_dict=save, min_replica_size=1,
            replica_id=f"goodput_{rank}", rank=0, world_size=1, store_addr="localhost", store_port=store.port,
            lighthouse_addr=os.environ["GOODPUT_LIGHTHOUSE"])

        class Ddp(torchft.DistributedDataParallel):
            # That of 0.2.0 fails with an AssertionError after each failed all-reduce of Gloo: the living rank would end too.
            @staticmethod
            def _comm_hook(manager, bucket):
                manager.allreduce(bucket.buffer()).wait()
                done = torch.futures.Future()
                done.set_result(bucket.buffer())
                return done
        ddp, optimizer = Ddp(manager, net), torchft.Optimizer(manager, optimizer)
        log(loop=True)
    torch.manual_seed(time.time_ns() + rank)
    epoch, order, step = -1, None, first
    while time.time() < float(os.environ["GOODPUT_DEADLINE"]):
        at = step * world + rank
        if at * batch // len(images) != epoch:
            epoch = at * batch // len(images)
            order = torch.randperm(len(images), generator=torch.Generator().manual_seed(epoch)).split(batch)
        chosen = order[at % len(order)]
        x = (images[chosen].float() / 255 - 0.1307) / 0.3081
        optimizer.zero_grad()
        loss = torch.nn.functional.nll_loss(ddp(x), labels[chosen])
        loss.backward()
        optimizer.step()
        step += 1
        if system != "torchrun":
            log(samples=manager.batches_committed() * batch, ranks=manager.num_participants(),
                loss=loss.item() if manager.is_participating() else None)
        elif rank == 0:
            log(samples=step * batch * world, ranks=world, loss=loss.item())
            if time.time() - saved > 5:
                torch.save({**save(), "step": step}, path + ".new")
                os.replace(path + ".new", path)
                saved = time.time()


def processes_of(folder, ranks_only):
    """The processes of the training in `folder`."""
    return [pid for pid, variables in processes(f"TMPDIR={folder}") if not ranks_only or b"RANK" in variables]


class Job:
    """One training. `records` has its steps (time, samples, ranks, loss) and the moments at which a rank was ready (loop)."""

    def __init__(self, args, system, ranks, limit):
        self.args, self.system, self.ranks = args, system, ranks
        self.folder = tempfile.mkdtemp(prefix="goodput-")
        self.records, self.read, self.clock, self.now_ranks = [], {}, float("inf"), ranks
        self.started, self.replicas = [], {}
        self.env = {**os.environ, "TMPDIR": self.folder, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive", "GLOO_SOCKET_IFNAME": "lo",
                    "GOODPUT_SYSTEM": system, "GOODPUT_BATCH": str(args.torch_batch), "GOODPUT_FOLDER": self.folder,
                    "GOODPUT_DATA": args.cut_data, "GOODPUT_MODELS": args.models, "GOODPUT_DEADLINE": str(time.time() + limit)}
        if system == "phalanx":
            self.start([args.phalanx, "train", "mnist", "--data", args.cut_data, "--nproc-per-node", str(ranks), "--elastic",
                        "--max-restarts", "1000", "--epochs", "1000", "--global-batch-size", str(2 * args.batch), "--threads", "1",
                        "--log-interval", "1", "--output-dir", f"{self.folder}/run", *(["--accumulate", "2"] if ranks == 1 else [])])
        elif system == "torchrun":
            # Without it ranks that start again may find Gloo addresses of ended ones in the launcher's store (2.15), and hang.
            self.env["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
            self.start([args.torch_python, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks),
                        "--max-restarts", "1000", "--monitor-interval", "0.1", os.path.realpath(__file__)])
        else:
            with socket.create_server(("127.0.0.1", 0)) as s:
                port = s.getsockname()[1]
            timeouts = {"torchft": "--quorum_tick_ms 100", "torchft-fast": "--quorum_tick_ms 20 --heartbeat_timeout_ms 500"}[system]
            self.start([f"{os.path.dirname(args.torchft_python)}/torchft_lighthouse", "--min_replicas", "1", "--join_timeout_ms", "10000",
                        "--bind", f"[::]:{port}", *timeouts.split()])
            self.env["GOODPUT_LIGHTHOUSE"] = f"http://localhost:{port}"
            self.replica = lambda rank: self.start([args.torchft_python, os.path.realpath(__file__)], RANK=str(rank))
            self.replicas = {rank: self.replica(rank) for rank in range(ranks)}

    def start(self, line, **variables):
        with open(f"{self.folder}/out", "a") as out:
            self.started.append(subprocess.Popen(line, stdout=out, stderr=subprocess.STDOUT, cwd=self.folder, env={**self.env, **variables},
                                                 preexec_fn=lambda: ctypes.CDLL(None).prctl(1, signal.SIGKILL)))
        return self.started[-1]

    def poll(self):
        """Waits a moment, reads what is new and starts replicas of torchft again."""
        time.sleep(0.05)
        now = time.time()
        for path in [p for name in ["run/events.jsonl", "run/metrics.jsonl", "log.*"] for p in pathlib.Path(self.folder).glob(name)]:
            with open(path, "rb") as file:
                file.seek(self.read.get(path, 0))
                *lines, _ = file.read().split(b"\n")
            self.read[path] = self.read.get(path, 0) + sum(len(line) + 1 for line in lines)
            for line in lines:
                with contextlib.suppress(ValueError):
                    self.take(json.loads(line), now)
        self.records.sort(key=lambda record: record["time"])
        for rank, process in self.replicas.items():
            if process.poll() is not None:
                self.replicas[rank] = self.replica(rank)
        self.fail_if(self.started[0].poll() is not None or len(self.started) > 200, "the launcher or the ranks ended")

    def take(self, line, now):
        if self.system != "phalanx":
            return self.records.append(line)
        # Of our clock only the zero is not known.
        self.clock = min(self.clock, now - line["elapsed_s"])
        if line.get("kind") == "ranks":
            self.now_ranks = line["after"]
            if line["after"] > line["before"]:
                self.records.append({"time": self.clock + line["noticed_s"], "loop": True})
        elif "loss" in line:
            self.records.append({"time": self.clock + line["elapsed_s"], "samples": (line["step"] + 1) * 2 * self.args.batch,
                                 "ranks": self.now_ranks, "loss": line["loss"]})

    def wait(self, condition, seconds, what):
        until = time.time() + seconds
        while not condition():
            self.poll()
            self.fail_if(time.time() > until, f"{what} within {seconds:.0f} s")

    def fail_if(self, wrong, what):
        if wrong:
            kept = shutil.copy(f"{self.folder}/out", f"{self.args.out}/{self.system}.failed")
            raise RuntimeError(f"{what}; its output is in {kept}")

    def steps(self, since=0.0):
        return [record for record in self.records if "samples" in record and record["time"] >= since]

    def ready_at(self, kill):
        """When the rank that replaces the one killed at `kill` had loaded all."""
        return next((r["time"] for r in self.records if "loop" in r and r["time"] > kill), float("inf"))

    def whole_at(self, kill):
        """When all ranks then took a step together."""
        return next((r["time"] for r in self.steps(self.ready_at(kill)) if r.get("ranks") == self.ranks), None)

    def position(self, at):
        """The committed samples at that time; where the training then goes back, what it goes back to."""
        return min([r["samples"] for r in self.steps() if r["time"] <= at][-1:] + [r["samples"] for r in self.steps(at)[:1]])

    def stop(self):
        """Ends all processes and removes the folder."""
        [process.terminate() for process in self.started]
        for process in self.started:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(20)
        for _ in range(20):
            for pid in processes_of(self.folder, False):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.02)
        shutil.rmtree(self.folder, ignore_errors=True)


def measure(args, system, ranks, every, duration):
    """One run, undisturbed if `every` is 0."""
    job = Job(args, system, ranks, duration + 360)
    try:
        warm = lambda: any(r.get("ranks") == ranks and r["time"] < time.time() - args.warm for r in job.steps())
        job.wait(warm, 180 + args.warm, "no steps with all ranks")
        began = time.time()
        ended, kills, shift = began + duration, [], min(2.5, every / 6)
        due = [began + (n + 0.5) * every + random.uniform(-shift, shift) for n in range(int(duration / every) if every else 0)]
        while time.time() < ended:
            job.poll()
            if kills and "started" not in kills[-1] and set(processes_of(job.folder, True)) - before:
                kills[-1]["started"] = time.time()
            if due and time.time() >= due[0] and (not kills or job.whole_at(kills[-1]["killed"])):
                before = set(processes_of(job.folder, True))
                if len(before) == ranks:
                    due.pop(0)
                    kills.append({"killed": time.time()})
                    os.kill(random.choice(sorted(before)), signal.SIGKILL)
        job.wait(lambda: job.steps(ended) and (not kills or job.whole_at(kills[-1]["killed"])), 90, "did not go on after the last kill")
        return figures(job, began, ended, kills, len(due))
    finally:
        job.stop()


def figures(job, began, ended, kills, not_made):
    """The figures of a run from its records."""
    steps, committed, duration = job.steps(began), job.position(ended) - job.position(began), ended - began
    calm, since, samples, seconds = [], began, 0, 0
    for kill, following in zip(kills, kills[1:] + [{}]):
        kill.update(joining=job.ready_at(kill["killed"]), whole=job.whole_at(kill["killed"]))
        kill.setdefault("started", kill["joining"])
        # Steps that are taken again, or that are not committed, are none.
        reached = max(s["samples"] for s in job.steps() if s["time"] <= kill["killed"])
        last, stall = kill["killed"], 0
        for step in job.steps(kill["killed"]):
            if step["samples"] > reached and last < following.get("killed", ended + 1e9):
                stall, last, reached = max(stall, step["time"] - last), step["time"], step["samples"]
        kill["stall_s"] = stall
        calm.append((since, kill["killed"]))
        since = kill["whole"] + 1
    for start, stop in calm + [(since, ended)]:
        part = [s for s in steps if start <= s["time"] <= stop]
        if len(part) > 5:
            samples += part[-1]["samples"] - part[0]["samples"]
            seconds += part[-1]["time"] - part[0]["time"]
    down = lambda name: sum(max(0, min(kill[name], ended) - kill["killed"]) for kill in kills)
    losses = [s["loss"] for s in steps if s["time"] <= ended and s.get("loss") is not None][-50:]
    return {"seconds": duration, "committed": committed, "rate": committed / duration, "kills_made": len(kills), "kills_not_made": not_made,
            "restarts_unasked": len(job.started) - 1 - len(job.replicas) - len(kills) if job.replicas else 0,
            "pace": samples / seconds if seconds else None, "pace_seconds": seconds, "down_process_s": down("started"),
            "down_joining_s": down("joining"), "loss": statistics.mean(losses) if losses else None,
            "kills": [{name: round(value - (0 if name == "stall_s" else began), 3) for name, value in kill.items()} for kill in kills]}


def all_runs(args, system, found, write):
    """All runs of a system, into `found`."""
    runs = found["runs"] = {}
    plan = [("undisturbed before", 2, 0, args.time / 2), *((f"kill every {every:g} s", 2, every, args.time) for every in args.kills),
            ("undisturbed after", 2, 0, args.time / 2), ("one rank", 1, 0, args.time / 4)]
    for name, *what, duration in plan:
        print(f"{system}: {name} for {duration:.0f} s", file=sys.stderr, flush=True)
        runs[name] = measure(args, system, *what, duration)
        write()
    two, one = statistics.mean(runs[f"undisturbed {when}"]["rate"] for when in ("before", "after")), runs["one rank"]["rate"]
    found.update(undisturbed_rate=two, one_rank_rate=one)
    for run in runs.values():
        if run["kills_made"]:
            for name, down in [("of_alive", run["down_process_s"]), ("of_joined", run["down_joining_s"])]:
                run[name] = run["committed"] / (two * (run["seconds"] - down) + one * down)
            run.update(goodput=run["rate"] / two, stall_s=statistics.median(kill["stall_s"] for kill in run["kills"]),
                       whole_s=statistics.median(kill["whole"] - kill["killed"] for kill in run["kills"]))
            run["of_own_pace"] = run["rate"] / run["pace"] if run["pace"] else float("nan")
            run["lost_s_per_kill"] = run["seconds"] * (1 - run["of_own_pace"]) / run["kills_made"]


def table(results):
    row = lambda system, *cells: f"{system:12}" + "".join(f"{cell:>10}" for cell in cells)
    lines = [row("system", "kill every", "kills", "samples/s", "undist.", "1 rank", "goodput", "of alive", "of joined", "own pace", "lost s",
                 "stall s", "whole s", "loss")]
    for system, found in results.items():
        for name, run in found.get("runs", {}).items():
            if "goodput" in run:
                lines.append(row(system, name.removeprefix("kill every "), f"{run['kills_made']}/{run['kills_made'] + run['kills_not_made']}",
                                 *(f"{rate:.0f}" for rate in (run["rate"], found["undisturbed_rate"], found["one_rank_rate"])),
                                 *(f"{100 * run[key]:.2f} %" for key in ("goodput", "of_alive", "of_joined", "of_own_pace")),
                                 *(f"{run[key]:.2f}" for key in ("lost_s_per_kill", "stall_s", "whole_s", "loss"))))
        if "skipped" in found:
            lines.append(f"{system}: skipped: {found['skipped'].splitlines()[0][:150]}")
    return "\n".join(lines)


def cut_data(source, folder):
    """Copies the data set, with the first 1,000 images of the test set only."""
    os.makedirs(folder, exist_ok=True)
    for name, head, size in [("images-idx3-ubyte.gz", 16, 784), ("labels-idx1-ubyte.gz", 8, 1)]:
        shutil.copyfile(f"{source}/train-{name}", f"{folder}/train-{name}")
        test = gzip.decompress(pathlib.Path(f"{source}/t10k-{name}").read_bytes())
        test = test[:4] + (1000).to_bytes(4, "big") + test[8:head + 1000 * size]
        pathlib.Path(f"{folder}/t10k-{name}").write_bytes(gzip.compress(test))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--time", type=float, default=180, help="seconds of a run with kills")
    parser.add_argument("--kills", default="15,60", type=lambda text: [float(part) for part in text.split(",")], help="seconds between kills")
    parser.add_argument("--out", required=True)
    parser.add_argument("--systems", nargs="+", default=["phalanx", "torchft", "torchft-fast", "torchrun"])
    root = pathlib.Path(__file__).resolve().parents[2]
    for name, path in [("phalanx", root / "target/release/phalanx"), ("torch-python", "/tmp/torch/bin/python"), ("torchft-python",
                       "/tmp/torchft/bin/python"), ("data", root / "../shared/data/mnist"), ("models", root / "tools/bench/parity")]:
        parser.add_argument(f"--{name}", default=str(path))
    parser.add_argument("--batch", type=int, default=150, help="of ours, per rank")
    parser.add_argument("--torch-batch", type=int, default=50, help="of the others, per rank")
    parser.add_argument("--warm", type=float, default=5, help="seconds of training before each window")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    args.phalanx, args.out, args.models, args.cut_data = map(os.path.realpath, (args.phalanx, args.out, args.models, f"{args.out}/data"))
    if 60000 % (2 * args.batch) or 60000 % args.torch_batch:
        parser.error("twice the --batch, and the --torch-batch, must divide 60,000")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    os.makedirs(args.out, exist_ok=True)
    cut_data(args.data, args.cut_data)
    processor = re.search(r"model name\s*: (.*)", pathlib.Path("/proc/cpuinfo").read_text())[1]
    version = "import importlib.metadata as m, torch{0}; print(*(f'{{n}} {{m.version(n)}}' for n in 'torch{0}'.split(', ')))"
    asks = {"phalanx": [args.phalanx, "--version"], "torchrun": [args.torch_python, "-c", version.format("")]}
    asks["torchft"] = asks["torchft-fast"] = [args.torchft_python, "-c", version.format(", torchft")]
    written = {"processor": processor, "cores": os.cpu_count(), "date": time.strftime("%F %T"), "load_before": os.getloadavg(),
               "settings": vars(args), "versions": {}, "systems": {}}

    def write():
        pathlib.Path(args.out, "goodput.json").write_text(json.dumps(written, indent=1))
    for system in args.systems:
        random.seed(args.seed)
        found = written["systems"][system] = {}
        try:
            asked = subprocess.run(asks[system], capture_output=True, text=True, timeout=120)
            if asked.returncode:
                raise RuntimeError(f"cannot run: {(asked.stderr.strip().splitlines() or ['?'])[-1]}")
            written["versions"][system] = asked.stdout.strip()
            all_runs(args, system, found, write)
        except (KeyError, RuntimeError, OSError, subprocess.TimeoutExpired) as error:
            print(f"{system}: skipped: {error}", file=sys.stderr)
            found["skipped"] = str(error)
        write()
    text = (f"{processor}, {os.cpu_count()} cores, {written['date']}, load {written['load_before'][0]:.1f} before; seed {args.seed}\n"
            f"{'; '.join(dict.fromkeys(written['versions'].values()))}\n{table(written['systems'])}")
    pathlib.Path(args.out, "goodput.txt").write_text(text + "\n")
    print(text)


if "GOODPUT_SYSTEM" in os.environ:
    worker()
else:
    main()
