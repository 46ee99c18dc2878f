"""The convolution of queries, keys and values that lie side by side, for prompts: each part dense, as the memories read it."""

from __future__ import annotations

import torch
from torch import Tensor

from ...kernels.availability import takes_kernels
from ..framework.few_tokens import needs_gradient
from ..framework.node import load_module
from ..l2_normalize import l2_normalize
from . import short_convolution
from .joint import WIDEST

__all__ = ["convolve_heads", "convolve_heads_in_torch"]

EPS = 1e-6  # added to the squared length of a head


def convolve_heads(
    x: Tensor, weight: Tensor, keys: int, width: int, window: Tensor, cu_seqlens: Tensor | None, backend: str = "auto"
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Convolved with SiLU, heads of queries and keys brought to length 1 after they are rounded to the dtype of x.

    Args:
        x: [B, T, D]: `keys` channels of queries, as many of keys, and values.
        weight: [D, W].
        keys, width: channels of all queries, and of one head.
        window: [N, W-1, D], the inputs before.
        cu_seqlens: as in `short_convolution`.

    Returns:
        Queries, keys and values [B, T, channels], and the last inputs [N, W-1, D].
    """
    if not takes_heads(backend, x, weight, window):
        return convolve_heads_in_torch(x, weight, keys, width, window, cu_seqlens, backend)
    (batch, time, channels), kernels = x.shape, load_module("pointwise.short_convolution")
    y, last = kernels.forward(x, weight, None, window, cu_seqlens, True, width, EPS, True, keys)
    sizes = keys, keys, channels - 2 * keys
    q, k, v = (
        part.view(batch, time, size)
        for part, size in zip(y.view(-1).split([batch * time * size for size in sizes]), sizes)
    )
    return q, k, v, last


def takes_heads(backend: str, x: Tensor, weight: Tensor, window: Tensor) -> bool:
    return (
        not torch.compiler.is_compiling()
        and takes_kernels(backend, x)
        and weight.shape[1] <= WIDEST
        and window.dtype == x.dtype
        and not needs_gradient({"x": x, "weight": weight, "window": window})
    )


def convolve_heads_in_torch(
    x: Tensor, weight: Tensor, keys: int, width: int, window: Tensor, cu_seqlens: Tensor | None, backend: str = "auto"
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The same by the ops for each step."""
    y, last = short_convolution(
        x,
        weight,
        activation="silu",
        initial_state=window,
        output_final_state=True,
        cu_seqlens=cu_seqlens,
        backend=backend,
    )
    assert last is not None
    qk, v = y.split((2 * keys, y.shape[2] - 2 * keys), 2)
    q, k = l2_normalize(qk.unflatten(2, (-1, width)), EPS, backend=backend).flatten(2).chunk(2, 2)
    return q, k, v, last
