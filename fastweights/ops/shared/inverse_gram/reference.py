"""The inverse of a fading Gram matrix, token by token: the specification."""

from __future__ import annotations

import torch
from torch import Tensor

from ...framework.call import stack_time
from .regularization import allowance, diagonal, inverse, missing_prior

__all__ = ["reference"]


def reference(
    u: Tensor,
    b: Tensor | None,
    gain: Tensor | None,
    g: Tensor | None,
    refresh: Tensor | None,
    G: Tensor,
    *,
    ridge: float,
) -> tuple[Tensor, tuple[Tensor]]:
    """u, b [B,T,H,K]; gain, g, refresh [B,T,H]; G [B,H,K,K] -> G_t^-1 b_t [B,T,H,K] or gain G_t^-1 u_t, (G,)."""
    if b is None:
        b = u if gain is None else gain[..., None] * u
    outputs = []
    for t in range(u.shape[1]):
        if g is not None:
            a = g[:, t].exp()
            G = a[..., None, None] * G + diagonal(missing_prior(a, ridge), G)
        row = u[:, t] if gain is None else gain[:, t, :, None] * u[:, t]
        G = G + row[..., :, None] * u[:, t, :, None, :]
        A = inverse(G, allowance(G, ridge))
        if refresh is not None and refresh[:, t].any():
            A = A + diagonal(refresh[:, t], A)
            G = inverse(A, torch.zeros_like(refresh[:, t]))
        outputs.append((A @ b[:, t, :, :, None])[..., 0])
    return stack_time(outputs, b), (G,)
