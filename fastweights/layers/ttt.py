"""Test-time training layer with normalised answers: the baseline of Lattice."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..checks import check_flag, check_positive
from ..ops import output_normalized_ttt
from ..ops.authoring import compute_dtype
from .gates import StepSize
from .initialization import OwnInitialValues
from .memory_layer import Answer, MemoryLayer, RuleCall
from .norms import l2_normalize
from .options import MemoryOptions, one_of, option
from .projections import GATES
from .registry import register_mixer

__all__ = ["SharedQKOptions", "TTTOptions", "TestTimeTraining"]


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
