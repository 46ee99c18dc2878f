"""Layers that hold a regression of all values on all keys so far: MesaNet, Gated KalmaNet and recursive least squares."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..checks import LARGEST_HEAD, check_flag, check_positive
from ..ops import gated_kalmanet, linear_attention, mesa, recursive_least_squares
from ..ops.authoring import expand_heads, gate_both, softplus_above
from .decay import HeadDecay
from .gates import SigmoidGain
from .initialization import OwnInitialValues, inverse_softplus
from .memory_layer import Answer, MemoryLayer, RuleCall
from .options import DecayOptions, MemoryOptions, one_of, option, up_to
from .probe import read_states
from .projections import GATES, choose_layer_backend
from .registry import EXACT, PDN, SOLVE, register_mixer
from .shared_input import compute_gates

__all__ = ["GatedKalmaNet", "MesaNet", "RecursiveLeastSquares"]


@dataclass(frozen=True, kw_only=True)
class MesaOptions(DecayOptions, MemoryOptions):
    """Options of `MesaNet`, whose docstring explains them."""

    decay: str = option("head", one_of("none", "head"))
    gain: str | None = option("beta", one_of(None, "beta"))
    ridge: float = option(1.0, check_positive)
    smallest_ridge: float = option(0.25, check_positive)
    iterations: int = option(30, up_to(mesa.spec.options["iterations"].most))

    def check_together(self) -> None:
        super().check_together()
        if self.ridge <= self.smallest_ridge:
            raise ValueError(f"ridge must be above smallest_ridge, {self.smallest_ridge}, got {self.ridge}")


class LearnedRidge(OwnInitialValues):
    """smallest + softplus(weight), [num_heads, channels] in float32 or better."""

    _no_weight_decay = ("weight",)

    def __init__(self, num_heads: int, channels: int, first: float, smallest: float) -> None:
        super().__init__()
        self.first, self.smallest = first, smallest
        self.weight = nn.Parameter(torch.empty(num_heads, channels))
        self.reset_parameters()

    def initial_values(self) -> dict[str, Tensor]:
        above = torch.full_like(self.weight, self.first - self.smallest, dtype=torch.float32)
        return {"weight": inverse_softplus(above)}

    def forward(self) -> Tensor:
        return softplus_above(self.weight, self.smallest)


@register_mixer(
    "mesa",
    summary="MesaNet: ridge regression on the decayed past with a learned ridge per key channel",
    equation="H = a H + beta k k^T, U = a U + beta k v^T, o = U^T (H + Diag(ridge))^-1 q",
    source="von Oswald et al. 2025 (MesaNet); Gated KalmaNet, section 3.2",
    cost=f"H ({SOLVE}), r iterations",
)
class MesaNet(MemoryLayer):
    r"""A sequence mixer that answers with the ridge regression of all values on all keys so far, weighted by their decay.

    $$H_t = a_t H_{t-1} + \beta_t k_t k_t^\top, \qquad U_t = a_t U_{t-1} + \beta_t k_t v_t^\top, \qquad
      o_t = U_t^\top (H_t + \Lambda)^{-1} q_t$$

    with unit q and k, one decay a and one gain beta in (0, 1) per head, and a learned diagonal Lambda; solved by conjugate
    gradients. MesaNet (von Oswald et al. 2025), the baseline of Gated KalmaNet (whose ridge follows |H_t|). Projections,
    convolutions and the decay's form are those of the other layers here; the paper's has the sigmoid of a projection for the
    decay and no convolution on v.

    Args:
        decay: "head" (one decay per head) or "none".
        gain: "beta" (sigmoid of a projection, one number per head) or None (beta 1).
        ridge: first value of Lambda, above smallest_ridge.
        smallest_ridge: positive lower bound of Lambda, which keeps the regression solvable.
        iterations: steps of conjugate gradients.

    The other options are those of `DecayOptions` (long_memory) and `MemoryOptions`.
    """

    Options = MesaOptions
    op = mesa
    decodes_in_pool = True
    options: MesaOptions
    probes = {**MemoryLayer.probes, "g": "decay", "beta": "gain", "ridge": ""}

    def build(self) -> None:
        options, heads, hidden_size = self.options, self.heads, self.hidden_size
        self.decay = HeadDecay(hidden_size, heads.value_heads, options.long_memory) if options.decay == "head" else None
        self.gain = SigmoidGain(hidden_size, heads.value_heads) if options.gain else None
        self.ridge = LearnedRidge(heads.value_heads, heads.key, options.ridge, options.smallest_ridge)

    def gates(self) -> Sequence[nn.Module | None]:
        return (self.decay, self.gain)

    def rule(self, x_BTD: Tensor, q_BTHK: Tensor, k_BTHK: Tensor, v_BTGV: Tensor, run: RuleCall) -> Answer:
        g_BTG, beta_BTG = compute_gates(x_BTD, *self.gates(), products=run.products)
        ridge_GK = self.ridge()
        self.probe(g=g_BTG, beta=beta_BTG, ridge=ridge_GK)
        g_BTG = torch.zeros_like(v_BTGV[..., 0]) if g_BTG is None else g_BTG
        beta_BTG = torch.ones_like(v_BTGV[..., 0]) if beta_BTG is None else beta_BTG
        return run(
            self.op, q_BTHK, k_BTHK, v_BTGV, g_BTG, beta_BTG, ridge_GK, iterations=self.options.iterations
        )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class GatedKalmaNetOptions(DecayOptions, MemoryOptions):
    """Options of `GatedKalmaNet`, whose docstring explains them."""

    decay: str = option("head", one_of("none", "head"))
    gain: str | None = option("beta", one_of(None, "beta"))
    alpha_connection: bool = option(True, check_flag)
    ridge: float = option(0.02, check_positive)
    adaptive_ridge: bool = option(True, check_flag)
    iterations: int = option(30, up_to(gated_kalmanet.spec.options["iterations"].most))
    solver: str = option("chebyshev", one_of(*gated_kalmanet.spec.options["solver"].values))
    sketch: int | None = option(None, up_to(LARGEST_HEAD))
    sketch_basis: str = option("learned", one_of("learned", "random"))
    gate_bias: bool = option(False, check_flag)
    output_gate: str | None = option("silu", one_of(None, *GATES), or_none=True)

    def check_together(self) -> None:
        super().check_together()
        width = self.head_sizes().key
        if self.sketch is not None and self.sketch > width:
            raise ValueError(
                f"sketch must be at most head_dim, {width}, got {self.sketch}; None solves in all dimensions"
            )


class Sketch(OwnInitialValues):
    """A basis per q/k head of the subspace that the regression is solved in: [H, K, sketch], orthonormal at first. A basis that
    is not learned keeps its first values, a random projection, and is saved with the weights."""

    def __init__(self, num_heads: int, channels: int, sketch: int, learned: bool = True) -> None:
        super().__init__()
        self.learned = learned
        self.basis = nn.Parameter(torch.empty(num_heads, channels, sketch), requires_grad=learned)
        self.reset_parameters()

    def initial_values(self) -> dict[str, Tensor]:
        return {"basis": torch.linalg.qr(torch.empty_like(self.basis, dtype=torch.float32).normal_())[0]}

    def forward(self, x: Tensor, memory: bool = False) -> Tensor:
        """Coordinates [B, T, H, sketch] of x [B, T, H, K]. x may have the q/k heads or a multiple of them. With `memory` x is U
        of the keys [N, G, K, V], and the result U of their coordinates [N, G, sketch, V]."""
        if memory:
            return self._basis(x.shape[1]).mT.to(x.dtype) @ x
        return torch.einsum("bthk,hks->bths", x, self._basis(x.shape[2]).to(x.dtype))

    def _basis(self, heads: int) -> Tensor:
        basis = self.basis if self.learned else self.basis.detach()
        return basis.repeat_interleave(heads // len(basis), 0)


@register_mixer(
    "gka",
    summary="Gated KalmaNet: ridge regression on the whole decayed past, solved again for every query",
    equation="H = a H + k k^T, U = a U + k v^T, o = U^T (m (H + ridge |H| I)^-1 q + (1 - m) q)",
    source="Gated KalmaNet, section 4",
    cost=f"H ({SOLVE}), r iterations",
)
class GatedKalmaNet(MemoryLayer):
    r"""A sequence mixer that answers with the ridge regression of all values on all keys so far, weighted by their decay.

    $$H_t = a_t H_{t-1} + k_t k_t^\top, \qquad U_t = a_t U_{t-1} + k_t v_t^\top, \qquad
      o_t = U_t^\top \left(m_t\, (H_t + \lambda_t I)^{-1} q_t + (1 - m_t)\, q_t\right)$$

    where k and v are the unit keys and the values, multiplied by $\beta_t$. $\beta_t$ and $m_t$ are sigmoids of projections,
    one number per head, and $\lambda_t$ = ridge |H_t|_F. Gated KalmaNet (Peng et al.), section 4 and figure 2; its ablations
    (appendices F to H) are options.

    Args:
        decay: "head" (one decay per head) or "none" (no gating, appendix F.2).
        gain: "beta" (as above) or None (beta = 1).
        alpha_connection: whether m is learned; otherwise it is 1 (appendix F.3).
        ridge: positive; a factor on |H_t|_F or, with adaptive_ridge False, lambda itself (0.25 in the paper's ablation).
        adaptive_ridge: whether lambda follows |H_t|_F, which bounds the condition number (appendix F.1).
        iterations: steps of the iterative solvers; float32 is converged at about 30.
        solver: "chebyshev" (the paper's), "conjugate_gradient" (as accurate after 16 iterations as "chebyshev" after 30),
            "exact", or for comparison "gradient_descent" and "accelerated_gradient_descent" (the paper's figure 1a).
        sketch: None, or the number of dimensions, at most K, that the regression is solved in (appendix H): H, U and q are
            projected into a subspace and the solution back.
        sketch_basis: how this subspace is chosen, which the paper leaves open: "learned", or "random", a projection that is
            drawn once per head and not trained.
        gate_bias: whether the projections of beta and m have biases, zero at first, as in the authors' released layer.
        output_gate: None, "sigmoid", "gelu" or, the default, "silu".

    The other options are those of `DecayOptions` (long_memory) and `MemoryOptions`.
    """

    Options = GatedKalmaNetOptions
    op = gated_kalmanet
    options: GatedKalmaNetOptions
    probes = {**MemoryLayer.probes, "g": "decay", "beta": "gain", "mix": "mix"}

    def build(self) -> None:
        options, heads, hidden_size = self.options, self.heads, self.hidden_size
        self.decay = HeadDecay(hidden_size, heads.value_heads, options.long_memory) if options.decay == "head" else None
        bias = options.gate_bias
        self.gain = SigmoidGain(hidden_size, heads.value_heads, bias=bias) if options.gain else None
        self.mix = SigmoidGain(hidden_size, heads.value_heads, bias=bias) if options.alpha_connection else None
        self.sketch = None
        if options.sketch:
            self.sketch = Sketch(heads.key_heads, heads.key, options.sketch, options.sketch_basis == "learned")
        self.decodes_in_pool = self.sketch is None  # a sketch reads U in two forms

    def gates(self) -> Sequence[nn.Module | None]:
        return (self.gain, self.decay, self.mix)

    def rule(self, x_BTD: Tensor, q: Tensor, k: Tensor, v: Tensor, run: RuleCall) -> Answer:
        beta_BTG, g_BTG, mix_BTG = compute_gates(x_BTD, *self.gates(), products=run.products)
        if beta_BTG is not None:  # one gain per value head: q/k heads that serve several are repeated
            q, k = (expand_heads(y, v.shape[2]) for y in (q, k))
            backend = choose_layer_backend(self.options.backend)
            k, v = gate_both(k, v, beta_BTG, backend=backend)  # in float32, as the gains are
            self.probe(beta=beta_BTG)
        self.probe(q=q, k=k, v=v, g=g_BTG, mix=mix_BTG)
        if g_BTG is None:
            g_BTG = torch.zeros_like(v[..., 0])
        if self.sketch is None:
            return self._solve(q, k, v, g_BTG, run, mix_BTG)
        in_q, in_k = self.sketch(q), self.sketch(k)
        if mix_BTG is None:
            return self._solve(in_q, in_k, v, g_BTG, run)
        # U of all dimensions answers for the query itself and, projected, for the solution.
        direct, memory = run(linear_attention, q, k, v, g_BTG, scale=self.heads.key**-0.5, state=("U",))
        if "U" in run.memory:
            run.memory = {**run.memory, "U": self.sketch(run.memory["U"], memory=True)}
        solved, solved_memory = self._solve(in_q, in_k, v, g_BTG, run)
        return torch.lerp(direct, solved, mix_BTG[..., None].to(direct.dtype)), {**solved_memory, **memory}

    def _solve(self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, run: RuleCall, mix: Tensor | None = None) -> Answer:
        """Answers of the regression from the state (H, U), and the state after them."""
        options = self.options
        return run(
            self.op, q, k, v, g, mix=mix, ridge=options.ridge, adaptive_ridge=options.adaptive_ridge,
            iterations=options.iterations, solver=options.solver, scale=self.heads.key**-0.5,
        )  # fmt: skip

    def state_size(self, length: int = 1) -> int:
        heads, sketch = self.heads, self.options.sketch
        if sketch is None:
            return super().state_size(length)
        in_sketch = self.op.state_size(heads.value_heads, sketch, heads.value)
        whole = heads.value_heads * (heads.key - sketch) * heads.value  # U answers for the query in all dimensions
        return in_sketch if self.mix is None else in_sketch + whole


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
            (long_memory "paper" where it is None or "own"). Where training shortens them below about 1 - 1/K,
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
        options, heads, width = self.options, self.heads.value_heads, self.hidden_size
        ramp = "paper" if options.long_memory in (None, "own") else options.long_memory
        self.decay = HeadDecay(width, heads, ramp) if options.decay == "head" else None
        self.gain = SigmoidGain(width, heads) if options.gain else None

    def gates(self) -> Sequence[nn.Module | None]:
        return (self.gain, self.decay)

    def rule(self, x_BTD: Tensor, q_BTHK: Tensor, k_BTHK: Tensor, v_BTGV: Tensor, run: RuleCall) -> Answer:
        dtype = v_BTGV.dtype
        beta_BTG, g_BTG = compute_gates(x_BTD, *self.gates(), products=run.products)
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
        P_BTGKK = read_states(self, x_BTD, run.cache_before(), run.keywords["cu_seqlens"], 1)[1]["P"]
        k_BTGK = k_BTHK.repeat_interleave(self.heads.value_heads // self.heads.key_heads, 2).to(P_BTGKK.dtype)
        return (P_BTGKK @ k_BTGK[..., None]).squeeze(-1)
