"""What every sequence mixer offers, whatever its memory."""

from __future__ import annotations

from torch import Tensor, nn

from .cache import LayerCache

__all__ = ["Mixer"]


class Mixer(nn.Module):
    """A causal map of sequences of hidden states, with a memory that can be carried from call to call."""

    def forward(self, x_BTD: Tensor, cache: LayerCache | None = None, cu_seqlens: Tensor | None = None) -> Tensor:
        """Mix along time.

        Args:
            x_BTD: hidden states [B, T, D], T >= 1.
            cache: empty, or of an earlier call whose sequences x continues; brought up to date. None starts anew.
            cu_seqlens: int32 or int64 [N+1], cumulative lengths of N sequences packed into one row (B = 1). They do not see
                each other; a cache then holds N sequences.

        Returns:
            y [B, T, D] in the layer's dtype.

        Raises:
            ValueError: an input that does not fit.
        """
        raise NotImplementedError

    def state_size(self, length: int = 1) -> int:
        """Numbers a sequence holds in memory after `length` tokens. The few inputs that short convolutions keep are not
        counted."""
        raise NotImplementedError
