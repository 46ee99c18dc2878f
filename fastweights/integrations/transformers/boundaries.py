"""Where packed documents begin, for the layers of transformers up to 5.14, which pass only seq_idx to their convolution."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

__all__ = ["with_boundaries"]


def with_boundaries(original: Callable) -> Callable:
    """The forward of a decoder layer, which gets seq_idx from cumulative lengths. That waits for a GPU.

    It raises ValueError where the layer passes no boundaries at all to its convolution, as documents would see each other.
    """

    def forward(self: Any, *arguments: Any, **options: Any) -> Any:
        memory, ends = getattr(self, "linear_attn", None), options.get("cu_seq_lens_q")
        if memory is not None and ends is not None and len(ends) > 2:
            kind: Any = type(memory)
            if not _takes_boundaries(kind) or "causal_conv1d_fn" not in vars(memory):
                raise ValueError(
                    f"cu_seq_lens_q must be None for {kind.__name__} of this version of transformers, which passes no "
                    "boundaries to its convolution: pass each document as a row of its own, or install transformers 5.15 or later"
                )
            if options.get("seq_idx") is None:
                options["seq_idx"] = numbers_of_documents(ends)
        return original(self, *arguments, **options)

    return forward


def numbers_of_documents(cu_seqlens: Tensor) -> Tensor:
    """[1, T]: of every token the number of its document, from cumulative lengths [N + 1]."""
    number = torch.arange(len(cu_seqlens) - 1, dtype=torch.int32, device=cu_seqlens.device)
    return number.repeat_interleave(cu_seqlens.diff())[None]


@lru_cache
def _takes_boundaries(layer: Any) -> bool:
    """Whether the forward of a memory layer takes seq_idx and its like, as further keywords: before 5.9 it does not."""
    parameters = inspect.signature(layer.forward).parameters.values()
    return any(one.kind is one.VAR_KEYWORD for one in parameters)
