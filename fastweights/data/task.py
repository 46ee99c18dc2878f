"""Base classes of the tasks: checked options, and batches that are a pure function of seed, split and index."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch

from ..checks import LARGEST_WIDTH, check_choice, check_size, check_whole_number
from ._draws import Draws
from ._splits import SPLITS, check_split, draw_split

__all__ = ["IGNORE_INDEX", "VOCAB_SIZE", "Batch", "RecallTask", "Task", "VectorBatch", "VectorTask", "check_batch"]

IGNORE_INDEX = -100  # the label that torch's cross-entropy ignores
VOCAB_SIZE = 8192  # the Zoology benchmark's
LONGEST = 2**20  # tokens of a sequence
MOST_ROWS = 2**20  # of a batch
MOST_TOKENS = 2**28  # of a batch: 4 GiB of ids and labels


class Batch(NamedTuple):
    """input_ids and labels, int64 [B, T] on the CPU.

    A label stands at the position that must predict it (no shift); every other position holds IGNORE_INDEX.
    """

    input_ids: torch.Tensor
    labels: torch.Tensor


class VectorBatch(NamedTuple):
    """float32 on the CPU: inputs [B, T, channels], and targets [B, N, outputs] of the tokens that are asked for an answer."""

    inputs: torch.Tensor
    targets: torch.Tensor


def check_batch(split: object, seed: object, index: object, batch_size: object) -> None:
    """Refuses arguments that name no batch of a task."""
    check_choice("split", split, SPLITS)
    check_whole_number("seed", seed)
    check_whole_number("index", index)
    check_size("batch_size", batch_size, high=MOST_ROWS)


@dataclass(frozen=True, kw_only=True)
class Task(ABC):
    """Sequences to be answered in part, as batches that are a pure function of seed, split and index.

    A task is a frozen dataclass, whose fields are its options, of one of the two subclasses `RecallTask` and `VectorTask`. It
    defines the class attributes `name` and `summary`, `shortest_length`, `draw_associations` and `lay_out`; docs/tasks.md
    has an example.

    pairs: associations in a sequence; length: tokens in a sequence, T (None: the shortest that holds the task). A wrong
    option raises ValueError, one of a wrong kind TypeError.

    Train and test share no example, for any seeds, lengths and vocabularies. Proof: an example is identified by
    the set of its associations, which can be read off its tokens. `is_test` is a fixed function of that set, and
    `batch` returns only sequences whose set it assigns to the split asked for. A set in a train batch and in a test
    batch would be assigned to both. The order of the context, the queries' places and the filler play no part, so a
    test sequence is never a reshuffled train sequence either. One set in four is a test set.
    """

    pairs: int
    length: int = None  # type: ignore[assignment]  # an int once constructed

    name: ClassVar[str]
    summary: ClassVar[str]
    unit: ClassVar[str] = "key-value pairs"  # what `pairs` is the number of
    measure: ClassVar[str] = "accuracy"  # of the answers; or "error", their squared error
    guess: ClassVar[str] = "guessing among the values shown"  # what measures `chance`
    by_token: ClassVar[bool] = False  # whether results say how the measure depends on the position in the sequence

    @property
    @abstractmethod
    def chance(self) -> float:
        """The measure of answers that need no memory."""

    def __post_init__(self) -> None:
        self._set("pairs", check_size("pairs", self.pairs, high=LONGEST))
        shortest = self.shortest_length()
        self._set("length", check_size("length", shortest if self.length is None else self.length, high=LONGEST))
        if self.length < shortest:
            raise ValueError(
                f"length must be at least {shortest} for {self.pairs} pairs of task {self.name!r}, got {self.length}; "
                "raise length or lower pairs"
            )
        self.check_options()
        self._check_splits()

    @abstractmethod
    def batch(self, split: str, *, seed: int, index: int, batch_size: int) -> Any:
        """Batch number `index` of `split` ("train" or "test"), B = batch_size sequences.

        A pure function of the task and these arguments, identical on every machine and version of Python and NumPy.
        Any other index, seed or batch_size gives other sequences. ValueError for an unknown split, a seed or index
        below 0, a batch_size below 1; TypeError where one is no integer.
        """

    def _draw(self, split: str, seed: int, index: int, batch_size: int) -> tuple[torch.Tensor, torch.Tensor]:
        """What `batch` returns."""
        check_batch(split, seed, index, batch_size)
        if batch_size * self.length > MOST_TOKENS:
            raise ValueError(
                f"batch_size must be at most {MOST_TOKENS // self.length:,} for sequences of {self.length:,} tokens, got "
                f"{batch_size:,}; draw several batches"
            )
        draws = Draws(seed, SPLITS.index(split), index)
        associations = draw_split(partial(self.draw_associations, draws, split), split, batch_size)
        first, second = self.lay_out(draws, associations)
        return torch.from_numpy(first), torch.from_numpy(second)

    def _set(self, field: str, value: object) -> None:
        object.__setattr__(self, field, value)  # the dataclass is frozen for everyone else

    @abstractmethod
    def shortest_length(self) -> int:
        """The fewest tokens that hold the task."""

    def check_options(self) -> None:  # noqa: B027  # most tasks have nothing to refuse
        """Refuse options that do not fit each other, by a ValueError; pairs, length and vocab_size are integers by now."""

    @cache  # noqa: B019  # tasks are small, and a grid of trainings makes equal ones hundreds of times
    def _check_splits(self) -> None:
        for stream, split in enumerate(SPLITS):
            check_split(partial(self.draw_associations, Draws(0, stream, 0), split), split)

    @abstractmethod
    def draw_associations(self, draws: Draws, split: str, rows: int) -> np.ndarray:
        """Random associations of `rows` sequences: int64 [rows, 2, n], a in [:, 0] and b in [:, 1]. They identify an example:
        which split it belongs to depends on them alone."""

    @abstractmethod
    def lay_out(self, draws: Draws, associations: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Inputs and right answers of sequences with these associations, as `batch` returns them."""


@dataclass(frozen=True, kw_only=True)
class RecallTask(Task):
    """A task of recalling associations a -> b (key -> value; for the copy task, position -> token).

    vocab_size: token ids lie in [0, vocab_size). `lay_out` gives input_ids and labels, int64 [rows, length].
    in_words: the options with which text models are asked the task in words of their vocabulary; None where they are not.
    """

    vocab_size: int = VOCAB_SIZE

    in_words: ClassVar[Mapping[str, object] | None] = None

    @property
    def chance(self) -> float:
        """Accuracy of a memory that knows the values of a sequence but not their keys."""
        return 1 / self.pairs

    def __post_init__(self) -> None:
        self._set("vocab_size", check_whole_number("vocab_size", self.vocab_size, low=1, high=2**31))
        super().__post_init__()

    def batch(self, split: str, *, seed: int, index: int, batch_size: int) -> Batch:
        return Batch(*self._draw(split, seed, index, batch_size))

    def check_vocabulary(self, needed: int) -> None:
        """Refuse a vocabulary of fewer than `needed` tokens."""
        if self.vocab_size < needed:
            raise ValueError(
                f"vocab_size must be at least {needed} for {self.pairs} pairs of task {self.name!r}, "
                f"got {self.vocab_size}; raise vocab_size or lower pairs"
            )


@dataclass(frozen=True, kw_only=True)
class VectorTask(Task):
    """A task of predicting vectors, measured by the squared error of the predictions.

    outputs: channels of a prediction. `lay_out` gives inputs [rows, length, channels] and the targets [rows, N, outputs] of the
    tokens that `asked` selects, float32.
    """

    outputs: int = 1

    unit: ClassVar[str] = "examples"
    measure: ClassVar[str] = "error"
    guess: ClassVar[str] = "predicting zero"
    by_token: ClassVar[bool] = True
    asked: ClassVar[slice] = slice(None)  # the tokens at which a model predicts

    def __post_init__(self) -> None:
        self._set("outputs", check_size("outputs", self.outputs, high=LARGEST_WIDTH))
        super().__post_init__()

    @property
    @abstractmethod
    def channels(self) -> int:
        """Channels of a token."""

    def batch(self, split: str, *, seed: int, index: int, batch_size: int) -> VectorBatch:
        return VectorBatch(*self._draw(split, seed, index, batch_size))

    def predict(self, batch: VectorBatch) -> dict[str, torch.Tensor]:
        """Predictions [B, N, outputs] by name, of predictors that know how sequences are drawn. The last is the best one."""
        return {}

    @property
    def plotted_predictors(self) -> tuple[str, ...]:
        """The predictors whose errors by example stand in results, by name."""
        return ()
