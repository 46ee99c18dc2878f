"""Variational linear attention: a delta rule whose write direction comes from an adaptive penalty matrix. The parts that the
paper's ablation takes away are options of `penalized_memory`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..context_parallel.ways import divide
from ..delta_rule import delta_rule
from ..framework import roles
from ..framework.call import Arguments, Results, call, composed, defer_decode, defer_family, kernels, op, recurrent
from ..framework.checks import compute_dtype
from ..framework.sequences import token_positions
from ..framework.spec import Case, Flag, Integer, Number, OpSpec, Output, State
from ..linear_attention import linear_attention
from ..shared.inverse_gram import WIDEST, apply_inverse_gram, exact_macs

__all__ = ["variational_linear_attention"]


def write_by_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, S: Tensor | None, z: Tensor | None, count: Tensor | None, *,
    u: Tensor | None = None, A: Tensor | None = None, ridge: float, refresh_every: int | None, refresh: float, eps: float,
    normalize_keys: bool = True, normalize_writes: bool = True, output_final_state: bool, cu_seqlens: Tensor | None,
    backend: str,
) -> Results:  # fmt: skip
    """A delta rule that writes along A k. Without u A stays I / ridge, and the state has no A."""
    dtype = compute_dtype(v)
    shared: dict[str, Any] = {"cu_seqlens": cu_seqlens, "backend": backend}
    if count is None:
        sequences = len(v) if cu_seqlens is None else len(cu_seqlens) - 1
        count = torch.zeros(sequences, dtype=torch.int64, device=v.device)
    asked = k if backend == "triton" else k.to(dtype)  # kernels take what the inputs hold
    if u is None:
        y = asked.to(dtype) / ridge
    else:
        added = None
        if refresh_every is not None and refresh:
            added = mark_every(v.shape[1], count, refresh_every, cu_seqlens) * refresh
        y, A = apply_inverse_gram(
            u, asked, refresh=added, ridge=ridge, initial_state=A, heads=v.shape[2], dtype=dtype, final=output_final_state,
            **shared,
        )  # fmt: skip
    if backend == "triton":
        given = {"q": q, "k": k, "v": v, "y": y}
        options = {"eps": eps, "normalize_keys": normalize_keys, "normalize_writes": normalize_writes}
        arguments = Arguments(given, {"S": S, "z": z}, options, cu_seqlens, output_final_state, backend)
        (o,), (S, z) = WRITTEN.backends[backend].run(arguments)
    else:
        q, k, values = q.to(dtype), k.to(dtype), v.to(dtype)
        norms = nonzero_length(k) if normalize_keys else torch.ones_like(k[..., 0])
        scale = nonzero_length(y) if normalize_writes else norms.repeat_interleave(y.shape[2] // k.shape[2], 2)
        ones = torch.ones_like(values[..., :1])
        before = None if z is None else z[..., None]
        shared |= {"output_final_state": output_final_state, "scale": 1.0}
        read, S = delta_rule(
            q, k / norms[..., None], values, ones[..., 0], write_key=y / scale[..., None], initial_state=S, **shared
        )  # fmt: skip
        divisor, after = linear_attention(q, k, ones, initial_state=before, **shared)
        o, z = (read / divisor.clamp_min(eps)).to(v.dtype), None if after is None else after[..., 0]
    read_so_far = count + (v.shape[1] if cu_seqlens is None else cu_seqlens.diff())
    states = {"S": S, "A": A, "z": z, "count": read_so_far}
    return o, tuple(states[name] for name in (SPEC if u is not None else WITHOUT_PENALTY).states)


# The kernels of what follows the inverse: y [B, T, h, K] is A k.
PENALIZED = defer_family(
    "inverse_gram.penalized_rule", "PENALIZED", "PenalizedInputs", eps=1e-4, normalize_keys=True, normalize_writes=True
)
WRITTEN = OpSpec(
    name="penalized_delta_rule",
    inputs={"q": roles.POSITIVE_QUERY, "k": roles.POSITIVE_KEY, "v": roles.VALUE, "y": roles.KEY},
    states={"S": State("GKV"), "z": State("GK")},
    outputs={"o": Output("GV")},
    options={"eps": Number(above=0), "normalize_keys": Flag(), "normalize_writes": Flag()},
    backends={"triton": kernels(PENALIZED, widest=WIDEST)},
)


def make_recurrent() -> recurrent:
    return recurrent(defer_decode("inverse_gram", "decode_variational"), widest=WIDEST, starts=False)


SPEC = OpSpec(
    name="variational_linear_attention",
    inputs={"q": roles.POSITIVE_QUERY, "k": roles.POSITIVE_KEY, "v": roles.VALUE, "u": roles.PENALTY},
    states={"S": State("GKV"), "A": State("GKK", begins="I / ridge"), "z": State("GK"), "count": State("", counts=True)},
    outputs={"o": Output("GV")},
    options={
        "ridge": Number(above=0), "refresh_every": Integer(least=1, optional=True), "refresh": Number(low=0),
        "eps": Number(above=0),
    },
    backends={
        "reference": composed(write_by_delta_rule), "torch": composed(write_by_delta_rule),
        "triton": composed(write_by_delta_rule, widest=WIDEST),
    },
    recurrent=make_recurrent(),
    cases={
        name: Case(given={"u": "HK"}, options={"refresh_every": every})
        for name, every in {"plain": None, "refresh": 20}.items()
    },
    macs=exact_macs,
    equation="A = (A^-1 + u u^T)^-1; w = A khat / |A khat|; S = S + w (v - S^T khat)^T; o = S^T q / max(z . q, eps)",
)  # fmt: skip
ABLATION = replace(
    SPEC, recurrent=make_recurrent(), options={**SPEC.options, "normalize_keys": Flag(), "normalize_writes": Flag()}
)
WITHOUT_PENALTY = replace(
    ABLATION,
    recurrent=None,
    inputs={name: role for name, role in SPEC.inputs.items() if name != "u"},
    states={name: state for name, state in SPEC.states.items() if name != "A"},
)


@op(SPEC)
def variational_linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    u: Tensor,
    *,
    ridge: float = 0.1,
    refresh_every: int | None = None,
    refresh: float = 1e-3,
    eps: float = 1e-4,
    initial_state: tuple[Tensor, Tensor, Tensor, Tensor] | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    backend: str = "auto",
) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor, Tensor] | None]:
    r"""Write along unit directions that an adaptive penalty matrix turns towards those that earlier u have covered little.

    $$A_t = (A_{t-1}^{-1} + u_t u_t^\top)^{-1}, \qquad \hat k_t = k_t / |k_t|, \qquad
      \alpha_t = A_t \hat k_t / |A_t \hat k_t|$$

    $$S_t = S_{t-1} + \alpha_t (v_t - S_{t-1}^\top \hat k_t)^\top, \qquad z_t = z_{t-1} + k_t, \qquad
      o_t = S_t^\top q_t / \max(z_t^\top q_t, \mathrm{eps})$$

    with $A_0 = I / \mathrm{ridge}$. With `refresh_every` = n, refresh * I is added to A at every n-th token of a sequence, before
    that token's alpha is computed. Source: Variational Linear Attention, equations 8 to 11 and Algorithm 1. It is
    `delta_rule` with beta 1 and write key alpha. Departures from the text: equation 12 counts S twice (the step is
    $S_t = (I - \alpha_t \hat k_t^\top) S_{t-1} + \alpha_t v_t^\top$), and Proposition 2 does not hold:
    $|I - \alpha_t \hat k_t^\top|_2$ is 1 only where alpha is khat, and above 1 elsewhere.

    Args:
        q, k: queries and keys after a positive feature map such as ELU + 1, [B, T, H, K], K up to 256, float16,
            bfloat16, float32 or float64. A key of zero writes nothing.
        v: [B, T, HV, V] of the same dtype, V up to 256, HV a multiple of H: each q/k head serves HV/H consecutive value heads.
        u: penalty directions, of the dtype of k, [B, T, H, K] or [B, T, HV, K] (the layer's have length K^-0.5).
        ridge: penalty before the first token, positive.
        refresh_every: number of tokens between additions of `refresh` to A's diagonal, or None.
        refresh: number that is added to A's diagonal, at least 0.
        eps: smallest divisor, positive.
        initial_state: (S [N, HV, K, V], A [N, HV, K, K] symmetric positive definite, z [N, HV, K], number of tokens read so
            far, int64 [N]) before the first token; (0, I / ridge, 0, 0) when None. N is B, or the number of packed sequences.
        output_final_state: whether to return (S, A, z, count) after the last token.
        cu_seqlens: int32 or int64 [N+1], cumulative lengths of sequences packed into one row (B = 1).
        backend: "reference" (loop over tokens), "torch" (chunkwise, exact), "triton" (kernels; not in float64, at most 128
            channels) or "auto": kernels on CUDA where they serve, else the chunkwise form.

    Returns:
        o [B, T, HV, V] in v's dtype, and (S, A, z) in float32 (float64 for float64 inputs) with count in int64, or None.

    Raises:
        ValueError: a shape, dtype, device, option, cu_seqlens or backend that does not fit; the message says which.
        TypeError: an argument of the wrong kind.
    """
    options = {"ridge": ridge, "refresh_every": refresh_every, "refresh": refresh, "eps": eps}
    return call(SPEC, (q, k, v, u), options, initial_state, output_final_state, cu_seqlens, backend)


def penalized_memory(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    u: Tensor | None,
    *,
    ridge: float,
    refresh_every: int | None,
    refresh: float,
    eps: float,
    normalize_keys: bool,
    normalize_writes: bool,
    initial_state: tuple[Tensor, ...] | None,
    output_final_state: bool,
    cu_seqlens: Tensor | None,
    backend: str,
    cp_group: Any = None,
) -> tuple[Tensor, dict[str, Tensor] | None]:
    """o [B, T, HV, V] and the state by name or None, as `variational_linear_attention` describes them; options and cp_group as
    there.

    normalize_keys and normalize_writes say whether khat and alpha have length 1, as there; otherwise khat = k and
    alpha = A khat, which diverges where alpha . khat exceeds 2. u None leaves A at I / ridge: the state then has no A.
    """
    options = {
        "ridge": ridge, "refresh_every": refresh_every, "refresh": refresh, "eps": eps,
        "normalize_keys": normalize_keys, "normalize_writes": normalize_writes,
    }  # fmt: skip
    spec, inputs = (WITHOUT_PENALTY, (q, k, v)) if u is None else (ABLATION, (q, k, v, u))
    o, state = call(spec, inputs, options, divide(initial_state, cp_group), output_final_state, cu_seqlens, backend)
    return o, None if state is None else dict(zip(spec.states, state))


def nonzero_length(x: Tensor) -> Tensor:
    """The length of x along the last dimension, 1 where it is zero."""
    found = torch.linalg.vector_norm(x, dim=-1)
    return found.masked_fill(found == 0, 1.0)


def mark_every(time: int, count: Tensor, period: int, cu_seqlens: Tensor | None) -> Tensor:
    """[B, T, 1] 1 where a token is the period-th, 2 period-th, ... of its sequence, else 0."""
    return ((token_positions(time, count, cu_seqlens) + 1) % period == 0).double()[..., None]
