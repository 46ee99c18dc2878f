"""Ridge regression on a fading past at every token: the computation that `gated_kalmanet` and `mesa` share.

$$H_t = e^{g_t} H_{t-1} + \\beta_t k_t k_t^\\top, \\qquad U_t = e^{g_t} U_{t-1} + \\beta_t k_t v_t^\\top$$
$$(H_t + \\Lambda_t)\\, x_t = \\mathrm{scale}\\; q_t, \\qquad
  o_t = U_t^\\top \\left(m_t\\, x_t + (1 - m_t)\\, \\mathrm{scale}\\; q_t\\right)$$

beta and the mix m are 1 when None. Lambda is the diagonal given as [heads, K], or for a number as ridge that number times the
identity, times |H_t|_F (at least 1e-6) if adaptive_ridge. solver: one of `SOLVERS`; a diagonal needs "conjugate_gradient".
"""

from __future__ import annotations

from ...framework.call import defer_decode, defer_family
from ...framework.spec import Integer, State

__all__ = [
    "ITERATIONS",
    "KERNEL_SOLVERS",
    "MOST_ITERATIONS",
    "STATES",
    "WIDEST",
    "RIDGE_DECODE",
    "iteration_macs",
    "RIDGE_KERNELS",
]

KERNEL_SOLVERS = ("chebyshev", "conjugate_gradient")
MOST_ITERATIONS = 10_000  # of a solver, each as long as a pass over the memory
ITERATIONS = Integer(least=1, most=MOST_ITERATIONS)
# The values are those of mesa, whose ridge is a tensor.
OPTIONS = {"ridge": 0.0, "iterations": 30, "solver": "conjugate_gradient", "adaptive_ridge": False, "scale": 1.0}
RIDGE_KERNELS = defer_family("ridge.rule", "RIDGE", "RidgeInputs", **OPTIONS)
RIDGE_DECODE = defer_decode("ridge")
WIDEST = 128  # key channels, in the kernels

# Only its symmetric part is a Gram matrix.
STATES = {
    "H": State("GKK", symmetric=True, depends_on=("k", "g", "beta", "H")),
    "U": State("GKV", by_column=True, depends_on=("k", "v", "g", "beta", "U")),
}


def iteration_macs(K: int, V: int, C: int = 64, iterations: int = 30) -> float:
    """Two state passes of linear attention; every iteration multiplies by the state and by the chunk's keys."""
    states = 2 * K * K + C * K + 2 * K * V + C * (K + V) / 2
    return states + iterations * (K * K + C * K)
