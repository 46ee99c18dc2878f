"""Rotary positions for longer contexts than a model was trained on: frequencies that are lower than those of rope_theta."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from ..checks import check_choice, check_number, check_size, closest, describe_value

__all__ = ["RopeScaling", "check_scaling"]


@dataclass(frozen=True, kw_only=True)
class RopeScaling:
    r"""Scaling of rotary positions, with the keys of transformers' `rope_parameters`.

    "linear" (position interpolation, Chen et al. 2023) divides all frequencies by `factor`. "yarn" (Peng et al. 2023, section
    3) divides those of channels that turn less than `beta_slow` times within the original context, keeps those that turn more
    than `beta_fast` times, blends in between, and multiplies cosines and sines by `attention_factor`.

    Attributes:
        rope_type: "yarn" or "linear".
        factor: how many times as long the context becomes, at least 1.
        original_max_position_embeddings: tokens of the context before, which "yarn" needs.
        attention_factor: 0.1 ln(factor) + 1 when None.
    """

    rope_type: str
    factor: float
    original_max_position_embeddings: int | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None

    def __post_init__(self) -> None:
        check_choice("rope_type of rope_scaling", self.rope_type, ("yarn", "linear"))
        check_number("factor of rope_scaling", self.factor, low=1)
        for name in ("beta_fast", "beta_slow"):
            check_number(f"{name} of rope_scaling", getattr(self, name), above=0)
        if self.attention_factor is not None:
            check_number("attention_factor of rope_scaling", self.attention_factor, above=0)
        if self.rope_type == "yarn":
            check_size("original_max_position_embeddings of rope_scaling", self.original_max_position_embeddings)

    def scale_frequencies(self, frequency: Tensor, theta: float) -> Tensor:
        """The frequencies [K/2] of a head of K channels, those of theta before. Computed where they are: a CUDA graph may replay
        it, which transformers' own function with its copies from the CPU would not allow."""
        if self.rope_type == "linear":
            return frequency / self.factor
        half = len(frequency)
        low, high = (self._channel(turns, half, theta) for turns in (self.beta_fast, self.beta_slow))
        low, high = max(math.floor(low), 0), min(math.ceil(high), 2 * half - 1)
        channel = torch.arange(half, device=frequency.device, dtype=frequency.dtype)
        divided = ((channel - low) / (high - low if high > low else 1e-3)).clamp(0, 1)
        return frequency / self.factor * divided + frequency * (1 - divided)

    @property
    def amplitude(self) -> float:
        """What cosines and sines are multiplied by."""
        if self.rope_type == "linear":
            return 1.0
        return 0.1 * math.log(self.factor) + 1 if self.attention_factor is None else self.attention_factor

    def _channel(self, turns: float, half: int, theta: float) -> float:
        """The channel whose pair turns so many times within the original context."""
        assert self.original_max_position_embeddings is not None
        return half * math.log(self.original_max_position_embeddings / (turns * 2 * math.pi)) / math.log(theta)


def check_scaling(name: str, value: object) -> RopeScaling:
    """The scaling that a table describes."""
    if isinstance(value, RopeScaling):
        return value
    if not isinstance(value, Mapping):
        raise TypeError(f'{name} must be a table such as {{"rope_type": "yarn", ...}}, got {describe_value(value)}')
    known = [field.name for field in fields(RopeScaling)]
    given: dict[str, Any] = dict(value)
    for key in given:
        if key not in known:
            raise ValueError(f"{name} has no key {key!r}{closest(key, known)}; it has {', '.join(known)}")
    for key in ("rope_type", "factor"):
        if key not in given:
            raise ValueError(f"{name} must have the key {key!r}; add it")
    return RopeScaling(**given)
