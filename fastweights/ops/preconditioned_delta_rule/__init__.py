"""The delta rule with preconditioned write keys: Preconditioned DeltaNet and its gated forms."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..delta_rule import SPEC as DELTA_RULE
from ..delta_rule import delta_rule
from ..framework import roles
from ..framework.call import Results, call, composed, expand_heads, kernels, op, recurrent
from ..framework.passing import Passing, Sum, Transition
from ..framework.spec import Case, OpSpec, Output, State
from ..precondition import BOUNDED, precondition_keys
from ..shared.memory_kernels import MEMORY_DECODE, MEMORY_KERNELS

__all__ = ["preconditioned_delta_rule"]


def compose_two_ops(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, g: Tensor | None, precond_g: Tensor, precond_beta: Tensor,
    center: Tensor, S: Tensor | None, A: Tensor | None, *, bound: float, eps: float, scale: float, **passed_on: Any,
) -> Results:  # fmt: skip
    precond_g = expand_heads(precond_g, v.shape[2])
    write_key, A = precondition_keys(
        k, precond_g, precond_beta, center, bound=bound, eps=eps, initial_state=A, **passed_on
    )
    o, S = delta_rule(q, k, v, beta, g, write_key=write_key, scale=scale, initial_state=S, **passed_on)
    return o, (S, A)


SPEC = OpSpec(
    name="preconditioned_delta_rule",
    inputs={
        **{name: role for name, role in DELTA_RULE.inputs.items() if name != "write_key"},
        "precond_g": roles.LOG_DECAY, "precond_beta": roles.GAIN, "center": roles.CENTER,
    },
    states={"S": State("GKV", by_column=True), "A": State("GK")},
    outputs={"o": Output("GV")},
    options={**BOUNDED, "scale": roles.SCALE},
    backends={"reference": composed(compose_two_ops), "torch": composed(compose_two_ops), "triton": kernels(MEMORY_KERNELS)},
    recurrent=recurrent(MEMORY_DECODE),
    cases={name: Case(given=g) for name, g in roles.DECAY_FORMS.items()},
    equation="w as precondition_keys; S' = a S; S = S' + beta w (v - S'^T k)^T; o = S^T q",
    macs=DELTA_RULE.macs,
    passing=Passing(
        states={"S": Transition(), "A": Sum(x="k", y="k", gain="precond_beta", decay="precond_g", diagonal=True)}
    ),
)  # fmt: skip


@op(SPEC)
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
        precond_g: log decay of A (natural logarithm, at most 0), [B, T, HV] (or H heads, repeated likewise). Any float dtype.
        precond_beta: gain of A, at least 0 (not checked), [B, T, HV] (or H heads). Any float dtype.
        center: c, a number or a tensor [HV] or [H], free in sign.
        bound, eps: as for `precondition_keys`.
        initial_state: (S [N, HV, K, V], A [N, HV, K]) before the first token; zeros when None. N is B, or the number of packed
            sequences.
        output_final_state: whether to return (S, A) after the last token.
        cu_seqlens, backend: as for `delta_rule`.

    Returns:
        o [B, T, HV, V] in v's dtype, and (S, A) in float32 (float64 for float64 inputs) or None.

    Raises:
        ValueError: a shape, dtype, device, positive g, bound, eps, cu_seqlens or backend that does not fit; the message says
            which.
        TypeError: an argument of the wrong kind.
    """
    inputs = (q, k, v, beta, g, precond_g, precond_beta, center)
    return call(
        SPEC, inputs, {"bound": bound, "eps": eps, "scale": scale}, initial_state, output_final_state, cu_seqlens, backend
    )  # fmt: skip
