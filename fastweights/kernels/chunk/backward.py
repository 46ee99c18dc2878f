"""Linear attention and the delta rules by kernels: the launches of a backward.

What the forward keeps is in `Saved`; all else is computed again.
"""

from __future__ import annotations

from math import prod

import torch

from ..runtime.packing import CHUNK
from ..runtime.workspace import Buffer
from .channel_decay import channel_gradients
from .forward import join_segments, solved, steps
from .gradients import gradients
from .output import value_gradient
from .preconditioner import Asked, ask_preconditioner, preconditioner_gradients
from .reduce import sum_up
from .sizes import Inputs, Plan, Saved, heads
from .state import walk_back


def backward(
    x: Inputs, plan: Plan, scale: float, bound: float, eps: float, saved: Saved,
    do: Buffer, dS_end: Buffer | None, dA_end: Buffer | None, states: bool,
) -> Inputs:  # fmt: skip
    """The gradient of every input, of q, k and the preconditioner's gates for every value head; those of the initial states where
    `states`."""
    where, N, HV, K, V = plan.where, plan.sequences.count, plan.HV, plan.K, plan.V
    float32 = torch.float32
    written = solved(x, plan, saved, scale, bound, eps, known=True)
    h = steps(x, plan, written, saved, saved.starts if plan.segment else x.S, None, known=True)

    M = where.M
    wide = {"HEADS_Q": heads(plan, written.q), "HEADS_K": heads(plan, written.keys), "DECAY": plan.decay}
    dv, du = plan.tokenwise(HV, V), None
    dP = plan.tokenwise(HV, CHUNK)

    def ask(out: Buffer, states: Buffer | None) -> None:
        """P^T dO, or with the states' gradients all of dV; and dP."""
        plan.launch(
            value_gradient, (M, HV),
            written.q, written.keys, written.u, do, saved.G, written.P, states, out, dP, where.chunks, scale, plan.H, HV,
            K=K, V=V, **wide, STATES=states is not None, PRECISION=plan.precision,
            **plan.options("value_gradient", "BK", "BV"),
        )  # fmt: skip

    if plan.delta:
        du = plan.tokenwise(HV, V)
        ask(du, None)
    dh = plan.new(M, HV, K, V)
    dS = plan.new(N, HV, K, V, dtype=float32) if states else None
    tile = plan.tile["walk_back"]

    def back(start: Buffer | None, end: Buffer | None, summary: bool) -> None:
        plan.launch(
            walk_back, (-(-V // tile.BV) * where.P, HV),
            written.q, written.keys, written.W, saved.T, du, do, saved.G, written.last_gate, start, dh, end, where.segments,
            scale, plan.H, HV, K=K, PK=tile.BK, V=V, BV=tile.BV, **wide, DELTA=plan.delta, STARTED=start is not None,
            ENDED=end is not None, SUMMARY=summary, STAGES=tile.num_stages, PRECISION=plan.precision,
            num_warps=tile.num_warps,
        )  # fmt: skip

    if plan.segment is not None:
        ends = plan.new(*saved.starts.shape, dtype=float32)
        back(None, ends, summary=True)
        join_segments(plan, ends, saved.transitions, dS_end, back=True)
        dS_end = ends
    back(dS_end, dS, summary=False)
    if not plan.delta:
        ask(dv, dh)

    channel = plan.decay == 2
    parts = -(-K // plan.tile["channel_gradients" if channel else "gradients"].BK)
    dq, dk = plan.tokenwise(HV, K), plan.tokenwise(HV, K)
    dw = plan.tokenwise(HV, K) if plan.writes else None
    dg = plan.tokenwise(HV, K, dtype=float32) if channel else None
    to_gates = plan.new(parts, 2, *plan.rows, HV, dtype=float32)  # of beta and g, parts of sums over the key channels
    apart = prod(to_gates.shape[1:])
    common = {
        "K": K, "V": V, "HEADS_BETA": heads(plan, x.beta), "HEADS_W": heads(plan, written.writes), "WRITE": plan.writes,
        "DELTA": plan.delta, "PRECISION": plan.precision,
    }  # fmt: skip
    if channel:
        for name in ("channel_gradients", "channel_halves"):
            plan.launch(
                channel_gradients, (parts * M, HV),
                x.q, x.k, written.writes, x.v, x.beta, x.g, written.last_gate, written.u, du, do, dP, h, dh, where.chunks,
                scale, dq, dk, dw, dv, to_gates, dg, apart, plan.H, HV, HEADS_G=heads(plan, x.g),
                FLAT=name == "channel_gradients", **common, **plan.options(name, "BK", "BV"),
            )  # fmt: skip
    else:
        plan.launch(
            gradients, (parts * M, HV),
            x.q, x.k, written.writes, x.v, x.beta, saved.G, written.u, du, do, dP, h, dh, where.chunks, scale,
            dq, dk, dw, dv, to_gates, apart, plan.H, HV, DECAY=plan.decay, **common, **plan.options("gradients", "BK", "BV"),
        )  # fmt: skip
    dprecond_g = dprecond_beta = to_center = dA = None
    if plan.precond and dw is not None:
        asked = Asked.of(plan, dw)
        to_center = asked.to_center
        ask_preconditioner(x, plan, saved.gram, dw, dk, asked, bound, eps)
        dprecond_g, dprecond_beta, dA = preconditioner_gradients(x, plan, saved.gram, asked, dk, dA_end, states)
    dbeta, of_g, dcenter = sum_up(x, plan, to_gates, to_center)
    return Inputs(
        dq, dk, dv, dbeta, dg if channel else of_g, None if x.write_key is None else dw, None if x.S is None else dS,
        dprecond_g, dprecond_beta, dcenter, None if x.A is None else dA,
    )  # fmt: skip
