"""A call of flash-linear-attention's chunk_gated_delta_rule or chunk_kda: whether our ops take it, and what they compute.

Nothing is imported from there.
"""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ...ops.step_decay import exp_rate
from ..foreign_calls import call_delta_rule, explain_refusal

__all__ = ["Call"]


@dataclass(eq=False)
class Call:
    """The arguments of both functions, by their names there; those before KW_ONLY have the same places in both.

    Shapes: q, k [B, T, H, K], v [B, T, HV, V], beta [B, T, HV], g [B, T, HV] of chunk_gated_delta_rule and [B, T, HV, K] of
    chunk_kda, states [N, HV, K, V] or, with state_v_first, [N, HV, V, K].
    """

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor
    scale: float | None = None
    initial_state: Tensor | None = None
    output_final_state: bool = False
    use_qk_l2norm_in_kernel: bool = False
    _: KW_ONLY
    use_gate_in_kernel: bool = False
    A_log: Tensor | None = None
    dt_bias: Tensor | None = None
    safe_gate: bool = False
    lower_bound: float | None = None
    use_beta_sigmoid_in_kernel: bool = False
    allow_neg_eigval: bool = False
    state_v_first: bool = False
    cu_seqlens: Tensor | None = None
    # Refused.
    cp_context: Any = None
    return_intermediate_states: bool = False
    use_graph: bool = False
    # These change how the kernels there compute, not what.
    cu_seqlens_cpu: Tensor | None = None
    chunk_indices: Tensor | None = None
    disable_recompute: bool = False
    max_num_seqs: int | None = None

    def refusal(self) -> str | None:
        """Why flash-linear-attention must take the call itself, None where ours do. It then also raises its own errors."""
        for name in ("cp_context", "return_intermediate_states", "use_graph"):
            if getattr(self, name):
                return f"{name} is not supported"
        if self.allow_neg_eigval and not self.use_beta_sigmoid_in_kernel:
            return "allow_neg_eigval needs use_beta_sigmoid_in_kernel"
        parameters = (self.A_log, self.dt_bias) if self.use_gate_in_kernel else ()
        return self._gate_refusal() or explain_refusal(
            self.q, self.k, self.v, self.g, self.beta, self.initial_state, *parameters, cu_seqlens=self.cu_seqlens
        )

    def _gate_refusal(self) -> str | None:
        if not self.use_gate_in_kernel:
            return None
        if self.lower_bound is None:
            if self.A_log is None:
                return "use_gate_in_kernel needs A_log"
            return "safe_gate needs lower_bound" if self.safe_gate else None
        if self.g.ndim == 3:
            return "lower_bound is for one decay per channel"
        if self.safe_gate and not -5 <= self.lower_bound < 0:
            return "lower_bound of a safe_gate must be in [-5, 0)"
        return None

    def run(self) -> tuple[Tensor, Tensor | None]:
        """o [B, T, HV, V] in the dtype of v, and the states after the last tokens in float32, or None. Both are contiguous, as
        callers may view them in other shapes."""
        beta, state = self.beta, self.initial_state
        if self.use_beta_sigmoid_in_kernel:
            beta = beta.float().sigmoid() * (2 if self.allow_neg_eigval else 1)
        o, final = call_delta_rule(
            self.q, self.k, self.v, beta, self._log_decay() if self.use_gate_in_kernel else self.g,
            normalize=self.use_qk_l2norm_in_kernel, scale=self.scale, cu_seqlens=self.cu_seqlens,
            initial_state=state.mT if state is not None and self.state_v_first else state,
            output_final_state=bool(self.output_final_state),  # layers there pass their use_cache, which may be None
        )  # fmt: skip
        if final is not None:
            final = (final.mT if self.state_v_first else final).contiguous()
        return o.contiguous(), final

    def _log_decay(self) -> Tensor:
        """g of the raw gate x, in float32: -exp(A) softplus(x + bias), or b sigmoid(exp(A) (x + bias)) with a lower bound b."""
        x = self.g.float()
        if self.dt_bias is not None:
            x = x + self.dt_bias.float().reshape(x.shape[2:])
        rate: Tensor | float = 1.0
        if self.A_log is not None:
            rate = exp_rate(self.A_log.float()).reshape(-1, *[1] * (x.ndim - 3))
        return -rate * F.softplus(x) if self.lower_bound is None else self.lower_bound * torch.sigmoid(rate * x)
