#!/usr/bin/env python3
"""Usage: tools/ci/tensorboard.py RUN_DIR

Reads the event files of a run's folder with TensorBoard and compares every scalar with metrics.jsonl, also after a
resume: what an earlier process wrote beyond the checkpoint must be gone. Histograms, images, texts and the graph are
compared with events.jsonl and run.json, what the ranks used as well. `--fixtures` instead of a folder prints the
records that crates/phalanx-track/src/tensorboard/tests.rs expects. Needs `pip install tensorboard`.
"""
import json
import pathlib
import sys
import tempfile

# Its own folder, in which this file would be taken for the package of that name.
sys.path.pop(0)
try:
    from tensorboard.backend.event_processing import event_accumulator, plugin_event_accumulator
    from tensorboard.compat.proto import event_pb2
    from tensorboard.plugins.hparams import plugin_data_pb2
    from tensorboard.summary.writer.record_writer import RecordWriter
    from tensorboard.util import tensor_util
except ImportError as missing:
    print(f"skipped: {sys.executable} has no tensorboard ({missing})")
    sys.exit(0)


def expected(run):
    """The scalars that belong to metrics.jsonl: by tag, the step and value of each."""
    tags = {}
    for line in (run / "metrics.jsonl").read_text().splitlines():
        record = json.loads(line)
        for name, value in record.items():
            if name in ("step", "epoch", "elapsed_s") or not isinstance(value, (int, float)):
                continue
            if "loss" in record:
                tag = f"train/{name}"
            elif "train_loss" not in record:
                tag = name
            elif name == "accuracy" or name.startswith("test_"):
                tag = f"test/{name.removeprefix('test_')}"
            else:
                tag = f"epoch/{name}"
            tags.setdefault(tag, []).append((record["step"], value))
    return tags


def compare(reader, expected, got):
    for tag in sorted(expected.keys() | got.keys()):
        want, have = expected.get(tag, []), got.get(tag, [])
        same = len(want) == len(have) and all(
            a[0] == b[0] and abs(a[1] - b[1]) <= 1e-6 * abs(a[1]) for a, b in zip(want, have)
        )
        if not same:
            sys.exit(f"{reader}: {tag}\n  metrics.jsonl {want}\n  TensorBoard   {have}")


def others(run, plain, server):
    """Compares histograms, images, texts and the graph; gives their numbers."""
    counts = {"histograms": 0, "images": 0, "texts": 0}
    for line in (run / "events.jsonl").read_text().splitlines():
        event = json.loads(line)
        step = event.get("step")
        at = lambda events: next(e for e in events if e.step == step)
        if event["kind"] == "watch":
            for kind in ("parameters", "gradients"):
                for name, want in event[kind].items():
                    got = at(plain.Histograms(f"{kind}/{name}")).histogram_value
                    have = [got.num, got.min, got.max, got.sum, got.sum_squares, list(got.bucket)]
                    names = ("count", "min", "max", "sum", "sum_squares", "buckets")
                    assert have == [want[n] for n in names], f"{kind}/{name} at {step}: {want} {have}"
                    counts["histograms"] += 1
        elif event["kind"] == "image":
            got = at(plain.Images(event["name"]))
            assert got.encoded_image_string == (run / event["file"]).read_bytes(), event
            counts["images"] += 1
        elif event["kind"] == "text":
            got = tensor_util.make_ndarray(at(server.Tensors(event["name"])).tensor_proto).item().decode()
            assert got == event["text"], (event, got)
            counts["texts"] += 1
    want = json.loads((run / "run.json").read_text())["model"]["graph"]
    have = {node.name: node for node in plain.Graph().node}
    for node in want:
        got = have[node["name"].replace(".", "/")]
        assert list(got.input) == [name.replace(".", "/") for name in node["inputs"]], (node, got)
        shape = [dim.size for dim in got.attr["_output_shapes"].list.shape[0].dim]
        assert (got.op, shape) == (node["operation"], node["shape"]), (node, got)
    return ", ".join(f"{n} {name}" for name, n in counts.items()) + f", a graph of {len(want)} operations equal"


def without_system(tags):
    return {tag: values for tag, values in tags.items() if not tag.startswith("system/")}


def measured(run, scalars):
    """Compares what the ranks used with events.jsonl."""
    want = {}
    for line in (run / "events.jsonl").read_text().splitlines():
        event = json.loads(line)
        for rank in event["ranks"] if event["kind"] == "system" else ():
            for name, value in rank.items():
                if isinstance(value, (int, float)) and name not in ("rank", "pid", "time"):
                    want.setdefault(f"system/rank_{rank['rank']}/{name}", []).append(value)
    have = {tag: [value for _, value in values] for tag, values in scalars.items() if tag.startswith("system/")}
    assert want.keys() == have.keys(), (want.keys(), have.keys())
    for tag, values in want.items():
        assert len(values) == len(have[tag]), tag
        assert all(abs(a - b) <= 1e-6 * abs(a) for a, b in zip(values, have[tag])), tag


def check(run):
    want = expected(run)
    # The library that notebooks use.
    all_of = {kind: 0 for kind in (event_accumulator.SCALARS, event_accumulator.HISTOGRAMS, event_accumulator.IMAGES)}
    plain = event_accumulator.EventAccumulator(str(run), size_guidance=all_of).Reload()
    scalars = {tag: [(e.step, e.value) for e in plain.Scalars(tag)] for tag in plain.Tags()["scalars"]}
    compare("EventAccumulator", want, without_system(scalars))
    measured(run, scalars)
    # The server's own.
    server = plugin_event_accumulator.EventAccumulator(str(run), tensor_size_guidance={"scalars": 0}).Reload()
    number = lambda event: float(tensor_util.make_ndarray(event.tensor_proto))
    tags = server.PluginTagToContent("scalars")
    shown = {tag: [(e.step, number(e)) for e in server.Tensors(tag)] for tag in tags}
    compare("server", want, without_system(shown))
    text = tensor_util.make_ndarray(server.Tensors("settings")[-1].tensor_proto).item().decode()
    assert text.startswith("| setting | value |"), text
    logged = others(run, plain, server)
    end = tensor_util.make_ndarray(server.Tensors("end")[-1].tensor_proto).item().decode()
    assert end == "finished", end
    if (run / "predictions.png").exists():
        epochs = {json.loads(line)["epoch"] for line in (run / "predictions.jsonl").read_text().splitlines()}
        assert len(plain.Images("predictions")) == len(epochs), "an image of the predictions for each epoch"
    content = server.PluginTagToContent("hparams")["_hparams_/session_end_info"]
    assert plugin_data_pb2.HParamsPluginData.FromString(content).session_end_info.status == 1, "not a success"
    content = server.PluginTagToContent("hparams")["_hparams_/session_start_info"]
    hparams = plugin_data_pb2.HParamsPluginData.FromString(content).session_start_info.hparams
    files = len(list(run.glob("events.out.tfevents.*")))
    print(f"{run}: {sum(map(len, want.values()))} scalars of {len(want)} tags equal in {files} event files, "
          f"{len(hparams)} hyperparameters, {len(text.splitlines()) - 2} settings, {logged}")


def fixtures():
    events = [event_pb2.Event(wall_time=1.5, file_version="brain.Event:2")]
    events.append(event_pb2.Event(wall_time=1.5, step=7, session_log=event_pb2.SessionLog(status=1)))
    event = event_pb2.Event(wall_time=2.5, step=7)
    event.summary.value.add(tag="train/loss", simple_value=0.25)
    events.append(event)
    event = event_pb2.Event(wall_time=2.5)
    value = event.summary.value.add(tag="settings")
    value.tensor.dtype, value.tensor.string_val[:] = 7, [b"| a |"]
    value.tensor.tensor_shape.SetInParent()
    value.metadata.plugin_data.plugin_name = "text"
    data = plugin_data_pb2.HParamsPluginData()
    data.session_start_info.start_time_secs = 1.5
    data.session_start_info.hparams["lr"].number_value = 0.5
    data.session_start_info.hparams["sampler"].string_value = "exact"
    value = event.summary.value.add(tag="_hparams_/session_start_info")
    value.metadata.plugin_data.plugin_name = "hparams"
    value.metadata.plugin_data.content = data.SerializeToString(deterministic=True)
    events.append(event)
    event = event_pb2.Event(wall_time=2.5, step=7)
    histo = event.summary.value.add(tag="gradients/w").histo
    histo.min, histo.max, histo.num, histo.sum, histo.sum_squares = -1, 2, 4, 2, 6
    # 30 buckets from -1 to 2.
    histo.bucket_limit[:] = [-1 + 0.1 * i for i in range(1, 30)] + [2]
    histo.bucket[:] = [float(i in (0, 10, 20, 29)) for i in range(30)]
    events.append(event)
    for event in events:
        with tempfile.NamedTemporaryFile() as file:
            writer = RecordWriter(file)
            writer.write(event.SerializeToString(deterministic=True))
            writer.flush()
            print(pathlib.Path(file.name).read_bytes().hex())


if len(sys.argv) != 2:
    sys.exit(__doc__)
if sys.argv[1] == "--fixtures":
    fixtures()
else:
    check(pathlib.Path(sys.argv[1]))
