"""Lattice: memory slots that take in only what is orthogonal to what they hold."""

from __future__ import annotations

import torch
from torch import Tensor

from ..framework.checks import Shapes, check_flag, check_gate, check_number, check_qkv, check_states, values_can_be_read
from ..framework.run import chunkwise, compute_dtype, per_sequence, run, select_backend
from ..framework.sequences import check_cu_seqlens
from .chunked import chunked
from .reference import reference

__all__ = ["lattice"]

IMPLEMENTATIONS = {"reference": per_sequence(reference), "torch": chunkwise(chunked)}
OBJECTIVES = ("decode", "encode", "similarity")


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
    r"""One gradient step a token on K memory slots of V numbers, the rows s_i of S, seen through their directions.

    With $\phi_i = s_i / |s_i|$ the directions and $\Phi$ their matrix [K, V], every slot moves only across itself:

    $$s_i \leftarrow d_t s_i - \gamma_t\, c_i\, \frac{h - \phi_i (\phi_i \cdot h)}{|s_i|}, \qquad
      s_i \leftarrow s_i / |s_i| \text{ if normalize}, \qquad o_t = S_t^\top q_t$$

    - decode: $h = \Phi^\top k_t - v_t,\; c = k_t$, from $|\Phi^\top k - v|^2 / 2$ (Karami and Mirrokni 2025, eq. 7);
    - encode: $h = v_t,\; c = \Phi v_t - k_t$, from $|\Phi v - k|^2 / 2$ (eq. 10);
    - similarity: $h = -v_t,\; c = k_t$, from $-\langle \Phi v, k \rangle$ (eq. 12).

    d is the forget gate (eq. 16) and normalisation the projection onto the unit sphere (eq. 14). With l1 > 0 the step is
    followed, before normalisation, by the proximal step of eq. 18, which pulls every number of S towards 0 by gamma_t l1
    and not beyond: an l1 penalty on S beside the losses above.

    A slot of zeros has no direction: it answers nothing, is not written and stays zero. Any other slot keeps one: a decay
    below the resolution of the dtype counts as that resolution, and without normalisation no slot gets shorter than 1e-6.

    Args:
        q, k: [B, T, H, K], K up to 256, float16, bfloat16, float32 or float64; no factor is applied to q.
        v: [B, T, HV, V] of the same dtype, V up to 256, HV a multiple of H: each q/k head serves HV/H value heads in a row.
        gamma: step size, [B, T, HV] (or H heads, repeated likewise). Any float dtype.
        objective: "decode", "encode" or "similarity".
        decay: d, what is kept of a slot, a number in [0, 1] (not its logarithm), of the shape of gamma; all when None.
        normalize: whether slots are brought back to length 1 after every step.
        l1: strength of the l1 penalty, at least 0.
        initial_state: S before the first token, [N, HV, K, V]; the first K rows of the identity when None, which needs
            K <= V. N is B, or the number of packed sequences.
        output_final_state: whether to return S after the last token.
        cu_seqlens: int32 or int64 [N+1], cumulative lengths of sequences packed into one row (B = 1).
        backend: "reference" (loop over tokens), "torch" (chunkwise, exact) or "auto".

    Returns:
        o [B, T, HV, V] in v's dtype, and S [N, HV, K, V] in float32 (float64 for float64 inputs) or None.

    Raises:
        ValueError: a shape, dtype, device, objective, decay, l1, cu_seqlens or backend that does not fit, or K > V without an
            initial_state; the message says which.
        TypeError: an argument of the wrong kind.
    """
    sizes = check_qkv(q, k, v)
    check_gate("gamma", gamma, sizes, v)
    if decay is not None:
        check_gate("decay", decay, sizes, v)
        check_fraction("decay", decay)
    if objective not in OBJECTIVES:
        raise ValueError(f"objective must be one of {', '.join(OBJECTIVES)}, got {objective!r}")
    check_flag("normalize", normalize)
    l1 = check_number("l1", l1, low=0)
    check_flag("output_final_state", output_final_state)
    sequences = check_cu_seqlens(cu_seqlens, sizes.batch, sizes.time)
    if initial_state is None:
        initial_state = first_slots(sizes, sequences.count, v)
    shape = (sequences.count, sizes.heads, sizes.key, sizes.value)
    return run(
        select_backend("lattice", backend, IMPLEMENTATIONS, v),
        tokens={"q": q, "k": k, "v": v, "gamma": gamma, "decay": decay},
        states=check_states(initial_state, {"S": shape}, v, compute_dtype(v)),
        sequences=sequences,
        heads=sizes.heads,
        columns=(),
        out_dtype=v.dtype,
        output_final_state=output_final_state,
        objective=objective,
        normalize=normalize,
        l1=l1,
    )


def check_fraction(name: str, x: Tensor) -> None:
    if values_can_be_read(x) and (((x < 0) | (x > 1)) & x.isfinite()).any():
        raise ValueError(f"{name} must be between 0 and 1, got {x.min():.4g} to {x.max():.4g}; pass sigmoid(...)")


def first_slots(sizes: Shapes, count: int, like: Tensor) -> Tensor:
    """Orthonormal rows, [count, heads, K, V]."""
    if sizes.key > sizes.value:
        raise ValueError(
            f"initial_state must be given where there are more slots (k has {sizes.key} channels) than value channels "
            f"({sizes.value}): so many rows cannot be orthonormal; pass [{count}, {sizes.heads}, {sizes.key}, {sizes.value}]"
        )
    rows = torch.eye(sizes.key, sizes.value, dtype=compute_dtype(like), device=like.device)
    return rows.expand(count, sizes.heads, -1, -1)
