"""Elementwise Longhorn by kernels: the launches of a forward and of a backward."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Sequence
from typing import Any

from ..common.call import Call, Specs, make_rule, padded
from ..common.packing import CHUNK
from .gradients import element_gradients
from .read import read_elements

COLUMNS = 16  # of a program's tile
NUMBERS_PER_WARP = 1024  # of a state: 32 per thread, which leaves registers for its gradient and the state loaded ahead
WARPS = 1024  # of a backward: about as many as run at the same time, for each of them has a scratch of 64 states


class ElementwiseInputs(namedtuple("ElementwiseInputs", "q k v beta S cu_seqlens", defaults=(None, None))):
    """q, k [B, T, H, K]; v [B, T, HV, V]; beta [B, T, H or HV, V]; S [N, HV, K, V] or None; cu_seqlens [N+1] or None, on the
    device."""


class Elementwise(Call):
    """Options: the scale of q. Outputs: o, S (None unless it is wanted). A backward needs the inputs alone.
    tiles: of columns, each a program per sequence and head."""

    def set_up(self) -> None:
        self.tiles = -(-self.V // COLUMNS)
        self.warps = max(1, padded(self.K) * COLUMNS // NUMBERS_PER_WARP)
        self.constants = {
            "K": self.K, "PK": padded(self.K), "V": self.V, "BV": COLUMNS, "HEADS_K": self.group(self.x.k),
            "HEADS_BETA": self.group(self.x.beta), "num_warps": self.warps,
        }  # fmt: skip

    def shapes(self, final: bool) -> tuple[Specs, Specs]:
        o = self.token_tensor(self.HV, self.V, dtype=self.x.v.dtype)
        return (o, self.state(self.N) if final else None), ()

    def read(self, o: Any, end: Any, states: Any) -> None:
        """Step through all sequences; None for what is not wanted."""
        x = self.x
        self.launch(
            read_elements, (self.tiles * self.N, self.HV), x.q, x.k, x.v, x.beta, x.S, o, end, states, x.cu_seqlens, self.T,
            *self.options, self.HV, **self.constants,
        )  # fmt: skip

    def forward(self, final: bool) -> tuple[Specs, Specs]:
        outputs, saved = self.shapes(final)
        self.read(outputs[0], outputs[1], None)
        return outputs, saved

    def backward(self, saved: Specs, output_grads: Sequence[Any], state_grads: bool) -> ElementwiseInputs:
        x, (do, d_end), HV, K = self.x, output_grads, self.HV, self.K
        states = self.state(self.M)
        self.read(None, None, states)
        dq, dk = (self.token_tensor(HV, K) for _ in range(2))
        dv, dbeta = (self.token_tensor(HV, self.V, dtype=y.dtype) for y in (x.v, x.beta))
        alone = self.tiles == 1
        parts = [y if alone else self.floats(self.tiles, *y.shape) for y in (dq, dk)]
        items = self.tiles * self.N * HV
        programs = min(items, max(1, WARPS // self.warps))
        scratch = self.floats(programs, CHUNK, padded(K), COLUMNS)
        d_start = self.state(self.N) if state_grads and x.S is not None else None
        self.launch(
            element_gradients, (programs,), x.q, x.k, x.v, x.beta, states, do, d_end, scratch, *parts, dv, dbeta, d_start,
            x.cu_seqlens, self.T, self.B * self.T, items, *self.options, HV, **self.constants,
        )  # fmt: skip
        if not alone:
            for part, out in zip(parts, (dq, dk)):
                self.sum_tiles(part, out)
        return ElementwiseInputs(dq, dk, dv, dbeta, d_start)


ELEMENTWISE = make_rule(Elementwise)
