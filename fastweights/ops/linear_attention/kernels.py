"""Linear attention by Triton kernels (fastweights.ops._triton): nothing of triton is imported before it runs."""

from __future__ import annotations

from torch import Tensor

from .._shared.sequences import Sequences


def by_kernels(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, S: Tensor | None, sequences: Sequences, scale: float, final: bool
) -> tuple[Tensor, tuple[Tensor, ...]]:
    from .._triton.node import remember
    from .._triton.plan import Inputs

    return remember(Inputs(q=q, k=k, v=v, g=g, S=S), sequences, scale=scale, final=final)
