"""Several steps of the delta rule per token, one after another: the specification."""

from __future__ import annotations

import torch
from torch import Tensor

from ..framework.call import stack_time


def reference(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, g: Tensor | None, write_key: Tensor | None, S: Tensor
) -> tuple[Tensor, tuple[Tensor]]:
    """q (scaled) [B,T,H,K]; k, write_key [B,T,H,R,K]; v [B,T,H,R,V]; beta [B,T,H,R]; g None, [B,T,H] or [B,T,H,K];
    S [B,H,K,V]."""
    write_key = k if write_key is None else write_key
    outputs = []
    for t in range(v.shape[1]):
        if g is not None:
            decay = g[:, t].exp()
            S = S * (decay[..., None, None] if g.ndim == 3 else decay[..., None])
        for step in range(v.shape[3]):
            error = v[:, t, :, step] - torch.einsum("bhk,bhkv->bhv", k[:, t, :, step], S)
            S = S + write_key[:, t, :, step, :, None] * (beta[:, t, :, step, None] * error)[:, :, None, :]
        outputs.append(torch.einsum("bhk,bhkv->bhv", q[:, t], S))
    return stack_time(outputs, v[:, :, :, 0]), (S,)
