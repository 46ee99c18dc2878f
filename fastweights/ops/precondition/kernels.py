"""Write keys by Triton kernels (fastweights.kernels): nothing of triton is imported before it runs."""

from __future__ import annotations

from torch import Tensor

from ..framework.sequences import Sequences


def write_keys_by_kernels(
    k: Tensor, g: Tensor, beta: Tensor, A: Tensor | None, center: Tensor, sequences: Sequences, bound: float, eps: float,
    final: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    from ...kernels.chunk.write_keys_node import write_keys

    return write_keys(k, g, beta, center.float(), A, sequences, bound=bound, eps=eps, final=final)
