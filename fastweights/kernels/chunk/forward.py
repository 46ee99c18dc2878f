"""Linear attention and the delta rules by kernels: the launches of a forward, most of which a backward repeats.

Buffers [BT, HV, ...] count the tokens of all rows through, [M, HV, ...] the chunks, [P, HV, ...] the segments (see `tables`).
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from ..runtime.packing import CHUNK
from ..runtime.workspace import Buffer
from .channel_decay import prepare
from .cumsum import cumulate
from .output import output
from .preconditioner import start_preconditioner, write_all_keys
from .sizes import Inputs, Plan, Saved, heads
from .state import join, walk
from .tiles import padded
from .wy import solve


def forward(
    x: Inputs, plan: Plan, scale: float, bound: float, eps: float, final: bool
) -> tuple[tuple[Buffer | None, ...], Saved]:  # fmt: skip
    """o and the final S and A (None unless `final`), and what backward keeps."""
    HV, K, V = plan.HV, plan.K, plan.V
    saved, (S_end, A_end) = plan.saved(), plan.ends(final)
    o = plan.tokenwise(HV, V)
    if plan.precond:
        start_preconditioner(x, plan, saved.gram, A_end)
    written = solved(x, plan, saved, scale, bound, eps, known=False)
    if plan.segment is not None:
        steps(x, plan, written, saved, None, None, summary=True)
        join_segments(plan, saved.starts, saved.transitions, x.S, back=False)
    h = steps(x, plan, written, saved, saved.starts if plan.segment else x.S, S_end)
    grid = (-(-V // plan.tile["output"].BV) * plan.where.M, HV)
    plan.launch(
        output, grid,
        written.q, written.keys, written.u, saved.G, written.P, h, o, plan.where.chunks, scale, plan.H, HV, K=K, V=V,
        HEADS_Q=heads(plan, written.q), HEADS_K=heads(plan, written.keys), DECAY=plan.decay, PRECISION=plan.precision,
        **plan.options("output", "BK", "BV"),
    )  # fmt: skip
    return (o, S_end, A_end), saved


class Written(NamedTuple):
    """What the walks and the outputs take: queries, keys written along, W, u (before the walk U); the write keys as they are;
    with decays a channel, where queries and keys come decayed, P [BT, HV, 64] and G at the chunks' ends [M, HV, K]."""

    q: Buffer
    keys: Buffer
    W: Buffer | None
    u: Buffer
    writes: Buffer
    P: Buffer | None = None
    last_gate: Buffer | None = None


def solved(
    x: Inputs, plan: Plan, saved: Saved, scale: float, bound: float, eps: float, known: bool
) -> Written:  # fmt: skip
    """The chunks' own part. known: what is saved is there already, u as well."""
    HV, K, V, grid = plan.HV, plan.K, plan.V, (plan.where.M, plan.HV)
    keys = x.k if x.write_key is None else x.write_key
    if plan.precond:
        if not known:
            write_all_keys(x, plan, saved.gram, bound, eps, saved.writes)
        keys = saved.writes
    gates = {"HEADS_G": heads(plan, x.g), "HEADS_BETA": heads(plan, x.beta), "HEADS_W": heads(plan, keys)}
    W = plan.tokenwise(HV, K) if plan.delta else None
    u = x.v if saved.u is None else saved.u
    if plan.decay == 2:
        Qd, Ke = (plan.tokenwise(HV, K) for _ in range(2))
        P, last_gate = plan.tokenwise(HV, CHUNK), plan.new(plan.where.M, HV, K, dtype=torch.float32)
        plan.launch(
            prepare, grid, x.q, x.k, keys, x.v, x.beta, x.g, saved.T, Qd, Ke, P, W, u, last_gate, plan.where.chunks, scale,
            plan.H, HV, K=K, V=V, **gates, WRITE=plan.writes, DELTA=plan.delta, KNOWN=known, PRECISION=plan.precision,
            **plan.options("prepare", "BK", "BV"),
        )  # fmt: skip
        return Written(Qd, Ke, W, u, keys, P, last_gate)
    if plan.delta:
        plan.launch(
            solve, grid, x.k, keys, x.v, x.beta, x.g, saved.T, W, u, saved.G, plan.where.chunks,
            plan.H, HV, K=K, V=V, **gates, WRITE=plan.writes, DECAY=plan.decay == 1, KNOWN=known, PRECISION=plan.precision,
            **plan.options("solve_again" if known else "solve", "BK", "BV"),
        )  # fmt: skip
    elif plan.decay == 1 and not known:
        width = min(32, padded(HV))
        grid = plan.where.M, -(-HV // width)
        plan.launch(cumulate, grid, x.g, saved.G, plan.where.chunks, HV, PH=width, HEADS_G=heads(plan, x.g))
    return Written(x.q, keys, W, u, keys)


def steps(
    x: Inputs, plan: Plan, written: Written, saved: Saved, start: Buffer | None, end: Buffer | None,
    summary: bool = False, known: bool = False,
) -> Buffer:  # fmt: skip
    """The walk: states at the chunks' starts [M, HV, K, V]; U becomes u, unless it is known to be already. With `summary` what
    each segment adds, and T."""
    HV, K, V, tile = plan.HV, plan.K, plan.V, plan.tile["walk" if plan.segment is None else "walk_segments"]
    h = plan.new(0 if summary else plan.where.M, HV, K, V)
    parts = -(-V // tile.BV) + (-(-K // tile.BV) if summary and plan.delta else 0)
    grid = (parts * plan.where.P, HV)
    plan.launch(
        walk, grid, written.keys, written.W, written.u, saved.G, written.last_gate, start, h, saved.starts if summary else end,
        saved.transitions, plan.where.segments, plan.H, HV, K=K, PK=tile.BK, V=V, BV=tile.BV,
        HEADS_K=heads(plan, written.keys), DELTA=plan.delta and not known, DECAY=plan.decay, STARTED=start is not None,
        ENDED=end is not None, SUMMARY=summary, STAGES=tile.num_stages, PRECISION=plan.precision, num_warps=tile.num_warps,
    )  # fmt: skip
    return h


def join_segments(plan: Plan, added: Buffer, transitions: Buffer, begin: Buffer | None, back: bool) -> None:
    tile = plan.tile["join"]
    grid = (-(-plan.V // tile.BV) * plan.sequences.count, plan.HV)
    plan.launch(
        join, grid, begin, added, transitions, plan.where.spans, plan.HV, K=plan.K, PK=padded(plan.K), V=plan.V, DELTA=plan.delta,
        BACK=back, BEGUN=begin is not None, PRECISION=plan.precision, **plan.options("join", "BK", "BV"),
    )  # fmt: skip
