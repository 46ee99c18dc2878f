"""DeltaProduct: several steps of the delta rule per token."""

from __future__ import annotations

from torch import Tensor

from ...kernels.common.delta_rule.steps import outputs_of_tokens, unroll_lengths, unroll_steps
from ..delta_rule import delta_rule
from ..framework import roles
from ..framework.call import Results, call, composed, defer_decode, op, recurrent, sequential
from ..framework.passing import Passing, Transition
from ..framework.spec import Case, OpSpec, Output, State
from .forms import reference

__all__ = ["delta_product"]


def compose_steps(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, g: Tensor | None, write_key: Tensor | None, S: Tensor | None, *,
    scale: float, output_final_state: bool, cu_seqlens: Tensor | None, backend: str,
) -> Results:  # fmt: skip
    """The delta rule on a sequence in which every step is a token."""
    steps = k.shape[3]
    o, S = delta_rule(
        **unroll_steps(q, k, v, beta, g, write_key), scale=scale, initial_state=S, output_final_state=output_final_state,
        cu_seqlens=unroll_lengths(cu_seqlens, steps), backend=backend,
    )  # fmt: skip
    return outputs_of_tokens(o, steps), (S,)


SPEC = OpSpec(
    name="delta_product",
    inputs={
        "q": roles.QUERY, "k": roles.STEP_KEY, "v": roles.STEP_VALUE, "beta": roles.STEP_GAIN,
        "g": roles.optional(roles.CHANNEL_LOG_DECAY), "write_key": roles.optional(roles.STEP_WRITE_KEY),
    },
    states={"S": State("GKV", by_column=True)},
    outputs={"o": Output("GV")},
    options={"scale": roles.SCALE},
    backends={
        "reference": sequential(reference), "torch": composed(compose_steps), "triton": composed(compose_steps),
    },
    recurrent=recurrent(defer_decode("delta_rule", "decode_steps")),
    cases={
        "none": Case(), "head": Case(given={"g": "G"}), "channel-write": Case(given={"g": "GK", "write_key": "HRK"}),
    },
    passing=Passing(states={"S": Transition()}),
    equation="S' = a S; R times S' = S' + beta_i w_i (v_i - S'^T k_i)^T; S = S'; o = S^T q",
)  # fmt: skip


@op(SPEC)
def delta_product(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    g: Tensor | None = None,
    *,
    write_key: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    backend: str = "auto",
) -> tuple[Tensor, Tensor | None]:
    r"""Take R steps of the delta rule at every token, each with its own key, value and gain.

    $$S^0 = \mathrm{Diag}(a_t)\, S_{t-1}, \qquad S^i = S^{i-1} + \beta^i_t\, w^i_t (v^i_t - S^{i-1\top} k^i_t)^\top, \quad
      i = 1 .. R, \qquad S_t = S^R, \qquad o_t = S_t^\top (\mathrm{scale}\; q_t), \qquad a_t = e^{g_t}$$

    With w = k the transition of a token is a product of R generalised Householder matrices $I - \beta k k^\top$, which with unit
    keys and beta up to 2 can rotate the memory in R dimensions (DeltaProduct and, with one decay per head, Gated DeltaProduct;
    Siems et al. 2025). R = 1 is `delta_rule`. The op is `delta_rule` on sequences of T R tokens, and costs R times as much.

    Args:
        q: [B, T, H, K], K up to 256, float16, bfloat16, float32 or float64.
        k: [B, T, H, R, K] of the same dtype. Keys are not normalised here: unit length keeps the memory stable for beta in
            [0, 2].
        v: [B, T, HV, R, V] of the same dtype, V up to 256, HV a multiple of H: each q/k head serves HV/H consecutive value
            heads.
        beta: gains, [B, T, HV, R] (or H heads, repeated likewise). Any float dtype.
        g: log decay before the first step (natural logarithm, at most 0; -inf forgets everything), None, [B, T, HV] or
            [B, T, HV, K] (or H heads, repeated likewise). Any float dtype.
        write_key: w, of the shape and dtype of k, or [B, T, HV, R, K] with one per value head; k when None.
        scale: factor on q, K^-0.5 by default.
        initial_state: S before the first token, [N, HV, K, V]; zeros when None. N is B, or the number of packed sequences.
        output_final_state: whether to return S after the last token.
        cu_seqlens: int32 or int64 [N+1], cumulative lengths in tokens of sequences packed into one row (B = 1).
        backend: as for `delta_rule`.

    Returns:
        o [B, T, HV, V] in v's dtype, and S [N, HV, K, V] in float32 (float64 for float64 inputs) or None.

    Raises:
        ValueError: a shape, dtype, device, positive g, cu_seqlens or backend that does not fit; the message says which.
        TypeError: an argument of the wrong kind.
    """
    return call(
        SPEC, (q, k, v, beta, g, write_key), {"scale": scale}, initial_state, output_final_state, cu_seqlens, backend
    )  # fmt: skip
