"""Longhorn in its diagonal form: every element of the memory corrects its own error."""

from __future__ import annotations

from torch import Tensor

from ..framework import roles
from ..framework.call import call, chunkwise, defer_decode, defer_family, kernels, op, recurrent, sequential
from ..framework.spec import Case, OpSpec, Output, State
from .forms import chunked, reference

__all__ = ["elementwise_longhorn"]


SPEC = OpSpec(
    name="elementwise_longhorn",
    inputs={"q": roles.QUERY, "k": roles.KEY, "v": roles.VALUE, "beta": roles.VALUE_GAIN},
    states={"S": State("GKV", by_column=True)},
    outputs={"o": Output("GV")},
    options={"scale": roles.SCALE},
    backends={
        "reference": sequential(reference),
        "torch": chunkwise(chunked),
        "triton": kernels(defer_family("elementwise.rule", "ELEMENTWISE", "ElementwiseInputs", scale=1.0)),
    },
    recurrent=recurrent(defer_decode("elementwise_longhorn")),
    cases={"": Case()},
    equation="e = beta / (1 + beta |k|^2); S = (1 - k^2 e^T) * S + k (e * v)^T; o = S^T q",
)


@op(SPEC)
def elementwise_longhorn(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    *,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    backend: str = "auto",
) -> tuple[Tensor, Tensor | None]:
    r"""Correct every element of the memory by its own error, with one gain per value channel.

    $$\epsilon_t = \frac{\beta_t}{1 + \beta_t |k_t|^2}, \qquad
      S_t = (1 - k_t^2 \epsilon_t^\top) \odot S_{t-1} + k_t (\epsilon_t \odot v_t)^\top, \qquad
      o_t = S_t^\top (\mathrm{scale}\, q_t)$$

    Longhorn with its diagonal approximation (Palimpsa, table 1). Every element has a decay of its own, in (0, 1] for keys of
    any length.

    Args:
        q, k: [B, T, H, K], K up to 256, float16, bfloat16, float32 or float64.
        v: [B, T, HV, V] of the same dtype, V up to 256, HV a multiple of H: each q/k head serves HV/H consecutive value heads.
        beta: gain of each value channel, at least 0, [B, T, HV, V] (or H heads, repeated likewise). Any float dtype.
        scale: factor on q, K^-0.5 by default.
        initial_state: S before the first token, [N, HV, K, V]; zeros when None. N is B, or the number of packed sequences.
        output_final_state: whether to return S after the last token.
        cu_seqlens: int32 or int64 [N+1], cumulative lengths of sequences packed into one row (B = 1).
        backend: "reference" (loop over tokens), "torch" (chunkwise, exact), "triton" (kernels; not in float64) or "auto":
            kernels on CUDA where triton is installed, else the chunkwise form.

    Returns:
        o [B, T, HV, V] in v's dtype, and S [N, HV, K, V] in float32 (float64 for float64 inputs) or None.

    Raises:
        ValueError: a shape, dtype, device, negative beta, cu_seqlens or backend that does not fit; the message says which.
        TypeError: an argument of the wrong kind.
    """
    return call(SPEC, (q, k, v, beta), {"scale": scale}, initial_state, output_final_state, cu_seqlens, backend)
