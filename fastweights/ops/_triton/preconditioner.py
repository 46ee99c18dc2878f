"""The launches of the preconditioner's kernels."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .config import padded
from .gram import gram_asked, gram_back, gram_scan, gram_sums, write_keys
from .plan import Inputs, Plan, heads
from .tables import Table


def start_preconditioner(x: Inputs, plan: Plan, where: Table, gram: Tensor, end: Tensor | None) -> None:
    """A at the start of every chunk [M, HV, K], and at the end of every sequence."""
    totals = plan.new(len(gram), plan.HV, dtype=torch.float32)
    if len(where.chunks):
        gram_sums[len(where.chunks), plan.HV](
            x.k, x.precond_g, x.precond_beta, gram, totals, where.chunks, plan.H, plan.HV, K=plan.K, PK=padded(plan.K),
            HEADS_PG=heads(plan, x.precond_g), HEADS_PB=heads(plan, x.precond_beta), num_warps=plan.tile["gram"].num_warps,
        )  # fmt: skip
    scan(plan, where, gram, totals, x.A, end, back=False)


def scan(
    plan: Plan, where: Table, sums: Tensor, totals: Tensor, begin: Tensor | None, end: Tensor | None, back: bool
) -> None:
    N, width = plan.sequences.count, min(32, padded(plan.K))
    if N:
        gram_scan[N, plan.HV, -(-plan.K // width)](
            sums, totals, begin, end, where.edges, plan.HV, K=plan.K, BK=width, BACK=back, BEGUN=begin is not None,
            ENDED=end is not None, num_warps=4,
        )  # fmt: skip


def options(x: Inputs, plan: Plan) -> dict[str, Any]:
    return {
        "K": plan.K, "HEADS_PG": heads(plan, x.precond_g), "HEADS_PB": heads(plan, x.precond_beta), "PRECISION": plan.precision,
        **plan.options("gram", "BK"),
    }  # fmt: skip


def keys_to_write(
    x: Inputs, plan: Plan, where: Table, gram: Tensor, bound: float, eps: float, keep: bool
) -> tuple[Tensor, Tensor | None]:
    """The write keys [B, T, HV, K]; with `keep` also what earlier tokens left in A for every token [BT, HV, K]."""
    keys = plan.new(*x.q.shape[:2], plan.HV, plan.K)
    # A needs the range of bfloat16; its rounding changes a factor of the keys by a thousandth at most.
    A = keys.new_empty(keys.shape, dtype=torch.promote_types(torch.bfloat16, plan.dtype)) if keep else None
    grid = (-(-plan.K // plan.tile["gram"].BK) * len(where.chunks), plan.HV)
    if all(grid):
        write_keys[grid](
            x.k, gram, x.precond_g, x.precond_beta, x.center, keys, A, where.chunks, math.log2(bound), eps, plan.H, plan.HV,
            KEEP=keep, **options(x, plan),
        )  # fmt: skip
    return keys, A


class Asked(NamedTuple):
    """What the write keys' gradient asks of the preconditioner, see `gram_asked`: of A inside a chunk [BT, HV, K], and sums of a
    chunk: of A at its start [M, HV, K], log decays [M, HV], dcenter [K tiles, M, HV]."""

    inside: Tensor
    sums: Tensor
    totals: Tensor
    dcenter: Tensor

    @classmethod
    def of(cls, plan: Plan, chunks: int, parts: int, dw: Tensor) -> Asked:
        """Empty; `inside` shares the memory of dw."""
        shape, float32 = (chunks, plan.HV, plan.K), torch.float32
        return cls(
            dw.view(torch.bfloat16) if dw.dtype == torch.float16 else dw,  # 1/A may leave float16's range
            plan.new(*shape, dtype=float32), plan.new(*shape[:2], dtype=float32),
            plan.new(parts, *shape[:2], dtype=float32),
        )  # fmt: skip


def ask_preconditioner(
    x: Inputs,
    plan: Plan,
    where: Table,
    A: Tensor | None,
    dw: Tensor,
    dk: Tensor,
    asked: Asked,
    bound: float,
    eps: float,
) -> None:
    """Fill `asked`; what reaches the keys directly is added to dk."""
    if len(where.chunks) and plan.HV:
        gram_asked[len(asked.dcenter) * len(where.chunks), plan.HV](
            x.k, A, dw, asked.inside, dk, x.precond_g, x.precond_beta, x.center, asked.sums, asked.totals, asked.dcenter,
            where.chunks, math.log2(bound), eps, plan.H, plan.HV, **options(x, plan),
        )  # fmt: skip


def preconditioner_gradients(
    x: Inputs,
    plan: Plan,
    where: Table,
    gram: Tensor,
    asked: Asked,
    dk: Tensor,
    dA_end: Tensor | None,
    dbeta: Tensor,
    dg: Tensor,
    states: bool,
) -> tuple[Tensor, Tensor | None]:
    """The gradient of the centre, and with `states` of the first A. Those of the gates go into dbeta, dg [K tiles, BT, HV];
    what reaches the keys through A is added to dk."""
    dA = plan.new(plan.sequences.count, plan.HV, plan.K, dtype=torch.float32) if states else None
    scan(plan, where, asked.sums, asked.totals, dA_end, dA, back=True)
    if len(where.chunks) and plan.HV:
        gram_back[len(dg) * len(where.chunks), plan.HV](
            x.k, asked.inside, dk, gram, asked.sums, x.precond_g, x.precond_beta, dg, dbeta, where.chunks, dg.stride(0),
            plan.H, plan.HV, **options(x, plan),
        )  # fmt: skip
    return asked.dcenter.sum((0, 1)), dA
