"""The closed loop of Comba: writes correct a part of what the memory answered, and queries are moved away from the key."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..ops.authoring import expand_heads
from .initialization import OwnInitialValues
from .norms import at_least_float32

__all__ = ["ClosedLoop"]

# The key that is read is divided by the decay. A decay below exp(-10) counts as that, so that float16 can hold the quotient.
SMALLEST_LOG_DECAY = -10.0


class ClosedLoop(OwnInitialValues):
    """b = sigmoid(share), one per value head, which begins at sigmoid(1) as released, and d = correction, one per q/k head."""

    _no_weight_decay = ("share", "correction")

    def __init__(self, key_heads: int, value_heads: int, state_feedback: bool, output_correction: float | None) -> None:
        super().__init__()
        self.first_correction = output_correction
        self.share = nn.Parameter(torch.empty(value_heads)) if state_feedback else None
        self.correction = nn.Parameter(torch.empty(key_heads)) if output_correction is not None else None
        self.reset_parameters()

    def initial_values(self) -> dict[str, Tensor]:
        first = {"share": 1.0, "correction": self.first_correction}
        return {name: torch.full_like(parameter, first[name] or 0.0) for name, parameter in self.named_parameters()}

    def forward(
        self, q_BTHK: Tensor, k_BTHK: Tensor, g_BTG: Tensor | None
    ) -> tuple[Tensor, tuple[Tensor, Tensor] | None, Tensor | None]:
        """Queries q - d k; the keys that are read and those that are written [B, T, G, K], None where a write corrects the whole
        answer; and the log decay that belongs to them."""
        if self.correction is not None:
            q_BTHK = (q_BTHK - at_least_float32(self.correction)[:, None] * k_BTHK).to(q_BTHK.dtype)
        if self.share is None:
            return q_BTHK, None, g_BTG
        k_BTGK = expand_heads(k_BTHK, len(self.share))
        read_BTGK, g_BTG = self._read_keys(k_BTGK, self.share, g_BTG)
        return q_BTHK, (read_BTGK, k_BTGK), g_BTG

    def _read_keys(self, k_BTGK: Tensor, share_G: Tensor, g_BTG: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """b k / a, whose answer by the decayed memory a S is b S^T k, and the log decay, cut off where it is too small."""
        g_BTG = None if g_BTG is None else g_BTG.clamp_min(SMALLEST_LOG_DECAY)
        factor = torch.sigmoid(at_least_float32(share_G))
        if g_BTG is not None:
            factor = factor * (-g_BTG).exp()
        return (at_least_float32(k_BTGK) * factor[..., None]).to(k_BTGK.dtype), g_BTG
