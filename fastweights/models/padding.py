"""Padded batches as packed rows: no layer ever sees a padding token."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

__all__ = ["Padding"]


class Padding:
    """The places of the tokens in a padded batch (padding may be on either side, or in between).

    Args:
        mask: [B, T], nonzero for tokens.

    Attributes:
        cu_seqlens: int64 [B+1], cumulative numbers of tokens.
    """

    def __init__(self, mask: Tensor) -> None:
        self.tokens = mask.bool()
        self.cu_seqlens = F.pad(self.tokens.sum(1).cumsum(0), (1, 0))

    @classmethod
    def of(cls, attention_mask: Tensor | None, batch: int, time: int) -> Padding | None:
        """The padding of the last `time` tokens under a mask that may cover earlier, cached ones too; None for none."""
        if attention_mask is None:
            return None
        if attention_mask.ndim != 2 or attention_mask.shape[0] != batch or attention_mask.shape[1] < time:
            raise ValueError(
                f"attention_mask must be [{batch}, at least {time}], 1 for tokens and 0 for padding, "
                f"got shape {list(attention_mask.shape)}"
            )
        mask = attention_mask[:, attention_mask.shape[1] - time :]
        return None if mask.all() else cls(mask)

    def pack(self, x_BTD: Tensor) -> Tensor:
        """[B, T, D] -> [1, tokens, D]"""
        return x_BTD[self.tokens.to(x_BTD.device)][None]

    def unpack(self, x_1TD: Tensor) -> Tensor:
        """[1, tokens, D] -> [B, T, D], zero at padding"""
        x_BTD = x_1TD.new_zeros(*self.tokens.shape, x_1TD.shape[2])
        return x_BTD.masked_scatter(self.tokens.to(x_BTD.device)[..., None], x_1TD)
