"""Kernels of what some delta rules compute before they write, without gradients:

gain = f(beta, k.w, exp(g))        read = sigmoid(share) exp(-g) k        q - correction k

The first is the gain of a write from the overlap of the key read with the key written (Longhorn, EFLA, NLMS). The others are the
key whose answer by the decayed memory is a share of the answer by the memory before, and a query moved away from the key (Comba).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..common.call import padded
from ..common.math import sigmoid
from ..common.overlap import wait_for_inputs
from ..runtime.launch_plan import launch

LEAST = tl.constexpr(1e-6)  # of what a gain is divided by


@triton.jit
def expm1(x):
    """exp(x) - 1 for x <= 0"""
    series = x * (1 + x / 2 * (1 + x / 3 * (1 + x / 4 * (1 + x / 5 * (1 + x / 6)))))
    return tl.where(x > -0.1, series, tl.exp(x) - 1)


@triton.jit
def at_least(x, least):
    """x or `least`, NaN where x is NaN."""
    return tl.where(x < least, least, x)


@triton.jit
def load_key(k, token, head, channel, G: tl.constexpr, GROUP: tl.constexpr, K: tl.constexpr):
    """The key [BK] in float32 of a value head, of which GROUP share one."""
    at = (token * (G // GROUP) + head // GROUP) * K + channel
    return tl.load(k + at, channel < K, 0.0).to(tl.float32)


@triton.jit
def write_gain_kernel(
    beta, k, w, g, gain, FORM: tl.constexpr, G: tl.constexpr, K_GROUP: tl.constexpr, W_GROUP: tl.constexpr, K: tl.constexpr,
    BK: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """A program has one token and value head of beta, g [BT, G]; k, w [BT, G / GROUP, K]."""
    wait_for_inputs(OVERLAP)
    place = tl.program_id(0).to(tl.int64)
    token, head = place // G, place % G
    channel = tl.arange(0, BK)
    key = load_key(k, token, head, channel, G, K_GROUP, K)
    m = tl.sum(key * load_key(w, token, head, channel, G, W_GROUP, K), 0)
    b = tl.load(beta + place).to(tl.float32)
    if FORM == "longhorn":
        y = b / (1 + b * m)
    elif FORM == "fading":
        a = 1.0
        if g is not None:
            a = tl.exp(tl.load(g + place).to(tl.float32))
        y = b / at_least(a + b * m, LEAST)
    elif FORM == "unit":
        y = b / at_least(m, LEAST)
    elif FORM == "damped":
        y = b / (1 + m)
    elif FORM == "exact":
        m = at_least(m, LEAST)
        y = -expm1(-b * m) / m
    else:
        tl.static_assert(FORM == "nlms")
        y = 1 / at_least(m, LEAST)
    tl.store(gain + place, y)


@triton.jit
def read_keys_kernel(
    k, q, g, share, correction, read, moved, new_g, least, G: tl.constexpr, GROUP: tl.constexpr, K: tl.constexpr,
    BK: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """A program has one token and value head. least: of the log decay. moved: the queries, None to leave them."""
    wait_for_inputs(OVERLAP)
    place = tl.program_id(0).to(tl.int64)
    token, head = place // G, place % G
    channel = tl.arange(0, BK)
    here = channel < K
    key = load_key(k, token, head, channel, G, GROUP, K)
    if moved is not None:  # of one value head of those that share it
        first = here & (head % GROUP == 0)
        at = (token * (G // GROUP) + head // GROUP) * K + channel
        query = tl.load(q + at, first, 0.0).to(tl.float32)
        query -= tl.load(correction + head // GROUP).to(tl.float32) * key
        tl.store(moved + at, query.to(moved.dtype.element_ty), first)
    if read is not None:
        factor = 1.0
        if share is not None:
            factor = sigmoid(tl.load(share + head).to(tl.float32))
        if g is not None:
            decay = at_least(tl.load(g + place).to(tl.float32), least)
            factor *= tl.exp(-decay)
            tl.store(new_g + place, decay)
        tl.store(read + place * K + channel, (key * factor).to(read.dtype.element_ty), here)


def write_gain(beta: Tensor, k: Tensor, w: Tensor, g: Tensor | None, form: str) -> Tensor:
    """The gains [B, T, G] in float32; nothing is checked."""
    heads, width = beta.shape[2], k.shape[3]
    gain = torch.empty_like(beta, dtype=torch.float32, memory_format=torch.contiguous_format)
    if gain.numel():
        launch(
            write_gain_kernel, (gain.numel(),), beta.contiguous(), k.contiguous(), w.contiguous(),
            None if g is None else g.contiguous(), gain, FORM=form, G=heads, K_GROUP=heads // k.shape[2],
            W_GROUP=heads // w.shape[2], K=width, BK=padded(width, 1), num_warps=1,
        )  # fmt: skip
    return gain


def read_keys(
    k: Tensor,
    q: Tensor | None,
    g: Tensor | None,
    share: Tensor | None,
    correction: Tensor | None,
    heads: int,
    least: float,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Keys that are read [B, T, heads, K], None without share and g; moved queries, None without q; log decays in float32, None
    without g. Nothing is checked."""
    *rows, key_heads, width = k.shape
    reads = share is not None or g is not None
    read = k.new_empty(*rows, heads, width) if reads else None
    moved = None if q is None else q.new_empty(q.shape)
    new_g = None if g is None else g.new_empty(*rows, heads, dtype=torch.float32)
    if k.numel():
        launch(
            read_keys_kernel, (k.shape[:-2].numel() * heads,), k.contiguous(),
            *[None if x is None else x.contiguous() for x in (q, g, share, correction)], read, moved, new_g, least,
            G=heads, GROUP=heads // key_heads, K=width, BK=padded(width, 1), num_warps=1,
        )  # fmt: skip
    return read, moved, new_g
