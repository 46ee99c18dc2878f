"""The delta rule by Triton kernels (fastweights.kernels): nothing of triton is imported before it runs."""

from __future__ import annotations

from torch import Tensor

from ..framework.sequences import Sequences


def by_kernels(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, g: Tensor | None, write_key: Tensor | None, S: Tensor | None,
    sequences: Sequences, scale: float, final: bool,
) -> tuple[Tensor, tuple[Tensor, ...]]:  # fmt: skip
    from ...kernels.chunk.node import remember
    from ...kernels.chunk.sizes import KernelInputs

    x = KernelInputs(q=q, k=k, v=v, beta=beta, g=g, write_key=write_key, S=S)
    return remember(x, sequences, scale=scale, final=final)
