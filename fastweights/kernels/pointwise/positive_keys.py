"""Kernel of positive queries and keys with the directions of a penalty, without gradients:

q, k -> ELU(q) + 1, ELU(k) + 1        u = unit(k W) / sqrt(K), of the k before, with one matrix W per head
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ..common.call import padded
from ..common.overlap import wait_for_inputs
from ..runtime.launch_plan import launch

NUMBERS = 4096  # of a matrix per warp


@triton.jit
def elu_plus_one(x):
    """ELU(x) + 1: x + 1 above 0, else exp(x)."""
    return tl.where(x > 0, x + 1, tl.exp(x))


@triton.jit(do_not_specialize=["eps"])
def positive_keys_kernel(
    q, k, w, new_q, new_k, u, eps, H: tl.constexpr, K: tl.constexpr, BK: tl.constexpr, OVERLAP: tl.constexpr
):
    """A program has one token and head of q, k [BT, H, K]; w [H, K, K], or None for none."""
    place = tl.program_id(0).to(tl.int64)
    channel = tl.arange(0, BK)
    here = channel < K
    if w is not None:  # which no kernel writes
        at = (place % H * K + channel[:, None]) * K + channel[None, :]
        matrix = tl.load(w + at, here[:, None] & here[None, :], 0.0)
    wait_for_inputs(OVERLAP)
    at = place * K + channel
    key, query = tl.load(k + at, here, 0.0).to(tl.float32), tl.load(q + at, here, 0.0).to(tl.float32)
    tl.store(new_q + at, elu_plus_one(query).to(new_q.dtype.element_ty), here)
    tl.store(new_k + at, elu_plus_one(key).to(new_k.dtype.element_ty), here)
    if w is not None:
        direction = tl.sum(matrix.to(tl.float32) * key[:, None], 0)
        direction *= tl.rsqrt((tl.sum(direction * direction, 0) + eps) * K)
        tl.store(u + at, direction.to(u.dtype.element_ty), here)


def positive_keys(q: Tensor, k: Tensor, w: Tensor | None, eps: float) -> tuple[Tensor, Tensor, Tensor | None]:
    """q and k [B, T, H, K] as ELU + 1 makes them, and u, None without w; nothing is checked."""
    heads, width = k.shape[2:]
    new_q, new_k, u = q.new_empty(q.shape), k.new_empty(k.shape), None if w is None else k.new_empty(k.shape)
    tile = padded(width, 1)
    if k.numel():
        launch(
            positive_keys_kernel, (k.numel() // width,), q.contiguous(), k.contiguous(), None if w is None else w.contiguous(),
            new_q, new_k, u, eps, H=heads, K=width, BK=tile, num_warps=1 if w is None else max(1, min(8, tile * tile // NUMBERS)),
        )  # fmt: skip
    return new_q, new_k, u
