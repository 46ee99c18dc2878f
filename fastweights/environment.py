"""The machine and the libraries that a process runs on: their versions, its cores and its memory, and the error when that runs
out. torch is imported where it is needed only: the help of a command starts without it."""

from __future__ import annotations

import errno
import hashlib
import os
import platform
import re
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from packaging.version import Version

from ._version import __version__

__all__ = [
    "OutOfMemory",
    "check_version",
    "code_version",
    "cpu_model",
    "installed_version",
    "is_version",
    "machine",
    "process_index",
    "usable_cores",
    "usable_memory",
    "versions",
    "within_memory",
    "world_size",
]

# Python and libraries have kinds of error of their own; torch and CUDA have words.
WORDS = (
    *("DefaultCPUAllocator: ", "you tried to allocate", "bad_alloc", "Storage size calculation overflowed"),
    *("out of memory", "STATUS_ALLOC_FAILED"),
)


def versions() -> dict[str, str]:
    """Versions of Python and of the libraries that the numbers come from."""
    import torch

    return {
        "fastweights": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": version("transformers"),
        "numpy": version("numpy"),
    }


def code_version(*packages: str) -> str:
    """A hash of the library's code: all of it, or that of `packages`, such as "ops"."""
    library = Path(__file__).parent
    files = sorted(file for package in packages or ("",) for file in (library / package).rglob("*.py"))
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:12]


def world_size() -> int:
    """How many processes work together, as a launcher such as torchrun sets it."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def process_index() -> int:
    """The number of this process among them, from 0 on."""
    return int(os.environ.get("RANK", "0"))


def installed_version(*packages: str) -> str | None:
    """The version of the first of these packages that is installed, None without any."""
    for package in packages:
        try:
            return version(package)
        except PackageNotFoundError:
            continue
    return None


def is_version(found: str | None, wanted: str) -> bool:
    """Whether a version is `wanted` or a patch of it, as 0.32.1 is of 0.32; for `wanted` "0.24 to 0.33", one from 0.24 to a patch
    of 0.33."""
    if found is None:
        return False
    first, _, last = wanted.partition(" to ")
    release, low, high = (Version(version).release for version in (found, first, last or first))
    return low <= release[: len(low)] and release[: len(high)] <= high


def check_version(library: str, found: str | None, wanted: str, install: str) -> None:
    """ValueError where a library is missing or of a version that is not known here. wanted: see `is_version`; install: the
    command that helps."""
    if found is None:
        raise ValueError(f"{library} is not installed; {install}")
    if not is_version(found, wanted):
        raise ValueError(f"{library} must be of version {wanted}, got {found}; {install}")


def usable_cores() -> int:
    """The number of CPU cores that this process may use (a container's share, where the system tells it)."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def usable_memory() -> float:
    """The bytes of main memory that this process may use: the machine's, or a container's share of them."""
    if "SC_PHYS_PAGES" not in getattr(os, "sysconf_names", ()):
        return float("inf")
    physical = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    share = Path("/sys/fs/cgroup/memory.max")
    limit = share.read_text().strip() if share.is_file() else ""
    return min(physical, int(limit)) if limit.isdecimal() else physical


def machine(device: str) -> dict[str, Any]:
    """The processor, the cores and, for a CUDA device, the accelerator."""
    import torch

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


class OutOfMemory(OSError):
    """The memory of the device is full. The message says what needs less."""


@contextmanager
def within_memory(remedy: str) -> Iterator[None]:
    """Replaces the error for a full memory by an OutOfMemory that names `remedy`, which needs less."""
    try:
        yield
    except (MemoryError, RuntimeError, OSError) as error:
        what = _what_failed(error)
        if what is None:
            raise
        raise OutOfMemory(f"the device's memory is full; {remedy} needs less{what and f'. {what}'}") from None


def _what_failed(error: Exception) -> str | None:
    """What the error of a full memory says, without advice on allocators; None for another error."""
    text = " ".join(str(error).split())
    if isinstance(error, OSError):
        return "" if error.errno == errno.ENOMEM else None
    if isinstance(error, RuntimeError) and not any(words in text for words in WORDS):
        return None
    asked = re.search(r"tried to allocate (\d+) bytes", text)
    return f"Tried to allocate {int(asked[1]):,} bytes" if asked else ". ".join(text.split(". ")[:2])
