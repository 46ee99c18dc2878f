"""The launches of a forward and a backward where tokens also add to the inverse."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Sequence
from typing import Any

import torch

from ..common.call import Specs, make_rule
from .carried import carry_inverse
from .carried_gradients import carry_adjoint, chunk_adjoint, finish_gradients
from .rule import GramCall


class RefreshInputs(namedtuple("RefreshInputs", "u b refresh A cu_seqlens", defaults=(None,))):
    """u, b [B, T, h, K]; refresh [B, T, 1] in float32; A [N, HV, K, K]; cu_seqlens [N+1] or None, on the device."""


class Saved(namedtuple("Saved", "A R D T chunk_table")):
    """In float32 the inverses at the chunks' starts [M, HV, K, K], r [BT, HV, K], d [BT, HV], T [M, HV, 64, 64]; the table of
    chunks."""


class Refreshed(GramCall):
    """Outputs: y and A, this None unless it is wanted."""

    STATE = "A"

    def shapes(self, final: bool) -> tuple[Specs, Saved]:
        saved = Saved(*self.kept(), self.squares(), self.table())
        return (self.vectors(), self.matrices(self.N) if final else None), saved

    def forward(self, final: bool) -> tuple[Specs, Saved]:
        x = self.x
        (y, end), saved = self.shapes(final)
        self.record_table(saved)
        self.launch_sequences(
            carry_inverse, x.u, x.refresh, x.A, saved.A, end, PK=self.PK, HEADS=self.group(x.u), PRECISION=self.precision,
            num_warps=self.warps,
        )  # fmt: skip
        self.record_tokens(saved, saved.T, None, 0.0)
        self.record_solve(saved, x.b, y, self.precision)
        return (y, end), saved

    def backward(self, saved: Saved, output_grads: Sequence[Any], state_grads: bool) -> RefreshInputs:
        x, (dy, dA_end), precision = self.x, output_grads, self.gradient_precision
        db = self.vectors(x.b.dtype)
        self.record_solve(saved, dy, db, precision)
        rounded = self.dtype != torch.float32
        E = self.matrices(self.M, torch.bfloat16 if rounded else torch.float32)  # E - I
        N, adjoint = self.matrices(self.M), self.matrices(self.M)
        direct, W, V, rest = (self.vectors() for _ in range(4))
        tile = self.choose_tile(precision)

        def record_chunks(at_ends: Any, *results: Any) -> None:
            self.launch_chunks(
                chunk_adjoint, saved, x.u, x.b, dy, x.refresh, saved.R, saved.D, saved.T, at_ends, *results, direct, W, V, rest,
                BK=tile, HEADS=self.group(x.u), HEADS_B=self.group(x.b), precision=precision,
            )  # fmt: skip

        record_chunks(None, E, N)
        dA = self.matrices(self.N) if state_grads else None
        stages = 3 if self.PK <= 64 else 2 if rounded and self.has_large_shared_memory else 1
        self.launch_sequences(
            carry_adjoint, dA_end, E, N, adjoint, dA, PK=self.PK, STAGES=stages, PRECISION=precision, num_warps=self.warps
        )  # fmt: skip
        record_chunks(adjoint, None, None)
        du = self.vectors(self.dtype)
        self.launch_chunks(finish_gradients, saved, saved.A, V, rest, du, BK=tile, precision=precision)
        return RefreshInputs(du, db, None, dA)


REFRESHED = make_rule(Refreshed)
