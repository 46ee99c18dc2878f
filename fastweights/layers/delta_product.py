"""DeltaProduct: several steps of the delta rule per token, each along a key of its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from ..checks import check_flag
from ..ops import delta_product
from .decay import HeadDecay
from .gates import SigmoidGain
from .memory_layer import Answer, MemoryLayer, RuleCall
from .options import DecayOptions, MemoryOptions, one_of, option, up_to
from .registry import DELTA, register_mixer, register_variants
from .shared_input import compute_gates

__all__ = ["DeltaProduct"]


@dataclass(frozen=True, kw_only=True)
class DeltaProductOptions(DecayOptions, MemoryOptions):
    """Options of `DeltaProduct`, whose docstring explains them."""

    decay: str = option("none", one_of("none", "head"))
    householders: int = option(2, up_to(16))
    negative_eigenvalues: bool = option(True, check_flag)

    @property
    def steps(self) -> int:
        return self.householders

    def check_together(self) -> None:
        super().check_together()
        if self.shared_qk:
            raise ValueError("shared_qk must be False: a token has several keys and one query")
        if self.skip_init is not None:
            raise ValueError(f"skip_init must be None: a token has several values and one answer, got {self.skip_init}")


@register_mixer(
    "deltaproduct",
    summary="DeltaProduct: several steps of the delta rule per token",
    equation="n times S = S + beta_i k_i (v_i - S^T k_i)^T",
    source="Siems et al. 2025 (DeltaProduct), section 3",
    cost=f"n H ({DELTA})",
)
class DeltaProduct(MemoryLayer):
    r"""A sequence mixer whose memory takes n steps of the delta rule at every token.

    $$S^0 = a_t S_{t-1}, \qquad S^i = S^{i-1} + \beta^i_t k^i_t (v^i_t - S^{i-1\top} k^i_t)^\top, \quad i = 1 .. n, \qquad
      o_t = S_t^\top q_t, \quad S_t = S^n$$

    Keys, values and gains of every step are projections of their own. The transition is a product of n generalised Householder
    matrices: it can permute or rotate in n dimensions at every token, which one step cannot.

    Args:
        decay: "none" (DeltaProduct) or "head" (Gated DeltaProduct: one decay per head and token, before the first step).
        householders: n, steps per token.
        negative_eigenvalues: whether beta reaches 2 instead of 1, so that a step can be a reflection.

    The other options are those of `DecayOptions` (long_memory) and `MemoryOptions`, without shared_qk.
    """

    Options = DeltaProductOptions
    op = delta_product
    decodes_in_pool = True
    options: DeltaProductOptions
    probes = {**MemoryLayer.probes, "g": "decay", "beta": ""}

    def build(self) -> None:
        options, heads = self.options, self.heads.value_heads
        largest = 2.0 if options.negative_eigenvalues else 1.0
        self.gain = SigmoidGain(self.hidden_size, options.householders * heads, largest=largest)
        self.decay = HeadDecay(self.hidden_size, heads, options.long_memory) if options.decay == "head" else None

    def gates(self) -> Sequence[nn.Module | None]:
        return (self.gain, self.decay)

    def rule(self, x_BTD: Tensor, q_BTHK: Tensor, k_BTHK: Tensor, v_BTGV: Tensor, run: RuleCall) -> Answer:
        """Channels come head by head, within a head step by step: R stands for the steps."""
        beta, g_BTG = compute_gates(x_BTD, *self.gates(), products=run.products)
        k_BTHRK, v_BTGRV, beta_BTGR = (y.unflatten(2, (-1, self.options.steps)) for y in (k_BTHK, v_BTGV, beta))
        self.probe(k=k_BTHRK, v=v_BTGRV, beta=beta_BTGR, g=g_BTG)
        return run(self.op, q_BTHK, k_BTHRK, v_BTGRV, beta_BTGR, g_BTG)


register_variants(
    DeltaProduct,
    f"n ({DELTA})",
    {
        "gated-deltaproduct": (
            {"decay": "head"},
            "gated DeltaProduct: DeltaProduct with one decay per head",
            "S = a S, then n times S = S + beta_i k_i (v_i - S^T k_i)^T",
            "Siems et al. 2025 (DeltaProduct), section 3",
        ),
    },
)
