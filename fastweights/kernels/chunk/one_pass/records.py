"""The record of a chunk, which `solve_chunks` leaves and the passes read: see the head of this folder."""

from __future__ import annotations

from ...runtime.gluon import async_copy, gl, gluon

# Where the record of a chunk, numbers of 16 bits, has four numbers per token in float32, one of the chunk (`chunk_growth`), and
# for a backward T; in front is P. The four: the decay from the chunk's start, that to its end, beta, and the summed log decay in
# base 2. The number of the chunk has 128 bytes, so that T begins at a line of the cache.
FACTORS_PLACE = gl.constexpr(4096)
GROWTH_PLACE = gl.constexpr(4096 + 512)
T_PLACE = gl.constexpr(4096 + 576)


@gluon.jit
def factors_of(record):
    """The four numbers per token [4, 64] of a chunk's record."""
    return (record + FACTORS_PLACE).to(gl.pointer_type(gl.float32), bitcast=True)


@gluon.jit
def growth_of(record):
    """The number of a chunk in its record."""
    return (record + GROWTH_PLACE).to(gl.pointer_type(gl.float32), bitcast=True)


@gluon.jit
def copy_factors(buffer, record, there):
    """Begin to copy numbers per token of a chunk, as many as the buffer holds."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([4], [32], [gl.num_warps()], [0])
    i = gl.arange(0, buffer.shape[0], LAYOUT)
    async_copy.async_copy_global_to_shared(buffer, factors_of(record) + i, mask=(i < buffer.shape[0]) & there)
