"""Lattice layer: memory slots of unit length, which change only orthogonally to their content."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..checks import LARGEST_HEAD, check_flag, check_size
from ..ops import lattice
from ..ops.authoring import compute_dtype
from .decay import HeadDecay
from .gates import StepSize
from .gates_together import gates_together
from .heads import HeadSizes
from .memory_layer import Answer, MemoryLayer, RuleCall
from .norms import l2_normalize
from .options import DecayOptions, at_least_zero, one_of, option
from .registry import register_mixer
from .ttt import SharedQKOptions

__all__ = ["Lattice", "LatticeOptions"]


def check_slots(name: str, value: object) -> int:
    """The check of the number of slots."""
    slots = check_size(name, value)
    if slots > LARGEST_HEAD:
        raise ValueError(f"{name} must be at most {LARGEST_HEAD}, got {slots}; use more heads")
    return slots


@dataclass(frozen=True, kw_only=True)
class LatticeOptions(DecayOptions, SharedQKOptions):
    """Options of `Lattice`, whose docstring explains them."""

    slots: int | None = option(None, check_slots)
    objective: str = option("decode", one_of("decode", "encode", "similarity"))
    decay: str = option("head", one_of("none", "head"))
    normalize: bool = option(True, check_flag)
    l1: float = option(0.0, at_least_zero)

    def head_sizes(self) -> HeadSizes:
        heads = super().head_sizes()
        return heads if self.slots is None else replace(heads, key=self.slots)


@register_mixer(
    "lattice",
    summary="Lattice: slots of unit length, which change only orthogonally to their content",
    equation="s_i = unit(d s_i - gamma k_i (I - s_i s_i^T) (S^T k - v))",
    source="Karami and Mirrokni 2025 (Lattice), sections 3 and 5",
    cost="7 H K V; H (3 K V + 2 C (K + V)) with objective encode or similarity",
)
class Lattice(MemoryLayer):
    r"""A sequence mixer with K memory slots s_i of V numbers per head, each moved only orthogonally to itself.

    $$s_i \leftarrow d_t s_i - \gamma_t c_i \frac{h - \phi_i (\phi_i \cdot h)}{|s_i|}, \qquad s_i \leftarrow s_i / |s_i|, \qquad
      o_t = \sum_i q_i s_i, \qquad \phi_i = s_i / |s_i|$$

    h and c depend on the objective, see `fastweights.ops.lattice`; gamma is one learned rate per head times the sigmoid of a
    projection. The block is Mamba-like: q and k share one projection and differ by their convolutions, and the answer
    passes a GELU gate. Lattice (Karami and Mirrokni 2025), sections 3 and 5, appendix A; the last row of its table 4 is the
    default.

    Args:
        slots: number of slots K; head_dim when None. head_dim also sets V = expand_v * head_dim. The slots start as rows of
            the identity, or, with more slots than value channels, as unit rows of a cosine basis.
        objective: function that a step minimises, "decode" (the error of the value that the slots give for k), "encode"
            (the error of the key that they give for v) or "similarity" (minus the agreement of the two).
        decay: "head" (the forget gate d, one number per head) or "none".
        normalize: whether slots are brought back to length 1 after every step. Use the forget gate only with it.
        l1: strength of an l1 penalty on the slots, at least 0.
        rate: first value of the learned rate, positive.
        normalize_v: whether values are divided by their length, as slots of unit length can only hold such values.
        shared_qk: whether q and k share one projection, the default here.
        output_gate: None, "silu", "sigmoid" or, the default, "gelu".

    The other options are those of `DecayOptions` (long_memory) and `MemoryOptions`.
    """

    Options = LatticeOptions
    op = lattice
    decodes_in_pool = True
    options: LatticeOptions
    probes = {**MemoryLayer.probes, "g": "decay", "step_size": ""}

    def build(self) -> None:
        heads = self.heads
        self.decay = None
        if self.options.decay == "head":
            self.decay = HeadDecay(self.hidden_size, heads.value_heads, self.options.long_memory)
        self.step = StepSize(self.hidden_size, heads.value_heads, self.options.rate)

    def rule(self, x_BTD: Tensor, q_BTHK: Tensor, k_BTHK: Tensor, v_BTGV: Tensor, run: RuleCall) -> Answer:
        options = self.options
        if options.normalize_v:
            v_BTGV = l2_normalize(v_BTGV)
        gamma_BTG, g_BTG = gates_together(x_BTD, self.step, self.decay)
        self.probe(v=v_BTGV, step_size=gamma_BTG, g=g_BTG)
        if not run.memory and self.heads.key > self.heads.value:
            run.memory = {"S": self._first_slots(run.count(x_BTD), v_BTGV)}
        return run(
            self.op, q_BTHK, k_BTHK, v_BTGV, gamma_BTG, decay=None if g_BTG is None else g_BTG.exp(),
            objective=options.objective, normalize=options.normalize, l1=options.l1,
        )  # fmt: skip

    def _first_slots(self, count: int, like: Tensor) -> Tensor:
        """Cosine basis [count, G, K, V] for more slots than value channels; for fewer the op has slots of its own."""
        slots, channels = self.heads.key, self.heads.value
        slot, channel = (torch.arange(n, device=like.device, dtype=torch.float64) for n in (slots, channels))
        rows = torch.cos(math.pi / slots * slot[:, None] * (channel + 0.5))
        rows = (rows / rows.norm(dim=1, keepdim=True)).to(compute_dtype(like))
        return rows.expand(count, self.heads.value_heads, -1, -1)
