#!/usr/bin/env python3
"""How runs end, on a real MLflow server and in the own readers of wandb and TensorBoard.

    PYTHON tools/ci/endings.py PHALANX [--rounds N] [--busy] [--away]

Starts a training for each way to end (NaN, SIGKILL of a rank and of the launcher, SIGTERM with and without checkpoints; one,
two and four ranks, two nodes), and compares the run's state in events.jsonl, on the server, in the offline run of wandb and
in TensorBoard's file with what happened. PYTHON needs `pip install mlflow wandb tensorboard`; without them nothing is
checked. --busy runs a busy loop on every core meanwhile. With --away the server is killed before the run ends and started
again afterwards: a run that it does not get in time must say so, with the command that sends it.
"""

import argparse
import glob
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request

# Its own folder has a file tensorboard.py.
sys.path[0] = os.path.join(sys.path[0], "..")
from hosts import processes  # noqa: E402

try:
    import mlflow  # noqa: F401
    import wandb  # noqa: F401
    from tensorboard.backend.event_processing import plugin_event_accumulator
    from tensorboard.plugins.hparams import plugin_data_pb2
    from tensorboard.util import tensor_util
except ImportError as error:
    print(f"skipped: {sys.executable}: {error}")
    sys.exit(0)

MARK = "PHALANX_ENDINGS_MARK"
EXPERIMENT = "endings"
TRAIN = ["train", "mnist", "--data", "synthetic:20000", "--epochs", "50", "--threads", "1",
         "--log-interval", "1", "--wandb"]


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def wait_until(what, holds, limit=60):
    until = time.monotonic() + limit
    while not holds():
        if time.monotonic() > until:
            sys.exit(f"never happened: {what}")
        time.sleep(0.05)


def ask(uri, path, body=None):
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(f"{uri}/api/2.0/mlflow/{path}", data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request) as answer:
        return json.load(answer)


class Run:
    """A training, of one launcher or two."""

    def __init__(self, phalanx, uri, folder, ranks=2, nodes=1, more=()):
        self.folder = folder
        env = {**os.environ, MARK: folder, "MLFLOW_EXPERIMENT_NAME": EXPERIMENT}
        train = [*TRAIN, "--mlflow", uri, "--output-dir", folder, *more]
        commands = [[phalanx, *train, "--nproc-per-node", str(ranks)]]
        if nodes > 1:
            env["PHALANX_TOKEN"] = "ab" * 32
            meet = ["--nnodes", str(nodes), "--nproc-per-node", str(ranks), "--master-addr", "127.0.0.1", "--master-port",
                    str(free_port())]
            commands = [[phalanx, "launch", *meet, "--node-rank", str(node), "--", phalanx, *train] for node in range(nodes)]
        self.launchers = []
        for node, command in enumerate(commands):
            with open(f"{folder}.{node}.err", "w") as err:
                self.launchers.append(subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL, stderr=err))

    def pid_of(self, rank):
        for pid, variables in processes(f"{MARK}={self.folder}"):
            if variables.get(b"RANK") == str(rank).encode():
                return pid
        sys.exit(f"{self.folder}: no rank {rank}")

    def wait_for_steps(self):
        def has():
            try:
                with open(f"{self.folder}/metrics.jsonl") as f:
                    return len(f.readlines()) > 2
            except OSError:
                return False
        wait_until(f"{self.folder}: a third step", has)

    def said(self):
        return "".join(open(name).read() for name in glob.glob(f"{self.folder}.*.err"))

    def local(self):
        with open(f"{self.folder}/events.jsonl") as f:
            last = json.loads(f.readlines()[-1])
        return last.get("status"), last.get("error")

    def remote(self, uri):
        experiment = ask(uri, f"experiments/get-by-name?experiment_name={EXPERIMENT}")["experiment"]["experiment_id"]
        with open(f"{self.folder}/run.json") as f:
            own = json.load(f)["id"]
        found = ask(uri, "runs/search", {"experiment_ids": [experiment], "filter": f"tags.`phalanx.id` = '{own}'"})
        if not found.get("runs"):
            return None, None
        run = found["runs"][0]
        tags = {tag["key"]: tag["value"] for tag in run["data"].get("tags", [])}
        return run["info"]["status"], tags.get("error")

    def offline(self):
        """The exit code in wandb's file, by wandb's reader; None without one."""
        (folder,) = glob.glob(f"{self.folder}/wandb/offline-run-*")
        inspect = [sys.executable, "-m", "wandb", "leet", "inspect", "--json", folder]
        text = subprocess.run(inspect, check=True, capture_output=True, text=True).stdout
        ends = [record["exit"] for record in map(json.loads, text.splitlines()) if record["type"] == "exit"]
        return ends[-1].get("exit_code", 0) if ends else None


    def shown(self):
        """How the run ended in TensorBoard's file, by TensorBoard's reader: its text, and the status of the hparams page."""
        events = plugin_event_accumulator.EventAccumulator(self.folder).Reload()
        tags = events.Tags()["tensors"]
        if "end" not in tags:
            return None, None
        text = tensor_util.make_ndarray(events.Tensors("end")[-1].tensor_proto).item().decode()
        end = events.PluginTagToContent("hparams").get("_hparams_/session_end_info")
        status = end and plugin_data_pb2.HParamsPluginData.FromString(end).session_end_info.status
        return text, status


def kill(rank):
    return lambda run: os.kill(run.pid_of(rank), signal.SIGKILL)


def launcher(number, node=0):
    return lambda run: run.launchers[node].send_signal(number)


# name: what is started, what is done to it, its exit code, its state here, its state in MLflow, its exit code in wandb
FAILED, STOPPED = ("failed", "FAILED", 1), ("stopped", "KILLED", 255)
CASES = {
    "nan-1": (dict(ranks=1, more=["--lr", "1e20"]), None, 1, FAILED),
    "nan-2": (dict(more=["--lr", "1e20"]), None, 1, FAILED),
    "rank-0": (dict(), kill(0), 3, FAILED),
    "rank-1": (dict(), kill(1), 3, FAILED),
    "rank-3-of-4": (dict(ranks=4), kill(3), 3, FAILED),
    "rank-1-of-2-nodes": (dict(ranks=1, nodes=2), kill(1), 3, FAILED),
    "term": (dict(), launcher(signal.SIGTERM), 130, STOPPED),
    "term-1": (dict(ranks=1), launcher(signal.SIGTERM), 130, STOPPED),
    "term-saving": (dict(more=["--save-every", "100000"]), launcher(signal.SIGTERM), 130, STOPPED),
    "launcher": (dict(), launcher(signal.SIGKILL), -signal.SIGKILL, FAILED),
    "node-1": (dict(ranks=1, nodes=2), launcher(signal.SIGKILL, 1), 3, FAILED),
    # Nobody is left to say so.
    "all": (dict(ranks=1), launcher(signal.SIGKILL), -signal.SIGKILL, FAILED),
}


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("phalanx")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--busy", action="store_true")
    parser.add_argument("--away", action="store_true")
    args = parser.parse_args()
    phalanx = os.path.realpath(args.phalanx)
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(os.cpu_count() * args.busy)]
    work = tempfile.TemporaryDirectory()
    os.chdir(work.name)
    port = free_port()
    uri = f"http://127.0.0.1:{port}"

    def serve():
        return subprocess.Popen(
            [sys.executable, "-m", "mlflow", "server", "--backend-store-uri", f"sqlite:///{work.name}/mlflow.db",
             "--artifacts-destination", f"{work.name}/artifacts", "--host", "127.0.0.1", "--port", str(port), "--workers", "1"],
            env={**os.environ, "MLFLOW_DISABLE_TELEMETRY": "true"}, start_new_session=True, stdout=open("server.log", "a"),
            stderr=subprocess.STDOUT)

    def stop():
        os.killpg(server.pid, signal.SIGKILL)
        server.wait()

    server = serve()

    def is_up():
        try:
            urllib.request.urlopen(f"{uri}/health").read()
            return True
        except OSError:
            return False

    wrong = 0
    try:
        wait_until("the MLflow server answers", is_up, 180)
        for number in range(args.rounds):
            for name, (start, do, code, (here, there, exit_code)) in CASES.items():
                run = Run(phalanx, uri, f"{name}-{number}", **start)
                if do:
                    run.wait_for_steps()
                    if args.away:
                        stop()
                    do(run)
                if args.away and do:
                    # The guard of a launcher that was killed may still deliver.
                    time.sleep(1)
                    server = serve()
                    wait_until("the MLflow server answers again", is_up, 180)
                for process in run.launchers:
                    process.wait()
                if args.away:
                    time.sleep(12 if name == "launcher" else 0)
                said = "not delivered" in run.said()
                if name == "all" or said:
                    assert name == "all" or f"phalanx report {run.folder} --upload {uri}" in run.said(), run.said()
                    subprocess.run([phalanx, "report", run.folder, "--upload", uri], check=True, stdout=subprocess.DEVNULL)
                # The guard of a launcher that was killed ends a moment after it.
                want = (here, there, exit_code)
                for _ in range(150):
                    (status, error), (state, tag) = run.local(), run.remote(uri)
                    if (status, state) == (here, there) and error == tag:
                        break
                    time.sleep(0.1)
                got = (status, state, run.offline())
                end = (f"{status}: {error}" if error else status, 2 if status == "failed" else None)
                good = got == want and error == tag and run.launchers[0].returncode == code and run.shown() == end
                good = good and (args.away or not said)
                wrong += not good
                print(f"{'ok   ' if good else 'WRONG'} {run.folder:22} exit {run.launchers[0].returncode:4} {got} {error}{' (sent later)' * said}", flush=True)
                if not good:
                    print(f"      wanted exit {code} {want}; the server's error: {tag}; TensorBoard: {run.shown()}\n{run.said()}", flush=True)
    finally:
        stop()
        for process in busy:
            process.kill()
        work.cleanup()
    print(f"{args.rounds * len(CASES)} runs, {wrong} wrong")
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
