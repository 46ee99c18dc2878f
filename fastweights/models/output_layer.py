"""The output layer of a language model: logits, or the loss without the logits of all tokens."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..layers.wrapped import is_bare
from ..private_torch import hook_counts
from .loss import causal_lm_loss

__all__ = ["OutputLayer"]


class OutputLayer(nn.Linear):
    """`nn.Linear` that also computes the chunked loss, within its call: FSDP2 gathers the weight only during the call."""

    def forward(  # type: ignore[override]
        self,
        hidden_BTD: Tensor,
        labels_BT: Tensor | None = None,
        num_items_in_batch: int | Tensor | None = None,
        kept: slice | Tensor | None = None,
    ) -> Tensor | tuple[Tensor, Tensor | None]:
        """Logits. With labels the loss (see `causal_lm_loss`), and the logits of the positions `kept`, None where it is None."""
        if labels_BT is None:
            return super().forward(hidden_BTD)
        loss = causal_lm_loss(hidden_BTD, self.weight, labels_BT, num_items_in_batch)
        return loss, None if kept is None else super().forward(hidden_BTD[:, kept])

    @classmethod
    def sharing(cls, linear: Any) -> nn.Module:
        """An output layer with the parameters of a plain `nn.Linear`; another module as it is."""
        if not is_bare(linear, nn.Linear):
            return linear
        with torch.device("meta"):
            layer = cls(linear.in_features, linear.out_features, bias=linear.bias is not None)
        layer.weight, layer.bias = linear.weight, linear.bias
        return layer.train(linear.training)

    def is_unchanged(self) -> bool:
        """Whether nothing but FSDP2 has hooked or replaced its forward. Hooks of others expect logits. FSDP2 registers one hook
        before the forward and one after it."""
        own, (before, after, _) = 0, hook_counts(self)
        if before or after:
            from torch.distributed.fsdp import FSDPModule

            own = int(isinstance(self, FSDPModule))
        return self.bias is None and "forward" not in vars(self) and max(before, after) <= own
