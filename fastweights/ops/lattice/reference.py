"""Lattice token by token: the specification."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import repeat
from typing import Any

from torch import Tensor

from ..framework.call import stack_time
from .slots import clamp_decay, direction_and_length, inverse


def reference(
    q: Tensor, k: Tensor, v: Tensor, gamma: Tensor, decay: Tensor | None, S: Tensor,
    *, objective: str, normalize: bool, l1: float,
) -> tuple[Tensor, tuple[Tensor]]:  # fmt: skip
    """q, k [B,T,H,K]; v [B,T,H,V]; gamma, decay [B,T,H]; S [B,H,K,V]."""
    queries, keys, values = q[..., None, :].unbind(1), k[..., None].unbind(1), v[..., None, :].unbind(1)
    rates = gamma[..., None, None].unbind(1)
    kept: Iterable[Any] = repeat(1.0) if decay is None else clamp_decay(decay)[..., None, None].unbind(1)
    slots, length = direction_and_length(S)
    outputs = []
    for q_t, k_t, v_t, gamma_t, decay_t in zip(queries, keys, values, rates, kept):
        if objective == "decode":
            h, c = k_t.mT @ slots - v_t, k_t
        elif objective == "encode":
            h, c = v_t, slots @ v_t.mT - k_t
        else:
            h, c = -v_t, k_t
        orthogonal = h - slots * (slots @ h.mT)
        S = decay_t * length * slots - gamma_t * inverse(length) * c * orthogonal
        if l1:
            S = S.sign() * (S.abs() - gamma_t * l1).clamp_min(0)
        slots, length = direction_and_length(S)
        if normalize:
            length = (length > 0).to(length)
        outputs.append(((q_t * length.mT) @ slots)[..., 0, :])
    return stack_time(outputs, v), (length * slots,)
