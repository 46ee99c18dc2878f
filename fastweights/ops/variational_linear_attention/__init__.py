"""Variational linear attention: a delta rule whose write direction comes from an adaptive penalty matrix."""

from __future__ import annotations

from torch import Tensor

from ..framework.call import call, op
from .memory import SPEC

__all__ = ["variational_linear_attention"]


@op(SPEC)
def variational_linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    u: Tensor,
    *,
    ridge: float = 0.1,
    refresh_every: int | None = None,
    refresh: float = 1e-3,
    eps: float = 1e-4,
    initial_state: tuple[Tensor, Tensor, Tensor, Tensor] | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    backend: str = "auto",
) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor, Tensor] | None]:
    r"""Write along unit directions that an adaptive penalty matrix turns towards those that earlier u have covered little.

    $$A_t = (A_{t-1}^{-1} + u_t u_t^\top)^{-1}, \qquad \hat k_t = k_t / |k_t|, \qquad
      \alpha_t = A_t \hat k_t / |A_t \hat k_t|$$

    $$S_t = S_{t-1} + \alpha_t (v_t - S_{t-1}^\top \hat k_t)^\top, \qquad z_t = z_{t-1} + k_t, \qquad
      o_t = S_t^\top q_t / \max(z_t^\top q_t, \mathrm{eps})$$

    with $A_0 = I / \mathrm{ridge}$. With `refresh_every` = n, refresh * I is added to A at every n-th token of a sequence, before
    that token's alpha is computed. Source: Variational Linear Attention, equations 8 to 11 and Algorithm 1. It is
    `delta_rule` with beta 1 and write key alpha. Departures from the text: equation 12 counts S twice (the step is
    $S_t = (I - \alpha_t \hat k_t^\top) S_{t-1} + \alpha_t v_t^\top$), and Proposition 2 does not hold:
    $|I - \alpha_t \hat k_t^\top|_2$ is 1 only where alpha is khat, and above 1 elsewhere.

    Args:
        q, k: queries and keys after a positive feature map such as ELU + 1, [B, T, H, K], K up to 256, float16,
            bfloat16, float32 or float64. A key of zero writes nothing.
        v: [B, T, HV, V] of the same dtype, V up to 256, HV a multiple of H: each q/k head serves HV/H consecutive value heads.
        u: penalty directions, of the dtype of k, [B, T, H, K] or [B, T, HV, K] (the layer's have length K^-0.5).
        ridge: penalty before the first token, positive.
        refresh_every: number of tokens between additions of `refresh` to A's diagonal, or None.
        refresh: number that is added to A's diagonal, at least 0.
        eps: smallest divisor, positive.
        initial_state: (S [N, HV, K, V], A [N, HV, K, K] symmetric positive definite, z [N, HV, K], number of tokens read so
            far, int64 [N]) before the first token; (0, I / ridge, 0, 0) when None. N is B, or the number of packed sequences.
        output_final_state: whether to return (S, A, z, count) after the last token.
        cu_seqlens: int32 or int64 [N+1], cumulative lengths of sequences packed into one row (B = 1).
        backend: "reference" (loop over tokens), "torch" (chunkwise, exact), "triton" (kernels; not in float64, at most 128
            channels) or "auto": kernels on CUDA where they serve, else the chunkwise form.

    Returns:
        o [B, T, HV, V] in v's dtype, and (S, A, z) in float32 (float64 for float64 inputs) with count in int64, or None.

    Raises:
        ValueError: a shape, dtype, device, option, cu_seqlens or backend that does not fit; the message says which.
        TypeError: an argument of the wrong kind.
    """
    options = {"ridge": ridge, "refresh_every": refresh_every, "refresh": refresh, "eps": eps}
    return call(SPEC, (q, k, v, u), options, initial_state, output_final_state, cu_seqlens, backend)
