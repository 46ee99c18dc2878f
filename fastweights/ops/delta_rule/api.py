"""The delta rule: a fast-weight memory that corrects what it answers to a key."""

from __future__ import annotations

from torch import Tensor

from ..framework.checks import (
    Shapes,
    check_decay,
    check_flag,
    check_gate,
    check_qkv,
    check_scale,
    check_states,
    check_tokens,
)
from ..framework.run import chunkwise, compute_dtype, kernels, per_sequence, run, select_backend
from ..framework.sequences import check_cu_seqlens
from .chunked import chunked
from .kernels import by_kernels
from .reference import reference

__all__ = ["delta_rule"]

IMPLEMENTATIONS = {"reference": per_sequence(reference), "torch": chunkwise(chunked), "triton": kernels(by_kernels)}


def delta_rule(
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
    r"""Correct the memory's answer to k towards v, writing along a key that may differ from the one read.

    $$S' = \mathrm{Diag}(a_t)\, S_{t-1}, \qquad S_t = S' + \beta_t\, w_t (v_t - S'^\top k_t)^\top, \qquad
      o_t = S_t^\top (\mathrm{scale}\; q_t), \qquad a_t = e^{g_t}$$

    w = k gives DeltaNet (no g; Schlag et al. 2021, Yang et al. 2024), Gated DeltaNet (one decay a head; Yang et al. 2025)
    and Kimi Delta Attention (one a key channel; Kimi Team 2025). A write key w of its own is how preconditioning
    (Preconditioned DeltaNet, section 3), variational linear attention and least squares enter.

    Args:
        q, k: [B, T, H, K], K up to 256, float16, bfloat16, float32 or float64. Keys are taken as they are: unit length
            keeps the memory stable for beta in [0, 2].
        v: [B, T, HV, V] of the same dtype, V up to 256, HV a multiple of H: each q/k head serves HV/H value heads in a row.
        beta: gain, [B, T, HV] (or H heads, repeated likewise). Any float dtype.
        g: log decay (natural logarithm, at most 0; -inf forgets everything), None, [B, T, HV] or [B, T, HV, K].
        write_key: w, of the shape and dtype of k, or [B, T, HV, K] with one a value head; k when None.
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
    sizes = check_delta(q, k, v, beta, g, write_key)
    scale = check_scale(scale, sizes.key)
    check_flag("output_final_state", output_final_state)
    sequences = check_cu_seqlens(cu_seqlens, sizes.batch, sizes.time)
    shape = (sequences.count, sizes.heads, sizes.key, sizes.value)
    chosen = select_backend("delta_rule", backend, IMPLEMENTATIONS, v)
    return run(
        chosen,
        tokens={"q": q, "k": k, "v": v, "beta": beta, "g": g, "write_key": write_key},
        states=check_states(initial_state, {"S": shape}, v, compute_dtype(v), zeros=not isinstance(chosen, kernels)),
        sequences=sequences,
        heads=sizes.heads,
        columns=("v", "S"),
        scale=scale,
        out_dtype=v.dtype,
        output_final_state=output_final_state,
    )


def check_delta(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, g: Tensor | None, write_key: Tensor | None = None
) -> Shapes:
    """The tokens' inputs that every form of the delta rule has."""
    sizes = check_qkv(q, k, v)
    check_gate("beta", beta, sizes, v)
    check_decay("g", g, sizes, v, per_channel=True)
    if write_key is not None:
        check_tokens(k=k, write_key=write_key)
        check_gate("write_key", write_key, sizes, v, sizes.key)
    return sizes
