"""Puts this library's functions in the place of those that the modules of transformers call, and takes them out again.

A layer of transformers 5.15 or later finds its functions by name in its module when it is called. One of an earlier version
copies them from there into itself when it is built, which is why layers that exist already need `accelerate(model)`.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn

from .around import convolution, convolution_step, gated_norm, plain_convolution
from .delta_rule import delta_rule_of

__all__ = ["FAMILIES", "accelerate", "restore"]

FAMILIES = (
    "qwen3_next", "qwen3_5", "qwen3_5_moe", "olmo_hybrid", "qwen4_exp",  # gated delta rule
    "kimi_linear", "bailing_hybrid", "glm5_next",  # Kimi Delta Attention
)  # fmt: skip

Build = Callable[[Any], Callable]
# By the name in a module: what builds our function from the original. The names of flash-linear-attention and causal-conv1d are
# those of transformers up to 5.14, where they are None unless these packages are installed.
IN_MODULES: dict[str, Build] = {
    **dict.fromkeys(("torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule"), delta_rule_of),
    **dict.fromkeys(("chunk_gated_delta_rule", "fused_recurrent_gated_delta_rule"), delta_rule_of),
    **dict.fromkeys(("chunk_kimi_delta_attention", "recurrent_kimi_delta_attention"), delta_rule_of),
    **dict.fromkeys(("causal_conv1d_update", "torch_causal_conv1d_update"), convolution_step),
    "causal_conv1d_fn": convolution,
}
IN_LAYERS: dict[str, Build] = {
    **dict.fromkeys(("chunk_gated_delta_rule", "recurrent_gated_delta_rule"), delta_rule_of),
    "causal_conv1d_fn": convolution,
    "causal_conv1d_update": convolution_step,
}
_originals: WeakKeyDictionary[Any, dict[str, Any]] = WeakKeyDictionary()


def accelerate(model: nn.Module | None = None) -> tuple[str, ...]:
    """Let models of transformers with a gated delta rule or Kimi Delta Attention run on the ops of this library.

    The memory, the short convolution in front of it and the gated norm behind it are replaced, for models that exist and models
    that are loaded later. For each call the original runs instead where ours do not apply: in float64, with heads of more than
    256 channels, while a model is exported, and on devices other than CPUs and the NVIDIA GPUs that the kernels support.
    A second call does no harm.

    Args:
        model: a model, or any module around one; only its families are replaced. With transformers up to 5.14 a model that
            exists already must be given, as its layers keep the functions that they were built with. None stands for
            every family that the installed transformers has, whose modules are then imported.

    Returns:
        The families that now run on our ops, as in `FAMILIES`.

    Raises:
        ValueError: the model has no layer of these families.
        TypeError: model is no torch.nn.Module.
    """
    if model is not None and not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module or None, got {type(model).__name__}; pass the loaded model")
    found = tuple(name for name in FAMILIES if (_has(name) if model is None else _is_used(name, model)))
    if model is not None and not found:
        raise ValueError(
            f"model must have layers of {', '.join(FAMILIES)} in transformers, got {type(model).__name__}; "
            "models of other families have nothing to replace"
        )
    for name in found:
        _replace_in_module(import_module(_module(name)))
    for layer in () if model is None else model.modules():
        if type(layer).__module__ in map(_module, found):
            _replace_in_layer(layer)
    return found


def restore() -> None:
    """Put back every original that `accelerate` replaced, in modules and in layers that exist."""
    for owner, names in list(_originals.items()):
        for name, original in names.items():
            setattr(owner, name, original)
    _originals.clear()


def _module(family: str) -> str:
    return f"transformers.models.{family}.modeling_{family}"


def _has(family: str) -> bool:
    return find_spec(f"transformers.models.{family}") is not None


def _is_used(family: str, model: nn.Module) -> bool:
    return any(type(layer).__module__ == _module(family) for layer in model.modules())


def _replace_in_module(module: ModuleType) -> None:
    for name, build in IN_MODULES.items():
        if vars(module).get(name) is not None or (name in vars(module) and build is convolution):
            _replace(module, name, build)
    for kind in list(vars(module).values()):
        if isinstance(kind, type) and kind.__module__ == module.__name__ and kind.__name__.endswith("RMSNormGated"):
            _replace(kind, "forward", gated_norm)


def _replace_in_layer(layer: nn.Module) -> None:
    """What a layer of transformers up to 5.14 was built with. Those built after `accelerate` have our functions already."""
    for name, build in IN_LAYERS.items():
        if name in vars(layer) and not hasattr(vars(layer)[name], "replaces"):
            _replace(layer, name, build)


def _replace(owner: Any, name: str, build: Build) -> None:
    """Once: what stands there already as ours is left. None stands for the convolution that earlier layers hold themselves."""
    kept = _originals.setdefault(owner, {})
    if name not in kept:
        kept[name] = vars(owner)[name]
        ours: Any = build(plain_convolution if kept[name] is None else kept[name])
        ours.replaces = kept[name]
        setattr(owner, name, ours)
