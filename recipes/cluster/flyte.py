"""A Flyte workflow that trains on one node with `phalanx train`, and continues after a retry.

    pyflyte run flyte.py training --epochs 1 --run runs/mnist                      # here, without a server
    kubectl apply -f flyte-pod.yaml
    pyflyte run --remote --image registry.example.com/phalanx-flyte:0.1.0 flyte.py training
"""

from flytekit import Resources, TaskMetadata, kwtypes, workflow
from flytekit.extras.tasks.shell import OutputLocation, ShellTask
from flytekit.types.file import FlyteFile

# Without --resume auto a retry would end with "holds an earlier run".
train = ShellTask(
    name="train",
    script="""
    phalanx train mnist --nproc-per-node 2 --epochs {inputs.epochs} --save-every 500 \
        --resume auto --output-dir '{inputs.run}'
    """,
    inputs=kwtypes(epochs=int, run=str),
    output_locs=[
        OutputLocation(var="report", var_type=FlyteFile, location="{inputs.run}/report.html"),
        OutputLocation(var="weights", var_type=FlyteFile, location="{inputs.run}/mnist_cnn.safetensors"),
    ],
    metadata=TaskMetadata(retries=3, interruptible=True),
    requests=Resources(cpu="2", mem="2Gi"),
    limits=Resources(cpu="2", mem="2Gi"),
    # Its volumes keep checkpoints between the attempts: flyte-pod.yaml.
    pod_template_name="phalanx",
)


@workflow
def training(epochs: int = 10, run: str = "/runs/mnist") -> tuple[FlyteFile, FlyteFile]:
    return train(epochs=epochs, run=run)
