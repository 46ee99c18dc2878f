"""Linear attention and the delta rules by kernels: the launches of a forward, most of which a backward repeats.

Buffers [BT, HV, ...] count the tokens of all rows through, [M, HV, ...] the chunks, [P, HV, ...] the segments (see `tables`).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .._shared.sequences import Sequences
from .channel import prepare
from .config import padded
from .cumulate import cumulate
from .plan import Inputs, Plan, Saved, heads
from .preconditioner import keys_to_write, start_preconditioner
from .read import output
from .solve import solve
from .tables import CHUNK, Table, table
from .walk import join, walk


def forward(x: Inputs, sequences: Sequences, scale: float, bound: float, eps: float, final: bool) -> tuple[Tensor, ...]:
    """o, the final S and A (empty unless `final`), and what backward keeps."""
    plan = Plan(x, sequences)
    where = table(sequences, plan.segment, plan.device)
    float32 = torch.float32
    saved = Saved(*(plan.new(*shape, dtype=dtype) for shape, dtype in plan.kept()))
    N, HV, K, V = sequences.count, plan.HV, plan.K, plan.V
    S_end = plan.new(N if final else 0, HV, K, V, dtype=float32)
    A_end = plan.new(N if final and plan.precond else 0, HV, K, dtype=float32)
    o = torch.empty_like(x.v)
    if plan.precond:
        start_preconditioner(x, plan, where, saved.gram, A_end if final else None)
    written = solved(x, plan, where, saved, scale, bound, eps, known=False)
    if plan.segment is not None:
        steps(x, plan, where, written, saved, None, None, summary=True)
        join_segments(plan, where, saved.starts, saved.transitions, x.S, back=False)
    h = steps(x, plan, where, written, saved, saved.starts if plan.segment else x.S, S_end if final else None)
    grid = (-(-V // plan.tile["output"].BV) * len(where.chunks), HV)
    if all(grid):
        output[grid](
            written.q, written.keys, written.u, saved.G, written.P, h, o, where.chunks, scale, plan.H, HV, K=K, V=V,
            HEADS_Q=heads(plan, written.q), HEADS_K=heads(plan, written.keys), DECAY=plan.decay, PRECISION=plan.precision,
            **plan.options("output", "BK", "BV"),
        )  # fmt: skip
    return o, S_end, A_end, *saved


class Written(NamedTuple):
    """What the walks and the outputs take: queries, keys written along, W, u (before the walk U); the write keys as they are;
    backwards what earlier tokens left in the preconditioner's A [B, T, HV, K]; with decays a channel, where queries and keys
    come decayed, P [BT, HV, 64] and G at the chunks' ends [M, HV, K]."""

    q: Tensor
    keys: Tensor
    W: Tensor | None
    u: Tensor
    writes: Tensor
    A: Tensor | None
    P: Tensor | None = None
    last_gate: Tensor | None = None


def solved(
    x: Inputs, plan: Plan, where: Table, saved: Saved, scale: float, bound: float, eps: float, known: bool
) -> Written:  # fmt: skip
    """The chunks' own part. known: T and the summed decays are there already."""
    HV, K, V, grid = plan.HV, plan.K, plan.V, (len(where.chunks), plan.HV)
    keys, A = x.k if x.write_key is None else x.write_key, None
    if plan.precond:
        keys, A = keys_to_write(x, plan, where, saved.gram, bound, eps, keep=known)
    gates = {"HEADS_G": heads(plan, x.g), "HEADS_BETA": heads(plan, x.beta), "HEADS_W": heads(plan, keys)}
    W, u = (plan.new(plan.tokens, HV, K), plan.new(plan.tokens, HV, V)) if plan.delta else (None, x.v)
    if plan.decay == 2:
        Qd, Ke = (plan.new(*x.q.shape[:2], HV, K) for _ in range(2))
        P, last_gate = plan.new(plan.tokens, HV, CHUNK), plan.new(len(where.chunks), HV, K, dtype=torch.float32)
        if all(grid):
            prepare[grid](
                x.q, x.k, keys, x.v, x.beta, x.g, saved.T, Qd, Ke, P, W, u, last_gate, where.chunks, scale,
                plan.H, HV, K=K, V=V, **gates, WRITE=plan.writes, DELTA=plan.delta, KNOWN=known, PRECISION=plan.precision,
                **plan.options("prepare", "BK", "BV"),
            )  # fmt: skip
        return Written(Qd, Ke, W, u, keys, A, P, last_gate)
    if plan.delta and all(grid):
        solve[grid](
            x.k, keys, x.v, x.beta, x.g, saved.T, W, u, saved.G, where.chunks,
            plan.H, HV, K=K, V=V, **gates, WRITE=plan.writes, DECAY=plan.decay == 1, KNOWN=known, PRECISION=plan.precision,
            **plan.options("solve_again" if known else "solve", "BK", "BV"),
        )  # fmt: skip
    elif plan.decay == 1 and not known and all(grid):
        width = min(32, padded(HV))
        cumulate[len(where.chunks), -(-HV // width)](x.g, saved.G, where.chunks, HV, PH=width, HEADS_G=heads(plan, x.g))
    return Written(x.q, keys, W, u, keys, A)


def steps(
    x: Inputs, plan: Plan, where: Table, written: Written, saved: Saved, start: Tensor | None, end: Tensor | None,
    summary: bool = False,
) -> Tensor:  # fmt: skip
    """The walk: states at the chunks' starts [M, HV, K, V]; U becomes u. With `summary` what each segment adds, and T."""
    HV, K, V, tile = plan.HV, plan.K, plan.V, plan.tile["walk" if plan.segment is None else "walk_segments"]
    h = plan.new(0 if summary else len(where.chunks), HV, K, V)
    parts = -(-V // tile.BV) + (-(-K // tile.BV) if summary and plan.delta else 0)
    grid = (parts * len(where.segments), HV)
    if all(grid):
        walk[grid](
            written.keys, written.W, written.u, saved.G, written.last_gate, start, h, saved.starts if summary else end,
            saved.transitions, where.segments, plan.H, HV, K=K, PK=tile.BK, V=V, BV=tile.BV,
            HEADS_K=heads(plan, written.keys), DELTA=plan.delta, DECAY=plan.decay, STARTED=start is not None,
            ENDED=end is not None, SUMMARY=summary, STAGES=tile.num_stages, PRECISION=plan.precision, num_warps=tile.num_warps,
        )  # fmt: skip
    return h


def join_segments(
    plan: Plan, where: Table, added: Tensor, transitions: Tensor, begin: Tensor | None, back: bool
) -> None:
    tile = plan.tile["join"]
    grid = (-(-plan.V // tile.BV) * plan.sequences.count, plan.HV)
    if all(grid):
        join[grid](
            begin, added, transitions, where.spans, plan.HV, K=plan.K, PK=padded(plan.K), V=plan.V, DELTA=plan.delta,
            BACK=back, BEGUN=begin is not None, PRECISION=plan.precision, **plan.options("join", "BK", "BV"),
        )  # fmt: skip
