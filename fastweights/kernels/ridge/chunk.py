"""What the kernels read of a chunk, and numbers written as sums of two."""

from __future__ import annotations

import triton
import triton.language as tl

from ..common.tiles import load_gate, load_rows


@triton.jit
def load_sum_of_two(x, rest, first, live, head, HV, c, K: tl.constexpr):
    """The sum of two such tensors in float32, the second one or None."""
    whole = load_rows(x, first, live, head, HV, c, K, 1).to(tl.float32)
    if rest is not None:
        whole += load_rows(rest, first, live, head, HV, c, K, 1).to(tl.float32)
    return whole


@triton.jit
def store_in_two(x, to, rest, mask):
    """x float32 as the sum of two tensors, or where `rest` is None as one. What float16 cannot hold becomes its largest
    number."""
    high = cast_in_range(x, to)
    tl.store(to, high, mask)
    if rest is not None:
        tl.store(rest, cast_in_range(x - high.to(tl.float32), rest), mask)


@triton.jit
def cast_in_range(x, to):
    if to.dtype.element_ty == tl.float16:
        x = tl.where(x > 65504.0, 65504.0, tl.where(x < -65504.0, -65504.0, x))
    return x.to(to.dtype.element_ty)


@triton.jit
def decay_factors(gate, first, count, head, HV):
    """Of the chunk's tokens the log decay from its start (base 2; past the end the last one), and that of the whole chunk."""
    i = tl.arange(0, 64)
    decay = tl.load(gate + first * HV + head + tl.minimum(i, count - 1) * HV)
    return decay, tl.load(gate + (first + count - 1) * HV + head)


@triton.jit
def load_gain(beta, first, live, head, HV, HEADS_BETA: tl.constexpr):
    """The gains of the tokens, 0 past the end."""
    if beta is None:  # noqa: SIM108 (one is known when compiling)
        gain = live.to(tl.float32)
    else:
        gain = load_gate(beta, first, live, head, HV, HEADS_BETA)
    return gain
