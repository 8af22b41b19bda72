"""Builds the wheel: maturin's build backend, and with ``-C command=true`` the command ``phalanx`` next to the package."""

import json
import os
import shutil
import subprocess
import sys

import maturin
from maturin import get_requires_for_build_editable, get_requires_for_build_wheel  # noqa: F401

HERE = os.path.dirname(os.path.abspath(__file__))
# What maturin installs as commands (`data` in pyproject.toml).
SCRIPTS = os.path.join(HERE, "data", "scripts")


def _build_command(env):
    """Builds ``phalanx`` of the workspace that this package is in."""
    # All features: a user of the wheel cannot build them later, and the program in `target/release` keeps those it had.
    build = ["cargo", "build", "--release", "--locked", "--all-features", "--bin", "phalanx"]
    build += ["--message-format", "json-render-diagnostics"]
    said = subprocess.run(build, cwd=os.path.dirname(HERE), stdout=subprocess.PIPE, text=True, check=True, env=env).stdout
    built = [json.loads(line).get("executable") for line in said.splitlines()]
    shutil.copy(next(filter(None, built)), SCRIPTS)


def _hook(name, builds):
    def hook(directory, config_settings=None, *args):
        try:
            # maturin fetches Rust where there is none.
            env = maturin._get_env()
        except Exception as error:  # Without a network, or without pip's build isolation.
            sys.exit(f"phalanx needs cargo to build: install rustup, https://rustup.rs (cargo is not on the PATH, and cannot be fetched: {error})")
        # Without a command of an earlier build.
        shutil.rmtree(SCRIPTS, ignore_errors=True)
        os.makedirs(SCRIPTS)
        command = (config_settings or {}).get("command", "false")
        if command not in ("true", "false"):
            sys.exit(f"-C command={command}: true or false is expected")
        if builds and command == "true":
            _build_command(env)
        return getattr(maturin, name)(directory, config_settings, *args)

    return hook


build_wheel = _hook("build_wheel", True)
build_editable = _hook("build_editable", True)
prepare_metadata_for_build_wheel = _hook("prepare_metadata_for_build_wheel", False)
prepare_metadata_for_build_editable = _hook("prepare_metadata_for_build_editable", False)
