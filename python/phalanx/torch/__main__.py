"""Runs a program with this back end in Gloo's place: ``torchrun -m phalanx.torch train.py``."""

import os
import runpy
import sys

import phalanx.torch

program = sys.argv[1:]
is_module = program[:1] == ["-m"]
if len(program) <= is_module:
    sys.exit("usage: python -m phalanx.torch { SCRIPT | -m MODULE } [ARGUMENT ...]")
phalanx.torch.replace_gloo()
sys.argv = program[is_module:]
if is_module:
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
else:
    if not getattr(sys.flags, "safe_path", False):
        sys.path[0] = os.path.dirname(os.path.realpath(sys.argv[0]))
    runpy.run_path(sys.argv[0], run_name="__main__")
