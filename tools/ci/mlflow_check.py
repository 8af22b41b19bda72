"""Usage: mlflow_check.py URI up | some RUN | same RUN STATUS

Asks an MLflow server through its REST API: whether it is up, has metrics of the run of this folder, or has every number of
its metrics.jsonl, its settings, its files and this status.
"""
import collections
import json
import pathlib
import sys
import urllib.error
import urllib.parse
import urllib.request

uri, what, *rest = sys.argv[1:]


def ask(path, body=None, **query):
    address = f"{uri}/api/2.0/mlflow/{path}?{urllib.parse.urlencode(query)}"
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(address, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=30) as answer:
        return json.load(answer)


def history(run, name):
    token, values = "", []
    while True:
        more = {"page_token": token} if token else {}
        page = ask("metrics/get-history", run_id=run, metric_key=name, max_results=5000, **more)
        values += [(int(m.get("step", 0)), m["value"]) for m in page.get("metrics", [])]
        token = page.get("next_page_token")
        if not token:
            return values


try:
    experiments = ask("experiments/search", {"max_results": 10})["experiments"]
except (urllib.error.URLError, ConnectionError) as error:
    sys.exit(f"{uri}: {error}")
if what == "up":
    sys.exit()
folder = pathlib.Path(rest[0])
runs = ask("runs/search", {"experiment_ids": [e["experiment_id"] for e in experiments]}).get("runs", [])
runs = [run for run in runs if run["info"]["run_name"] == folder.name]
if what == "some":
    sys.exit(0 if runs and runs[0]["data"].get("metrics") else "no metrics yet")
# A branch that was left stays in a run of its own, the parent.
runs.sort(key=lambda run: run["info"]["start_time"])
parents = [run["info"]["run_id"] for run in runs[:-1]]
run = runs[-1]
tags = {tag["key"]: tag.get("value", "") for tag in run["data"]["tags"]}
assert parents == ([tags["mlflow.parentRunId"]] if folder.name == "branched" and rest[1] == "FINISHED" else []), runs
assert run["info"]["status"] == rest[1], run["info"]
document = json.loads((folder / "run.json").read_text())
labels = {name: value or "" for name, value in document["tags"].items()}
if document["note"] is not None:
    labels["mlflow.note.content"] = document["note"]
assert labels.items() <= tags.items(), (labels, tags)
identity = run["info"]["run_id"]
expected = collections.defaultdict(list)
for line in (folder / "metrics.jsonl").read_text().splitlines():
    record = json.loads(line)
    for name, value in record.items():
        if name not in ("step", "epoch", "elapsed_s") and isinstance(value, (int, float)):
            expected[name].append((record["step"], value))
count = 0
for name, values in expected.items():
    found = history(identity, name)
    if name == "elapsed_s":
        continue
    if rest[0] == "resumed":
        # Steps that were taken again have the values of the first time; those of the losses are the same.
        assert sorted(step for step, _ in found) == sorted(step for step, _ in values), name
        if not name.endswith("_ms"):
            assert sorted(found) == sorted(values), name
    else:
        assert sorted(found) == sorted(values), f"{name}: {len(found)} of {len(values)}"
    count += len(values)
assert count, "no metrics"
params = {param["key"]: param["value"] for param in run["data"]["params"]}
for name, value in document["settings"].items():
    name = name.lstrip("-")
    changed = tags.get(f"attempt-{document['attempt']}/{name}")
    assert value in (params[name], changed), (name, value, params[name])
assert params["ranks"] == str(document["ranks"])
files = {f["path"] for f in ask("artifacts/list", run_id=identity)["files"]}
finished = {"report.html", "summary.json", "mnist_cnn.safetensors"} if rest[1] == "FINISHED" else set()
missing = ({"metrics.jsonl", "run.json", "events.jsonl"} | finished) - files
assert not missing, f"missing: {missing}; there: {files}"
system = [m["key"] for m in run["data"]["metrics"] if m["key"].startswith("system/rank_1/")]
assert system, "no measures of the system"
print(f"{folder}: {count} values of {len(expected)} metrics, {len(params)} parameters, {len(files)} files, {rest[1]}")
