"""Recursive least squares and variational linear attention, with the states updated in place."""

from __future__ import annotations

from torch import Tensor

from ..framework.decode import update_state
from ..recursive_least_squares import SPEC as LEAST_SQUARES
from ..recursive_least_squares import recursive_least_squares
from ..variational_linear_attention import variational_linear_attention
from ..variational_linear_attention.memory import SPEC as VARIATIONAL

__all__ = ["recursive_least_squares_", "variational_linear_attention_"]


def recursive_least_squares_(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    g: Tensor | None = None,
    *,
    ridge: float = 1.0,
    scale: float | None = None,
    state: tuple[Tensor, Tensor],
    state_indices: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    backend: str = "auto",
) -> Tensor:
    r"""Read at most 16 tokens with `recursive_least_squares` and update both states in place, without gradients.

    $$P_t = (a_t P_{t-1}^{-1} + \beta_t k_t k_t^\top)^{-1}, \qquad
      S_t = S_{t-1} + \beta_t (P_t k_t)(v_t - S_{t-1}^\top k_t)^\top, \qquad o_t = S_t^\top (\mathrm{scale}\; q_t)$$

    Args:
        q, k, v, beta, g, ridge, scale: as for `recursive_least_squares`: [B, T, ...] with T at most 16.
        state: (S [N, HV, K, V], P [N, HV, K, K]), otherwise as for `linear_attention_`. Begin with zeros and I / ridge.
        state_indices, cu_seqlens: as for `linear_attention_`.
        backend: as for `linear_attention_`; the kernel serves memories without decay of at most 128 key channels.

    Returns:
        o [B, T, HV, V] in v's dtype.

    Raises:
        ValueError: more than 16 tokens; an input or a state that requires a gradient outside torch.no_grad(); a shape, dtype,
            device, negative beta, positive g, ridge, state_indices, cu_seqlens or backend that does not fit.
        TypeError: an argument of the wrong kind.
    """
    return update_state(
        LEAST_SQUARES, recursive_least_squares, (q, k, v, beta, g), {"ridge": ridge, "scale": scale},
        state=state, state_indices=state_indices, cu_seqlens=cu_seqlens, backend=backend,
    )  # fmt: skip


def variational_linear_attention_(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    u: Tensor,
    *,
    ridge: float = 0.1,
    refresh_every: int | None = None,
    refresh: float = 1e-3,
    eps: float = 1e-4,
    state: tuple[Tensor, Tensor, Tensor, Tensor],
    state_indices: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    backend: str = "auto",
) -> Tensor:
    r"""Read at most 16 tokens with `variational_linear_attention` and update all states in place, without gradients.

    $$A_t = (A_{t-1}^{-1} + u_t u_t^\top)^{-1}, \qquad \alpha_t = A_t \hat k_t / |A_t \hat k_t|, \qquad
      S_t = S_{t-1} + \alpha_t (v_t - S_{t-1}^\top \hat k_t)^\top$$
    $$z_t = z_{t-1} + k_t, \qquad o_t = S_t^\top q_t / \max(z_t^\top q_t, \mathrm{eps})$$

    Args:
        q, k, v, u, ridge, refresh_every, refresh, eps: as for `variational_linear_attention`: [B, T, ...] with T at most 16.
        state: (S [N, HV, K, V], A [N, HV, K, K], z [N, HV, K], number of tokens read so far, int64 [N]), otherwise as for
            `linear_attention_`. Begin with zeros, and I / ridge for A.
        state_indices, cu_seqlens: as for `linear_attention_`.
        backend: as for `linear_attention_`; the kernel serves at most 128 key channels.

    Returns:
        o [B, T, HV, V] in v's dtype.

    Raises:
        ValueError: more than 16 tokens; an input or a state that requires a gradient outside torch.no_grad(); a shape, dtype,
            device, option, state_indices, cu_seqlens or backend that does not fit.
        TypeError: an argument of the wrong kind.
    """
    options = {"ridge": ridge, "refresh_every": refresh_every, "refresh": refresh, "eps": eps}
    return update_state(
        VARIATIONAL, variational_linear_attention, (q, k, v, u), options,
        state=state, state_indices=state_indices, cu_seqlens=cu_seqlens, backend=backend,
    )  # fmt: skip
