#!/usr/bin/env python3
"""Random faults at random moments of real training runs.

    tools/ci/random_faults.py --phalanx target/release/phalanx --faults 200 --seed 1 [--out DIR]
    tools/ci/random_faults.py --phalanx target/release/phalanx --faults 20 --seed 1      # the short form, < 2 minutes
    tools/ci/random_faults.py --phalanx target/release/phalanx --seed 1 --only 17 -v      # one of them again

Every fault starts a training of its own (2 to 4 ranks; shared memory, TCP, two launchers on loopback, two
launchers in network namespaces), waits for a random moment of a random phase, and does one of:

    kill-rank       SIGKILL of a rank
    kill-launcher   SIGKILL of a launcher
    stop-rank       SIGSTOP of a rank, never continued
    half-close      shutdown of one direction of a data or control socket between two ranks (pidfd_getfd)
    drop            the link between two hosts goes down: packets vanish, nothing is reset

and checks that

  * every launcher and rank has ended in time: 2 s after a kill or a half-close; 1.1 deadlines and SLACK_S after a
    stop or a drop (1.5 s of it is the launcher's grace between SIGTERM and SIGKILL, which a stopped rank uses up).
    The deadline is the collectives', above that of the launchers' heartbeats;
  * the exit codes are those of the contract (3 peer lost, 4 timeout);
  * the last report of every launcher that was left names the culprit and nobody else;
  * nothing is left: no process, no file in TMPDIR or /dev/shm, no temporary file beside the checkpoint, no part of one.

A run that was only too slow, and right otherwise, is repeated once, as the machine may have been busy with something
else; the summary lists such faults as "slow_once". With --strict it is wrong at once.

One line per fault. The moment within a phase is drawn as a fraction of what an undisturbed run of the same kind
took, so a replay (`--seed S --only N`) aims at the same moment; it hits it as well as the machine's load allows.
Exits 1 when a check failed. Needs Linux 5.6; faults that need root are drawn only for root.
"""

import argparse
import ctypes
import json
import os
import random
import re
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time

sys.path.insert(0, os.path.join(os.path.dirname(os.path.realpath(__file__)), ".."))
from hosts import Hosts, processes  # noqa: E402

KILL_LIMIT_S = 2.0
SLACK_S = 2.0
STEP_TIMEOUT_S = 3.0
FORM_TIMEOUT_S = 6.0
# Launchers whose ranks have ended well, or that still wait for each other, have deadlines of their own.
LAUNCHER_TIMEOUT_S = 15.0
STEPS = 12  # per epoch, about
PHASES = ["forming", "forward", "backward", "reduce", "commit", "validation", "saving"]
MARK = "PHALANX_FAULT_MARK"
FOREIGN = ("SLURM_", "OMPI_", "PMI", "PET_", "PHALANX_", "MASTER_", "OMP_", "TORCH")
libc = ctypes.CDLL(None, use_errno=True)


# ---------------------------------------------------------------- processes

def ours(mark):
    """Number and variables of all living processes with our mark."""
    return list(processes(f"{MARK}={mark}"))


def ranks(mark):
    """pid of every rank that lives."""
    return {int(values[b"RANK"]): pid for pid, values in ours(mark) if b"RANK" in values and b"PHALANX_STORE" in values}


def command(pid):
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as f:
            return f.read().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        return "?"


def sockets(pid):
    """Established TCP connections of a process: (fd, local, remote) with (ip, port) pairs as text."""
    inodes = {}
    try:
        for fd in os.listdir(f"/proc/{pid}/fd"):
            try:
                link = os.readlink(f"/proc/{pid}/fd/{fd}")
            except OSError:
                continue
            if link.startswith("socket:["):
                inodes[link[8:-1]] = int(fd)
        with open(f"/proc/{pid}/net/tcp") as f:
            lines = f.read().splitlines()[1:]
    except OSError:
        return []
    found = []
    for line in lines:
        parts = line.split()
        if parts[3] == "01" and parts[9] in inodes:
            found.append((inodes[parts[9]], parts[1], parts[2]))
    return found


def take_socket(pid, fd):
    pidfd = os.pidfd_open(pid)
    try:
        taken = libc.syscall(438, pidfd, fd, 0)  # pidfd_getfd
        if taken < 0:
            raise OSError(ctypes.get_errno(), "pidfd_getfd")
        return socket.socket(fileno=taken)
    finally:
        os.close(pidfd)


# ---------------------------------------------------------------- one run

class Reader(threading.Thread):
    """Keeps a stream's lines with the time they came."""

    def __init__(self, stream, run):
        super().__init__(daemon=True)
        self.stream, self.run_, self.text = stream, run, []
        self.start()

    def run(self):
        for raw in self.stream:
            line = raw.decode(errors="replace").rstrip("\n")
            now = time.monotonic()
            self.text.append(line)
            self.run_.heard(line, now)


class Run:
    """A training run: one or two launchers."""

    COUNT = 0

    def __init__(self, phalanx, kind, nodes, hosts, work, more=()):
        Run.COUNT += 1
        self.kind, self.nodes = kind, nodes
        self.world = sum(nodes)
        self.mark = f"{os.getpid()}-{Run.COUNT}"
        self.dir = os.path.join(work, self.mark)
        self.tmp = os.path.join(self.dir, "tmp")
        self.out = os.path.join(self.dir, "out")
        os.makedirs(self.tmp)
        self.changed = threading.Condition()
        self.steps, self.tests, self.begun, self.times = 0, 0, False, {}
        self.started = time.monotonic()
        env = {k: v for k, v in os.environ.items()
               if not k.startswith(FOREIGN) and k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
        env.update({MARK: self.mark, "TMPDIR": self.tmp})
        transport = {"shm": "shm", "tcp": "tcp", "loop": "tcp", "hosts": "auto"}[kind]
        samples = 32 * self.world * STEPS
        train = ["train", "mnist", "--data", f"synthetic:{samples}", "--epochs", "2",
                 "--batch-size", "32", "--test-batch-size", "64", "--threads", "1", "--log-interval", "1",
                 "--transport", transport, "--timeout", str(STEP_TIMEOUT_S), "--init-timeout", str(FORM_TIMEOUT_S),
                 "--output-dir", self.out, *more]
        self.launchers, self.err, self.stdout = [], [], []
        if len(nodes) == 1:
            self.spawn([phalanx, *train, "--nproc-per-node", str(nodes[0])], env)
        else:
            token = os.path.join(self.dir, "token")
            subprocess.run([phalanx, "token", "--out", token], check=True, env=env, stdout=subprocess.DEVNULL)
            with socket.socket() as s:
                s.bind(("127.0.0.1", 0))
                port = s.getsockname()[1]
            for node, count in enumerate(nodes):
                into, master = [], "127.0.0.1"
                if kind == "hosts":
                    into, master = ["ip", "netns", "exec", hosts.names[node]], hosts.address[0]
                self.spawn([*into, phalanx, "launch", "--nnodes", str(len(nodes)), "--node-rank", str(node),
                            "--nproc-per-node", str(count), "--master-addr", master, "--master-port", str(port),
                            "--token-file", token, "--rdzv-timeout", str(FORM_TIMEOUT_S), "--", phalanx, *train], env)

    def spawn(self, args, env):
        process = subprocess.Popen(args, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                                   stderr=subprocess.PIPE)
        self.launchers.append(process)
        self.stdout.append(Reader(process.stdout, self))
        self.err.append(Reader(process.stderr, self))

    def heard(self, line, now):
        with self.changed:
            if "training 2 epochs" in line:
                self.begun = True
                self.times["begun"] = now
            elif "Train Epoch:" in line:
                self.steps += 1
                self.times[f"step{self.steps}"] = now
            elif "test_loss=" in line:
                self.tests += 1
                self.times[f"test{self.tests}"] = now
            self.changed.notify_all()

    def ended(self):
        return all(p.poll() is not None for p in self.launchers)

    def wait_for(self, condition, limit):
        until = time.monotonic() + limit
        with self.changed:
            while not condition():
                if self.ended() or time.monotonic() > until:
                    return False
                self.changed.wait(0.05)
        return True

    def wait_gone(self, until):
        """When everything that bears our mark has ended, or None."""
        while True:
            if self.ended() and not ours(self.mark):
                return time.monotonic()
            if time.monotonic() > until:
                return None
            time.sleep(0.005)

    def report(self, node):
        """The last error report of a launcher."""
        self.err[node].join(1)
        lines = self.err[node].text
        at = max((i for i, line in enumerate(lines) if line.startswith("error: ")), default=None)
        return "" if at is None else "\n".join(lines[at:])

    def clear(self):
        for pid, _ in ours(self.mark):
            try:
                os.kill(pid, signal.SIGKILL)
            except OSError:
                pass
        for process in self.launchers:
            if process.poll() is None:
                process.kill()
            process.wait()
        for reader in self.err + self.stdout:
            reader.join(2)
        shutil.rmtree(self.dir, ignore_errors=True)


def calibrate(phalanx, kind, nodes, hosts, work):
    """How long the phases of an undisturbed run take, in seconds."""
    profile = os.path.join(work, "profile")
    run = Run(phalanx, kind, nodes, hosts, work, ["--profile", profile])
    try:
        if not run.wait_for(run.ended, 60) or any(p.returncode for p in run.launchers):
            text = "\n".join(line for e in run.err for line in e.text)
            sys.exit(f"an undisturbed run ({kind} {nodes}) failed:\n{text}")
        end = time.monotonic()
        t = run.times
        steps = run.steps // 2
        with open(f"{profile}.0.json") as f:
            # Of the first step that is profiled, which begins at 0.
            events = {e["name"].split(" (")[0]: e for e in reversed(json.load(f)["traceEvents"]) if e["ph"] == "X"}
        at = lambda name: events[name]["ts"] / 1e6
        after = lambda name: (events[name]["ts"] + events[name]["dur"]) / 1e6
        whole = after("optimizer")
        step = (t[f"step{steps}"] - t["step2"]) / (steps - 2)
        scale = step / whole
        return {
            "steps": steps,
            "forming": (0.0, t["begun"] - run.started),
            "forward": (0.0, after("forward") * scale),
            "backward": (at("backward") * scale, after("backward") * scale),
            "reduce": (after("backward") * scale, at("optimizer") * scale),
            "commit": (at("optimizer") * scale, step),
            "validation": (0.0, t["test1"] - t[f"step{steps}"]),
            "saving": (0.0, max(0.01, end - t["test2"])),
        }
    finally:
        run.clear()


# ---------------------------------------------------------------- one fault

class Missed(Exception):
    """The run was over, or what was to be hit did not exist yet."""


def draw(seed, number, is_root):
    rng = random.Random(f"{seed}:{number}")
    kinds = ["shm", "tcp", "loop"] + (["hosts", "hosts"] if is_root else [])
    kind = rng.choice(kinds)
    what = rng.choice({
        "shm": ["kill-rank", "kill-rank", "kill-launcher", "stop-rank"],
        "tcp": ["kill-rank", "kill-launcher", "stop-rank", "half-close"],
        "loop": ["kill-rank", "kill-launcher", "stop-rank", "half-close"],
        "hosts": ["kill-rank", "kill-launcher", "stop-rank", "half-close", "drop"],
    }[kind])
    if not is_root and what == "half-close":
        what = "kill-rank"
    nodes = rng.choice([[2], [3], [4]] if kind in ("shm", "tcp") else [[1, 1], [2, 1], [1, 2], [2, 2]])
    phase = rng.choice([p for p in PHASES if not (p == "forming" and what == "half-close")])
    return {"number": number, "kind": kind, "nodes": nodes, "what": what, "phase": phase, "at": rng.random(),
            "step": rng.random(), "victim": rng.random(), "socket": rng.random(), "direction": rng.random()}


def wait_for_moment(run, fault, timing):
    phase = fault["phase"]
    begin, end = timing[phase]
    steps = timing["steps"]
    if phase == "forming":
        base = run.started
    else:
        if phase == "validation":
            key, ready = f"step{steps}", lambda: run.steps >= steps
        elif phase == "saving":
            key, ready = "test2", lambda: run.tests >= 2
        else:
            # Not the first steps: their buckets are laid out anew, and memory is touched for the first time.
            k = 2 + int(fault["step"] * (2 * steps - 3))
            key, ready = f"step{k}", lambda: run.steps >= k
        if not run.wait_for(ready, 60):
            raise Missed(f"the run ended before {key}")
        base = run.times[key]
    moment = base + begin + fault["at"] * (end - begin)
    while (left := moment - time.monotonic()) > 0:
        time.sleep(min(left, 0.002) if left > 0.0005 else 0)


def strike(run, fault, hosts):
    """Does it. Returns what was done, in words, and whom the reports may blame."""
    what = fault["what"]
    if what == "drop":
        hosts.link(1, "down")
        return "the link went down", None
    if what == "kill-launcher":
        node = int(fault["victim"] * len(run.launchers))
        process = run.launchers[node]
        if process.poll() is not None:
            raise Missed("the launcher had ended")
        # `ip netns exec` becomes the program, so the number is the launcher's.
        process.kill()
        return f"launcher of node {node} killed", node
    rank = int(fault["victim"] * run.world)
    until = time.monotonic() + 5
    while (pid := ranks(run.mark).get(rank)) is None:
        if run.ended() or time.monotonic() > until or fault["phase"] != "forming":
            raise Missed(f"rank {rank} was not there")
    try:
        if what == "kill-rank":
            os.kill(pid, signal.SIGKILL)
            return f"rank {rank} killed", {rank}
        if what == "stop-rank":
            os.kill(pid, signal.SIGSTOP)
            return f"rank {rank} stopped", {rank}
        # half-close: a connection whose other end belongs to another rank
        mine = sockets(pid)
        others = {(local, remote): r for r, p in ranks(run.mark).items() if r != rank
                  for _, local, remote in sockets(p)}
        between = sorted((fd, others[(remote, local)]) for fd, local, remote in mine if (remote, local) in others)
        if not between:
            raise Missed(f"rank {rank} has no socket to another rank")
        fd, peer = between[int(fault["socket"] * len(between))]
        how, word = [(socket.SHUT_WR, "writing"), (socket.SHUT_RD, "reading"),
                     (socket.SHUT_RDWR, "both ways")][int(fault["direction"] * 3)]
        with take_socket(pid, fd) as taken:
            taken.shutdown(how)
        return f"fd {fd} of rank {rank} to rank {peer} shut for {word}", {rank, peer}
    except OSError as e:
        raise Missed(f"rank {rank}: {e}") from e


BLAMED = [
    (r"waiting for ((?:rank \d+ to (?:send|take) data(?:, )?)+)", None),
    (r"rank (\d+) \([^)]*\) was killed", 1),
    (r"rank (\d+) \(process \d+\) died", 1),
    (r"rank (\d+) is gone", 1),
    (r"rank (\d+) left the group", 1),
    (r"rank (\d+) \([^)]*\) is stopped", 1),
    (r"ranks? (\d+(?:, \d+)*) did not", 1),
    (r"the connection (?:between|to) ranks? (\d+)", 1),
]


def blamed(report):
    ranks_ = set()
    for pattern, _ in BLAMED:
        for match in re.finditer(pattern, report):
            ranks_.update(int(n) for n in re.findall(r"\d+", re.sub(r"\(.*?\)|process \d+", "", match.group(0))))
    return ranks_


def node_of(run, rank):
    for node, count in enumerate(run.nodes):
        if rank < count:
            return node
        rank -= count
    return None


def check(run, fault, culprit, struck, gone):
    """What is wrong, in words."""
    wrong = []
    what = fault["what"]
    took = None if gone is None else gone - struck
    timeout = FORM_TIMEOUT_S if fault["phase"] == "forming" or fault["slow"] else STEP_TIMEOUT_S
    reports = "".join(run.report(n) for n in range(len(run.launchers)))
    if what == "stop-rank" and "all other ranks have ended well" in reports:
        timeout = LAUNCHER_TIMEOUT_S
    # Killed before it said that it is there, or before it listened: nobody can know that it was.
    never_there = [f"node {culprit} of {len(run.nodes)} did not join within", f"no launcher of node {culprit} answered at"]
    unknown = what == "kill-launcher" and any(words in reports for words in never_there)
    sudden = what in ("kill-rank", "kill-launcher", "half-close") and not unknown
    limit = KILL_LIMIT_S if sudden else 1.1 * timeout + SLACK_S
    if took is None or took > limit:
        late = ", ".join(f"{pid} {command(pid)[:60]}" for pid, _ in ours(run.mark))
        wrong.append(f"took {'for ever' if took is None else f'{took:.2f} s'} (limit {limit:.1f} s) {late}")
    for node, process in enumerate(run.launchers):
        if what == "kill-launcher" and node == culprit:
            continue
        report, code = run.report(node), process.poll()
        want = {"kill-rank": {3}, "kill-launcher": {3}, "half-close": {3}, "stop-rank": {4}, "drop": {3, 4}}[what]
        if unknown:
            want = {4}
        if code is None:
            continue
        if code not in want:
            wrong.append(f"node {node} ended with code {code}, not {want}")
        named = blamed(report)
        if what == "kill-launcher":
            if f"node {culprit}" not in report:
                wrong.append(f"node {node} does not name the launcher of node {culprit}")
        elif what == "kill-rank":
            rank = next(iter(culprit))
            first = report.split("\n", 1)[0]
            if f"rank {rank} (" not in first or "killed by SIGKILL" not in first:
                wrong.append(f"node {node} blames otherwise: {first!r}")
        elif what == "drop":
            if not named and "node" not in report:
                wrong.append(f"node {node} names nobody")
            elif named and not any(node_of(run, r) != node for r in named):
                wrong.append(f"node {node} blames its own ranks {sorted(named)}")
        elif not named:
            wrong.append(f"node {node} names nobody")
        elif not named <= culprit:
            wrong.append(f"node {node} blames ranks {sorted(named)}, it was {sorted(culprit)}")
    left = [f"{pid} {command(pid)[:80]}" for pid, _ in ours(run.mark)]
    if left:
        wrong.append(f"processes left: {left}")
    if files := os.listdir(run.tmp):
        wrong.append(f"left in TMPDIR: {files}")
    if files := [n for n in os.listdir("/dev/shm") if "phalanx" in n]:
        wrong.append(f"left in /dev/shm: {files}")
    if os.path.isdir(run.out):
        for name in os.listdir(run.out):
            path = os.path.join(run.out, name)
            if name.endswith(".tmp"):
                wrong.append(f"left beside the checkpoint: {name}")
            elif name.endswith(".safetensors") and (why := broken_checkpoint(path)):
                wrong.append(f"{name}: {why}")
            elif name.endswith(".json"):
                with open(path) as f:
                    try:
                        json.load(f)
                    except ValueError as e:
                        wrong.append(f"{name}: {e}")
    return wrong, took, limit


def broken_checkpoint(path):
    with open(path, "rb") as f:
        data = f.read()
    if len(data) < 8:
        return "shorter than its header"
    (length,) = struct.unpack("<Q", data[:8])
    try:
        header = json.loads(data[8:8 + length])
    except ValueError as e:
        return str(e)
    end = max(t["data_offsets"][1] for n, t in header.items() if n != "__metadata__")
    return None if len(data) == 8 + length + end else f"{len(data)} bytes, not {8 + length + end}"


def one(args, fault, timings, hosts, work):
    """Runs one fault; returns (line, record)."""
    key = (fault["kind"], tuple(fault["nodes"]))
    if key not in timings:
        timings[key] = calibrate(args.phalanx, fault["kind"], fault["nodes"], hosts, work)
    misses = []
    for attempt in range(6):
        run = Run(args.phalanx, fault["kind"], fault["nodes"], hosts, work)
        try:
            wait_for_moment(run, fault, timings[key])
            if run.ended():
                raise Missed("the run was over")
            # The run has not had its first collective yet: the forming deadlines hold.
            fault["slow"] = run.steps < 1
            done, culprit = strike(run, fault, hosts)
            struck = time.monotonic()
            gone = run.wait_gone(struck + 1.1 * LAUNCHER_TIMEOUT_S + SLACK_S + 4)
            codes = [p.poll() for p in run.launchers]
            victim = culprit if fault["what"] == "kill-launcher" else None
            if all(c == 0 for n, c in enumerate(codes) if n != victim) and len(codes) > (victim is not None) \
                    and gone is not None:
                raise Missed("it came after the last moment that matters")
            wrong, took, limit = check(run, fault, culprit, struck, gone)
            reports = [run.report(n) for n in range(len(run.launchers))]
            stderr = ["\n".join(e.text) for e in run.err]
        except Missed as miss:
            misses.append(str(miss))
            # Earlier by a random piece: what was too late will be again.
            fault["at"] = random.Random(f"{fault['at']}:{attempt}").random() * fault["at"]
            continue
        finally:
            run.clear()
            if fault["what"] == "drop":
                hosts.link(1, "up")
        nodes = "+".join(map(str, fault["nodes"]))
        verdict = "ok" if not wrong else "WRONG: " + "; ".join(wrong)
        span = "never" if took is None else f"{took:5.2f} s"
        line = (f"{fault['number']:4} {fault['kind']:5} {nodes:4} {fault['phase']:10} {fault['what']:13} {done:45} "
                f"{span} codes {codes}  {verdict}")
        record = {**fault, "done": done, "took_s": took, "limit_s": limit, "codes": codes, "wrong": wrong,
                  "misses": misses, "reports": reports}
        if wrong:
            record["stderr"] = stderr
        if args.verbose:
            line += "\n" + "\n".join(f"     | {text}" for r in reports for text in r.split("\n"))
        return line, record
    return (f"{fault['number']:4} {fault['kind']:5} {fault['phase']} {fault['what']}: never hit: {misses}",
            {**fault, "misses": misses, "wrong": [], "missed": True})


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--phalanx", default="target/release/phalanx")
    parser.add_argument("--faults", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", type=int, action="append", help="this fault only (may be repeated)")
    parser.add_argument("--what", help="only faults of this kind")
    parser.add_argument("--out", help="folder for summary.json and faults.jsonl")
    parser.add_argument("--strict", action="store_true", help="do not repeat what was only too slow")
    parser.add_argument("-v", "--verbose", action="store_true", help="print the reports")
    args = parser.parse_args()
    args.phalanx = os.path.realpath(args.phalanx)
    is_root = os.geteuid() == 0 and shutil.which("ip") is not None
    work = tempfile.mkdtemp(prefix="random-faults-")
    hosts = Hosts(2) if is_root else None
    timings, records, slow_once, began = {}, [], [], time.monotonic()
    out = None
    try:
        if args.out:
            os.makedirs(args.out, exist_ok=True)
            out = open(os.path.join(args.out, "faults.jsonl"), "w")
            lines = open(os.path.join(args.out, "faults.txt"), "w")
        for number in args.only or range(args.faults):
            fault = draw(args.seed, number, is_root)
            if args.what and fault["what"] != args.what:
                continue
            line, record = one(args, fault, timings, hosts, work)
            if not args.strict and record["wrong"] and all(w.startswith("took ") for w in record["wrong"]):
                print(f"{line}\n     once more", flush=True)
                slow_once.append(number)
                line, record = one(args, draw(args.seed, number, is_root), timings, hosts, work)
            print(line, flush=True)
            records.append(record)
            if out:
                out.write(json.dumps(record) + "\n")
                out.flush()
                lines.write(line + "\n")
                lines.flush()
    finally:
        if hosts:
            hosts.remove()
        shutil.rmtree(work, ignore_errors=True)
    wrong = [r["number"] for r in records if r["wrong"]]
    missed = [r["number"] for r in records if r.get("missed")]
    summary = {"seed": args.seed, "faults": len(records), "hit": len(records) - len(missed), "wrong": wrong,
               "missed": missed, "slow_once": slow_once, "minutes": round((time.monotonic() - began) / 60, 1)}
    for what in ["kill-rank", "kill-launcher", "stop-rank", "half-close", "drop"]:
        took = sorted(r["took_s"] for r in records if r["what"] == what and r.get("took_s") is not None)
        if took:
            summary[what] = {"count": len(took), "median_s": round(took[len(took) // 2], 2), "worst_s": round(took[-1], 2)}
    print(json.dumps(summary, indent=1))
    if args.out:
        with open(os.path.join(args.out, "summary.json"), "w") as f:
            json.dump(summary, f, indent=1)
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
