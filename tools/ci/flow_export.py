"""Helpers of flow_export.sh: `flyte OUT` runs the exported module; `kubectl VOLUME ARGS...` stands in for kubectl."""

import importlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path


def flyte(out):
    from collections import OrderedDict
    from datetime import timedelta

    from flytekit.configuration import Image, ImageConfig, SerializationSettings
    from flytekit.tools.translator import get_serializable

    module = importlib.import_module("flow_hostile_texts")
    # What Flyte's servers are told.
    settings = SerializationSettings(
        project="p", domain="d", version="v", image_config=ImageConfig(Image("default", "none", "0"))
    )
    get_serializable(OrderedDict(), settings, module.hostile_texts)
    task = get_serializable(OrderedDict(), settings, module.open).template
    assert task.metadata.retries.retries == 2
    assert task.metadata.timeout == timedelta(seconds=30)
    assert task.metadata.discoverable and task.metadata.discovery_version == "1.2"
    assert task.container.image == "busybox:1.36"
    (secret,) = task.security_context.secrets
    assert (secret.group, secret.key) == ("export-key", "EXPORT_KEY"), secret
    amounts = task.container.resources
    assert sorted(entry.value for entry in amounts.requests) == ["1", "100Mi", "1Mi"], amounts
    assert sorted(entry.value for entry in amounts.limits) == ["1", "200Mi"], amounts
    # Its local run.
    outputs = module.hostile_texts()
    assert (outputs.n, outputs.list) == (3, [0.5, 1.0]), outputs
    shutil.copy(outputs.all.download(), out)


def kubectl(volume, args):
    volume = Path(volume)
    scripts, state = volume / "scripts", volume / "state"
    state.mkdir(exist_ok=True)
    if args[:2] == ["create", "configmap"]:
        scripts.mkdir(exist_ok=True)
        for arg in args:
            if arg.startswith("--from-file="):
                shutil.copy(arg.removeprefix("--from-file="), scripts)
        print("kind: ConfigMap")
    elif args[:2] == ["apply", "-f"]:
        import yaml

        text = sys.stdin.read() if args[2] == "-" else Path(args[2]).read_text(encoding="utf-8")
        manifest = yaml.safe_load(text)
        if manifest["kind"] == "Job":
            done = state / manifest["metadata"]["name"]
            assert not done.exists(), f"{done.name} is created twice"
            ended = job(manifest["spec"], volume, scripts)
            done.write_text("1," if ended else ",True")
    elif args[:2] == ["get", "jobs"]:
        print("".join(f"[{done.name}={done.read_text()}]" for done in state.iterdir()))
    else:
        sys.exit(f"kubectl: {args}")


def job(spec, volume, scripts):
    """Runs a Job's pods one after the other, on this machine instead of in a container."""
    pod = spec["template"]["spec"]
    container = pod["containers"][0]
    command = [word.replace("/flow-scripts", str(scripts)) for word in container["command"]]
    env = {entry["name"]: entry["value"].replace("/flow", str(volume), 1) for entry in container["env"] if "value" in entry}
    final = spec["podFailurePolicy"]["rules"][0]["onExitCodes"]["values"]
    for _ in range(spec["backoffLimit"] + 1):
        code = subprocess.run(command, env={**os.environ, **env}, timeout=pod.get("activeDeadlineSeconds")).returncode
        if code == 0:
            return True
        if code in final:
            break
    return False


if sys.argv[1] == "local":
    print(json.load(sys.stdin)["outputs"]["all"]["path"])
elif sys.argv[1] == "flyte":
    flyte(sys.argv[2])
else:
    kubectl(sys.argv[2], sys.argv[3:])
