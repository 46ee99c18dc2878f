"""Lattice layer: memory slots on the unit sphere that take in only what is orthogonal to what they hold."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..ops import lattice
from ..ops.framework.checks import LARGEST_HEAD
from ..ops.framework.run import BACKENDS, compute_dtype
from ._checks import check_choice, check_flag, check_input, check_number, check_size
from .cache import LayerCache
from .decay import HeadDecay
from .gates import StepSize
from .heads import HeadSizes
from .mixer import Mixer
from .norms import l2_normalize
from .projections import OutputProjection, SharedQKProjection

__all__ = ["Lattice"]


class Lattice(Mixer):
    r"""A sequence mixer with K memory slots s_i of V numbers a head, each moved only across its own direction.

    $$s_i \leftarrow d_t s_i - \gamma_t c_i \frac{h - \phi_i (\phi_i \cdot h)}{|s_i|}, \qquad s_i \leftarrow s_i / |s_i|, \qquad
      o_t = \sum_i q_i s_i, \qquad \phi_i = s_i / |s_i|$$

    h and c depend on the objective, see `fastweights.ops.lattice`; gamma is a learned rate a head times the sigmoid of a
    projection. The block is Mamba-like: q and k share one projection and differ by their convolutions, and the answer
    passes a GELU gate. Lattice (Karami and Mirrokni 2025), sections 3 and 5, appendix A; the last row of its table 4 is the
    default.

    Args:
        hidden_size: width D of the input and the output.
        num_heads: q/k heads H.
        head_dim: slots K of a head, and the measure of V; hidden_size / num_heads when None.
        expand_v: value channels V = expand_v * head_dim.
        num_v_heads: value heads G, a multiple of H (each q/k head serves G/H of them); H when None.
        slots: K where it is not head_dim. The slots begin as rows of the identity; more of them than value channels as unit
            rows of a cosine basis.
        objective: what a step makes smaller, "decode" (the error of the value that the slots give for k), "encode" (that of
            the key they give for v) or "similarity" (minus the agreement of the two).
        decay: "head" (the forget gate d, one number a head) or "none".
        normalize: whether slots are brought back to length 1 after every step. Use the forget gate only with it.
        l1: strength of an l1 penalty on the slots, at least 0.
        rate: first value of the learned rate, positive.
        normalize_qk: whether queries and keys are divided by their length.
        normalize_v: whether values are: what unit slots can reach.
        conv_size: width of the two convolutions.
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
        slots: int | None = None,
        objective: str = "decode",
        decay: str = "head",
        normalize: bool = True,
        l1: float = 0.0,
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
        if slots is not None:
            if check_size("slots", slots) > LARGEST_HEAD:
                raise ValueError(f"slots must be at most {LARGEST_HEAD}, got {slots}; use more heads")
            heads = HeadSizes(heads.key_heads, heads.value_heads, slots, heads.value)
        check_choice("objective", objective, ("decode", "encode", "similarity"))
        check_choice("decay", decay, ("none", "head"))
        check_choice("backend", backend, BACKENDS)
        if check_number("l1", l1) < 0:
            raise ValueError(f"l1 must be at least 0, got {l1}")
        self.hidden_size = hidden_size
        self.heads = heads
        self.objective, self.normalize, self.l1 = objective, check_flag("normalize", normalize), l1
        self.normalize_v = check_flag("normalize_v", normalize_v)
        self.backend = backend
        self.normalize_qk = check_flag("normalize_qk", normalize_qk)
        self.qkv = SharedQKProjection(hidden_size, heads, conv_size, activation, self.normalize_qk, backend)
        self.decay = HeadDecay(hidden_size, heads.value_heads) if decay == "head" else None
        self.step = StepSize(hidden_size, heads.value_heads, rate)
        self.output = OutputProjection(hidden_size, heads, output_gate, gate_low_rank, norm_eps, backend)

    def forward(self, x_BTD: Tensor, cache: LayerCache | None = None, cu_seqlens: Tensor | None = None) -> Tensor:
        check_input(x_BTD, self.hidden_size, cache, cu_seqlens)
        held = LayerCache() if cache is None else cache
        q_BTHK, k_BTHK, v_BTGV, windows = self.qkv(x_BTD, cache, cu_seqlens)
        if self.normalize_v:
            v_BTGV = l2_normalize(v_BTGV)
        count = len(x_BTD) if cu_seqlens is None else len(cu_seqlens) - 1
        o_BTGV, S = lattice(
            q_BTHK, k_BTHK, v_BTGV, self.step(x_BTD), objective=self.objective, normalize=self.normalize, l1=self.l1,
            decay=None if self.decay is None else self.decay(x_BTD).exp(),
            initial_state=held.memory["S"] if held.memory else self._first_slots(count, v_BTGV),
            output_final_state=cache is not None, cu_seqlens=cu_seqlens, backend=self.backend,
        )  # fmt: skip
        if cache is not None:
            cache.update({"S": S}, windows)
        return self.output(o_BTGV, x_BTD)

    def _first_slots(self, count: int, like: Tensor) -> Tensor | None:
        """[count, G, K, V] where there are more slots than value channels, None for the op's own."""
        slots, channels = self.heads.key, self.heads.value
        if slots <= channels:
            return None
        slot, channel = (torch.arange(n, device=like.device, dtype=torch.float64) for n in (slots, channels))
        rows = torch.cos(math.pi / slots * slot[:, None] * (channel + 0.5))
        rows = (rows / rows.norm(dim=1, keepdim=True)).to(compute_dtype(like))
        return rows.expand(count, self.heads.value_heads, -1, -1)

    def state_size(self, length: int = 1) -> int:
        return self.heads.value_heads * self.heads.key * self.heads.value
