"""Linear attention: the additive fast-weight memory, with or without decay."""

from __future__ import annotations

from torch import Tensor

from ..framework import roles
from ..framework.call import call, chunkwise, kernels, op, recurrent, sequential
from ..framework.passing import Passing, Sum
from ..framework.spec import Case, OpSpec, Output, State
from ..shared.memory_kernels import MEMORY_DECODE, MEMORY_KERNELS
from .forms import chunked, reference

__all__ = ["linear_attention"]


def linear_macs(K: int, V: int, C: int = 64) -> float:
    return 2 * K * V + C * (K + V) / 2


SPEC = OpSpec(
    name="linear_attention",
    inputs={"q": roles.QUERY, "k": roles.KEY, "v": roles.VALUE, "g": roles.optional(roles.CHANNEL_LOG_DECAY)},
    states={"S": State("GKV", by_column=True)},
    outputs={"o": Output("GV")},
    options={"scale": roles.SCALE},
    backends={"reference": sequential(reference), "torch": chunkwise(chunked), "triton": kernels(MEMORY_KERNELS)},
    recurrent=recurrent(MEMORY_DECODE),
    cases={name: Case(given=g) for name, g in roles.DECAY_FORMS.items()},
    equation="S = a S + k v^T; o = S^T q",
    macs=linear_macs,
    passing=Passing(states={"S": Sum(x="k", y="v", decay="g")}),
)


@op(SPEC)
def linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    *,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    backend: str = "auto",
) -> tuple[Tensor, Tensor | None]:
    r"""Read from the decayed sum of key-value outer products.

    $$S_t = \mathrm{Diag}(a_t)\, S_{t-1} + k_t v_t^\top, \qquad o_t = S_t^\top (\mathrm{scale}\; q_t), \qquad a_t = e^{g_t}$$

    Without g this is linear attention (Katharopoulos et al. 2020); with one decay per head the rule of Mamba-2 (Dao and Gu
    2024) and simple GLA; with one per key channel gated linear attention (Yang et al. 2024).

    Args:
        q, k: [B, T, H, K], K up to 256, float16, bfloat16, float32 or float64.
        v: [B, T, HV, V] of the same dtype, V up to 256, HV a multiple of H: each q/k head serves HV/H consecutive value heads.
        g: log decay (natural logarithm, at most 0; -inf forgets everything), None, [B, T, HV] or [B, T, HV, K]
            (H heads in place of HV are repeated likewise). Any float dtype.
        scale: factor on q, K^-0.5 by default.
        initial_state: S before the first token, [N, HV, K, V]; zeros when None. N is B, or the number of packed sequences.
        output_final_state: whether to return S after the last token.
        cu_seqlens: int32 or int64 [N+1], cumulative lengths of sequences packed into one row (B = 1).
        backend: "reference" (loop over tokens), "torch" (chunkwise, exact), "triton" (kernels; not in float64) or "auto":
            kernels on CUDA where triton is installed, else the chunkwise form.

    Returns:
        o [B, T, HV, V] in v's dtype, and S [N, HV, K, V] in float32 (float64 for float64 inputs) or None.

    Raises:
        ValueError: a shape, dtype, device, positive g, cu_seqlens or backend that does not fit; the message says which.
        TypeError: an argument of the wrong kind.
    """
    return call(SPEC, (q, k, v, g), {"scale": scale}, initial_state, output_final_state, cu_seqlens, backend)
