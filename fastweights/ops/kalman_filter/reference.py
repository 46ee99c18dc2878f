"""The Kalman filter token by token, in float64: the specification."""

from __future__ import annotations

import torch
from torch import Tensor

from ..framework.call import stack_time

LEAST_NOISE = 1e-6


def per_channel(x: Tensor) -> Tensor:
    """Numbers per head [B, H] or per channel [B, H, K] as what multiplies the rows of [B, H, K, ...]."""
    return x[..., None, None] if x.ndim == 2 else x[..., None]


def reference(
    q: Tensor, k: Tensor, v: Tensor, noise: Tensor, process_noise: Tensor | None, g: Tensor | None, S: Tensor, P: Tensor
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """q (scaled), k [B,T,H,K]; v [B,T,H,V]; noise [B,T,H]; process_noise, g None, [B,T,H] or [B,T,H,K]; S [B,H,K,V];
    P [B,H,K,K]."""
    dtype, identity = v.dtype, torch.eye(k.shape[3], dtype=torch.float64, device=k.device)
    q, k, v, noise, S, P = (x.double() for x in (q, k, v, noise.clamp_min(LEAST_NOISE), S, P))
    outputs = []
    for t in range(v.shape[1]):
        if g is not None:
            decay = per_channel(g[:, t].double().exp())
            S, P = decay * S, decay * P * decay.mT
        if process_noise is not None:
            P = P + per_channel(process_noise[:, t].double()) * identity
        Pk = torch.einsum("bhij,bhj->bhi", P, k[:, t])
        innovation = v[:, t] - torch.einsum("bhk,bhkv->bhv", k[:, t], S)
        gain = Pk / ((k[:, t] * Pk).sum(-1) + noise[:, t])[..., None]
        S = S + gain[..., None] * innovation[:, :, None, :]
        P = P - gain[..., None] * Pk[:, :, None, :]
        outputs.append(torch.einsum("bhk,bhkv->bhv", q[:, t], S))
    return stack_time(outputs, v).to(dtype), (S.to(dtype), P.to(dtype))
