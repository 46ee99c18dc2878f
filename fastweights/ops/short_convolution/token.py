"""One more token, or a few drafted ones, through the short convolutions of a layer, whose windows may be updated where they lie:
several convolutions at once, or one whose last inputs are kept per channel."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ...kernels.availability import takes_kernels
from ...kernels.pointwise import TokenConvolution
from ..framework.checks import FEW_TOKENS
from ..framework.few_tokens import needs_gradient, overwrites_states

__all__ = ["TokenConvolution", "convolve_token", "short_convolution_step", "takes_step", "takes_token"]

WIDEST = 8  # filter that the kernels hold in registers, and inputs kept per channel
WIDEST_HEAD = 256


def takes_token(parts: Sequence[TokenConvolution], backend: str = "auto", rows: Tensor | None = None) -> bool:
    """Whether the kernel serves these convolutions: of one width, a single token per sequence, no gradients, no graph that is
    traced. rows: the rows of the sequences where the windows are pools; with [N, 1 + S] up to S tokens per sequence."""
    width, few = parts[0].weight.shape[1], rows is not None and rows.ndim == 2 and rows.shape[1] <= 1 + FEW_TOKENS
    return (
        not torch.compiler.is_compiling()
        and 2 <= width <= WIDEST
        and all(
            takes_kernels(backend, one.x)
            and (few or one.x.shape[1] == 1)
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
    parts: Sequence[TokenConvolution], silu: bool, eps: float = 1e-6, rows: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> tuple[list[Tensor], list[Tensor]]:  # fmt: skip
    """y [N, 1, D] and the last inputs [N, W-1, D] of each of the parts, which `takes_token` allows.

    Within `overwriting_states` the last inputs overwrite the given windows. With rows [N] (int32 or int64) they always do: the
    windows are then pools [P, W-1, D], and sequence n has row rows[n]. Rows must not repeat. With a negative row a sequence has
    no window: it reads zeros, and nothing is written. With rows [N, 1 + S] and x [N, T, D], or [1, T, D] with cu_seqlens, a
    sequence reads row rows[n, 0], and the window after its token t goes to row rows[n, 1 + t], if that is not negative."""
    from ...kernels.pointwise.token_convolution import convolve_token

    return convolve_token(parts, silu, eps, overwrites_states(), rows, cu_seqlens)


def takes_step(x: Tensor, state: Tensor, weight: Tensor, bias: Tensor | None, backend: str = "auto") -> bool:
    """Whether the kernel serves x [B, D, 1], the last inputs [B, D, W'] and a filter [D, W] with W-1 <= W' <= 8. It has no
    gradients, and the last inputs must be contiguous."""
    width, kept = weight.shape[1], state.shape[2]
    return (
        takes_kernels(backend, x)
        and x.shape[2] == 1
        and width - 1 <= kept <= WIDEST
        and width <= WIDEST
        and state.is_contiguous()
        and not needs_gradient({"x": x, "state": state, "weight": weight, "bias": bias})
    )


def short_convolution_step(x: Tensor, state: Tensor, weight: Tensor, bias: Tensor | None, silu: bool) -> Tensor:
    """y [B, D, 1] of x and the inputs before it, as `takes_step` allows them; x becomes the last of `state`."""
    if torch.compiler.is_compiling():
        return _step(x, state, weight, bias, silu)
    return _launch(x, state, weight, bias, silu)


def _launch(x: Tensor, state: Tensor, weight: Tensor, bias: Tensor | None, silu: bool) -> Tensor:
    from ...kernels.pointwise.convolution_step import step

    return step(x, state, weight, bias, silu)


@torch.library.custom_op("fastweights::short_convolution_step", mutates_args={"state"})
def _step(x: Tensor, state: Tensor, weight: Tensor, bias: Tensor | None, silu: bool) -> Tensor:
    return _launch(x, state, weight, bias, silu)


@_step.register_fake
def _(x: Tensor, state: Tensor, weight: Tensor, bias: Tensor | None, silu: bool) -> Tensor:
    return x.new_empty(x.shape)
