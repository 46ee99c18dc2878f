"""What the memory answers to the tokens of a chunk, in Gluon for Hopper GPUs: `chunk_output` of common/delta_rule in the launch
that found what the memory is asked, so that this need not be read again."""

from __future__ import annotations

from ..common.hopper_tiles import copy_rows, product_layout, show_to_products
from ..common.math import infinite_to_nan
from ..runtime.gluon import gl, gluon, warpgroup_mma, warpgroup_mma_wait


@gluon.jit
def copy_memory(pair, writes, v, first, count, head, HV: gl.constexpr, HEADS_W: gl.constexpr):
    """Begin to copy a chunk's write keys and values into the two tiles [64, K] of `pair`."""
    K: gl.constexpr = pair.shape[2]
    WRITE_ROW: gl.constexpr = HV // HEADS_W * K
    copy_rows(pair.index(0), writes + first * WRITE_ROW + head // HEADS_W * K, count, WRITE_ROW, True)
    copy_rows(pair.index(1), v + (first * HV + head) * K, count, HV * K, True)


@gluon.jit
def memory_answers(asked, rest, ws, vs, states, decays, count, HV: gl.constexpr):
    """asked, rest [64, K]: what the memory is asked, as the sum of two; in shared memory its keys ws and values vs [64, K], and
    its state [K, K] at the chunk's start; decays: where the log decays of the chunk's tokens begin."""
    WIDE: gl.constexpr = asked.type.layout
    SQUARE: gl.constexpr = product_layout(4, 64)
    LEFT: gl.constexpr = gl.DotOperandLayout(0, WIDE, 2)
    LEFT_K: gl.constexpr = gl.DotOperandLayout(0, SQUARE, 2)
    TYPE: gl.constexpr = asked.dtype
    row = gl.arange(0, 64, gl.SliceLayout(1, WIDE))
    i = gl.arange(0, 64, gl.SliceLayout(1, SQUARE))
    j = gl.arange(0, 64, gl.SliceLayout(0, SQUARE))
    of_row = gl.load(decays + gl.minimum(row, count - 1) * HV)  # past the end the last decay: no overflow
    of_later = gl.load(decays + gl.minimum(i, count - 1) * HV)
    of_earlier = gl.load(decays + gl.minimum(j, count - 1) * HV)
    none = gl.zeros([64, 64], gl.float32, SQUARE)
    nothing = gl.zeros([64, asked.shape[1]], gl.float32, WIDE)
    left, left_rest = gl.convert_layout(asked, LEFT_K), gl.convert_layout(rest, LEFT_K)
    wide, wide_rest = gl.convert_layout(asked, LEFT), gl.convert_layout(rest, LEFT)
    scores = warpgroup_mma(left, ws.permute((1, 0)), none, use_acc=False, is_async=True)
    scores = warpgroup_mma(left_rest, ws.permute((1, 0)), scores, is_async=True)
    out = warpgroup_mma(wide, states, nothing, use_acc=False, is_async=True)
    out = warpgroup_mma(wide_rest, states, out, is_async=True)
    scores, left, left_rest = warpgroup_mma_wait(2, deps=[scores, left, left_rest])
    lower = i[:, None] >= j[None, :]
    scores *= gl.exp2(gl.where(lower, of_later[:, None] - of_earlier[None, :], 0.0))
    scores = gl.convert_layout(gl.where(lower, scores, 0.0).to(TYPE), LEFT)
    out, wide, wide_rest = warpgroup_mma_wait(0, deps=[out, wide, wide_rest])
    out *= gl.exp2(of_row)[:, None]
    result = warpgroup_mma(scores, vs, out, is_async=True)
    result, scores = warpgroup_mma_wait(0, deps=[result, scores])
    lost = gl.sum(gl.sum(result * 0.0, 1), 0)
    if lost != lost:  # a bad token spoils itself and what follows, and not by products with 0 what was before
        values = vs.load(WIDE)
        bad = ~(gl.abs(values.to(gl.float32)) < float("inf"))
        first_bad = gl.min(gl.where(bad, row[:, None], 64), 0)
        vs.store(gl.where(bad, 0.0, values).to(TYPE))
        show_to_products()
        result = warpgroup_mma(scores, vs, out, is_async=True)
        result, scores = warpgroup_mma_wait(0, deps=[result, scores])
        result = infinite_to_nan(gl.where(row[:, None] >= first_bad[None, :], float("nan"), result))
    return result
