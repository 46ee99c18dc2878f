"""One more token through the short convolutions of a layer, whose windows may be updated where they lie."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ...kernels.availability import takes_kernels
from ...kernels.pointwise import TokenConvolution
from ..framework.few_tokens import needs_gradient, overwrites_states

__all__ = ["TokenConvolution", "convolve_token", "takes_token"]

WIDEST = 8  # filter that the kernel holds in registers
WIDEST_HEAD = 256


def takes_token(parts: Sequence[TokenConvolution], backend: str = "auto", rows: Tensor | None = None) -> bool:
    """Whether the kernel serves these convolutions of one width: a single token per sequence, no gradients, no graph that is
    traced. rows: whether in pools."""
    width = parts[0].weight.shape[1]
    return (
        not torch.compiler.is_compiling()
        and 2 <= width <= WIDEST
        and all(
            takes_kernels(backend, one.x)
            and one.x.shape[1] == 1
            and one.weight.shape[1] == width
            and one.window.dtype == one.x.dtype
            and (one.head or 1) <= WIDEST_HEAD
            and not needs_gradient({"x": one.x, "weight": one.weight, "bias": one.bias, "window": one.window})
            for one in parts
        )
        and (rows is None or takes_pools(parts))
    )


def takes_pools(parts: Sequence[TokenConvolution]) -> bool:
    """Whether the kernel reads these pools: numbers of a window lie together, and only two convolutions share windows."""
    pools = {one.window.data_ptr() for one in parts}
    alike = len(parts) == 2 and parts[0].head == parts[1].head
    return all(one.window[0].is_contiguous() for one in parts) and (len(pools) == len(parts) or alike)


def convolve_token(
    parts: Sequence[TokenConvolution], silu: bool, eps: float = 1e-6, rows: Tensor | None = None
) -> tuple[list[Tensor], list[Tensor]]:
    """y [N, 1, D] and the last inputs of every part, as `takes_token` allows them. Within `overwriting_states` these are the
    given windows, brought up to date. With rows [N] (int32 or int64) they always are: pools [P, W-1, D] in which the sequences
    have these rows. They must not repeat. A negative row is none: it is taken for a window of zeros, and nothing is written."""
    from ...kernels.pointwise.token_convolution import convolve_token

    return convolve_token(parts, silu, eps, overwrites_states(), rows)
