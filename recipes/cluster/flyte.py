"""A workflow of flytekit 1 that trains on one node with `phalanx train`, and continues after a retry. For Flyte 2: flyte2.py.

    pyflyte run flyte.py training --epochs 1 --run runs/mnist                      # here, without a server
    kubectl create secret generic wandb --from-literal=api_key=... -n PROJECT-DOMAIN
    kubectl apply -f flyte-pod.yaml
    pyflyte run --remote --image registry.example.com/phalanx-flyte:0.1.0 flyte.py training
"""

import json
import os
import subprocess
import typing
from glob import glob

from flytekit import Resources, Secret, task, workflow
from flytekit.exceptions.user import FlyteRecoverableException
from flytekit.types.file import FlyteFile, PythonPickledFile

# The document has GPUs, and "100Mi" in a sandbox.
AMOUNTS = Resources(cpu="2", mem="2Gi", ephemeral_storage="500Mi")
# The key WANDB_API_KEY of `wandb sync`; without it the run of wandb stays in its folder.
WANDB = Secret(group="wandb", key="api_key", env_var="WANDB_API_KEY", mount_requirement=Secret.MountType.ENV_VAR)

TrainingOutputs = typing.NamedTuple(
    "TrainingOutputs", epoch_accuracies=typing.List[float], model_state=PythonPickledFile, report=FlyteFile
)


@task(
    retries=2,
    cache=True,
    cache_version="1.2",
    interruptible=True,
    requests=AMOUNTS,
    limits=AMOUNTS,
    secret_requests=[WANDB],
    # Its volumes keep checkpoints between the attempts: flyte-pod.yaml.
    pod_template_name="phalanx",
)
def train(epochs: int, run: str, data: str) -> TrainingOutputs:
    # Without --resume auto a retry would end with "holds an earlier run".
    command = ["phalanx", "train", "mnist", "--data", data, "--nproc-per-node", "2", "--epochs", str(epochs)]
    code = subprocess.call([*command, "--save-every", "500", "--resume", "auto", "--wandb", "--output-dir", run])
    # A wrong flag is as wrong in the next attempt.
    if code != 0:
        raise (ValueError if code == 2 else FlyteRecoverableException)(f"phalanx ended with exit code {code}")
    if os.environ.get("WANDB_API_KEY"):
        subprocess.call(["wandb", "sync", *glob(f"{run}/wandb/offline-run-*")])
    with open(f"{run}/mnist_cnn_accuracies.json", encoding="utf-8") as file:
        accuracies = json.load(file)
    return TrainingOutputs(accuracies, PythonPickledFile(f"{run}/mnist_cnn.pt"), FlyteFile(f"{run}/report.html"))


@workflow
def training(epochs: int = 10, run: str = "/runs/mnist", data: str = "synthetic") -> TrainingOutputs:
    return train(epochs=epochs, run=run, data=data)
