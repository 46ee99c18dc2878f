"""Gated KalmaNet: ridge regression on all past tokens, weighted by their decay, solved again for every query."""

from __future__ import annotations

from torch import Tensor

from ..framework import roles
from ..framework.call import call, chunkwise, kernels, op, recurrent, sequential
from ..framework.passing import Passing, Sum
from ..framework.spec import Case, Choice, Flag, Number, OpSpec, Output
from ..shared.ridge import ITERATIONS, KERNEL_SOLVERS, RIDGE_DECODE, RIDGE_KERNELS, STATES, WIDEST, iteration_macs
from ..shared.ridge.forms import chunked, reference
from ..shared.ridge.iterations import SOLVERS

__all__ = ["gated_kalmanet"]

SPEC = OpSpec(
    name="gated_kalmanet",
    inputs={
        "q": roles.QUERY, "k": roles.KEY, "v": roles.VALUE, "g": roles.LOG_DECAY,
        "mix": roles.optional(roles.TOKEN_GAIN),
    },
    states=STATES,
    outputs={"o": Output("GV")},
    options={
        "ridge": Number(above=0), "iterations": ITERATIONS,
        "solver": Choice(SOLVERS), "adaptive_ridge": Flag(), "scale": roles.SCALE,
    },
    backends={
        "reference": sequential(reference),
        "torch": chunkwise(chunked),
        "triton": kernels(
            RIDGE_KERNELS, only={"solver": KERNEL_SOLVERS}, widest=WIDEST, widest_in_float32=64
        ),
    },
    recurrent=recurrent(RIDGE_DECODE, only={"solver": KERNEL_SOLVERS}, widest=WIDEST),
    cases={
        # The gradient is by implicit differentiation, exact once the iteration has converged. The Chebyshev iteration and
        # gradient descent have not after so few; conjugate gradients must have, as before that they amplify rounding.
        "chebyshev": Case(
            given={"mix": "G"}, options={"solver": "chebyshev", "iterations": 8}, measured={"iterations": 30},
            exact_gradient=False,
        ),
        "conjugate_gradient": Case(
            options={"solver": "conjugate_gradient", "iterations": 24}, measured={"iterations": 30}
        ),
        "exact": Case(given={"mix": "G"}, options={"solver": "exact", "iterations": 1}, measured={"iterations": 30}),
        "gradient_descent": Case(
            options={"solver": "gradient_descent", "iterations": 8}, measured={"iterations": 30}, exact_gradient=False
        ),
        "accelerated_gradient_descent": Case(
            given={"mix": "G"}, options={"solver": "accelerated_gradient_descent", "iterations": 8},
            measured={"iterations": 30}, exact_gradient=False,
        ),
        "constant_ridge": Case(
            given={"mix": "G"}, options={"adaptive_ridge": False, "ridge": 0.25, "iterations": 8},
            measured={"iterations": 30}, exact_gradient=False,
        ),
    },
    equation="H = a H + k k^T; U = a U + k v^T; o = U^T (m (H + ridge |H| I)^-1 q + (1 - m) q)",
    macs=iteration_macs,
    passing=Passing(
        states={"H": Sum(x="k", y="k", decay="g"), "U": Sum(x="k", y="v", decay="g")}
    ),
)  # fmt: skip


@op(SPEC)
def gated_kalmanet(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    *,
    mix: Tensor | None = None,
    ridge: float = 0.02,
    iterations: int = 30,
    solver: str = "chebyshev",
    adaptive_ridge: bool = True,
    scale: float | None = None,
    initial_state: tuple[Tensor, Tensor] | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    backend: str = "auto",
) -> tuple[Tensor, tuple[Tensor, Tensor] | None]:
    r"""Answer each query with the ridge regression of all values on all keys so far, in which old tokens count less.

    $$H_t = a_t H_{t-1} + k_t k_t^\top, \qquad U_t = a_t U_{t-1} + k_t v_t^\top, \qquad
      \lambda_t = \mathrm{ridge}\, |H_t|_F, \qquad a_t = e^{g_t}$$

    $$x_t \approx (H_t + \lambda_t I)^{-1} (\mathrm{scale}\; q_t), \qquad
      o_t = U_t^\top \left(m_t\, x_t + (1 - m_t)\, \mathrm{scale}\; q_t\right)$$

    Gated KalmaNet (Peng et al.), section 4. The ridge relative to |H_t|_F bounds the condition number by (1 + ridge)/ridge
    whatever the keys; it is at least 1e-6, so that zero keys give zeros. The Chebyshev iteration starts with
    omega_0 = 2 as in the paper's Appendix B (Algorithm 1 prints 0). For unit keys and ridge 0.02 its relative distance from
    the exact solution is about 9e-2, 5e-3 and 3e-4 after 10, 20 and 30 iterations.

    Gradients of the iterative solvers are by implicit differentiation (section 4.2.2): the same iteration, applied to the
    gradient in x, gives the gradient in q, from which those in k, g and H follow. For the Chebyshev iteration and both gradient
    descents the gradient in q is that of the computed output (Lemma 2). The other gradients are those of the exact solution up
    to the error of the iteration.

    Args:
        q, k: [B, T, H, K], K up to 256, float16, bfloat16, float32 or float64. The paper multiplies keys and values by
            their gain beforehand. Keys usually have unit length.
        v: [B, T, HV, V] of the same dtype, V up to 256, HV a multiple of H: each q/k head serves HV/H consecutive value heads.
        g: log decay (natural logarithm, at most 0; -inf forgets everything), [B, T, HV] (or H heads, repeated likewise).
            Any float dtype.
        mix: m in [0, 1] (not checked), the paper's alpha-connection: 1 (also when None) gives the answer of the regression, 0
            that of linear attention. [B, T, HV] or H heads, any float dtype.
        ridge: positive factor on |H_t|_F, or lambda_t itself with adaptive_ridge False.
        iterations: steps of the iterative solvers, 1 to 10,000. In the kernels conjugate gradients end early: see `mesa`.
        solver: "chebyshev"; "conjugate_gradient", which on random unit keys is as accurate after 16 iterations as "chebyshev"
            after 30, in outputs and gradients; "exact", a Cholesky factorisation per token, with NaN where an initial state or
            rounding makes H_t + lambda_t I indefinite; for comparison "gradient_descent" and "accelerated_gradient_descent"
            (Nesterov's), with the best step sizes for eigenvalues in [lambda_t, lambda_t + |H_t|_F]. Chebyshev assumes the same
            interval.
        adaptive_ridge: whether lambda_t follows |H_t|_F. A constant ridge (the paper's ablation, appendix F.1) leaves the
            condition number 1 + |H_t|_F / ridge unbounded.
        scale: factor on q, K^-0.5 by default.
        initial_state: (H [N, HV, K, K], U [N, HV, K, V]) before the first token; zeros when None. H must be
            symmetric positive semidefinite (not checked). N is B, or the number of packed sequences.
        output_final_state: whether to return (H, U) after the last token.
        cu_seqlens: int32 or int64 [N+1], cumulative lengths of sequences packed into one row (B = 1).
        backend: "reference" (loop over tokens), "torch" (chunkwise), "triton" (kernels for the solvers "chebyshev" and
            "conjugate_gradient"; not in float64, K and V up to 128, in float32 up to 64) or "auto": kernels on CUDA where they
            serve, else the chunkwise form.

    Returns:
        o [B, T, HV, V] in v's dtype, and (H, U) in float32 (float64 for float64 inputs) or None.

    Raises:
        ValueError: a shape, dtype, device, positive g, ridge, iterations, solver, cu_seqlens or backend that does not fit;
            the message says which.
        TypeError: an argument of the wrong kind.
    """
    options = {
        "ridge": ridge,
        "iterations": iterations,
        "solver": solver,
        "adaptive_ridge": adaptive_ridge,
        "scale": scale,
    }
    return call(SPEC, (q, k, v, g, mix), options, initial_state, output_final_state, cu_seqlens, backend)
