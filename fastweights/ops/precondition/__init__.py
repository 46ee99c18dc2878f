"""Diagonal preconditioners: write keys and queries scaled by the running energy of every key channel."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from ..framework import roles
from ..framework.call import (
    Arguments,
    Results,
    call,
    chunkwise,
    composed,
    defer_decode,
    defer_family,
    expand_heads,
    kernels,
    op,
    recurrent,
    run,
    sequential,
)
from ..framework.checks import compute_dtype
from ..framework.passing import Passing, Sum
from ..framework.spec import Case, Choice, Flag, Number, OpSpec, Output, State
from .forms import chunked, reference

__all__ = ["precondition_keys", "precondition_queries"]

GATES = {"g": roles.LOG_DECAY, "beta": roles.GAIN}
STATES = {"A": State("GK", by_column=True)}
PASSING = Passing(states={"A": Sum(x="k", y="k", gain="beta", decay="g", diagonal=True)})
KERNELS = defer_family(
    "chunk.memory", "PRECONDITIONER", "PreconditionerInputs", squash="softsign", bound=1.5, eps=1e-6, ridge=0.1
)
BOUNDED = {"bound": Number(low=1, high=2), "eps": Number(above=0)}
# What squashes the distance of log A from its centre into (-1, 1); "none" is another form of the write key.
SQUASHES = {"softsign": lambda r: r / (1 + r.abs()), "tanh": torch.tanh}
KEY_GRAM = OpSpec(
    name="key_gram",
    inputs={"k": replace(roles.KEY, reaches="column"), **GATES},
    states=STATES,
    outputs={"gram": Output("GK")},
    options={"before": Flag()},
    backends={"reference": sequential(reference), "torch": chunkwise(chunked)},
)


def sum_key_energy(
    k: Tensor, g: Tensor, beta: Tensor, A: Tensor | None, final: bool, cu_seqlens: Tensor | None, backend: str,
    before: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """A after every token, or before it, [B, T, G, K] and the last A [N, G, K], both in the dtype of the computation."""
    inputs = {"k": k.to(compute_dtype(k)), "g": g, "beta": beta}
    (gram,), (A,) = run(KEY_GRAM, Arguments(inputs, {"A": A}, {"before": before}, cu_seqlens, final, backend))
    return gram, A


def scale_keys(
    k: Tensor, g: Tensor, beta: Tensor, center: Tensor, A: Tensor | None, *, bound: float, eps: float, squash: str,
    ridge: float, output_final_state: bool, cu_seqlens: Tensor | None, backend: str,
) -> Results:  # fmt: skip
    gram, A = sum_key_energy(k, g, beta, A, output_final_state, cu_seqlens, backend, before=squash == "none")
    key = expand_heads(k, gram.shape[2]).to(gram.dtype)
    if squash == "none":
        direction = key / (gram + ridge)
        write_key = direction / (1 + (direction * key).sum(-1, keepdim=True))
    else:
        distance = (gram + eps).log() - center[:, None]
        write_key = torch.exp(-math.log(bound) * SQUASHES[squash](distance)) * key
    return write_key.to(k.dtype), (A,)


def scale_queries(
    q: Tensor, k: Tensor, g: Tensor, beta: Tensor, ridge: Tensor, A: Tensor | None, *,
    output_final_state: bool, cu_seqlens: Tensor | None, backend: str,
) -> Results:  # fmt: skip
    gram, A = sum_key_energy(k, g, beta, A, output_final_state, cu_seqlens, backend)
    q = q.masked_fill(~q.isfinite(), math.nan)
    return (expand_heads(q, gram.shape[2]).to(gram.dtype) / (gram + ridge)).to(q.dtype), (A,)


def gram_macs(K: int, V: int, C: int = 64) -> float:
    return C * K / 2


KEYS_SPEC = OpSpec(
    name="precondition_keys",
    inputs={"k": roles.KEY, **GATES, "center": roles.CENTER},
    states=STATES,
    outputs={"write_key": Output("GK")},
    options={**BOUNDED, "squash": Choice((*SQUASHES, "none")), "ridge": Number(above=0)},
    backends={"reference": composed(scale_keys), "torch": composed(scale_keys), "triton": kernels(KERNELS)},
    recurrent=recurrent(defer_decode("key_energy", "decode_keys")),
    cases={
        "": Case(),
        "tanh": Case(options={"squash": "tanh", "bound": 1.8}),
        "unstable": Case(options={"squash": "none", "ridge": 0.5}),
    },
    equation="A = a A + beta k^2; r = log(A + eps) - center; w = bound^(-r / (1 + |r|)) k",
    macs=gram_macs,
    passing=PASSING,
)
QUERIES_SPEC = OpSpec(
    name="precondition_queries",
    inputs={"q": roles.QUERY, "k": roles.KEY, **GATES, "ridge": roles.CHANNEL_RIDGE},
    states=STATES,
    outputs={"q_tilde": Output("GK")},
    backends={"reference": composed(scale_queries), "torch": composed(scale_queries), "triton": kernels(KERNELS)},
    recurrent=recurrent(defer_decode("key_energy", "decode_queries"), numbers=("ridge",)),
    cases={"": Case()},
    equation="A = a A + beta k^2; q~ = q / (A + ridge)",
    macs=gram_macs,
    passing=PASSING,
)


@op(KEYS_SPEC)
def precondition_keys(
    k: Tensor,
    g: Tensor,
    beta: Tensor,
    center: Tensor | float,
    *,
    bound: float = 1.5,
    eps: float = 1e-6,
    squash: str = "softsign",
    ridge: float = 0.1,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    backend: str = "auto",
) -> tuple[Tensor, Tensor | None]:
    r"""Write keys of Preconditioned DeltaNet: key channels of low energy are written more strongly, those of high energy less.

    $$A_t = e^{g_t} A_{t-1} + \beta_t k_t^2, \qquad r = \log(A_t + \mathrm{eps}) - c, \qquad
      w_t = x^{-r/(1+|r|)}\, k_t$$

    elementwise over the K channels, so that every factor lies in [1/x, x], x = bound. Source: Preconditioned DeltaNet,
    sections 3 and 4 (with the free centre of the authors' released code in place of the text's positive one).

    The paper compares two other forms with it (appendix E.3). Squash "tanh" has tanh(r) in place of r / (1 + |r|). Squash
    "none" is the "unstable" preconditioner of its theory (section 3.1), which divides by the A of the token before:

    $$p_t = k_t / (A_{t-1} + \mathrm{ridge}), \qquad w_t = p_t / (1 + k_t \cdot p_t)$$

    Args:
        k: [B, T, H, K], K up to 256, float16, bfloat16, float32 or float64.
        g: log decay of A (natural logarithm, at most 0), [B, T, H]. Any float dtype. g and beta may have a multiple of the
            heads of k, as for value heads that share a key. The result then has that number of heads in place of H.
        beta: gain of A, at least 0 (not checked), [B, T, H]. Any float dtype.
        center: c, a number or a tensor [H], free in sign.
        bound: x in [1, 2]. 1 leaves the keys as they are. Up to 2 the eigenvalues of every single step of the delta rule have
            modulus at most 1, for beta <= 1 and unit keys. Products of several steps may still grow.
        eps: positive number under the logarithm.
        squash: "softsign", r / (1 + |r|), "tanh" or "none". "none" reads neither center, bound nor eps.
        ridge: positive number added to A; read by squash "none" alone.
        initial_state: A before the first token, [N, H, K]; zeros when None. N is B, or the number of packed sequences.
        output_final_state: whether to return A after the last token.
        cu_seqlens: int32 or int64 [N+1], cumulative lengths of sequences packed into one row (B = 1).
        backend: "reference" (loop over tokens), "torch" (chunkwise, exact), "triton" (kernels; not in float64) or "auto":
            kernels on CUDA where triton is installed, else the chunkwise form.

    Returns:
        write_key [B, T, H, K] in k's dtype, and A [N, H, K] in float32 (float64 for float64 inputs) or None.

    Raises:
        ValueError: a shape, dtype, device, bound, eps, squash, ridge, positive g, cu_seqlens or backend that does not fit;
            the message says which.
        TypeError: an argument of the wrong kind.
    """
    options = {"bound": bound, "eps": eps, "squash": squash, "ridge": ridge}
    return call(KEYS_SPEC, (k, g, beta, center), options, initial_state, output_final_state, cu_seqlens, backend)


@op(QUERIES_SPEC)
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

    elementwise over the K channels. It approximates the inverse of the key Gram matrix, which solves the regression exactly, by
    the inverse of its diagonal (Preconditioned DeltaNet, section 3: preconditioning at query time).

    Args:
        q, k: [B, T, H, K], K up to 256, float16, bfloat16, float32 or float64.
        g: log decay of A (natural logarithm, at most 0), [B, T, H]. Any float dtype. g and beta may have a multiple of
            the q/k heads, as for value heads that share a query. The result then has that number of heads in place of H.
        beta: gain of A, at least 0 (not checked), [B, T, H]. Any float dtype.
        ridge: a positive number, or a positive tensor [H] or [H, K].
        initial_state, output_final_state, cu_seqlens, backend: as for `precondition_keys`.

    Returns:
        q_tilde [B, T, H, K] in q's dtype, and A [N, H, K] in float32 (float64 for float64 inputs) or None.

    Raises:
        ValueError: a shape, dtype, device, ridge, positive g, cu_seqlens or backend that does not fit; the message says which.
        TypeError: an argument of the wrong kind.
    """
    return call(QUERIES_SPEC, (q, k, g, beta, ridge), {}, initial_state, output_final_state, cu_seqlens, backend)
