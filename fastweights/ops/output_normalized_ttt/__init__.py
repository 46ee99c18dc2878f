"""Test-time training with a normalised answer: one gradient step per token on a linear memory behind a normalisation."""

from __future__ import annotations

from torch import Tensor

from ..framework import roles
from ..framework.call import call, chunkwise, defer_decode, defer_family, kernels, op, recurrent, sequential
from ..framework.spec import Case, OpSpec, Output, State
from .forms import chunked, reference

__all__ = ["output_normalized_ttt"]


SPEC = OpSpec(
    name="output_normalized_ttt",
    inputs={"q": roles.QUERY, "k": roles.KEY, "v": roles.JOINT_VALUE, "gamma": roles.GAIN},
    states={"S": State("GKV")},
    outputs={"o": Output("GV")},
    backends={
        "reference": sequential(reference),
        "torch": chunkwise(chunked),
        "triton": kernels(defer_family("output_normalized_ttt.rule", "OUTPUT_NORMALIZED_TTT", "TTTInputs"), widest=128),
    },
    recurrent=recurrent(defer_decode("output_normalized_ttt")),
    cases={"": Case()},
    equation="z = S^T k; S = S - gamma k ((I - z z^T / |z|^2) (z / |z| - v) / |z|)^T; o = S^T q",
)


@op(SPEC)
def output_normalized_ttt(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gamma: Tensor,
    *,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    backend: str = "auto",
) -> tuple[Tensor, Tensor | None]:
    r"""Correct the direction of the memory's answer to k towards v.

    $$z = S_{t-1}^\top k_t, \qquad e = \frac{z}{|z|} - v_t, \qquad o_t = S_t^\top q_t, \qquad
      S_t = S_{t-1} - \gamma_t\, k_t \Big(\big(I - \tfrac{z z^\top}{|z|^2}\big) \frac{e}{|z|}\Big)^\top$$

    This is the gradient step on $|z/|z| - v|^2 / 2$: the baseline that Lattice (Karami and Mirrokni 2025, eq. 19) makes of
    test-time training (Sun et al. 2024), with the normalisation on the answer in place of on the slots.

    A memory that answers nothing has no direction to correct: where |z| < 1e-6 the normalisation is left out, and the step is
    the delta rule's, e = z - v and S_t = S_{t-1} - gamma_t k_t e^T. That is how a memory of zeros is first written.

    Args:
        q, k: [B, T, H, K], K up to 256, float16, bfloat16, float32 or float64; no factor is applied to q.
        v: [B, T, HV, V] of the same dtype, V up to 256, HV a multiple of H: each q/k head serves HV/H consecutive value heads.
        gamma: step size, [B, T, HV] (or H heads, repeated likewise). Any float dtype.
        initial_state: S before the first token, [N, HV, K, V]; zeros when None. N is B, or the number of packed sequences.
        output_final_state: whether to return S after the last token.
        cu_seqlens: int32 or int64 [N+1], cumulative lengths of sequences packed into one row (B = 1).
        backend: "reference" (loop over tokens), "torch" (chunkwise, exact), "triton" (kernels; not in float64, K and V up to 128)
            or "auto": kernels on CUDA where they serve, else the chunkwise form.

    Returns:
        o [B, T, HV, V] in v's dtype, and S [N, HV, K, V] in float32 (float64 for float64 inputs) or None.

    Raises:
        ValueError: a shape, dtype, device, cu_seqlens or backend that does not fit; the message says which.
        TypeError: an argument of the wrong kind.
    """
    return call(SPEC, (q, k, v, gamma), {}, initial_state, output_final_state, cu_seqlens, backend)
