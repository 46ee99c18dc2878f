"""Variational linear attention: a delta rule whose write direction is bent away from what has been penalised."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .._inverse_gram import apply_inverse_gram
from .._shared.checks import (
    check_flag,
    check_gate,
    check_number,
    check_qkv,
    check_states,
    check_tokens,
    values_can_be_read,
)
from .._shared.run import compute_dtype
from .._shared.sequences import Sequences, check_cu_seqlens
from ..delta_rule import delta_rule
from ..linear_attention import linear_attention

__all__ = ["variational_linear_attention"]


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
    r"""Write along unit directions that an adaptive penalty matrix bends towards what has been written little.

    $$A_t = (A_{t-1}^{-1} + u_t u_t^\top)^{-1}, \qquad \hat k_t = k_t / |k_t|, \qquad
      \alpha_t = A_t \hat k_t / |A_t \hat k_t|$$
    $$S_t = S_{t-1} + \alpha_t (v_t - S_{t-1}^\top \hat k_t)^\top, \qquad z_t = z_{t-1} + k_t, \qquad
      o_t = S_t^\top q_t / \max(z_t^\top q_t, \mathrm{eps})$$

    with $A_0 = I / \mathrm{ridge}$; with `refresh_every`, A gains refresh * I at every such token of a sequence, before
    that token's alpha. Source: Variational Linear Attention, equations 8 to 11 and Algorithm 1. It is `delta_rule` with
    beta 1 and write key alpha. Departures from the text: equation 12 counts S twice (the step is
    $S_t = (I - \alpha_t \hat k_t^\top) S_{t-1} + \alpha_t v_t^\top$), and Proposition 2 does not hold:
    $|I - \alpha_t \hat k_t^\top|_2$ is 1 only where alpha is khat, and above 1 elsewhere.

    Args:
        q, k: queries and keys after the feature map (positive, as ELU + 1 gives them), [B, T, H, K], K up to 256, float16,
            bfloat16, float32 or float64. A key of zero writes nothing.
        v: [B, T, HV, V] of the same dtype, V up to 256, HV a multiple of H: each q/k head serves HV/H value heads in a row.
        u: penalty directions, of the dtype of k, [B, T, H, K] or [B, T, HV, K] (the layer's have length K^-0.5).
        ridge: penalty before the first token, positive.
        refresh_every: number of tokens between additions of `refresh` to A's diagonal, or None.
        refresh: what is added, at least 0.
        eps: least divisor, positive.
        initial_state: (S [N, HV, K, V], A [N, HV, K, K] symmetric positive definite, z [N, HV, K], number of tokens read so
            far, int64 [N]) before the first token; (0, I / ridge, 0, 0) when None. N is B, or the number of packed sequences.
        output_final_state: whether to return (S, A, z, count) after the last token.
        cu_seqlens: int32 or int64 [N+1], cumulative lengths of sequences packed into one row (B = 1).
        backend: "reference" (loop over tokens), "torch" (chunkwise, exact) or "auto".

    Returns:
        o [B, T, HV, V] in v's dtype, and (S, A, z) in float32 (float64 for float64 inputs) with count in int64, or None.

    Raises:
        ValueError: a shape, dtype, device, option, cu_seqlens or backend that does not fit; the message says which.
        TypeError: an argument of the wrong kind.
    """
    sizes = check_qkv(q, k, v)
    check_tokens(k=k, u=u)
    check_gate("u", u, sizes, v, sizes.key)
    check_number("ridge", ridge, low=0, open_low=True)
    check_number("refresh", refresh, low=0)
    check_number("eps", eps, low=0, open_low=True)
    check_period(refresh_every)
    check_flag("output_final_state", output_final_state)
    sequences = check_cu_seqlens(cu_seqlens, sizes.batch, sizes.time)
    dtype, lead = compute_dtype(v), (sequences.count, sizes.heads)
    shapes: dict[str, tuple[int, ...]] = {
        "S": (*lead, sizes.key, sizes.value),
        "A": (*lead, sizes.key, sizes.key),
        "z": (*lead, sizes.key),
        "count": (sequences.count,),
    }
    states = check_states(initial_state, shapes, v, dtype, integers=("count",))
    count = states["count"]
    if values_can_be_read(count) and (count < 0).any():
        raise ValueError(f"initial_state count must be at least 0, got {count.min().item()}; pass a call's final state")

    shared: dict[str, Any] = {"output_final_state": output_final_state, "backend": backend}
    refreshes = None
    if refresh_every is not None and refresh > 0:
        due = (positions(sequences, count) + 1) % refresh_every == 0
        refreshes = refresh * due.double()[..., None]
    q, k, values = q.to(dtype), k.to(dtype), v.to(dtype)
    direction = unit(k)
    y, A = apply_inverse_gram(
        "variational_linear_attention", u, direction, refresh=refreshes, ridge=ridge, sequences=sequences,
        shape=shapes["A"], dtype=dtype, initial_state=None if initial_state is None else states["A"], **shared,
    )  # fmt: skip
    shared["cu_seqlens"] = cu_seqlens
    ones = torch.ones_like(values[..., :1])
    read, S = delta_rule(
        q, direction, values, ones[..., 0], write_key=unit(y), scale=1.0, initial_state=states["S"],
        **shared,
    )  # fmt: skip
    divisor, z = linear_attention(q, k, ones, scale=1.0, initial_state=states["z"][..., None], **shared)
    o = (read / divisor.clamp_min(eps)).to(v.dtype)
    if S is None or A is None or z is None:
        return o, None
    return o, (S, A, z[..., 0], count + lengths(sequences))


def check_period(refresh_every: int | None) -> None:
    if refresh_every is None:
        return
    if isinstance(refresh_every, bool) or not isinstance(refresh_every, int):
        raise TypeError(f"refresh_every must be an integer or None, got {type(refresh_every).__name__}")
    if refresh_every < 1:
        raise ValueError(f"refresh_every must be at least 1, got {refresh_every}; pass None for no refresh")


def unit(x: Tensor) -> Tensor:
    """x of length 1 in the last dimension; zero stays zero, with a finite gradient."""
    square = x.square().sum(-1, keepdim=True)
    return x / square.masked_fill(square == 0, 1.0).sqrt()


def lengths(sequences: Sequences) -> int | Tensor:
    return sequences.time if sequences.cu_seqlens is None else sequences.cu_seqlens.diff()


def positions(sequences: Sequences, count: Tensor) -> Tensor:
    """[B, T] how many tokens of its sequence came before each token, `count` [N] of them before the call."""
    token = torch.arange(sequences.time, device=count.device)
    if sequences.cu_seqlens is None:
        return count[:, None] + token
    edges = sequences.cu_seqlens.to(count.device)
    sequence = torch.searchsorted(edges[1:].contiguous(), token, right=True)
    return (count[sequence] + token - edges[sequence])[None]
