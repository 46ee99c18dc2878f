"""The ops that are judged: fresh random inputs, our call, and what the computation costs at least.

Sizes: B batch, T time, H heads, K key channels, V value channels. Costs are those of docs/rules.md (multiply-adds a token and
head of the chunkwise form, chunks of 64), the backward counted as twice the forward.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fastweights import ops

CHUNK = 64


class Sizes(NamedTuple):
    B: int
    T: int
    H: int
    K: int
    V: int

    def __str__(self) -> str:
        return "({},{},{},{},{})".format(*self)


@dataclass(frozen=True)
class Case:
    """One op in one form. inputs: kind of every tensor by argument name; constants: other arguments; macs: multiply-adds a
    token and head."""

    op: Callable[..., tuple[Tensor, Any]]
    inputs: Mapping[str, str]
    macs: Callable[[int, int], float]
    constants: Mapping[str, Any] = field(default_factory=dict)

    def draw(self, sizes: Sizes, dtype: torch.dtype, device: str, seed: int) -> dict[str, Tensor]:
        generator = torch.Generator(device).manual_seed(seed)
        kinds = {name: KINDS[kind] for name, kind in self.inputs.items()}
        return {name: kind(sizes, dtype, device, generator).requires_grad_() for name, kind in kinds.items()}

    def ours(self, inputs: Mapping[str, Tensor], backend: str = "auto", **more: Any) -> tuple[Tensor, Any]:
        return self.op(**inputs, **self.constants, backend=backend, **more)

    def bytes(self, inputs: Mapping[str, Tensor], backward: bool) -> int:
        """Every input read and the output written once; with the backward also dO, the inputs again and their gradients."""
        read = sum(x.numel() * x.element_size() for x in inputs.values())
        o = inputs["v"].numel() * inputs["v"].element_size()
        return 3 * read + 2 * o if backward else read + o

    def operations(self, sizes: Sizes, backward: bool) -> float:
        forward = 2 * self.macs(sizes.K, sizes.V) * sizes.B * sizes.T * sizes.H
        return 3 * forward if backward else forward


def _normal(*shape: int, dtype: torch.dtype, device: str, generator: torch.Generator) -> Tensor:
    return torch.randn(shape, device=device, generator=generator).to(dtype)


def _key(s: Sizes, dtype: torch.dtype, device: str, generator: torch.Generator) -> Tensor:
    x = torch.randn(s.B, s.T, s.H, s.K, device=device, generator=generator)
    return F.normalize(x, dim=-1).to(dtype)


def _value(s: Sizes, dtype: torch.dtype, device: str, generator: torch.Generator) -> Tensor:
    return _normal(s.B, s.T, s.H, s.V, dtype=dtype, device=device, generator=generator)


def _gain(s: Sizes, dtype: torch.dtype, device: str, generator: torch.Generator) -> Tensor:
    return _normal(s.B, s.T, s.H, dtype=torch.float32, device=device, generator=generator).sigmoid()


def _decay(s: Sizes, dtype: torch.dtype, device: str, generator: torch.Generator) -> Tensor:
    """Half-lives from a few to hundreds of tokens."""
    return F.logsigmoid(_normal(s.B, s.T, s.H, dtype=torch.float32, device=device, generator=generator) + 2) / 8


def _channel_decay(s: Sizes, dtype: torch.dtype, device: str, generator: torch.Generator) -> Tensor:
    return F.logsigmoid(_normal(s.B, s.T, s.H, s.K, dtype=torch.float32, device=device, generator=generator) + 2) / 8


def _center(s: Sizes, dtype: torch.dtype, device: str, generator: torch.Generator) -> Tensor:
    return torch.full((s.H,), -0.2, device=device)


KINDS = {
    "key": _key, "value": _value, "gain": _gain, "decay": _decay, "channel decay": _channel_decay, "center": _center,
}  # fmt: skip
READ = {"q": "key", "k": "key", "v": "value"}
PRECONDITIONER = {"precond_g": "decay", "precond_beta": "gain", "center": "center"}


def linear_cost(K: int, V: int) -> float:
    return 2 * K * V + CHUNK * (K + V) / 2


def delta_cost(K: int, V: int) -> float:
    return 3 * K * V + CHUNK * (K + V) + CHUNK**2 / 6


CASES: dict[str, Case] = {
    "linear": Case(ops.linear_attention, READ, linear_cost),
    "simple_gla": Case(ops.linear_attention, {**READ, "g": "decay"}, linear_cost),
    "gla": Case(ops.linear_attention, {**READ, "g": "channel decay"}, linear_cost),
    "deltanet": Case(ops.delta_rule, {**READ, "beta": "gain"}, delta_cost),
    "gdn": Case(ops.delta_rule, {**READ, "beta": "gain", "g": "decay"}, delta_cost),
    "gdn-write": Case(ops.delta_rule, {**READ, "beta": "gain", "g": "decay", "write_key": "key"}, delta_cost),
    "kda": Case(ops.delta_rule, {**READ, "beta": "gain", "g": "channel decay"}, delta_cost),
    "pgdn": Case(ops.preconditioned_delta_rule, {**READ, "beta": "gain", "g": "decay", **PRECONDITIONER}, delta_cost),
    "pkda": Case(
        ops.preconditioned_delta_rule, {**READ, "beta": "gain", "g": "channel decay", **PRECONDITIONER}, delta_cost
    ),
}
