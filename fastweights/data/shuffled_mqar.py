"""Associative recall with all queries in shuffled order behind a separator (Variational Linear Attention, 5.2)."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from ._draws import Draws
from ._separated import FIRST_CONTENT, separated
from .task import RecallTask

__all__ = ["ShuffledMQAR"]


@dataclass(frozen=True, kw_only=True)
class ShuffledMQAR(RecallTask):
    """n pairs, a separator, then the n keys in shuffled order.

        k1 v1 ... kn vn | PAD ... PAD | SEP k_s(1) k_s(2) ... k_s(n)        label at k_s(i): v_s(i)

    T = 3n + 1, or longer. The padding stands between the pairs and the separator, so that every association must
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
        return separated(self.length, context, queries, answers)
