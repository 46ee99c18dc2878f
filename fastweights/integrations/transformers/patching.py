"""Puts this library's functions in the place of those that the modules of transformers call, and takes them out again.

A layer of transformers 5.15 or later finds its functions by name in its module when it is called. One of an earlier version
copies them from there into itself when it is built: layers that exist already get ours at their next call, through the forward of
their class. A layer may be copied, or outlive `restore`: so what takes a function's place asks at every call whether it still
should.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial, wraps
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import Any
from weakref import WeakKeyDictionary

import transformers
from packaging.version import Version
from torch import nn
from transformers.loss.loss_utils import ForCausalLMLoss

from .functions import add_boundaries, convolve, convolve_step, normalise_gated, plain_convolution, run_delta_rule
from .gated_delta_layer import run_gated_delta_layer
from .kimi_layer import forget, run_kimi_layer
from .pointwise import causal_loss, multiply_gated, normalise

__all__ = ["FAMILIES", "accelerate", "restore"]

FAMILIES = (
    "qwen3_next", "qwen3_5", "qwen3_5_moe", "olmo_hybrid", "qwen4_exp",  # gated delta rule
    "kimi_linear", "bailing_hybrid", "glm5_next",  # Kimi Delta Attention
)  # fmt: skip

COPYING_ENDS = Version("5.15")
Ours = Callable[..., Any]  # called with the original and its arguments
# By the name in a module. The names of flash-linear-attention and causal-conv1d are those of transformers up to 5.14, where they
# are None unless these packages are installed.
IN_MODULES: dict[str, Ours] = {
    **dict.fromkeys(("torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule"), run_delta_rule),
    **dict.fromkeys(("chunk_gated_delta_rule", "fused_recurrent_gated_delta_rule"), run_delta_rule),
    **dict.fromkeys(("chunk_kimi_delta_attention", "recurrent_kimi_delta_attention"), run_delta_rule),
    **dict.fromkeys(("causal_conv1d_update", "torch_causal_conv1d_update"), convolve_step),
    "causal_conv1d_fn": convolve,
}
IN_LAYERS: dict[str, Ours] = {
    **dict.fromkeys(("chunk_gated_delta_rule", "recurrent_gated_delta_rule"), run_delta_rule),
    "causal_conv1d_fn": convolve,
    "causal_conv1d_update": convolve_step,
}
QWEN = {"qwen3_next", "qwen3_5", "qwen3_5_moe", "qwen4_exp"}  # whose memory layers are alike
OF_KIMI: dict[str, Ours] = {"KimiLinearDeltaAttention": run_kimi_layer, "KimiLinearForgetGate": forget}  # by class
SWIGLU = {"act_fn", "gate_proj", "up_proj", "down_proj"}  # all that the forward of an MLP with a gate names
INHERITED = object()  # the original of what a class had from its base
_originals: WeakKeyDictionary[Any, dict[str, Any]] = WeakKeyDictionary()
_active: set[str] = set()  # names of modules


class Replacement:
    """In the place of a function of a module of transformers: ours, and the original after `restore`.

    It is copied as itself, and pickled as whatever the module has under the original's name when it is loaded.
    """

    def __init__(self, ours: Ours, original: Any, module: str) -> None:
        self.replaces, self.module = original, module
        self.original = plain_convolution if original is None else original  # which earlier layers hold themselves
        self.ours = partial(ours, self.original)

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        return (self.ours if self.module in _active else self.original)(*arguments, **options)

    def __deepcopy__(self, copies: Any) -> Replacement:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return _function, (self.original.__module__, self.original.__qualname__)


def accelerate(model: nn.Module | None = None) -> tuple[str, ...]:
    """Let models of transformers with a gated delta rule or Kimi Delta Attention run on the ops of this library.

    The memory, the short convolution in front of it and the gated norm behind it are replaced, and on a GPU the other RMS norms,
    the products of SwiGLU and the loss of causal language models, for models that exist and models that are loaded later. For
    each call the original runs instead where ours do not apply: in float64, with heads of more than 256 channels, while a model
    is exported, and on devices other than CPUs and the NVIDIA GPUs that the kernels support.
    A second call does no harm.

    Args:
        model: a model, or any module around one; only its families are replaced. None stands for every family that the installed
            transformers has, whose modules are then imported. With transformers up to 5.14 the layers of a given model are
            replaced at once, others that exist already when they are next called.

    Returns:
        The families that now run on our ops, as in `FAMILIES`.

    Raises:
        ValueError: the model has no layer of these families.
        TypeError: model is no torch.nn.Module.
    """
    if model is not None and not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module or None, got {type(model).__name__}; pass the loaded model")
    found = tuple(name for name in FAMILIES if (_is_installed(name) if model is None else _is_used(name, model)))
    if model is not None and not found:
        raise ValueError(
            f"model must have layers of {', '.join(FAMILIES)} in transformers, got {type(model).__name__}; "
            "models of other families have nothing to replace"
        )
    for name in found:
        _replace_in_module(import_module(_module(name)))
    if _layers_copy():
        for layer in () if model is None else model.modules():
            _replace_in_layer(layer)
    return found


def restore() -> None:
    """Put back every original that `accelerate` replaced, in modules and in layers: those that it was given, and those that were
    built or copied since."""
    for owner, names in list(_originals.items()):
        for name, original in names.items():
            if original is INHERITED:
                delattr(owner, name)
            else:
                setattr(owner, name, original)
    _originals.clear()
    _active.clear()


def _layers_copy() -> bool:
    """Whether layers of the installed transformers copy the functions of their module when they are built."""
    return Version(transformers.__version__) < COPYING_ENDS


def _function(module: str, name: str) -> Any:
    return getattr(import_module(module), name)


def _module(family: str) -> str:
    return f"transformers.models.{family}.modeling_{family}"


def _is_installed(family: str) -> bool:
    return find_spec(f"transformers.models.{family}") is not None


def _is_used(family: str, model: nn.Module) -> bool:
    return any(type(layer).__module__ == _module(family) for layer in model.modules())


def _replace_in_module(module: ModuleType) -> None:
    _active.add(module.__name__)
    for name, ours in IN_MODULES.items():
        if vars(module).get(name) is not None or (name in vars(module) and ours is convolve):
            _replace(module, name, ours)
    for kind in list(vars(module).values()):
        if not (isinstance(kind, type) and kind.__module__ == module.__name__):
            continue
        forward = _forward_of_ours(kind) if "forward" in vars(kind) else None
        if forward is not None:
            _replace(kind, "forward", forward)
        if kind.__name__.endswith("PreTrainedModel"):
            _replace_loss(kind)


def _forward_of_ours(kind: type) -> Ours | None:
    """What takes the place of the forward of a class."""
    if kind.__name__.endswith("RMSNormGated"):
        return normalise_gated
    if kind.__name__.endswith("RMSNorm"):
        return normalise
    if kind.__name__.endswith("MLP") and set(inspect.unwrap(vars(kind)["forward"]).__code__.co_names) == SWIGLU:
        return multiply_gated
    if not _layers_copy() and kind.__name__.endswith("GatedDeltaNet") and kind.__module__ in map(_module, QWEN):
        return run_gated_delta_layer
    if not _layers_copy() and kind.__name__ in OF_KIMI:
        return OF_KIMI[kind.__name__]
    if _layers_copy() and issubclass(kind, nn.Module):
        return add_boundaries if kind.__name__.endswith("DecoderLayer") else _take_ours
    return None


def _take_ours(original: Callable, layer: Any, *arguments: Any, **options: Any) -> Any:
    """The forward of a class of layers, which first gives a layer our functions in place of its copies."""
    _replace_in_layer(layer)
    return original(layer, *arguments, **options)


def _replace_in_layer(layer: nn.Module) -> None:
    """What a layer of transformers up to 5.14 was built with. Those built after `accelerate` have our functions already."""
    for name, ours in IN_LAYERS.items() if type(layer).__module__ in _active else ():
        if name in vars(layer) and not hasattr(vars(layer)[name], "replaces"):
            _replace(layer, name, ours)


def _replace(owner: Any, name: str, ours: Ours) -> None:
    """Once: what stands there already as ours is left."""
    kept = _originals.setdefault(owner, {})
    if name in kept:
        return
    original = kept[name] = vars(owner)[name]
    if isinstance(owner, type):

        @wraps(original)
        def forward(*arguments: Any, **options: Any) -> Any:
            return ours(original, *arguments, **options)

        forward.replaces = original  # type: ignore[attr-defined]
        setattr(owner, name, forward)
    else:
        module = owner.__name__ if isinstance(owner, ModuleType) else type(owner).__module__
        setattr(owner, name, Replacement(ours, original, module))


def _replace_loss(kind: Any) -> None:
    """Of the models of one family, where it is the one for causal language models."""
    kept = _originals.setdefault(kind, {})
    if "loss_function" in kept:
        return
    kept["loss_function"] = INHERITED
    inherited = kind.loss_function
    choose = inherited.fget

    def loss_function(model: Any) -> Callable:
        chosen = choose(model)
        return partial(causal_loss, chosen) if chosen is ForCausalLMLoss else chosen

    kind.loss_function = property(loss_function, inherited.fset)
