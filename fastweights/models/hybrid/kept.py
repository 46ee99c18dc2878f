"""Attention modules of transformers whose attention is kept, and in which the documents of packed rows do not see each other.

transformers would mask all tokens of a row against all others. Here attention is computed within each document, by the function
of our own softmax layers.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from ...layers.attention import Logits, attend_documents
from ...ops.authoring import product_dtype
from ...private_huggingface import with_attention
from ..rows import Rows

__all__ = ["KeptAttention", "keep_attention", "leave_out_mask"]

PACKED = "fastweights_packed"  # what transformers knows our attention function by


class KeptAttention:
    """In front of an attention class of transformers, whose own forward finds its attention function by the name in `config`.

    Attributes:
        config: the model's own, and during a call with packed rows a copy with the name of ours.
    """

    config: Any
    whole_config: Any
    packed_config: Any

    def forward(self, *args: Any, packed_rows: Rows | None = None, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        """As transformers' own. packed_rows: how documents lie in the rows; None where each row is one, or a mask says it."""
        self.config = self.whole_config if packed_rows is None else self.packed_config
        given = {} if packed_rows is None else {"packed_rows": packed_rows}
        return super().forward(*args, **kwargs, **given)  # type: ignore[misc]


def keep_attention(attention: Any, kind: type[KeptAttention], config: Any) -> nn.Module:
    """The attention module of a model with this configuration, as one of a `KeptAttention` class of its family. It is changed in
    place, so that its parameters stay as they are."""
    attention.__class__ = kind
    attention.whole_config, attention.packed_config = config, with_attention(config, PACKED, {})
    attention.config = config
    return attention


def leave_out_mask(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """A hook before the forward of the decoder: with packed rows no layer reads a mask. transformers takes a mask of four
    dimensions as it is, where it would make one of all tokens times all tokens, and wait for the GPU, without it."""
    rows = kwargs.get("packed_rows")
    if rows is not None:
        kwargs = {**kwargs, "attention_mask": torch.ones((1, 1, 1, 1), dtype=torch.bool, device=rows.cu_seqlens.device)}
    return args, kwargs


def attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor,
    *,
    scaling: float,
    packed_rows: Rows,
    sliding_window: int | None = None,
    softcap: float | None = None,
    max_length_q: int | None = None,
    **unused: Any,
) -> tuple[Tensor, None]:
    """The attention function: q [B, H, T, K], and k, v [B, H', T, K] with H' a divisor of H, to answers [B, T, H, K].

    max_length_q: a bound of the documents' lengths.
    """
    q, k, v = (x.to(product_dtype(x)).transpose(1, 2).flatten(0, 1)[None] for x in (query, key, value))
    assert packed_rows.cu_seqlens is not None
    edges = packed_rows.cu_seqlens.to(q.device)
    if module.whole_config._attn_implementation == "sdpa":
        softcap = None  # which earlier versions of transformers leave out there; later ones refuse it
    o_1THK = attend_documents(q, k, v, edges, sliding_window, Logits(scaling, softcap), max_length_q)
    return o_1THK.unflatten(1, (query.shape[0], query.shape[2]))[0], None


AttentionInterface.register(PACKED, attend)
