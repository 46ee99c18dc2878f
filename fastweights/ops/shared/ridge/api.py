"""One call of ridge regression, for the public ops that have checked their own arguments."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ...framework.checks import Shapes, check_flag, check_scale, check_states, constant
from ...framework.run import chunkwise, compute_dtype, per_sequence, run, select_backend
from ...framework.sequences import check_cu_seqlens
from .chunked import chunked
from .reference import reference

__all__ = ["ridge_regression"]

IMPLEMENTATIONS = {"reference": per_sequence(reference), "torch": chunkwise(chunked)}


def ridge_regression(
    op: str,
    sizes: Shapes,
    tokens: dict[str, Tensor | None],
    *,
    ridge: float | Tensor,
    solver: str,
    iterations: int,
    scale: float | None,
    initial_state: tuple[Tensor, Tensor] | None,
    output_final_state: bool,
    cu_seqlens: Tensor | None,
    backend: str,
) -> tuple[Tensor, Any]:
    r"""o and (H, U) or None, for tokens q, k, v, g, beta (gain, 1 when None) and mix (1 when None):

    $$H_t = e^{g_t} H_{t-1} + \beta_t k_t k_t^\top, \qquad U_t = e^{g_t} U_{t-1} + \beta_t k_t v_t^\top$$
    $$(H_t + \Lambda_t)\, x_t = \mathrm{scale}\; q_t, \qquad
      o_t = U_t^\top \left(m_t\, x_t + (1 - m_t)\, \mathrm{scale}\; q_t\right)$$

    $\Lambda_t$ is ridge * |H_t|_F (at least 1e-6) times the identity for a number, or the diagonal given as [v heads, K].
    solver: "chebyshev" (needs a number as ridge), "conjugate_gradient" or "exact".
    """
    scale = check_scale(scale, sizes.key)
    check_flag("output_final_state", output_final_state)
    v = tokens["v"]
    assert v is not None
    sequences = check_cu_seqlens(cu_seqlens, sizes.batch, sizes.time)
    lead = (sequences.count, sizes.heads, sizes.key)
    states = check_states(initial_state, {"H": (*lead, sizes.key), "U": (*lead, sizes.value)}, v, compute_dtype(v))
    # Only its symmetric part is a Gram matrix: said here, so that every solver reads the same and has the same gradient.
    states["H"] = 0.5 * (states["H"] + states["H"].mT)
    return run(
        select_backend(op, backend, IMPLEMENTATIONS, v),
        tokens=tokens,
        states=states,
        sequences=sequences,
        heads=sizes.heads,
        columns=("v", "U"),
        local=("q", "mix"),
        reach={"H": ("k", "g", "beta", "H"), "U": ("k", "v", "g", "beta", "U")},
        scale=scale,
        out_dtype=v.dtype,
        output_final_state=output_final_state,
        ridge=ridge,
        solver=solver,
        iterations=check_iterations(iterations),
    )


def check_iterations(iterations: int) -> int:
    if isinstance(iterations, bool) or not isinstance(iterations, int):
        raise TypeError(f"iterations must be an integer, got {type(iterations).__name__}")
    iterations = constant(iterations)
    if iterations < 1:
        raise ValueError(f"iterations must be at least 1, got {iterations}; 30 is the usual number")
    return iterations
