"""A, the decayed energy of the key channels: at every chunk's start, inside it, and backwards.

    A_i = exp(G_i) A + sum_{j <= i} exp(G_i - G_j) beta_j k_j^2

Inside a chunk A is a masked product, so only A at the chunks' starts is written. What A does to keys and queries is in
precondition.py.
"""

from __future__ import annotations

from collections import namedtuple
from typing import Any

import torch
import triton
import triton.language as tl

from ..common.call import padded
from ..common.delta_rule.launches import DeltaRule
from ..common.delta_rule.sizes import SavedForBackward
from ..common.math import any_so_far, clamp_decay, exp2, infinite_to_nan, is_bad, zero_where
from ..common.packing import CHUNK, live_tokens, pieces_of_sequence, program_chunk
from ..common.tiles import load_gate
from ..runtime.workspace import TensorSpec


@triton.jit
def load_gates(precond_g, precond_beta, first, live, head, HV, HEADS_PG: tl.constexpr, HEADS_PB: tl.constexpr):
    """The summed log decay (base 2) and the gain of a chunk's tokens."""
    g = load_gate(precond_g, first, live, head, HV, HEADS_PG)
    return tl.cumsum(clamp_decay(g), 0), load_gate(precond_beta, first, live, head, HV, HEADS_PB)


@triton.jit
def pair_decays(upto, decay, PRECISION: tl.constexpr):
    """exp(G_i - G_j) for j < i, else 0, with G_i of `upto` and G_j of `decay`."""
    i = tl.arange(0, 64)
    return exp2(tl.where(i[:, None] > i[None, :], upto[:, None] - decay[None, :], -float("inf")), PRECISION)


@triton.jit
def make_operand(x, dtype: tl.constexpr):
    """x as an operand of a product: bfloat16 for bfloat16 inputs, else float32 (float16 lacks the range)."""
    return x.to(tl.bfloat16) if dtype == tl.bfloat16 else x


@triton.jit
def earlier_energy(keys, upto, decay, beta, start, PRECISION: tl.constexpr):
    """A_i - beta_i k_i^2: the part of earlier tokens and of A at the chunk's start. A token's own part is added in float32,
    as it must cancel in gradients. upto: G_i, or G_(i-1) for all of A_(i-1)."""
    energy = make_operand(keys.to(tl.float32) * keys.to(tl.float32), keys.dtype)
    weights = make_operand(pair_decays(upto, decay, PRECISION) * beta[None, :], keys.dtype)
    return tl.dot(weights, energy, tl.exp2(upto)[:, None] * start[None, :], input_precision=PRECISION)


@triton.jit
def earlier_energy_with_bad_numbers(keys, upto, decay, beta, start, PRECISION: tl.constexpr):
    """`earlier_energy` where a NaN or infinity makes its key channel NaN, or in a gate all channels, from its token on."""
    bad = is_bad(keys.to(tl.float32) * keys.to(tl.float32))
    spoiled = any_so_far(bad | (is_bad(beta) | is_bad(decay))[:, None])
    upto, decay, beta = zero_where(upto, is_bad(upto)), zero_where(decay, is_bad(decay)), zero_where(beta, is_bad(beta))
    return tl.where(
        spoiled,
        float("nan"),
        infinite_to_nan(earlier_energy(zero_where(keys, bad), upto, decay, beta, start, PRECISION)),
    )


@triton.jit(do_not_specialize=["time"])
def key_energy_sums(
    k, precond_g, precond_beta, sums, totals, chunks, time, H, HV,
    K: tl.constexpr, PK: tl.constexpr, HEADS_PG: tl.constexpr, HEADS_PB: tl.constexpr,
):  # fmt: skip
    """Per chunk: the sum that it adds to A [M, HV, K], and its log decay (base 2) [M, HV]."""
    m, head, first, count = program_chunk(chunks, time)
    if count == 0:
        return
    i, live = live_tokens(count)
    decay = clamp_decay(load_gate(precond_g, first, live, head, HV, HEADS_PG))
    beta = load_gate(precond_beta, first, live, head, HV, HEADS_PB)
    c = tl.arange(0, PK)
    at = (first * H + head // (HV // H)) * K
    here = live[:, None] & (c < K)[None, :]
    keys = tl.load(k + at + tl.arange(0, 64)[:, None] * (H * K) + c[None, :], here, 0.0)
    total = tl.sum(decay, 0)
    energy = keys.to(tl.float32) * keys.to(tl.float32)
    added = tl.sum((tl.exp2(total - tl.cumsum(decay, 0)) * beta)[:, None] * energy, 0)
    at = m.to(tl.int64) * HV + head
    tl.store(sums + at * K + c, added, c < K)
    tl.store(totals + at, total)


@triton.jit
def after_both(decay, sum, later_decay, later_sum):
    """Of two runs of chunks, one after the other, the log decay and the sum that is added."""
    return decay + later_decay, tl.exp2(later_decay) * sum + later_sum


@triton.jit(do_not_specialize=["time"])
def key_energy_scan(
    sums, totals, begin, end, cu_seqlens, time, HV, K: tl.constexpr, BK: tl.constexpr, BLOCK: tl.constexpr,
    BACK: tl.constexpr, BEGUN: tl.constexpr, ENDED: tl.constexpr,
):  # fmt: skip
    """x <- exp(total) x + sum from chunk to chunk of a sequence, in blocks of BLOCK chunks; `sums` is overwritten by x
    before every chunk. BACK: from the last chunk to the first, x after every chunk."""
    n, head = tl.program_id(0), tl.program_id(1)
    c = tl.program_id(2) * BK + tl.arange(0, BK)
    from_chunk, chunks = pieces_of_sequence(cu_seqlens, n, time, 64, 0)
    at_state = (n.to(tl.int64) * HV + head) * K + c
    x = tl.load(begin + at_state, c < K, 0.0).to(tl.float32) if BEGUN else tl.zeros((BK,), tl.float32)
    first = (from_chunk + chunks - 1) if BACK else from_chunk
    i = tl.arange(0, BLOCK)
    for step in range(0, chunks, BLOCK):
        here = (step + i < chunks)[:, None] & (c < K)[None, :]
        row = ((first - step - i) if BACK else (first + step + i)).to(tl.int64) * HV + head
        places = sums + row[:, None] * K + c[None, :]
        added = tl.load(places, here, 0.0)
        added = tl.where(is_bad(added), float("nan"), added)
        total = tl.load(totals + row, step + i < chunks, 0.0)[:, None] + tl.zeros_like(added)
        decay, sum = tl.associative_scan((total, added), 0, after_both)
        after = tl.exp2(decay) * x[None, :] + sum
        tl.debug_barrier()  # every sum has been read
        next_place = places - HV * K if BACK else places + HV * K
        tl.store(next_place, after, here & (i < BLOCK - 1)[:, None] & (step + i + 1 < chunks)[:, None])
        tl.store(places, x[None, :] + tl.zeros_like(added), here & (i == 0)[:, None])
        x = tl.sum(tl.where((i == BLOCK - 1)[:, None], after, 0.0), 0)
    if ENDED:
        tl.store(end + at_state, x, c < K)


@triton.jit(do_not_specialize=["time"])
def key_energy_backward(
    k, dA, dk, gram, after, precond_g, precond_beta, dg, dbeta, chunks, time, H, HV,
    K: tl.constexpr, BK: tl.constexpr, HEADS_PG: tl.constexpr, HEADS_PB: tl.constexpr, ADD: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Backwards, one chunk: from the gradients of A inside the chunk and, `after` [M, HV, K], at its end, to the keys (dk, with
    ADD added to what is there) and the gates (dg, dbeta [BT, HV]). The decay of token t acts on pairs of an earlier token and t
    or a later one: a pair that lies on one side of t is in both sums below as the same number, so it cancels exactly."""
    m, head, first, count = program_chunk(chunks, time)
    if count == 0:
        return
    i, live = live_tokens(count)
    start = first * HV + head  # scalars in front, so that the offsets of a tile are small numbers
    row = i * HV
    at = m.to(tl.int64) * HV + head
    decay, beta = load_gates(precond_g, precond_beta, first, live, head, HV, HEADS_PG, HEADS_PB)
    total = tl.min(decay, 0)
    pairs = tl.zeros((64, 64), tl.float32)
    start_part = tl.zeros((64,), tl.float32)
    end_part = tl.zeros((64,), tl.float32)
    grad_beta = tl.zeros((64,), tl.float32)
    across = 0.0
    for k0 in range(0, K, BK):
        c = k0 + tl.arange(0, BK)
        here = live[:, None] & (c < K)[None, :]
        at_row = start * K + row[:, None] * K + c[None, :]
        keys = tl.load(k + (first * H + head // (HV // H)) * K + i[:, None] * (H * K) + c[None, :], here, 0.0)
        grad_A = tl.load(dA + at_row, here, 0.0)
        begin = tl.load(gram + at * K + c, c < K, 0.0)
        end = tl.load(after + at * K + c, c < K, 0.0)
        keys = keys.to(tl.float32)
        energy = keys * keys
        across += tl.sum(begin * end, 0)
        start_part += tl.sum(grad_A.to(tl.float32) * begin[None, :], 1)
        end_part += tl.sum(energy * end[None, :], 1)
        grad_energy = grad_A.to(tl.float32) + tl.exp2(total - decay)[:, None] * end[None, :]
        weights = tl.trans(pair_decays(decay, decay, PRECISION).to(grad_A.dtype))
        grad_energy = tl.dot(weights, grad_A, grad_energy, input_precision=PRECISION)
        grad_beta += tl.sum(grad_energy * energy, 1)
        grad_keys = 2 * keys * beta[:, None] * grad_energy
        if ADD:
            grad_keys += tl.load(dk + at_row, here, 0.0).to(tl.float32)
        tl.store(dk + at_row, grad_keys.to(dk.dtype.element_ty), here)
        pairs = tl.dot(grad_A, tl.trans(energy.to(grad_A.dtype)), pairs, input_precision=PRECISION)
    tl.store(dbeta + start + row, grad_beta, live)
    pairs *= pair_decays(decay, decay, PRECISION) * beta[None, :]
    end_part *= tl.exp2(total - decay) * beta
    grad_decay = tl.exp2(decay) * start_part + tl.sum(pairs, 1) - tl.sum(pairs, 0) - end_part
    grad_last = tl.exp2(total) * across + tl.sum(end_part, 0)
    grad_decay = tl.where(i == count - 1, grad_decay + grad_last, grad_decay)
    tl.store(dg + start + row, tl.cumsum(tl.where(live, grad_decay, 0.0), 0, reverse=True), live)


def gate_groups(call: DeltaRule) -> dict[str, Any]:
    x = call.memory
    return {"HEADS_PG": call.group(x.precond_g), "HEADS_PB": call.group(x.precond_beta)}


def record_key_energy(call: DeltaRule, saved: SavedForBackward, end: Any) -> None:
    """A at the start of every chunk, into saved.key_energy, and at the end of every sequence."""
    x, totals = call.memory, call.floats(call.M, call.HV)
    call.launch(
        key_energy_sums, (call.M, call.HV), x.k, x.precond_g, x.precond_beta, saved.key_energy, totals, saved.chunk_table,
        call.T, call.H, call.HV, **gate_groups(call), num_warps=2,
    )  # fmt: skip
    record_scan(call, saved.key_energy, totals, x.A, end, back=False)


def record_scan(call: DeltaRule, sums: TensorSpec, totals: TensorSpec, begin: Any, end: Any, back: bool) -> None:
    width = min(32, padded(call.K))
    block = 32 if call.T <= 32 * CHUNK else 128  # of 128 most would be idle in short rows
    call.launch(
        key_energy_scan, (call.N, call.HV, -(-call.K // width)), sums, totals, begin, end, call.memory.cu_seqlens, call.T,
        call.HV, BK=width, BLOCK=block, BACK=back, BEGUN=begin is not None, ENDED=end is not None, num_warps=4,
    )  # fmt: skip


class EnergyGrads(namedtuple("EnergyGrads", "inside sums totals parameter")):
    """What the gradients of write keys or queries give to A inside a chunk [BT, HV, K], and summed over a chunk to A at its start
    [M, HV, K], to the log decays [M, HV], and to the parameter, a centre [M, HV] or a ridge [M, HV, K]."""


def record_energy_grads(
    call: DeltaRule,
    saved: SavedForBackward,
    grads: EnergyGrads,
    dk: TensorSpec,
    add: bool,
    dA_end: Any,
    state_grads: bool,
) -> tuple[TensorSpec, TensorSpec, TensorSpec | None]:
    """The gradients of g and beta [BT, HV], and with state_grads of the initial A. dk takes what reaches the keys through A, with
    `add` beside what it holds."""
    x, dA = call.memory, call.floats(call.N, call.HV, call.K) if state_grads else None
    record_scan(call, grads.sums, grads.totals, dA_end, dA, back=True)
    dg, dbeta = (call.token_tensor(call.HV, dtype=torch.float32) for _ in range(2))
    call.launch(
        key_energy_backward, (call.M, call.HV), x.k, grads.inside, dk, saved.key_energy, grads.sums, x.precond_g,
        x.precond_beta, dg, dbeta, saved.chunk_table, call.T, call.H, call.HV, **gate_groups(call), ADD=add,
        **call.tile_options("key_energy_backward", "BK"),
    )  # fmt: skip
    return dg, dbeta, dA
