"""drive.py KIND SECONDS KILL_SEED|none K OUT: one run. KIND is ours or torchrun (or torchft).

Kills begin with the first step; the run ends SECONDS after it. Writes OUT.json, OUT.steps, OUT.log.
"""
import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time

kind, seconds, seed, every, out = sys.argv[1:]
seconds = float(seconds)
here = os.path.dirname(os.path.realpath(__file__))
root = "/tmp/t/goodput"
GAP = 15
folder = tempfile.mkdtemp(dir=root)
steps_log = out + ".steps"
with contextlib.suppress(FileNotFoundError):
    os.remove(steps_log)
env = {**os.environ, "OMP_NUM_THREADS": "1", "STEP_LOG": steps_log, "K": every, "FOLDER": folder, "PYTHONPATH": f"{root}/pkg", "TMPDIR": folder}
# Otherwise restarted ranks find addresses of the ranks before them: github.com/pytorch/pytorch/issues/135712, 167288.
env |= {} if os.environ.get("SHARED_STORE") else {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
python = "/tmp/t/venv/bin/python"
if kind == "ours":
    line = [f"{root}/phalanx", "launch", "--elastic", "--max-restarts", "1000", "--nproc-per-node", "2", "--", python, f"{here}/ours.py"]
elif kind.startswith("torchft"):
    # As in its README, or with less time before a lost group is given up.
    env["LIGHT"] = "--quorum_tick_ms 100 --join_timeout_ms 10000" if kind == "torchft" else "--quorum_tick_ms 10 --join_timeout_ms 1000 --heartbeat_timeout_ms 500"
    line = ["bash", f"{here}/torchft_job.sh"]
else:
    line = ["/tmp/t/venv/bin/torchrun", "--standalone", "--nproc-per-node", "2", "--max-restarts", "1000", f"{here}/gloo.py"]


def ranks(launcher):
    """The living processes below the launcher that have RANK in their environment."""
    parent = {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            with open(f"/proc/{name}/stat") as file:
                fields = file.read().rsplit(")", 1)[1].split()
            if fields[0] != "Z":
                parent[int(name)] = int(fields[1])
    found = []
    for pid in parent:
        up = parent[pid]
        while up != launcher and up in parent:
            up = parent[up]
        if up == launcher:
            with contextlib.suppress(OSError):
                with open(f"/proc/{pid}/environ", "rb") as file:
                    if any(v.startswith(b"RANK=") for v in file.read().split(b"\0")):
                        found.append(pid)
    return sorted(found)


class Others(threading.Thread):
    """The processor seconds of all processes that are not below this program."""

    def __init__(self):
        super().__init__(daemon=True)
        self.used, self.over = {}, threading.Event()

    def run(self):
        before = {}
        while not self.over.wait(5):
            now, parent = {}, {}
            for name in filter(str.isdigit, os.listdir("/proc")):
                with contextlib.suppress(OSError):
                    with open(f"/proc/{name}/stat") as file:
                        comm, rest = file.read().split("(", 1)[1].rsplit(")", 1)
                    fields = rest.split()
                    parent[int(name)] = int(fields[1])
                    now[int(name)] = (int(fields[11]) + int(fields[12])) / 100, comm
            for pid, (seconds, comm) in now.items():
                up = pid
                while up not in (os.getpid(), 0) and up in parent:
                    up = parent[up]
                if up != os.getpid():
                    more = seconds - before.get(pid, (0 if before else seconds,))[0]
                    self.used[comm] = self.used.get(comm, 0) + more
            before = now

    def result(self):
        self.over.set()
        self.join()
        most = sorted(((round(s, 2), comm) for comm, s in self.used.items() if s >= 0.5), reverse=True)[:5]
        return {"all": round(sum(self.used.values()), 1), "most": most}


def last():
    """The lines of the steps."""
    try:
        with open(steps_log) as file:
            return [line.split() for line in file.read().split("\n") if line.count(" ") == 2]
    except FileNotFoundError:
        return []


began = time.time()
log = open(out + ".log", "w")
job = subprocess.Popen(line, stdout=log, stderr=subprocess.STDOUT, env=env, cwd=folder, start_new_session=True)
while not last():
    assert job.poll() is None and time.time() - began < 60, "it does not begin"
    time.sleep(0.02)
first = float(last()[0][0])
others = Others()
others.start()
schedule = []
rng = random.Random(int(seed)) if seed != "none" else None
while rng and sum(schedule) < seconds:
    schedule.append(rng.uniform(0.2, 1.8) * GAP)
kills, at = [], first
for gap in schedule:
    at += gap
    if at > first + seconds - 3:
        break
    choice = rng.random()
    while time.time() < at:
        time.sleep(min(0.05, max(0, at - time.time())))
    while job.poll() is None:
        alive = ranks(job.pid)
        if alive:
            pid = alive[int(choice * len(alive))]
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
                kills.append([round(time.time() - first, 3), len(alive)])
                break
        time.sleep(0.02)
while time.time() < first + seconds and job.poll() is None:
    time.sleep(0.05)
ended = job.poll()
early = time.time() - first if ended is not None else None
if ended is None:
    below = ranks(job.pid)
    job.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        job.wait(15)
    if job.poll() is None:
        job.kill()
        job.wait()
    for pid in below:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
lines = [(float(t), int(s), int(w)) for t, s, w in last() if float(t) <= first + seconds]
reached = max(s for _, s, _ in lines)
# Per kill: from the kill to the first step beyond those before it; and the longest pauses without a step.
result = {
    "kind": kind, "K": int(every), "seed": seed, "seconds": seconds, "kills": len(kills), "start_s": round(first - began, 2),
    "steps": reached - lines[0][1], "lines": len(lines), "repeated": len(lines) - reached,
    "steps_per_s": round((reached - lines[0][1]) / seconds, 4), "ended_early_s": early, "code": ended, "kill_times": kills,
    "others_cpu_s": others.result(), "batches": round(sum({s: w for _, s, w in lines}.values()) / 2, 1),
    "steps_at_world": {w: sum(1 for _, _, world in lines if world == w) for w in (1, 2)},
}
again = []
for t, _ in kills:
    before = max((s for when, s, _ in lines if when <= first + t), default=0)
    after = [when - first - t for when, s, _ in lines if when > first + t and s > before]
    again.append(round(after[0], 3) if after else None)
result["new_step_after_kill_s"] = again
with open(out + ".json", "w") as file:
    json.dump(result, file)
shutil.rmtree(folder, ignore_errors=True)
print({k: v for k, v in result.items() if k not in ("kill_times",)})
