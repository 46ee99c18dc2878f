"""The decayed diagonal A of the key Gram matrix, token by token: the specification."""

from __future__ import annotations

from torch import Tensor

from ..framework.call import stack_time


def reference(k: Tensor, g: Tensor, beta: Tensor, A: Tensor, before: bool) -> tuple[Tensor, tuple[Tensor]]:
    """k [B,T,H,K]; g, beta [B,T,H]; A [B,H,K] -> A_t after every token or A_(t-1) before it [B,T,H,K], (A,)."""
    outputs = []
    for t in range(k.shape[1]):
        previous, A = A, g[:, t, :, None].exp() * A + beta[:, t, :, None] * k[:, t].square()
        outputs.append(previous if before else A)
    return stack_time(outputs, k), (A,)
