"""The kernels of linear attention and the delta rules, which are one family."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..framework.kernel_backend import KernelFamily, kernels
from ..framework.spec import OpSpec

__all__ = ["in_tf32", "memory_kernels", "recurrent_kernel"]


def memory_kernels() -> KernelFamily:
    from ...kernels.chunk.memory import MEMORY
    from ...kernels.chunk.sizes import KernelInputs

    return KernelFamily(MEMORY, KernelInputs, {"scale": 1.0, "bound": 1.5, "eps": 1e-6})


def coarse_kernels() -> KernelFamily:
    from ...kernels.chunk.sizes import CoarseInputs

    return memory_kernels()._replace(inputs=CoarseInputs)


def in_tf32(spec: OpSpec) -> OpSpec:
    """The kernels of one of these ops on float32 inputs of which products need no more than the first 11 bits."""
    return OpSpec(
        name=f"{spec.name}_in_tf32", inputs=spec.inputs, states=spec.states, outputs=spec.outputs, options=spec.options,
        backends={"triton": kernels(coarse_kernels)},
    )  # fmt: skip


def recurrent_kernel() -> Callable[..., Any]:
    from ...kernels.recurrent.delta_rule import decode

    return decode
