"""Lattice and output-normalised test-time training, with the state updated in place."""

from __future__ import annotations

from torch import Tensor

from ..framework.decode import update_state
from ..lattice import SPEC as LATTICE
from ..lattice import lattice
from ..output_normalized_ttt import SPEC as OUTPUT_NORMALIZED_TTT
from ..output_normalized_ttt import output_normalized_ttt

__all__ = ["lattice_", "output_normalized_ttt_"]


def lattice_(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gamma: Tensor,
    *,
    objective: str = "decode",
    decay: Tensor | None = None,
    normalize: bool = True,
    l1: float = 0.0,
    state: Tensor,
    state_indices: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    backend: str = "auto",
) -> Tensor:
    r"""Read at most 16 tokens with `lattice` and update the slots in place, without gradients.

    $$s_i \leftarrow d_t s_i - \gamma_t\, c_i\, \frac{h - \phi_i (\phi_i \cdot h)}{|s_i|}, \qquad
      s_i \leftarrow s_i / |s_i| \text{ if normalize}, \qquad o_t = S_t^\top q_t$$

    Args:
        q, k, v, gamma, objective, decay, normalize, l1: as for `lattice`: [B, T, ...] with T at most 16.
        state: S [N, HV, K, V], otherwise as for `linear_attention_`. Slots of zeros stay zeros: start with the first K rows of
            the identity, as `lattice` does.
        state_indices, cu_seqlens, backend: as for `linear_attention_`.

    Returns:
        o [B, T, HV, V] in v's dtype.

    Raises:
        ValueError: more than 16 tokens; an input or a state that requires a gradient outside torch.no_grad(); a shape, dtype,
            device, objective, decay, l1, state_indices, cu_seqlens or backend that does not fit.
        TypeError: an argument of the wrong kind.
    """
    return update_state(
        LATTICE, lattice, (q, k, v, gamma, decay), {"objective": objective, "normalize": normalize, "l1": l1},
        state=state, state_indices=state_indices, cu_seqlens=cu_seqlens, backend=backend,
    )  # fmt: skip


def output_normalized_ttt_(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gamma: Tensor,
    *,
    state: Tensor,
    state_indices: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    backend: str = "auto",
) -> Tensor:
    r"""Read at most 16 tokens with `output_normalized_ttt` and update the state in place, without gradients.

    $$z = S_{t-1}^\top k_t, \qquad e = \frac{z}{|z|} - v_t, \qquad o_t = S_t^\top q_t, \qquad
      S_t = S_{t-1} - \gamma_t\, k_t \Big(\big(I - \tfrac{z z^\top}{|z|^2}\big) \frac{e}{|z|}\Big)^\top$$

    Args:
        q, k, v, gamma: as for `output_normalized_ttt`: [B, T, ...] with T at most 16.
        state, state_indices, cu_seqlens, backend: as for `linear_attention_`.

    Returns:
        o [B, T, HV, V] in v's dtype.

    Raises:
        ValueError: more than 16 tokens; an input or a state that requires a gradient outside torch.no_grad(); a shape, dtype,
            device, state_indices, cu_seqlens or backend that does not fit.
        TypeError: an argument of the wrong kind.
    """
    return update_state(
        OUTPUT_NORMALIZED_TTT, output_normalized_ttt, (q, k, v, gamma), {},
        state=state, state_indices=state_indices, cu_seqlens=cu_seqlens, backend=backend,
    )  # fmt: skip
