#!/usr/bin/env bash
# Usage: tools/ci/wandb.sh PHALANX PYTHON
# A training with --wandb, stopped and resumed, read by wandb's own client: every number of metrics.jsonl must be in its
# history. PYTHON needs `pip install wandb`. Nothing is sent anywhere.
set -euo pipefail
phalanx=$(realpath "$1") python=$2
"$python" -c "import wandb" 2>/dev/null || { echo "skipped: $python has no wandb"; exit 0; }
out=$(mktemp -d)
trap 'rm -rf "$out"' EXIT
cd "$out"
export WANDB_MODE=offline WANDB_ERROR_REPORTING=false WANDB_PROJECT=of-phalanx
train() {
    "$phalanx" train mnist --nproc-per-node 2 --synthetic-samples 640 --global-batch-size 64 --log-interval 1 \
        --output-dir run --wandb "$@" >>log 2>&1 || { cat log; exit 1; }
}
train --epochs 40 --stop-after 23
train --epochs 40 --resume auto
"$python" -m wandb leet inspect --json run/wandb/offline-run-* >records
"$python" -m wandb leet inspect --summary run/wandb/offline-run-* >summary
cat summary
"$python" - <<'PY'
import json, pathlib
records = [json.loads(line) for line in open("records")]
rows = [record["history"]["item"] for record in records if record["type"] == "history"]
found = {(row["_step"], name): value for row in rows for name, value in row.items()}
steps = [row["_step"] for row in rows]
assert steps == sorted(set(steps)), "a row a step"
count = 0
run = json.loads(pathlib.Path("run/run.json").read_text())
for line in open("run/metrics.jsonl"):
    record = json.loads(line)
    for name, value in record.items():
        if name not in ("step", "epoch", "elapsed_s") and isinstance(value, (int, float)):
            assert found[record["step"], name] == value, (record, name)
            count += 1
told = next(record["run"] for record in records if record["type"] == "run")
assert (told["run_id"], told["project"]) == (run["id"], "of-phalanx"), told
config = told["config"]["update"]
for name, value in run["settings"].items():
    assert str(config[name.lstrip("-")]) == value or float(config[name.lstrip("-")]) == float(value), name
assert any(record["type"] == "stats" for record in records)
assert records[-1]["type"] == "exit" and not records[-1]["exit"].get("exit_code"), records[-1]
text = open("summary").read()
assert "finished" in text and "accuracy" in text, text
print(f"wandb: {count} values in {len(rows)} rows")
PY
"$python" -m wandb sync --dry-run run/wandb/offline-run-* >sync 2>&1
grep "Would sync 1 run" sync || { echo "wandb sync does not take it"; cat sync; exit 1; }
