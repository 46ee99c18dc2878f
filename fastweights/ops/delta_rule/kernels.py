"""The delta rule by Triton kernels (fastweights.ops._triton): nothing of triton is imported before it runs."""

from __future__ import annotations

from torch import Tensor

from .._shared.sequences import Sequences


def by_kernels(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, g: Tensor | None, write_key: Tensor | None, S: Tensor | None,
    sequences: Sequences, scale: float, final: bool,
) -> tuple[Tensor, tuple[Tensor, ...]]:  # fmt: skip
    from .._triton.node import remember
    from .._triton.plan import Inputs

    x = Inputs(q=q, k=k, v=v, beta=beta, g=g, write_key=write_key, S=S)
    return remember(x, sequences, scale=scale, final=final)
