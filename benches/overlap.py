#!/usr/bin/env python3
"""How much of DDP's communication backward hides on a shaped wire between hosts that are network namespaces.

    cargo build --release
    sudo benches/overlap.py --out benches/runs/DATE-overlap
    sudo benches/overlap.py --models resnet18:32 --gbit 1 --rounds 1

shaped.py tells how the wire is made. On every host runs one rank of `phalanx bench train MODEL --overhead`,
which times, in the same processes and in turn, blocks of steps without communication, of steps with it, and
of communication alone (the same buckets, all full at once). Buckets can travel from the moment the first is full
until backward ends, so what fits under backward is the shorter of that time (measured in steps without
communication) and that of the communication alone, and the share of it that is hidden is

    (step alone + communication alone - step) / min(communication alone, backward after the first bucket is full)

of which every group of three blocks gives one: the table has the median over rounds of medians, and the widest
middle half. Communication costs processor time too, which nothing hides where ranks compute on every core.

Prints a table; --out also keeps raw.jsonl, summary.md and the exact commands.
"""
import argparse
import json
import shlex
import statistics
import sys
import tempfile
from pathlib import Path

from shaped import Wire, environment, machine, run, sh, until_interrupted

HERE = Path(__file__).resolve().parent
p = argparse.ArgumentParser(formatter_class=argparse.RawDescriptionHelpFormatter, description=__doc__)
p.add_argument("--phalanx", default=str(HERE.parent / "target/release/phalanx"))
p.add_argument("--models", default="resnet18:32,resnet18:64,mnist:64", help="MODEL:BATCH, separated by commas")
p.add_argument("--hosts", type=int, default=2)
p.add_argument("--gbit", type=float, default=1, help="Gbit/s of every host; 0 = not shaped")
p.add_argument("--mtu", type=int, default=1500)
p.add_argument("--threads", type=int, default=1, help="compute threads of a rank")
p.add_argument("--steps", type=int, default=40, help="steps of each kind in a round")
p.add_argument("--rounds", type=int, default=1)
p.add_argument("--bench", default="", help="further arguments of `phalanx bench train`")
p.add_argument("--out", type=Path)
args = p.parse_args()

HEAD = ["| model | batch | step alone, ms | with communication, ms | communication alone, ms | backward after the first bucket, ms | "
        "hidden of what fits |",
        "|---|---|---|---|---|---|---|"]


def row(model, batch, lines):
    middle = lambda key: statistics.median(line[key] for line in lines)
    quartiles = [line["hidden_percent_quartiles"] for line in lines]
    low, high = min(q[0] for q in quartiles), max(q[1] for q in quartiles)
    return (f"| {model} | {batch} | {middle('alone_ms_median'):.1f} | {middle('step_ms_median'):.1f} | "
            f"{middle('communication_alone_ms_median'):.1f} | {middle('backward_after_first_bucket_ms_median'):.1f} | "
            f"{middle('hidden_percent'):.0f} % [{low:.0f}..{high:.0f}] |")


def main():
    raw, commands, rows = [], [], []
    print("\n".join(HEAD), flush=True)
    with tempfile.TemporaryDirectory() as work:
        token = f"{work}/job.token"
        sh(args.phalanx, "token", "--out", token)
        with Wire(args.hosts, args.gbit, mtu=args.mtu) as wire:
            for model, batch in (m.split(":") for m in args.models.split(",")):
                bench = [args.phalanx, "bench", "train", model, "--batch", batch, "--threads", str(args.threads), "--overhead",
                         "--steps", str(args.steps), "--json", *shlex.split(args.bench)]
                lines = []
                for round_ in range(args.rounds):
                    ranks = [(h, bench, {**env, "PHALANX_TOKEN_FILE": token}) for h, env in environment(wire)]
                    out, failed = run(wire, ranks)
                    if failed:
                        raise SystemExit(failed)
                    lines += [json.loads(line) for o in out for line in o.splitlines() if line.startswith("{")]
                    raw.append({"hosts": args.hosts, "gbit": args.gbit, "round": round_, **lines[-1]})
                commands += [f"host {h}: " + " ".join(f"{k}={v}" for k, v in env.items()) + " " + shlex.join(cmd) for h, cmd, env in ranks]
                rows.append(row(model, batch, lines))
                print(rows[-1], flush=True)
    if args.out:
        args.out.mkdir(parents=True, exist_ok=True)
        (args.out / "raw.jsonl").write_text("".join(json.dumps(r) + "\n" for r in raw))
        text = [f"# Communication hidden under backward: {args.hosts} hosts at {args.gbit:g} Gbit/s, MTU {args.mtu}", "",
                f"{machine()}; one rank a host, {args.threads} compute thread(s) each; benches/overlap.py defines the share.", "",
                *HEAD, *rows, "", "Run as:", "", "```", shlex.join(["benches/overlap.py", *sys.argv[1:]]), "```", "",
                "which runs, at the same time on every host:", "", "```", *commands, "```", ""]
        (args.out / "summary.md").write_text("\n".join(text))


until_interrupted(main)
