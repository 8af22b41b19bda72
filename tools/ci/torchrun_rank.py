"""What tools/ci/torchrun_table.py starts as a rank: writes down what it finds, prints two lines, and ends as it is told."""
import json
import os
import pathlib
import signal
import sys
import time

KEPT = ("GROUP_", "LOCAL_", "MASTER_", "ROLE_", "TORCHELASTIC_", "TORCH_NCCL_")
ALSO = ("RANK", "WORLD_SIZE", "OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES")

rank, attempt = os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"]
out = pathlib.Path(os.environ["TABLE_OUT"])
seen = {name: value for name, value in os.environ.items() if name.startswith(KEPT) or name in ALSO}
seen["arguments"] = sys.argv[1:]
seen["main"] = __name__
seen["unbuffered"] = sys.stdout.write_through
seen["processors"] = sorted(os.sched_getaffinity(0))
(out / f"rank-{rank}-{attempt}.json").write_text(json.dumps(seen))
# In one write each: ranks under torchrun write to the same file, and print() without a buffer writes the line feed apart.
os.write(1, f"out of {rank}: apple\n".encode())
os.write(2, f"err of {rank}: pear\n".encode())
end = os.environ.get("TABLE_END", "")
if end == "wait":
    signal.signal(signal.SIGUSR1, lambda *_: sys.exit(0))
    (out / f"ready-{rank}").touch()
    time.sleep(60)
if end == "fail once" and attempt == "0" or end == "fail" and rank == "1":
    time.sleep(1)
    sys.exit(7)
if end == "killed" and rank == "1":
    time.sleep(1)
    os.kill(os.getpid(), signal.SIGKILL)
if end in ("fail", "killed"):
    time.sleep(60)
