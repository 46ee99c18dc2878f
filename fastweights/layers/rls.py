"""Recursive least squares layer: a memory that holds the exact regression of all values on all keys so far."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..checks import check_positive
from ..ops import recursive_least_squares
from .decay import HeadDecay
from .gates import SigmoidGain
from .gates_together import gates_together
from .memory_layer import Answer, MemoryLayer, RuleCall
from .options import DecayOptions, MemoryOptions, one_of, option
from .probe import states_over_time
from .registry import EXACT, PDN, register_mixer

__all__ = ["RecursiveLeastSquares", "RecursiveLeastSquaresOptions"]


@dataclass(frozen=True, kw_only=True)
class RecursiveLeastSquaresOptions(DecayOptions, MemoryOptions):
    """Options of `RecursiveLeastSquares`, whose docstring explains them."""

    decay: str = option("none", one_of("none", "head"))
    gain: str | None = option("beta", one_of(None, "beta"))
    ridge: float = option(1.0, check_positive)


@register_mixer(
    "rls",
    summary="recursive least squares: the exact regression of all values on all keys so far",
    equation="P = (a P^-1 + beta k k^T)^-1, S = S + beta P k (v - S^T k)^T",
    source=f"{PDN}, Theorem 3.1; Kalman 1960",
    cost=f"H ({EXACT})",
)
class RecursiveLeastSquares(MemoryLayer):
    r"""A sequence mixer whose memory is at every token the weighted ridge regression of values on keys.

    $$P_t = (a_t P_{t-1}^{-1} + \beta_t k_t k_t^\top)^{-1}, \qquad
      S_t = S_{t-1} + \beta_t P_t k_t (v_t - S_{t-1}^\top k_t)^\top, \qquad o_t = S_t^\top q_t$$

    with unit q and k. The Kalman filter of the memory and the common ancestor of the delta rules, preconditioners and
    regressions here (Preconditioned DeltaNet, Theorem 3.1); see `fastweights.ops.recursive_least_squares`.

    Args:
        decay: "none", or "head" (one decay per head): old tokens count less. P then grows in directions without keys (wind-up)
            beyond float32's precision. So the memory is computed and kept in float64, and the first decays are long
            (long_memory "paper" where it is None). Where training shortens them below about 1 - 1/K,
            decoding token by token drifts from the full forward.
        gain: "beta" (weight of a token, the sigmoid of a projection, one number per head) or None (beta 1).
        ridge: weight of the prior that the memory is zero, positive. Keys have unit length, so that 1 weighs as much as a whole
            token. In a small regression a trained layer predicts much better with 0.1 or 0.01, in a larger one with 0.1
            where all inputs have one variance; with 0.01 it learns recall later (docs/own-least-squares.md).

    The other options are those of `DecayOptions` (long_memory) and `MemoryOptions`.
    """

    Options = RecursiveLeastSquaresOptions
    op = recursive_least_squares
    decodes_in_pool = True
    options: RecursiveLeastSquaresOptions
    probes = {**MemoryLayer.probes, "g": "decay", "beta": "gain", "write_key": ""}

    def build(self) -> None:
        options, heads = self.options, self.heads
        self.decay = None
        if options.decay == "head":
            self.decay = HeadDecay(self.hidden_size, heads.value_heads, options.long_memory or "paper")
        self.gain = SigmoidGain(self.hidden_size, heads.value_heads) if options.gain else None

    def rule(self, x_BTD: Tensor, q_BTHK: Tensor, k_BTHK: Tensor, v_BTGV: Tensor, run: RuleCall) -> Answer:
        dtype = v_BTGV.dtype
        beta_BTG, g_BTG = gates_together(x_BTD, self.gain, self.decay)
        self.probe(g=g_BTG, beta=beta_BTG, write_key=lambda: self._write_keys(x_BTD, k_BTHK, run))
        if g_BTG is not None:  # P winds up: between two calls float32 would lose its small entries
            q_BTHK, k_BTHK, v_BTGV = q_BTHK.double(), k_BTHK.double(), v_BTGV.double()
        if beta_BTG is None:
            beta_BTG = torch.ones_like(v_BTGV[..., 0])
        o_BTGV, memory = run(
            self.op, q_BTHK, k_BTHK, v_BTGV, beta_BTG, g_BTG, ridge=self.options.ridge
        )  # fmt: skip
        return o_BTGV.to(dtype), memory

    def _write_keys(self, x_BTD: Tensor, k_BTHK: Tensor, run: RuleCall) -> Tensor:
        """P_t k_t [B, T, G, K]. For probes: the op forms them inside."""
        P_BTGKK = states_over_time(self, x_BTD, run.cache_before(), run.keywords["cu_seqlens"], 1)[1]["P"]
        k_BTGK = k_BTHK.repeat_interleave(self.heads.value_heads // self.heads.key_heads, 2).to(P_BTGKK.dtype)
        return (P_BTGKK @ k_BTGK[..., None]).squeeze(-1)
