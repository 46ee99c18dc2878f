"""Palimpsa: a memory that holds for each association how sure it is of it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..framework.checks import (
    Shapes,
    check_decay,
    check_flag,
    check_gate,
    check_nonnegative,
    check_number,
    check_qkv,
    check_scale,
    check_states,
    check_tensor,
    shape_of,
    values_can_be_read,
)
from ..framework.run import chunkwise, compute_dtype, per_sequence, run, select_backend
from ..framework.sequences import check_cu_seqlens
from .chunked import chunked
from .reference import reference

__all__ = ["palimpsa", "palimpsa_posterior"]

IMPLEMENTATIONS = {"reference": per_sequence(reference), "torch": chunkwise(chunked)}


def palimpsa(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    g: Tensor,
    *,
    prior: Tensor | float = 1.0,
    scale: float | None = None,
    initial_state: tuple[Tensor, Tensor] | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    backend: str = "auto",
) -> tuple[Tensor, tuple[Tensor, Tensor] | None]:
    r"""Read from the mean of an elementwise Gaussian posterior over the memory.

    $$M_t = a_t M_{t-1} + k_t v_t^\top, \qquad J_t = a_t J_{t-1} + k_t^2 \beta_t^\top, \qquad
      o_t = \Big(\frac{M_t}{J_t + p}\Big)^\top (\mathrm{scale}\; q_t), \qquad a_t = e^{g_t}$$

    The importance I = J + p is the precision of each memory element: what many keys have written to is rewritten slowly,
    what none has touched learns at once, and decay lets importance fall back to the prior p. In the paper's letters
    (Palimpsa, eq. 28 and 29) M = I mu and v = beta * v there: v are the write values, already multiplied by beta (or by
    what the layer puts in its place). beta = 0 is gated linear attention divided by p.

    Args:
        q, k: [B, T, H, K], K up to 256, float16, bfloat16, float32 or float64.
        v: write values [B, T, HV, V] of the same dtype, V up to 256, HV a multiple of H: each q/k head serves HV/H value
            heads in a row.
        beta: gain of the importance, at least 0, [B, T, HV, V] (or H heads, repeated likewise). Any float dtype.
        g: log decay (natural logarithm, at most 0; -inf forgets everything), [B, T, HV] or [B, T, H]. Any float dtype.
            1 / (1 - exp(g)) is the memory window in tokens.
        prior: p, importance before any key, a positive number or a positive tensor [HV] or [H].
        scale: factor on q, K^-0.5 by default.
        initial_state: (M, J) before the first token, each [N, HV, K, V], J at least 0; zeros when None. N is B, or the
            number of packed sequences.
        output_final_state: whether to return (M, J) after the last token.
        cu_seqlens: int32 or int64 [N+1], cumulative lengths of sequences packed into one row (B = 1).
        backend: "reference" (loop over tokens), "torch" (chunkwise, exact) or "auto".

    Returns:
        o [B, T, HV, V] in v's dtype, and (M, J) in float32 (float64 for float64 inputs) or None.

    Raises:
        ValueError: a shape, dtype, device, positive g, negative beta, prior, cu_seqlens or backend that does not fit.
        TypeError: an argument of the wrong kind.
    """
    return _posterior(
        "palimpsa", q, k, v, beta, g, prior, scale, initial_state, output_final_state, cu_seqlens, backend,
        variance=False,
    )  # fmt: skip


def palimpsa_posterior(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    g: Tensor,
    *,
    prior: Tensor | float = 1.0,
    scale: float | None = None,
    initial_state: tuple[Tensor, Tensor] | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    backend: str = "auto",
) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor] | None]:
    r"""`palimpsa` with the variance of what it reads.

    $$\mathrm{variance}_t = \Big(\frac{1}{J_t + p}\Big)^\top (\mathrm{scale}\; q_t)^2$$

    the variance of S^T (scale q) when the memory S has independent elements of mean M / (J + p) and variance 1 / (J + p),
    without the noise 1 / beta of a value itself. Gradients flow through both.

    Args:
        As for `palimpsa`.

    Returns:
        o [B, T, HV, V] and variance [B, T, HV, V] in v's dtype, and (M, J) or None.

    Raises:
        As `palimpsa`.
    """
    (o, variance), state = _posterior(
        "palimpsa_posterior", q, k, v, beta, g, prior, scale, initial_state, output_final_state, cu_seqlens, backend,
        variance=True,
    )  # fmt: skip
    return o, variance, state


def _posterior(
    op: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    g: Tensor,
    prior: Tensor | float,
    scale: float | None,
    initial_state: tuple[Tensor, Tensor] | None,
    output_final_state: bool,
    cu_seqlens: Tensor | None,
    backend: str,
    *,
    variance: bool,
) -> tuple[Any, Any]:
    """o or (o, variance), and the final state or None."""
    sizes = check_qkv(q, k, v)
    check_gain(beta, sizes, v)
    check_tensor("g", g, v)
    check_decay("g", g, sizes, v)
    scale = check_scale(scale, sizes.key)
    check_flag("output_final_state", output_final_state)
    sequences = check_cu_seqlens(cu_seqlens, sizes.batch, sizes.time)
    shape = (sequences.count, sizes.heads, sizes.key, sizes.value)
    return run(
        select_backend(op, backend, IMPLEMENTATIONS, v),
        tokens={"q": q, "k": k, "v": v, "beta": beta, "g": g},
        states=check_states(initial_state, {"M": shape, "J": shape}, v, compute_dtype(v)),
        sequences=sequences,
        heads=sizes.heads,
        columns=("v", "beta", "M", "J"),
        outputs=("o", "variance") if variance else ("o",),
        reach={"variance": ("k", "beta", "g", "J"), "M": ("k", "v", "g", "M"), "J": ("k", "beta", "g", "J")},
        scale=scale,
        out_dtype=v.dtype,
        output_final_state=output_final_state,
        prior=check_prior(prior, sizes, v),
        variance=variance,
    )


def check_gain(beta: Tensor, sizes: Shapes, like: Tensor) -> None:
    """beta [B, T, heads, V], at least 0: a negative one could make an importance zero."""
    check_gate("beta", beta, sizes, like, sizes.value)
    check_nonnegative("beta", beta, "sigmoid(...) or softplus(...)")


def check_prior(prior: Tensor | float, sizes: Shapes, like: Tensor) -> Tensor:
    """The prior importance as a tensor [v heads] in the dtype of the computation."""
    dtype = compute_dtype(like)
    if not isinstance(prior, Tensor):
        prior = torch.tensor(check_number("prior", prior, above=0), device=like.device, dtype=dtype)
    check_tensor("prior", prior, like)
    if prior.ndim == 0:
        prior = prior.expand(sizes.heads)
    if prior.ndim != 1 or prior.shape[0] not in (sizes.heads, sizes.key_heads):
        raise ValueError(f"prior must be a number or of shape [{sizes.heads}], one a head, got shape {shape_of(prior)}")
    if values_can_be_read(prior) and not ((prior > 0) & prior.isfinite()).all():
        raise ValueError(f"prior must be positive and finite, got {prior.tolist()}; pass softplus(...)")
    return prior.to(dtype).repeat_interleave(sizes.heads // prior.shape[0])
