"""Recursive least squares layer: a memory that holds the exact regression of all values on all keys so far."""

from __future__ import annotations

import torch
from torch import Tensor

from ..ops import recursive_least_squares
from ..ops.framework.run import BACKENDS
from ._checks import check_choice, check_flag, check_input, check_positive
from .cache import LayerCache
from .decay import HeadDecay
from .gates import SigmoidGain
from .heads import HeadSizes
from .mixer import Mixer
from .projections import OutputProjection, QKVProjection

__all__ = ["RecursiveLeastSquares"]


class RecursiveLeastSquares(Mixer):
    r"""A sequence mixer whose memory is at every token the weighted ridge regression of values on keys.

    $$P_t = (a_t P_{t-1}^{-1} + \beta_t k_t k_t^\top)^{-1}, \qquad
      S_t = S_{t-1} + \beta_t P_t k_t (v_t - S_{t-1}^\top k_t)^\top, \qquad o_t = S_t^\top q_t$$

    with unit q and k. The Kalman filter of the memory and the common ancestor of the delta rules, preconditioners and
    regressions here (Preconditioned DeltaNet, Theorem 3.1); see `fastweights.ops.recursive_least_squares`.

    Args:
        hidden_size: width D of the input and the output.
        num_heads: q/k heads H.
        head_dim: key channels K of a head; hidden_size / num_heads when None.
        expand_v: value channels V = expand_v * K.
        num_v_heads: value heads G, a multiple of H (each q/k head serves G/H of them); H when None.
        decay: "none", or "head" (one number a head): old tokens count less. P then grows where no key comes (wind-up) and
            outgrows float32: the memory is computed and kept in float64, and the first decays are long (A from 0.01 to 0.16).
            Where training shortens them below about 1 - 1/K, decoding token by token drifts from the full forward.
        gain: "beta" (weight of a token, the sigmoid of a projection, one number a head) or None (beta 1).
        ridge: weight of the prior that the memory is zero, positive.
        normalize_qk: whether queries and keys are divided by their length.
        conv_size: width of the short convolutions on q, k and v; None leaves them out.
        activation: after them, "silu" or "none".
        output_gate: None, "silu", "sigmoid" or "gelu": a gate on the normalised answer.
        gate_low_rank: whether that gate is projected through V dimensions.
        norm_eps: of the RMSNorm on the answer.
        backend: of the op.

    Raises:
        ValueError: an option that does not fit.
    """

    def __init__(
        self,
        *,
        hidden_size: int,
        num_heads: int,
        head_dim: int | None = None,
        expand_v: float = 1.0,
        num_v_heads: int | None = None,
        decay: str = "none",
        gain: str | None = "beta",
        ridge: float = 1.0,
        normalize_qk: bool = True,
        conv_size: int | None = 4,
        activation: str = "silu",
        output_gate: str | None = None,
        gate_low_rank: bool = False,
        norm_eps: float = 1e-6,
        backend: str = "auto",
    ) -> None:
        super().__init__()
        heads = HeadSizes.choose(hidden_size, num_heads, head_dim, expand_v, num_v_heads)
        check_choice("decay", decay, ("none", "head"))
        check_choice("gain", gain, (None, "beta"))
        check_choice("backend", backend, BACKENDS)
        self.hidden_size = hidden_size
        self.heads = heads
        self.ridge = check_positive("ridge", ridge)
        self.backend = backend
        self.normalize_qk = check_flag("normalize_qk", normalize_qk)
        self.qkv = QKVProjection(hidden_size, heads, conv_size, activation, self.normalize_qk, backend)
        self.decay = HeadDecay(hidden_size, heads.value_heads, long_memory=True) if decay == "head" else None
        self.gain = SigmoidGain(hidden_size, heads.value_heads) if gain else None
        self.output = OutputProjection(hidden_size, heads, output_gate, gate_low_rank, norm_eps, backend)

    def forward(self, x_BTD: Tensor, cache: LayerCache | None = None, cu_seqlens: Tensor | None = None) -> Tensor:
        check_input(x_BTD, self.hidden_size, cache, cu_seqlens)
        held = LayerCache() if cache is None else cache
        q_BTHK, k_BTHK, v_BTGV, windows = self.qkv(x_BTD, cache, cu_seqlens)
        dtype = v_BTGV.dtype
        if self.decay is not None:  # P winds up: between two calls float32 would lose what is small in it
            q_BTHK, k_BTHK, v_BTGV = q_BTHK.double(), k_BTHK.double(), v_BTGV.double()
        o_BTGV, state = recursive_least_squares(
            q_BTHK, k_BTHK, v_BTGV,
            torch.ones_like(v_BTGV[..., 0]) if self.gain is None else self.gain(x_BTD),
            None if self.decay is None else self.decay(x_BTD),
            ridge=self.ridge, initial_state=(held.memory["S"], held.memory["P"]) if held.memory else None,
            output_final_state=cache is not None, cu_seqlens=cu_seqlens, backend=self.backend,
        )  # fmt: skip
        if cache is not None:
            cache.update(dict(zip("SP", state or (), strict=False)), windows)
        return self.output(o_BTGV.to(dtype), x_BTD)

    def state_size(self, length: int = 1) -> int:
        return self.heads.value_heads * self.heads.key * (self.heads.key + self.heads.value)
