"""Inverse Gram matrices for arguments that a public op has checked."""

from __future__ import annotations

import torch
from torch import Tensor

from ...framework.run import chunkwise, per_sequence, run, select_backend
from ...framework.sequences import Sequences
from .chunked import chunked
from .reference import reference
from .regularization import allowance, inverse

__all__ = ["apply_inverse_gram"]

IMPLEMENTATIONS = {"reference": per_sequence(reference), "torch": chunkwise(chunked)}


def apply_inverse_gram(
    op: str,
    u: Tensor,
    b: Tensor | None = None,
    gain: Tensor | None = None,
    g: Tensor | None = None,
    refresh: Tensor | None = None,
    *,
    ridge: float,
    initial_state: Tensor | None,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    output_final_state: bool,
    sequences: Sequences,
    backend: str,
) -> tuple[Tensor, Tensor | None]:
    r"""$A_t b_t$ for every token, where

    $$A_t = (e^{g_t} A_{t-1}^{-1} + \mathrm{gain}_t\, u_t u_t^\top)^{-1} + \mathrm{refresh}_t I$$

    All in float64 inside: the directions that A is large in are what is left of large sums in $G = A^{-1}$, which is carried.

    Args:
        u, b: [B, T, h, K]; h divides the heads. b is u when None.
        gain, g: [B, T, h or heads]; gain at least 0, 1 when None. refresh: [B, T, 1], at least 0, a constant.
        ridge: the prior that regularization.py refers to.
        initial_state: A before the first token, symmetric positive definite, of `shape` and `dtype`; I / ridge when None.
        shape, dtype: of A between calls, [N, heads, K, K]; the dtype is also that of the result.

    Returns:
        $A_t b_t$ [B, T, heads, K], and A or None.
    """
    if initial_state is None:
        G_0 = ridge * torch.eye(shape[-1], dtype=torch.float64, device=u.device).expand(shape)
    else:
        A = 0.5 * (initial_state + initial_state.mT).double()
        G_0 = inverse(A, torch.finfo(dtype).eps * torch.linalg.matrix_norm(A.detach()))
    y, G = run(
        select_backend(op, backend, IMPLEMENTATIONS, u),
        tokens={"u": u, "b": b, "gain": gain, "g": g, "refresh": refresh},
        states={"G": G_0},
        sequences=sequences,
        heads=shape[1],
        # Of the shape of the result. What is bad in one channel of it is bad in a key of the delta rule that follows.
        columns=("u",) if b is None else ("b",),
        local=("b",),
        ridge=ridge,
        out_dtype=dtype,
        output_final_state=output_final_state,
    )
    return y, None if G is None else inverse(G, allowance(G, ridge, dtype)).to(dtype)
