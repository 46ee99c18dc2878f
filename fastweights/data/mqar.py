"""Multi-query associative recall as in the Zoology benchmark, and with keys that training never used as keys."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from ..checks import check_flag, check_number
from ._draws import Draws, natural_log
from .registry import register_task
from .task import IGNORE_INDEX, RecallTask

__all__ = ["MQAR", "OutOfDistributionMQAR"]


@register_task
@dataclass(frozen=True, kw_only=True)
class MQAR(RecallTask):
    """Pairs first, then each key once more among filler tokens, at gaps that follow a power law.

        k1 v1 k2 v2 ... kn vn | x x k2 x x x k1 x ...        label at k2: v2, at k1: v1, elsewhere none

    Source: Arora et al. 2023, Zoology; the semantics are those of its benchmark (one pass over the pairs):
    - Keys are drawn without replacement from tokens 1 .. V//2 - 1, values without replacement from V//2 .. V - 1.
    - The query of the j-th pair stands at position 2n + 2 gap_j. The gaps are different numbers of
      0 .. (T - 2n)//2 - 1, drawn pair after pair with probability proportional to power_a (gap + 1)^(power_a - 1)
      among those that are left: power_a = 1 is uniform, 0.01 close to 1 / (gap + 1).
    - random_non_queries: every other position after the context holds a uniform token of the whole vocabulary, token 0,
      keys and values included; otherwise token 0. So filler may coincide with a key of the sequence. It then looks
      like one more query (but has no label) or, with the next token, like a second binding of that key. The
      label is the value of the context all the same.

    The benchmark's own code also demands an even length and vocab_size > length; nothing depends on them here.
    ValueError: length < 4 pairs, vocab_size < 2 pairs + 2, power_a not between 0 and 1e6.
    """

    power_a: float = 0.01
    random_non_queries: bool = True

    name: ClassVar[str] = "mqar"
    summary: ClassVar[str] = "key-value pairs, then each key again among random filler (Zoology)"
    # One word as filler, which is never a key: random filler would bind keys again in a long text.
    in_words: ClassVar[Mapping[str, object] | None] = {"random_non_queries": False}

    def shortest_length(self) -> int:
        return 4 * self.pairs  # as many gaps as pairs

    def check_options(self) -> None:
        self.check_vocabulary(2 * self.pairs + 2)
        self._set("power_a", check_number("power_a", self.power_a, above=0, below=1e6))
        check_flag("random_non_queries", self.random_non_queries)

    def _keys(self, split: str) -> range:
        """The tokens that are keys in `split`."""
        return range(1, self.vocab_size // 2)

    def draw_associations(self, draws: Draws, split: str, rows: int) -> np.ndarray:
        keys, first_value = self._keys(split), self.vocab_size // 2
        chosen_keys = keys.start + draws.distinct(len(keys), rows, self.pairs)
        chosen_values = first_value + draws.distinct(self.vocab_size - first_value, rows, self.pairs)
        return np.stack([chosen_keys, chosen_values], axis=1)

    def lay_out(self, draws: Draws, associations: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        keys, values = associations[:, 0], associations[:, 1]
        shape, context = (len(keys), self.length), 2 * self.pairs
        gaps = np.arange(1, (self.length - context) // 2 + 1, dtype=np.float64)
        log_weights = (self.power_a - 1) * natural_log(gaps)
        queries = context + 2 * draws.successive(log_weights, len(keys), self.pairs)

        input_ids = draws.below(self.vocab_size, shape) if self.random_non_queries else np.zeros(shape, dtype=np.int64)
        input_ids[:, 0:context:2] = keys
        input_ids[:, 1:context:2] = values
        np.put_along_axis(input_ids, queries, keys, axis=1)
        labels = np.full(shape, IGNORE_INDEX, dtype=np.int64)
        np.put_along_axis(labels, queries, values, axis=1)
        return input_ids, labels


@register_task
@dataclass(frozen=True, kw_only=True)
class OutOfDistributionMQAR(MQAR):
    """MQAR whose test keys are never keys in training: does recall depend on having seen a token as a key?

    held_out_keys: the share of the key tokens, the upper end of 1 .. V//2 - 1, that are keys in the test split only;
    the other key tokens are keys in the train split only. Values come from V//2 .. V - 1 in both.

    Held-out keys do occur in training, as random filler (and so in the model's input, as often as any other filler
    token): their embeddings are trained in the model's context and only their role as a key is new. A test on
    embeddings left at their initial values would measure the initialisation. random_non_queries=False is refused for
    that reason, and the shuffled-query form, which has no filler, has no such variant. In-distribution accuracy of
    the same model: batches of the train split that it was not trained on.

    Source: Variational Linear Attention, appendix B, table 13; there the keys held out occur in training as values.
    ValueError: as MQAR; held_out_keys not between 0 and 1, or a part of the keys smaller than pairs.
    """

    held_out_keys: float = 0.5

    name: ClassVar[str] = "mqar-ood"
    summary: ClassVar[str] = "mqar with test keys that are only filler in training (VLA, Zoology's layout)"
    in_words = None

    def check_options(self) -> None:
        super().check_options()
        self._set("held_out_keys", check_number("held_out_keys", self.held_out_keys, above=0, below=1))
        if not self.random_non_queries:
            raise ValueError(
                f"random_non_queries must be True for task {self.name!r}, got False; the held-out keys would never "
                "occur in training, so leave it out"
            )
        for split in ("train", "test"):
            if len(self._keys(split)) < self.pairs:
                raise ValueError(
                    f"held_out_keys must leave at least {self.pairs} keys (pairs) to each split, got "
                    f"{self.held_out_keys}, with {len(self._keys(split))} for {split}; raise vocab_size or lower pairs"
                )

    def _keys(self, split: str) -> range:
        keys = super()._keys(split)
        trained = len(keys) - int(len(keys) * self.held_out_keys)
        return keys[:trained] if split == "train" else keys[trained:]
