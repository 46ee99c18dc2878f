"""The delta rule with erase directions of its own, token by token: the specification."""

from __future__ import annotations

import torch
from torch import Tensor

from ..framework.call import stack_time


def reference(
    q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, g: Tensor | None, S: Tensor
) -> tuple[Tensor, tuple[Tensor]]:
    """q (scaled), k, a, b [B,T,H,K]; v [B,T,H,V]; g None, [B,T,H] or [B,T,H,K]; S [B,H,K,V]."""
    outputs = []
    for t in range(v.shape[1]):
        answer = torch.einsum("bhk,bhkv->bhv", a[:, t], S)
        if g is not None:
            decay = g[:, t].exp()
            S = S * (decay[..., None, None] if g.ndim == 3 else decay[..., None])
        S = S + b[:, t, :, :, None] * answer[:, :, None, :] + k[:, t, :, :, None] * v[:, t, :, None, :]
        outputs.append(torch.einsum("bhk,bhkv->bhv", q[:, t], S))
    return stack_time(outputs, v), (S,)
