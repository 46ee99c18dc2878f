"""Output-normalised test-time training token by token: the specification."""

from __future__ import annotations

from torch import Tensor

from ..framework.call import stack_time

SHORTEST = 1e-6  # an answer z that is shorter has no direction


def reference(q: Tensor, k: Tensor, v: Tensor, gamma: Tensor, S: Tensor) -> tuple[Tensor, tuple[Tensor]]:
    """q, k [B,T,H,K]; v [B,T,H,V]; gamma [B,T,H]; S [B,H,K,V]."""
    queries, keys, values = q[..., None, :].unbind(1), k[..., None].unbind(1), v[..., None, :].unbind(1)
    outputs = []
    for q_t, k_t, v_t, gamma_t in zip(queries, keys, values, gamma[..., None, None].unbind(1)):
        z = k_t.mT @ S
        square = z.square().sum(-1, keepdim=True)
        short = square < SHORTEST**2
        inverse = square.masked_fill(short, 1.0).rsqrt()
        direction = z * inverse
        error = direction - v_t
        along = (direction * (direction @ error.mT)).masked_fill(short, 0.0)
        S = S - gamma_t * k_t * (error - along) * inverse
        outputs.append((q_t @ S)[..., 0, :])
    return stack_time(outputs, v), (S,)
