"""The preconditioned delta rule by Triton kernels, its preconditioner among them."""

from __future__ import annotations

from torch import Tensor

from ..framework.sequences import Sequences


def by_kernels(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, g: Tensor | None, precond_g: Tensor, precond_beta: Tensor,
    S: Tensor | None, A: Tensor | None, center: Tensor, sequences: Sequences, bound: float, eps: float, scale: float,
    final: bool,
) -> tuple[Tensor, tuple[Tensor, ...]]:  # fmt: skip
    from ...kernels.chunk.node import remember
    from ...kernels.chunk.sizes import KernelInputs

    x = KernelInputs(
        q=q, k=k, v=v, beta=beta, g=g, S=S, precond_g=precond_g, precond_beta=precond_beta, center=center.float(), A=A
    )
    return remember(x, sequences, scale=scale, bound=bound, eps=eps, final=final)
