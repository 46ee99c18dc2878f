"""A task of one's own: after every token, which token came some places before?"""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from fastweights.data import IGNORE_INDEX, RecallTask, register_task


@register_task
@dataclass(frozen=True, kw_only=True)
class LookBack(RecallTask):
    """x1 x2 ... xn, with the label x(i - back) at xi. `pairs` is n; a longer sequence begins with padding, token 0.

    back: how many places before a token its answer stands.
    """

    back: int = 2

    name: ClassVar[str] = "look-back"
    summary: ClassVar[str] = "tokens; after each, which one came some places before?"
    unit: ClassVar[str] = "tokens"

    def shortest_length(self) -> int:
        return self.pairs

    def check_options(self) -> None:
        self.check_vocabulary(3)
        if not 1 <= self.back < self.pairs:
            raise ValueError(f"back must be from 1 to {self.pairs - 1} (below pairs), got {self.back}; raise pairs")

    def draw_associations(self, draws, split, rows):
        """(position, token) of every token."""
        tokens = 1 + draws.below(self.vocab_size - 1, (rows, self.pairs))
        return np.stack([np.broadcast_to(np.arange(self.pairs), tokens.shape), tokens], axis=1)

    def lay_out(self, draws, associations):
        tokens = associations[:, 1]
        input_ids = np.zeros((len(tokens), self.length), dtype=np.int64)
        labels = np.full(input_ids.shape, IGNORE_INDEX)
        input_ids[:, self.length - self.pairs :] = tokens
        labels[:, self.length - self.pairs + self.back :] = tokens[:, : -self.back]
        return input_ids, labels
