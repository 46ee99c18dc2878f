"""The convolution of queries, keys and values that are slices of a joint projection, read where they lie. Their gradients are
written into that of the projection: no slice is copied."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..framework.node import load_module

__all__ = ["convolve_slices", "cut"]


def convolve_slices(
    joint: Tensor, weight: Tensor, bias: Tensor | None, heads: Sequence[int], widths: Sequence[int], eps: float,
    cu_seqlens: Tensor | None,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Three convolutions of a group's first channels, with SiLU, and what the group has besides; by the kernels, nothing is
    checked.

    Args:
        joint: [B, T, G, C], contiguous.
        weight, bias: [D, W] and [D] of the queries of all groups, then of the keys, then of the values.
        heads: by slice, the width of a head that is scaled to length 1, 0 for none.
        widths: by slice, its channels per group.
        eps: added to the squared length of a head.

    Returns:
        By slice [B, T, G, its width], and the rest of joint as a view.
    """
    return _Slices.apply(joint, weight, bias, cu_seqlens, heads, widths, eps)


class _Slices(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, joint: Tensor, weight: Tensor, bias: Tensor | None, edges: Tensor | None, heads: Sequence[int],
        widths: Sequence[int], eps: float,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        ctx.heads, ctx.widths, ctx.eps = heads, widths, eps
        ctx.save_for_backward(joint, weight, bias, edges)
        *slices, rest = cut(joint.detach(), widths)
        filters = zip(*(cut_rows(x, joint.shape[2], widths) for x in (weight, bias)))
        forward = load_module("pointwise.short_convolution").forward
        outputs = [
            forward(x, *taps, None, edges, True, head or None, eps, False)[0]
            for x, taps, head in zip(slices, filters, heads)
        ]
        return *outputs, rest

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *output_grads: Tensor) -> tuple[Any, ...]:
        joint, weight, bias, edges = ctx.saved_tensors
        gradient = torch.empty_like(joint)
        *slices, _ = cut(joint, ctx.widths)
        *into, rest = cut(gradient, ctx.widths)
        rest.copy_(output_grads[-1])
        filters = zip(*(cut_rows(x, joint.shape[2], ctx.widths) for x in (weight, bias)))
        backward = load_module("pointwise.short_convolution").backward
        found = [
            backward(dy, None, x, *taps, None, edges, True, head or None, ctx.eps, dx)
            for dy, x, taps, head, dx in zip(output_grads, slices, filters, ctx.heads, into)
        ]
        _, dweights, dbiases, _ = zip(*found)
        return gradient, torch.cat(dweights), None if bias is None else torch.cat(dbiases), None, None, None, None


def cut(joint: Tensor, widths: Sequence[int]) -> Sequence[Tensor]:
    return joint.split([*widths, joint.shape[-1] - sum(widths)], -1)


def cut_rows(x: Tensor | None, groups: int, widths: Sequence[int]) -> Sequence[Tensor | None]:
    """A slice's rows of all groups."""
    return [None] * len(widths) if x is None else x.split([groups * width for width in widths])
