"""The delta rule: a fast-weight memory that corrects what it answers to a key."""

from __future__ import annotations

from torch import Tensor

from ..framework import roles
from ..framework.call import call, chunkwise, kernels, op, recurrent, sequential
from ..framework.passing import Passing, Transition
from ..framework.spec import Case, OpSpec, Output, State
from ..shared.memory_kernels import MEMORY_DECODE, MEMORY_KERNELS
from .forms import chunked, reference

__all__ = ["delta_rule"]


def delta_macs(K: int, V: int, C: int = 64) -> float:
    return 3 * K * V + C * (K + V) + C**2 / 6


SPEC = OpSpec(
    name="delta_rule",
    inputs={
        "q": roles.QUERY, "k": roles.KEY, "v": roles.VALUE, "beta": roles.GAIN,
        "g": roles.optional(roles.CHANNEL_LOG_DECAY), "write_key": roles.optional(roles.WRITE_KEY),
    },
    states={"S": State("GKV", by_column=True)},
    outputs={"o": Output("GV")},
    options={"scale": roles.SCALE},
    backends={"reference": sequential(reference), "torch": chunkwise(chunked), "triton": kernels(MEMORY_KERNELS)},
    recurrent=recurrent(MEMORY_DECODE),
    cases={
        f"{name}{suffix}": Case(given={**g, **write})
        for name, g in roles.DECAY_FORMS.items()
        for suffix, write in {"": {}, "-write": {"write_key": "HK"}}.items()
    },
    equation="S' = a S; S = S' + beta w (v - S'^T k)^T; o = S^T q",
    macs=delta_macs,
    passing=Passing(states={"S": Transition()}),
)  # fmt: skip


@op(SPEC)
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
    r"""Correct the memory's answer to k towards v, and write along a key that may differ from k.

    $$S' = \mathrm{Diag}(a_t)\, S_{t-1}, \qquad S_t = S' + \beta_t\, w_t (v_t - S'^\top k_t)^\top, \qquad
      o_t = S_t^\top (\mathrm{scale}\; q_t), \qquad a_t = e^{g_t}$$

    w = k gives DeltaNet (no g; Schlag et al. 2021, Yang et al. 2024), Gated DeltaNet (one decay per head; Yang et al. 2025)
    and Kimi Delta Attention (one per key channel; Kimi Team 2025). Preconditioning (Preconditioned DeltaNet,
    section 3), variational linear attention and recursive least squares use a separate write key w.

    Args:
        q, k: [B, T, H, K], K up to 256, float16, bfloat16, float32 or float64. Keys are not normalised here: unit
            length keeps the memory stable for beta in [0, 2].
        v: [B, T, HV, V] of the same dtype, V up to 256, HV a multiple of H: each q/k head serves HV/H consecutive value heads.
        beta: gain, [B, T, HV] (or H heads, repeated likewise). Any float dtype.
        g: log decay (natural logarithm, at most 0; -inf forgets everything), None, [B, T, HV] or [B, T, HV, K]
            (or H heads, repeated likewise). Any float dtype.
        write_key: w, of the shape and dtype of k, or [B, T, HV, K] with one per value head; k when None.
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
    return call(
        SPEC, (q, k, v, beta, g, write_key), {"scale": scale}, initial_state, output_final_state, cu_seqlens, backend
    )  # fmt: skip
