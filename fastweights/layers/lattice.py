"""Lattice, whose memory slots of unit length change only orthogonally to their content, and its baseline, test-time training."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from ..checks import LARGEST_HEAD, check_flag, check_positive, check_size
from ..ops import lattice, output_normalized_ttt
from ..ops.authoring import compute_dtype
from .decay import ForgetGate
from .gates import StepSize
from .heads import HeadSizes
from .initialization import OwnInitialValues
from .memory_layer import Answer, MemoryLayer, RuleCall
from .norms import l2_normalize
from .options import DecayOptions, MemoryOptions, at_least_zero, one_of, option
from .projections import GATES
from .registry import register_mixer
from .shared_input import compute_gates

__all__ = ["Lattice", "TestTimeTraining"]


@dataclass(frozen=True, kw_only=True)
class SharedQKOptions(MemoryOptions):
    """Options that `TestTimeTraining` and `Lattice` share; their docstrings explain them."""

    rate: float = option(1.0, check_positive)
    normalize_v: bool = option(True, check_flag)
    shared_qk: bool = option(True, check_flag)
    output_gate: str | None = option("gelu", one_of(None, *GATES), or_none=True)


@dataclass(frozen=True, kw_only=True)
class TTTOptions(SharedQKOptions):
    """Options of `TestTimeTraining`, whose docstring explains them."""

    learned_state: bool = option(False, check_flag)


class FirstState(OwnInitialValues):
    """A learned memory before the first token, [heads, K, V], drawn with standard deviation 0.02 as by Sun et al."""

    def __init__(self, num_heads: int, channels: int, value_channels: int) -> None:
        super().__init__()
        self.S = nn.Parameter(torch.empty(num_heads, channels, value_channels))
        self.reset_parameters()

    def initial_values(self) -> dict[str, Tensor]:
        return {"S": torch.empty_like(self.S, dtype=torch.float32).normal_(std=0.02)}

    def forward(self, count: int, like: Tensor) -> Tensor:
        """The same for `count` sequences, in the dtype of the memory of values `like`."""
        return self.S.to(compute_dtype(like)).expand(count, -1, -1, -1)


@register_mixer(
    "ttt",
    summary="test-time training with normalised answers, Lattice's baseline",
    equation="z = S^T k, S = S - gamma k ((I - z z^T / |z|^2) (z / |z| - v) / |z|)^T",
    source="Sun et al. 2024 (TTT); Karami and Mirrokni 2025, eq. 19",
    cost="H (3 K V + 2 C K + 3 C V / 2)",
)
class TestTimeTraining(MemoryLayer):
    r"""A sequence mixer that corrects the direction of its memory's answer to each key.

    $$z = S_{t-1}^\top k_t, \qquad e = \frac{z}{|z|} - v_t, \qquad
      S_t = S_{t-1} - \gamma_t k_t \Big(\big(I - \tfrac{z z^\top}{|z|^2}\big) \frac{e}{|z|}\Big)^\top, \qquad o_t = S_t^\top q_t$$

    Test-time training (Sun et al. 2024) as in Lattice (Karami and Mirrokni 2025, eq. 19), in the same block as
    `Lattice`: q and k share one projection and differ by their convolutions, gamma is one learned rate per head times the
    sigmoid of a projection, and the answer passes a GELU gate.

    Args:
        rate: first value of the learned rate, positive.
        normalize_v: whether values are divided by their length: only the direction of a value is learned.
        shared_qk: whether q and k share one projection, the default here.
        output_gate: None, "silu", "sigmoid" or, the default, "gelu".
        learned_state: whether the memory before the first token is learned (Sun et al.); otherwise it is zero.

    The other options are those of `MemoryOptions`.
    """

    __test__ = False  # pytest collects classes by the first letters of this name

    Options = TTTOptions
    op = output_normalized_ttt
    decodes_in_pool = True
    options: TTTOptions
    probes = {**MemoryLayer.probes, "step_size": ""}

    def build(self) -> None:
        heads = self.heads
        self.step = StepSize(self.hidden_size, heads.value_heads, self.options.rate)
        self.first = FirstState(heads.value_heads, heads.key, heads.value) if self.options.learned_state else None

    def rule(self, x_BTD: Tensor, q_BTHK: Tensor, k_BTHK: Tensor, v_BTGV: Tensor, run: RuleCall) -> Answer:
        if self.options.normalize_v:
            v_BTGV = l2_normalize(v_BTGV)
        gamma_BTG = self.step(x_BTD)
        self.probe(v=v_BTGV, step_size=gamma_BTG)
        if self.first is not None and not run.memory:
            run.memory = {"S": self.first(run.count(x_BTD), v_BTGV)}
        return run(self.op, q_BTHK, k_BTHK, v_BTGV, gamma_BTG)


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
    needs_activation = True  # without it the gradients of a hybrid grew to 1e12 within 40 steps, in float32
    decodes_in_pool = True
    options: LatticeOptions
    probes = {**MemoryLayer.probes, "g": "decay", "step_size": ""}

    def build(self) -> None:
        options, heads, width = self.options, self.heads.value_heads, self.hidden_size
        self.decay = ForgetGate(width, heads, options.long_memory) if options.decay == "head" else None
        self.step = StepSize(width, heads, options.rate)

    def rule(self, x_BTD: Tensor, q_BTHK: Tensor, k_BTHK: Tensor, v_BTGV: Tensor, run: RuleCall) -> Answer:
        options = self.options
        if options.normalize_v:
            v_BTGV = l2_normalize(v_BTGV)
        gamma_BTG, forget_BTG = compute_gates(x_BTD, self.step, self.decay)
        self.probe(v=v_BTGV, step_size=gamma_BTG, g=None if forget_BTG is None else forget_BTG.log)
        if not run.memory and self.heads.key > self.heads.value:
            run.memory = {"S": self._first_slots(run.count(x_BTD), v_BTGV)}
        return run(
            self.op, q_BTHK, k_BTHK, v_BTGV, gamma_BTG, decay=forget_BTG,
            objective=options.objective, normalize=options.normalize, l1=options.l1,
        )  # fmt: skip

    def _first_slots(self, count: int, like: Tensor) -> Tensor:
        """Cosine basis [count, G, K, V] for more slots than value channels; for fewer the op has slots of its own."""
        slots, channels = self.heads.key, self.heads.value
        slot, channel = (torch.arange(n, device=like.device, dtype=torch.float64) for n in (slots, channels))
        rows = torch.cos(math.pi / slots * slot[:, None] * (channel + 0.5))
        rows = (rows / rows.norm(dim=1, keepdim=True)).to(compute_dtype(like))
        return rows.expand(count, self.heads.value_heads, -1, -1)
