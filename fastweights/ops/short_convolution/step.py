"""One more token through a short convolution whose last inputs are kept per channel and updated in place."""

from __future__ import annotations

import torch
from torch import Tensor

from ...kernels.availability import takes_kernels
from ..framework.few_tokens import needs_gradient

__all__ = ["short_convolution_step", "takes_step"]

WIDEST = 8  # filter, and inputs kept per channel


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
