"""Linear attention: the additive fast-weight memory, with or without decay."""

from __future__ import annotations

from torch import Tensor

from ..framework.checks import check_decay, check_flag, check_qkv, check_scale, check_states
from ..framework.run import chunkwise, compute_dtype, kernels, per_sequence, run, select_backend
from ..framework.sequences import check_cu_seqlens
from .chunked import chunked
from .kernels import by_kernels
from .reference import reference

__all__ = ["linear_attention"]

IMPLEMENTATIONS = {"reference": per_sequence(reference), "torch": chunkwise(chunked), "triton": kernels(by_kernels)}


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

    Without g this is linear attention (Katharopoulos et al. 2020); with one decay a head the rule of Mamba-2 (Dao and Gu
    2024) and simple GLA; with one a key channel gated linear attention (Yang et al. 2024).

    Args:
        q, k: [B, T, H, K], K up to 256, float16, bfloat16, float32 or float64.
        v: [B, T, HV, V] of the same dtype, V up to 256, HV a multiple of H: each q/k head serves HV/H value heads in a row.
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
    sizes = check_qkv(q, k, v)
    check_decay("g", g, sizes, v, per_channel=True)
    scale = check_scale(scale, sizes.key)
    check_flag("output_final_state", output_final_state)
    sequences = check_cu_seqlens(cu_seqlens, sizes.batch, sizes.time)
    shape = (sequences.count, sizes.heads, sizes.key, sizes.value)
    chosen = select_backend("linear_attention", backend, IMPLEMENTATIONS, v)
    return run(
        chosen,
        tokens={"q": q, "k": k, "v": v, "g": g},
        states=check_states(initial_state, {"S": shape}, v, compute_dtype(v), zeros=not isinstance(chosen, kernels)),
        sequences=sequences,
        heads=sizes.heads,
        columns=("v", "S"),
        scale=scale,
        out_dtype=v.dtype,
        output_final_state=output_final_state,
    )
