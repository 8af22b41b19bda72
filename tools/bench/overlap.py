#!/usr/bin/env python3
"""How much of DDP's communication backward hides on a shaped wire between hosts that are network namespaces.

    cargo build --release
    sudo tools/bench/overlap.py --python VENV/bin/python --out tools/runs/DATE-overlap
    sudo tools/bench/overlap.py --models resnet18:32 --gbit 1 --rounds 1

shaped.py tells how the wire is made; two hosts are joined by a cable, more by a switch. Its bursts are 1 ms, five times
as long as elsewhere: the shorter ones take the cores that the ranks compute on a timer's interrupt every 16 KiB. Each host has cores of its own,
where there are enough (not with --share-cores): otherwise the kernel runs the communication threads of several hosts
on one core. On every host runs one rank of `phalanx bench train MODEL --overhead`,
which times, in the same processes and in turn, blocks of steps without communication, of steps with it, and
of communication alone (the same buckets, all full at once). What fits under backward follows from when each bucket is
full in steps without communication: buckets travel in order, none before it is full, each for its bytes' share of
the communication alone, and what of that lies before backward's end fits. The share of it that is hidden is

    (step alone + communication alone - step) / fits

of which every group of three blocks gives one: the table has the median over rounds of medians, and the widest
middle half; "undisturbed" is the same of the times that a tenth of the blocks stay below. Communication costs
processor time too, its own and the kernel's for packets, which nothing hides where ranks compute on every core: the
table has by how much it makes backward longer (unknown of PyTorch, whose backward ends with the communication). With --python the same is measured of PyTorch's DDP over Gloo (peers/torch_overlap.py),
round by round in turn.

Prints a table; --out also keeps raw.jsonl, summary.md and the exact commands.
"""
import argparse
import json
import os
import shlex
import statistics
import sys
import tempfile
from pathlib import Path

from shaped import Wire, environment, machine, run, sh, until_interrupted

HERE = Path(__file__).resolve().parent
p = argparse.ArgumentParser(formatter_class=argparse.RawDescriptionHelpFormatter, description=__doc__)
p.add_argument("--python", help="interpreter with torch; without it only ours is measured")
p.add_argument("--phalanx", default=str(HERE.parents[1] / "target/release/phalanx"))
p.add_argument("--models", default="resnet18:32,resnet18:64,mnist:64", help="MODEL:BATCH, separated by commas")
p.add_argument("--hosts", type=int, default=2)
p.add_argument("--gbit", type=float, default=1, help="Gbit/s of every host; 0 = not shaped")
p.add_argument("--burst-ms", type=float, default=1,
               help="what passes at once; short ones cost a timer's interrupt every packet, which a card's own clock does not")
p.add_argument("--mtu", type=int, default=1500)
p.add_argument("--threads", type=int, default=1, help="compute threads of a rank")
p.add_argument("--share-cores", action="store_true", help="let the hosts' ranks run on all cores")
p.add_argument("--steps", type=int, default=40, help="steps of each kind in a round")
p.add_argument("--rounds", type=int, default=1)
p.add_argument("--bench", default="", help="further arguments of `phalanx bench train`")
p.add_argument("--out", type=Path)
args = p.parse_args()

HEAD = ["| model | batch | | step alone, ms | with communication, ms | communication alone, ms | it makes backward longer by, ms | "
        "fits under backward, ms | hidden of what fits | undisturbed |",
        "|---|---|---|---|---|---|---|---|---|---|"]


def row(model, batch, side, lines):
    middle = lambda key: statistics.median(line[key] for line in lines)
    quartiles = [line["hidden_percent_quartiles"] for line in lines]
    low, high = min(q[0] for q in quartiles), max(q[1] for q in quartiles)
    longer = f"{middle('backward_slowed_ms_median'):.1f}" if "backward_slowed_ms_median" in lines[0] else ""
    return (f"| {model} | {batch} | {side} | {middle('alone_ms_median'):.1f} | {middle('step_ms_median'):.1f} | "
            f"{middle('communication_alone_ms_median'):.1f} | {longer} | {middle('fits_ms_median'):.1f} | "
            f"{middle('hidden_percent'):.0f} % [{low:.0f}..{high:.0f}] | {middle('hidden_percent_undisturbed'):.0f} % |")


def cores(host):
    """The command that keeps a host on cores of its own."""
    every = sorted(os.sched_getaffinity(0))
    each = len(every) // args.hosts
    if args.share_cores or not each:
        return []
    return ["taskset", "-c", ",".join(map(str, every[host * each:(host + 1) * each]))]


def commands_of(side, wire, model, batch, token):
    """What runs on each host: (host, command, variables)."""
    if side == "ours":
        bench = [args.phalanx, "bench", "train", model, "--batch", batch, "--threads", str(args.threads), "--overhead",
                 "--steps", str(args.steps), "--json", *shlex.split(args.bench)]
        more = {"PHALANX_TOKEN_FILE": token}
    else:
        bench = [args.python, str(HERE / "peers/torch_overlap.py"), model, "--batch", batch, "--threads", str(args.threads),
                 "--steps", str(args.steps)]
        more = {"OMP_NUM_THREADS": str(args.threads), "GLOO_SOCKET_IFNAME": "eth0"}
    return [(h, [*cores(h), *bench], {**env, **more}) for h, env in environment(wire)]


def main():
    raw, commands, rows = [], [], []
    print("\n".join(HEAD), flush=True)
    with tempfile.TemporaryDirectory() as work:
        token = f"{work}/job.token"
        sh(args.phalanx, "token", "--out", token)
        with Wire(args.hosts, args.gbit, mtu=args.mtu, cable=args.hosts == 2, burst_ms=args.burst_ms) as wire:
            for model, batch in (m.split(":") for m in args.models.split(",")):
                lines = {side: [] for side in (["ours", "PyTorch/Gloo"] if args.python else ["ours"])}
                for round_ in range(args.rounds):
                    for side in lines:
                        ranks = commands_of(side, wire, model, batch, token)
                        out, failed = run(wire, ranks)
                        if failed:
                            raise SystemExit(failed)
                        lines[side] += [json.loads(line) for o in out for line in o.splitlines() if line.startswith("{")]
                        raw.append({"hosts": args.hosts, "gbit": args.gbit, "side": side, "round": round_, **lines[side][-1]})
                        if round_ == 0:
                            commands += [f"host {h}: " + " ".join(f"{k}={v}" for k, v in env.items()) + " " + shlex.join(cmd)
                                         for h, cmd, env in ranks]
                for side in lines:
                    rows.append(row(model, batch, side, lines[side]))
                    print(rows[-1], flush=True)
    if args.out:
        args.out.mkdir(parents=True, exist_ok=True)
        (args.out / "raw.jsonl").write_text("".join(json.dumps(r) + "\n" for r in raw))
        text = [f"# Communication hidden under backward: {args.hosts} hosts at {args.gbit:g} Gbit/s, MTU {args.mtu}", "",
                f"{machine()}; one rank a host, {args.threads} compute thread(s) each, "
                f"{'on all cores' if args.share_cores else 'each host on cores of its own'}; tools/bench/overlap.py defines the share.", "",
                *HEAD, *rows, "", "Run as:", "", "```", shlex.join(["tools/bench/overlap.py", *sys.argv[1:]]), "```", "",
                "which runs, at the same time on every host:", "", "```", *commands, "```", ""]
        (args.out / "summary.md").write_text("\n".join(text))


until_interrupted(main)
