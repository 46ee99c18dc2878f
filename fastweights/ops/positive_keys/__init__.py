"""Positive queries and keys, and the directions of a penalty, by one kernel where no gradient is needed."""

from __future__ import annotations

import torch
from torch import Tensor

from ...kernels.availability import takes_kernels
from ..framework.few_tokens import needs_gradient

__all__ = ["positive_keys", "takes_positive_keys"]

MOST_TOKENS = 64  # whose matrices are read again for each
WIDEST = 256  # matrix in registers


def takes_positive_keys(q: Tensor, k: Tensor, w: Tensor | None = None, backend: str = "auto") -> bool:
    """Whether the kernel serves q, k [B, T, H, K] and matrices w [H, K, K] of their dtype: few tokens, no gradients, no autocast,
    no graph that is traced, not in float64."""
    given = {"q": q, "k": k, "w": w}
    return (
        not torch.compiler.is_compiling()
        and takes_kernels(backend, q)
        and q.shape == k.shape
        and q.shape[0] * q.shape[1] <= MOST_TOKENS
        and q.shape[3] <= WIDEST
        and all(x is None or x.dtype == q.dtype for x in given.values())
        and not torch.is_autocast_enabled(q.device.type)
        and not needs_gradient(given)
    )


def positive_keys(
    q: Tensor, k: Tensor, w: Tensor | None = None, eps: float = 1e-6
) -> tuple[Tensor, Tensor, Tensor | None]:
    r"""ELU(q) + 1, ELU(k) + 1 and u [B, T, H, K], None without w, for tensors that `takes_positive_keys` allows.

    $$u = \frac{k^\top W}{\sqrt{K (|k^\top W|^2 + \mathrm{eps})}}$$
    """
    from ...kernels.pointwise.positive_keys import positive_keys

    return positive_keys(q, k, w, eps)
