"""Lattice: memory slots that take in only what is orthogonal to what they hold."""

from __future__ import annotations

import torch
from torch import Tensor

from ..framework import roles
from ..framework.call import call, chunkwise, defer_decode, defer_family, kernels, op, recurrent, sequential
from ..framework.checks import Sizes
from ..framework.spec import Case, Choice, Flag, Number, OpSpec, Output, State
from .forms import chunked, reference

__all__ = ["lattice"]

OBJECTIVES = ("decode", "encode", "similarity")
KERNELS = defer_family("sphere.rule", "SPHERE", "SphereInputs", objective="decode", normalize=True)


def orthonormal_slots(sizes: Sizes, count: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """The first K rows of the identity, [count, G, K, V]."""
    if sizes.K > sizes.V:
        raise ValueError(
            f"initial_state must be given where there are more slots (k has {sizes.K} channels) than value channels "
            f"({sizes.V}): so many rows cannot be orthonormal; pass [{count}, {sizes.G}, {sizes.K}, {sizes.V}]"
        )
    return torch.eye(sizes.K, sizes.V, dtype=dtype, device=device).expand(count, sizes.G, -1, -1)


SPEC = OpSpec(
    name="lattice",
    inputs={
        "q": roles.QUERY, "k": roles.KEY, "v": roles.JOINT_VALUE, "gamma": roles.GAIN,
        "decay": roles.optional(roles.KEPT),
    },
    states={"S": State("GKV", first=orthonormal_slots, begins="the first K rows of the identity")},
    outputs={"o": Output("GV")},
    options={"objective": Choice(OBJECTIVES), "normalize": Flag(), "l1": Number(low=0)},
    backends={
        "reference": sequential(reference), "torch": chunkwise(chunked),
        "triton": kernels(KERNELS, only={"l1": (0.0,)}, widest=128),
    },
    recurrent=recurrent(defer_decode("lattice")),
    cases={
        **{
            f"{objective}{name}": Case(given=given, options={"objective": objective, **options}, wide_values=True)
            for objective in OBJECTIVES
            for name, given, options in [
                ("", {}, {}), ("-decay", {"decay": "G"}, {}), ("-free", {}, {"normalize": False}),
            ]
        },
        "decode-l1": Case(options={"l1": 0.02}, wide_values=True),
    },
    equation="s_i = d s_i - gamma c_i (h - phi_i (phi_i . h)) / |s_i|; s_i = s_i / |s_i|; o = S^T q",
)  # fmt: skip


@op(SPEC)
def lattice(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gamma: Tensor,
    *,
    objective: str = "decode",
    decay: Tensor | None = None,
    normalize: bool = True,
    l1: float = 0.0,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    backend: str = "auto",
) -> tuple[Tensor, Tensor | None]:
    r"""One gradient step per token on K memory slots of V numbers, the rows s_i of S, read by their directions.

    With $\phi_i = s_i / |s_i|$ the directions and $\Phi$ their matrix [K, V], every slot moves only orthogonally to itself:

    $$s_i \leftarrow d_t s_i - \gamma_t\, c_i\, \frac{h - \phi_i (\phi_i \cdot h)}{|s_i|}, \qquad
      s_i \leftarrow s_i / |s_i| \text{ if normalize}, \qquad o_t = S_t^\top q_t$$

    - decode: $h = \Phi^\top k_t - v_t,\; c = k_t$, from $|\Phi^\top k - v|^2 / 2$ (Karami and Mirrokni 2025, eq. 7);
    - encode: $h = v_t,\; c = \Phi v_t - k_t$, from $|\Phi v - k|^2 / 2$ (eq. 10);
    - similarity: $h = -v_t,\; c = k_t$, from $-\langle \Phi v, k \rangle$ (eq. 12).

    d is the forget gate (eq. 16) and normalisation the projection onto the unit sphere (eq. 14). l1 > 0 adds an l1 penalty on S
    to the losses above: before normalisation, the proximal step of eq. 18 moves every number of S towards 0 by gamma_t l1 and
    not past 0.

    A slot of zeros has no direction: it answers nothing, is not written and stays zero. Any other slot keeps a direction: a decay
    below the resolution of the dtype counts as that resolution, and without normalisation no slot gets shorter than 1e-6.

    Args:
        q, k: [B, T, H, K], K up to 256, float16, bfloat16, float32 or float64; no factor is applied to q.
        v: [B, T, HV, V] of the same dtype, V up to 256, HV a multiple of H: each q/k head serves HV/H consecutive value heads.
        gamma: step size, [B, T, HV] (or H heads, repeated likewise). Any float dtype.
        objective: "decode", "encode" or "similarity".
        decay: d, the fraction of a slot that is kept, in [0, 1] (not its logarithm), of the shape of gamma; 1 when None.
        normalize: whether slots are brought back to length 1 after every step.
        l1: strength of the l1 penalty, at least 0.
        initial_state: S before the first token, [N, HV, K, V]; the first K rows of the identity when None, which needs
            K <= V. N is B, or the number of packed sequences.
        output_final_state: whether to return S after the last token.
        cu_seqlens: int32 or int64 [N+1], cumulative lengths of sequences packed into one row (B = 1).
        backend: "reference" (loop over tokens), "torch" (chunkwise, exact), "triton" (kernels; not in float64, not with l1, K and
            V up to 128) or "auto": kernels on CUDA where they serve, else the chunkwise form.

    Returns:
        o [B, T, HV, V] in v's dtype, and S [N, HV, K, V] in float32 (float64 for float64 inputs) or None.

    Raises:
        ValueError: a shape, dtype, device, objective, decay, l1, cu_seqlens or backend that does not fit, or K > V without an
            initial_state; the message says which.
        TypeError: an argument of the wrong kind.
    """
    options = {"objective": objective, "normalize": normalize, "l1": l1}
    return call(SPEC, (q, k, v, gamma, decay), options, initial_state, output_final_state, cu_seqlens, backend)
