"""The tasks with a separator between context and queries: shuffled recall and copying (Variational Linear Attention, 5.2)."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from ._draws import Draws
from .task import IGNORE_INDEX, RecallTask

__all__ = ["Copy", "ShuffledMQAR"]

PADDING = 0
SEPARATOR = 1
FIRST_CONTENT = 2  # the lowest token that carries content


@dataclass(frozen=True, kw_only=True)
class ShuffledMQAR(RecallTask):
    """n pairs, a separator, then the n keys in shuffled order.

        k1 v1 ... kn vn | PAD ... PAD | SEP k_s(1) k_s(2) ... k_s(n)        label at k_s(i): v_s(i)

    T = 3n + 1, or longer. The padding stands between the pairs and the separator: every association must
    outlast T - 3n - 1 tokens before it is asked for: a longer T tests retention and nothing else. Padding (token 0) and
    separator (token 1) occur nowhere else and carry no label. Keys are drawn without replacement from tokens
    2 .. V//2 - 1, values without replacement from V//2 .. V - 1 (the paper does not say; the plateau of its loss at
    ln 64 with V = 128, table 8, fits values from one half).

    Source: Variational Linear Attention, section 5.2, figure 1.
    ValueError: length < 3 pairs + 1, vocab_size < 2 pairs + 4.
    """

    name: ClassVar[str] = "mqar-shuffled"
    summary: ClassVar[str] = "key-value pairs, separator, all keys in shuffled order (VLA)"

    def _shortest_length(self) -> int:
        return 3 * self.pairs + 1

    def _check(self) -> None:
        self._require_vocabulary(2 * (self.pairs + FIRST_CONTENT))

    def _draw_associations(self, draws: Draws, split: str, rows: int) -> np.ndarray:
        first_value = self.vocab_size // 2
        keys = FIRST_CONTENT + draws.distinct(first_value - FIRST_CONTENT, rows, self.pairs)
        values = first_value + draws.distinct(self.vocab_size - first_value, rows, self.pairs)
        return np.stack([keys, values], axis=1)

    def _lay_out(self, draws: Draws, associations: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        context = associations.transpose(0, 2, 1).reshape(len(associations), -1)  # k1 v1 k2 v2 ...
        order = draws.distinct(self.pairs, len(associations), self.pairs)
        queries, answers = np.moveaxis(np.take_along_axis(associations, order[:, None], axis=2), 1, 0)
        return _separated(self.length, context, queries, answers)


@dataclass(frozen=True, kw_only=True)
class Copy(RecallTask):
    """n tokens, a separator, then the same tokens again: a check that training is stable.

        x1 x2 ... xn | PAD ... PAD | SEP x1 x2 ... x(n-1)        label at SEP: x1, at the second x_i: x_(i+1)

    `pairs` is n, the number of (position, token) pairs to recall. T = 2n, or longer with padding (token 0) before the
    separator (token 1), which every token must outlast. The tokens are independent and uniform over 2 .. V - 1, so
    they may repeat. The copy is teacher-forced: the inputs after the separator are the right answers so far.

    Source: Variational Linear Attention, section 5.2.
    ValueError: length < 2 pairs, vocab_size < 3, too few possible sequences for two splits.
    """

    name: ClassVar[str] = "copy"
    summary: ClassVar[str] = "a sequence, separator, the sequence again (VLA)"

    def _shortest_length(self) -> int:
        return 2 * self.pairs

    def _check(self) -> None:
        self._require_vocabulary(FIRST_CONTENT + 1)

    def _draw_associations(self, draws: Draws, split: str, rows: int) -> np.ndarray:
        tokens = FIRST_CONTENT + draws.below(self.vocab_size - FIRST_CONTENT, (rows, self.pairs))
        return np.stack([np.broadcast_to(np.arange(self.pairs), tokens.shape), tokens], axis=1)

    def _lay_out(self, draws: Draws, associations: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        tokens = associations[:, 1]
        return _separated(self.length, context=tokens, queries=tokens[:, :-1], answers=tokens)


def _separated(
    length: int, context: np.ndarray, queries: np.ndarray, answers: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """input_ids and labels, int64 [rows, length]: context, padding, separator, queries up to the last position.

    The answers label the last positions; one answer more than queries makes the separator itself the first query.
    """
    rows, first_query = len(context), length - queries.shape[1]
    input_ids = np.full((rows, length), PADDING, dtype=np.int64)
    input_ids[:, : context.shape[1]] = context
    input_ids[:, first_query - 1] = SEPARATOR
    input_ids[:, first_query:] = queries
    labels = np.full((rows, length), IGNORE_INDEX, dtype=np.int64)
    labels[:, length - answers.shape[1] :] = answers
    return input_ids, labels
