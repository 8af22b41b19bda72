# Written by `phalanx flow export --to flyte`. Needs flytekit 1.15 or later, in the image of each task too.
# Local run: pyflyte run THIS_FILE WORKFLOW --help
import dataclasses as _dataclasses
import datetime as _datetime
import json as _json
import os as _os
import subprocess as _subprocess
import tempfile as _tempfile
import typing as _typing

import flytekit as _flytekit
from flytekit.exceptions.user import FlyteRecoverableException as _Recoverable
from flytekit.types.directory import FlyteDirectory as _Folder
from flytekit.types.file import FlyteFile as _File

# Tasks, inputs and outputs have names that begin with a letter; all others here begin with "_".
_bool, _float, _int, _str, _list = bool, float, int, str, _typing.List
_isinstance, _map, _open, _Error = isinstance, map, open, RuntimeError


def _text(value):
    """The text in which a command gets `value`."""
    if _isinstance(value, (_File, _Folder)):
        return value.download()
    return value if _isinstance(value, _str) else _json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def _secret(name):
    return _flytekit.Secret(group=name.lower().replace("_", "-").strip("-"), key=name)


class _Attempt:
    """One attempt of a task: texts of its inputs, paths of its outputs, an empty working folder."""

    def __init__(self, task, inputs, outputs):
        top = _tempfile.mkdtemp(dir=_flytekit.current_context().working_directory)
        self.task = task
        self.folder = _os.path.join(top, "work")
        self.inputs = {name: _text(value) for name, value in inputs.items()}
        self.outputs = {name: _os.path.join(top, "outputs", name) for name in outputs}
        for folder in ("work", "outputs"):
            _os.mkdir(_os.path.join(top, folder))

    def run(self, argv, env, unrecoverable, secrets):
        variables = {"FLOW_FOLDER": _FLOW_FOLDER}
        for name, text in self.inputs.items():
            variables["INPUT_" + name.upper().replace(".", "_")] = text
        variables.update((f"OUTPUT_{name.upper()}", path) for name, path in self.outputs.items())
        for name in secrets:
            found = _os.environ.get(name)
            variables[name] = found or _flytekit.current_context().secrets.get(_secret(name).group, name)
        code = _subprocess.call(argv, cwd=self.folder, env={**_os.environ, **variables, **env})
        if code in unrecoverable:
            raise _Error(f"task {self.task}: exit code {code}, which is not retried")
        if code != 0:
            raise _Recoverable(f"task {self.task}: exit code {code}")

    def path(self, name):
        if not _os.path.exists(self.outputs[name]):
            raise _Error(f"task {self.task}: the command has not written the output {name}")
        return self.outputs[name]

    def text(self, name):
        with _open(self.path(name), encoding="utf-8", newline="") as file:
            return file.read().removesuffix("\n")

    def value(self, name):
        return _json.loads(self.text(name))
