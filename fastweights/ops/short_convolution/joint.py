"""The convolution of queries, keys and values that are slices of a joint projection, read where they lie. Their gradients are
written into that of the projection: no slice is copied."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ...kernels.availability import takes_kernels
from ..framework.node import Node, Tensors, load_module
from ..framework.sequences import check_cu_seqlens

__all__ = ["convolve_joint", "convolve_slices", "cut", "takes_joint"]

WIDEST = 8  # filter that the kernels hold in registers


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


class JointConvolution:
    """The kernels as a node: (joint, weight, cu_seqlens), (silu, widths, heads, eps) -> each part convolved, and a copy of what
    follows the parts, None where nothing does. The gradients of all are written side by side, into that of the joint tensor."""

    def forward(self, tensors: Tensors, options: Sequence[Any], save: bool) -> tuple[Tensors, Tensors]:
        joint, weight, edges = tensors
        silu, widths, heads, eps = options
        assert joint is not None and weight is not None
        *parts, rest = cut(joint, widths)
        run = load_module("pointwise.short_convolution").forward
        outputs = [
            run(x, taps, None, None, edges, silu, head or None, eps, False)[0]
            for x, taps, head in zip(parts, weight.split(widths), heads)
        ]
        return [*outputs, rest.contiguous() if rest.shape[-1] else None], ()

    def fake(self, tensors: Tensors, options: Sequence[Any]) -> tuple[Tensors, Tensors]:
        joint, (_, widths, *_) = tensors[0], options
        assert joint is not None
        return [x.new_empty(x.shape) if x.shape[-1] else None for x in cut(joint, widths)], ()

    def backward(
        self, tensors: Tensors, options: Sequence[Any], saved: Tensors, output_grads: Tensors, needed: Sequence[bool]
    ) -> Tensors:
        joint, weight, edges = tensors
        silu, widths, heads, eps = options
        assert joint is not None and weight is not None
        gradient = torch.empty_like(joint, memory_format=torch.contiguous_format)
        *parts, _ = cut(joint, widths)
        *into, rest = cut(gradient, widths)
        of_rest = output_grads[-1]
        rest.zero_() if of_rest is None else rest.copy_(of_rest)
        kernels = load_module("pointwise.short_convolution")
        tiles = [
            kernels.choose_backward_tiling(x, edges, head or None, weight.shape[1]).tiles for x, head in zip(parts, heads)
        ]  # fmt: skip
        make = torch.empty if len(set(tiles)) == 1 else torch.zeros  # a part with fewer tiles leaves some out
        sums = make((max(tiles), *weight.shape), device=joint.device, dtype=torch.float32)
        for dy, x, taps, head, dx, of_taps in zip(
            output_grads, parts, weight.split(widths), heads, into, sums.split(widths, 1)
        ):
            dy = x.new_zeros(x.shape) if dy is None else dy
            kernels.backward(dy, None, x, taps, None, None, edges, silu, head or None, eps, dx, of_taps)
        return gradient, load_module("pointwise.tile_sums").sum_tiles(sums, weight.dtype), None


NODE = Node(
    "short_convolution_joint",
    {"joint": False, "weight": False, "cu_seqlens": True},
    {"silu": "bool", "widths": "int[]", "heads": "int[]", "eps": "float"},
    outputs=4,
    rule=JointConvolution(),
)


def takes_joint(x: Tensor, weights: Sequence[Tensor], backend: str = "auto") -> bool:
    """Whether `convolve_joint` serves: a joint tensor like x, with these filters."""
    return (
        takes_kernels(backend, x)
        and len({weight.shape[1] for weight in weights}) == 1
        and weights[0].shape[1] <= WIDEST
    )


def convolve_joint(
    joint: Tensor,
    weights: Sequence[Tensor],
    *,
    silu: bool,
    heads: Sequence[int],
    eps: float = 1e-6,
    cu_seqlens: Tensor | None = None,
) -> list[Any]:
    """The convolutions of queries, keys and values that lie side by side, by the kernels.

    Args:
        joint: [B, T, D], the channels of queries, then of keys, then of values, then any others.
        weights: of the three, [channels, W] each, W up to 8 and the same.
        silu: whether SiLU follows.
        heads: of the three, the width of a head that is scaled to length 1, 0 for none.
        eps: added to the squared length of a head.
        cu_seqlens: as in `short_convolution`.

    Returns:
        Three [B, T, channels], and the other channels as they are, None where there are none.

    Raises:
        ValueError: cu_seqlens that do not fit.
    """
    check_cu_seqlens(cu_seqlens, len(joint), joint.shape[1], like=joint)
    edges = None if cu_seqlens is None else cu_seqlens.to(joint.device)
    widths = [len(weight) for weight in weights]
    return NODE((joint, torch.cat(list(weights)), edges), (silu, widths, list(heads), eps))
