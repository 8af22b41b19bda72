#!/usr/bin/env python3
"""Ours against Gloo between hosts that are network namespaces, on a shaped wire.

    cargo build --release
    sudo tools/bench/wire.py --python VENV/bin/python --out tools/runs/DATE-tcp-wire
    sudo tools/bench/wire.py --python VENV/bin/python --hosts 2 --rates 1 --delays 0,0.1,1,5

shaped.py tells how the wire is made.

Each round runs ours, then Gloo, on the same wire; figures are
medians over rounds of medians, with the smallest and largest in brackets. The
bound is 2(H - 1)/H * bytes / rate; of a tcp payload at most 95 % gets through at
an MTU of 1500, because headers are on the wire too. Where all hosts share few
cores, the kernel's own work is the limit, not the rate. Prints a table; --out also keeps
raw.jsonl, summary.md and the exact commands. Everything that is made is
removed again, also on Ctrl-C.
"""
import argparse
import json
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from shaped import Wire, environment, machine, run, sh, until_interrupted

HERE = Path(__file__).resolve().parent
p = argparse.ArgumentParser(formatter_class=argparse.RawDescriptionHelpFormatter, description=__doc__)
p.add_argument("--python", help="interpreter with torch; without it only ours is measured")
p.add_argument("--phalanx", default=str(HERE.parents[1] / "target/release/phalanx"))
p.add_argument("--hosts", default="2,3,4", help="numbers of hosts, separated by commas")
p.add_argument("--ranks-per-host", type=int, default=1)
p.add_argument("--rates", default="1,10", help="Gbit/s, separated by commas; 0 = not shaped")
p.add_argument("--delays", default="0", help="ms from one host to another, separated by commas")
p.add_argument("--mtu", type=int, default=1500)
p.add_argument("--congestion", help="the hosts' TCP congestion control, e.g. cubic, Linux's own default (default: this machine's)")
p.add_argument("--bytes", default="4,1024,65536,1048576,26214400")
p.add_argument("--rounds", type=int, default=3)
p.add_argument("--bench", default="", help="further arguments of `phalanx bench all-reduce`")
p.add_argument("--out", type=Path)
args = p.parse_args()
SIZES = [int(b) for b in args.bytes.split(",")]
LARGE = 1 << 20  # bytes from which rates matter more than latencies


def ranks(wire):
    return environment(wire, args.ranks_per_host)


def ours(wire, token):
    bench = [args.phalanx, "bench", "all-reduce", "--bytes", args.bytes, "--json", *shlex.split(args.bench)]
    return [(h, bench, {**env, "PHALANX_TOKEN_FILE": token}) for h, env in ranks(wire)]


def gloo(wire, _token):
    world = wire.hosts * args.ranks_per_host
    script = [args.python, str(HERE / "peers/gloo_collectives.py"), "all-reduce", "--world", str(world), "--bytes", args.bytes]
    return [(h, script, {**env, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "eth0"}) for h, env in ranks(wire)]


def measure(wire, side, token, tries=3):
    """One measurement of one side. Gloo now and then aborts at its end, so a failure is tried again."""
    commands = side(wire, token)
    out, failed = run(wire, commands)
    if failed:
        print(f"  {side.__name__} failed: {failed}", file=sys.stderr, flush=True)
        if tries > 1:
            time.sleep(1)
            return measure(wire, side, token, tries - 1)
        raise SystemExit("gave up")
    return [json.loads(line[line.index("{"):]) for o in out for line in o.splitlines() if "{" in line], commands


def cell(us):
    unit, f = ("ms", 1e-3) if statistics.median(us) >= 1000 else ("µs", 1.0)
    return f"{statistics.median(us) * f:.2f} {unit} [{min(us) * f:.2f}..{max(us) * f:.2f}]"


def main():
    sides = [ours] + ([gloo] if args.python else [])
    raw, commands, rows = [], [], []
    head = ["| hosts | Gbit/s | delay, ms | bytes | ours | Gloo | bound | ours: share of bound | times faster than Gloo |",
            "|---|---|---|---|---|---|---|---|---|"]
    print("\n".join(head), flush=True)
    with tempfile.TemporaryDirectory() as work:
        token = f"{work}/job.token"
        sh(args.phalanx, "token", "--out", token)
        wires = [(float(g), float(d)) for g in args.rates.split(",") for d in args.delays.split(",")]
        for gbit, delay_ms in wires:
            for hosts in map(int, args.hosts.split(",")):
                figures = {(s.__name__, b): [] for s in sides for b in SIZES}
                with Wire(hosts, gbit, delay_ms, args.mtu, congestion=args.congestion) as wire:
                    for round_ in range(args.rounds):
                        for side in sides:
                            lines, cmds = measure(wire, side, token)
                            if round_ == 0:
                                commands += [f"host {h}: " + " ".join(f"{k}={v}" for k, v in env.items())
                                             + " " + shlex.join(cmd) for h, cmd, env in cmds]
                            for line in lines:
                                raw.append({"hosts": hosts, "ranks_per_host": args.ranks_per_host, "gbit": gbit, "delay_ms": delay_ms,
                                            "side": side.__name__, "round": round_, **line})
                                figures[side.__name__, line["bytes"]].append(line["median_us"])
                for b in SIZES:
                    mine, peer = figures["ours", b], figures.get(("gloo", b), [])
                    # The bound counts hosts: what stays inside one does not use the wire.
                    bound = 2 * (hosts - 1) / hosts * b * 8 / (gbit * 1e3) if gbit else 0
                    ratio = [y / x for x, y in zip(mine, peer)]
                    big = bound and b >= LARGE
                    rows.append(f"| {hosts} | {gbit:g} | {delay_ms:g} | {b} | {cell(mine)} | {cell(peer) if peer else '-'} | "
                                f"{f'{bound / 1e3:.2f} ms' if big else '-'} | "
                                f"{f'{100 * bound / statistics.median(mine):.1f} %' if big else '-'} | "
                                f"{f'{statistics.median(ratio):.2f} [{min(ratio):.2f}..{max(ratio):.2f}]' if ratio else '-'} |")
                    print(rows[-1], flush=True)
    if args.out:
        keep(raw, commands, head + rows)


def keep(raw, commands, table):
    args.out.mkdir(parents=True, exist_ok=True)
    name = f"-{args.ranks_per_host}ranks" if args.ranks_per_host > 1 else ""
    torch = args.python and subprocess.run([args.python, "-c", "import torch; print(torch.__version__)"],
                                           capture_output=True, text=True).stdout.strip()
    (args.out / f"raw{name}.jsonl").write_text("".join(json.dumps(r) + "\n" for r in raw))
    text = [f"# All-reduce over a shaped wire: ours against Gloo (PyTorch {torch})", "",
            f"{machine(args.congestion)}, MTU {args.mtu}, {args.ranks_per_host} rank(s) a host, "
            f"{args.rounds} interleaved rounds; median [smallest..largest].", "",
            *table, "", "Run as:", "", "```", shlex.join(["tools/bench/wire.py", *sys.argv[1:]]), "```", "",
            "which runs, at the same time on every host:", "", "```", *commands, "```", ""]
    (args.out / f"summary{name}.md").write_text("\n".join(text))


until_interrupted(main)
