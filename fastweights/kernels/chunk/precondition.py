"""What the energy A of the key channels does to keys and queries, inside a chunk and backwards.

    queries:    q~_i = q_i / (A_i + ridge)
    write keys: w_i = x^(-s(r)) k_i,  r = log(A_i + eps) - c,  s(r) = r / (1 + |r|) ("softsign") or tanh r ("tanh")
                w_i = p / (1 + k_i . p),  p = k_i / (A_(i-1) + ridge)  ("none")

These are the forms. A itself, its scan over chunks and what its gradient gives to keys and gates are the same for all of them:
see key_energy.py. The A of the token before is that of a row less, so "none" hands its gradients to the row before, and that of
the chunk's first token to the chunk before, by way of the scan.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from ..common.delta_rule.launches import DeltaRule
from ..common.delta_rule.sizes import SavedForBackward
from ..common.math import LN2, exp2, has_bad_number, infinite_to_nan, log2, reciprocal
from ..common.packing import live_tokens, program_chunk
from ..runtime.workspace import TensorSpec
from .key_energy import EnergyGrads, earlier_energy, earlier_energy_with_bad_numbers, gate_groups, load_gates

QUERIES = "queries"


class Form(NamedTuple):
    """name: "queries", or the squash of the write keys. ridge: of "none" alone, as queries have one per channel."""

    name: str
    bound: float
    eps: float
    ridge: float = 0.0

    @property
    def numbers(self) -> tuple[float, float, float]:
        return math.log2(self.bound), self.eps, self.ridge


@triton.jit
def energy_decay(decay, FORM: tl.constexpr):
    """The summed decay of the tokens that have gone into the A that a token takes: all up to itself, or to the one before it."""
    if FORM == "none":
        i = tl.arange(0, 64)
        decay = tl.sum(tl.where(i[:, None] == i[None, :] + 1, decay[None, :], 0.0), 1)
    return decay


@triton.jit
def squash(r, FORM: tl.constexpr, PRECISION: tl.constexpr):
    """s(r) and its slope."""
    if FORM == "tanh":
        squashed = 1 - 2 * reciprocal(exp2(r * (2 / LN2), PRECISION) + 1, PRECISION)
        slope = 1 - squashed * squashed
    else:
        closeness = reciprocal(1 + tl.abs(r), PRECISION)
        squashed = r * closeness
        slope = closeness * closeness
    return squashed, slope


@triton.jit(do_not_specialize=["time"])
def precondition(
    k, q, gram, precond_g, precond_beta, parameter, out, chunks, time, power, eps, ridge, H, HV,
    K: tl.constexpr, BK: tl.constexpr, HEADS_PG: tl.constexpr, HEADS_PB: tl.constexpr, FORM: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """The write keys or the divided queries [BT, HV, K] of one chunk, from A at its start. parameter: the centre [HV], or the
    ridge of the queries [HV, K]. "none" takes all channels at once."""
    m, head, first, count = program_chunk(chunks, time)
    if count == 0:
        return
    i, live = live_tokens(count)
    at_keys = (first * H + head // (HV // H)) * K + i[:, None] * (H * K)
    decay, beta = load_gates(precond_g, precond_beta, first, live, head, HV, HEADS_PG, HEADS_PB)
    upto = energy_decay(decay, FORM)
    if (FORM == "softsign") | (FORM == "tanh"):
        middle = tl.load(parameter + head)
    for k0 in range(0, K, BK):
        c = k0 + tl.arange(0, BK)
        here = live[:, None] & (c < K)[None, :]
        keys = tl.load(k + at_keys + c[None, :], here, 0.0)
        start = tl.load(gram + (m.to(tl.int64) * HV + head) * K + c, c < K, 0.0)
        A = earlier_energy(keys, upto, decay, beta, start, PRECISION)
        if has_bad_number(A):  # loaded again: kept for this rare case, keys would crowd the registers
            again = tl.load(k + at_keys + c[None, :], here, 0.0)
            A = earlier_energy_with_bad_numbers(again, upto, decay, beta, start, PRECISION)
        keys = keys.to(tl.float32)
        if FORM == "none":
            direction = keys * reciprocal(A + ridge, PRECISION)
            made = direction * reciprocal(1 + tl.sum(direction * keys, 1), PRECISION)[:, None]
        else:
            A += beta[:, None] * (keys * keys)
            if FORM == "queries":
                queries = tl.load(q + at_keys + c[None, :], here, 0.0).to(tl.float32)
                added = tl.load(parameter + head * K + c, c < K, 1.0)
                made = infinite_to_nan(queries) * reciprocal(A + added[None, :], PRECISION)
            else:
                squashed, _ = squash(log2(A + eps, PRECISION) * LN2 - middle, FORM, PRECISION)
                made = exp2(-power * squashed, PRECISION) * keys
        at = (first * HV + head) * K + i[:, None] * (HV * K) + c[None, :]
        tl.store(out + at, made.to(out.dtype.element_ty), here)


@triton.jit(do_not_specialize=["time"])
def precondition_grads(
    k, q, gram, dout, dA, dx, precond_g, precond_beta, parameter, sums, totals, dparameter, chunks, time, power, eps, ridge,
    H, HV, K: tl.constexpr, BK: tl.constexpr, HEADS_PG: tl.constexpr, HEADS_PB: tl.constexpr, FORM: tl.constexpr,
    ADD: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Backwards, one chunk: from the gradient of the write keys or queries to what they are made of directly (dx, with ADD added
    to what is there) and to every A_i: dA, which may share memory with dout unless the form is "none". sums, totals: as in
    key_energy_scan; dparameter [M, HV] or [M, HV, K]."""
    m, head, first, count = program_chunk(chunks, time)
    if count == 0:
        return
    i, live = live_tokens(count)
    at = m.to(tl.int64) * HV + head
    at_keys = (first * H + head // (HV // H)) * K + i[:, None] * (H * K)
    decay, beta = load_gates(precond_g, precond_beta, first, live, head, HV, HEADS_PG, HEADS_PB)
    upto = energy_decay(decay, FORM)
    if (FORM == "softsign") | (FORM == "tanh"):
        middle = tl.load(parameter + head)
        grad_center = 0.0
    for k0 in range(0, K, BK):
        c = k0 + tl.arange(0, BK)
        here = live[:, None] & (c < K)[None, :]
        at_row = (first * HV + head) * K + i[:, None] * (HV * K) + c[None, :]
        keys = tl.load(k + at_keys + c[None, :], here, 0.0)
        grad_out = tl.load(dout + at_row, here, 0.0).to(tl.float32)
        begin = tl.load(gram + at * K + c, c < K, 0.0)
        A = earlier_energy(keys, upto, decay, beta, begin, PRECISION)
        keys = keys.to(tl.float32)
        if FORM == "none":
            inverse = reciprocal(A + ridge, PRECISION)
            direction = keys * inverse
            share = reciprocal(1 + tl.sum(direction * keys, 1), PRECISION)[:, None]
            grad_overlap = -share * share * tl.sum(direction * grad_out, 1)[:, None]
            grad_direction = share * grad_out + grad_overlap * keys
            direct = grad_overlap * direction + grad_direction * inverse
            grad_A = -grad_direction * direction * inverse
        else:
            A += beta[:, None] * (keys * keys)
            if FORM == "queries":
                queries = tl.load(q + at_keys + c[None, :], here, 0.0).to(tl.float32)
                inverse = reciprocal(A + tl.load(parameter + head * K + c, c < K, 1.0)[None, :], PRECISION)
                direct = inverse * grad_out
                grad_A = -direct * inverse * queries
                tl.store(dparameter + at * K + c, tl.sum(grad_A, 0), c < K)
            else:
                A += eps
                squashed, slope = squash(log2(A, PRECISION) * LN2 - middle, FORM, PRECISION)
                direct = exp2(-power * squashed, PRECISION) * grad_out
                dr = -power * LN2 * slope * direct * keys
                grad_center -= tl.sum(dr)
                grad_A = dr * reciprocal(A, PRECISION)
        at_A = at_row
        kept = grad_A
        if FORM == "none":
            row = tl.where(i == 0, count - 1, i - 1)
            at_A = (first * HV + head) * K + row[:, None] * (HV * K) + c[None, :]
            kept = tl.where((i == 0)[:, None], 0.0, grad_A)
        tl.store(dA + at_A, kept.to(dA.dtype.element_ty), here)
        if ADD:
            direct += tl.load(dx + at_row, here, 0.0).to(tl.float32)
        tl.store(dx + at_row, direct.to(dx.dtype.element_ty), here)
        tl.store(sums + at * K + c, tl.sum(tl.exp2(upto)[:, None] * grad_A, 0), c < K)
    if (FORM == "softsign") | (FORM == "tanh"):
        tl.store(dparameter + at, grad_center)
    tl.store(totals + at, tl.min(decay, 0))


def shared_constants(call: DeltaRule, form: Form, kernel: str) -> dict[str, Any]:
    tile = call.tile_options("precondition_whole" if form.name == "none" else kernel, "BK")
    return {**gate_groups(call), "FORM": form.name, **tile}


def record_precondition(call: DeltaRule, saved: SavedForBackward, out: Any, form: Form) -> None:
    """The write keys or queries, from saved.key_energy."""
    x = call.memory
    call.launch(
        precondition, (call.M, call.HV), x.k, x.q if form.name == QUERIES else None, saved.key_energy, x.precond_g,
        x.precond_beta, x.center, out, saved.chunk_table, call.T, *form.numbers, call.H, call.HV,
        **shared_constants(call, form, "precondition"),
    )  # fmt: skip


def record_precondition_grads(
    call: DeltaRule, saved: SavedForBackward, dout: TensorSpec, dx: TensorSpec, form: Form, add: bool
) -> EnergyGrads:
    """What A gets, and the gradient of the centre or the ridge per chunk. dx takes what reaches keys or queries directly, with
    `add` beside what it holds, and the gradient of A may take the place of dout."""
    x, inside = call.memory, dout
    if call.dtype == torch.float16:  # 1/A may leave its range
        inside = call.token_tensor(call.HV, call.K, dtype=torch.float32)
    elif not add:  # dout is the caller's
        inside = call.token_tensor(call.HV, call.K)
    M, HV = call.M, call.HV
    grads = EnergyGrads(inside, call.floats(M, HV, call.K), call.floats(M, HV), call.floats(M, *x.center.shape))
    call.launch(
        precondition_grads, (M, HV), x.k, x.q if form.name == QUERIES else None, saved.key_energy, dout, grads.inside, dx,
        x.precond_g, x.precond_beta, x.center, grads.sums, grads.totals, grads.parameter, saved.chunk_table, call.T,
        *form.numbers, call.H, HV, ADD=add, **shared_constants(call, form, "precondition_grads"),
    )  # fmt: skip
    return grads
