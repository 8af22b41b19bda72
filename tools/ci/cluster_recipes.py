"""Helpers of cluster_recipes.sh.

    schemas FOLDER               manifests against the published schemas
    commands FOLDER PHALANX DIR  writes DIR/NAME.N, the shell script of node N of each recipe, with what its engine sets
    flyte FILE DIR               what flytekit 1 sends to a server, and its local execution
    flyte2 FILE DIR              the same of Flyte 2
    container FILE ROOT          sources and paths of the container file agree
"""

import importlib
import os
import re
import shlex
import sys
from pathlib import Path

NODES, RANKS = 2, 2
ADDRESSES = ["10.77.0.1", "10.77.0.2"]


def package(name):
    try:
        return importlib.import_module(name)
    except ImportError:
        print(f"{name}: skipped, this Python has no such package")


def documents(path):
    import yaml

    return [document for document in yaml.safe_load_all(path.read_text()) if document]


def unknown(given, kept, path=""):
    """The fields of a manifest that a model does not have, or has read as something else."""
    if isinstance(given, dict):
        for key, value in given.items():
            if not isinstance(kept, dict) or key not in kept:
                yield f"{path}.{key}"
            else:
                yield from unknown(value, kept[key], f"{path}.{key}")
    elif isinstance(given, list):
        if not isinstance(kept, list) or len(given) != len(kept):
            yield path
        else:
            for index, (one, other) in enumerate(zip(given, kept)):
                yield from unknown(one, other, f"{path}[{index}]")
    elif given != kept:
        yield path


def jobs_of(document):
    """A manifest of Kubernetes itself, or the Jobs that JobSet makes of one, as manifests of their own."""
    spec = document.get("spec", {})
    if "x-k8s.io" not in document["apiVersion"] and "kubeflow.org" not in document["apiVersion"]:
        yield document
    if document["kind"] == "TrainingRuntime":
        spec = spec["template"]["spec"]
    for job in spec.get("replicatedJobs", []):
        yield {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": job["name"]}, "spec": job["template"]["spec"]}


def schemas(folder):
    if kubernetes := package("kubernetes_validate"):
        for name in ["indexed-job.yaml", "flyte-pod.yaml", "jobset.yaml", "trainjob.yaml"]:
            for document in documents(folder / name):
                for job in jobs_of(document):
                    kubernetes.validate(job, "1.37", strict=True)
        print("kubernetes-validate: ok")
    if models := package("kubeflow_trainer_api.models"):
        kinds = {"JobSet": models.JobsetV1alpha2JobSet, "TrainJob": models.TrainerV1alpha1TrainJob}
        kinds["TrainingRuntime"] = models.TrainerV1alpha1TrainingRuntime
        for name in ["jobset.yaml", "trainjob.yaml"]:
            for document in documents(folder / name):
                lost = list(unknown(document, kinds[document["kind"]].from_dict(document).to_dict()))
                assert not lost, f"{name}: {document['kind']} has no {lost}"
        print("kubeflow-trainer-api: ok")
    jsonschema = package("jsonschema")
    if sky := package("sky.utils.schemas"):
        (task,) = documents(folder / "skypilot.yaml")
        jsonschema.validate(task, sky.get_task_schema())
        print("skypilot's schema: ok")
    if dstack := package("dstack._internal.core.models.configurations"):
        (task,) = documents(folder / "phalanx.dstack.yml")
        dstack.parse_run_configuration(task)
        print("dstack's schema: ok")
    # The folder config/components/crd/bases of Kueue's repository.
    if crds := os.environ.get("KUEUE_CRDS"):
        for document in documents(folder / "kueue.yaml"):
            (crd,) = documents(Path(crds) / f"kueue.x-k8s.io_{document['kind'].lower()}s.yaml")
            (version,) = [v for v in crd["spec"]["versions"] if document["apiVersion"].endswith("/" + v["name"])]
            jsonschema.validate(document, closed(version["schema"]["openAPIV3Schema"]))
        print("Kueue's schemas: ok")


def closed(schema):
    """The schema without fields that it does not name, as the API server drops them."""
    inner = {key: {k: closed(s) for k, s in schema[key].items()} for key in ["properties"] if key in schema}
    items = {"items": closed(schema["items"])} if "items" in schema else {}
    return schema | inner | items | ({"additionalProperties": False} if inner else {})


def smaller(words, runs):
    """The same command for a training of seconds, with its results below `runs`."""
    changes = {"--epochs": "2", "--save-every": "4"}
    out, rest = [], list(words)
    while rest:
        word = rest.pop(0)
        name, equals, value = word.partition("=")
        if name in changes or name == "--output-dir":
            value = value if equals else rest.pop(0)
            value = changes.get(name) or f"{runs}/{Path(value).name}"
            out += [f"{name}={value}"] if equals else [name, value]
        else:
            out.append(word)
    return out


def commands(folder, phalanx, out):
    # As in a Secret made from the file: with its newline.
    token = (out / "job.token").read_text()
    container = lambda document: document["spec"]["template"]["spec"]["containers"][0]
    words = lambda box: box["command"] + box["args"]
    small = ["--data", "synthetic:640", "--global-batch-size", "64", "--threads", "1"]
    kube = {"PHALANX_TOKEN": token, "KUBERNETES_SERVICE_HOST": "10.96.0.1", "KUBERNETES_PORT": "tcp://10.96.0.1:443"}

    def write(name, node, environment, argv, hostname=None):
        runs = out / "runs" / name
        runs.mkdir(parents=True, exist_ok=True)
        lines = ["#!/bin/bash"]
        if hostname:
            lines.append(f"hostname {hostname}")
            environment = {"HOSTNAME": hostname, **environment}
        if hostname:
            # What the manifest's securityContext says.
            lines.append(f"mount --bind {runs} {runs}")
            lines.append("mount -o remount,bind,ro /")
            lines.append(f"chown -R 65532:65532 {runs}")
            become = "setpriv --reuid 65532 --regid 65532 --clear-groups --no-new-privs --bounding-set -all "
        else:
            become = ""
        environment = {"PATH": f"{out}/bin:/usr/local/bin:/usr/bin:/bin", "HOME": str(out / "home"), **environment}
        settings = " ".join(f"{key}={shlex.quote(value)}" for key, value in environment.items())
        lines.append(f"exec {become}env -i {settings} {shlex.join(argv)}")
        path = out / f"{name}.{node}"
        path.write_text("\n".join(lines) + "\n")

    reference = ["phalanx", "train", "mnist", "--nproc-per-node", str(NODES * RANKS)]
    write("reference", 0, {}, smaller([*reference, "--epochs", "2", "--save-every", "4", "--output-dir", "mnist"], out / "runs/reference") + small)

    (job,) = [document for document in documents(folder / "indexed-job.yaml") if document["kind"] == "Job"]
    assert job["spec"]["completions"] == job["spec"]["parallelism"] == NODES
    (jobset,) = documents(folder / "jobset.yaml")
    (inner,) = jobs_of(jobset)
    assert inner["spec"]["completions"] == inner["spec"]["parallelism"] == NODES
    runtime, trainjob = documents(folder / "trainjob.yaml")
    assert trainjob["spec"]["runtimeRef"]["name"] == runtime["metadata"]["name"]
    trainer = trainjob["spec"]["trainer"]
    assert (trainer["numNodes"], trainer["numProcPerNode"]) == (NODES, RANKS)
    (sky,) = documents(folder / "skypilot.yaml")
    (dstack,) = documents(folder / "phalanx.dstack.yml")
    assert sky["num_nodes"] == dstack["nodes"] == NODES
    unit = re.sub(r"\\\n *", "", (folder / "phalanx.service").read_text())
    start = re.search(r"^ExecStart=(.*)$", unit, re.M)[1]
    for node in range(NODES):
        index = {"JOB_COMPLETION_INDEX": str(node)}
        argv = smaller(words(container(job)), out / "runs/indexed-job") + small
        write("indexed-job", node, {**kube, **index}, argv, f"mnist-{node}")
        argv = smaller(words(container(inner)), out / "runs/jobset") + small
        write("jobset", node, {**kube, **index}, argv, f"mnist-node-0-{node}")
        pet = {
            "PET_NNODES": str(trainer["numNodes"]),
            "PET_NPROC_PER_NODE": str(trainer["numProcPerNode"]),
            "PET_NODE_RANK": str(node),
            "PET_MASTER_ADDR": "mnist-node-0-0.mnist",
            "PET_MASTER_PORT": "29500",
        }
        argv = smaller(words(trainer), out / "runs/trainjob") + small
        write("trainjob", node, {**kube, **index, **pet}, argv, f"mnist-node-0-{node}")
        variables = {
            "PHALANX_TOKEN": token,
            "SKYPILOT_NODE_IPS": "\n".join(ADDRESSES),
            "SKYPILOT_NODE_RANK": str(node),
            "SKYPILOT_NUM_NODES": str(NODES),
            "SKYPILOT_NUM_GPUS_PER_NODE": "0",
        }
        # SkyPilot runs the text with bash; `~` is the home folder.
        home = out / "home"
        line = [word.replace("~", str(home), 1) for word in shlex.split(sky["run"])]
        write("skypilot", node, variables, smaller(line, out / "runs/skypilot") + small)
        variables = {"DSTACK_NODES_IPS": "\n".join(ADDRESSES), "DSTACK_NODE_RANK": str(node), "DSTACK_NODES_NUM": str(NODES)}
        variables |= {"PHALANX_TOKEN": token, "DSTACK_MASTER_NODE_IP": ADDRESSES[0], "DSTACK_GPUS_PER_NODE": "0"}
        write("dstack", node, variables, smaller(shlex.split(dstack["commands"][0]), out / "runs/dstack") + small)
        variables = {
            "PHALANX_TOKEN": token,
            "RUN": str(out / "runs/modelarts/mnist"),
            "VC_WORKER_NUM": str(NODES),
            "VC_TASK_INDEX": str(node),
            "VC_WORKER_HOSTS": ",".join(ADDRESSES),
            "MA_NUM_HOSTS": str(NODES),
            "MA_NUM_GPUS": "0",
            "MA_CURRENT_IP": ADDRESSES[node],
        }
        # ModelArts appends these.
        meets = ["--init_method", f"tcp://{ADDRESSES[0]}:6666", "--rank", str(node), "--world_size", str(NODES)]
        added = ["--data_url", "/none", "--train_url=/none", "--num_gpus", "-1", *meets]
        write("modelarts", node, variables, ["sh", str(folder / "modelarts.sh"), "mnist", "--epochs", "2", *small, *added])
        variables = {"NNODES": str(NODES), "NODE_RANK": str(node), "ADDRESS": ADDRESSES[0]}
        line = start
        for key, value in variables.items():
            line = line.replace("${" + key + "}", value)
        line = line.replace("/usr/local/bin/phalanx", "phalanx").replace("/etc/phalanx/job.token", str(out / "job.token"))
        write("systemd", node, variables, smaller(shlex.split(line), out / "runs/systemd") + small)


def trained(run, out):
    """Runs a workflow twice, as after a retry: the second run continues the first. Its outputs have their types."""
    for _ in range(2):
        accuracies, weights, report = run(epochs=1, run=str(out), data="synthetic:640")
    assert len(accuracies) == 1 and 0 <= accuracies[0] <= 1, accuracies
    assert "<html" in Path(report.path).read_text()[:500].lower()
    # A ZIP archive, for torch.load.
    assert Path(weights.path).read_bytes()[:4] == b"PK\x03\x04"
    assert list(out.glob("wandb/offline-run-*/*.wandb"))


def serialized(task, names):
    """What a server gets of a task: the document's settings, and the secret's name."""
    metadata, secret = task.metadata, task.security_context.secrets[0]
    assert (metadata.retries.retries, metadata.discoverable, metadata.discovery_version) == (2, True, "1.2"), metadata
    assert (secret.group, secret.key, secret.env_var) == names, secret
    amounts = task.container.resources
    requests, limits = ({entry.value for entry in of} for of in (amounts.requests, amounts.limits))
    assert {"2", "2Gi"} <= limits <= requests == {"2", "2Gi", "500Mi"}, amounts


def flyte(file, out):
    from flytekit.configuration import Image, ImageConfig, SerializationSettings
    from flytekit.tools.translator import get_serializable

    sys.path.insert(0, str(file.parent))
    import flyte as module

    images = ImageConfig(Image("default", "none", "0"))
    settings = SerializationSettings(project="p", domain="d", version="v", image_config=images)
    task = get_serializable({}, settings, module.train).template
    serialized(task, ("wandb", "api_key", "WANDB_API_KEY"))
    assert task.interface.outputs["model_state"].type.blob.format == "python_pickle", task.interface.outputs
    trained(module.training, out / "flyte")


def flyte2(file, out):
    import flyte
    from flyte._internal.runtime.task_serde import translate_task_to_wire
    from flyte.models import SerializationContext

    sys.path.append(str(file.parent))
    import flyte2 as module

    task = translate_task_to_wire(module.training, SerializationContext(version="v", root_dir=file.parent))
    serialized(task.task_template, ("", "wandb-api-key", "WANDB_API_KEY"))
    flyte.init()
    local = flyte.with_runcontext(mode="local")
    trained(lambda **inputs: local.run(module.training, **inputs).outputs(), out / "flyte2")


def container(file, root):
    stages, workdir = {}, "/"
    built = None
    for line in re.sub(r"\\\n", " ", file.read_text()).splitlines():
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        if words[0] == "FROM":
            stages[words[3] if "AS" in words else ""] = built = {"copies": [], "workdir": "/"}
        elif words[0] == "WORKDIR":
            built["workdir"] = words[1]
        elif words[0] == "COPY" and not words[1].startswith("--from="):
            for source in words[1:-1]:
                assert (root / source).exists(), f"{file}: COPY {source}: there is no such file"
                built["copies"].append(source)
        elif words[0] == "COPY":
            stage = stages[words[1].removeprefix("--from=")]
            assert words[2] == f"{stage['workdir']}/target/release/phalanx", words
            assert words[3].startswith("/usr/local/bin/"), words
    # The workspace can be resolved from what is copied.
    import tomllib

    workspace = tomllib.loads((root / "Cargo.toml").read_text())["workspace"]
    copied = stages["build"]["copies"]
    for member in workspace["members"]:
        assert member.split("/")[0] in copied, f"{file}: member {member} is not copied"
    assert {"Cargo.toml", "Cargo.lock"} <= set(copied)
    rust = re.search(r"rust:([0-9.]+)", file.read_text())[1]
    assert rust == workspace["package"]["rust-version"], f"{file}: Rust {rust}, Cargo.toml has another"


arguments = [Path(argument) for argument in sys.argv[2:]]
globals()[sys.argv[1]](*arguments)
