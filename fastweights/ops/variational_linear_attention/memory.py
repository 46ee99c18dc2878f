"""The memory behind `variational_linear_attention`, with the parts that the paper's ablation takes away as options."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..delta_rule import delta_rule
from ..framework.checks import (
    check_flag,
    check_gate,
    check_number,
    check_qkv,
    check_states,
    check_tokens,
    values_can_be_read,
)
from ..framework.run import compute_dtype
from ..framework.sequences import Sequences, check_cu_seqlens
from ..linear_attention import linear_attention
from ..shared.inverse_gram import apply_inverse_gram

__all__ = ["penalized_memory"]


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
    normalize_keys: bool = True,
    normalize_writes: bool = True,
    initial_state: tuple[Tensor, ...] | None,
    output_final_state: bool,
    cu_seqlens: Tensor | None,
    backend: str,
) -> tuple[Tensor, dict[str, Tensor] | None]:
    """o [B, T, HV, V] and the state by name or None, as `variational_linear_attention` describes them.

    normalize_keys and normalize_writes say whether khat and alpha have length 1, as there; otherwise khat = k and
    alpha = A khat, which diverges where alpha . khat exceeds 2. u None leaves A at I / ridge: the state then has no A.
    """
    sizes = check_qkv(q, k, v)
    if u is not None:
        check_tokens(k=k, u=u)
        check_gate("u", u, sizes, v, sizes.key)
    check_number("ridge", ridge, above=0)
    check_number("refresh", refresh, low=0)
    check_number("eps", eps, above=0)
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
    if u is None:
        del shapes["A"]
    states = check_states(initial_state, shapes, v, dtype, integers=("count",))
    count = states["count"]
    if values_can_be_read(count) and (count < 0).any():
        raise ValueError(f"initial_state count must be at least 0, got {count.min().item()}; pass a call's final state")

    shared: dict[str, Any] = {"output_final_state": output_final_state, "backend": backend}
    q, k, values = q.to(dtype), k.to(dtype), v.to(dtype)
    read_key = unit(k) if normalize_keys else k
    final: dict[str, Tensor | None] = {}
    if u is None:
        write_key = read_key / ridge
    else:
        write_key, final["A"] = apply_inverse_gram(
            "variational_linear_attention", u, read_key, ridge=ridge, sequences=sequences, shape=shapes["A"], dtype=dtype,
            refresh=None if refresh_every is None or not refresh else due(sequences, count, refresh_every) * refresh,
            initial_state=None if initial_state is None else states["A"], **shared,
        )  # fmt: skip
    shared["cu_seqlens"] = cu_seqlens
    ones = torch.ones_like(values[..., :1])
    read, final["S"] = delta_rule(
        q, read_key, values, ones[..., 0], write_key=unit(write_key) if normalize_writes else write_key, scale=1.0,
        initial_state=states["S"], **shared,
    )  # fmt: skip
    divisor, z = linear_attention(q, k, ones, scale=1.0, initial_state=states["z"][..., None], **shared)
    o = (read / divisor.clamp_min(eps)).to(v.dtype)
    if z is None:
        return o, None
    return o, {
        **{name: state for name, state in final.items() if state is not None},
        "z": z[..., 0],
        "count": count + lengths(sequences),
    }


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


def due(sequences: Sequences, count: Tensor, period: int) -> Tensor:
    """[B, T, 1] 1 where a token is the period-th, 2 period-th, ... of its sequence, else 0."""
    return ((positions(sequences, count) + 1) % period == 0).double()[..., None]


def positions(sequences: Sequences, count: Tensor) -> Tensor:
    """[B, T] how many tokens of its sequence came before each token, `count` [N] of them before the call."""
    token = torch.arange(sequences.time, device=count.device)
    if sequences.cu_seqlens is None:
        return count[:, None] + token
    edges = sequences.cu_seqlens.to(count.device)
    sequence = torch.searchsorted(edges[1:].contiguous(), token, right=True)
    return (count[sequence] + token - edges[sequence])[None]
