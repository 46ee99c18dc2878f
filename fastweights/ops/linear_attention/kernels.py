"""Linear attention by Triton kernels (fastweights.kernels): nothing of triton is imported before it runs."""

from __future__ import annotations

from torch import Tensor

from ..framework.sequences import Sequences


def by_kernels(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, S: Tensor | None, sequences: Sequences, scale: float, final: bool
) -> tuple[Tensor, tuple[Tensor, ...]]:
    from ...kernels.chunk.node import remember
    from ...kernels.chunk.sizes import KernelInputs

    return remember(KernelInputs(q=q, k=k, v=v, g=g, S=S), sequences, scale=scale, final=final)
