"""The delta rule with a transition of a diagonal plus any matrix of rank one: RWKV-7's memory."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ...kernels.common.delta_rule.steps import erase_and_write
from ..delta_product import delta_product
from ..framework import roles
from ..framework.call import Results, call, chunkwise, composed, defer_decode, op, recurrent, sequential
from ..framework.passing import Passing, Transition
from ..framework.spec import Case, OpSpec, Output, State
from .forms import chunked, reference

__all__ = ["dplr_delta_rule"]


def dplr_macs(K: int, V: int, C: int = 64) -> float:
    return 4 * K * V + C * (5 * K + 4 * V) / 2


def compose_two_steps(
    q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, g: Tensor | None, S: Tensor | None, **passed_on: Any
) -> Results:
    """Two steps of the delta rule: an erasure and a write."""
    o, S = delta_product(**erase_and_write(q, k, v, a, b, g), initial_state=S, **passed_on)
    return o.to(v.dtype), (S,)


SPEC = OpSpec(
    name="dplr_delta_rule",
    inputs={
        "q": roles.QUERY, "k": roles.KEY, "v": roles.VALUE, "a": roles.KEY, "b": roles.ERASURE,
        "g": roles.optional(roles.CHANNEL_LOG_DECAY),
    },
    states={"S": State("GKV", by_column=True)},
    outputs={"o": Output("GV")},
    options={"scale": roles.SCALE},
    backends={
        "reference": sequential(reference), "torch": chunkwise(chunked), "triton": composed(compose_two_steps),
    },
    recurrent=recurrent(defer_decode("dplr_delta_rule")),
    cases={"none": Case(), "channel": Case(given={"g": "GK"})},
    equation="S = (Diag(exp(g)) + b a^T) S + k v^T; o = S^T q",
    macs=dplr_macs,
    passing=Passing(states={"S": Transition()}),
)  # fmt: skip


@op(SPEC)
def dplr_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    g: Tensor | None = None,
    *,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    backend: str = "auto",
) -> tuple[Tensor, Tensor | None]:
    r"""Decay the memory, move what it answers to a along b, and write v along k.

    $$S_t = (\mathrm{Diag}(e^{g_t}) + b_t a_t^\top)\, S_{t-1} + k_t v_t^\top, \qquad o_t = S_t^\top (\mathrm{scale}\; q_t)$$

    The transition is diagonal plus low rank (DPLR). a reads the memory before it decays. The published form, with the transpose
    of S, is $S_t = S_{t-1}(\mathrm{Diag}(w_t) + a_t b_t^\top) + v_t k_t^\top$. RWKV-7 (Peng et al. 2025) has
    $a = -\hat\kappa$, a key of length 1, and $b = \hat\kappa \odot \eta$ with in-context learning rates $\eta$ from 0 to 1.
    Without g the transition is identity plus low rank (IPLR); a = -k, b = beta k and values beta v are then DeltaNet.

    The kernels take the two directions as two steps of `delta_product`: one that reads -a / exp(g) after the decay, and writes
    nothing but its correction along b, and one that writes v along k. There a decay below exp(-40) counts as exp(-40), which
    float32 cannot tell from 0, and float16 inputs are computed with in float32. The chunkwise form in PyTorch never divides.

    Args:
        q, k: [B, T, H, K], K up to 256, float16, bfloat16, float32 or float64.
        v: [B, T, HV, V] of the same dtype, V up to 256, HV a multiple of H: each q/k head serves HV/H consecutive value heads.
        a, b: of the shape and dtype of k. Nothing is normalised here. The memory stays bounded where
            $|\mathrm{Diag}(e^{g}) + b a^\top| \le 1$.
        g: log decay (natural logarithm, at most 0; -inf forgets everything but what a has read), None, [B, T, HV] or
            [B, T, HV, K] (or H heads, repeated likewise). Any float dtype.
        scale: factor on q, K^-0.5 by default.
        initial_state: S before the first token, [N, HV, K, V]; zeros when None. N is B, or the number of packed sequences.
        output_final_state: whether to return S after the last token.
        cu_seqlens: int32 or int64 [N+1], cumulative lengths of sequences packed into one row (B = 1).
        backend: as for `delta_rule`.

    Returns:
        o [B, T, HV, V] in v's dtype, and S [N, HV, K, V] in float32 (float64 for float64 inputs) or None.

    Raises:
        ValueError: a shape, dtype, device, positive g, cu_seqlens or backend that does not fit; the message says which.
        TypeError: an argument of the wrong kind.
    """
    return call(
        SPEC, (q, k, v, a, b, g), {"scale": scale}, initial_state, output_final_state, cu_seqlens, backend
    )  # fmt: skip
