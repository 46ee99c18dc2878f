"""Decoding: a few tokens a sequence, the state updated in place. A new state for every token would cost its memory twice."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..kernels.availability import takes_kernels
from .delta_rule import delta_rule
from .delta_rule.api import check_delta
from .framework.checks import (
    Shapes,
    check_decay,
    check_gate,
    check_number,
    check_qkv,
    check_scale,
    check_tensor,
    shape_of,
)
from .framework.run import BACKENDS, compute_dtype
from .framework.sequences import check_cu_seqlens
from .linear_attention import linear_attention
from .precondition.api import check_center, check_squash
from .preconditioned_delta_rule import preconditioned_delta_rule

__all__ = ["delta_rule_", "linear_attention_", "preconditioned_delta_rule_"]

MOST_TOKENS = 16


def linear_attention_(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    *,
    scale: float | None = None,
    state: Tensor,
    cu_seqlens: Tensor | None = None,
    backend: str = "auto",
) -> Tensor:
    r"""Read at most 16 tokens with `linear_attention` and update the state in place, without gradients.

    $$S_t = \mathrm{Diag}(a_t)\, S_{t-1} + k_t v_t^\top, \qquad o_t = S_t^\top (\mathrm{scale}\; q_t), \qquad a_t = e^{g_t}$$

    Args:
        q, k, v, g, scale: as for `linear_attention`: [B, T, ...] with T at most 16.
        state: S [N, HV, K, V], float32 (float64 for float64 inputs); after the call it holds S after the last token. A
            sequence of length 0 keeps its own.
        cu_seqlens: int32 or int64 [N+1], cumulative lengths, at most 16 each, of sequences packed into one row (B = 1). On a
            GPU its numbers are not checked, which would wait for the device.
        backend: "triton" (one kernel), "torch" or "reference" (those of `linear_attention`), or "auto": the kernel on CUDA
            for all but float64.

    Returns:
        o [B, T, HV, V] in v's dtype.

    Raises:
        ValueError: more than 16 tokens; an input or a state that requires a gradient outside torch.no_grad(); a shape, dtype,
            device, positive g, cu_seqlens or backend that does not fit.
        TypeError: an argument of the wrong kind.
    """
    sizes = check_qkv(q, k, v)
    check_decay("g", g, sizes, v, per_channel=True)
    scale = check_scale(scale, sizes.key)
    count = _check_lengths("linear_attention", cu_seqlens, sizes)
    _check_state("state", state, (count, sizes.heads, sizes.key, sizes.value), v)
    _check_no_gradient("linear_attention", q=q, k=k, v=v, g=g, state=state)
    if _kernel_serves(backend, v):
        from ..kernels.recurrent.decode import decode

        return decode(q, k, v, g=g, state=state, scale=scale, cu_seqlens=_beside(cu_seqlens, v))
    return _overwrite((state,), linear_attention, q, k, v, g, scale=scale, cu_seqlens=cu_seqlens, backend=backend)


def delta_rule_(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    g: Tensor | None = None,
    *,
    write_key: Tensor | None = None,
    scale: float | None = None,
    state: Tensor,
    cu_seqlens: Tensor | None = None,
    backend: str = "auto",
) -> Tensor:
    r"""Read at most 16 tokens with `delta_rule` and update the state in place, without gradients.

    $$S' = \mathrm{Diag}(a_t)\, S_{t-1}, \qquad S_t = S' + \beta_t\, w_t (v_t - S'^\top k_t)^\top, \qquad
      o_t = S_t^\top (\mathrm{scale}\; q_t), \qquad a_t = e^{g_t}$$

    Args:
        q, k, v, beta, g, write_key, scale: as for `delta_rule`: [B, T, ...] with T at most 16.
        state, cu_seqlens, backend: as for `linear_attention_`.

    Returns:
        o [B, T, HV, V] in v's dtype.

    Raises:
        ValueError: more than 16 tokens; an input or a state that requires a gradient outside torch.no_grad(); a shape, dtype,
            device, positive g, cu_seqlens or backend that does not fit.
        TypeError: an argument of the wrong kind.
    """
    sizes = check_delta(q, k, v, beta, g, write_key)
    scale = check_scale(scale, sizes.key)
    count = _check_lengths("delta_rule", cu_seqlens, sizes)
    _check_state("state", state, (count, sizes.heads, sizes.key, sizes.value), v)
    _check_no_gradient("delta_rule", q=q, k=k, v=v, beta=beta, g=g, write_key=write_key, state=state)
    if _kernel_serves(backend, v):
        from ..kernels.recurrent.decode import decode

        return decode(
            q, k, v, beta=beta, g=g, write_key=write_key, state=state, scale=scale, cu_seqlens=_beside(cu_seqlens, v)
        )
    return _overwrite(
        (state,), delta_rule, q, k, v, beta, g, write_key=write_key, scale=scale, cu_seqlens=cu_seqlens, backend=backend
    )


def preconditioned_delta_rule_(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    g: Tensor | None = None,
    *,
    precond_g: Tensor,
    precond_beta: Tensor,
    center: Tensor | float,
    bound: float = 1.5,
    eps: float = 1e-6,
    scale: float | None = None,
    state: tuple[Tensor, Tensor],
    cu_seqlens: Tensor | None = None,
    backend: str = "auto",
) -> Tensor:
    r"""Read at most 16 tokens with `preconditioned_delta_rule` and update both states in place, without gradients.

    $$A_t = e^{g^P_t} A_{t-1} + \beta^P_t k_t^2, \qquad w_t = x^{-r/(1+|r|)} k_t, \quad r = \log(A_t + \mathrm{eps}) - c$$
    $$S_t = S' + \beta_t w_t (v_t - S'^\top k_t)^\top, \quad S' = \mathrm{Diag}(e^{g_t}) S_{t-1}, \qquad
      o_t = S_t^\top (\mathrm{scale}\; q_t)$$

    Args:
        q, k, v, beta, g, precond_g, precond_beta, center, bound, eps, scale: as for `preconditioned_delta_rule`: [B, T, ...]
            with T at most 16.
        state: (S [N, HV, K, V], A [N, HV, K]), otherwise as for `linear_attention_`.
        cu_seqlens, backend: as for `linear_attention_`.

    Returns:
        o [B, T, HV, V] in v's dtype.

    Raises:
        ValueError: more than 16 tokens; an input or a state that requires a gradient outside torch.no_grad(); a shape, dtype,
            device, positive g, bound, cu_seqlens or backend that does not fit.
        TypeError: an argument of the wrong kind.
    """
    sizes = check_delta(q, k, v, beta, g)
    check_decay("precond_g", precond_g, sizes, v)
    check_gate("precond_beta", precond_beta, sizes, v)
    center_of_head = _center(center, k, sizes)
    check_squash(bound, eps)
    scale = check_scale(scale, sizes.key)
    count = _check_lengths("preconditioned_delta_rule", cu_seqlens, sizes)
    if not isinstance(state, (tuple, list)) or len(state) != 2:
        raise ValueError("state must be (S, A), the two tensors of preconditioned_delta_rule's final state")
    S, A = state
    _check_state("state S", S, (count, sizes.heads, sizes.key, sizes.value), v)
    _check_state("state A", A, (count, sizes.heads, sizes.key), v)
    _check_no_gradient(
        "preconditioned_delta_rule",
        q=q, k=k, v=v, beta=beta, g=g, precond_g=precond_g, precond_beta=precond_beta,
        center=center_of_head, S=S, A=A,
    )  # fmt: skip
    if _kernel_serves(backend, v):
        from ..kernels.recurrent.decode import Preconditioner, decode

        preconditioner = Preconditioner(A, None, precond_g, precond_beta, center_of_head, bound, eps)
        return decode(
            q, k, v, beta=beta, g=g, state=S, preconditioner=preconditioner, scale=scale,
            cu_seqlens=_beside(cu_seqlens, v),
        )  # fmt: skip
    return _overwrite(
        (S, A), preconditioned_delta_rule, q, k, v, beta, g, precond_g=precond_g, precond_beta=precond_beta,
        center=center, bound=bound, eps=eps, scale=scale, cu_seqlens=cu_seqlens, backend=backend,
    )  # fmt: skip


def _overwrite(states: Sequence[Tensor], op: Callable[..., Any], *inputs: Tensor | None, **keywords: Any) -> Tensor:
    """The op, its final states copied into `states`."""
    initial = states[0] if len(states) == 1 else tuple(states)
    with torch.no_grad():
        o, final = op(*inputs, initial_state=initial, output_final_state=True, **keywords)
        for state, new in zip(states, final if len(states) > 1 else (final,)):
            state.copy_(new)
    return o


def _kernel_serves(backend: str, x: Tensor) -> bool:
    if backend not in BACKENDS:
        raise ValueError(f"backend must be one of {', '.join(BACKENDS)}, got {backend!r}")
    return backend != "reference" and takes_kernels(backend, x)


def _check_lengths(op: str, cu_seqlens: Tensor | None, sizes: Shapes) -> int:
    """The number of sequences, none of them longer than what is walked token by token."""
    sequences = check_cu_seqlens(cu_seqlens, sizes.batch, sizes.time, wait=False)
    if cu_seqlens is not None and sequences.lengths is None:
        longest = -(-sizes.time // sequences.count)  # at least
    else:
        longest = max(sequences.lengths or (sizes.time,))
    if longest > MOST_TOKENS:
        raise ValueError(f"T must be at most {MOST_TOKENS} tokens a sequence, got {longest}; use {op} for more")
    return sequences.count


def _check_state(name: str, state: Tensor, shape: tuple[int, ...], like: Tensor) -> None:
    check_tensor(name, state, like)
    if tuple(state.shape) != shape:
        raise ValueError(f"{name} must have shape {list(shape)}, got {shape_of(state)}")
    dtype = compute_dtype(like)
    if state.dtype != dtype:
        raise ValueError(f"{name} must be {dtype} for {like.dtype} inputs, got {state.dtype}; convert it")


def _check_no_gradient(op: str, **tensors: Tensor | None) -> None:
    if not torch.is_grad_enabled():
        return
    for name, x in tensors.items():
        if x is not None and x.requires_grad:
            raise ValueError(
                f"{name} must not require a gradient, as the state is overwritten; call under torch.no_grad() or use {op}"
            )


def _center(center: Tensor | float, k: Tensor, sizes: Shapes) -> Tensor:
    """The centre as a tensor [1], [H] or [HV], without waiting for the device."""
    if not isinstance(center, Tensor):
        return k.new_full((1,), check_number("center", center), dtype=compute_dtype(k))
    if center.ndim == 1 and len(center) in (sizes.key_heads, sizes.heads):
        check_tensor("center", center, k)
        return center
    return check_center(center, k, sizes.heads)


def _beside(cu_seqlens: Tensor | None, x: Tensor) -> Tensor | None:
    return None if cu_seqlens is None else cu_seqlens.to(x.device, non_blocking=True)
