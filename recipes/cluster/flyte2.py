"""The workflow of flyte.py for Flyte 2, whose package is called flyte: a file of that name would hide it.

    flyte run --local flyte2.py training --epochs 1 --run runs/mnist               # here, without a server
    flyte create secret wandb-api-key
    flyte run --image registry.example.com/phalanx-flyte2:0.1.0 flyte2.py training
"""

import json
import os
import subprocess
import typing
from glob import glob

import flyte
from flyte.errors import NonRecoverableError
from flyte.io import File

environment = flyte.TaskEnvironment(
    name="phalanx",
    # Requests and limits. The document has GPUs.
    resources=flyte.Resources(cpu=(2, 2), memory=("2Gi", "2Gi"), disk="500Mi"),
    secrets=[flyte.Secret(key="wandb-api-key", as_env_var="WANDB_API_KEY")],
    cache=flyte.Cache(behavior="override", version_override="1.2"),
    interruptible=True,
    # Its volumes keep checkpoints between the attempts: flyte-pod.yaml.
    pod_template="phalanx",
)

TrainingOutputs = typing.NamedTuple(
    "TrainingOutputs", epoch_accuracies=typing.List[float], model_state=File, report=File
)


@environment.task(retries=2)
def training(epochs: int = 10, run: str = "/runs/mnist", data: str = "synthetic") -> TrainingOutputs:
    command = ["phalanx", "train", "mnist", "--data", data, "--nproc-per-node", "2", "--epochs", str(epochs)]
    code = subprocess.call([*command, "--save-every", "500", "--resume", "auto", "--wandb", "--output-dir", run])
    if code != 0:
        raise (NonRecoverableError if code == 2 else RuntimeError)(f"phalanx ended with exit code {code}")
    if os.environ.get("WANDB_API_KEY"):
        subprocess.call(["wandb", "sync", *glob(f"{run}/wandb/offline-run-*")])
    with open(f"{run}/mnist_cnn_accuracies.json", encoding="utf-8") as file:
        accuracies = json.load(file)
    files = [File.from_local_sync(f"{run}/{name}") for name in ("mnist_cnn.pt", "report.html")]
    return TrainingOutputs(accuracies, *files)
