"""The kernels of the gated norm as a node: (x, weight, gate, value, skip), (activation, eps, gate_first) -> y."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..framework.node import Node, Tensors

__all__ = ["NODE"]


class GatedNorm:
    def forward(self, tensors: Tensors, options: Sequence[Any], save: bool) -> tuple[Tensors, Tensors]:
        from ...kernels.pointwise.gated_norm import forward

        return (forward(*tensors, *options),), ()  # type: ignore[arg-type]

    def fake(self, tensors: Tensors, options: Sequence[Any]) -> tuple[Tensors, Tensors]:
        x, *_ = tensors
        assert x is not None
        return (x.new_empty(x.shape),), ()

    def backward(
        self, tensors: Tensors, options: Sequence[Any], saved: Tensors, output_grads: Tensors, needed: Sequence[bool]
    ) -> Tensors:
        from ...kernels.pointwise.gated_norm import backward

        return backward(*output_grads, *tensors, *options)  # type: ignore[arg-type]


NODE = Node(
    "gated_norm",
    {"x": False, "weight": False, "gate": True, "value": True, "skip": True},
    {"activation": "str", "eps": "float", "gate_first": "bool"},
    outputs=1,
    rule=GatedNorm(),
)
