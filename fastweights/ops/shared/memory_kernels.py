"""The kernels of linear attention and the delta rules, which are one family."""

from __future__ import annotations

from ..framework.call import defer_decode, defer_family

MEMORY_KERNELS = defer_family("chunk.memory", "MEMORY", "KernelInputs", scale=1.0, bound=1.5, eps=1e-6)
MEMORY_DECODE = defer_decode("delta_rule")
