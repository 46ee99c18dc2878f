"""Linear attention and the delta rules, with the state updated in place."""

from __future__ import annotations

from torch import Tensor

from ..delta_rule import SPEC as DELTA_RULE
from ..delta_rule import delta_rule
from ..framework.decode import update_state
from ..linear_attention import SPEC as LINEAR_ATTENTION
from ..linear_attention import linear_attention
from ..preconditioned_delta_rule import SPEC as PRECONDITIONED_DELTA_RULE
from ..preconditioned_delta_rule import preconditioned_delta_rule

__all__ = ["delta_rule_", "linear_attention_", "preconditioned_delta_rule_"]


def linear_attention_(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    *,
    scale: float | None = None,
    state: Tensor,
    state_indices: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    backend: str = "auto",
) -> Tensor:
    r"""Read at most 16 tokens with `linear_attention` and update the state in place, without gradients.

    $$S_t = \mathrm{Diag}(a_t)\, S_{t-1} + k_t v_t^\top, \qquad o_t = S_t^\top (\mathrm{scale}\; q_t), \qquad a_t = e^{g_t}$$

    Args:
        q, k, v, g, scale: as for `linear_attention`: [B, T, ...] with T at most 16.
        state: S [N, HV, K, V], float32 (float64 for float64 inputs); after the call it holds S after the last token. The
            state of a sequence of length 0 does not change. With state_indices a pool [P, HV, K, V].
        state_indices: int32 or int64 [N], the row of the pool that each sequence reads and overwrites. They must not
            repeat. With a negative index a sequence has no state: its o is 0, and nothing is written. On a GPU the values are
            checked only with FASTWEIGHTS_CHECK_VALUES=1, because that waits for the device.
        cu_seqlens: int32 or int64 [N+1], cumulative lengths, at most 16 each, of sequences packed into one row (B = 1). Its
            values are checked as those of state_indices.
        backend: "triton" (one kernel), "torch" or "reference" (those of `linear_attention`), or "auto": the kernel on CUDA
            except in float64, else "torch".

    Returns:
        o [B, T, HV, V] in v's dtype.

    Raises:
        ValueError: more than 16 tokens; an input or a state that requires a gradient outside torch.no_grad(); a shape, dtype,
            device, positive g, state_indices, cu_seqlens or backend that does not fit.
        TypeError: an argument of the wrong kind.
    """
    return update_state(
        LINEAR_ATTENTION, linear_attention, (q, k, v, g), {"scale": scale},
        state=state, state_indices=state_indices, cu_seqlens=cu_seqlens, backend=backend,
    )  # fmt: skip


def delta_rule_(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    g: Tensor | None = None,
    *,
    write_key: Tensor | None = None,
    scale: float | None = None,
    state: Tensor,
    state_indices: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    backend: str = "auto",
) -> Tensor:
    r"""Read at most 16 tokens with `delta_rule` and update the state in place, without gradients.

    $$S' = \mathrm{Diag}(a_t)\, S_{t-1}, \qquad S_t = S' + \beta_t\, w_t (v_t - S'^\top k_t)^\top, \qquad
      o_t = S_t^\top (\mathrm{scale}\; q_t), \qquad a_t = e^{g_t}$$

    Args:
        q, k, v, beta, g, write_key, scale: as for `delta_rule`: [B, T, ...] with T at most 16.
        state, state_indices, cu_seqlens, backend: as for `linear_attention_`.

    Returns:
        o [B, T, HV, V] in v's dtype.

    Raises:
        ValueError: more than 16 tokens; an input or a state that requires a gradient outside torch.no_grad(); a shape, dtype,
            device, positive g, state_indices, cu_seqlens or backend that does not fit.
        TypeError: an argument of the wrong kind.
    """
    return update_state(
        DELTA_RULE, delta_rule, (q, k, v, beta, g, write_key), {"scale": scale},
        state=state, state_indices=state_indices, cu_seqlens=cu_seqlens, backend=backend,
    )  # fmt: skip


def preconditioned_delta_rule_(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    g: Tensor | None = None,
    *,
    precond_g: Tensor,
    precond_beta: Tensor,
    center: Tensor | float,
    bound: float = 1.5,
    eps: float = 1e-6,
    scale: float | None = None,
    state: tuple[Tensor, Tensor],
    state_indices: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    backend: str = "auto",
) -> Tensor:
    r"""Read at most 16 tokens with `preconditioned_delta_rule` and update both states in place, without gradients.

    $$A_t = e^{g^P_t} A_{t-1} + \beta^P_t k_t^2, \qquad w_t = x^{-r/(1+|r|)} k_t, \quad r = \log(A_t + \mathrm{eps}) - c$$

    $$S_t = S' + \beta_t w_t (v_t - S'^\top k_t)^\top, \quad S' = \mathrm{Diag}(e^{g_t}) S_{t-1}, \qquad
      o_t = S_t^\top (\mathrm{scale}\; q_t)$$

    Args:
        q, k, v, beta, g, precond_g, precond_beta, center, bound, eps, scale: as for `preconditioned_delta_rule`: [B, T, ...]
            with T at most 16.
        state: (S [N, HV, K, V], A [N, HV, K]), otherwise as for `linear_attention_`.
        state_indices, cu_seqlens, backend: as for `linear_attention_`.

    Returns:
        o [B, T, HV, V] in v's dtype.

    Raises:
        ValueError: more than 16 tokens; an input or a state that requires a gradient outside torch.no_grad(); a shape, dtype,
            device, positive g, bound, state_indices, cu_seqlens or backend that does not fit.
        TypeError: an argument of the wrong kind.
    """
    inputs = (q, k, v, beta, g, precond_g, precond_beta, center)
    options = {"bound": bound, "eps": eps, "scale": scale}
    return update_state(
        PRECONDITIONED_DELTA_RULE, preconditioned_delta_rule, inputs, options,
        state=state, state_indices=state_indices, cu_seqlens=cu_seqlens, backend=backend,
    )  # fmt: skip
