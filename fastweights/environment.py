"""Where a number was measured: the versions of the libraries, and the machine."""

import os
import platform
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from ._version import __version__

__all__ = ["cpu_model", "machine", "usable_cores", "versions"]


def versions() -> dict[str, str]:
    """Versions of Python and of the libraries that the numbers come from."""
    return {
        "fastweights": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": version("transformers"),
        "numpy": version("numpy"),
    }


def usable_cores() -> int:
    """The number of CPU cores that this process may use (a container's share, where the system tells it)."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def machine(device: str) -> dict[str, Any]:
    """The processor, the cores and, for a CUDA device, the accelerator."""
    description: dict[str, Any] = {
        "system": platform.platform(),
        "cpu": cpu_model(),
        "cores": usable_cores(),
        "device": device,
    }
    if torch.device(device).type == "cuda":
        description["gpu"] = torch.cuda.get_device_name(device)
    return description


def cpu_model() -> str:
    """The name of the processor."""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        for line in cpuinfo.read_text(errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
