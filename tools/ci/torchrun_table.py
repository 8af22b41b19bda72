"""The same command lines under torchrun and `phalanx launch`: the variables of each rank, the lines that reach the
terminal, the files and the end are compared.

Usage: torchrun_table.py path/to/phalanx [path/to/python [CASE...]]   (a Python that has torch)
"""
import concurrent.futures
import json
import os
import pathlib
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time

HERE = pathlib.Path(__file__).resolve().parent
SCRIPT = str(HERE / "torchrun_rank.py")
LIMIT = 120

# Every difference that is meant, with the reason. A case may differ in these and in what its own entry says.
EVERYWHERE = {
    "TORCHELASTIC_USE_AGENT_STORE": "our store is none that PyTorch could talk to, so rank 0 hosts PyTorch's own",
    "TORCHELASTIC_ERROR_FILE": "the folder has another name",
    "MASTER_PORT": "a free port; that it is the same for all ranks is checked",
}
BY_HOST = "torchrun gives the host name of its rank 0, we the HOST of the endpoint or 127.0.0.1"
RANDOM_ID = "one node without an address has a random name under both"
ONE = {"MASTER_ADDR": BY_HOST, "TORCHELASTIC_RUN_ID": RANDOM_ID}
KEPT_LOGS = "with --log-dir, --tee 3 is our default: the files are what the folder is for"
NO_CODE = "torchrun ends with 1 whatever happened; we tell a failed rank (1), usage (2), a signal (3) and an interrupt (130) apart"


class Case:
    def __init__(self, name, flags, program=(SCRIPT, "--x", "a b"), end="", nodes=None, env=None, meant=None, raw=False,
                 send=None, cwd=None):
        self.name, self.flags, self.program, self.end = name, list(flags), list(program), end
        self.nodes, self.env, self.raw, self.send, self.cwd = nodes, env or {}, raw, send, cwd
        self.meant = {**EVERYWHERE, **(ONE if nodes is None else {}), **(meant or {})}


def node_flags(*each):
    return [list(flags) for flags in each]


TWO = ["--nproc-per-node", "2"]
C10D = ["--nnodes", "2", "--nproc-per-node", "2", "--rdzv-id", "job7", "--rdzv-backend", "c10d", "--rdzv-endpoint"]
STATIC = ["--nnodes=2", "--nproc_per_node=2", "--master_addr=127.0.0.1", "--master_port=PORT"]
CASES = [
    Case("one rank", []),
    Case("two ranks", TWO),
    Case("--standalone", ["--standalone", *TWO]),
    Case("OMP_NUM_THREADS set", TWO, env={"OMP_NUM_THREADS": "3"}),
    Case("-m", [*TWO, "-m"], program=["torchrun_rank", "-m", "x"], cwd=HERE),
    Case("--module, by variable", TWO, program=["torchrun_rank"], env={"PET_MODULE": "1"}, cwd=HERE),
    Case("--no-python", [*TWO, "--no-python"], program=[sys.executable, SCRIPT, "y"]),
    Case("--run-path", [*TWO, "--run-path"], program=[SCRIPT, "y"], meant={
        "unbuffered": "torchrun runs the file in a process of multiprocessing, which buffers; we run python3 -u"}),
    Case("PYTHON_EXEC", TWO, env={"PYTHON_EXEC": sys.executable}),
    Case("-r 3", [*TWO, "-r", "3"]),
    Case("-r 0:1,1:2", [*TWO, "-r", "0:1,1:2"]),
    Case("-t 3", [*TWO, "-t", "3"]),
    Case("--tee and --redirects by variable", TWO, env={"PET_TEE": "0:1", "PET_REDIRECTS": "1:3"}),
    Case("--log-dir with --redirects", [*TWO, "--log-dir", "logs", "--redirects=3", "--rdzv-id", "n"]),
    Case("--log-dir alone", [*TWO, "--log-dir", "logs"], meant={"files": KEPT_LOGS}),
    Case("--local-ranks-filter", [*TWO, "--local-ranks-filter", "1"]),
    Case("--local-ranks-filter with -t", [*TWO, "--local_ranks_filter=0", "-t", "3"]),
    Case("--log-line-prefix-template", [*TWO, "-t", "3", "--log-line-prefix-template", "${role_name}.${rank}.${local_rank}>"],
         raw=True),
    Case("template by variable", [*TWO, "-t", "3"], raw=True,
         env={"TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE": "$rank of $$ ${none}: "}),
    Case("--duplicate-stdout-filters", [*TWO, "-t", "3", "--duplicate-stdout-filters", "apple,x", "--duplicate-stderr-filters=0,, y"],
         meant={"files": "lines in the copy begin with [rank N], as those on the terminal"}),
    Case("--role", [*TWO, "--role", "trainer"]),
    Case("--monitor-interval, --start-method", [*TWO, "--monitor-interval", "0.5", "--start-method=fork"]),
    Case("--event-log-handler null", [*TWO, "--event-log-handler", "null"]),
    Case("--signals-to-handle", [*TWO, "--signals-to-handle", "SIGTERM,SIGUSR1"]),
    Case("--signals-to-handle SIGUSR1, sent", [*TWO, "--signals-to-handle=SIGTERM,SIGUSR1"], end="wait", send=signal.SIGUSR1,
         meant={"end": NO_CODE}),
    Case("SIGTERM", [*TWO, "--shutdown-timeout", "5"], end="wait", send=signal.SIGTERM, meant={"end": NO_CODE}),
    Case("--virtual-local-rank", [*TWO, "--virtual-local-rank"]),
    Case("--virtual-local-rank with devices", [*TWO, "--virtual-local-rank"], env={"CUDA_VISIBLE_DEVICES": "4,6"}),
    Case("--numa-binding", [*TWO, "--numa-binding", "node"], meant={
        "*": "torchrun binds to the NUMA node of each rank's GPU and fails without one; we spread the ranks over NUMA nodes"}),
    Case("--nproc-per-node gpu", ["--nproc-per-node", "gpu"], meant={"end": NO_CODE}),
    Case("--max-restarts", [*TWO, "--max-restarts=1"], end="fail once"),
    Case("a rank fails", TWO, end="fail"),
    Case("a rank is killed", TWO, end="killed", meant={"end": NO_CODE}),
    Case("no such script", TWO, program=["/no/such.py"], meant={"end": NO_CODE}),
    Case("unknown flag", ["--no-such-flag"]),
    Case("--rdzv-conf", [*TWO, "--rdzv-conf", "join_timeout=60,read_timeout=30"]),
    Case("PET_NPROC_PER_NODE, PET_ROLE", [], env={"PET_NPROC_PER_NODE": "2", "PET_ROLE": "r"}),
    Case("c10d on two nodes", [*C10D, "localhost:PORT"], nodes=node_flags([], []), meant={"MASTER_ADDR": BY_HOST}),
    Case("c10d, IPv6", [*C10D, "[::1]:PORT"], nodes=node_flags([], []), meant={"MASTER_ADDR": BY_HOST}),
    Case("c10d, is_host", [*C10D, "127.0.0.1:PORT", "--rdzv-conf"],
         nodes=node_flags(["is_host=true,timeout=60"], ["is_host=false,last_call_timeout=5"]), meant={"MASTER_ADDR": BY_HOST}),
    Case("c10d by variables", [], nodes=node_flags([], []), meant={"MASTER_ADDR": BY_HOST},
         env={"PET_NNODES": "2", "PET_NPROC_PER_NODE": "2", "PET_RDZV_ID": "v", "PET_RDZV_BACKEND": "c10d",
              "PET_RDZV_ENDPOINT": "localhost:PORT"}),
    Case("static on two nodes", STATIC, nodes=node_flags(["--node_rank=0"], ["--node_rank=1"])),
]


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return str(s.getsockname()[1])


def run(case, launcher, place, token):
    """Runs the case and gives what was seen."""
    place.mkdir()
    tmp = place / "tmp"
    tmp.mkdir()
    port = free_port()
    foreign = ("PET_", "SLURM_", "OMPI_", "PMI", "PHALANX_", "MASTER_", "OMP_", "TORCH", "CUDA_", "HIP_")
    env = {name: value for name, value in os.environ.items()
           if not name.startswith(foreign) and name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "PYTHON_EXEC")}
    # `python3` of our launcher is the interpreter that runs torchrun.
    env["PATH"] = f"{pathlib.Path(PYTHON).parent}:{env['PATH']}"
    env |= {"TABLE_OUT": str(place), "TABLE_END": case.end, "TMPDIR": str(tmp), "PHALANX_TOKEN_FILE": token}
    env |= {name: value.replace("PORT", port) for name, value in case.env.items()}
    processes = []
    for own in case.nodes or [[]]:
        line = [word.replace("PORT", port) for word in [*case.flags, *own]] + case.program
        line = [str(place / word) if word == "logs" else word for word in line]
        processes.append(subprocess.Popen([*launcher, *line], env=env, cwd=case.cwd or place, stdin=subprocess.DEVNULL,
                                          stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
    if case.send:
        until = time.time() + LIMIT
        while len(list(place.glob("ready-*"))) < 2 and time.time() < until:
            time.sleep(0.05)
        processes[0].send_signal(case.send)
    outs, errs, codes = [], [], []
    for process in processes:
        try:
            out, err = process.communicate(timeout=LIMIT)
        except subprocess.TimeoutExpired:
            process.kill()
            out, err = process.communicate()
            err += "\n(did not end)\n"
        outs += out.splitlines()
        errs += err.splitlines()
        codes.append(process.returncode)
    ranks = {}
    for path in place.glob("rank-*.json"):
        seen = json.loads(path.read_text())
        ranks[path.stem] = seen
    # The ranks' own lines, without the prefix that names the rank.
    def of_ranks(lines, text):
        # Indented lines are our report of a failure, which repeats the last ones.
        lines = [line for line in lines if text in line and not line.startswith("  ")]
        return sorted(line if case.raw else re.sub(r"^\[(rank |[a-z]+)\d+\]:? ?", "", line) for line in lines)
    files = {}
    for path in place.rglob("*.log"):
        name = "/".join(path.parts[[part.startswith("attempt_") for part in path.parts].index(True):])
        files[name] = sorted(line for line in path.read_text().splitlines() if " of " in line)
    seen = {"end": codes, "stdout": of_ranks(outs, "out of"), "stderr": of_ranks(errs, "err of"), "ranks": sorted(ranks),
            "files": files}
    for name in sorted({name for rank in ranks.values() for name in rank}):
        seen[name] = {rank: ranks[rank].get(name) for rank in sorted(ranks)}
    ports = {json.dumps(value) for name, value in seen.get("MASTER_PORT", {}).items() if name.endswith("-0")}
    seen["one MASTER_PORT"] = len(ports) <= 1
    return seen, "\n".join(outs[-20:] + errs[-20:])


def compare(case, theirs, ours):
    """The differences that are not meant, and the meant ones that were not there."""
    wrong, used = [], set()
    for name in sorted(theirs.keys() | ours.keys()):
        if theirs.get(name) == ours.get(name):
            continue
        if name in case.meant or "*" in case.meant:
            used.add(name if name in case.meant else "*")
        else:
            wrong.append(f"{name}: torchrun {theirs.get(name)}, phalanx launch {ours.get(name)}")
    return wrong, used


def check(case, top, token):
    slug = re.sub(r"\W+", "-", case.name)
    theirs, their_text = run(case, [PYTHON, "-m", "torch.distributed.run"], top / f"{slug}-torchrun", token)
    ours, our_text = run(case, [PHALANX, "launch"], top / f"{slug}-phalanx", token)
    wrong, used = compare(case, theirs, ours)
    if wrong:
        wrong += ["torchrun printed:", their_text, "phalanx launch printed:", our_text]
    return case, wrong, used


def main():
    top = pathlib.Path(tempfile.mkdtemp())
    token = str(top / "job.token")
    subprocess.run([PHALANX, "token", "--out", token], check=True)
    chosen = [case for case in CASES if not sys.argv[3:] or case.name in sys.argv[3:]]
    failed = 0
    try:
        with concurrent.futures.ThreadPoolExecutor(2) as pool:
            for case, wrong, used in pool.map(lambda case: check(case, top, token), chosen):
                own = [f"{name} ({case.meant[name]})" for name in sorted(used - EVERYWHERE.keys())]
                print(f"{'DIFFERS' if wrong else 'ok':8}{case.name}{': meant: ' + '; '.join(own) if own else ''}", flush=True)
                for line in wrong:
                    print(f"        {line}")
                failed += bool(wrong)
    finally:
        shutil.rmtree(top)
    print(f"{len(chosen) - failed} of {len(chosen)} lines do the same")
    return 1 if failed else 0


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    PHALANX = str(pathlib.Path(sys.argv[1]).resolve())
    PYTHON = sys.argv[2] if len(sys.argv) > 2 else sys.executable
    if subprocess.run([PYTHON, "-c", "import torch"], capture_output=True).returncode:
        print(f"skipped: {PYTHON} has no torch")
        sys.exit(0)
    sys.exit(main())
