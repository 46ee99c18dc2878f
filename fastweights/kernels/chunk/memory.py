"""What the family computes: the memory of linear attention and the delta rules, and a preconditioner's write keys or queries
alone."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Sequence
from typing import Any

from ..common.call import Specs, make_rule
from ..common.delta_rule.launches import ChunkOperands, DeltaRule, MemoryGrads
from ..common.delta_rule.sizes import KernelInputs, SavedForBackward
from ..runtime.workspace import TensorSpec
from .key_energy import record_energy_grads, record_key_energy
from .one_pass.launches import DECAYED, OnePass, OnePassKept, record_length, segments_kept, takes_one_pass
from .precondition import QUERIES, Form, record_precondition, record_precondition_grads

__all__ = ["MEMORY", "PRECONDITIONER", "KernelInputs", "PreconditionerInputs"]


class MemoryCall(DeltaRule):
    """What calls of the whole memory, and of a part of it, have in common."""

    def form(self) -> Form:
        _, bound, eps = self.options
        return Form("softsign", bound, eps)

    def begin(self, saved: SavedForBackward, A_end: Any) -> ChunkOperands:
        """Fill in what does not depend on S."""
        self.record_tables(saved)
        self.make_write_keys(saved, A_end)
        return self.transform_chunks(saved, self.options[0], reuse_saved=False)

    def make_write_keys(self, saved: SavedForBackward, A_end: Any, energy_alone: bool = False) -> None:
        """By the preconditioner, or the energy alone that they follow from."""
        if self.precond:
            record_key_energy(self, saved, A_end)
            if not energy_alone:
                record_precondition(self, saved, saved.write_keys, self.form())

    def input_grads(self, saved: SavedForBackward, grads: MemoryGrads, dA_end: Any, state_grads: bool) -> KernelInputs:
        """Those of the inputs, from those of the memory."""
        x = self.memory
        dprecond_g = dprecond_beta = center_grads = dA = None
        if self.precond:
            found = self.write_key_grads(saved, grads.write_key, grads.k, dA_end, state_grads)
            center_grads, dprecond_g, dprecond_beta, dA = found
        g = x.g if self.decay == 1 else None
        dbeta, dg, dcenter = self.reduce_grads(saved, grads.gates, x.beta, g, center_grads)
        return KernelInputs(
            self.sum_heads(grads.q, x.q), self.sum_heads(grads.k, x.k), grads.v, dbeta, grads.g if self.decay == 2 else dg,
            None if x.write_key is None else grads.write_key, None if x.S is None else grads.S, dprecond_g, dprecond_beta,
            dcenter, None if x.A is None else dA,
        )  # fmt: skip

    def write_key_grads(
        self, saved: SavedForBackward, dw: Any, dk: Any, dA_end: Any, state_grads: bool
    ) -> tuple[Any, ...]:
        """The gradients of the centre per chunk, of the preconditioner's gates and of the initial A, from that of the write keys.
        What reaches the keys is added to dk."""
        energy = record_precondition_grads(self, saved, dw, dk, self.form(), add=True)
        return energy.parameter, *record_energy_grads(self, saved, energy, dk, True, dA_end, state_grads)


class Memory(MemoryCall):
    """Outputs: o, S, A, the states None unless they are wanted."""

    def set_up(self) -> None:
        super().set_up()
        if takes_one_pass(self):
            self.length, self.cut = segments_kept(self)
            self.P = self.count_segments()

    def placeholders(self) -> SavedForBackward:
        kept = super().placeholders()
        if not takes_one_pass(self):
            return kept
        transitions = kept.transitions
        if self.lasting:  # each the sum of two in the inputs' dtype
            count = self.cut * self.P * self.HV * 2 * self.K * self.K
            transitions = self.segment_tensor(count, dtype=None)
        records = self.empty(self.M, self.HV, record_length(self))
        kept = kept._replace(T=None, G=None, transitions=transitions, records=records)
        if self.decay == 2:
            decayed = {name: self.token_tensor(self.HV, self.K) for name in (*DECAYED, "gates")}
            kept = kept._replace(**decayed, last_gates=self.floats(self.M, self.HV, self.K))
        return kept

    def shapes(self, final: bool) -> tuple[Specs, SavedForBackward]:
        A = self.floats(self.N, self.HV, self.K) if final and self.precond else None
        outputs = self.token_tensor(self.HV, self.V), self.state(self.N) if final else None, A
        return outputs, self.placeholders()

    def forward(self, final: bool) -> tuple[Specs, SavedForBackward]:
        (o, S_end, A_end), saved = self.shapes(final)
        if takes_one_pass(self):
            self.record_one_pass(OnePassKept, o, S_end, A_end, saved)
        else:
            self.record_outputs(self.begin(saved, A_end), saved, self.options[0], o, S_end)
        return (o, S_end, A_end), saved

    def infer(self, final: bool) -> Specs:
        """The outputs alone."""
        if not takes_one_pass(self):
            return self.forward(final)[0]
        (o, S_end, A_end), kept = self.shapes(final)
        self.record_one_pass(OnePass, o, S_end, A_end, kept)
        return o, S_end, A_end

    def record_one_pass(self, kind: type[OnePass], o: Any, S_end: Any, A_end: Any, kept: SavedForBackward) -> None:
        memory = kind(self.x, self.device, self.options, self.recorder)
        saved = memory.tables(kept)
        self.make_write_keys(saved, A_end, memory.makes_write_keys)
        memory.record_passes(o, S_end, saved)

    def backward(self, saved: SavedForBackward, output_grads: Sequence[Any], state_grads: bool) -> KernelInputs:
        """The gradient of every input; those of q, k and the preconditioner's gates per value head."""
        do, dS_end, dA_end = output_grads
        memory = self.one_pass() if takes_one_pass(self) else self
        grads = memory.memory_grads(saved, self.options[0], do, dS_end, state_grads)
        return self.input_grads(saved, grads, dA_end, state_grads)

    def one_pass(self) -> OnePassKept:
        return OnePassKept(self.x, self.device, self.options, self.recorder)

    def write_key_grads(
        self, saved: SavedForBackward, dw: Any, dk: Any, dA_end: Any, state_grads: bool
    ) -> tuple[Any, ...]:
        if takes_one_pass(self) and self.one_pass().makes_write_keys:
            return self.one_pass().write_key_grads(saved, dw, dk, dA_end, state_grads)
        return super().write_key_grads(saved, dw, dk, dA_end, state_grads)


class PreconditionerInputs(
    namedtuple("PreconditionerInputs", "k g beta center q ridge A cu_seqlens", defaults=(None, None, None, None, None))
):
    """k [B, T, H, K]; g, beta [B, T, heads]; for write keys center [HV], for queries q, as k, and ridge [HV, K]; A [N, HV, K] or
    None; cu_seqlens [N+1] or None."""


class Preconditioner(DeltaRule):
    """Options, for write keys: squash, bound, eps, ridge. Outputs: write keys or queries, and A. Of what is saved only A at the
    chunks' starts and the table of chunks are filled."""

    def read_memory(self) -> KernelInputs:
        """The inputs of a memory with these heads, whose values nobody reads."""
        k, g, beta, center, q, ridge, A, cu_seqlens = self.x
        v = TensorSpec((*k.shape[:2], max(g.shape[2], beta.shape[2]), 1), k.dtype)
        q, parameter = (k, center) if q is None else (q, ridge)
        return KernelInputs(q, k, v, precond_g=g, precond_beta=beta, center=parameter, A=A, cu_seqlens=cu_seqlens)

    def set_up(self) -> None:
        super().set_up()
        squash, bound, eps, ridge = self.options
        self.form = Form(squash if self.x.q is None else QUERIES, bound, eps, ridge)

    def shapes(self, final: bool) -> tuple[Specs, SavedForBackward]:
        kept = self.placeholders()
        saved = SavedForBackward(key_energy=kept.key_energy, chunk_table=kept.chunk_table)
        return (kept.write_keys, self.floats(self.N, self.HV, self.K) if final else None), saved

    def forward(self, final: bool) -> tuple[Specs, SavedForBackward]:
        (made, end), saved = self.shapes(final)
        if self.packed:  # nothing here reads the place of a segment
            self.record_tables(self.placeholders()._replace(chunk_table=saved.chunk_table))
        record_key_energy(self, saved, end)
        record_precondition(self, saved, made, self.form)
        return (made, end), saved

    def backward(self, saved: SavedForBackward, output_grads: Sequence[Any], state_grads: bool) -> PreconditionerInputs:
        dmade, dA_end = output_grads
        makes_keys = self.x.q is None
        dx = dk = self.token_tensor(self.HV, self.K)
        if not makes_keys:  # nothing but A comes from the keys
            dk = self.token_tensor(self.HV, self.K)
        grads = record_precondition_grads(self, saved, dmade, dx, self.form, add=False)
        dg, dbeta, dA = record_energy_grads(self, saved, grads, dk, makes_keys, dA_end, state_grads)
        found = PreconditionerInputs(dk, dg, dbeta, A=None if self.x.A is None else dA)
        if self.form.name == "none":  # reads no centre
            return found
        *_, parameter = self.reduce_grads(saved, None, center_grads=grads.parameter)
        return found._replace(center=parameter) if makes_keys else found._replace(q=dx, ridge=parameter)


MEMORY = make_rule(Memory)
PRECONDITIONER = make_rule(Preconditioner)
