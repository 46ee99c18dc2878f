"""Test-time training layer with normalised answers: the baseline of Lattice."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ..checks import check_flag, check_positive, check_size
from ..ops import output_normalized_ttt
from .gates import StepSize
from .memory_layer import MemoryLayer, RuleCall
from .norms import l2_normalize
from .options import MemoryOptions, one_of, option
from .projections import GATES, SharedQKProjection
from .registry import MATRIX, register_mixer

__all__ = ["SharedQKOptions", "TestTimeTraining"]


@dataclass(frozen=True, kw_only=True)
class SharedQKOptions(MemoryOptions):
    """Options of `TestTimeTraining`, whose docstring explains them; `Lattice` adds others."""

    rate: float = option(1.0, check_positive)
    normalize_v: bool = option(True, check_flag)
    conv_size: int = option(4, check_size)
    output_gate: str | None = option("gelu", one_of(None, *GATES), or_none=True)


@register_mixer(
    "ttt",
    summary="test-time training with normalised answers, Lattice's baseline",
    equation="z = S^T k, S = S - gamma k ((I - z z^T / |z|^2) (z / |z| - v) / |z|)^T",
    source="Sun et al. 2024 (TTT); Karami and Mirrokni 2025, eq. 19",
    state=MATRIX,
)
class TestTimeTraining(MemoryLayer):
    r"""A sequence mixer that corrects the direction of its memory's answer to each key.

    $$z = S_{t-1}^\top k_t, \qquad e = \frac{z}{|z|} - v_t, \qquad
      S_t = S_{t-1} - \gamma_t k_t \Big(\big(I - \tfrac{z z^\top}{|z|^2}\big) \frac{e}{|z|}\Big)^\top, \qquad o_t = S_t^\top q_t$$

    Test-time training (Sun et al. 2024) as Lattice (Karami and Mirrokni 2025, eq. 19) takes it, in the same block as
    `Lattice`: q and k share one projection and differ by their convolutions, gamma is one learned rate per head times the
    sigmoid of a projection, and the answer passes a GELU gate.

    Args:
        rate: first value of the learned rate, positive.
        normalize_v: whether values are divided by their length: only the direction of a value is learned.
        conv_size: width of the two convolutions, which this block always has.
        output_gate: None, "silu", "sigmoid" or, the default, "gelu".

    The other options are those of `MemoryOptions`.
    """

    __test__ = False  # pytest collects classes by the first letters of this name

    Options = SharedQKOptions
    options: SharedQKOptions
    projection = SharedQKProjection
    probes = {**MemoryLayer.probes, "step_size": ""}

    def build(self) -> None:
        self.step = StepSize(self.hidden_size, self.heads.value_heads, self.options.rate)

    def rule(
        self, x_BTD: Tensor, q_BTHK: Tensor, k_BTHK: Tensor, v_BTGV: Tensor, run: RuleCall
    ) -> tuple[Tensor, dict[str, Tensor | None]]:
        if self.options.normalize_v:
            v_BTGV = l2_normalize(v_BTGV)
        gamma_BTG = self.step(x_BTD)
        self.probe(v=v_BTGV, step_size=gamma_BTG)
        return run(output_normalized_ttt, q_BTHK, k_BTHK, v_BTGV, gamma_BTG, state=("S",))

    def state_size(self, length: int = 1) -> int:
        return self.heads.value_heads * self.heads.key * self.heads.value
