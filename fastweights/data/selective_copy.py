"""Selective copying: a few tokens among many that mean nothing, to be repeated in their order."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from ._draws import Draws
from .registry import register_task
from .separated import PADDING, SEPARATOR, RepeatedTokens
from .task import IGNORE_INDEX

__all__ = ["SelectiveCopy"]


@register_task
@dataclass(frozen=True, kw_only=True)
class SelectiveCopy(RepeatedTokens):
    """n tokens at random places among padding, then n separators, each to be answered by the next of the tokens.

        PAD x1 PAD PAD x2 ... xn PAD | SEP SEP ... SEP        label at the i-th SEP: x_i

    `pairs` is n. T = 2n, where nothing stands between the tokens, or longer: T - n positions hold the tokens and
    padding (token 0), all choices of places equally likely. The tokens are independent and uniform over 2 .. V - 1, so
    they may repeat. The separators (token 1) say nothing of the answers: a model must keep the order by itself. What
    is skipped depends on the token, so a memory with fixed dynamics cannot solve the task.

    Source: Gu and Dao 2023, Mamba, section 3.1 and 4.1.1 (16 tokens of a vocabulary of 16 in sequences of 4096).
    ValueError: length < 2 pairs, vocab_size < 3, too few possible sequences for two splits.
    """

    name: ClassVar[str] = "selective-copy"
    summary: ClassVar[str] = "tokens at random places among padding, then separators; repeat them (Mamba)"

    def lay_out(self, draws: Draws, associations: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        tokens, context = associations[:, 1], self.length - self.pairs
        places = np.sort(draws.distinct(context, len(tokens), self.pairs), axis=1)
        input_ids = np.full((len(tokens), self.length), PADDING, dtype=np.int64)
        np.put_along_axis(input_ids, places, tokens, axis=1)
        input_ids[:, context:] = SEPARATOR
        labels = np.full(input_ids.shape, IGNORE_INDEX, dtype=np.int64)
        labels[:, context:] = tokens
        return input_ids, labels
