"""The kernels of the short convolution as a node: (x, weight, bias, window, cu_seqlens), (silu, head, eps, keep) -> y and the
last window, which is empty unless `keep`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..framework.node import Node, Tensors

__all__ = ["NODE"]


class ShortConvolution:
    def forward(self, tensors: Tensors, options: Sequence[Any], save: bool) -> tuple[Tensors, Tensors]:
        from ...kernels.pointwise.short_convolution import forward

        return forward(*tensors, *options), ()  # type: ignore[arg-type]

    def fake(self, tensors: Tensors, options: Sequence[Any]) -> tuple[Tensors, Tensors]:
        x, weight, _, _, edges = tensors
        assert x is not None and weight is not None
        count = x.shape[0] if edges is None else edges.shape[0] - 1
        *_, keep = options
        return (x.new_empty(x.shape), x.new_empty((count, weight.shape[1] - 1, x.shape[2]) if keep else 0)), ()

    def backward(
        self, tensors: Tensors, options: Sequence[Any], saved: Tensors, output_grads: Tensors, needed: Sequence[bool]
    ) -> Tensors:
        from ...kernels.pointwise.short_convolution import backward

        x, (dy, dfinal), (*plain, keep) = tensors[0], output_grads, options
        assert x is not None
        dy = x.new_zeros(x.shape) if dy is None else dy
        return *backward(dy, dfinal if keep else None, *tensors, *plain), None  # type: ignore[arg-type]


NODE = Node(
    "short_convolution",
    {"x": False, "weight": False, "bias": True, "window": True, "cu_seqlens": True},
    {"silu": "bool", "head": "int?", "eps": "float", "keep": "bool"},
    outputs=2,
    rule=ShortConvolution(),
)
