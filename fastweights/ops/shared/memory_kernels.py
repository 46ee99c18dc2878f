"""The kernels of linear attention and the delta rules, which are one family."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..framework.kernel_backend import KernelFamily

__all__ = ["load_memory_kernels", "load_recurrent"]


def load_memory_kernels() -> KernelFamily:
    from ...kernels.chunk.memory import MEMORY, KernelInputs

    return KernelFamily(MEMORY, KernelInputs, {"scale": 1.0, "bound": 1.5, "eps": 1e-6})


def load_recurrent() -> Callable[..., Any]:
    from ...kernels.recurrent.delta_rule import decode

    return decode
