"""The gradients of the gates and of the centre, summed over the partial sums that several programs wrote."""

from __future__ import annotations

from math import prod

import triton
import triton.language as tl

from ..runtime.launch_plan import Recorder
from ..runtime.workspace import TensorSpec
from .sizes import ChunkSizes, KernelInputs, SavedForBackward

__all__ = ["reduce_grads"]

BLOCK = 1024  # numbers of one program


@triton.jit
def sum_parts(parts, out, stride, count, PARTS: tl.constexpr, HEADS: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for part in tl.static_range(PARTS):
        for head in range(HEADS):
            total += tl.load(parts + part * stride + at * HEADS + head, at < count, 0.0)
    tl.store(out + at, total.to(out.dtype.element_ty), at < count)


@triton.jit(do_not_specialize=["stride", "beta_count", "g_count", "M"])
def reduce_gate_grads(
    gate_grads, center_grads, dbeta, dg, dcenter, chunks, stride, beta_count, g_count, M, HV,
    PARTS: tl.constexpr, HEADS_BETA: tl.constexpr, HEADS_G: tl.constexpr, BETA: tl.constexpr, G: tl.constexpr,
    CENTER: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """gate_grads [PARTS, 2, BT, HV], `stride` from part to part: dbeta and dg, of beta_count and g_count numbers. center_grads
    [M, HV]: dcenter, one program per head, after the others. BETA, G, CENTER: which of these are wanted."""
    if BETA:
        sum_parts(gate_grads, dbeta, stride, beta_count, PARTS, HEADS_BETA, BLOCK)
    if G:
        sum_parts(gate_grads + stride // 2, dg, stride, g_count, PARTS, HEADS_G, BLOCK)
    if CENTER:
        head = tl.program_id(0) - (tl.num_programs(0) - HV)
        if head >= 0:
            total = tl.zeros((BLOCK,), tl.float32)
            for first in range(0, M, BLOCK):
                m = first + tl.arange(0, BLOCK)
                used = m < M
                if chunks is not None:  # numbers that no chunk has were not written
                    used = tl.load(chunks + 2 * m + 1, used, 0) > 0
                total += tl.load(center_grads + m.to(tl.int64) * HV + head, used, 0.0)
            tl.store(dcenter + head, tl.sum(total, 0).to(dcenter.dtype.element_ty))


def reduce_grads(
    recorder: Recorder, x: KernelInputs, sizes: ChunkSizes, saved: SavedForBackward, gate_grads: TensorSpec | None,
    center_grads: TensorSpec | None,
) -> tuple[TensorSpec | None, TensorSpec | None, TensorSpec | None]:  # fmt: skip
    """The gradients of beta, of a decay per head and of the centre, in the shapes and dtypes of these; see the kernel."""
    parts, *part = (0, 0) if gate_grads is None else gate_grads.shape
    beta = None if gate_grads is None else x.beta
    g = x.g if gate_grads is not None and sizes.decay == 1 else None
    center = None if center_grads is None else x.center
    dbeta, dg, dcenter = (None if y is None else sizes.empty(*y.shape, dtype=y.dtype) for y in (beta, g, center))
    beta_count, g_count = (0 if y is None else prod(y.shape) for y in (beta, g))
    programs = -(-max(beta_count, g_count) // BLOCK) + (0 if center is None else sizes.HV)
    recorder.launch(
        reduce_gate_grads, (programs,), gate_grads, center_grads, dbeta, dg, dcenter, saved.chunk_table, prod(part), beta_count,
        g_count, sizes.M, sizes.HV, PARTS=parts, HEADS_BETA=sizes.group(beta), HEADS_G=sizes.group(g), BETA=beta is not None,
        G=g is not None, CENTER=center is not None, BLOCK=BLOCK,
    )  # fmt: skip
    return dbeta, dg, dcenter
