"""What variational linear attention writes along, token by token, for experiments on its transitions."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ..ops.shared.inverse_gram import apply_inverse_gram
from .draws import Draws, penalty_stream

__all__ = ["RIDGE", "SCALES", "penalized_keys", "step_norms"]

RIDGE = 0.1
# The length of the penalty directions: 1 in equation 8, K^-1/2 in Algorithm 1 and in the released code.
SCALES = {"|u| = 1": lambda channels: 1.0, "|u| = d^-1/2": lambda channels: channels**-0.5}


def penalized_keys(
    draws: Draws, length: int, channels: int, scale: float, unit_keys: bool = True, heads: int = 1
) -> tuple[Tensor, Tensor]:
    """k_t (unit, or as ELU + 1 gives them) and A_t k_t, [T, heads, K]."""
    k, u = penalty_stream(draws, length, channels, heads)
    k = F.normalize(k, dim=-1) if unit_keys else k
    y, _ = apply_inverse_gram(
        scale * u, k, ridge=RIDGE, initial_state=None, heads=heads, dtype=torch.float64, final=False, cu_seqlens=None,
        backend="torch",
    )  # fmt: skip
    return k[0], y[0]


def step_norms(k: Tensor, alpha: Tensor) -> Tensor:
    """|I - alpha k^T|_2 for rows of k and alpha [..., K]."""
    identity = torch.eye(k.shape[-1], dtype=k.dtype, device=k.device)
    return torch.linalg.matrix_norm(identity - alpha[..., :, None] * k[..., None, :], ord=2)
