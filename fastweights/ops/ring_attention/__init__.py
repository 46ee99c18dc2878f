"""Softmax attention of one token per sequence over a preallocated ring of keys and values."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from ...kernels.availability import takes_kernels
from ..framework.few_tokens import needs_gradient, overwrites_states

__all__ = ["ring_attention", "takes_ring"]

WIDEST = 256  # channels per head


def takes_ring(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, backend: str = "auto") -> bool:
    """Whether the kernels serve q [N, 1, H, K], k and v [N, 1, G, K] and a ring [N, S, G, K]: one dtype, an even K up to 256, no
    gradients, no graph that is traced."""
    width = q.shape[3]
    return (
        takes_kernels(backend, q)
        and not torch.compiler.is_compiling()
        and width % 2 == 0
        and width <= WIDEST
        and {x.dtype for x in (k, v, keys, values)} == {q.dtype}
        and keys.is_contiguous()
        and values.is_contiguous()
        and not needs_gradient({"q": q, "k": k, "v": v})
    )


@lru_cache(maxsize=32)
def frequencies(channels: int, theta: float, device: torch.device) -> Tensor:
    half = channels // 2
    with torch.inference_mode(False):
        return theta ** (-torch.arange(half, device=device, dtype=torch.float32) / half)


def ring_attention(
    q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, seen: Tensor, place: Tensor, padding: Tensor | None,
    theta: float | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """o [N, 1, H, K] for tensors that `takes_ring` allows, and `seen` and `place` after the token.

    The token takes slot place modulo S of its row, in keys and values as they lie. It sees the tokens that the slots hold, from
    number `padding` of its row on (0 when None). theta: base of the rotary positions, whose number is `seen`; None for none.
    Within `overwriting_states` the counters are brought up to date where they lie.
    """
    from ...kernels.attention.ring import attend

    frequency = None if theta is None else frequencies(q.shape[3], theta, q.device)
    in_place = overwrites_states()
    o = attend(q, k, v, keys, values, seen, place, padding, frequency, in_place)
    return (o, seen, place) if in_place else (o, seen + 1, place + 1)
