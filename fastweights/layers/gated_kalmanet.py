"""Gated KalmaNet layer: every query is answered by a ridge regression on the whole fading past."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..ops import gated_kalmanet, linear_attention, mesa
from ..ops.framework.run import BACKENDS
from ._checks import check_choice, check_flag, check_input, check_positive, check_size
from .cache import LayerCache
from .decay import HeadDecay
from .gates import SigmoidGain
from .heads import HeadSizes
from .initialization import OwnInitialValues
from .mixer import Mixer
from .norms import at_least_float32
from .projections import OutputProjection, QKVProjection

__all__ = ["GatedKalmaNet"]


class Sketch(OwnInitialValues):
    """A learned basis a q/k head of the subspace that the regression is solved in, orthonormal at first: [H, K, sketch]."""

    def __init__(self, num_heads: int, channels: int, sketch: int) -> None:
        super().__init__()
        self.basis = nn.Parameter(torch.empty(num_heads, channels, sketch))
        self.reset_parameters()

    def initial_values(self) -> dict[str, Tensor]:
        return {"basis": torch.linalg.qr(torch.empty_like(self.basis, dtype=torch.float32).normal_())[0]}

    def forward(self, x_BTHK: Tensor) -> Tensor:
        """Coordinates [B, T, H, sketch]; heads may be those of q and k or a multiple of them."""
        return (x_BTHK[..., None, :] @ self._basis(x_BTHK.shape[2]).to(x_BTHK.dtype)).squeeze(-2)

    def rows(self, U_NGKV: Tensor) -> Tensor:
        """What the coordinates of the keys would have added up to: [N, G, sketch, V]."""
        return self._basis(U_NGKV.shape[1]).mT.to(U_NGKV.dtype) @ U_NGKV

    def _basis(self, heads: int) -> Tensor:
        return self.basis.repeat_interleave(heads // len(self.basis), 0)


class GatedKalmaNet(Mixer):
    r"""A sequence mixer that answers with the ridge regression of all values on all keys so far, old ones weighted down.

    $$H_t = a_t H_{t-1} + k_t k_t^\top, \qquad U_t = a_t U_{t-1} + k_t v_t^\top, \qquad
      o_t = U_t^\top \left(m_t\, (H_t + \lambda_t I)^{-1} q_t + (1 - m_t)\, q_t\right)$$

    where unit keys and the values come multiplied by $\beta_t$; $\beta_t$ and $m_t$ are sigmoids of projections, one number a
    head, and $\lambda_t$ = ridge |H_t|_F. Gated KalmaNet (Peng et al.), section 4 and figure 2; its ablations (appendices F to
    H) are options.

    Args:
        hidden_size: width D of the input and the output.
        num_heads: q/k heads H.
        head_dim: key channels K of a head; hidden_size / num_heads when None.
        expand_v: value channels V = expand_v * K.
        num_v_heads: value heads G, a multiple of H (each q/k head serves G/H of them); H when None.
        decay: "head" (one number a head) or "none" (no gating, appendix F.2).
        gain: "beta" (as above) or None (beta = 1).
        alpha_connection: whether m is learned; otherwise it is 1 (appendix F.3).
        ridge: positive; a factor on |H_t|_F or, with adaptive_ridge False, lambda itself (the paper's ablation takes 0.25).
        adaptive_ridge: whether lambda follows |H_t|_F, which bounds the condition number (appendix F.1).
        iterations: of the iterative solvers; float32 is converged at about 30.
        solver: "chebyshev" (the paper's), "conjugate_gradient" (as accurate after 16 iterations as the first after 30) or
            "exact". With adaptive_ridge False only "conjugate_gradient".
        sketch: None, or the number of dimensions, at most K, that the regression is solved in (appendix H): H, U and q are
            projected into a subspace and the solution back. The paper leaves open how it is chosen; here its basis is
            learned.
        normalize_qk: whether queries and keys are divided by their length.
        conv_size: width of the short convolutions on q, k and v; None leaves them out.
        activation: after them, "silu" or "none".
        output_gate: None, "silu", "sigmoid" or "gelu": a gate on the normalised answer.
        gate_low_rank: whether that gate is projected through V dimensions.
        norm_eps: of the RMSNorm on the answer.
        backend: of the op, see `fastweights.ops.gated_kalmanet`.

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
        alpha_connection: bool = True,
        ridge: float = 0.02,
        adaptive_ridge: bool = True,
        iterations: int = 30,
        solver: str = "chebyshev",
        sketch: int | None = None,
        normalize_qk: bool = True,
        conv_size: int | None = 4,
        activation: str = "silu",
        output_gate: str | None = "silu",
        gate_low_rank: bool = False,
        norm_eps: float = 1e-6,
        backend: str = "auto",
    ) -> None:
        super().__init__()
        heads = HeadSizes.choose(hidden_size, num_heads, head_dim, expand_v, num_v_heads)
        check_choice("decay", decay, ("none", "head"))
        check_choice("gain", gain, (None, "beta"))
        check_choice("solver", solver, ("chebyshev", "conjugate_gradient", "exact"))
        if not check_flag("adaptive_ridge", adaptive_ridge) and solver != "conjugate_gradient":
            raise ValueError(
                f"solver must be 'conjugate_gradient' with adaptive_ridge False, got {solver!r}: the others rest on a ridge "
                "that follows |H|"
            )
        if sketch is not None and check_size("sketch", sketch) > heads.key:
            raise ValueError(
                f"sketch must be at most head_dim, {heads.key}, got {sketch}; None solves in all dimensions"
            )
        check_choice("backend", backend, BACKENDS)
        self.hidden_size = hidden_size
        self.heads = heads
        self.ridge = check_positive("ridge", ridge)
        self.adaptive_ridge = adaptive_ridge
        self.iterations = check_size("iterations", iterations)
        self.solver = solver
        self.backend = backend
        self.normalize_qk = check_flag("normalize_qk", normalize_qk)
        self.qkv = QKVProjection(hidden_size, heads, conv_size, activation, self.normalize_qk, backend)
        self.decay = HeadDecay(hidden_size, heads.value_heads) if decay == "head" else None
        self.gain = SigmoidGain(hidden_size, heads.value_heads) if gain else None
        self.mix = (
            SigmoidGain(hidden_size, heads.value_heads) if check_flag("alpha_connection", alpha_connection) else None
        )
        self.sketch = Sketch(heads.key_heads, heads.key, sketch) if sketch else None
        self.output = OutputProjection(hidden_size, heads, output_gate, gate_low_rank, norm_eps, backend)

    def forward(self, x_BTD: Tensor, cache: LayerCache | None = None, cu_seqlens: Tensor | None = None) -> Tensor:
        check_input(x_BTD, self.hidden_size, cache, cu_seqlens)
        held = LayerCache() if cache is None else cache
        q, k, v, windows = self.qkv(x_BTD, cache, cu_seqlens)
        if self.gain is not None:  # one a value head, so that keys of shared q/k heads part
            q, k = (y.repeat_interleave(v.shape[2] // y.shape[2], 2) for y in (q, k))
            beta_BTG1 = self.gain(x_BTD)[..., None]
            k, v = ((at_least_float32(y) * beta_BTG1).to(y.dtype) for y in (k, v))
        g_BTG = torch.zeros_like(v[..., 0]) if self.decay is None else self.decay(x_BTD)
        mix_BTG = None if self.mix is None else self.mix(x_BTD)
        call: dict[str, Any] = {"cu_seqlens": cu_seqlens, "backend": self.backend, "scale": self.heads.key**-0.5}
        call["output_final_state"] = cache is not None
        H, U = held.memory.get("H"), held.memory.get("U")
        in_q, in_k = (q, k) if self.sketch is None else (self.sketch(q), self.sketch(k))
        if mix_BTG is None or (self.adaptive_ridge and self.sketch is None):
            o_BTGV, H, U = self._solve(in_q, in_k, v, g_BTG, H, U, call, mix_BTG)
        else:  # U of all dimensions answers for the query itself and, projected, for the solution
            direct, new_U = linear_attention(q, k, v, g_BTG, initial_state=U, **call)
            if self.sketch is not None and U is not None:
                U = self.sketch.rows(U)
            solved, H, _ = self._solve(in_q, in_k, v, g_BTG, H, U, call)
            o_BTGV, U = torch.lerp(direct, solved, mix_BTG[..., None].to(direct.dtype)), new_U
        if cache is not None:
            cache.update({"H": H, "U": U}, windows)
        return self.output(o_BTGV, x_BTD)

    def _solve(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        g: Tensor,
        H: Tensor | None,
        U: Tensor | None,
        call: dict[str, Any],
        mix: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Answers of the regression from the state (H, U), and the state after them. A mix needs the adaptive ridge."""
        call = {**call, "iterations": self.iterations, "initial_state": None if H is None or U is None else (H, U)}
        if self.adaptive_ridge:
            o, state = gated_kalmanet(q, k, v, g, mix=mix, ridge=self.ridge, solver=self.solver, **call)
        else:
            o, state = mesa(q, k, v, g, torch.ones_like(g), self.ridge, **call)
        return o, *(state or (None, None))

    def state_size(self, length: int = 1) -> int:
        solved = self.heads.key if self.sketch is None else self.sketch.basis.shape[2]
        kept = self.heads.key if self.mix is not None else solved
        return self.heads.value_heads * (solved * solved + kept * self.heads.value)
