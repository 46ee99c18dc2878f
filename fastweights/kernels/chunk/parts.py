"""The delta rules on one part of sequences that go on elsewhere: a forward and a backward, each in two halves.

The first half finds what the part does to a state, S -> M S + E (backwards dS -> M^T dS + dE). Its segments are summarised
anyway, so this costs one pass over their summaries. The caller then finds the state before the part (backwards its gradient
behind the part) from those of all parts, and the second half goes on as if the sequences had begun with it.
"""

from __future__ import annotations

from collections import namedtuple
from typing import Any

from ..common.call import Specs, make_rule
from ..common.delta_rule.launches import BegunGrads, ChunkOperands
from ..common.delta_rule.sizes import KernelInputs, SavedForBackward
from ..common.packing import CHUNK
from ..runtime.workspace import TensorSpec
from .memory import MemoryCall

__all__ = ["BEGIN", "BEGIN_BACK", "FINISH", "FINISH_BACK", "KernelInputs", "Operands", "PartInputs"]

# Of the operands of a chunk, what is neither an input nor kept by the forward.
Operands = namedtuple("Operands", "Qd Ke W P last_gate")


class PartInputs(
    namedtuple(
        "PartInputs",
        (
            "q k v beta g write_key S precond_g precond_beta center A cu_seqlens write_key_rest divisor T u G starts "
            "transitions key_energy write_keys chunk_table segment_table records q_decayed k_decayed w_decayed gates "
            "last_gates Qd Ke W P last_gate do dS_end dA_end h du dP ends"
        ),
        defaults=(None, None, None, None, None, None, None, None, None, None, None, None),
    )
):
    """The fields of KernelInputs, SavedForBackward and Operands; in a backward the gradients of the outputs and of the states
    after the part; and in its second half what the first found."""


class Part(MemoryCall):
    """All of its sequences are cut into segments, of which one may be a whole sequence."""

    def read_memory(self) -> KernelInputs:
        return self.pick(KernelInputs)

    def set_up(self) -> None:
        super().set_up()
        if not self.cut:
            self.length, self.cut = self.T // CHUNK + 1, 1
        self.lasting = True  # transitions are multiplied from part to part
        self.constants["GOES_ON"] = True

    def pick(self, kind: Any) -> Any:
        """Those of the inputs that are the fields of another named tuple."""
        return kind._make([getattr(self.x, name) for name in kind._fields])

    def read_chunks(self, saved: SavedForBackward) -> ChunkOperands:
        x, (Qd, Ke, W, P, last_gate) = self.memory, self.pick(Operands)
        keys = saved.write_keys if self.precond else x.k if x.write_key is None else x.write_key
        return ChunkOperands(x.q if Qd is None else Qd, keys if Ke is None else Ke, W, saved.u, keys, P, last_gate)

    def keep_operands(self, chunks: ChunkOperands) -> Operands:
        decayed = self.decay == 2
        return Operands(
            chunks.q if decayed else None, chunks.write_key if decayed else None, chunks.W, chunks.P, chunks.last_gate
        )

    def operands(self) -> Operands:
        """Placeholders, see `transform_chunks`."""
        keys, decayed = self.token_tensor(self.HV, self.K), self.decay == 2
        return Operands(
            keys if decayed else None, keys if decayed else None, keys,
            self.token_tensor(self.HV, CHUNK) if decayed else None, self.floats(self.M, self.HV, self.K) if decayed else None,
        )  # fmt: skip

    def matrix(self, count: int) -> TensorSpec:
        """So many transitions."""
        return self.floats(count, self.HV, self.K, self.K)


class Begin(Part):
    """x: KernelInputs, S the states of the sequences that begin here. Outputs: E and M of each sequence, and A after it; kept:
    SavedForBackward, of which u and the starts are unfinished, and Operands."""

    def shapes(self, final: bool) -> tuple[Specs, Specs]:
        A = self.floats(self.N, self.HV, self.K) if self.precond else None
        return (self.state(self.N), self.matrix(self.N), A), (*self.placeholders(), *self.operands())

    def forward(self, final: bool) -> tuple[Specs, Specs]:
        (E, M, A_end), kept = self.shapes(final)
        saved = SavedForBackward(*kept[: len(SavedForBackward._fields)])
        chunks = self.begin(saved, A_end)
        self.pass_state(chunks, saved, None, None, summary=True)
        self.join_states(saved.starts, saved.transitions, self.memory.S, back=False, starts=self.state(self.P), end=E)
        self.join_states(None, saved.transitions, None, back=False, starts=self.matrix(self.P), end=M)
        return (E, M, A_end), (*saved, *self.keep_operands(chunks))


class Finish(Part):
    """x: PartInputs, S the states before the part. Outputs: o and S after the part. It finishes what `Begin` kept."""

    def shapes(self, final: bool) -> tuple[Specs, Specs]:
        return (self.token_tensor(self.HV, self.V), self.state(self.N)), ()

    def forward(self, final: bool) -> tuple[Specs, Specs]:
        (o, S_end), kept = self.shapes(final)
        saved = self.pick(SavedForBackward)
        chunks = self.read_chunks(saved)
        self.answer(chunks, saved, self.options[0], o, self.finish_states(chunks, saved, S_end))
        return (o, S_end), kept


class BeginBack(Part):
    """x: PartInputs, dS_end the gradients of states after sequences that end here. Outputs: dE of each sequence."""

    def shapes(self, final: bool) -> tuple[Specs, Specs]:
        found = (
            self.empty(self.M, self.HV, self.K, self.V),
            self.token_tensor(self.HV, self.V),
            self.token_tensor(self.HV, CHUNK),
        )
        return (self.state(self.N),), (*self.operands(), *found, self.state(self.P))

    def forward(self, final: bool) -> tuple[Specs, Specs]:
        (dE,), (*_, ends) = self.shapes(final)
        saved, x, scale = self.pick(SavedForBackward), self.x, self.options[0]
        chunks = self.transform_chunks(saved, scale, reuse_saved=True)
        begun = self.begin_grads(chunks, saved, scale, x.do)
        self.pass_gradient(chunks, saved, scale, x.do, begun.du, None, None, ends, summary=True)
        starts = self.state(self.P)
        self.join_states(ends, saved.transitions, x.dS_end, back=True, starts=starts, end=dE)
        return (dE,), (*self.keep_operands(chunks), *begun, ends)


class FinishBack(Part):
    """x: PartInputs, dS_end the gradients of states after the part. Outputs: those of KernelInputs."""

    def shapes(self, final: bool) -> tuple[Specs, Specs]:
        raise NotImplementedError  # a backward has no fake

    def forward(self, final: bool) -> tuple[Specs, Specs]:
        x, saved, scale = self.x, self.pick(SavedForBackward), self.options[0]
        chunks, begun = self.read_chunks(saved), BegunGrads(x.h, x.du, x.dP)
        dh, dS = self.finish_pass_back(chunks, saved, scale, x.do, x.du, x.ends, x.dS_end, True)
        grads = self.finish_grads(chunks, saved, scale, x.do, begun, dh, dS)
        return self.input_grads(saved, grads, x.dA_end, True), ()


BEGIN, FINISH, BEGIN_BACK, FINISH_BACK = map(make_rule, (Begin, Finish, BeginBack, FinishBack))
