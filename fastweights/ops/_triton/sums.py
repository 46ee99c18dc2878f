"""Sums over what several programs, or several heads, ask of one gate."""

from __future__ import annotations

import triton
import triton.language as tl

from .jit import jit

SUMS = 1024  # of a program


@triton.jit
def summed(parts, out, apart, count, PARTS: tl.constexpr, HEADS: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for part in tl.static_range(PARTS):
        for head in range(HEADS):
            total += tl.load(parts + part * apart + at * HEADS + head, at < count, 0.0)
    tl.store(out + at, total.to(out.dtype.element_ty), at < count)


@jit(aligned=True)
def gate_sums(
    to_gates, dbeta, dg, apart, of_beta, of_g, PARTS: tl.constexpr, HEADS_BETA: tl.constexpr, HEADS_G: tl.constexpr,
    BETA: tl.constexpr, G: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """to_gates [PARTS, 2, BT, HV], `apart` from part to part: dbeta and dg, of so many numbers, each where it is asked for."""
    if BETA:
        summed(to_gates, dbeta, apart, of_beta, PARTS, HEADS_BETA, BLOCK)
    if G:
        summed(to_gates + apart // 2, dg, apart, of_g, PARTS, HEADS_G, BLOCK)
