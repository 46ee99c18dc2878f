"""Kernels of what stands around RWKV-7's memory while it decodes, without gradients: one token per sequence.

token_mix:    x + mix (before - x), for one mix per stream and channel
erase_keys:   kappa = unit(erase * k), a = -kappa, b = rate * kappa, and k (1 + share (rate - 1))
read_answers: (norm(o) + (q . rho k) v) gate, with mean and variance of each head
"""

# mypy: disable-error-code="assignment"
# (the tuple begins empty)

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ..common.call import padded
from ..common.overlap import wait_for_inputs
from ..runtime.launch_plan import launch

CHANNELS = 256  # of a program


@triton.jit(do_not_specialize=["rows"])
def token_mix_kernel(
    x, before, mix, streams, last, rows, S: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, OVERLAP: tl.constexpr
):
    """streams [S, rows, D]. before, last [rows, D]: None without; last may be before."""
    BLOCKS: tl.constexpr = (D + BD - 1) // BD
    row = (tl.program_id(0) // BLOCKS).to(tl.int64)
    channel = tl.program_id(0) % BLOCKS * BD + tl.arange(0, BD)
    here = channel < D
    at = row * D + channel
    parts = ()  # all are read before the first stream is stored, past which no load moves
    for i in tl.static_range(S):
        parts = parts + (tl.load(mix + i * D + channel, here, 0.0).to(tl.float32),)
    wait_for_inputs(OVERLAP)
    number = tl.load(x + at, here, 0.0)
    change = -number.to(tl.float32)
    if before is not None:
        change += tl.load(before + at, here, 0.0).to(tl.float32)
    for i in tl.static_range(S):
        y = number.to(tl.float32) + parts[i] * change
        tl.store(streams + i * rows.to(tl.int64) * D + at, y.to(streams.dtype.element_ty), here)
    if last is not None:
        tl.store(last + at, number, here)


@triton.jit
def erase_keys_kernel(
    k, rate, erase, share, a, b, new_k, eps: tl.constexpr, H: tl.constexpr, K: tl.constexpr, BK: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """A program has one token and head of k, rate [N, H, K]; erase, share [H, K]."""
    place, channel = tl.program_id(0).to(tl.int64), tl.arange(0, BK)
    here = channel < K
    at, of_head = place * K + channel, place % H * K + channel
    erased, changed = tl.load(erase + of_head, here, 0.0), tl.load(share + of_head, here, 0.0)
    wait_for_inputs(OVERLAP)
    key, part = tl.load(k + at, here, 0.0).to(tl.float32), tl.load(rate + at, here, 0.0).to(tl.float32)
    kappa = key * erased.to(tl.float32)
    length = tl.sqrt(tl.sum(kappa * kappa, 0))
    kappa /= tl.where(length < eps, eps, length)  # a NaN stays one
    tl.store(a + at, (-kappa).to(a.dtype.element_ty), here)
    tl.store(b + at, (kappa * part).to(b.dtype.element_ty), here)
    key *= 1 + changed.to(tl.float32) * (part - 1)
    tl.store(new_k + at, key.to(new_k.dtype.element_ty), here)


@triton.jit(do_not_specialize=["eps"])
def read_answers_kernel(
    o,
    q,
    k,
    v,
    gate,
    rho,
    weight,
    bias,
    y,
    eps,
    H: tl.constexpr,
    K: tl.constexpr,
    BK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """A program has one token and head of o, q, k, v, gate [N, H, K]; rho, weight, bias [H, K]."""
    place, channel = tl.program_id(0).to(tl.int64), tl.arange(0, BK)
    here = channel < K
    at, of_head = place * K + channel, place % H * K + channel
    scale, shift = tl.load(weight + of_head, here, 0.0), tl.load(bias + of_head, here, 0.0)
    factor = tl.load(rho + of_head, here, 0.0)
    wait_for_inputs(OVERLAP)
    answer = tl.load(o + at, here, 0.0).to(tl.float32)
    moved = tl.where(here, answer - tl.sum(answer, 0) / K, 0.0)
    answer = moved * tl.rsqrt(tl.sum(moved * moved, 0) / K + eps)
    answer = answer * scale.to(tl.float32) + shift.to(tl.float32)
    agreement = tl.load(q + at, here, 0.0).to(tl.float32) * tl.load(k + at, here, 0.0).to(tl.float32)
    agreement = tl.sum(agreement * factor.to(tl.float32), 0)
    answer += agreement * tl.load(v + at, here, 0.0).to(tl.float32)
    tl.store(y + at, (answer * tl.load(gate + at, here, 0.0).to(tl.float32)).to(y.dtype.element_ty), here)


def token_mix(
    x: Tensor, before: Tensor | None, mix: Tensor, keep: bool, in_place: bool
) -> tuple[Tensor, Tensor | None]:
    """Streams [S, N, 1, D] and, with keep, the token [N, 1, D] for the next call, in `before` where in_place."""
    rows, _, channels = x.shape
    x = x.contiguous()
    in_place = in_place and before is not None and before.is_contiguous()
    last = (before if in_place else x.new_empty(x.shape)) if keep else None
    streams, tile = x.new_empty(len(mix), *x.shape), min(CHANNELS, padded(channels, 1))
    launch(
        token_mix_kernel, (rows * -(-channels // tile),), x, None if before is None else before.contiguous(), mix.contiguous(),
        streams, last, rows, S=len(mix), D=channels, BD=tile, num_warps=2,
    )  # fmt: skip
    return streams, last


def erase_keys(k: Tensor, rate: Tensor, erase: Tensor, share: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """a, b and the key that is written, of the shape and dtype of k [N, 1, H, K]."""
    a, b, new_k = (k.new_empty(k.shape) for _ in range(3))
    heads, width = k.shape[2:]
    launch(
        erase_keys_kernel, (len(k) * heads,), k.contiguous(), rate.contiguous(), erase.contiguous(), share.contiguous(), a, b,
        new_k, eps=eps, H=heads, K=width, BK=padded(width, 1), num_warps=1,
    )  # fmt: skip
    return a, b, new_k


def read_answers(
    o: Tensor, q: Tensor, k: Tensor, v: Tensor, gate: Tensor, rho: Tensor, weight: Tensor, bias: Tensor, eps: float
) -> Tensor:
    """[N, 1, H K], in the dtype of v, for tensors [N, 1, H, K]."""
    heads, width = o.shape[2:]
    y = v.new_empty(len(v), 1, heads * width)
    launch(
        read_answers_kernel, (len(o) * heads,), *[x.contiguous() for x in (o, q, k, v, gate, rho, weight, bias)], y, eps,
        H=heads, K=width, BK=padded(width, 1), num_warps=1,
    )  # fmt: skip
    return y
