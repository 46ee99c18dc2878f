"""Gated KalmaNet and mesa, with both states updated in place."""

from __future__ import annotations

from torch import Tensor

from ..framework.decode import update_state
from ..gated_kalmanet import SPEC as GATED_KALMANET
from ..gated_kalmanet import gated_kalmanet
from ..mesa import SPEC as MESA
from ..mesa import mesa

__all__ = ["gated_kalmanet_", "mesa_"]


def gated_kalmanet_(
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
    state: tuple[Tensor, Tensor],
    state_indices: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    backend: str = "auto",
) -> Tensor:
    r"""Read at most 16 tokens with `gated_kalmanet` and update both states in place, without gradients.

    $$H_t = a_t H_{t-1} + k_t k_t^\top, \qquad U_t = a_t U_{t-1} + k_t v_t^\top, \qquad a_t = e^{g_t}$$

    $$x_t \approx (H_t + \lambda_t I)^{-1} (\mathrm{scale}\; q_t), \qquad \lambda_t = \mathrm{ridge}\, |H_t|_F, \qquad
      o_t = U_t^\top \left(m_t\, x_t + (1 - m_t)\, \mathrm{scale}\; q_t\right)$$

    Args:
        q, k, v, g, mix, ridge, iterations, solver, adaptive_ridge, scale: as for `gated_kalmanet`: [B, T, ...] with T at most
            16. The kernel has the solvers "chebyshev" and "conjugate_gradient" and takes K up to 128.
        state: (H [N, HV, K, K], U [N, HV, K, V]), otherwise as for `linear_attention_`.
        state_indices, cu_seqlens, backend: as for `linear_attention_`.

    Returns:
        o [B, T, HV, V] in v's dtype.

    Raises:
        ValueError: more than 16 tokens; an input or a state that requires a gradient outside torch.no_grad(); a shape, dtype,
            device, positive g, ridge, iterations, solver, state_indices, cu_seqlens or backend that does not fit.
        TypeError: an argument of the wrong kind.
    """
    options = {
        "ridge": ridge, "iterations": iterations, "solver": solver, "adaptive_ridge": adaptive_ridge, "scale": scale,
    }  # fmt: skip
    return update_state(
        GATED_KALMANET, gated_kalmanet, (q, k, v, g, mix), options,
        state=state, state_indices=state_indices, cu_seqlens=cu_seqlens, backend=backend,
    )  # fmt: skip


def mesa_(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    ridge: Tensor | float,
    *,
    iterations: int = 30,
    scale: float | None = None,
    state: tuple[Tensor, Tensor],
    state_indices: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    backend: str = "auto",
) -> Tensor:
    r"""Read at most 16 tokens with `mesa` and update both states in place, without gradients.

    $$H_t = a_t H_{t-1} + \beta_t k_t k_t^\top, \qquad U_t = a_t U_{t-1} + \beta_t k_t v_t^\top, \qquad a_t = e^{g_t}$$

    $$o_t = U_t^\top (H_t + \mathrm{Diag}(\mathrm{ridge}))^{-1} (\mathrm{scale}\; q_t)$$

    Args:
        q, k, v, g, beta, ridge, iterations, scale: as for `mesa`: [B, T, ...] with T at most 16. The kernel takes K up to 128.
        state: (H [N, HV, K, K], U [N, HV, K, V]), otherwise as for `linear_attention_`.
        state_indices, cu_seqlens, backend: as for `linear_attention_`.

    Returns:
        o [B, T, HV, V] in v's dtype.

    Raises:
        ValueError: more than 16 tokens; an input or a state that requires a gradient outside torch.no_grad(); a shape, dtype,
            device, positive g, negative beta, ridge, iterations, state_indices, cu_seqlens or backend that does not fit.
        TypeError: an argument of the wrong kind.
    """
    return update_state(
        MESA, mesa, (q, k, v, g, beta, ridge), {"iterations": iterations, "scale": scale},
        state=state, state_indices=state_indices, cu_seqlens=cu_seqlens, backend=backend,
    )  # fmt: skip
