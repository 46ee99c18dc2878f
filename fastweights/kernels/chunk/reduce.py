"""Sums over what several programs ask of one gate or of the centre."""

from __future__ import annotations

from math import prod

import triton
import triton.language as tl

from ..runtime.jit import jit
from ..runtime.workspace import Buffer
from .sizes import Inputs, Plan, heads

__all__ = ["sum_up"]

NUMBERS = 1024  # that a program looks at side by side


@triton.jit
def summed(parts, out, apart, count, PARTS: tl.constexpr, HEADS: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for part in tl.static_range(PARTS):
        for head in range(HEADS):
            total += tl.load(parts + part * apart + at * HEADS + head, at < count, 0.0)
    tl.store(out + at, total.to(out.dtype.element_ty), at < count)


@jit(aligned=True)
def sums(
    to_gates, to_center, dbeta, dg, dcenter, apart, of_beta, of_g, chunks, HV,
    PARTS: tl.constexpr, HEADS_BETA: tl.constexpr, HEADS_G: tl.constexpr, BETA: tl.constexpr, G: tl.constexpr,
    CENTER: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """to_gates [PARTS, 2, BT, HV], `apart` from part to part: dbeta and dg, of so many numbers. to_center [M, HV]: dcenter, a
    program a head, behind the others. Each where it is asked for."""
    if BETA:
        summed(to_gates, dbeta, apart, of_beta, PARTS, HEADS_BETA, BLOCK)
    if G:
        summed(to_gates + apart // 2, dg, apart, of_g, PARTS, HEADS_G, BLOCK)
    if CENTER:
        head = tl.program_id(0) - (tl.num_programs(0) - HV)
        if head >= 0:
            total = tl.zeros((BLOCK,), tl.float32)
            for first in range(0, chunks, BLOCK):
                m = first + tl.arange(0, BLOCK)
                total += tl.load(to_center + m.to(tl.int64) * HV + head, m < chunks, 0.0)
            tl.store(dcenter + head, tl.sum(total, 0).to(dcenter.dtype.element_ty))


def sum_up(
    x: Inputs, plan: Plan, to_gates: Buffer | None, to_center: Buffer | None
) -> tuple[Buffer | None, Buffer | None, Buffer | None]:  # fmt: skip
    """The gradients of beta, of a decay a head and of the centre, as these are; see `sums`."""
    parts, *part = (0, 0) if to_gates is None else to_gates.shape
    beta = None if to_gates is None else x.beta
    g = x.g if to_gates is not None and plan.decay == 1 else None
    center = None if to_center is None else x.center
    dbeta, dg, dcenter = (None if y is None else plan.new(*y.shape, dtype=y.dtype) for y in (beta, g, center))
    of_beta, of_g = (0 if y is None else prod(y.shape) for y in (beta, g))
    programs = -(-max(of_beta, of_g) // NUMBERS) + (0 if center is None else plan.HV)
    plan.launch(
        sums, (programs,), to_gates, to_center, dbeta, dg, dcenter, prod(part), of_beta, of_g, plan.where.M, plan.HV,
        PARTS=parts, HEADS_BETA=heads(plan, beta), HEADS_G=heads(plan, g), BETA=beta is not None, G=g is not None,
        CENTER=center is not None, BLOCK=NUMBERS,
    )  # fmt: skip
    return dbeta, dg, dcenter
