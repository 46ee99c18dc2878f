"""The memory of both Palimpsa layers, with importances or, without metaplasticity, the linear attention that is left."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from ..ops import linear_attention, palimpsa

__all__ = ["read_posterior"]


def read_posterior(
    q_BTHK: Tensor,
    k_BTHK: Tensor,
    write_BTGV: Tensor,
    beta_BTGV: Tensor | None,
    g_BTG: Tensor,
    *,
    prior: float,
    scale: float,
    memory: Mapping[str, Tensor],
    output_final_state: bool,
    cu_seqlens: Tensor | None,
    backend: str,
) -> tuple[Tensor, dict[str, Tensor | None]]:
    """Answers [B, T, G, V] and the memory to go on from: M and J, or S when beta is None, which stands for beta = 0."""
    if beta_BTGV is None:
        o_BTGV, S = linear_attention(
            q_BTHK, k_BTHK, write_BTGV, g_BTG, scale=scale / prior, initial_state=memory.get("S"),
            output_final_state=output_final_state, cu_seqlens=cu_seqlens, backend=backend,
        )  # fmt: skip
        return o_BTGV, {"S": S}
    o_BTGV, state = palimpsa(
        q_BTHK, k_BTHK, write_BTGV, beta_BTGV, g_BTG, prior=prior, scale=scale,
        initial_state=(memory["M"], memory["J"]) if memory else None,
        output_final_state=output_final_state, cu_seqlens=cu_seqlens, backend=backend,
    )  # fmt: skip
    M, J = state or (None, None)
    return o_BTGV, {"M": M, "J": J}
