"""Recursive least squares: the fast-weight memory that solves its regression exactly at every token."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..delta_rule import delta_rule
from ..framework import roles
from ..framework.call import Results, call, composed, defer_decode, op, recurrent
from ..framework.checks import compute_dtype
from ..framework.passing import Passing, Transition
from ..framework.spec import Case, Number, OpSpec, Output, State
from ..shared.inverse_gram import WIDEST, InverseSum, apply_inverse_gram, exact_macs

__all__ = ["recursive_least_squares"]


def solve_by_inverse_gram(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, g: Tensor | None, S: Tensor | None, P: Tensor | None, *,
    ridge: float, scale: float, output_final_state: bool, cu_seqlens: Tensor | None, backend: str,
) -> Results:  # fmt: skip
    """The delta rule without decay, written along beta P k."""
    dtype = compute_dtype(v)
    shared: dict[str, Any] = {"cu_seqlens": cu_seqlens, "backend": backend}
    write_key, P = apply_inverse_gram(
        k, gain=beta, g=g, ridge=ridge, initial_state=P, heads=v.shape[2], dtype=dtype, final=output_final_state, **shared
    )  # fmt: skip
    operand = v.dtype if backend == "triton" else dtype  # kernels multiply in the precision of the inputs
    o, S = delta_rule(
        q.to(operand), k.to(operand), v.to(operand), torch.ones_like(v[..., 0], dtype=dtype), scale=scale,
        write_key=write_key.to(operand), initial_state=S, output_final_state=output_final_state, **shared,
    )  # fmt: skip
    return o.to(v.dtype), (S, P)


SPEC = OpSpec(
    name="recursive_least_squares",
    inputs={
        "q": roles.QUERY, "k": roles.KEY, "v": roles.VALUE, "beta": roles.POSITIVE_GAIN,
        "g": roles.optional(roles.SLOW_LOG_DECAY),
    },
    states={"S": State("GKV"), "P": State("GKK", begins="I / ridge")},
    outputs={"o": Output("GV")},
    options={"ridge": Number(above=0), "scale": roles.SCALE},
    backends={
        "reference": composed(solve_by_inverse_gram), "torch": composed(solve_by_inverse_gram),
        "triton": composed(solve_by_inverse_gram, widest=WIDEST),
    },
    recurrent=recurrent(defer_decode("inverse_gram", "decode_least_squares"), widest=WIDEST, without=("g",), starts=False),
    cases={"none": Case(), "head": Case(given={"g": "G"})},
    macs=exact_macs,
    passing=Passing(states={"S": Transition(), "P": InverseSum(x="k", y="k", gain="beta")}, without=("g",)),
    equation="P = (P^-1 a + beta k k^T)^-1; S = S + beta (P k) (v - S^T k)^T; o = S^T q",
)  # fmt: skip


@op(SPEC)
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
    `delta_rule` without decay, written along $\beta_t P_t k_t$ (Preconditioned DeltaNet, Theorem 3.1). Decay reduces
    the weight of old tokens relative to new ones. It does not shrink S.

    With a decay, P grows in directions that receive no key (wind-up). With keys of one direction, or a decay below about
    $1 - 1/K$, these are most directions. Two conventions keep everything finite. Where the decay is below 1/100, the difference
    to 1/100 goes to the prior,
    $P_t^{-1} = a_t P_{t-1}^{-1} + (1/100 - a_t)\, \mathrm{ridge}\, I + \beta_t k_t k_t^\top$, so that after g = -inf the
    next key is written almost fully. Weights below about $10^{-11}$ ridge no longer count, so that P stays below
    $2 \cdot 10^{11}$ / ridge. P is computed in float64 (in float32 by the kernels, which serve memories without decay) and
    returned in the dtype of the states. In float32 a continued sequence loses the part of P that is more than $10^7$ times
    smaller than its largest element.

    Args:
        q, k: [B, T, H, K], K up to 256, float16, bfloat16, float32 or float64. Keys usually have unit length.
        v: [B, T, HV, V] of the same dtype, V up to 256, HV a multiple of H: each q/k head serves HV/H consecutive value heads.
        beta: weight of a token, at least 0, [B, T, HV] (or H heads, repeated likewise). Any float dtype.
        g: log decay (natural logarithm, at most 0, -inf included), None or [B, T, HV] (or H heads). Any float dtype.
        ridge: weight of the prior that S is zero, positive.
        scale: factor on q, K^-0.5 by default.
        initial_state: (S [N, HV, K, V], P [N, HV, K, K] symmetric positive definite) before the first token; zeros and
            I / ridge when None. N is B, or the number of packed sequences.
        output_final_state: whether to return (S, P) after the last token.
        cu_seqlens: int32 or int64 [N+1], cumulative lengths of sequences packed into one row (B = 1).
        backend: "reference" (loop over tokens), "torch" (chunkwise, exact), "triton" (kernels; not in float64, at most 128
            channels; with a decay P stays with PyTorch) or "auto": kernels on CUDA where they serve, else the chunkwise form.

    Returns:
        o [B, T, HV, V] in v's dtype, and (S, P) in float32 (float64 for float64 inputs) or None.

    Raises:
        ValueError: a shape, dtype, device, negative beta, positive g, ridge, cu_seqlens or backend that does not fit; the
            message says which.
        TypeError: an argument of the wrong kind.
    """
    return call(
        SPEC, (q, k, v, beta, g), {"ridge": ridge, "scale": scale}, initial_state, output_final_state, cu_seqlens, backend
    )  # fmt: skip
