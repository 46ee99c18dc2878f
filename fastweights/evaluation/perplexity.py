"""Perplexity by context length, read in blocks: a context of 100,000 tokens costs the memory of one block."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ..checks import LARGEST_COUNT, check_size, check_whole_number
from ..kinds import checked
from ..results import LengthPerplexity
from .causal_models import token_logits
from .divided import is_divided, read_divided
from .reading import check_lengths, check_model, evaluating, hidden_blocks

__all__ = ["LengthPerplexity", "perplexity_by_length", "text_windows"]


def perplexity_by_length(
    model: Any,
    documents: Iterable[Sequence[int] | np.ndarray | Tensor],
    lengths: Sequence[int],
    *,
    texts: int = 16,
    separator: int | None = None,
    stretch: int = 256,
    block: int = 512,
    batch_size: int = 1,
) -> list[LengthPerplexity]:
    """Perplexity of `model` at each of `lengths`, on the same texts, each read once up to the longest length.

    The texts are the beginnings of documents that have at least max(lengths) tokens. Where these are fewer than `texts`, the
    other documents are joined in order and cut into texts of that length: `joined` counts these texts, and their
    context then holds documents that have nothing to do with each other.

    The model reads a text in blocks through its cache, and a block's logits are gone before the next block is read. Memory is
    that of `batch_size` x `block` tokens plus one number per token, at any length (a softmax layer's cache grows with it).
    Under context parallelism (`fastweights.distributed.context_parallel`) all processes of the group call this with the same
    arguments, read a text whole, each a part of it, and get the same result.

    Args:
        model: a `FastWeightsForCausalLM` or another causal language model of transformers, in any mode; it is left in that mode.
        documents: token ids of one document each.
        lengths: tokens, each at least 2.
        texts: how many texts to read at most.
        separator: token to put between joined documents (the tokenizer's end of text); None for none.
        stretch: positions that `last_loss` is the mean over; all of them at lengths up to `stretch`.
        block: tokens to read at a time; under context parallelism those whose logits are computed at a time. The result does not
            depend on it but for rounding.
        batch_size: texts to read at a time.

    Returns:
        One entry per length, the shortest first.

    Raises:
        ValueError: lengths below 2, all documents together shorter than the longest length, token ids outside the model's
            vocabulary, a loss that is not finite.
    """
    for name, value in (("texts", texts), ("stretch", stretch), ("block", block), ("batch_size", batch_size)):
        check_size(name, value, high=LARGEST_COUNT)
    check_model(model)
    if separator is not None:
        check_whole_number("separator", separator, high=model.config.vocab_size - 1)
    lengths = check_lengths(lengths, 2)
    windows, joined = text_windows(documents, lengths[-1], count=texts, separator=separator)
    if windows.min() < 0 or windows.max() >= model.config.vocab_size:
        raise ValueError(
            f"documents must hold token ids from 0 to {model.config.vocab_size - 1}, the model's vocabulary, got "
            f"{int(windows.min())} to {int(windows.max())}; use the tokenizer that the model was trained with"
        )
    # At t, the loss of token t over all texts; nothing predicts token 0.
    summed = torch.zeros(lengths[-1], dtype=torch.float64)
    with evaluating(model):
        for rows in windows.split(batch_size):
            for start, losses in _losses(model, rows.to(model.device), block):
                summed[start : start + len(losses)] += losses
    if not summed.isfinite().all():
        position = int((~summed.isfinite()).nonzero()[0])
        raise ValueError(f"model must give finite losses, got {summed[position]} for the token at position {position}")

    def mean(first: int, end: int) -> float:
        return summed[first:end].sum().item() / (end - first) / len(windows)

    return [
        LengthPerplexity(
            length=length,
            loss=mean(1, length),
            last_loss=mean(max(1, length - stretch), length),
            texts=len(windows),
            joined=joined,
        )
        for length in lengths
    ]


def _losses(model: Any, ids_BT: Tensor, block: int) -> Iterable[tuple[int, Tensor]]:
    """Block by block: the position of its first predicted token, and the losses there, summed over the batch."""
    if is_divided(model):
        yield 1, read_divided(model, ids_BT[:, :-1], ids_BT[:, 1:], block).losses_BT.sum(0).cpu()
        return
    for start, hidden_BTD in hidden_blocks(model, ids_BT[:, :-1], block):
        logits = token_logits(model, hidden_BTD)
        target_BT = ids_BT[:, start + 1 : start + 1 + hidden_BTD.shape[1]]
        losses = F.cross_entropy(logits.flatten(0, 1), target_BT.flatten(), reduction="none")
        yield start + 1, losses.view(target_BT.shape).double().sum(0).cpu()


@checked
def text_windows(
    documents: Iterable[Sequence[int] | np.ndarray | Tensor],
    length: int,
    *,
    count: int,
    separator: int | None = None,
) -> tuple[Tensor, int]:
    """Up to `count` texts of `length` tokens, int64 [texts, length], and how many of them are joined documents.

    First come the beginnings of documents that are long enough, then cuts of all the others joined in their order, with
    `separator` between them. No further document is looked at once there are `count` long ones.

    Raises:
        ValueError: a document that is not a row of integers, or not one text in all.
    """
    texts: list[np.ndarray] = []
    short: list[np.ndarray] = []
    missing = count * length  # at most so many more tokens are joined: a large corpus is not kept whole
    tokens = 0
    for document in documents:
        row = np.asarray(document)
        if row.ndim != 1 or (row.size and not np.issubdtype(row.dtype, np.integer)):
            raise ValueError(
                f"documents must be rows of token ids (integers), got shape {list(row.shape)} of {row.dtype}; "
                "tokenize the text first"
            )
        tokens += row.size
        if row.size >= length:
            texts.append(row[:length].astype(np.int64))
            if len(texts) == count:
                break
        elif row.size and missing > 0:
            short.append(row.astype(np.int64))
            missing -= row.size
            if separator is not None:
                short.append(np.array([separator], dtype=np.int64))
    joined: list[np.ndarray] = []
    if short and len(texts) < count:
        row = np.concatenate(short)
        joined = [row[start : start + length] for start in range(0, row.size - length + 1, length)]
        joined = joined[: count - len(texts)]
    if not texts and not joined:
        raise ValueError(
            f"documents must hold at least {length} tokens, the longest length, got {tokens} in all; "
            "pass more text or shorter lengths"
        )
    return torch.from_numpy(np.stack(texts + joined)), len(joined)
