"""Linear attention layer: additive memory with decay, gain and query preconditioner as independent options."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..ops import linear_attention, precondition_queries
from ..ops.framework.run import BACKENDS
from ._checks import check_choice, check_flag, check_input, check_positive
from .cache import LayerCache
from .decay import GLADecay, HeadDecay
from .gates import PreconditionerGates, SigmoidGain
from .heads import HeadSizes
from .mixer import Mixer
from .norms import l2_normalize
from .projections import OutputProjection, QKVProjection

__all__ = ["LinearAttention"]

FEATURE_MAPS = {"identity": lambda x: x, "elu": lambda x: F.elu(x) + 1}


class LinearAttention(Mixer):
    r"""A sequence mixer whose memory is the (decayed) sum of key-value outer products.

    $$S_t = \mathrm{Diag}(a_t) S_{t-1} + \beta_t k_t v_t^\top, \qquad o_t = S_t^\top \tilde q_t$$

    Linear attention, gated linear attention and, with the preconditioner, PLA, P-Mamba-2 and PGLA (Preconditioned DeltaNet,
    sections 3.4 and 5, appendix E.3). Queries and keys pass a short convolution, SiLU, the feature map and the L2 norm. The
    answer is normalised a head apart, which cancels every positive factor of a head: hence no division by the sum of keys.

    Args:
        hidden_size: width D of the input and the output.
        num_heads: q/k heads H.
        head_dim: key channels K of a head; hidden_size / num_heads when None.
        expand_v: value channels V = expand_v * K.
        num_v_heads: value heads G, a multiple of H (each q/k head serves G/H of them); H when None.
        decay: "none", "head" (one number a head, as in Mamba-2) or "channel" (one a key channel, as in GLA).
        gain: None (beta 1) or "beta" (beta = sigmoid of a projection, one number a head).
        preconditioner: None, or "query": q / (A + ridge) with A the running energy of the key channels.
        tie_preconditioner: whether A decays and gains as the memory does; otherwise it has projections of its own.
        ridge: what is added to A, positive.
        feature_map: of queries and keys, "identity" or "elu" (ELU + 1).
        normalize_qk: whether queries and keys are divided by their length.
        conv_size: width of the short convolutions on q, k and v; None leaves them out.
        activation: after them, "silu" or "none".
        output_gate: None, "silu" or "sigmoid": a gate on the normalised answer.
        gate_low_rank: whether that gate is projected through V dimensions.
        norm_eps: of the RMSNorm on the answer.
        backend: of the op, see `fastweights.ops.linear_attention`.

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
        gain: str | None = None,
        preconditioner: str | None = None,
        tie_preconditioner: bool = False,
        ridge: float = 0.1,
        feature_map: str = "identity",
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
        check_choice("decay", decay, ("none", "head", "channel"))
        check_choice("gain", gain, (None, "beta"))
        check_choice("preconditioner", preconditioner, (None, "query"))
        check_choice("feature_map", feature_map, tuple(FEATURE_MAPS))
        check_flag("tie_preconditioner", tie_preconditioner)
        if tie_preconditioner and decay == "channel":
            raise ValueError("tie_preconditioner must be False with decay 'channel': A has one decay a head")
        self.hidden_size = hidden_size
        self.heads = heads
        self.feature_map = feature_map
        self.normalize_qk = check_flag("normalize_qk", normalize_qk)
        # Any other feature map stands between the projections' activation and the norm.
        self.qkv_normalizes = normalize_qk and feature_map == "identity"
        self.ridge = check_positive("ridge", ridge)
        check_choice("backend", backend, BACKENDS)
        self.backend = backend
        self.qkv = QKVProjection(hidden_size, heads, conv_size, activation, self.qkv_normalizes, backend)
        self.decay: nn.Module | None = None
        if decay == "head":
            self.decay = HeadDecay(hidden_size, heads.value_heads)
        elif decay == "channel":
            self.decay = GLADecay(hidden_size, heads.value_heads, heads.key)
        self.gain = SigmoidGain(hidden_size, heads.value_heads) if gain else None
        self.preconditioner = (
            PreconditionerGates(hidden_size, heads.value_heads, tie_preconditioner) if preconditioner else None
        )
        self.output = OutputProjection(hidden_size, heads, output_gate, gate_low_rank, norm_eps, backend)

    def forward(self, x_BTD: Tensor, cache: LayerCache | None = None, cu_seqlens: Tensor | None = None) -> Tensor:
        check_input(x_BTD, self.hidden_size, cache, cu_seqlens)
        held = LayerCache() if cache is None else cache
        q_BTHK, k_BTHK, v_BTGV, windows = self.qkv(x_BTD, cache, cu_seqlens)
        q_BTHK, k_BTHK = (FEATURE_MAPS[self.feature_map](y) for y in (q_BTHK, k_BTHK))
        if self.normalize_qk and not self.qkv_normalizes:
            q_BTHK, k_BTHK = l2_normalize(q_BTHK), l2_normalize(k_BTHK)
        g = self.decay(x_BTD) if self.decay is not None else None
        call: dict[str, Any] = {"cu_seqlens": cu_seqlens, "backend": self.backend}
        call["output_final_state"] = cache is not None
        memory: dict[str, Tensor | None] = {}
        beta_BTG = self.gain(x_BTD) if self.gain is not None else None
        if beta_BTG is not None:
            v_BTGV = v_BTGV * beta_BTG[..., None].to(v_BTGV.dtype)
        if self.preconditioner is not None:
            weight = torch.ones_like(v_BTGV[..., 0]) if beta_BTG is None else beta_BTG
            precond_g, precond_beta = self.preconditioner(x_BTD, g, weight)
            q_BTHK, memory["A"] = precondition_queries(
                q_BTHK, k_BTHK, precond_g, precond_beta, ridge=self.ridge, initial_state=held.memory.get("A"), **call
            )
            k_BTHK = k_BTHK.repeat_interleave(q_BTHK.shape[2] // k_BTHK.shape[2], 2)
        o_BTGV, memory["S"] = linear_attention(q_BTHK, k_BTHK, v_BTGV, g, initial_state=held.memory.get("S"), **call)
        if cache is not None:
            cache.update(memory, windows)
        return self.output(o_BTGV, x_BTD)

    def state_size(self, length: int = 1) -> int:
        channels = self.heads.value + (self.preconditioner is not None)
        return self.heads.value_heads * self.heads.key * channels
