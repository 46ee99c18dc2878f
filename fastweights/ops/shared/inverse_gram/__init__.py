"""The inverse of a (fading) Gram matrix at every token: what `recursive_least_squares` and `variational_linear_attention`
share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ...delta_rule import delta_macs
from ...framework import roles
from ...framework.call import Arguments, choose_backend, chunkwise, defer_family, kernels, sequential
from ...framework.passing import Sum
from ...framework.spec import Number, OpSpec, Output, Role, State
from .forms import CHUNK, chunked, reference
from .regularization import allowance, diagonal, inverse

__all__ = ["WIDEST", "InverseSum", "apply_inverse_gram", "exact_macs"]

WIDEST = 128  # channels of the kernels, whose programs hold a matrix in registers


def exact_macs(K: int, V: int) -> float:
    """With the delta rule that writes along the solutions."""
    return delta_macs(K, V) + 7 * K**2 + 8 * CHUNK * K + K**3 / CHUNK


SPEC = OpSpec(
    name="inverse_gram",
    inputs={
        "u": roles.KEY,
        "b": roles.optional(replace(roles.KEY, reaches="token")),
        "gain": roles.optional(roles.POSITIVE_GAIN),
        "g": roles.optional(roles.LOG_DECAY),
        "refresh": roles.optional(Role(kind="constant", dims=("1",))),
    },
    states={"G": State("GKK")},
    outputs={"y": Output("GK")},
    options={"ridge": Number(above=0)},
    backends={
        "reference": sequential(reference),
        "torch": chunkwise(chunked),
        "triton": kernels(defer_family("inverse_gram.rule", "INVERSE_GRAM", "GramInputs", ridge=1.0), widest=WIDEST),
    },
)


@dataclass(frozen=True, kw_only=True)
class InverseSum(Sum):
    """A state that is the inverse of a sum, which begins as ridge I. The sum is in float64: its inverse is large where it holds
    small rests of large numbers."""

    dtype: torch.dtype | None = torch.float64

    def begin(self, shape: Sequence[int], state: Tensor | None, like: Tensor, options: Mapping[str, Any]) -> Tensor:
        if state is None:
            return diagonal(like.new_full(shape[:-2], options["ridge"]), like)
        return invert_state(state)

    def state_of(self, total: Tensor, options: Mapping[str, Any]) -> Tensor:
        return inverse(total, allowance(total, options["ridge"]))


REFRESHED_SPEC = OpSpec(
    name="refreshed_inverse_gram",
    inputs={name: SPEC.inputs[name] for name in ("u", "b", "refresh")},
    states={"A": State("GKK")},
    outputs=SPEC.outputs,
    backends={"triton": kernels(defer_family("inverse_gram.rule", "REFRESHED", "RefreshInputs"), widest=WIDEST)},
)


def invert_state(state: Tensor) -> Tensor:
    """G, in float64, of A as it is kept between calls, in float32 or float64."""
    A = 0.5 * (state + state.mT).double()
    return inverse(A, torch.finfo(state.dtype).eps * torch.linalg.matrix_norm(A.detach()))


def apply_inverse_gram(
    u: Tensor,
    b: Tensor | None = None,
    gain: Tensor | None = None,
    g: Tensor | None = None,
    refresh: Tensor | None = None,
    *,
    ridge: float,
    initial_state: Tensor | None,
    heads: int,
    dtype: torch.dtype,
    final: bool,
    cu_seqlens: Tensor | None,
    backend: str,
) -> tuple[Tensor, Tensor | None]:
    r"""$A_t b_t$ for every token, or without b $\mathrm{gain}_t A_t u_t$, where

    $$A_t = (e^{g_t} A_{t-1}^{-1} + \mathrm{gain}_t\, u_t u_t^\top)^{-1} + \mathrm{refresh}_t I$$

    All in float64 inside: A is large in directions where $G = A^{-1}$, which is carried, holds small rests of large sums. The
    kernels compute in float32, which is enough without decay: where G only grows, or where a refresh forgets old errors with old
    tokens. A decay is left to PyTorch.

    Args:
        u, b: [B, T, h, K]; h divides the heads.
        gain, g: [B, T, h or heads]; gain at least 0, 1 when None. refresh: [B, T, 1], at least 0, a constant.
        final: whether A after the last token is wanted.
        ridge: the prior that regularization.py refers to.
        initial_state: A before the first token, symmetric positive definite, [N, heads, K, K]; I / ridge when None.
        dtype: of A between calls and of the result.

    Returns:
        [B, T, heads, K], from kernels of 16-bit u without b in the dtype of u, and A or None.
    """
    count, key = len(u) if cu_seqlens is None else len(cu_seqlens) - 1, u.shape[3]
    if backend in ("auto", "triton"):
        backend = "torch" if g is not None else choose_backend(SPEC, backend, u, {}, key)
    if refresh is not None and backend == "triton":
        assert b is not None and gain is None
        if initial_state is None:
            A_0 = (torch.eye(key, device=u.device) / ridge).expand(count, heads, -1, -1)
        else:
            A_0 = 0.5 * (initial_state + initial_state.mT)
        given = {"u": u, "b": b, "refresh": refresh.float()}
        arguments = Arguments(given, {"A": A_0}, {}, cu_seqlens, final, backend)
        (y,), (A,) = REFRESHED_SPEC.backends[backend].run(arguments)
        return y, A
    if initial_state is None:
        identity = torch.eye(key, dtype=torch.float64, device=u.device)
        G_0 = ridge * identity.expand(count, heads, -1, -1)
    else:
        G_0 = invert_state(initial_state)
    tokens = {"u": u, "b": b, "gain": gain, "g": g, "refresh": refresh}
    if backend != "triton":
        tokens = {name: None if x is None else x.double() for name, x in tokens.items()}
    arguments = Arguments(tokens, {"G": G_0}, {"ridge": ridge}, cu_seqlens, final, backend)
    (y,), (G,) = SPEC.backends[backend].run(arguments)
    y = y if backend == "triton" else y.to(dtype)
    return y, inverse(G, allowance(G, ridge, dtype)).to(dtype) if final else None
