#!/usr/bin/env bash
# Usage: tools/ci/wandb.sh PHALANX PYTHON
# A training with --wandb, stopped and resumed, read by wandb's own client: every number of metrics.jsonl must be in its
# history, every histogram of events.jsonl, a Table of 320 predictions with images for each epoch, and the model as an
# artifact, with the digests that wandb computes. PYTHON needs `pip install wandb`. Nothing is sent anywhere.
set -euo pipefail
phalanx=$(realpath "$1") python=$2
"$python" -c "import wandb" 2>/dev/null || { echo "skipped: $python has no wandb"; exit 0; }
out=$(mktemp -d)
trap 'rm -rf "$out"' EXIT
cd "$out"
export WANDB_MODE=offline WANDB_ERROR_REPORTING=false WANDB_PROJECT=of-phalanx
train() {
    "$phalanx" train mnist --nproc-per-node 2 --data synthetic:1920 --global-batch-size 192 --log-interval 1 \
        --watch 5 --test-batch-size 32 --log-batches 10 --output-dir run --wandb "$@" >>log 2>&1 || { cat log; exit 1; }
}
train --epochs 6 --stop-after 23 --tag base --tag kind=x --note "it's a note"
train --epochs 6 --resume auto
"$python" -m wandb leet inspect --json run/wandb/offline-run-* >records
"$python" -m wandb leet inspect --summary run/wandb/offline-run-* >summary
cat summary
"$python" - <<'PY'
import json, pathlib, types
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
assert (told["tags"], told["notes"]) == (["base", "kind=x"], "it's a note"), told
config = told["config"]["update"]
for name, value in run["settings"].items():
    assert str(config[name.lstrip("-")]) == value or float(config[name.lstrip("-")]) == float(value), name
assert any(record["type"] == "stats" for record in records)
assert records[-1]["type"] == "exit" and not records[-1]["exit"].get("exit_code"), records[-1]
text = open("summary").read()
assert "finished" in text and "accuracy" in text and "graph-file media/graph/graph_0" in text, text
watched = 0
for line in open("run/events.jsonl"):
    event = json.loads(line)
    for kind in ("parameters", "gradients") if event["kind"] == "watch" else ():
        for name, of in event[kind].items():
            histogram = {part: found[event["step"], f"{kind}/{name}.{part}"] for part in ("_type", "values", "bins")}
            assert (histogram["_type"], histogram["values"]) == ("histogram", of["buckets"]), (event["step"], name)
            bins = histogram["bins"]
            assert len(bins) == len(of["buckets"]) + 1 and (bins[0], bins[-1]) == (of["min"], of["max"]), bins
            watched += 1
assert watched > 0

import wandb
from wandb.sdk.artifacts.artifact_manifest_entry import ArtifactManifestEntry
from wandb.sdk.artifacts.artifact_manifests.artifact_manifest_v1 import ArtifactManifestV1
from wandb.sdk.artifacts.storage_policies.wandb_storage_policy import WandbStoragePolicy
from wandb.sdk.lib.hashutil import md5_file_b64

folder = next(pathlib.Path("run/wandb").glob("offline-run-*"))
artifacts = [record["artifact"] for record in records if record["type"] == "artifact"]
for artifact in artifacts:
    entries = {}
    for entry in artifact["manifest"]["contents"]:
        assert md5_file_b64(entry["local_path"]) == entry["digest"], entry
        assert pathlib.Path(entry["local_path"]).stat().st_size == int(entry["size"]), entry
        entries[entry["path"]] = ArtifactManifestEntry(path=entry["path"], digest=entry["digest"])
    manifest = ArtifactManifestV1(
        storage_policy=WandbStoragePolicy(), entries=entries, digest_algorithm=artifact["digest_algorithm"])
    assert manifest.digest() == artifact["digest"], artifact["name"]
models = [artifact for artifact in artifacts if artifact["type"] == "model"]
assert {"mnist_cnn.pt", "mnist_cnn.safetensors"} <= {entry["path"] for entry in models[0]["manifest"]["contents"]}

uploaded = [file["path"] for record in records if record["type"] == "files" for file in record["files"]["files"]]
assert {"mnist_cnn.pt", "report.html", "summary.json"} <= set(uploaded), uploaded
assert all((folder / "files" / path).is_file() for path in uploaded), uploaded

class Source:
    """Stands for the artifact that was uploaded."""
    def __init__(self, artifact):
        self.paths = {entry["path"]: entry["local_path"] for entry in artifact["manifest"]["contents"]}
    def get_entry(self, path):
        return types.SimpleNamespace(download=lambda *_, **__: self.paths[path])
    def get(self, path):
        return None

predictions = [json.loads(line) for line in open("run/predictions.jsonl")]
tables = [artifact for artifact in artifacts if artifact["type"] == "run_table"]
epochs = sorted({row["epoch"] for row in predictions})
assert len(tables) == len(epochs) == 6 and len(predictions) == 6 * 320, (len(tables), epochs, len(predictions))
for epoch, artifact in zip(epochs, tables):
    source = Source(artifact)
    content = json.loads(pathlib.Path(source.paths["mnist_predictions.table.json"]).read_text())
    want = [row for row in predictions if row["epoch"] == epoch]
    assert content["columns"] == ["id", "image", "guess", "truth", *(f"score_{i}" for i in range(10))]
    if epoch in (epochs[0], epochs[-1]):
        table = wandb.Table.from_json(content, source)
        assert len(table.data) == len(want) == 320
        for have, row in zip(table.data, want):
            assert [have[0], *have[2:]] == [row["id"], row["guess"], row["truth"], *row["scores"]], (have, row)
            assert isinstance(have[1], wandb.Image) and have[1].image.size == (28, 28), have
logged = [row for row in rows if "mnist_predictions._type" in row]
assert [(row["_step"], row["mnist_predictions.nrows"]) for row in logged] == [(10 * epoch, 320) for epoch in epochs]
for row in logged:
    table = json.loads((folder / "files" / row["mnist_predictions.path"]).read_text())
    assert len(table["data"]) == 320 and table["data"][0][1] == "Image"
print(f"wandb: {count} values in {len(rows)} rows, {watched} histograms, {len(tables)} tables of 320 predictions, "
      f"a model of {len(models[0]['manifest']['contents'])} files")
PY
"$python" -m wandb sync --dry-run run/wandb/offline-run-* >sync 2>&1
grep "Would sync 1 run" sync || { echo "wandb sync does not take it"; cat sync; exit 1; }
