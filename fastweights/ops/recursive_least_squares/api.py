"""Recursive least squares: the fast-weight memory that solves its regression exactly at every token."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..delta_rule import delta_rule
from ..framework.checks import (
    check_decay,
    check_flag,
    check_gate,
    check_nonnegative,
    check_number,
    check_qkv,
    check_scale,
    check_states,
)
from ..framework.run import compute_dtype, expand_heads
from ..framework.sequences import check_cu_seqlens
from ..shared.inverse_gram import apply_inverse_gram

__all__ = ["recursive_least_squares"]


def recursive_least_squares(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    g: Tensor | None = None,
    *,
    ridge: float = 1.0,
    scale: float | None = None,
    initial_state: tuple[Tensor, Tensor] | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    backend: str = "auto",
) -> tuple[Tensor, tuple[Tensor, Tensor] | None]:
    r"""Hold, at every token, the exact weighted ridge regression of all values on all keys so far.

    $$P_t = (a_t P_{t-1}^{-1} + \beta_t k_t k_t^\top)^{-1}, \qquad
      S_t = S_{t-1} + \beta_t (P_t k_t)(v_t - S_{t-1}^\top k_t)^\top, \qquad o_t = S_t^\top (\mathrm{scale}\; q_t)$$

    with $a_t = e^{g_t}$ and $P_0 = I / \mathrm{ridge}$. From $S_0 = 0$, $S_t$ is the minimiser of
    $\sum_s (\prod_{r>s} a_r)\, \beta_s |S^\top k_s - v_s|^2 + \mathrm{ridge} (\prod_r a_r) |S|^2$: the Kalman filter of the
    memory, the optimum of the Mesa layer, and what the delta rule, preconditioners and iterative solvers approximate. It is
    `delta_rule` without decay, written along $\beta_t P_t k_t$ (Preconditioned DeltaNet, Theorem 3.1). Decay makes what
    is old count less against what comes in; it does not shrink what is held.

    P grows in directions that fade and receive no key (wind-up); with keys of one direction, or decay below about
    $1 - 1/K$, that is most of them. Two conventions keep everything finite. A decay below 1/100 leaves the difference to
    the prior, $P_t^{-1} = a_t P_{t-1}^{-1} + (1/100 - a_t)\, \mathrm{ridge}\, I + \beta_t k_t k_t^\top$, so that after
    g = -inf the next key is written almost fully. And weights below about $10^{-11}$ ridge no longer count: P stays below
    $2 \cdot 10^{11}$ / ridge. P is computed in float64 and handed over in the dtype of the states: in float32 a continued
    sequence tells apart what lies within $10^7$ of the largest P.

    Args:
        q, k: [B, T, H, K], K up to 256, float16, bfloat16, float32 or float64. Keys of unit length suit the conventions.
        v: [B, T, HV, V] of the same dtype, V up to 256, HV a multiple of H: each q/k head serves HV/H value heads in a row.
        beta: weight of a token, at least 0, [B, T, HV] (or H heads, repeated likewise). Any float dtype.
        g: log decay (natural logarithm, at most 0, -inf included), None or [B, T, HV] (or H heads). Any float dtype.
        ridge: weight of the prior that S is zero, positive.
        scale: factor on q, K^-0.5 by default.
        initial_state: (S [N, HV, K, V], P [N, HV, K, K] symmetric positive definite) before the first token; zeros and
            I / ridge when None. N is B, or the number of packed sequences.
        output_final_state: whether to return (S, P) after the last token.
        cu_seqlens: int32 or int64 [N+1], cumulative lengths of sequences packed into one row (B = 1).
        backend: "reference" (loop over tokens), "torch" (chunkwise, exact) or "auto".

    Returns:
        o [B, T, HV, V] in v's dtype, and (S, P) in float32 (float64 for float64 inputs) or None.

    Raises:
        ValueError: a shape, dtype, device, negative beta, positive g, ridge, cu_seqlens or backend that does not fit; the
            message says which.
        TypeError: an argument of the wrong kind.
    """
    sizes = check_qkv(q, k, v)
    check_gate("beta", beta, sizes, v)
    check_nonnegative("beta", beta)
    check_decay("g", g, sizes, v)
    check_number("ridge", ridge, above=0)
    scale = check_scale(scale, sizes.key)
    check_flag("output_final_state", output_final_state)
    sequences = check_cu_seqlens(cu_seqlens, sizes.batch, sizes.time)
    dtype, lead = compute_dtype(v), (sequences.count, sizes.heads)
    shapes = {"S": (*lead, sizes.key, sizes.value), "P": (*lead, sizes.key, sizes.key)}
    states = check_states(initial_state, shapes, v, dtype)

    shared: dict[str, Any] = {"output_final_state": output_final_state, "backend": backend}
    y, P = apply_inverse_gram(
        "recursive_least_squares", k, gain=beta, g=g, ridge=ridge, sequences=sequences, shape=shapes["P"], dtype=dtype,
        initial_state=None if initial_state is None else states["P"], **shared,
    )  # fmt: skip
    write_key = expand_heads(beta.to(dtype), sizes.heads)[..., None] * y
    values = v.to(dtype)
    o, S = delta_rule(
        q.to(dtype), k.to(dtype), values, torch.ones_like(values[..., 0]), write_key=write_key, scale=scale,
        initial_state=states["S"], cu_seqlens=cu_seqlens, **shared,
    )  # fmt: skip
    return o.to(v.dtype), None if S is None or P is None else (S, P)
