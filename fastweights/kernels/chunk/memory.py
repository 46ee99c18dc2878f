"""What the family computes: the memory of linear attention and the delta rules, and a preconditioner's write keys or queries
alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from ..runtime.launch_plan import Recorder, Rule
from ..runtime.workspace import TensorSpec
from .backward import backward, reduce_grads
from .forward import forward, shapes
from .key_energy import record_energy_grads, record_key_energy
from .precondition import QUERIES, Form, record_precondition, record_precondition_grads
from .sizes import ChunkSizes, KernelInputs, SavedForBackward

__all__ = ["MEMORY", "PRECONDITIONER", "PreconditionerInputs"]

# Inputs: KernelInputs. Options: scale, bound, eps. Outputs: o, S, A.
MEMORY = Rule(shapes, forward, backward)


class PreconditionerInputs(NamedTuple):
    """k [B, T, H, K]; g, beta [B, T, heads]; for write keys center [HV], for queries q, as k, and ridge [HV, K]; A [N, HV, K] or
    None; cu_seqlens [N+1] or None."""

    k: Any
    g: Any
    beta: Any
    center: Any = None
    q: Any = None
    ridge: Any = None
    A: Any = None
    cu_seqlens: Any = None

    def as_memory(self) -> KernelInputs:
        """The inputs of a memory with these heads, whose values nobody reads."""
        k, g, beta, center, q, ridge, A, cu_seqlens = self
        v = TensorSpec((*k.shape[:2], max(g.shape[2], beta.shape[2]), 1), k.dtype)
        q, parameter = (k, center) if q is None else (q, ridge)
        return KernelInputs(q, k, v, precond_g=g, precond_beta=beta, center=parameter, A=A, cu_seqlens=cu_seqlens)

    def form(self, options: tuple[Any, ...]) -> Form:
        squash, bound, eps, ridge = options
        return Form(squash if self.q is None else QUERIES, bound, eps, ridge)


def _shapes(
    x: PreconditionerInputs, device: torch.device, options: tuple[Any, ...], final: bool
) -> tuple[Sequence[TensorSpec | None], SavedForBackward]:
    """The result and the final A; of what is saved only A at the chunks' starts and the table of chunks are filled."""
    sizes = ChunkSizes(x.as_memory(), device)
    kept = sizes.saved()
    saved = SavedForBackward(*[None] * len(kept))._replace(key_energy=kept.key_energy, chunk_table=kept.chunk_table)
    return (kept.write_keys, sizes.final_states(final)[1]), saved


def _forward(
    recorder: Recorder, x: PreconditionerInputs, device: torch.device, options: tuple[Any, ...], final: bool
) -> tuple[Sequence[TensorSpec | None], SavedForBackward]:  # fmt: skip
    memory = x.as_memory()
    sizes = ChunkSizes(memory, device)
    (made, end), saved = _shapes(x, device, options, final)
    if sizes.packed:  # nothing here reads the place of a segment
        filled = sizes.saved()._replace(chunk_table=saved.chunk_table)
        sizes.record_tables(recorder, memory, filled)
    record_key_energy(recorder, memory, sizes, saved, end)
    record_precondition(recorder, memory, sizes, saved, made, x.form(options))
    return (made, end), saved


def _backward(
    recorder: Recorder, x: PreconditionerInputs, device: torch.device, options: tuple[Any, ...], saved: SavedForBackward,
    output_grads: Sequence[Any], state_grads: bool,
) -> PreconditionerInputs:  # fmt: skip
    dmade, dA_end = output_grads
    memory, form = x.as_memory(), x.form(options)
    sizes = ChunkSizes(memory, device)
    dx = dk = sizes.per_token(sizes.HV, sizes.K)
    if x.q is not None:  # nothing but A comes from the keys
        dk = sizes.per_token(sizes.HV, sizes.K)
    grads = record_precondition_grads(recorder, memory, sizes, saved, dmade, dx, form, add=False)
    dg, dbeta, dA = record_energy_grads(recorder, memory, sizes, saved, grads, dk, x.q is None, dA_end, state_grads)
    dA = None if x.A is None else dA
    if form.name == "none":  # reads no centre
        return PreconditionerInputs(dk, dg, dbeta, A=dA)
    *_, dparameter = reduce_grads(recorder, memory, sizes, saved, None, grads.parameter)
    if x.q is None:
        return PreconditionerInputs(dk, dg, dbeta, center=dparameter, A=dA)
    return PreconditionerInputs(dk, dg, dbeta, q=dx, ridge=dparameter, A=dA)


# Inputs: PreconditionerInputs. Options, for write keys: squash, bound, eps, ridge. Outputs: write keys or queries, and A.
PRECONDITIONER = Rule(_shapes, _forward, _backward)
