"""The sequence mixers by name: which layer, which options, its equation and its source. Users add theirs."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, fields
from types import SimpleNamespace
from typing import Any, TypeVar, overload

from ..checks import check_choice, check_text, check_whole_number, closest, describe_value, error_prefix
from ..kinds import checked
from ..ops.authoring import format_numbers
from ..plugins import Registry
from .memory_layer import OpLayer
from .mixer import Mixer

__all__ = ["MIXERS", "MixerSpec", "build_mixer", "mixer_spec", "register_mixer", "register_variants"]

# Multiply-adds per token, for `MixerSpec.cost`: in chunks of C tokens, r iterations of a solver (docs/rules.md has the terms).
ADDITIVE = "2 K V + C (K + V) / 2"
DELTA = "3 K V + C (K + V) + C^2 / 6"
KEY_SCALES = "C K / 2"
SOLVE = f"r (K^2 + 2 C K) + {ADDITIVE}"
EXACT = f"{DELTA} + 7 K^2 + 8 C K + K^3 / C"
KEY_ENERGY = "A = exp(gP) A + betaP k^2"
PDN = "Preconditioned DeltaNet"

# The order in which lists show the library's own mixers; mixers of users follow in the order of registration.
ORDER = (
    *("softmax", "linear", "retnet", "mamba2", "gla", "pla", "pgla", "pmamba2", "pmamba2-tied", "pmamba2-key"),
    *("deltanet", "gdn", "kda", "pdn", "pgdn", "pkda", "longhorn", "longhorn-elementwise", "efla", "nlms", "comba"),
    *("deltaproduct", "gated-deltaproduct", "rwkv7"),
    *("palimpsa-d", "palimpsa-m", "gka", "mesa", "lattice", "ttt"),
    *("vla", "vla-conv", "vla-softmax", "vla-linear", "vla-deltanet", "rls"),
)
DESCRIPTION = ("summary", "equation", "source")  # and "state" and "cost", which may be left out
Layer = TypeVar("Layer", bound=type[Mixer])


@checked
@dataclass(frozen=True, kw_only=True)
class MixerSpec:
    """One named mixer.

    Attributes:
        layer: the class that is built.
        options: its keyword arguments that make it this mixer; callers may add others or replace them.
        summary: one line for lists.
        equation: the memory's update, in plain text.
        source: paper and section.
        state: numbers that the memory of one sequence holds (H heads of K key and V value channels).
        cost: multiply-adds of the memory rule for one token, forward, where T tokens are read in chunks of C; "" where
            nobody has stated it.
    """

    layer: type[Mixer]
    options: Mapping[str, Any] = field(default_factory=dict)
    summary: str
    equation: str
    source: str
    state: str
    cost: str = ""


_REGISTRY: Registry[MixerSpec] = Registry("mixer", ORDER)
MIXERS: Mapping[str, MixerSpec] = _REGISTRY


@overload
def register_mixer(
    name: str,
    *,
    layer: None = None,
    options: Mapping[str, Any] | None = None,
    summary: str,
    equation: str,
    source: str,
    state: str = ...,
    cost: str = ...,
) -> Callable[[Layer], Layer]: ...


@overload
def register_mixer(
    name: str,
    *,
    layer: Layer,
    options: Mapping[str, Any] | None = None,
    summary: str,
    equation: str,
    source: str,
    state: str = ...,
    cost: str = ...,
) -> Layer: ...


def register_mixer(
    name: str, *, layer: Any = None, options: Mapping[str, Any] | None = None, **description: str
) -> Any:
    """Name a mixer, so that models, `fastweights recall` and every other command know it.

    With `layer` this registers at once and returns the layer; without, it is a decorator of the class. A class may have
    several names with different options. In a notebook a class that is defined again takes its own place.

    Args:
        name: letters, digits, ".", "_" and "-".
        layer: a subclass of `Mixer` whose constructor takes hidden_size, num_heads and its options as keywords.
        options: options of the layer that belong to the name; callers may add others or replace them.
        summary: one line for lists.
        equation: the memory's update, in plain text.
        source: paper and section.
        state: numbers that the memory of one sequence holds, such as "H K V" (H heads of K key and V value channels). A layer
            that names its op (`MemoryLayer.op`, or `states`) may leave it out: the declaration of the op says it.
        cost: multiply-adds of the memory rule for one token, such as "2 H K V"; may be left out.

    Raises:
        TypeError: layer is not a subclass of `Mixer`, or its constructor does not take hidden_size and num_heads.
        ValueError: a name that is taken or has other characters, or an option that the layer lacks.
    """
    _REGISTRY.check_characters(name)
    for key in description:
        check_choice("a description", key, (*DESCRIPTION, "state", "cost"))
    for key in dict.fromkeys((*DESCRIPTION, *description)):
        check_text(key, description.get(key), what="one line of text", empty=False)
    if options is not None and not (isinstance(options, Mapping) and all(isinstance(key, str) for key in options)):
        raise TypeError(f"options must be a mapping of option names to values, got {describe_value(options)}")
    if layer is None:
        return lambda decorated: register_mixer(name, layer=decorated, options=options, **description)
    if not isinstance(layer, type) or not issubclass(layer, Mixer):
        raise TypeError(
            f"layer of mixer {name!r} must be a subclass of fastweights.layers.Mixer, got {describe_value(layer)}"
        )
    options = dict(options or {})
    if "state" not in description:
        description["state"] = describe_state(name, layer, options)
    spec = MixerSpec(layer=layer, options=options, **description)
    _REGISTRY.check_name(name, layer)
    for needed in ("hidden_size", "num_heads"):
        if _accepts(layer, needed) is False:
            raise TypeError(f"the constructor of {layer.__name__} must take {needed} as a keyword")
    _check_options(name, layer, spec.options)
    _REGISTRY.add(name, spec, layer)
    return layer


def register_variants(
    layer: type[Mixer], macs: str, variants: Mapping[str, tuple[dict[str, Any], str, str, str]]
) -> None:
    """Register the other mixers of a layer, each with its options, summary, equation and source. macs: multiply-adds of a head's
    memory, to which a preconditioner adds its own."""
    for name, (options, *texts) in variants.items():
        cost = f"H ({macs} + {KEY_SCALES})" if "preconditioner" in options else f"H ({macs})"
        register_mixer(name, layer=layer, options=options, cost=cost, **dict(zip(DESCRIPTION, texts)))


def mixer_spec(name: str, options: Mapping[str, Any]) -> MixerSpec:
    """The mixer called `name`, after a check that it and the names of the options exist.

    Raises:
        ValueError: an unknown mixer or option; the message names the nearest and all valid ones.
        TypeError: a name that is no string.
    """
    check_text("mixer", name, what="the name of a mixer")
    if name not in MIXERS:
        raise ValueError(
            f"unknown mixer {describe_value(name)}{closest(name, MIXERS)}; choose from {', '.join(MIXERS)}, or register it "
            "first (a command imports the module that does with --import MODULE)"
        )
    spec = MIXERS[name]
    _check_options(name, spec.layer, options)
    return spec


def build_mixer(name: str, *, hidden_size: int, num_heads: int, layer_idx: int = 0, **options: Any) -> Mixer:
    """The layer called `name`, with the options of `MIXERS[name]` and, over them, those given.

    layer_idx is the index that error messages give for the layer.

    Raises:
        ValueError: an unknown name or option, or a value that does not fit.
        TypeError: an option of a wrong kind.
    """
    check_whole_number("layer_idx", layer_idx)
    with error_prefix(f"layer {layer_idx}"):
        spec = mixer_spec(name, options)
        return spec.layer(hidden_size=hidden_size, num_heads=num_heads, **{**spec.options, **options})


def describe_state(name: str, layer: type[Mixer], options: Mapping[str, Any]) -> str:
    """The numbers that the memory holds, by the states that the layer with these options declares."""
    if issubclass(layer, OpLayer):
        defaults = {field.name: field.default for field in fields(layer.Options)}
        with suppress(NotImplementedError):
            return format_numbers(layer.states(SimpleNamespace(**{**defaults, **options})).values())
    raise ValueError(
        f"state of mixer {name!r} must be given, such as 'H K V': {layer.__name__} names no op that says it"
    )


def _accepts(layer: type[Mixer], name: str) -> bool:
    parameters = inspect.signature(layer).parameters.values()
    return any(p.name == name or p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters)


def _check_options(name: str, layer: type[Mixer], options: Mapping[str, Any]) -> None:
    valid = [key for key in inspect.signature(layer).parameters if key not in ("hidden_size", "num_heads")]
    for key in options:
        if key in ("hidden_size", "num_heads") or not _accepts(layer, key):
            raise ValueError(f"mixer {name!r} has no option {key!r}{closest(key, valid)}; it has {', '.join(valid)}")
