"""Random inputs of the experiments, in float64, drawn on the CPU so that every device gets the same; and what variational linear
attention writes along."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from fastweights.ops.shared.inverse_gram import apply_inverse_gram

__all__ = ["RIDGE", "SCALES", "SCALE_TERMS", "Draws", "penalized_keys", "penalty_stream", "step_norms"]

RIDGE = 0.1
# The length of the penalty directions: 1 in equation 8, K^-1/2 in Algorithm 1 and in the released code.
SCALES = {"unit": lambda channels: 1.0, "inverse_root": lambda channels: channels**-0.5}
SCALE_TERMS = {"scale": {"unit": "|u| = 1", "inverse_root": "|u| = d^-1/2"}}


class Draws:
    """Seeded draws."""

    def __init__(self, seed: int, device: str = "cpu") -> None:
        self.generator, self.device = torch.Generator().manual_seed(seed), device

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator, dtype=torch.float64).to(self.device)

    def uniform(self, *shape: int, low: float = 0.0, high: float = 1.0) -> Tensor:
        drawn = torch.rand(shape, generator=self.generator, dtype=torch.float64)
        return (low + (high - low) * drawn).to(self.device)

    def integers(self, high: int, *shape: int) -> Tensor:
        return torch.randint(high, shape, generator=self.generator).to(self.device)

    def unit(self, *shape: int) -> Tensor:
        """Directions in the last dimension."""
        return F.normalize(self.normal(*shape), dim=-1)


def penalty_stream(draws: Draws, length: int, channels: int, heads: int = 1) -> tuple[Tensor, Tensor]:
    """Keys ELU(x) + 1 of normal x, and the penalty directions unit(W x) of length 1 with a random W per head, as the layer of
    variational linear attention forms them: both [1, T, H, K]."""
    raw = draws.normal(1, length, heads, channels)
    weight = draws.normal(heads, channels, channels)
    direction = torch.einsum("bthk,hkj->bthj", raw, weight)
    return F.elu(raw) + 1, F.normalize(direction, dim=-1)


def penalized_keys(
    draws: Draws, length: int, channels: int, scale: float, unit_keys: bool = True, heads: int = 1
) -> tuple[Tensor, Tensor]:
    """k_t (unit, or as ELU + 1 gives them) and A_t k_t, [T, heads, K]."""
    k, u = penalty_stream(draws, length, channels, heads)
    k = F.normalize(k, dim=-1) if unit_keys else k
    y, _ = apply_inverse_gram(
        scale * u,
        k,
        ridge=RIDGE,
        initial_state=None,
        heads=heads,
        dtype=torch.float64,
        final=False,
        cu_seqlens=None,
        backend="torch",
    )
    return k[0], y[0]


def step_norms(k: Tensor, alpha: Tensor) -> Tensor:
    """|I - alpha k^T|_2 for rows of k and alpha [..., K]."""
    identity = torch.eye(k.shape[-1], dtype=k.dtype, device=k.device)
    return torch.linalg.matrix_norm(identity - alpha[..., :, None] * k[..., None, :], ord=2)
