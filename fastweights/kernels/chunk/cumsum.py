"""Chunk cumsum: log decays summed from the start of every chunk."""

from __future__ import annotations

import triton
import triton.language as tl

from ..math import clamped
from ..packing import chunk_place


@triton.jit(do_not_specialize=["time"])
def chunk_cumsum(g, G, chunks, time, HV, PH: tl.constexpr, HEADS_G: tl.constexpr):
    """G [BT, HV] in base 2 from g [BT, HV / HEADS_G], one chunk of all heads."""
    m = tl.program_id(0)
    first, count = chunk_place(chunks, m, time)
    if count == 0:
        return
    i = tl.arange(0, 64)
    head = tl.program_id(1) * PH + tl.arange(0, PH)
    here = (i < count)[:, None] & (head < HV)[None, :]
    token = (first + i)[:, None]
    decay = clamped(tl.load(g + token * (HV // HEADS_G) + (head // HEADS_G)[None, :], here, 0.0))
    tl.store(G + token * HV + head[None, :], tl.cumsum(decay, 0), here)
