"""Lets torchtitan train on CPUs, with gloo.

torchtitan 0.3.0 asks torch for an accelerator and takes CUDA without one, and reads the memory of the device for its log. Before
it is imported, this says that the accelerator is the CPU, and gives `torch.cpu` the functions that the log calls.
"""

from __future__ import annotations

from types import SimpleNamespace

import torch

torch._utils._get_available_device_type = lambda: "cpu"
for name, function in {
    "get_device_name": lambda device=None: "CPU",
    "get_device_properties": lambda device=None: SimpleNamespace(total_memory=2**33),
    "memory_stats": lambda device=None: {},
    "reset_peak_memory_stats": lambda device=None: None,
    "empty_cache": lambda: None,
    "current_device": lambda: 0,
}.items():
    setattr(torch.cpu, name, function)
