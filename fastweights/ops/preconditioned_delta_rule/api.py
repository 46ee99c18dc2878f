"""The delta rule with preconditioned write keys: Preconditioned DeltaNet and its gated forms."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..delta_rule import delta_rule
from ..delta_rule.api import check_delta
from ..framework.checks import check_decay, check_flag, check_gate, check_scale, check_states
from ..framework.run import compute_dtype, expand_heads, kernels, run, select_backend
from ..framework.sequences import check_cu_seqlens
from ..precondition import precondition_keys
from ..precondition.api import check_center, check_squash
from .kernels import by_kernels

__all__ = ["preconditioned_delta_rule"]

# None: precondition_keys, then delta_rule
IMPLEMENTATIONS = {"reference": None, "torch": None, "triton": kernels(by_kernels)}


def preconditioned_delta_rule(
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
    initial_state: tuple[Tensor, Tensor] | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    backend: str = "auto",
) -> tuple[Tensor, tuple[Tensor, Tensor] | None]:
    r"""The delta rule written along preconditioned keys: PDN (no g), PGDN (g per head), PKDA (g per channel).

    $$A_t = e^{g^P_t} A_{t-1} + \beta^P_t k_t^2, \qquad w_t = x^{-r/(1+|r|)} k_t, \quad r = \log(A_t + \mathrm{eps}) - c$$
    $$S_t = S' + \beta_t w_t (v_t - S'^\top k_t)^\top, \quad S' = \mathrm{Diag}(e^{g_t}) S_{t-1}, \qquad
      o_t = S_t^\top (\mathrm{scale}\; q_t)$$

    which is `precondition_keys` followed by `delta_rule`. Source: Preconditioned DeltaNet, sections 3 and 4.

    Args:
        q, k, v, beta, g, scale: as for `delta_rule`.
        precond_g, precond_beta: log decay (at most 0) and gain (at least 0) of A, [B, T, HV] (or H heads, repeated).
        center, bound, eps: as for `precondition_keys`.
        initial_state: (S [N, HV, K, V], A [N, HV, K]) before the first token; zeros when None.
        output_final_state: whether to return (S, A) after the last token.
        cu_seqlens, backend: as for `delta_rule`.

    Returns:
        o [B, T, HV, V] in v's dtype, and (S, A) in float32 (float64 for float64 inputs) or None.

    Raises:
        ValueError: a shape, dtype, device, positive g, bound, cu_seqlens or backend that does not fit.
        TypeError: an argument of the wrong kind.
    """
    sizes = check_delta(q, k, v, beta, g)
    check_decay("precond_g", precond_g, sizes, v)
    check_gate("precond_beta", precond_beta, sizes, v)
    center_of_head = check_center(center, k, sizes.heads)
    check_squash(bound, eps)
    scale = check_scale(scale, sizes.key)
    check_flag("output_final_state", output_final_state)
    sequences, heads = check_cu_seqlens(cu_seqlens, sizes.batch, sizes.time), sizes.heads
    shapes = {"S": (sequences.count, heads, sizes.key, sizes.value), "A": (sequences.count, heads, sizes.key)}
    chosen = select_backend("preconditioned_delta_rule", backend, IMPLEMENTATIONS, v)
    states = check_states(initial_state, shapes, v, compute_dtype(v), zeros=chosen is None)
    if chosen is not None:
        return run(
            chosen,
            tokens={
                "q": q, "k": k, "v": v, "beta": beta, "g": g, "precond_g": precond_g, "precond_beta": precond_beta,
            },
            states=states,
            sequences=sequences,
            heads=heads,
            columns=("v", "S"),
            scale=scale,
            out_dtype=v.dtype,
            output_final_state=output_final_state,
            center=center_of_head,
            bound=float(bound),
            eps=float(eps),
        )  # fmt: skip

    shared: dict[str, Any] = {"output_final_state": output_final_state, "cu_seqlens": cu_seqlens, "backend": backend}
    write_key, A = precondition_keys(
        k,
        expand_heads(precond_g, heads),
        precond_beta,
        center,
        bound=bound,
        eps=eps,
        initial_state=states["A"],
        **shared,
    )
    o, S = delta_rule(q, k, v, beta, g, write_key=write_key, scale=scale, initial_state=states["S"], **shared)
    return o, None if S is None or A is None else (S, A)
