"""Gains of writes and keys that are read, as some delta rules have them, by one kernel where no gradient is needed."""

from __future__ import annotations

import torch
from torch import Tensor

from ...kernels.availability import takes_rows
from ..framework.few_tokens import needs_gradient

__all__ = ["read_keys", "takes_delta_writes", "write_gain"]


def takes_delta_writes(k: Tensor, *others: Tensor | None, backend: str = "auto") -> bool:
    """Whether the kernels serve keys k [B, T, H, K] with these other tensors: no gradients, no graph that is traced, not in
    float64."""
    given = {str(place): x for place, x in enumerate((k, *others)) if x is not None}
    return (
        not torch.compiler.is_compiling()
        and takes_rows(backend, k)
        and not any(x.dtype == torch.float64 for x in given.values())
        and not needs_gradient(given)
    )


def write_gain(beta: Tensor, k: Tensor, w: Tensor, g: Tensor | None, form: str) -> Tensor:
    r"""The factor of each write [B, T, G] in float32, for tensors that `takes_delta_writes` allows.

    Args:
        beta: gains [B, T, G].
        k, w: keys that are read and written, [B, T, H or G, K].
        g: log decays [B, T, G]; None for none.
        form: how it follows from beta, the overlap m = k.w and the decay a: "longhorn" beta / (1 + beta m), "fading"
            beta / (a + beta m), "unit" beta / m, "damped" beta / (1 + m), "exact" (1 - exp(-beta m)) / m, or "nlms" 1 / m.
            Divisors without the term 1 are at least 1e-6.
    """
    from ...kernels.pointwise.delta_writes import write_gain

    return write_gain(beta, k, w, g, form)


def read_keys(
    k: Tensor, heads: int, *, q: Tensor | None = None, correction: Tensor | None = None, share: Tensor | None = None,
    g: Tensor | None = None, least: float = 0.0,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:  # fmt: skip
    r"""Keys with which a decayed memory answers as a share of the memory before does, and queries moved away from the key, for
    tensors that `takes_delta_writes` allows.

    $$\mathrm{read} = \mathrm{sigmoid}(\mathrm{share})\, e^{-g}\, k, \qquad q - \mathrm{correction}\, k$$

    Args:
        k: keys [B, T, H, K].
        heads: value heads G, a multiple of H.
        q, correction: queries [B, T, H, K] and one number per head [H], or None for both.
        share: one number per value head [G]; None for all.
        g: log decays [B, T, G]; None for none.
        least: a log decay below it counts as it.

    Returns:
        The keys [B, T, G, K], None without share and g; the queries, None without q; and the log decays as they count in float32,
        None without g.
    """
    from ...kernels.pointwise.delta_writes import read_keys

    return read_keys(k, q, g, share, correction, heads, least)
