"""table.py: the figures of ../runs as a table."""
import glob
import json
import os
import re
import statistics

runs = {}
for path in sorted(glob.glob(os.path.join(os.path.dirname(os.path.abspath(__file__)), "../runs/*.json"))):
    runs[os.path.basename(path)[:-5]] = json.load(open(path))
still = {}
for name, r in runs.items():
    if r["seed"] == "none":
        still.setdefault(r["kind"], []).append(r["batches"] / r["seconds"] if r["kind"].startswith("torchft") else r["steps_per_s"])
print({k: [round(x, 2) for x in v] for k, v in still.items()})
print("| run | seconds | kills | K | steps | steps/s | goodput | loss | steps repeated | full restarts | until a new step, after a kill: p50, max s | others' CPU, s |")
print("|---|---|---|---|---|---|---|---|---|---|---|---|")
for name, r in sorted(runs.items(), key=lambda x: (x[1]["seed"] == "none", x[0])):
    base = statistics.mean(still.get(r["kind"].split("-")[0], [float("nan")]))
    rate = r["steps_per_s"]
    batches = r["batches"] / r["seconds"]
    good = (batches if r["kind"].startswith("torchft") else rate) / base
    log = open(os.path.join(os.path.dirname(os.path.abspath(__file__)), f"../runs/{name}.log"), errors="replace").read()
    full = len(re.findall(r"^restart \d+ of", log, re.M)) if r["kind"] == "ours" else "all" if r["kind"] == "torchrun" else "-"
    after = [x for x in r["new_step_after_kill_s"] if x is not None]
    wait = f"{statistics.median(after):.2f}, {max(after):.1f}" if after else "-"
    is_killed = r["seed"] != "none"
    print(f"| {name} | {r['seconds']:.0f} | {r['kills']} | {r['K']} | {r['steps']} | {rate:.2f} | {f'{good:.3f}' if is_killed else '-'} | {f'{1 - good:.3f}' if is_killed else '-'} | {max(0, r['repeated'])} | {full if is_killed else '-'} | {wait} | {r['others_cpu_s']['all']} |")
