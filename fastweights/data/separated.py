"""Tasks with a separator between context and queries: shuffled recall, copying and palindromes."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from ..checks import check_choice, check_flag
from ._draws import Draws
from .registry import register_task
from .task import IGNORE_INDEX, RecallTask

__all__ = ["Copy", "OutOfDistributionShuffledMQAR", "Palindrome", "RepeatedTokens", "ShuffledMQAR"]

PADDING = 0
SEPARATOR = 1
FIRST_CONTENT = 2  # the lowest token that carries content


@register_task
@dataclass(frozen=True, kw_only=True)
class ShuffledMQAR(RecallTask):
    """n pairs, a separator, then the n keys in shuffled order.

        k1 v1 ... kn vn | PAD ... PAD | SEP k_s(1) k_s(2) ... k_s(n)        label at k_s(i): v_s(i)

    T = 3n + 1, or longer. The padding stands between the pairs and the separator: every association must
    outlast T - 3n - 1 tokens before it is asked for: a longer T tests retention and nothing else. Padding (token 0) and
    separator (token 1) occur nowhere else and carry no label. Keys are drawn without replacement from tokens
    2 .. V//2 - 1, values without replacement from V//2 .. V - 1 (the paper does not say; the plateau of its loss at
    ln 64 with V = 128, table 8, fits values from one half).

    Options:
    - query_order: "shuffled", or "ordered" for the queries in the order of the pairs.
    - padding: "middle", or "start" for padding before the pairs: then a longer T tests no retention.
    - random_non_queries: every padding position holds a uniform token of 2 .. V - 1, keys and values included, in
      place of token 0. As in `MQAR`, such filler may look like another binding; the label is the value of the pairs.

    Source: Variational Linear Attention, section 5.2, figure 1.
    ValueError: length < 3 pairs + 1, vocab_size < 2 pairs + 4.
    """

    query_order: str = "shuffled"
    padding: str = "middle"
    random_non_queries: bool = False

    name: ClassVar[str] = "mqar-shuffled"
    summary: ClassVar[str] = "key-value pairs, padding, separator, all keys in shuffled order (VLA)"
    in_words: ClassVar[Mapping[str, object] | None] = {}

    def shortest_length(self) -> int:
        return 3 * self.pairs + 1

    def check_options(self) -> None:
        self.check_vocabulary(2 * (self.pairs + FIRST_CONTENT))
        check_choice("query_order", self.query_order, ("shuffled", "ordered"))
        check_choice("padding", self.padding, ("middle", "start"))
        check_flag("random_non_queries", self.random_non_queries)

    def draw_associations(self, draws: Draws, split: str, rows: int) -> np.ndarray:
        first_value = self.vocab_size // 2
        keys = FIRST_CONTENT + draws.distinct(first_value - FIRST_CONTENT, rows, self.pairs)
        values = first_value + draws.distinct(self.vocab_size - first_value, rows, self.pairs)
        return np.stack([keys, values], axis=1)

    def lay_out(self, draws: Draws, associations: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        rows = len(associations)
        context = associations.transpose(0, 2, 1).reshape(rows, -1)  # k1 v1 k2 v2 ...
        asked = associations
        if self.query_order == "shuffled":
            order = draws.distinct(self.pairs, rows, self.pairs)
            asked = np.take_along_axis(associations, order[:, None], axis=2)
        filler = np.full((rows, self.length - self.shortest_length()), PADDING, dtype=np.int64)
        if self.random_non_queries:
            filler = FIRST_CONTENT + draws.below(self.vocab_size - FIRST_CONTENT, filler.shape)
        parts = [context, filler] if self.padding == "middle" else [filler, context]
        return _separated(np.concatenate(parts, axis=1), queries=asked[:, 0], answers=asked[:, 1])


@register_task
@dataclass(frozen=True, kw_only=True)
class OutOfDistributionShuffledMQAR(ShuffledMQAR):
    """ShuffledMQAR whose test keys are never keys in training: there they are values.

    Train sequences are those of `ShuffledMQAR`, to the bit: keys from tokens 2 .. V//2 - 1, values from V//2 .. V - 1.
    The model of a run on this task is therefore the model of the same run on mqar-shuffled, whose accuracy is the one
    on known keys; the difference of the two is the drop. In test sequences keys and values are all different and both
    come from V//2 .. V - 2: with V = 128, keys 2 .. 63 in training and 64 .. 126 in testing.

    Source: Variational Linear Attention, appendix B, table 13 (its trained keys include the tokens 0 and 1, which are
    padding and separator here; whether a test key may be a value of its own sequence it does not say).
    ValueError: as ShuffledMQAR, and vocab_size < 4 pairs + 1.
    """

    name: ClassVar[str] = "mqar-shuffled-ood"
    summary: ClassVar[str] = "mqar-shuffled with test keys that are only values in training (VLA)"
    in_words = None

    def check_options(self) -> None:
        super().check_options()
        self.check_vocabulary(4 * self.pairs + 1)

    def draw_associations(self, draws: Draws, split: str, rows: int) -> np.ndarray:
        if split == "train":
            return super().draw_associations(draws, split, rows)
        first = self.vocab_size // 2
        tokens = first + draws.distinct(self.vocab_size - 1 - first, rows, 2 * self.pairs)
        return tokens.reshape(rows, 2, self.pairs)


@dataclass(frozen=True, kw_only=True)
class RepeatedTokens(RecallTask):
    """Base of the tasks to repeat `pairs` independent tokens: the associations are (position, token)."""

    unit: ClassVar[str] = "tokens"

    def shortest_length(self) -> int:
        return 2 * self.pairs

    def check_options(self) -> None:
        self.check_vocabulary(FIRST_CONTENT + 1)

    def draw_associations(self, draws: Draws, split: str, rows: int) -> np.ndarray:
        tokens = FIRST_CONTENT + draws.below(self.vocab_size - FIRST_CONTENT, (rows, self.pairs))
        return np.stack([np.broadcast_to(np.arange(self.pairs), tokens.shape), tokens], axis=1)


@register_task
@dataclass(frozen=True, kw_only=True)
class Copy(RepeatedTokens):
    """n tokens, a separator, then the same tokens again: a check that training is stable.

        x1 x2 ... xn | PAD ... PAD | SEP x1 x2 ... x(n-1)        label at SEP: x1, at the second x_i: x_(i+1)

    `pairs` is n, the number of (position, token) pairs to recall. T = 2n, or longer with padding (token 0) before the
    separator (token 1), which every token must outlast. The tokens are independent and uniform over 2 .. V - 1, so
    they may repeat. The copy is teacher-forced: the inputs after the separator are the right answers so far.

    Source: Variational Linear Attention, section 5.2.
    ValueError: length < 2 pairs, vocab_size < 3, too few possible sequences for two splits.
    """

    name: ClassVar[str] = "copy"
    summary: ClassVar[str] = "tokens, padding, separator, the tokens again (VLA)"
    in_words: ClassVar[Mapping[str, object] | None] = {}

    def lay_out(self, draws: Draws, associations: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        tokens = associations[:, 1]
        padding = np.full((len(tokens), self.length - self.shortest_length()), PADDING, dtype=np.int64)
        answers = self._answers(tokens)
        return _separated(np.concatenate([tokens, padding], axis=1), queries=answers[:, :-1], answers=answers)

    def _answers(self, tokens: np.ndarray) -> np.ndarray:
        """The tokens in the order in which they are to be repeated."""
        return tokens


@register_task
@dataclass(frozen=True, kw_only=True)
class Palindrome(Copy):
    """As `Copy`, but the tokens are repeated from the last to the first.

        x1 x2 ... xn | PAD ... PAD | SEP xn x(n-1) ... x2        label at SEP: xn, at the second x_i: x_(i-1)

    Source: Kimi Team 2025, Kimi Linear, the first of its synthetic tests. ValueError: as Copy.
    """

    name: ClassVar[str] = "palindrome"
    summary: ClassVar[str] = "tokens, padding, separator, the tokens backwards (Kimi Linear)"

    def _answers(self, tokens: np.ndarray) -> np.ndarray:
        return tokens[:, ::-1]


def _separated(context: np.ndarray, queries: np.ndarray, answers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """input_ids and labels, int64 [rows, length]: context, separator, queries.

    The answers label the last positions; one answer more than queries makes the separator itself the first query.
    """
    rows = len(context)
    separator = np.full((rows, 1), SEPARATOR, dtype=np.int64)
    input_ids = np.concatenate([context, separator, queries], axis=1)
    labels = np.full(input_ids.shape, IGNORE_INDEX, dtype=np.int64)
    labels[:, input_ids.shape[1] - answers.shape[1] :] = answers
    return input_ids, labels
