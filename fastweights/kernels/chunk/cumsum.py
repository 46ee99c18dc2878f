"""Log decays summed from the start of every chunk."""

from __future__ import annotations

import triton.language as tl

from ..math import clamped
from ..runtime.jit import jit


@jit(aligned=True)
def cumulate(g, G, chunks, HV, PH: tl.constexpr, HEADS_G: tl.constexpr):
    """G [BT, HV] in base 2 from g [BT, HV / HEADS_G], one chunk of all heads."""
    m = tl.program_id(0)
    first = tl.load(chunks + 2 * m).to(tl.int64)
    i = tl.arange(0, 64)
    head = tl.program_id(1) * PH + tl.arange(0, PH)
    here = (i < tl.load(chunks + 2 * m + 1))[:, None] & (head < HV)[None, :]
    token = (first + i)[:, None]
    decay = clamped(tl.load(g + token * (HV // HEADS_G) + (head // HEADS_G)[None, :], here, 0.0))
    tl.store(G + token * HV + head[None, :], tl.cumsum(decay, 0), here)
