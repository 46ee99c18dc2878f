"""Diagonal preconditioners: the running energy of every key channel turns into a write key or into a query."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..framework.checks import (
    Shapes,
    check_decay,
    check_flag,
    check_gate,
    check_number,
    check_same_shape,
    check_states,
    check_tensor,
    check_tokens,
    shape_of,
    values_can_be_read,
)
from ..framework.run import chunkwise, compute_dtype, expand_heads, kernels, per_sequence, run, select_backend
from ..framework.sequences import check_cu_seqlens
from .chunked import chunked
from .kernels import write_keys_by_kernels
from .reference import reference

__all__ = ["precondition_keys", "precondition_queries"]

IMPLEMENTATIONS = {"reference": per_sequence(reference), "torch": chunkwise(chunked)}
KEY_IMPLEMENTATIONS = {**IMPLEMENTATIONS, "triton": kernels(write_keys_by_kernels)}


def precondition_keys(
    k: Tensor,
    g: Tensor,
    beta: Tensor,
    center: Tensor | float,
    *,
    bound: float = 1.5,
    eps: float = 1e-6,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    backend: str = "auto",
) -> tuple[Tensor, Tensor | None]:
    r"""Write keys of Preconditioned DeltaNet: quiet key channels are written more strongly, loud ones less.

    $$A_t = e^{g_t} A_{t-1} + \beta_t k_t^2, \qquad r = \log(A_t + \mathrm{eps}) - c, \qquad
      w_t = x^{-r/(1+|r|)}\, k_t$$

    elementwise over the K channels, so that every factor lies in [1/x, x], x = bound. Source: Preconditioned DeltaNet,
    sections 3 and 4 (with the free centre of the authors' released code in place of the text's positive one).

    Args:
        k: [B, T, H, K], K up to 256, float16, bfloat16, float32 or float64.
        g: log decay of A (natural logarithm, at most 0), [B, T, H]. Any float dtype. g and beta may have a multiple of
            k's heads, as for value heads that share a key: the result then has as many.
        beta: gain of A, at least 0, [B, T, H].
        center: c, a number or a tensor [H], free in sign.
        bound: x in [1, 2]; 1 leaves the keys as they are, at most 2 keeps the delta rule stable for beta <= 1 and unit keys.
        eps: positive number under the logarithm.
        initial_state: A before the first token, [N, H, K]; zeros when None. N is B, or the number of packed sequences.
        output_final_state: whether to return A after the last token.
        cu_seqlens: int32 or int64 [N+1], cumulative lengths of sequences packed into one row (B = 1).
        backend: "reference" (loop over tokens), "torch" (chunkwise, exact) or "auto".

    Returns:
        write_key [B, T, H, K] in k's dtype, and A [N, H, K] in float32 (float64 for float64 inputs) or None.

    Raises:
        ValueError: a shape, dtype, device, bound, eps, positive g, cu_seqlens or backend that does not fit.
        TypeError: an argument of the wrong kind.
    """
    check_tokens(k=k)
    heads = gate_heads(k, g, beta)
    center = check_center(center, k, heads)
    check_squash(bound, eps)
    chosen = select_backend("precondition_keys", backend, KEY_IMPLEMENTATIONS, k)
    if isinstance(chosen, kernels):
        check_flag("output_final_state", output_final_state)
        sequences = check_cu_seqlens(cu_seqlens, k.shape[0], k.shape[1])
        expected = {"A": (sequences.count, heads, k.shape[3])}
        states = check_states(initial_state, expected, k, compute_dtype(k), zeros=False)
        call = {"sequences": sequences, "bound": float(bound), "eps": float(eps), "final": output_final_state}
        write_key, state = chosen.function(k, g, beta, **states, center=center, **call)
        return write_key, state if output_final_state else None
    gram, state = _key_gram("precondition_keys", k, g, beta, initial_state, output_final_state, cu_seqlens, backend)
    distance = (gram + eps).log() - center.to(gram.dtype)[:, None]
    factor = torch.exp(-math.log(bound) * distance / (1 + distance.abs()))
    return (factor * expand_heads(k, heads).to(gram.dtype)).to(k.dtype), state


def precondition_queries(
    q: Tensor,
    k: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    ridge: Tensor | float,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    backend: str = "auto",
) -> tuple[Tensor, Tensor | None]:
    r"""Queries divided by the energy of the key channels, in front of linear attention (PLA, P-Mamba-2, PGLA).

    $$A_t = e^{g_t} A_{t-1} + \beta_t k_t^2, \qquad \tilde q_t = q_t / (A_t + \mathrm{ridge})$$

    elementwise over the K channels: the diagonal of the inverse key Gram matrix that solves the regression exactly
    (Preconditioned DeltaNet, section 3: preconditioning at query time).

    Args:
        q, k: [B, T, H, K], K up to 256, float16, bfloat16, float32 or float64.
        g: log decay of A (natural logarithm, at most 0), [B, T, H]. Any float dtype. g and beta may have a multiple of
            the q/k heads, as for value heads that share a query: the result then has as many.
        beta: gain of A, at least 0, [B, T, H].
        ridge: a positive number, or a positive tensor [H] or [H, K].
        initial_state, output_final_state, cu_seqlens, backend: as for `precondition_keys`.

    Returns:
        q_tilde [B, T, H, K] in q's dtype, and A [N, H, K] in float32 (float64 for float64 inputs) or None.

    Raises:
        ValueError: a shape, dtype, device, ridge, positive g, cu_seqlens or backend that does not fit.
        TypeError: an argument of the wrong kind.
    """
    check_tokens(q=q, k=k)
    check_same_shape("k", k, "q", q)
    heads = gate_heads(k, g, beta)
    divisor = check_ridge(ridge, k, heads)
    gram, state = _key_gram("precondition_queries", k, g, beta, initial_state, output_final_state, cu_seqlens, backend)
    q = q.masked_fill(~q.isfinite(), math.nan)
    return (expand_heads(q, heads).to(gram.dtype) / (gram + divisor)).to(q.dtype), state


def gate_heads(k: Tensor, g: Tensor, beta: Tensor) -> int:
    """The heads of the result: those of the gates, a multiple of the keys'."""
    for name, x in {"g": g, "beta": beta}.items():
        check_tensor(name, x, k)
        if x.ndim != 3:
            raise ValueError(f"{name} must be [B, T, heads], got shape {shape_of(x)}")
    heads = max(g.shape[2], beta.shape[2])
    if heads % k.shape[2]:
        raise ValueError(
            f"g and beta must have a multiple of k's heads, {k.shape[2]}, got {heads}; choose counts that divide"
        )
    sizes = Shapes(k.shape[0], k.shape[1], k.shape[2], heads, k.shape[3], k.shape[3])
    check_decay("g", g, sizes, k)
    check_gate("beta", beta, sizes, k)
    return heads


def check_center(center: Tensor | float, k: Tensor, heads: int) -> Tensor:
    """The centre as a tensor [heads] on the keys' device."""
    if not isinstance(center, Tensor):
        center = torch.tensor(check_number("center", center), device=k.device, dtype=compute_dtype(k))
    check_tensor("center", center, k)
    if center.ndim == 0:
        return center.expand(heads)
    if center.ndim != 1 or center.shape[0] not in (heads, k.shape[2]):
        raise ValueError(f"center must be a number or of shape [{heads}], one a head, got shape {shape_of(center)}")
    return center if center.shape[0] == heads else center.repeat_interleave(heads // center.shape[0])


def check_squash(bound: float, eps: float) -> None:
    check_number("bound", bound, low=1, high=2)
    check_number("eps", eps, above=0)


def check_ridge(ridge: Tensor | float, k: Tensor, heads: int) -> Tensor | float:
    """The ridge as a positive number, or a tensor that broadcasts against [B, T, heads, K]."""
    if not isinstance(ridge, Tensor):
        return check_number("ridge", ridge, above=0)
    check_tensor("ridge", ridge, k)
    allowed = [(n,) for n in (heads, k.shape[2])] + [(n, k.shape[3]) for n in (heads, k.shape[2])]
    if ridge.ndim and tuple(ridge.shape) not in allowed:
        raise ValueError(f"ridge must be a number, [{heads}] or [{heads}, {k.shape[3]}], got shape {shape_of(ridge)}")
    if values_can_be_read(ridge) and (ridge <= 0).any():
        raise ValueError(f"ridge must be positive, got {ridge.min().item():.4g} at its smallest; pass softplus(...)")
    ridge = ridge.to(compute_dtype(k))
    if ridge.ndim == 0:
        return ridge
    ridge = ridge.repeat_interleave(heads // ridge.shape[0], 0)
    return ridge[:, None] if ridge.ndim == 1 else ridge


def _key_gram(
    op: str,
    k: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor | None,
    output_final_state: bool,
    cu_seqlens: Tensor | None,
    backend: str,
) -> tuple[Tensor, Tensor | None]:
    """A_t after every token [B, T, H, K] and the last A [N, H, K] or None, both in the dtype of the computation."""
    check_flag("output_final_state", output_final_state)
    sequences = check_cu_seqlens(cu_seqlens, k.shape[0], k.shape[1])
    heads = max(g.shape[2], beta.shape[2])
    dtype = compute_dtype(k)
    return run(
        select_backend(op, backend, IMPLEMENTATIONS, k),
        tokens={"k": k, "g": g, "beta": beta},
        states=check_states(initial_state, {"A": (sequences.count, heads, k.shape[3])}, k, dtype),
        sequences=sequences,
        heads=heads,
        columns=("k", "A"),
        local=(),
        out_dtype=dtype,
        output_final_state=output_final_state,
    )
