#!/usr/bin/env python3
"""Trainings laid beside PyTorch's own: same initial weights, same order of samples, same hyperparameters.

    python3 -m venv /tmp/venv && /tmp/venv/bin/pip install torch numpy
    cargo build --release
    tools/bench/parity/run.py --python /tmp/venv/bin/python --mnist DIR --cifar10 DIR --out tools/runs/DATE-parity

Two comparisons, on one rank and on two (PyTorch: DistributedDataParallel on Gloo):

losses    The first 20 losses of rank 0 agree within 1e-3 relative, at a learning rate where PyTorch's own float32 and float64
          runs agree within 1e-4. Larger rates are shown too. Dropout is off: its masks cannot
          be the same.
accuracy  MNIST CNN with all of its document's hyperparameters, dropout included: the test accuracies after the last
          epoch, means over seeds, lie within 0.2 points.

Writes raw.jsonl (a line a run, with its command) and summary.md; the exit code is 0 when all agree. What raw.jsonl has
already is not run again, so that a comparison that was broken off goes on.
Optional: needs PyTorch and the real data. `--only losses --steps 5` is the short form for a check by hand.
"""
import argparse
import json
import pathlib
import re
import shlex
import statistics
import subprocess
import sys
import tempfile
import time

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parents[2]
p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
p.add_argument("--python", default=sys.executable, help="interpreter with torch")
p.add_argument("--phalanx", default=str(ROOT / "target/release/phalanx"))
p.add_argument("--mnist", required=True, help="folder with the original files")
p.add_argument("--cifar10", required=True, help="folder with cifar-10-batches-py")
p.add_argument("--out", required=True, type=pathlib.Path)
p.add_argument("--only", choices=["losses", "accuracy"])
p.add_argument("--programs", default="mnist,resnet18", help="losses: which ones")
p.add_argument("--worlds", default="1,2", help="numbers of ranks")
p.add_argument("--steps", type=int, default=20)
p.add_argument("--epochs", type=int, default=2)
p.add_argument("--seeds", default="1,2,3", help="accuracy: of weights, order and dropout")
p.add_argument("--loss-seeds", default="1", help="losses: of weights and order")
p.add_argument("--limit", type=float, default=3600, help="seconds that one run may take")
args = p.parse_args()
args.out.mkdir(parents=True, exist_ok=True)
RAW = args.out / "raw.jsonl"
known = [json.loads(line) for line in RAW.read_text().splitlines()] if RAW.exists() else []
raw = open(RAW, "a")
scratch = tempfile.TemporaryDirectory(prefix="phalanx-parity-")
DATA = {"mnist": args.mnist, "resnet18": args.cifar10}
# Largest first. Adam's first steps are as long for the smallest gradients as for the largest, so that rounding decides
# much already at 1e-5, and more at the ModelArts document's 0.01.
RATES = {"mnist": [0.05, 0.01], "resnet18": [1e-6]}
BATCH = {"mnist": 64, "resnet18": 16}
number = 0


def run(command, out, read, **facts):
    """Runs it with `out` behind it, unless it is known, and keeps what `read` makes of its stderr."""
    for record in known:
        if record["command"] == command:
            return record
    print(f"{time.strftime('%H:%M:%S')} {' '.join(map(str, facts.values()))}", file=sys.stderr, flush=True)
    done = subprocess.run([*command, str(out)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, timeout=args.limit)
    if done.returncode != 0:
        sys.exit(f"{shlex.join(command)} {out}\nended with {done.returncode}\n{done.stdout}\n{done.stderr}")
    record = {**facts, "command": command, **read(done.stderr)}
    print(json.dumps(record), file=raw, flush=True)
    return record


def fresh():
    global number
    number += 1
    return pathlib.Path(f"{scratch.name}/{number}")


def peer(program, world, dtype, lr, seed, *more):
    out = fresh()
    command = [args.python, str(HERE / "torch_ddp.py"), program, "--data", DATA[program], "--world", str(world),
               "--threads", "1", "--dtype", dtype, "--lr", repr(lr), "--seed", str(seed),
               "--batch-size", str(BATCH[program]), *more, "--out"]
    return run(command, out, lambda _: json.loads(out.read_text()), side="pytorch", program=program, world=world, dtype=dtype,
               lr=lr, seed=seed)


def ours(program, world, lr, seed, *more):
    out = fresh()

    def read(stderr):
        records = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
        return {"initial_sha256": re.search(r"^weights .*\(([0-9a-f]{12})…\)$", stderr, re.M).group(1),
                "losses": [r["loss"] for r in records if "loss" in r],
                "accuracies": [r["accuracy"] for r in records if "accuracy" in r]}

    command = [args.phalanx, "train", program, "--data", DATA[program], "--nproc-per-node", str(world), "--threads",
               "1", "--lr", repr(lr), "--seed", str(seed), "--init", "torch", "--sampler", "torch",
               "--batch-size", str(BATCH[program]), "--log-interval", "1", *more, "--output-dir"]
    return run(command, out, read, side="ours", program=program, world=world, lr=lr, seed=seed)


def apart(a, b):
    """The largest relative difference of two lists of losses."""
    assert len(a) == len(b) == args.steps, (len(a), len(b))
    return max(abs(x - y) / abs(y) for x, y in zip(a, b))


def compare_losses():
    """A row a case, and whether each program agrees on each number of ranks at a rate where it should."""
    rows, good = [], True
    seeds = list(map(int, args.loss_seeds.split(",")))
    for program in args.programs.split(","):
        for world in map(int, args.worlds.split(",")):
            off = ["--dropout", "0,0"] if program == "mnist" else []
            agree = False
            for lr in RATES[program]:
                every = [case(program, world, lr, seed, off, rows) for seed in seeds]
                agree |= all(every)
            good &= agree
    return rows, good


def case(program, world, lr, seed, off, rows):
    """Appends a row; whether ours agrees at a rate where PyTorch agrees with itself."""
    f32, f64 = (peer(program, world, dtype, lr, seed, "--steps", str(args.steps), *off) for dtype in ("f32", "f64"))
    more = off + (["--lr-scaling", "none"] if program == "resnet18" else [])
    mine = ours(program, world, lr, seed, "--stop-after", str(args.steps), *more)
    same = f32["initial_sha256"].startswith(mine["initial_sha256"])
    own = apart(f32["losses"], f64["losses"])
    near = apart(mine["losses"], f32["losses"])
    exact = apart(mine["losses"], f64["losses"])
    calm = own <= 1e-4
    fine = same and near <= 1e-3 and exact <= 1e-3
    verdict = "yes" if fine else "no" if calm else "no, nor does PyTorch with itself"
    rows.append(f"| {program} | {world} | {lr:g} | {seed} | {BATCH[program]} | {f32['losses'][0]:.4f} → {f32['losses'][-1]:.4f} | "
                f"{'the same' if same else 'DIFFER'} | {own:.1e} | {near:.1e} | {exact:.1e} | {verdict} |")
    print(rows[-1], file=sys.stderr, flush=True)
    return calm and fine


def compare_accuracies():
    rows, good = [], True
    for world in map(int, args.worlds.split(",")):
        means = {}
        for side in ("pytorch", "ours"):
            last = []
            for seed in map(int, args.seeds.split(",")):
                if side == "ours":
                    result = ours("mnist", world, 0.01, seed, "--epochs", str(args.epochs))
                else:
                    result = peer("mnist", world, "f32", 0.01, seed, "--epochs", str(args.epochs))
                last.append(100 * result["accuracies"][-1])
            means[side] = (statistics.mean(last), ", ".join(f"{v:.2f}" for v in last))
        gap = means["ours"][0] - means["pytorch"][0]
        fine = abs(gap) <= 0.2
        good &= fine
        rows.append(f"| {world} | {means['pytorch'][0]:.2f} ({means['pytorch'][1]}) | {means['ours'][0]:.2f} ({means['ours'][1]}) | "
                    f"{gap:+.2f} | {'yes' if fine else 'NO'} |")
    return rows, good


good = True
text = ["# Beside PyTorch\n", f"`{shlex.join(sys.argv)}`\n"]
if args.only != "accuracy":
    rows, fine = compare_losses()
    good &= fine
    text += [f"\nThe first {args.steps} losses of rank 0: largest relative difference. Same initial weights (SHA-256), same order of "
             "samples, dropout off; MNIST CNN with SGD and momentum 0.9, the ModelArts document's ResNet-18 with its Adam. They are to agree "
             "within 1e-3 at a learning rate where PyTorch's own float32 and float64 runs agree within 1e-4; larger rates, at which "
             "rounding grows faster, are shown beside it.\n",
             "\n| program | ranks | lr | seed | batch a rank | loss, first → last | initial weights | PyTorch f32 / f64 | ours / PyTorch f32 | "
             "ours / PyTorch f64 | within 1e-3 |\n|---|---|---|---|---|---|---|---|---|---|---|\n", "\n".join(rows) + "\n"]
if args.only != "losses":
    rows, fine = compare_accuracies()
    good &= fine
    text += [f"\nMNIST CNN after {args.epochs} epochs, dropout 0.25 and 0.5, lr 0.01, momentum 0.9, 64 images a rank and step: test "
             f"accuracy in percent, mean over seeds {args.seeds} (each).\n",
             "\n| ranks | PyTorch | ours | points apart | within 0.2 |\n|---|---|---|---|---|\n", "\n".join(rows) + "\n"]
(args.out / "summary.md").write_text("".join(text))
print("".join(text))
sys.exit(0 if good else 1)
