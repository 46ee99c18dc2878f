"""Rows of D numbers as tuples of blocks [BN, BK], one row of a matrix per warp: then sums over a row stay within a warp. D and
BK are powers of two or D is cut off by a mask. A single row that all warps read has the same numbers in all BN rows."""

# mypy: disable-error-code="assignment"
# (the tuples begin empty)

from __future__ import annotations

import triton
import triton.language as tl

from .gated_norm import activate


@triton.jit
def load_blocks(x, at, exists, D: tl.constexpr, BK: tl.constexpr, depth=None):
    """Rows that begin at `at` [BN, 1]. depth: up to where they have numbers; None for D."""
    blocks = ()
    for j in tl.static_range((D + BK - 1) // BK):
        k = j * BK + tl.arange(0, BK)[None, :]
        blocks = blocks + (tl.load(x + at + k, exists & (k < (D if depth is None else depth)), 0.0),)
    return blocks


@triton.jit
def load_repeated(x, PERIOD: tl.constexpr, SPAN: tl.constexpr, D: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    """A row whose number k is x[k / SPAN % PERIOD]."""
    blocks = ()
    for j in tl.static_range((D + BK - 1) // BK):
        k = j * BK + tl.arange(0, BK)[None, :] + tl.zeros((BN, 1), tl.int32)
        blocks = blocks + (tl.load(x + k // SPAN % PERIOD, k < D, 0.0),)
    return blocks


@triton.jit
def store_blocks(x, at, writes, blocks, D: tl.constexpr, BK: tl.constexpr):
    for j in tl.static_range(len(blocks)):
        k = j * BK + tl.arange(0, BK)[None, :]
        tl.store(x + at + k, blocks[j], writes & (k < D))


@triton.jit
def round_blocks(blocks, DTYPE: tl.constexpr):
    rounded = ()
    for j in tl.static_range(len(blocks)):
        rounded = rounded + (blocks[j].to(DTYPE),)
    return rounded


@triton.jit
def add_blocks(a, b):
    total = ()
    for j in tl.static_range(len(a)):
        total = total + (a[j].to(tl.float32) + b[j].to(tl.float32),)
    return total


@triton.jit
def scale_blocks(a, b):
    product = ()
    for j in tl.static_range(len(a)):
        product = product + (a[j].to(tl.float32) * b[j].to(tl.float32),)
    return product


@triton.jit
def activate_blocks(z, GATE: tl.constexpr):
    gates = ()
    for j in tl.static_range(len(z)):
        a, _ = activate(z[j].to(tl.float32), GATE)
        gates = gates + (a,)
    return gates


@triton.jit
def normalize_blocks(row, eps, D: tl.constexpr, V: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    """Each group of V numbers of the row divided by its rms. V is D, or divides BK, or is a multiple of it."""
    GROUP: tl.constexpr = (V + BK - 1) // BK  # blocks of a group
    normed = ()
    for j in tl.static_range(len(row)):
        if j % GROUP == 0:
            squares = tl.zeros((BN, BK), tl.float32)
            for i in tl.static_range(GROUP):
                squares += row[j + i].to(tl.float32) * row[j + i].to(tl.float32)
            if V < BK and V < D:
                r = tl.rsqrt(tl.sum(tl.reshape(squares, (BN, BK // V, V)), 2) / V + eps)
                r = tl.reshape(tl.broadcast_to(r[:, :, None], (BN, BK // V, V)), (BN, BK))
            else:
                r = tl.rsqrt(tl.sum(squares, 1) / V + eps)[:, None]
        normed = normed + (row[j].to(tl.float32) * r,)
    return normed


@triton.jit
def center_blocks(row, D: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    """A row of D numbers less their mean."""
    sums = tl.zeros((BN, BK), tl.float32)
    for j in tl.static_range(len(row)):
        sums += row[j].to(tl.float32)
    mean = tl.sum(sums, 1)[:, None] / D
    centered = ()
    for j in tl.static_range(len(row)):
        k = j * BK + tl.arange(0, BK)[None, :]
        centered = centered + (tl.where(k < D, row[j].to(tl.float32) - mean, 0.0),)
    return centered


@triton.jit
def multiply_blocks(row, weights, BN: tl.constexpr, BK: tl.constexpr):
    """The products [1, BN] of a row with the rows of a matrix."""
    sums = tl.zeros((BN, BK), tl.float32)
    for j in tl.static_range(len(row)):
        sums += row[j].to(tl.float32) * weights[j].to(tl.float32)
    return tl.sum(sums, 1)[None, :]
