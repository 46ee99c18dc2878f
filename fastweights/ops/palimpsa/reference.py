"""Palimpsa token by token: the specification."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..framework.call import stack_time


def reference(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, g: Tensor, M: Tensor, J: Tensor, *, prior: Tensor, variance: bool
) -> tuple[Any, tuple[Tensor, Tensor]]:
    """q (scaled), k [B,T,H,K]; v, beta [B,T,H,V]; g [B,T,H]; M, J [B,H,K,V]; prior [H] -> o, or (o, variance) where
    `variance`, and (M, J)."""
    means, variances = [], []
    for t in range(v.shape[1]):
        decay = g[:, t].exp()[..., None, None]
        M = decay * M + k[:, t, :, :, None] * v[:, t, :, None, :]
        J = decay * J + k[:, t, :, :, None].square() * beta[:, t, :, None, :]
        importance = J + prior[:, None, None]
        means.append(torch.einsum("bhk,bhkv->bhv", q[:, t], M / importance))
        if variance:
            variances.append(torch.einsum("bhk,bhkv->bhv", q[:, t].square(), 1 / importance))
    o = stack_time(means, v)
    return ((o, stack_time(variances, v)) if variance else o), (M, J)
