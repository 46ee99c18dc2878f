"""What the family computes, and the launches of a forward and a backward."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Sequence
from typing import Any

import torch

from ..common.call import Specs, make_rule, padded
from ..common.delta_rule.launches import ChunkOperands, DeltaRule
from ..common.delta_rule.sizes import KernelInputs, SavedForBackward
from ..common.packing import CHUNK
from ..runtime.gluon import runs_gluon
from ..runtime.private_api import is_interpreted
from .by_products import write_by_products
from .tokens import BLOCK, block_systems, key_overlaps, pass_gradients, write_tokens

PART = 8  # tokens of a block that are unrolled: the time to compile grows with the third power


class TTTInputs(namedtuple("TTTInputs", "q k v gamma S cu_seqlens", defaults=(None, None))):
    """q, k [B, T, H, K]; v [B, T, HV, V]; gamma [B, T, H or HV]; S [N, HV, K, V] or None; cu_seqlens [N+1] or None, on the
    device."""


class Saved(namedtuple("Saved", "answers factors overlaps u starts transitions chunk_table segment_table")):
    """In float32 the answers z [BT, HV, V], the factors that follow from their length [BT, HV, 4] and the products of keys
    [BT, H, 16]; what is written [BT, HV, V]; of the linear attention with these values the states at the segments' starts and the
    tables."""


def writes_by_products(dtype: torch.dtype) -> bool:
    """Whether what tokens write is found by inner products of answers: where answers are short these lose half of their digits,
    which float32 needs."""
    return dtype is not torch.float32


class OutputNormalizedTTT(DeltaRule):
    """Linear attention whose values are what the tokens write. No options. Outputs: o, S (None unless it is wanted)."""

    def read_memory(self) -> KernelInputs:
        x = self.x
        return KernelInputs(x.q, x.k, x.v, S=x.S, cu_seqlens=x.cu_seqlens)

    def set_up(self) -> None:
        super().set_up()
        x = self.x
        PV = padded(self.V)
        self.warps = 8 if padded(self.K) * PV > 8192 else 4
        self.constants |= {"PV": PV, "HEADS_K": self.group(x.k), "HEADS_GAMMA": self.group(x.gamma)}

    @property
    def takes_gluon(self) -> bool:
        """Whether the kernel for Hopper GPUs finds the gradients, whose programs have a warp for every 16 of V."""
        sized = self.K == self.V and self.V in (64, 128) and self.dtype in (torch.bfloat16, torch.float16)
        return sized and runs_gluon(self.device)

    def ask_memory(self, saved: Saved) -> tuple[SavedForBackward, ChunkOperands]:
        """Let the memory have what is written as its values: what it saves, and its operands."""
        x, self.memory = self.x, self.memory._replace(v=saved.u)
        shared = {name: getattr(saved, name) for name in ("starts", "transitions", "chunk_table", "segment_table")}
        return SavedForBackward(**shared), ChunkOperands(x.q, x.k, None, saved.u, x.k)

    def shapes(self, final: bool) -> tuple[Specs, Saved]:
        HV, kept = self.HV, self.placeholders()
        saved = Saved(
            self.token_tensor(HV, self.V, dtype=torch.float32), self.token_tensor(HV, 4, dtype=torch.float32),
            self.token_tensor(self.H, BLOCK.value, dtype=torch.float32), self.token_tensor(HV, self.V), kept.starts,
            kept.transitions, kept.chunk_table, kept.segment_table,
        )  # fmt: skip
        return (self.token_tensor(HV, self.V), self.state(self.N) if final else None), saved

    def forward(self, final: bool) -> tuple[Specs, Saved]:
        x = self.x
        (o, S_end), saved = self.shapes(final)
        kept, chunks = self.ask_memory(saved)
        self.record_tables(kept)
        self.launch(
            key_overlaps, (self.M * (CHUNK // BLOCK.value), self.H), x.k, saved.overlaps, saved.chunk_table, self.T, self.H,
            BK=padded(self.K), num_warps=1,
        )  # fmt: skip
        self.record_writes(saved)
        self.record_outputs(chunks, kept, 1.0, o, S_end)
        return (o, S_end), saved

    def record_writes(self, saved: Saved) -> None:
        x, PV, grid = self.x, padded(self.V), (self.N, self.HV)
        tensors = (x.k, x.v, x.gamma, saved.overlaps, x.S, saved.answers, saved.factors, saved.u)
        sizes, how = (x.cu_seqlens, self.T, self.HV), {"num_warps": self.warps, "num_stages": 1}
        if writes_by_products(self.dtype):
            how |= {"PV": max(32, PV), "BY_ASSEMBLY": not is_interpreted()}
            self.launch(write_by_products, grid, *tensors, *sizes, **how)
        else:
            scratch, lanes = self.floats(self.N, self.HV, BLOCK.value, self.V), min(PV, 32)
            self.launch(
                write_tokens, grid, *tensors, scratch, *sizes, LANES=lanes, COPIES=32 * self.warps // lanes, EACH=PV // lanes,
                PART=PART, **how,
            )  # fmt: skip

    def backward(self, saved: Saved, output_grads: Sequence[Any], state_grads: bool) -> TTTInputs:
        x, (do, dS_end), HV, K, V = self.x, output_grads, self.HV, self.K, self.V
        kept, chunks = self.ask_memory(saved)
        h = self.pass_state_again(chunks, kept)
        du, dP = self.token_tensor(HV, V, dtype=torch.float32), self.token_tensor(HV, CHUNK)
        self.record_value_grads(chunks, kept, 1.0, do, du, dP)

        dz, dv, dgamma = self.token_tensor(HV, V), self.token_tensor(HV, V), self.gate_gradient(x.gamma)
        dh, dS = self.empty(self.M, HV, K, V), self.state(self.N) if state_grads else None
        blocks = self.M * (CHUNK // BLOCK.value)
        through, turned = (self.floats(blocks, HV, BLOCK.value, BLOCK.value) for _ in range(2))
        systems = self.floats(blocks, HV, 2 * BLOCK.value, 2 * BLOCK.value)
        self.launch(
            block_systems, (blocks, HV), x.v, x.gamma, saved.overlaps, saved.answers, saved.factors, through, turned, systems,
            saved.chunk_table, self.T, HV, num_warps=1,
        )  # fmt: skip
        tensors = (
            x.q, x.k, x.v, x.gamma, do, dS_end, saved.answers, saved.factors, du, through, turned, systems, dz, dv, dgamma,
            dh, dS, x.cu_seqlens,
        )  # fmt: skip
        if self.takes_gluon:
            from .gradients_on_hopper import token_gradients_in_turn  # needs Gluon

            self.launch(token_gradients_in_turn, (self.N, HV), *tensors, self.T, HV=HV, num_warps=V // 16)
        else:
            how = {"num_warps": self.warps, "num_stages": 1}
            self.launch(pass_gradients, (self.N, HV), *tensors, self.T, HV, **how)

        dq, dk = self.token_tensor(HV, K), self.token_tensor(HV, K)
        inputs, grads = (x.q, x.k, x.k, None, None), (dq, dk, None, None, None)
        self.record_chunk_gradients(chunks, kept, 1.0, inputs, saved.u, dz, do, dP, h, dh, grads, DELTA=True)
        return TTTInputs(dq, dk, dv, dgamma, None if x.S is None else dS)


OUTPUT_NORMALIZED_TTT = make_rule(OutputNormalizedTTT)
