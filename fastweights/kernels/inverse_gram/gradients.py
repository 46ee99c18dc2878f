"""The gradients of u and of the gain, from x and y of the tokens and H at the chunks' ends: see the head of this package."""

from __future__ import annotations

import triton
import triton.language as tl

from ..common.packing import program_chunk
from ..common.tiles import load_gate, row_places
from .sums import load_divisors, load_float_rows, load_matrix


@triton.jit(do_not_specialize=["time"])
def direction_gradients(
    u, gain, x, y, divisor, H, dy, du, dgain, db, chunks, time, HV,
    K: tl.constexpr, BK: tl.constexpr, HEADS: tl.constexpr, HEADS_GAIN: tl.constexpr, SELF: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """du, db [BT, HV, K]; dgain [BT, HV]. SELF: b is u, du holds both gradients, y counts as divided by `divisor`, and dy is the
    gradient of gain_t y_t."""
    m, head, first, count, i, live = program_chunk(chunks, time)
    if count == 0:
        return
    part = tl.arange(0, BK)
    matrix = m.to(tl.int64) * HV + head
    along_x, along_y = tl.zeros((64, 64), tl.float32), tl.zeros((64, 64), tl.float32)
    for c0 in range(0, K, BK):
        U = load_float_rows(u, first, live, head, HV, c0 + part, K, HEADS)
        X = load_float_rows(x, first, live, head, HV, c0 + part, K, 1)
        along_x = tl.dot(U, tl.trans(X), along_x, input_precision=PRECISION)
        Y = load_float_rows(y, first, live, head, HV, c0 + part, K, 1)
        along_y = tl.dot(U, tl.trans(Y), along_y, input_precision=PRECISION)
    later = i[:, None] <= i[None, :]
    if SELF:
        share = 1.0 / load_divisors(divisor, first, live, head, HV)
        along_x *= share[None, :]
        along_y *= share[None, :]
    along_x, along_y = tl.where(later, along_x, 0.0), tl.where(later, along_y, 0.0)
    to_gain = tl.zeros((64,), tl.float32)
    for c0 in range(0, K, BK):
        c = c0 + part
        X = load_float_rows(x, first, live, head, HV, c, K, 1)
        out = tl.dot(along_y, X, input_precision=PRECISION)
        out = tl.dot(along_x, load_float_rows(y, first, live, head, HV, c, K, 1), out, input_precision=PRECISION)
        for r0 in range(0, K, BK):
            U = load_float_rows(u, first, live, head, HV, r0 + part, K, HEADS)
            out = tl.dot(U, tl.trans(load_matrix(H, matrix, c, r0 + part, K)), out, input_precision=PRECISION)
        out = -out
        if gain is not None:
            to_gain += 0.5 * tl.sum(load_float_rows(u, first, live, head, HV, c, K, HEADS) * out, 1)
            if SELF:
                through = load_float_rows(dy, first, live, head, HV, c, K, 1) * load_float_rows(
                    y, first, live, head, HV, c, K, 1
                )
                to_gain += share * tl.sum(through, 1)
            out *= load_gate(gain, first, live, head, HV, HEADS_GAIN)[:, None]
        at, here = row_places(first, live, head, HV, c, K, 1)
        if SELF:
            out += load_float_rows(x, first, live, head, HV, c, K, 1)
        elif db is not None:
            tl.store(db + at, load_float_rows(x, first, live, head, HV, c, K, 1).to(db.dtype.element_ty), here)
        tl.store(du + at, out.to(du.dtype.element_ty), here)
    if gain is not None:
        tl.store(dgain + first * HV + head + i * HV, to_gain, live)
