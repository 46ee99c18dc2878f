"""Options of the layers: each declared once, as a field of a frozen dataclass with its check beside it."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from ..checks import (
    LARGEST_HEADS,
    LARGEST_WIDTH,
    check_choice,
    check_flag,
    check_number,
    check_positive,
    check_size,
    closest,
)
from ..ops.authoring import BACKENDS
from .decay import FIRST_DECAYS
from .heads import HeadSizes, head_width
from .projections import ACTIVATIONS, FIRST_FILTERS, GATES

__all__ = [
    "LONGEST_CONVOLUTION",
    "BlockOptions",
    "DecayOptions",
    "MemoryOptions",
    "MixerOptions",
    "ProjectionOptions",
    "at_least_zero",
    "one_of",
    "option",
    "up_to",
]

LONGEST_CONVOLUTION = 1024  # tokens; the filters are short ones
Made = TypeVar("Made", bound="MixerOptions")


def option(default: Any, check: Callable[[str, Any], Any], *, or_none: bool = False) -> Any:
    """A field of an options dataclass.

    Args:
        default: its default; `dataclasses.MISSING` for an option that must be given.
        check: function of the option's name and value, which returns the value or raises TypeError or ValueError.
        or_none: whether None is allowed too. It always is where None is the default.
    """
    return dataclasses.field(default=default, metadata={"check": check, "or_none": or_none or default is None})


def one_of(*choices: object) -> Callable[[str, Any], Any]:
    """The check that an option is one of these."""

    def check(name: str, value: object) -> object:
        check_choice(name, value, choices)
        return value

    return check


def up_to(largest: int) -> Callable[[str, Any], int]:
    """The check that an option is a positive whole number of at most `largest`."""
    return partial(check_size, high=largest)


def at_least_zero(name: str, value: object) -> float:
    """The check that an option is a finite number of at least 0."""
    number = check_number(name, value)
    if number < 0:
        raise ValueError(f"{name} must be at least 0, got {value}")
    return number


def ramp_name(name: str, value: object) -> str | None:
    """The check of `long_memory`. It was a flag before, which old configurations hold."""
    if isinstance(value, bool):
        return "paper" if value else "own"
    check_choice(name, value, (None, *FIRST_DECAYS))
    return value  # type: ignore[return-value]


@dataclass(frozen=True, kw_only=True)
class MixerOptions:
    """Options of every layer. A subclass is a frozen keyword-only dataclass that adds options or replaces defaults.

    Args:
        hidden_size: width D of the input and the output.
        num_heads: number of heads H: those of q and k where a layer has other value heads.
        head_dim: key channels K of a head; hidden_size / num_heads when None.

    Raises:
        TypeError: an option of a wrong kind.
        ValueError: an option with a value that does not fit.
    """

    hidden_size: int = option(dataclasses.MISSING, up_to(LARGEST_WIDTH))
    num_heads: int = option(dataclasses.MISSING, up_to(LARGEST_HEADS))
    head_dim: int | None = option(None, up_to(LARGEST_WIDTH))

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if value is not None or not field.metadata["or_none"]:
                object.__setattr__(self, field.name, field.metadata["check"](field.name, value))
        self.check_together()

    def check_together(self) -> None:
        """Refuse values that do not fit each other. Subclasses add theirs."""
        head_width(self.hidden_size, self.num_heads, self.head_dim)

    @classmethod
    def from_keywords(cls: type[Made], owner: str, options: Mapping[str, Any]) -> Made:
        """The options that a caller of `owner` has given, after a check that all of them exist."""
        names = [field.name for field in dataclasses.fields(cls)]
        for name in options:
            if name not in names:
                raise TypeError(f"{owner} has no option {name!r}{closest(name, names)}; it has {', '.join(names)}")
        for name in ("hidden_size", "num_heads"):
            if name not in options:
                raise TypeError(f"{owner} needs {name}; pass {name}=...")
        return cls(**options)

    @classmethod
    def signature(cls) -> inspect.Signature:
        """The signature of a constructor that takes these options as keywords."""
        return inspect.signature(cls).replace(return_annotation=inspect.Signature.empty)


@dataclass(frozen=True, kw_only=True)
class DecayOptions(MixerOptions):
    """Options of every layer with a learned decay.

    Args:
        long_memory: the first decays exp(-A dt) over the heads. None, the default, is "windows": A = 1 and windows
            1 / (1 - decay) that rise from 16 to 4096 tokens in equal ratios, 256 for one head, for the decay of a preconditioner
            too. (The decay of gla and pgla, and that of rls, are part of their rules: for them None is "own".) "paper" has A from
            0.01 to 0.16 and dt from 1e-3 to 1e-1, windows of 100001 to 63 tokens (Palimpsa, table 3); "release" has dt in
            the opposite order, 615 to 6251 tokens over 8 heads (its released code). "steps" has the dt of "paper", and A drawn
            at random, in no order: the first decays of Palimpsa's language models. "own" has the first decays of the layer's
            authors: A and dt drawn at random as in Mamba-2, in gla and pgla biases of 0, in rls the ramp "paper".
    """

    long_memory: str | None = option(None, ramp_name)

    def check_together(self) -> None:
        super().check_together()
        if self.long_memory not in (None, "own") and not self.learns_decay:
            raise ValueError(
                f"long_memory must be None with decay {getattr(self, 'decay', None)!r}, which learns no decay, got "
                f"{self.long_memory!r}"
            )

    @property
    def learns_decay(self) -> bool:
        """Whether the layer has a learned decay whose first values `long_memory` can set."""
        return getattr(self, "decay", None) not in ("none", "fixed")


@dataclass(frozen=True, kw_only=True)
class BlockOptions(MixerOptions):
    """Options of every layer with short convolutions around a matrix memory.

    Args:
        expand_v: value channels V = expand_v * K.
        conv_size: width of the short convolutions on q, k and v; None leaves them out.
        conv_init: first filters, "uniform" in +-1/sqrt(conv_size) or "normal" with the standard deviation of a model's
            initializer_range (0.02 in a layer by itself), as in flash-linear-attention.
        norm_eps: number added in the norm of the memory's answer, positive.
        backend: backend of the ops: "auto", "triton", "torch" or "reference".
    """

    expand_v: float = option(1.0, check_positive)
    conv_size: int | None = option(4, up_to(LONGEST_CONVOLUTION), or_none=True)
    conv_init: str = option("uniform", one_of(*FIRST_FILTERS))
    norm_eps: float = option(1e-6, check_positive)
    backend: str = option("auto", one_of(*BACKENDS))


@dataclass(frozen=True, kw_only=True)
class ProjectionOptions(BlockOptions):
    """Options of every layer that projects its input to q, k and v of a matrix memory, beside those of `BlockOptions`.

    Args:
        num_v_heads: value heads G, a multiple of H (each q/k head serves G/H of them); H when None.
        activation: function after the convolutions, "silu" or "none".
        shared_qk: whether q and k share one projection and differ by their convolutions, as in Lattice's block, where v has
            neither convolution nor activation.
    """

    num_v_heads: int | None = option(None, up_to(LARGEST_HEADS))
    activation: str = option("silu", one_of(*ACTIVATIONS))
    shared_qk: bool = option(False, check_flag)

    @property
    def steps(self) -> int:
        """Keys and values per token and head."""
        return 1

    def head_sizes(self) -> HeadSizes:
        """Numbers and widths of the heads."""
        return HeadSizes.choose(self.hidden_size, self.num_heads, self.head_dim, self.expand_v, self.num_v_heads)

    def check_together(self) -> None:
        self.head_sizes()
        if self.shared_qk and self.conv_size is None:
            raise ValueError(
                "conv_size must be a positive whole number with shared_qk, got None: q and k differ by their convolutions"
            )


@dataclass(frozen=True, kw_only=True)
class MemoryOptions(ProjectionOptions):
    """Options that almost every memory layer has, beside those of `MixerOptions` and `ProjectionOptions`.

    Args:
        normalize_qk: whether queries and keys are divided by their length.
        output_norm: whether the answer of each head passes an RMSNorm.
        skip_init: first value of D, one learned number per head, in a skip connection o + D v before this norm; None for none.
        output_gate: None, "silu", "sigmoid" or "gelu": a gate on the answer of the memory after this norm.
        gate_low_rank: whether that gate is projected through V dimensions instead of by a full matrix.
    """

    normalize_qk: bool = option(True, check_flag)
    output_norm: bool = option(True, check_flag)
    skip_init: float | None = option(None, check_number)
    output_gate: str | None = option(None, one_of(None, *GATES))
    gate_low_rank: bool = option(False, check_flag)
