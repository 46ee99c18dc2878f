"""The copy task: reproduce a sequence behind a separator (Variational Linear Attention, 5.2)."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from ._draws import Draws
from ._separated import FIRST_CONTENT, separated
from .task import RecallTask

__all__ = ["Copy"]


@dataclass(frozen=True, kw_only=True)
class Copy(RecallTask):
    """n tokens, a separator, then the same tokens again: a check that training is stable.

        x1 x2 ... xn | PAD ... PAD | SEP x1 x2 ... x(n-1)        label at SEP: x1, at the second x_i: x_(i+1)

    `pairs` is n, the number of (position, token) pairs to recall. T = 2n, or longer with padding (token 0) before the
    separator (token 1), which every token must outlast. The tokens are independent and uniform over 2 .. V - 1, so
    they may repeat. The copy is teacher-forced: the inputs behind the separator are the right answers so far.

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
        return separated(self.length, context=tokens, queries=tokens[:, :-1], answers=tokens)
