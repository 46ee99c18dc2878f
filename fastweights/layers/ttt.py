"""Test-time training layer with normalised answers: the baseline that Lattice sets its slots against."""

from __future__ import annotations

from torch import Tensor

from ..ops import output_normalized_ttt
from ..ops.framework.run import BACKENDS
from ._checks import check_choice, check_flag, check_input
from .cache import LayerCache
from .gates import StepSize
from .heads import HeadSizes
from .mixer import Mixer
from .norms import l2_normalize
from .projections import OutputProjection, SharedQKProjection

__all__ = ["TestTimeTraining"]


class TestTimeTraining(Mixer):
    r"""A sequence mixer that corrects the direction of its memory's answer to each key.

    $$z = S_{t-1}^\top k_t, \qquad e = \frac{z}{|z|} - v_t, \qquad
      S_t = S_{t-1} - \gamma_t k_t \Big(\big(I - \tfrac{z z^\top}{|z|^2}\big) \frac{e}{|z|}\Big)^\top, \qquad o_t = S_t^\top q_t$$

    Test-time training (Sun et al. 2024) as Lattice (Karami and Mirrokni 2025, eq. 19) takes it, in the same block as
    `Lattice`: q and k share one projection and differ by their convolutions, gamma is a learned rate a head times the
    sigmoid of a projection, and the answer passes a GELU gate.

    Args:
        hidden_size: width D of the input and the output.
        num_heads: q/k heads H.
        head_dim: key channels K of a head; hidden_size / num_heads when None.
        expand_v: value channels V = expand_v * K.
        num_v_heads: value heads G, a multiple of H (each q/k head serves G/H of them); H when None.
        rate: first value of the learned rate, positive.
        normalize_qk: whether queries and keys are divided by their length.
        normalize_v: whether values are: only the direction of a value is learned.
        conv_size: width of the two convolutions.
        activation: after them, "silu" or "none".
        output_gate: None, "silu", "sigmoid" or "gelu": a gate on the normalised answer.
        gate_low_rank: whether that gate is projected through V dimensions.
        norm_eps: of the RMSNorm on the answer.
        backend: of the op.

    Raises:
        ValueError: an option that does not fit.
    """

    __test__ = False  # not a test, whatever pytest makes of its name

    def __init__(
        self,
        *,
        hidden_size: int,
        num_heads: int,
        head_dim: int | None = None,
        expand_v: float = 1.0,
        num_v_heads: int | None = None,
        rate: float = 1.0,
        normalize_qk: bool = True,
        normalize_v: bool = True,
        conv_size: int = 4,
        activation: str = "silu",
        output_gate: str | None = "gelu",
        gate_low_rank: bool = False,
        norm_eps: float = 1e-6,
        backend: str = "auto",
    ) -> None:
        super().__init__()
        heads = HeadSizes.choose(hidden_size, num_heads, head_dim, expand_v, num_v_heads)
        check_choice("backend", backend, BACKENDS)
        self.hidden_size = hidden_size
        self.heads = heads
        self.normalize_v = check_flag("normalize_v", normalize_v)
        self.backend = backend
        self.normalize_qk = check_flag("normalize_qk", normalize_qk)
        self.qkv = SharedQKProjection(hidden_size, heads, conv_size, activation, self.normalize_qk, backend)
        self.step = StepSize(hidden_size, heads.value_heads, rate)
        self.output = OutputProjection(hidden_size, heads, output_gate, gate_low_rank, norm_eps, backend)

    def forward(self, x_BTD: Tensor, cache: LayerCache | None = None, cu_seqlens: Tensor | None = None) -> Tensor:
        check_input(x_BTD, self.hidden_size, cache, cu_seqlens)
        held = LayerCache() if cache is None else cache
        q_BTHK, k_BTHK, v_BTGV, windows = self.qkv(x_BTD, cache, cu_seqlens)
        if self.normalize_v:
            v_BTGV = l2_normalize(v_BTGV)
        o_BTGV, S = output_normalized_ttt(
            q_BTHK, k_BTHK, v_BTGV, self.step(x_BTD), initial_state=held.memory.get("S"),
            output_final_state=cache is not None, cu_seqlens=cu_seqlens, backend=self.backend,
        )  # fmt: skip
        if cache is not None:
            cache.update({"S": S}, windows)
        return self.output(o_BTGV, x_BTD)

    def state_size(self, length: int = 1) -> int:
        return self.heads.value_heads * self.heads.key * self.heads.value
