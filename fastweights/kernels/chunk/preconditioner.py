"""The launches of the preconditioner's kernels."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch

from ..runtime.workspace import Buffer
from .key_energy import gram_asked, gram_back, gram_scan, gram_sums, write_keys
from .sizes import Inputs, Plan, heads
from .tiles import padded


def start_preconditioner(x: Inputs, plan: Plan, gram: Buffer, end: Buffer | None) -> None:
    """A at the start of every chunk [M, HV, K], and at the end of every sequence."""
    totals = plan.new(gram.shape[0], plan.HV, dtype=torch.float32)
    plan.launch(
        gram_sums, (plan.where.M, plan.HV),
        x.k, x.precond_g, x.precond_beta, gram, totals, plan.where.chunks, plan.H, plan.HV, K=plan.K, PK=padded(plan.K),
        HEADS_PG=heads(plan, x.precond_g), HEADS_PB=heads(plan, x.precond_beta), num_warps=4,
    )  # fmt: skip
    scan(plan, gram, totals, x.A, end, back=False)


def scan(plan: Plan, sums: Buffer, totals: Buffer, begin: Buffer | None, end: Buffer | None, back: bool) -> None:
    N, width = plan.sequences.count, min(32, padded(plan.K))
    plan.launch(
        gram_scan, (N, plan.HV, -(-plan.K // width)),
        sums, totals, begin, end, plan.where.edges, plan.HV, K=plan.K, BK=width, BACK=back, BEGUN=begin is not None,
        ENDED=end is not None, num_warps=4,
    )  # fmt: skip


def options(x: Inputs, plan: Plan, tile: str) -> dict[str, Any]:
    return {
        "K": plan.K, "HEADS_PG": heads(plan, x.precond_g), "HEADS_PB": heads(plan, x.precond_beta), "PRECISION": plan.precision,
        **plan.options(tile, "BK"),
    }  # fmt: skip


def write_all_keys(x: Inputs, plan: Plan, gram: Buffer, bound: float, eps: float, keys: Buffer) -> None:
    """Fill `keys` with the write keys [BT, HV, K]."""
    plan.launch(
        write_keys, (plan.where.M, plan.HV),
        x.k, gram, x.precond_g, x.precond_beta, x.center, keys, plan.where.chunks, math.log2(bound), eps, plan.H, plan.HV,
        **options(x, plan, "write_keys"),
    )  # fmt: skip


class Asked(NamedTuple):
    """What the write keys' gradient asks of the preconditioner, see `gram_asked`: of A inside a chunk [BT, HV, K], and sums of a
    chunk: of A at its start [M, HV, K], log decays [M, HV], of the centre [M, HV]."""

    inside: Buffer
    sums: Buffer
    totals: Buffer
    to_center: Buffer

    @classmethod
    def of(cls, plan: Plan, dw: Buffer) -> Asked:
        """`inside` may share the memory of dw, but 1/A may leave float16's range."""
        shape, float32 = (plan.where.M, plan.HV, plan.K), torch.float32
        inside = plan.new(*dw.shape, dtype=float32) if dw.dtype == torch.float16 else dw
        return cls(inside, *(plan.new(*sizes, dtype=float32) for sizes in (shape, shape[:2], shape[:2])))


def ask_preconditioner(
    x: Inputs, plan: Plan, gram: Buffer, dw: Buffer, dk: Buffer, asked: Asked, bound: float, eps: float
) -> None:
    """Fill `asked`; what reaches the keys directly is added to dk."""
    plan.launch(
        gram_asked, (plan.where.M, plan.HV),
        x.k, gram, dw, asked.inside, dk, x.precond_g, x.precond_beta, x.center, asked.sums, asked.totals, asked.to_center,
        plan.where.chunks, math.log2(bound), eps, plan.H, plan.HV, **options(x, plan, "gram_asked"),
    )  # fmt: skip


def preconditioner_gradients(
    x: Inputs, plan: Plan, gram: Buffer, asked: Asked, dk: Buffer, dA_end: Buffer | None, states: bool
) -> tuple[Buffer, Buffer, Buffer | None]:
    """The gradients of g and beta [BT, HV], and with `states` of the first A; what reaches the keys through A is added to dk."""
    dA = plan.new(plan.sequences.count, plan.HV, plan.K, dtype=torch.float32) if states else None
    scan(plan, asked.sums, asked.totals, dA_end, dA, back=True)
    dg, dbeta = (plan.tokenwise(plan.HV, dtype=torch.float32) for _ in range(2))
    plan.launch(
        gram_back, (plan.where.M, plan.HV),
        x.k, asked.inside, dk, gram, asked.sums, x.precond_g, x.precond_beta, dg, dbeta, plan.where.chunks, plan.H, plan.HV,
        **options(x, plan, "gram_back"),
    )  # fmt: skip
    return dg, dbeta, dA
