"""Importing it makes the device of ``late_device.cpp`` known if LATE_DEVICE names the library."""

import os
import types

import torch

if library := os.environ.get("LATE_DEVICE"):
    torch.ops.load_library(library)
    torch.utils.rename_privateuse1_backend("late")
    module = types.SimpleNamespace(is_available=lambda: True, is_initialized=lambda: True, device_count=lambda: 1)
    module.current_device, module._is_in_bad_fork, module.manual_seed_all = lambda: 0, lambda: False, lambda seed: None
    torch._register_device_module("late", module)
