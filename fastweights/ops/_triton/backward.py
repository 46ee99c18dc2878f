"""Linear attention and the delta rules by kernels: the launches of a backward.

What the forward keeps is in `Saved`; all else is computed again.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .channel import channel_gradients
from .forward import join_segments, solved, steps
from .gradients import gradients
from .jit import side_by_side
from .plan import Inputs, Plan, Saved, heads
from .preconditioner import Asked, ask_preconditioner, preconditioner_gradients
from .read import value_gradient
from .rehearsal import is_new, outline
from .tables import CHUNK
from .walk import walk_back


def backward(
    x: Inputs, plan: Plan, scale: float, bound: float, eps: float, saved: Saved,
    do: Tensor, dS_end: Tensor | None, dA_end: Tensor | None, states: bool,
) -> Inputs:  # fmt: skip
    """The gradient of every input; those of the initial states where `states`."""
    if is_new(plan, x.S is None, dS_end is None, dA_end is None, states):
        with side_by_side():
            asked, of_S, of_A = outline((do, dS_end, dA_end))
            inputs, kept = Inputs(*outline(x)), Saved(*outline(saved))
            backward(inputs, plan.outline(), scale, bound, eps, kept, asked, of_S, of_A, states)
    where, N, HV, K, V = plan.where, plan.sequences.count, plan.HV, plan.K, plan.V
    float32 = torch.float32
    written = solved(x, plan, saved, scale, bound, eps, known=True)
    h = steps(x, plan, written, saved, saved.starts if plan.segment else x.S, None, known=True)

    M = where.M
    wide = {"HEADS_Q": heads(plan, written.q), "HEADS_K": heads(plan, written.keys), "DECAY": plan.decay}
    dv, du = torch.empty_like(x.v), None
    dP = plan.tokenwise(HV, CHUNK)

    def ask(out: Tensor, states: Tensor | None) -> None:
        """P^T dO, or with the states' gradients all of dV; and dP."""
        value_gradient[M, HV](
            written.q, written.keys, written.u, do, saved.G, written.P, states, out, dP, where.chunks, scale, plan.H, HV,
            K=K, V=V, **wide, STATES=states is not None, PRECISION=plan.precision,
            **plan.options("value_gradient", "BK", "BV"),
        )  # fmt: skip

    if plan.delta:
        du = torch.empty_like(x.v)
        ask(du, None)
    dh = plan.new(M, HV, K, V)
    dS = plan.new(N, HV, K, V, dtype=float32) if states else None
    tile = plan.tile["walk_back"]

    def back(start: Tensor | None, end: Tensor | None, summary: bool) -> None:
        grid = (-(-V // tile.BV) * where.P, HV)
        walk_back[grid](
            written.q, written.keys, written.W, saved.T, du, do, saved.G, written.last_gate, start, dh, end, where.segments,
            scale, plan.H, HV, K=K, PK=tile.BK, V=V, BV=tile.BV, **wide, DELTA=plan.delta, STARTED=start is not None,
            ENDED=end is not None, SUMMARY=summary, STAGES=tile.num_stages, PRECISION=plan.precision,
            num_warps=tile.num_warps,
        )  # fmt: skip

    if plan.segment is not None:
        ends = torch.empty_like(saved.starts)
        back(None, ends, summary=True)
        join_segments(plan, ends, saved.transitions, dS_end, back=True)
        dS_end = ends
    back(dS_end, dS, summary=False)
    if not plan.delta:
        ask(dv, dh)

    parts = -(-K // plan.tile["channel_gradients" if plan.decay == 2 else "gradients"].BK)
    dq, dk = plan.tokenwise(HV, K), plan.tokenwise(HV, K)
    dw = plan.tokenwise(HV, K) if plan.writes else None
    to_gates = plan.new(parts, 2, *plan.rows, HV, dtype=float32)  # of beta and g, parts of sums over the key channels
    dg = plan.tokenwise(HV, K, dtype=float32) if plan.decay == 2 else None
    gates = {"HEADS_BETA": heads(plan, x.beta), "HEADS_W": heads(plan, written.writes)}
    common = {
        "K": K, "V": V, "WRITE": plan.writes, "DELTA": plan.delta, "PRECISION": plan.precision, **gates,
    }  # fmt: skip
    if plan.decay == 2:
        for name in ("channel_gradients", "channel_halves"):
            channel_gradients[parts * M, HV](
                x.q, x.k, written.writes, x.v, x.beta, x.g, written.last_gate, written.u, du, do, dP, h, dh, where.chunks,
                scale, dq, dk, dw, dv, to_gates, dg, to_gates.stride(0), plan.H, HV, HEADS_G=heads(plan, x.g),
                FLAT=name == "channel_gradients", **common, **plan.options(name, "BK", "BV"),
            )  # fmt: skip
    else:
        gradients[parts * M, HV](
            x.q, x.k, written.writes, x.v, x.beta, saved.G, written.u, du, do, dP, h, dh, where.chunks, scale,
            dq, dk, dw, dv, to_gates, to_gates.stride(0), plan.H, HV, DECAY=plan.decay, **common,
            **plan.options("gradients", "BK", "BV"),
        )  # fmt: skip
    dprecond_g = dprecond_beta = dA = dcenter = None
    if plan.precond and dw is not None:
        asked = Asked.of(plan, M, dw)
        ask_preconditioner(x, plan, saved.gram, dw, dk, asked, bound, eps)
        dprecond_g, dprecond_beta, dcenter, dA = preconditioner_gradients(
            x, plan, saved.gram, asked, dk, dA_end, states
        )
    sums = to_gates[0] if parts == 1 else to_gates.sum(0)

    def of(like: Tensor | None, gradient: Tensor | None) -> Tensor | None:
        return None if like is None or gradient is None else plan.shared(gradient, like)

    return Inputs(
        plan.shared(dq, x.q), plan.shared(dk, x.k), dv, of(x.beta, sums[0]), of(x.g, sums[1] if dg is None else dg),
        of(x.write_key, dw), None if x.S is None else dS, of(x.precond_g, dprecond_g),
        of(x.precond_beta, dprecond_beta), dcenter, dA if x.A is not None else None,
    )  # fmt: skip
