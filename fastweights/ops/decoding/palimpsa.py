"""Palimpsa, with the posterior updated in place."""

from __future__ import annotations

from torch import Tensor

from ..framework.decode import update_state
from ..palimpsa import POSTERIOR_SPEC, SPEC, palimpsa, palimpsa_posterior

__all__ = ["palimpsa_", "palimpsa_posterior_"]


def palimpsa_(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    g: Tensor,
    *,
    prior: Tensor | float = 1.0,
    scale: float | None = None,
    state: tuple[Tensor, Tensor],
    state_indices: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    backend: str = "auto",
) -> Tensor:
    r"""Read at most 16 tokens with `palimpsa` and update both states in place, without gradients.

    $$M_t = a_t M_{t-1} + k_t v_t^\top, \qquad J_t = a_t J_{t-1} + k_t^2 \beta_t^\top, \qquad
      o_t = \Big(\frac{M_t}{J_t + p}\Big)^\top (\mathrm{scale}\; q_t), \qquad a_t = e^{g_t}$$

    Args:
        q, k, v, beta, g, prior, scale: as for `palimpsa`: [B, T, ...] with T at most 16.
        state: (M, J), each [N, HV, K, V], otherwise as for `linear_attention_`.
        state_indices, cu_seqlens, backend: as for `linear_attention_`.

    Returns:
        o [B, T, HV, V] in v's dtype.

    Raises:
        ValueError: more than 16 tokens; an input or a state that requires a gradient outside torch.no_grad(); a shape, dtype,
            device, positive g, negative beta, prior, state_indices, cu_seqlens or backend that does not fit.
        TypeError: an argument of the wrong kind.
    """
    return update_state(
        SPEC, palimpsa, (q, k, v, beta, g, prior), {"scale": scale},
        state=state, state_indices=state_indices, cu_seqlens=cu_seqlens, backend=backend,
    )  # fmt: skip


def palimpsa_posterior_(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    g: Tensor,
    *,
    prior: Tensor | float = 1.0,
    scale: float | None = None,
    state: tuple[Tensor, Tensor],
    state_indices: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    r"""`palimpsa_` with the variance of its output.

    $$\mathrm{variance}_t = \Big(\frac{1}{J_t + p}\Big)^\top (\mathrm{scale}\; q_t)^2$$

    Args:
        q, k, v, beta, g, prior, scale, state, state_indices, cu_seqlens, backend: as for `palimpsa_`.

    Returns:
        o [B, T, HV, V] and variance [B, T, HV, V] in v's dtype.

    Raises:
        ValueError: more than 16 tokens; an input or a state that requires a gradient outside torch.no_grad(); a shape, dtype,
            device, positive g, negative beta, prior, state_indices, cu_seqlens or backend that does not fit.
        TypeError: an argument of the wrong kind.
    """
    return update_state(
        POSTERIOR_SPEC, palimpsa_posterior, (q, k, v, beta, g, prior), {"scale": scale},
        state=state, state_indices=state_indices, cu_seqlens=cu_seqlens, backend=backend,
    )  # fmt: skip
