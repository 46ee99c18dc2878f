"""What the family computes: the memory of linear attention and the delta rules, and the write keys of a preconditioner alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from ..runtime.launch_plan import Recorder, Rule
from ..runtime.workspace import TensorSpec
from .backward import backward, reduce_grads
from .forward import forward, shapes
from .key_energy import (
    WriteKeyGrads,
    preconditioner_grads,
    record_key_energy,
    record_write_key_grads,
    record_write_keys,
)
from .sizes import ChunkSizes, KernelInputs, SavedForBackward

__all__ = ["MEMORY", "WRITE_KEYS", "WriteKeyInputs"]

# Inputs: KernelInputs. Options: scale, bound, eps. Outputs: o, S, A.
MEMORY = Rule(shapes, forward, backward)


class WriteKeyInputs(NamedTuple):
    """k [B, T, H, K]; g, beta [B, T, heads]; center [HV]; A [N, HV, K] or None; cu_seqlens [N+1] or None."""

    k: Any
    g: Any
    beta: Any
    center: Any
    A: Any = None
    cu_seqlens: Any = None

    def as_memory(self) -> KernelInputs:
        """The inputs of a memory with these heads, whose values nobody reads."""
        k, g, beta, center, A, cu_seqlens = self
        v = TensorSpec((*k.shape[:2], max(g.shape[2], beta.shape[2]), 1), k.dtype)
        return KernelInputs(k, k, v, precond_g=g, precond_beta=beta, center=center, A=A, cu_seqlens=cu_seqlens)


def _shapes(
    x: WriteKeyInputs, device: torch.device, options: tuple[float, ...], final: bool
) -> tuple[Sequence[TensorSpec | None], SavedForBackward]:
    """The write keys and the final A; of what is saved only A at the chunks' starts and the table of chunks are filled."""
    sizes = ChunkSizes(x.as_memory(), device)
    kept = sizes.saved()
    saved = SavedForBackward(*[None] * len(kept))._replace(key_energy=kept.key_energy, chunk_table=kept.chunk_table)
    return (kept.write_keys, sizes.final_states(final)[1]), saved


def _forward(
    recorder: Recorder, x: WriteKeyInputs, device: torch.device, options: tuple[float, ...], final: bool
) -> tuple[Sequence[TensorSpec | None], SavedForBackward]:  # fmt: skip
    bound, eps = options
    memory = x.as_memory()
    sizes = ChunkSizes(memory, device)
    (keys, end), saved = _shapes(x, device, options, final)
    filled = sizes.saved()._replace(write_keys=keys, key_energy=saved.key_energy, chunk_table=saved.chunk_table)
    if sizes.packed:  # nothing here reads the place of a segment
        sizes.record_tables(recorder, memory, filled)
    record_key_energy(recorder, memory, sizes, filled, end)
    record_write_keys(recorder, memory, sizes, filled, bound, eps)
    return (keys, end), saved


def _backward(
    recorder: Recorder, x: WriteKeyInputs, device: torch.device, options: tuple[float, ...], saved: SavedForBackward,
    output_grads: Sequence[Any], state_grads: bool,
) -> WriteKeyInputs:  # fmt: skip
    bound, eps = options
    dw, dA_end = output_grads
    memory = x.as_memory()
    sizes = ChunkSizes(memory, device)
    dk, grads = sizes.per_token(sizes.HV, sizes.K), WriteKeyGrads.empty(sizes, reuse=None)
    record_write_key_grads(recorder, memory, sizes, saved, dw, dk, grads, bound, eps, add=False)
    dg, dbeta, dA = preconditioner_grads(recorder, memory, sizes, saved, grads, dk, dA_end, state_grads)
    *_, dcenter = reduce_grads(recorder, memory, sizes, saved, None, grads.center)
    return WriteKeyInputs(dk, dg, dbeta, dcenter, None if x.A is None else dA)


# Inputs: WriteKeyInputs. Options: bound, eps. Outputs: the write keys and A.
WRITE_KEYS = Rule(_shapes, _forward, _backward)
