"""Our language models in vLLM. vLLM finds `register` by an entry point; nothing of vLLM is imported before it calls that."""

from __future__ import annotations

from .version import ARCHITECTURE, BACKEND, OP, fits

__all__ = ["register"]


def register() -> None:
    """Make vLLM know the architecture. It calls this in each of its processes, in some more than once.

    With another version of vLLM only the name of the model is registered: other models are served as without us, and ours
    tells what to install.
    """
    from vllm import ModelRegistry

    import fastweights.models  # noqa: F401  # its configuration, for transformers' Auto classes

    ModelRegistry.register_model(ARCHITECTURE, f"{__name__}.model:{ARCHITECTURE}")
    if not fits():
        return

    from vllm.config import CompilationConfig
    from vllm.model_executor.models.config import MODELS_CONFIG_MAP
    from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum, register_backend

    from .limits import Limits

    if BACKEND not in MambaAttentionBackendEnum.__members__:
        register_backend(BACKEND, f"{__name__}.memory.FastWeightsBackend", is_mamba=True)
    cut = f"vllm::{OP}"  # compiled graphs are cut at our op, as at attention
    if cut not in CompilationConfig._attention_ops:
        CompilationConfig._attention_ops.append(cut)
    MODELS_CONFIG_MAP[ARCHITECTURE] = Limits
