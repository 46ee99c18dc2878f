"""Mesa layer: ridge regression on the fading past with a learned ridge a key channel."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..ops import mesa
from ..ops.framework.run import BACKENDS
from ._checks import check_choice, check_flag, check_input, check_positive, check_size
from .cache import LayerCache
from .decay import HeadDecay
from .gates import SigmoidGain
from .heads import HeadSizes
from .initialization import OwnInitialValues, inverse_softplus
from .mixer import Mixer
from .norms import at_least_float32
from .projections import OutputProjection, QKVProjection

__all__ = ["MesaNet"]


class LearnedRidge(OwnInitialValues):
    """smallest + softplus(weight), [num_heads, channels] in float32 or better."""

    _no_weight_decay = ("weight",)

    def __init__(self, num_heads: int, channels: int, first: float, smallest: float) -> None:
        super().__init__()
        if check_positive("ridge", first) <= check_positive("smallest_ridge", smallest):
            raise ValueError(f"ridge must be above smallest_ridge, {smallest}, got {first}")
        self.first, self.smallest = first, smallest
        self.weight = nn.Parameter(torch.empty(num_heads, channels))
        self.reset_parameters()

    def initial_values(self) -> dict[str, Tensor]:
        above = torch.full_like(self.weight, self.first - self.smallest, dtype=torch.float32)
        return {"weight": inverse_softplus(above)}

    def forward(self) -> Tensor:
        return self.smallest + F.softplus(at_least_float32(self.weight))


class MesaNet(Mixer):
    r"""A sequence mixer that answers with the ridge regression of all values on all keys so far, old ones weighted down.

    $$H_t = a_t H_{t-1} + \beta_t k_t k_t^\top, \qquad U_t = a_t U_{t-1} + \beta_t k_t v_t^\top, \qquad
      o_t = U_t^\top (H_t + \Lambda)^{-1} q_t$$

    with unit q and k, a decay a and a gain beta in (0, 1) a head, and a learned diagonal Lambda; solved by conjugate gradients.
    MesaNet (von Oswald et al. 2025), the baseline of Gated KalmaNet (whose ridge follows |H_t|). Projections, convolutions and
    the decay's form are those of the other layers here; the paper's has the sigmoid of a projection for the decay and no
    convolution on v.

    Args:
        hidden_size: width D of the input and the output.
        num_heads: q/k heads H.
        head_dim: key channels K of a head; hidden_size / num_heads when None.
        expand_v: value channels V = expand_v * K.
        num_v_heads: value heads G, a multiple of H (each q/k head serves G/H of them); H when None.
        decay: "head" (one number a head) or "none".
        gain: "beta" (sigmoid of a projection, one number a head) or None (beta 1).
        ridge: first value of Lambda, above smallest_ridge.
        smallest_ridge: positive lower bound of Lambda, which keeps the regression solvable.
        iterations: steps of conjugate gradients.
        normalize_qk: whether queries and keys are divided by their length.
        conv_size: width of the short convolutions on q, k and v; None leaves them out.
        activation: after them, "silu" or "none".
        output_gate: None, "silu", "sigmoid" or "gelu": a gate on the normalised answer.
        gate_low_rank: whether that gate is projected through V dimensions.
        norm_eps: of the RMSNorm on the answer.
        backend: of the op, see `fastweights.ops.mesa`.

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
        decay: str = "head",
        gain: str | None = "beta",
        ridge: float = 1.0,
        smallest_ridge: float = 0.25,
        iterations: int = 30,
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
        self.iterations = check_size("iterations", iterations)
        self.backend = backend
        self.normalize_qk = check_flag("normalize_qk", normalize_qk)
        self.qkv = QKVProjection(hidden_size, heads, conv_size, activation, self.normalize_qk, backend)
        self.decay = HeadDecay(hidden_size, heads.value_heads) if decay == "head" else None
        self.gain = SigmoidGain(hidden_size, heads.value_heads) if gain else None
        self.ridge = LearnedRidge(heads.value_heads, heads.key, ridge, smallest_ridge)
        self.output = OutputProjection(hidden_size, heads, output_gate, gate_low_rank, norm_eps, backend)

    def forward(self, x_BTD: Tensor, cache: LayerCache | None = None, cu_seqlens: Tensor | None = None) -> Tensor:
        check_input(x_BTD, self.hidden_size, cache, cu_seqlens)
        held = LayerCache() if cache is None else cache
        q_BTHK, k_BTHK, v_BTGV, windows = self.qkv(x_BTD, cache, cu_seqlens)
        g_BTG = torch.zeros_like(v_BTGV[..., 0]) if self.decay is None else self.decay(x_BTD)
        beta_BTG = torch.ones_like(v_BTGV[..., 0]) if self.gain is None else self.gain(x_BTD)
        o_BTGV, state = mesa(
            q_BTHK, k_BTHK, v_BTGV, g_BTG, beta_BTG, self.ridge(), iterations=self.iterations,
            initial_state=(held.memory["H"], held.memory["U"]) if held.memory else None,
            output_final_state=cache is not None, cu_seqlens=cu_seqlens, backend=self.backend,
        )  # fmt: skip
        if cache is not None:
            cache.update(dict(zip("HU", state or (), strict=False)), windows)
        return self.output(o_BTGV, x_BTD)

    def state_size(self, length: int = 1) -> int:
        return self.heads.value_heads * self.heads.key * (self.heads.key + self.heads.value)
