"""The launches of the memory of variational linear attention: the delta rule along unit directions, its answers divided."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Sequence
from typing import Any

import torch

from ..common.call import Specs, make_rule, padded
from ..common.delta_rule.launches import ChunkOperands, DeltaRule
from ..common.delta_rule.sizes import KernelInputs, SavedForBackward
from ..runtime.workspace import TensorSpec
from .unit_keys import divisor_gradients, divisors, scan_rows, unit_key_gradients, unit_keys

REGISTERS = 128  # per thread, so that a multiprocessor runs two programs of 8 warps


class PenalizedInputs(namedtuple("PenalizedInputs", "q k v y S z cu_seqlens", defaults=(None, None, None))):
    """q, k [B, T, H, K]; v [B, T, HV, V]; y [B, T, h, K] in float32, A_t k_t; S [N, HV, K, V] or None; z [N, HV, K] or None;
    cu_seqlens [N+1] or None, on the device."""


class Saved(
    namedtuple(
        "Saved",
        "T u G starts transitions key_energy write_keys chunk_table segment_table records q_decayed k_decayed w_decayed gates "
        "last_gates z divisor states",
    )
):
    """What the delta rule keeps, the sums of the keys at the chunks' starts [M, HV, K] and the divisors [BT, HV], these in
    float32, and the states at the chunks' starts [M, HV, K, V]."""


class Penalized(DeltaRule):
    """Operands are in the dtype of the inputs. Where that has 16 bits, another tensor has what the rounding of write keys left.
    Options: eps, whether keys and write keys have length 1. Outputs: o, S, z, the states None unless they are wanted."""

    def read_memory(self) -> KernelInputs:
        x, (_, unit_keys, _), dtype = self.x, self.options, self.x.k.dtype
        return KernelInputs(
            x.q, TensorSpec(x.k.shape, dtype) if unit_keys else x.k, x.v, TensorSpec((*x.v.shape[:2], 1), torch.float32),
            write_key=TensorSpec(x.y.shape, dtype), S=x.S, cu_seqlens=x.cu_seqlens,
            write_key_rest=None if dtype == torch.float32 else TensorSpec(x.y.shape, dtype),
        )  # fmt: skip

    def set_up(self) -> None:
        super().set_up()
        self.eps, self.unit_keys, unit_writes = self.options
        self.constants |= {"HEADS_Y": self.group(self.x.y), "UNIT_KEYS": self.unit_keys, "UNIT_WRITES": unit_writes}

    def ask_memory(self, saved: Saved) -> SavedForBackward:
        """Let the memory have the divisors of its answers; what it saves."""
        self.memory = self.memory._replace(divisor=saved.divisor)
        self.kept_states = saved.states
        return SavedForBackward(*saved[: len(SavedForBackward._fields)])

    def chunk_states(self) -> TensorSpec:
        return self.kept_states

    def pass_state_again(self, chunks: ChunkOperands, saved: SavedForBackward) -> TensorSpec:
        return self.kept_states

    def launch_chunks(self, kernel: Any, saved: Saved, *arguments: Any, **constants: Any) -> None:
        """A kernel that takes a chunk of one head per program."""
        self.launch(
            kernel, (self.M, self.HV), *arguments, saved.chunk_table, self.T, self.HV, **constants,
            num_warps=4 if padded(max(self.K, self.V)) <= 64 else 8, num_stages=1,
        )  # fmt: skip

    def record_unit_keys(self, saved: Saved, sums: TensorSpec | None) -> None:
        x, memory = self.x, self.memory
        self.launch_chunks(
            unit_keys, saved, x.k, x.y, memory.k if self.unit_keys else None, memory.write_key, memory.write_key_rest,
            memory.beta, sums, HEADS_K=self.group(x.k),
        )  # fmt: skip

    def record_scan(self, start: Any, sums: TensorSpec, states: Any, end: Any, back: bool) -> None:
        self.launch(
            scan_rows, (self.N, self.HV), start, sums, states, end, self.x.cu_seqlens, self.T, self.HV,
            BACK=back, num_warps=4, num_stages=1,
        )  # fmt: skip

    def shapes(self, final: bool) -> tuple[Specs, Saved]:
        HV = self.HV
        kept = self.floats(self.M, HV, self.K), self.token_tensor(HV, dtype=torch.float32), super().chunk_states()
        saved = Saved(*self.placeholders(), *kept)
        states = (self.state(self.N), self.floats(self.N, HV, self.K)) if final else (None, None)
        return (self.token_tensor(HV, self.V), *states), saved

    def forward(self, final: bool) -> tuple[Specs, Saved]:
        x = self.x
        (o, S, z), saved = self.shapes(final)
        kept, sums = self.ask_memory(saved), self.floats(self.M, self.HV, self.K)
        self.record_tables(kept)
        self.record_unit_keys(saved, sums)
        self.record_scan(x.z, sums, saved.z, z, back=False)
        self.launch_chunks(divisors, saved, x.q, x.k, saved.z, saved.divisor, self.eps, HEADS=self.group(x.k))
        chunks = self.transform_chunks(kept, 1.0, reuse_saved=False)
        self.record_outputs(chunks, kept, 1.0, o, S)
        return (o, S, z), saved

    def backward(self, saved: Saved, output_grads: Sequence[Any], state_grads: bool) -> PenalizedInputs:
        x, (do, dS_end, dz_end), HV, K = self.x, output_grads, self.HV, self.K
        kept = self.ask_memory(saved)
        self.record_unit_keys(saved, None)
        found = self.memory_grads(kept, 1.0, do, dS_end, state_grads)
        ddivisor = self.token_tensor(HV, dtype=torch.float32)
        sums, later = (self.floats(self.M, HV, K) for _ in range(2))
        group = self.group(x.k)
        self.launch_chunks(divisor_gradients, saved, x.q, found.q, saved.divisor, ddivisor, sums, self.eps, HEADS=group)
        dz = self.floats(self.N, HV, K) if state_grads and x.z is not None else None
        self.record_scan(dz_end, sums, later, dz, back=True)
        dq, dk, dy = (self.token_tensor(HV, K, dtype=dtype) for dtype in (self.dtype, self.dtype, torch.float32))
        self.launch_chunks(
            unit_key_gradients, saved, x.q, x.k, x.y, saved.z, later, ddivisor, found.q, found.k, found.write_key, dq, dk, dy,
            HEADS=group, maxnreg=REGISTERS,
        )  # fmt: skip
        return PenalizedInputs(dq, dk, found.v, dy, None if x.S is None else found.S, dz)


PENALIZED = make_rule(Penalized)
