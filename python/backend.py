"""Builds the wheel: maturin's build backend, and the command ``phalanx`` next to the package."""

import json
import os
import shutil
import subprocess

import maturin

HERE = os.path.dirname(os.path.abspath(__file__))
# What maturin installs as commands (`data` in pyproject.toml).
SCRIPTS = os.path.join(HERE, "data", "scripts")


def _build_command():
    """Builds ``phalanx`` of the workspace that this package is in."""
    # All features: a user of the wheel cannot build them later, and the program in `target/release` keeps those it had.
    build = ["cargo", "build", "--release", "--locked", "--all-features", "--bin", "phalanx"]
    build += ["--message-format", "json-render-diagnostics"]
    said = subprocess.run(build, cwd=os.path.dirname(HERE), stdout=subprocess.PIPE, text=True, check=True).stdout
    built = [json.loads(line).get("executable") for line in said.splitlines()]
    shutil.copy(next(filter(None, built)), SCRIPTS)


def _hook(name, needs_command):
    def hook(*args, **kwargs):
        os.makedirs(SCRIPTS, exist_ok=True)
        if needs_command:
            _build_command()
        return getattr(maturin, name)(*args, **kwargs)

    return hook


build_wheel = _hook("build_wheel", True)
build_editable = _hook("build_editable", True)
prepare_metadata_for_build_wheel = _hook("prepare_metadata_for_build_wheel", False)
prepare_metadata_for_build_editable = _hook("prepare_metadata_for_build_editable", False)
