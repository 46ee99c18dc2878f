"""What the systems of a chunk give to the gradients of its keys, gains, decays and of the ridge per channel, once the solutions
are known; with what the memory's values and answers give to them. See the derivation in __init__."""

from __future__ import annotations

import triton
import triton.language as tl

from ..common.packing import live_tokens, program_part
from ..common.tiles import load_gate, load_rows, row_places
from .chunk import decay_factors, load_gain, load_sum_of_two


@triton.jit
def add_pair_sums(row_sums, key_sums, pairs, gain):
    """With what pairs of a token and an earlier key, its gain aside, give to the decays from the one to the other: the same
    numbers in both sums, so that they cancel but for the tokens between."""
    return row_sums + tl.sum(pairs * gain[None, :], 1), key_sums + tl.sum(pairs, 0)


@triton.jit(do_not_specialize=["time", "stride"])
def system_gradients(
    q, k, beta, gate, mix, dP, x, x_rest, e, slope, norms, units, outsides, later, d_writes, memory_gates, gate_grads, dk,
    d_diagonal, chunks, time, scale, stride, HV,
    K: tl.constexpr, BK: tl.constexpr, HEADS_K: tl.constexpr, HEADS_BETA: tl.constexpr, HEADS_MIX: tl.constexpr,
    MEMORY_PARTS: tl.constexpr,
    ADAPTIVE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One tile of key channels of a chunk. units, outsides: H at the chunk's start, see solve_chunk; later [M, HV, K, K]: its
    gradient at the chunk's end. dP [BT, HV, 64]: tril(dO V^T), decayed. d_writes [BT, HV, K]: the gradient of beta k as the
    memory's keys, less what the chunk's own tokens ask. gate_grads [K tiles, 2, BT, HV]: partial sums of dbeta and dg, `stride`
    from tile to tile; memory_gates: those of the memory, less the same, which the first tile adds."""
    part, m, head, first, count = program_part(chunks, time, (K + BK - 1) // BK)
    if count == 0:
        return
    i, live = live_tokens(count)
    column = part * BK + tl.arange(0, BK)
    lower = (i[:, None] >= i[None, :]) & live[:, None]
    at_row = first * HV + head + i * HV
    at_H = (m.to(tl.int64) * HV + head) * K * K
    decay, total = decay_factors(gate, first, count, head, HV)
    pair = tl.where(lower, tl.exp2(tl.where(lower, decay[:, None] - decay[None, :], 0.0)), 0.0)
    gain = load_gain(beta, first, live, head, HV, HEADS_BETA)

    low = k.dtype.element_ty
    row_sums, key_sums = tl.zeros((64,), tl.float32), tl.zeros((64,), tl.float32)
    out = tl.zeros((64, BK), tl.float32)
    at_dP = dP + (first * HV + head) * 64 + i[:, None] * (HV * 64) + i[None, :]
    asked = tl.load(at_dP, live[:, None], 0.0).to(tl.float32)  # what the answers of later tokens make of a key's own
    if mix is not None:
        alpha = load_gate(mix, first, live, head, HV, HEADS_MIX)
        q_overlaps = tl.zeros((64, 64), tl.float32)
        for k0 in tl.static_range(0, K, BK):
            c = k0 + tl.arange(0, BK)
            turned = tl.trans(load_rows(k, first, live, head, HV, c, K, HEADS_K))
            some = load_rows(q, first, live, head, HV, c, K, HEADS_K)
            q_overlaps = tl.dot(some, turned, q_overlaps, input_precision=PRECISION)
        plain = asked * (scale * (1 - alpha))[:, None]
        if part == 0:
            row_sums, key_sums = add_pair_sums(row_sums, key_sums, plain * q_overlaps, gain)
        queries = load_rows(q, first, live, head, HV, column, K, HEADS_K)
        out = tl.dot(tl.trans(plain.to(low)), queries, out, input_precision=PRECISION)
        asked *= alpha[:, None]

    x_overlaps = tl.zeros((64, 64), tl.float32)
    e_overlaps = tl.zeros((64, 64), tl.float32)
    for k0 in tl.static_range(0, K, BK):
        c = k0 + tl.arange(0, BK)
        turned = tl.trans(load_rows(k, first, live, head, HV, c, K, HEADS_K))
        x_overlaps = tl.dot(load_rows(x, first, live, head, HV, c, K, 1), turned, x_overlaps, input_precision=PRECISION)
        if x_rest is not None:
            x_overlaps = tl.dot(
                load_rows(x_rest, first, live, head, HV, c, K, 1), turned, x_overlaps, input_precision=PRECISION
            )
        e_overlaps = tl.dot(load_rows(e, first, live, head, HV, c, K, 1), turned, e_overlaps, input_precision=PRECISION)
    # Memory and system make nearly opposite gradients of a key. Their difference is taken before it is rounded and multiplied by
    # x, which is long where no key is.
    asked -= pair * e_overlaps
    if part == 0:
        row_sums, key_sums = add_pair_sums(row_sums, key_sums, asked * x_overlaps, gain)
    answers = load_rows(x, first, live, head, HV, column, K, 1)
    out = tl.dot(tl.trans(asked.to(low)), answers, out, input_precision=PRECISION)
    adjoint = load_rows(e, first, live, head, HV, column, K, 1)
    out = tl.dot(tl.trans((-x_overlaps * pair).to(low)), adjoint, out, input_precision=PRECISION)

    across = tl.zeros((64, BK), tl.float32)
    onward = across
    end_overlap = 0.0
    for k0 in tl.static_range(0, K, BK):
        c = k0 + tl.arange(0, BK)
        inside = (c < K)[:, None] & (column < K)[None, :]
        H = tl.load(units + at_H + c[:, None] * K + column[None, :], inside, 0.0)
        L = tl.load(later + at_H + c[:, None] * K + column[None, :], inside, 0.0)
        end_overlap += tl.sum(H.to(tl.float32) * L)
        keys = load_rows(k, first, live, head, HV, c, K, HEADS_K)
        across = tl.dot(load_rows(x, first, live, head, HV, c, K, 1), H.to(low), across, input_precision=PRECISION)
        if x_rest is not None:
            rest = load_rows(x_rest, first, live, head, HV, c, K, 1)
            across = tl.dot(rest, H.to(low), across, input_precision=PRECISION)
        onward = tl.dot(keys, L.to(low), onward, input_precision=PRECISION)
    outside = tl.load(outsides + m * HV + head)
    row_sums -= (
        outside * tl.exp2(decay) * tl.sum(across * load_rows(e, first, live, head, HV, column, K, 1).to(tl.float32), 1)
    )
    keys = load_rows(k, first, live, head, HV, column, K, HEADS_K)
    onward *= tl.exp2(total - decay)[:, None]
    end_part = tl.sum(onward * keys.to(tl.float32), 1)
    key_sums += end_part
    ends = outside * tl.exp2(total) * end_overlap + tl.sum(onward * keys.to(tl.float32) * gain[:, None])
    out += 2 * onward
    if ADAPTIVE:
        w = tl.load(slope + at_row, live, 0.0)
        norm = tl.load(norms + at_row, live, 0.0)
        if part == 0:
            row_sums -= 0.5 * w * norm * norm
        norm_part = tl.zeros((64, BK), tl.float32)
        overlaps = tl.zeros((64, 64), tl.float32)
        for k0 in tl.static_range(0, K, BK):
            c = k0 + tl.arange(0, BK)
            inside = (c < K)[:, None] & (column < K)[None, :]
            H = tl.load(units + at_H + c[:, None] * K + column[None, :], inside, 0.0)
            some = load_rows(k, first, live, head, HV, c, K, HEADS_K)
            norm_part = tl.dot(some, H.to(low), norm_part, input_precision=PRECISION)
            overlaps = tl.dot(some, tl.trans(some), overlaps, input_precision=PRECISION)
        norm_part *= (outside * tl.sum(pair * (w * tl.exp2(decay))[:, None], 0))[:, None]
        overlaps *= tl.dot(tl.trans((pair * w[:, None]).to(low)), pair.to(low), input_precision=PRECISION)
        norm_part = tl.dot((overlaps * gain[None, :]).to(low), keys, norm_part, input_precision=PRECISION)
        key_sums -= 0.5 * tl.sum(norm_part * keys.to(tl.float32), 1)
        out -= norm_part

    at, here = row_places(first, live, head, HV, column, K, 1)
    written = tl.load(d_writes + at, here, 0.0).to(tl.float32)
    tl.store(dk + at, ((out + written) * gain[:, None]).to(dk.dtype.element_ty), here)
    if beta is not None:
        again = load_rows(k, first, live, head, HV, column, K, HEADS_K).to(tl.float32)
        tl.store(gate_grads + part * stride + at_row, key_sums + tl.sum(written * again, 1), live)
    change = row_sums - gain * key_sums
    change = tl.cumsum(tl.where(live, tl.where(i == count - 1, change + ends, change), 0.0), 0, reverse=True)
    if part == 0:
        for other in tl.static_range(MEMORY_PARTS):
            change += tl.load(memory_gates + other * stride + stride // 2 + at_row, live, 0.0)
    tl.store(gate_grads + part * stride + stride // 2 + at_row, change, live)
    if d_diagonal is not None:
        solved = load_sum_of_two(x, x_rest, first, live, head, HV, column, K)
        both = solved * load_rows(e, first, live, head, HV, column, K, 1).to(tl.float32)
        tl.store(d_diagonal + (m.to(tl.int64) * HV + head) * K + column, -tl.sum(both, 0), column < K)


@triton.jit(do_not_specialize=["M"])
def sum_chunks(parts, out, chunks, M, HV, K: tl.constexpr, PK: tl.constexpr, ROWS: tl.constexpr):
    """out [HV, K] from parts [M, HV, K]."""
    head = tl.program_id(0)
    c = tl.arange(0, PK)
    total = tl.zeros((ROWS, PK), tl.float32)
    for begin in range(0, M, ROWS):
        m = begin + tl.arange(0, ROWS)
        used = m < M
        if chunks is not None:  # numbers that no chunk has were not written
            used = tl.load(chunks + 2 * m + 1, used, 0) > 0
        at = (m.to(tl.int64) * HV + head)[:, None] * K + c[None, :]
        total += tl.load(parts + at, used[:, None] & (c < K)[None, :], 0.0)
    tl.store(out + head * K + c, tl.sum(total, 0).to(out.dtype.element_ty), c < K)
