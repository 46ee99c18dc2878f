"""Linear attention and the delta rules by kernels: the launches of a forward, which a backward repeats in part,
and of a backward.

Tensors [BT, HV, ...] count the tokens of all rows through, [M, HV, ...] the chunks, [P, HV, ...] the segments (see packing.py).
`SavedForBackward` holds what the forward keeps; everything else is computed again.
"""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Sequence
from math import prod
from typing import Any

import torch

from ...runtime.workspace import TensorSpec
from ..call import padded
from ..packing import CHUNK
from .channel_decay import chunk_gradients_channel, wy_transform_channel
from .gradients import chunk_gradients
from .output import chunk_output, value_grads
from .sizes import ChunkSizes, SavedForBackward
from .state import chunk_state, chunk_state_backward
from .wy import chunk_cumsum, wy_transform


class ChunkOperands(
    namedtuple(
        "ChunkOperands",
        "q write_key W u plain_write_key P last_gate q_rest write_key_rest",
        defaults=(None, None, None, None),
    )
):
    """What the state pass and the outputs take: queries and write keys, W, u (before the state pass U), and the write keys as
    they are; with a decay per channel q and write_key come decayed, with P [BT, HV, 64] and G at the chunks' ends [M, HV, K].
    q_rest, write_key_rest: what these lack, where they are sums of two tensors."""


class BegunGrads(namedtuple("BegunGrads", "h du dP", defaults=(None,))):
    """What a backward finds out before it knows the gradients of states: the states at the chunks' starts, the gradient of u from
    inside the chunks (None for linear attention), and that of P."""


class MemoryGrads(namedtuple("MemoryGrads", "q k v write_key g S gates")):
    """The gradients of a memory's inputs: those of q and k per value head, and that of g where there is one decay per channel.
    gates: of beta and of a decay per head partial sums over the key channels [parts, 2, B, T, HV], which `reduce_grads` adds."""


class DeltaRule(ChunkSizes):
    """The launches of linear attention and the delta rules, as a family has them that computes these or asks such a memory."""

    def record_outputs(self, chunks: ChunkOperands, saved: SavedForBackward, scale: float, o: Any, S_end: Any) -> None:
        """The states of all chunks, then their outputs."""
        self.answer(chunks, saved, scale, o, self.record_states(chunks, saved, S_end))

    def record_states(self, chunks: ChunkOperands, saved: SavedForBackward, S_end: Any) -> TensorSpec:
        """The states at the chunks' starts."""
        if self.segment is not None:
            self.pass_state(chunks, saved, None, None, summary=True)
        return self.finish_states(chunks, saved, S_end)

    def finish_states(self, chunks: ChunkOperands, saved: SavedForBackward, S_end: Any) -> TensorSpec:
        """`record_states`, once the segments are summarised."""
        if self.segment is not None:
            self.join_states(saved.starts, saved.transitions, self.memory.S, back=False)
        return self.pass_state(chunks, saved, saved.starts if self.segment else self.memory.S, S_end)

    def answer(self, chunks: ChunkOperands, saved: SavedForBackward, scale: float, o: Any, h: TensorSpec) -> None:
        """The outputs, from the states at the chunks' starts."""
        self.launch(
            chunk_output, (-(-self.V // self.tile["chunk_output"].BV) * self.M, self.HV), chunks.q, chunks.write_key, chunks.u,
            saved.G, chunks.P, h, o, chunks.q_rest, self.memory.divisor, saved.chunk_table, self.T, scale, self.H, self.HV,
            **self.score_heads(chunks), **self.tile_options("chunk_output", "BK", "BV"),
        )  # fmt: skip

    def score_heads(self, chunks: ChunkOperands) -> dict[str, int]:
        """For the kernels that take the products of queries and write keys."""
        return {"HEADS_Q": self.group(chunks.q), "HEADS_K": self.group(chunks.write_key)}

    def transform_chunks(self, saved: SavedForBackward, scale: float, reuse_saved: bool) -> ChunkOperands:
        """What depends on one chunk alone. reuse_saved: `saved` is filled already, u included."""
        x, HV, K = self.memory, self.HV, self.K
        keys = saved.write_keys if self.precond else x.k if x.write_key is None else x.write_key
        constants = {"HEADS_G": self.group(x.g), "HEADS_BETA": self.group(x.beta), "HEADS_W": self.group(keys)}
        constants["REUSE_SAVED"] = reuse_saved
        place, heads = (saved.chunk_table, self.T), (self.H, HV)
        # A backward with finer write keys does without W.
        W = self.token_tensor(HV, K) if self.delta and not (reuse_saved and self.finer) else None
        u = x.v if saved.u is None else saved.u
        if self.decay == 2:
            Qd, Ke = (self.token_tensor(HV, K) for _ in range(2))
            P, last_gate = self.token_tensor(HV, CHUNK), self.floats(self.M, HV, K)
            self.launch(
                wy_transform_channel, (self.M, HV), x.q, x.k, keys, x.v, x.beta, x.g, saved.T, Qd, Ke, P, W, u, last_gate,
                *place, scale, *heads, **constants, **self.tile_options("wy_transform_channel", "BK", "BV"),
            )  # fmt: skip
            return ChunkOperands(Qd, Ke, W, u, keys, P, last_gate)
        if self.delta and W is not None:
            tile = "wy_transform_again" if reuse_saved else "wy_transform"
            self.launch(
                wy_transform, (self.M, HV), x.k, keys, x.v, x.beta, x.g, saved.T, W, u, saved.G, *place, *heads, **constants,
                DECAY=self.decay == 1, **self.tile_options(tile, "BK", "BV"),
            )  # fmt: skip
        elif self.decay == 1 and not reuse_saved:
            width = min(32, padded(HV))
            grid = self.M, -(-HV // width)
            self.launch(chunk_cumsum, grid, x.g, saved.G, *place, HV, PH=width, HEADS_G=self.group(x.g))
        return ChunkOperands(x.q, keys, W, u, keys, write_key_rest=x.write_key_rest)

    def pass_state(
        self, chunks: ChunkOperands, saved: SavedForBackward, start: Any, end: Any, summary: bool = False,
        reuse_saved: bool = False,
    ) -> TensorSpec:  # fmt: skip
        """The states at the chunks' starts [M, HV, K, V]; U becomes u, unless reuse_saved says that it is u already. With
        `summary` instead what each segment adds, and its transition."""
        HV, K, V = self.HV, self.K, self.V
        tile = self.tile["chunk_state" if self.segment is None else "segment_states"]
        h = self.empty(0, HV, K, V) if summary else self.chunk_states()
        parts = -(-V // tile.BV) + (-(-K // tile.BV) if summary and self.delta else 0)
        self.launch(
            chunk_state, (parts * self.P, HV), chunks.write_key, chunks.write_key_rest, chunks.W, chunks.u, saved.G,
            chunks.last_gate, start, h, saved.starts if summary else end, saved.transitions if self.cut else None,
            self.segment_table(saved), self.T, self.H, HV,
            PK=tile.BK, BV=tile.BV, HEADS_K=self.group(chunks.write_key), DELTA=self.delta and not reuse_saved,
            STARTED=start is not None, ENDED=end is not None, SUMMARY=summary, STAGES=tile.num_stages, num_warps=tile.num_warps,
        )  # fmt: skip
        return h

    def chunk_states(self) -> TensorSpec:
        """Where `pass_state` writes the states: in the memory of one launch, unless a family keeps them for its backward."""
        return self.empty(self.M, self.HV, self.K, self.V)

    def join_states(
        self, added: Any, transitions: Any, begin: Any, back: bool, starts: Any = None, end: Any = None
    ) -> None:
        """Turn `added` into the state that each segment starts from; see `join_segments`."""
        options = self.tile_options("combine_segments", "BK", "BV")
        precision = "tf32x3" if self.lasting else self.precision
        self.join_segments(
            added, transitions, begin, self.segment_tokens, back, self.delta, precision, options, starts, end
        )

    def memory_grads(
        self, saved: SavedForBackward, scale: float, do: Any, dS_end: Any, state_grads: bool
    ) -> MemoryGrads:
        chunks = self.transform_chunks(saved, scale, reuse_saved=True)
        begun = self.begin_grads(chunks, saved, scale, do)
        dh, dS = self.pass_state_back(chunks, saved, scale, do, begun.du, dS_end, state_grads)
        return self.finish_grads(chunks, saved, scale, do, begun, dh, dS)

    def begin_grads(self, chunks: ChunkOperands, saved: SavedForBackward, scale: float, do: Any) -> BegunGrads:
        h, du, dP = self.pass_state_again(chunks, saved), None, self.token_tensor(self.HV, CHUNK)
        if self.delta:
            du = self.token_tensor(self.HV, self.V, dtype=torch.float32 if self.finer else None)
            self.record_value_grads(chunks, saved, scale, do, du, dP)
        return BegunGrads(h, du, dP)

    def finish_grads(
        self, chunks: ChunkOperands, saved: SavedForBackward, scale: float, do: Any, begun: BegunGrads, dh: Any, dS: Any
    ) -> MemoryGrads:  # fmt: skip
        """dh, dS: what `pass_state_back` found."""
        x, HV, K, channel = self.memory, self.HV, self.K, self.decay == 2
        (h, du, dP), dv = begun, self.token_tensor(HV, self.V)
        if not self.delta:
            self.record_value_grads(chunks, saved, scale, do, dv, dP, dh)

        dq, dk = self.token_tensor(HV, K), self.token_tensor(HV, K)
        dw = self.token_tensor(HV, K, dtype=torch.float32 if self.finer else None) if self.writes else None
        if not channel:
            gates = self.partial_gates("chunk_gradients")
            inputs, grads = (x.q, x.k, chunks.plain_write_key, x.v, x.beta), (dq, dk, dw, dv, gates)
            self.record_chunk_gradients(chunks, saved, scale, inputs, chunks.u, du, do, dP, h, dh, grads)
            return MemoryGrads(dq, dk, dv, dw, None, dS, gates)
        gates, dg = self.partial_gates("chunk_gradients_channel"), self.token_tensor(HV, K, dtype=torch.float32)
        self.record_channel_gradients(
            (gates.shape[0] * self.M, HV),
            (
                x.q, x.k, chunks.plain_write_key, x.v, x.beta, x.g, chunks.last_gate, chunks.u, du, do, dP, h, dh,
                saved.chunk_table, self.T, scale, dq, dk, dw, dv, gates, dg, prod(gates.shape[1:]),
            ),
            HEADS_G=self.group(x.g), HEADS_BETA=self.group(x.beta), HEADS_W=self.group(chunks.plain_write_key),
        )  # fmt: skip
        return MemoryGrads(dq, dk, dv, dw, dg, dS, gates)

    def record_channel_gradients(self, grid: tuple[int, int], arguments: Sequence[Any], **heads: int) -> None:
        most = 14.0 if self.dtype == torch.float16 else 128.0
        for name in ("chunk_gradients_channel", "chunk_gradients_channel_halves"):
            self.launch(
                chunk_gradients_channel, grid, *arguments, self.H, self.HV, **heads, FLAT=name == "chunk_gradients_channel",
                MOST=most, **self.tile_options(name, "BK", "BV"),
            )  # fmt: skip

    def pass_state_again(self, chunks: ChunkOperands, saved: SavedForBackward) -> TensorSpec:
        """The states at the chunks' starts, once u is known."""
        return self.pass_state(chunks, saved, saved.starts if self.segment else self.memory.S, None, reuse_saved=True)

    def record_value_grads(
        self, chunks: ChunkOperands, saved: SavedForBackward, scale: float, do: Any, out: TensorSpec, dP: TensorSpec,
        dh: Any = None,
    ) -> None:  # fmt: skip
        """P^T dO, or with dh, the gradients of the states at the chunks' ends, all of dV; and dP."""
        self.launch(
            value_grads, (self.M, self.HV), chunks.q, chunks.write_key, chunks.u, do, saved.G, chunks.P, dh, out, dP,
            chunks.q_rest, self.memory.divisor, saved.chunk_table, self.T, scale, self.H, self.HV,
            **self.score_heads(chunks), STATES=dh is not None, **self.tile_options("value_grads", "BK", "BV"),
        )  # fmt: skip

    def partial_gates(self, name: str) -> TensorSpec:
        """Where the programs of a launch leave the gradients of beta and of a decay per head, a part per tile of channels."""
        return self.floats(-(-self.K // self.tile[name].BK), 2, *self.rows, self.HV)

    def record_chunk_gradients(
        self, chunks: ChunkOperands, saved: SavedForBackward, scale: float, inputs: Sequence[Any], u: Any, z: Any, do: Any,
        dP: Any, h: Any, dh: Any, grads: Sequence[Any], **changed: Any,
    ) -> None:  # fmt: skip
        """inputs: q, k, write keys, v and beta; grads: dq, dk, dw, dv and partial sums of the gates' gradients, in this order; z
        as the kernel takes it."""
        gates = grads[4]
        stride = 0 if gates is None else prod(gates.shape[1:])
        self.launch(
            chunk_gradients, (-(-self.K // self.tile["chunk_gradients"].BK) * self.M, self.HV),
            *inputs, saved.G, u, z, do, dP, h, dh, saved.chunk_table, self.T, scale, *grads, chunks.q_rest, self.memory.divisor,
            stride, self.H, self.HV, HEADS_BETA=self.group(inputs[4]), HEADS_W=self.group(inputs[2]),
            **{"PAIRS": True, **changed}, **self.tile_options("chunk_gradients", "BK", "BV"),
        )  # fmt: skip

    def summarize_back(
        self, chunks: ChunkOperands, saved: SavedForBackward, scale: float, do: Any, du: Any
    ) -> TensorSpec:
        """The gradient of the state that each segment starts from, if that at its end is zero."""
        ends = self.state(self.P)
        self.pass_gradient(chunks, saved, scale, do, du, None, None, ends, summary=True)
        return ends

    def pass_state_back(
        self, chunks: ChunkOperands, saved: SavedForBackward, scale: float, do: Any, du: Any, dS_end: Any, state_grads: bool
    ) -> tuple[TensorSpec, TensorSpec | None]:  # fmt: skip
        """The gradients of the states at the chunks' ends [M, HV, K, V], and with state_grads of the initial states. du, the
        gradient of u from inside the chunks, becomes T^T of all of it."""
        ends = None if self.segment is None else self.summarize_back(chunks, saved, scale, do, du)
        return self.finish_pass_back(chunks, saved, scale, do, du, ends, dS_end, state_grads)

    def finish_pass_back(
        self, chunks: ChunkOperands, saved: SavedForBackward, scale: float, do: Any, du: Any, ends: Any, dS_end: Any,
        state_grads: bool,
    ) -> tuple[TensorSpec, TensorSpec | None]:  # fmt: skip
        """`pass_state_back` from what it found for the segments, None where there are none."""
        if ends is not None:
            self.join_states(ends, saved.transitions, dS_end, back=True)
        dh, dS = self.empty(self.M, self.HV, self.K, self.V), self.state(self.N) if state_grads else None
        self.pass_gradient(chunks, saved, scale, do, du, dS_end if ends is None else ends, dh, dS, summary=False)
        return dh, dS

    def pass_gradient(
        self, chunks: ChunkOperands, saved: SavedForBackward, scale: float, do: Any, du: Any, start: Any, dh: Any, end: Any,
        summary: bool,
    ) -> None:  # fmt: skip
        """The launch of `chunk_state_backward`."""
        x, HV, V = self.memory, self.HV, self.V
        tile = self.tile["chunk_state_backward"]
        self.launch(
            chunk_state_backward, (-(-V // tile.BV) * self.P, HV),
            chunks.q, chunks.write_key, chunks.write_key_rest, chunks.W, x.k if self.finer else None, x.divisor, saved.T,
            du, do, saved.G, chunks.last_gate, start, dh, end, self.segment_table(saved), self.T, scale, self.H, HV,
            PK=tile.BK, BV=tile.BV, **self.score_heads(chunks), STARTED=start is not None, ENDED=end is not None,
            SUMMARY=summary, STAGES=tile.num_stages, num_warps=tile.num_warps,
        )  # fmt: skip

    def reduce_grads(
        self, saved: SavedForBackward, gates: TensorSpec | None, beta: Any = None, g: Any = None, center_grads: Any = None
    ) -> Sequence[TensorSpec | None]:  # fmt: skip
        """The gradients of beta, of a decay per head and of the centre or ridge, in their shapes and dtypes."""
        center = None if center_grads is None else self.memory.center
        found = [None if y is None else self.empty(*y.shape, dtype=y.dtype) for y in (beta, g, center)]
        self.sum_gates(gates, center_grads, found, saved.chunk_table)
        return found
