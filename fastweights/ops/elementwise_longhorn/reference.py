"""Elementwise Longhorn token by token: the specification."""

from __future__ import annotations

from torch import Tensor

from ..framework.call import stack_time


def reference(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, S: Tensor) -> tuple[Tensor, tuple[Tensor]]:
    """q (scaled), k [B,T,H,K]; v, beta [B,T,H,V]; S [B,H,K,V] -> o [B,T,H,V], (S,)."""
    outputs = []
    for t in range(v.shape[1]):
        square = k[:, t].square()
        gain = beta[:, t] / (1 + beta[:, t] * square.sum(-1, keepdim=True))
        kept = 1 - square[..., None] * gain[:, :, None]
        S = kept * S + k[:, t, :, :, None] * (gain * v[:, t])[:, :, None]
        outputs.append((q[:, t, :, None] @ S)[:, :, 0])
    return stack_time(outputs, v), (S,)
