"""The recurrent kernel of linear attention and the delta rules.

With one token per sequence the state is nearly all the traffic, so a program owns a tile [K, BV] of the state and does the rest
in registers. Programs of one head share only the preconditioner's A, which each of them computes.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..availability import on_device_of
from ..chunk.tiles import padded
from ..math import or_nan
from ..packing import sequence_edges
from ..runtime.launch_plan import launch

__all__ = ["Preconditioner", "decode"]

# Columns of a program's tile and its warps, by the key channels (rounded up to a power of two): rows of 128 bytes, at most 64
# numbers of the state per thread.
CONFIGURATIONS = {64: (32, 1), 128: (32, 2), 256: (32, 4)}


class Preconditioner(NamedTuple):
    """What `precondition_keys` takes: A [N, HV, K] float32 and where the new one goes (None: in place), g and beta
    [B, T, H or HV], center [HV], [H] or [1], bound and eps."""

    A: Tensor
    new_A: Tensor | None
    g: Tensor
    beta: Tensor
    center: Tensor
    bound: float
    eps: float


def decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    beta: Tensor | None = None,
    g: Tensor | None = None,
    write_key: Tensor | None = None,
    state: Tensor,
    new_state: Tensor | None = None,
    preconditioner: Preconditioner | None = None,
    scale: float,
    cu_seqlens: Tensor | None = None,
) -> Tensor:
    """o [B, T, HV, V] of `delta_rule`, or of `linear_attention` where beta is None; nothing is checked.

    The state [N, HV, K, V] float32 after the last token goes into new_state, or into state itself where that is None. The
    write key is k unless given or made by the preconditioner. cu_seqlens must be on the device of v.
    """
    *sizes, value = v.shape
    batch, time, heads = sizes
    key = k.shape[3]
    key_width, width, warps = _tile(key, value)
    tiles = -(-value // width)
    o = v.new_empty(v.shape)
    programs = len(state) * heads * tiles
    if not programs:
        return o
    target = state if new_state is None else new_state
    written = _contiguous_for(target)
    if preconditioner is None:
        A = target_A = written_A = None
        precond_g, precond_beta, center, bound, eps = None, None, None, 1.0, 0.0
    else:
        A, new_A, precond_g, precond_beta, center, bound, eps = preconditioner
        target_A = A if new_A is None else new_A
        # The programs of a head's other tiles may read A after the first tile's program has written it.
        written_A = torch.empty(A.shape, device=A.device) if target_A is A and tiles > 1 else _contiguous_for(target_A)
        A = A.contiguous()
    with on_device_of(v):
        launch(
            decode_kernel, (programs,),
            *_strides(q, *sizes), *_strides(k, *sizes), *_strides(v, *sizes), *_strides(write_key, *sizes),
            *_strides(beta, *sizes), *_strides(g, *sizes), *_strides(precond_g, *sizes), *_strides(precond_beta, *sizes),
            center, 0 if center is None else center.stride(0), 1 if center is None else heads // len(center),
            o, state.contiguous(), written, A, written_A, cu_seqlens, time, float(scale), math.log(bound), float(eps),
            G_CHANNELS=g is not None and g.ndim == 4, HV=heads, K=key, V=value, BK=key_width, BV=width, num_warps=warps,
        )  # fmt: skip
    for destination, new in ((target, written), (target_A, written_A)):
        if destination is not None and new is not None and new is not destination:
            destination.copy_(new)
    return o


def _tile(key: int, value: int) -> tuple[int, int, int]:
    """Rows and columns of a program's tile, powers of two, and its warps."""
    key_width = padded(key, 1)
    width, warps = CONFIGURATIONS[max(key_width, 64)]
    return key_width, min(width, padded(value, 1)), warps


def _contiguous_for(target: Tensor) -> Tensor:
    """The target itself, or a contiguous tensor to copy into it."""
    return target if target.is_contiguous() else torch.empty(target.shape, dtype=target.dtype, device=target.device)


def _strides(x: Tensor | None, batch: int, time: int, heads: int) -> tuple[Tensor | None, int, int, int]:
    """x [B, T, h, ...], its strides from token to token and from head to head, and the value heads that one head serves."""
    if x is None:
        return None, 0, 0, 1
    strides = x.stride()
    if (len(strides) == 4 and strides[3] != 1) or (batch > 1 and time > 1 and strides[0] != time * strides[1]):
        x = x.contiguous()
        strides = x.stride()
    return x, strides[0 if time == 1 and batch > 1 else 1], strides[2], heads // x.shape[2]


@triton.jit
def _row(x, token, token_step, head, head_step, GROUP: tl.constexpr, channel, exists):
    """The channels of one token and head, 0 where there is none."""
    return tl.load(x + token * token_step + head // GROUP * head_step + channel, mask=exists, other=0)


@triton.jit
def _number(x, token, token_step, head, head_step, GROUP: tl.constexpr):
    return tl.load(x + token * token_step + head // GROUP * head_step)


@triton.jit
def _float(x):
    """x in float32, infinities as NaN."""
    return or_nan(x.to(tl.float32))


@triton.jit
def _decay(g):
    """exp(g): 0 for -inf, which is legal, NaN for infinity, which is not."""
    g = g.to(tl.float32)
    return tl.where(g < float("inf"), tl.exp(g), float("nan"))


INPUTS = ("q", "k", "v", "w", "beta", "g", "pg", "pb")


# Only the alignment of the states matters for speed. Triton would compile the kernel again for every layout if it compiled in
# the alignment of the inputs and their strides.
@triton.jit(
    do_not_specialize=["center_step", *(f"{name}_{step}" for name in INPUTS for step in ("token", "head"))],
    do_not_specialize_on_alignment=[*INPUTS, "center", "o", "cu_seqlens", "T"],
)
def decode_kernel(
    q, q_token, q_head, Q_GROUP: tl.constexpr,
    k, k_token, k_head, K_GROUP: tl.constexpr,
    v, v_token, v_head, V_GROUP: tl.constexpr,
    w, w_token, w_head, W_GROUP: tl.constexpr,
    beta, beta_token, beta_head, BETA_GROUP: tl.constexpr,
    g, g_token, g_head, G_GROUP: tl.constexpr,
    pg, pg_token, pg_head, PG_GROUP: tl.constexpr,
    pb, pb_token, pb_head, PB_GROUP: tl.constexpr,
    center, center_step, CENTER_GROUP: tl.constexpr,
    o, S, new_S, A, new_A, cu_seqlens, T, scale, log_bound, eps,
    G_CHANNELS: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """x, x_token, x_head, X_GROUP: see `_strides`; w: write keys; pg, pb: the preconditioner's g and beta."""
    TILES: tl.constexpr = (V + BV - 1) // BV
    tile = tl.program_id(0) % TILES
    place = tl.program_id(0) // TILES  # of the sequence and the head
    n = place // HV
    head = place % HV
    channel, column = tl.arange(0, BK), tile * BV + tl.arange(0, BV)
    is_channel, is_column = channel < K, column < V

    # A call uses each number of the state once, so the state does not displace weights and activations from the caches.
    state_of_head = place.to(tl.int64) * (K * V) + (channel[:, None] * V + column[None, :])
    in_state = is_channel[:, None] & is_column[None, :]
    state = tl.load(S + state_of_head, mask=in_state, other=0, eviction_policy="evict_first")
    A_of_head = place.to(tl.int64) * K + channel
    if A is not None:
        gram = tl.load(A + A_of_head, mask=is_channel, other=0)
        c = tl.load(center + head // CENTER_GROUP * center_step).to(tl.float32)

    if cu_seqlens is None:
        first = n.to(tl.int64) * T
        count = T
    else:
        start, stop = sequence_edges(cu_seqlens, n, T)
        first = start.to(tl.int64)
        count = stop - start
    for t in range(count):
        token = first + t
        # All loads come before any use, so that their latencies overlap.
        key = _row(k, token, k_token, head, k_head, K_GROUP, channel, is_channel)
        query = _row(q, token, q_token, head, q_head, Q_GROUP, channel, is_channel)
        written = _row(v, token, v_token, head, v_head, V_GROUP, column, is_column)
        if G_CHANNELS:
            log_decay = _row(g, token, g_token, head, g_head, G_GROUP, channel, is_channel)
        elif g is not None:
            log_decay = _number(g, token, g_token, head, g_head, G_GROUP)
        if beta is not None:
            gain = _number(beta, token, beta_token, head, beta_head, BETA_GROUP)
        if A is not None:
            A_log_decay = _number(pg, token, pg_token, head, pg_head, PG_GROUP)
            A_gain = _number(pb, token, pb_token, head, pb_head, PB_GROUP)
        if w is not None:
            write_key = _row(w, token, w_token, head, w_head, W_GROUP, channel, is_channel)

        key, query, written = _float(key), _float(query) * scale, _float(written)
        if w is not None:
            write_key = _float(write_key)
        elif A is not None:
            gram = _decay(A_log_decay) * gram + _float(A_gain) * key * key
            distance = tl.log(gram + eps) - c
            write_key = tl.exp(-log_bound * distance / (1 + tl.abs(distance))) * key
        else:
            write_key = key
        if g is not None:
            state *= _decay(log_decay)[:, None] if G_CHANNELS else _decay(log_decay)
        if beta is not None:
            written = _float(gain) * (written - tl.sum(state * key[:, None], 0))
        # S_t^T q = S'^T q + (w . q) u: both sums over the state read S', none waits for the other.
        answer = tl.sum(state * query[:, None], 0) + tl.sum(write_key * query, 0) * written
        state += write_key[:, None] * written[None, :]
        tl.store(o + (token * HV + head) * V + column, answer, mask=is_column)

    tl.store(new_S + state_of_head, state, mask=in_state, eviction_policy="evict_first")
    if A is not None and tile == 0:
        tl.store(new_A + A_of_head, gram, mask=is_channel)
