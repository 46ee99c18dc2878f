"""The two sizes of the leaderboard, declared in one place: small for two cores of a CPU, full for a GPU.

A column is a task at one difficulty and one size of state. Learning rates are one grid for all mixers.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from fastweights.data import make_task
from fastweights.data.text import TextCorpus, pytorch_source
from fastweights.training import Stage

from ..record import Plain

__all__ = ["SIZES", "LanguageSize", "Size", "TaskSize"]


@dataclass(frozen=True, kw_only=True)
class TaskSize:
    """Trainings on generated tasks.

    Attributes:
        shared: fields of `RecallExperiment` that all columns share.
        columns: of each the task, its pairs, the head size of the reference (head_dim), and options of the task.
        rates: the grid of learning rates. The first seed takes all of them, the others the best of these.
        seeds: of first weights and data.
        limits: the lowest and the highest rate that a grid is widened to where its best rate is at one end; None for fixed grids.
        mixed: numbers of pairs that are trained in turn, a step each; columns then name no pairs. tokens: in a step of them.
        main: mixers that take all seeds, where the others take the first `few`; None for all.
    """

    shared: Mapping[str, Plain]
    columns: tuple[Mapping[str, Plain], ...]
    rates: tuple[float, ...]
    seeds: tuple[int, ...]
    limits: tuple[float, float] | None = None
    mixed: tuple[int, ...] = ()
    tokens: int = 4096
    main: tuple[str, ...] | None = None
    few: int = 2

    def setting(self) -> dict[str, Any]:
        """What the numbers of a column depend on beside its parameters."""
        mixture = {"mixed_pairs": self.mixed, "step_tokens": self.tokens} if self.mixed else {}
        return {**self.shared, **mixture, "learning_rates": self.rates}

    def seeds_of(self, mixer: str) -> tuple[int, ...]:
        """The declared seeds of a mixer."""
        return self.seeds if self.main is None or mixer in self.main else self.seeds[: self.few]

    def trainings(self, seeds: Sequence[int]) -> int:
        """How many models a mixer trains in a column with these seeds, before its grid is widened."""
        return len(self.rates) + len(seeds) - 1

    def experiment(self, column: Mapping[str, Plain]) -> dict[str, Any]:
        """The fields of `RecallExperiment` for a column, without those that say which mixers train where."""
        options = {name: value for name, value in column.items() if name not in ("task", "pairs", "head_dim", "block")}
        fields = {**self.shared, "task": column["task"], "task_options": options}
        if not self.mixed:
            return {**fields, "pairs": (column["pairs"],)}
        return {
            **fields,
            "pairs": self.mixed[-1:],
            "mixture": tuple(self._stage(column, count) for count in self.mixed),
        }

    def _stage(self, column: Mapping[str, Plain], pairs: int) -> Stage:
        """A step of sequences of so many pairs that have about `tokens` tokens."""
        task = make_task(str(column["task"]), pairs=pairs, vocab_size=self.shared["vocab_size"])  # type: ignore[arg-type]
        return Stage(pairs=pairs, steps=1, batch_size=max(1, self.tokens // task.length))


@dataclass(frozen=True, kw_only=True)
class LanguageSize:
    """Language models, and the needles that they are asked for.

    Attributes:
        model: fields of `FastWeightsConfig`. training: fields of `LanguageRun`.
        vocabulary: of the tokenizer, trained on the corpus.
        source: "python" for the default corpus; "pytorch", the source text of PyTorch, where training would read that too often.
        corpus: other fields of `TextCorpus`.
        head_dim: of the reference.
        rates, seeds: as for `TaskSize`; seeds after the first only where it is close.
        close: nats; mixers nearer than this to another one after the first seed take all seeds.
        needles: lengths in tokens, the trained one first. examples: needles at each length and depth. depths: their places, 0 the
            beginning of the text.
    """

    model: Mapping[str, Any]
    training: Mapping[str, Any]
    vocabulary: int
    head_dim: int
    rates: tuple[float, ...]
    seeds: tuple[int, ...]
    needles: tuple[int, ...]
    examples: int
    depths: tuple[float, ...] = (0.0, 0.25, 0.5, 0.75, 1.0)
    source: Literal["python", "pytorch"] = "python"
    corpus: Mapping[str, Any] = field(default_factory=dict)
    close: float = 0.02

    def text(self) -> TextCorpus:
        return pytorch_source(**self.corpus) if self.source == "pytorch" else TextCorpus(**self.corpus)

    def setting(self) -> dict[str, Any]:
        """What the numbers of every column depend on."""
        training = {name: value for name, value in self.training.items() if name != "context_lengths"}  # the columns
        return {
            **self.model,
            **training,
            "vocabulary": self.vocabulary,
            "reference_head_dim": self.head_dim,
            "learning_rates": self.rates,
            "source": self.source,
            **self.corpus,
        }


@dataclass(frozen=True, kw_only=True)
class Size:
    """One size of every trained part.

    Attributes:
        tasks: the trainings of each part that trains on tasks of the library.
        own: those of a task of a user's own, whose columns do not name it.
        cost: time of each part with every mixer of the library, an estimate.
    """

    device: str
    tasks: Mapping[str, TaskSize]
    own: TaskSize
    language: LanguageSize
    cost: Mapping[str, str] = field(default_factory=dict)

    def task(self, part: str) -> TaskSize:
        """The trainings of a part: those declared for it, or those of a user's own task of this name."""
        if part in self.tasks:
            return self.tasks[part]
        return replace(self.own, columns=tuple({"task": part, **column} for column in self.own.columns))


def _recall(orders: tuple[str, ...], pairs: tuple[int, ...], heads: tuple[int, ...]) -> tuple[Mapping[str, Plain], ...]:
    return tuple(
        {"task": "mqar-shuffled", "query_order": order, "pairs": count, "head_dim": head}
        for order, count, head in itertools.product(orders, pairs, heads)
    )


def _blocks(
    orders: tuple[str, ...], heads: tuple[int, ...], blocks: tuple[str, ...]
) -> tuple[Mapping[str, Plain], ...]:
    return tuple(
        {"task": task, "head_dim": head, "block": block}
        for block, task, head in itertools.product(blocks, orders, heads)
    )


LAYOUTS = ("mqar", "mqar-shuffled")
ADDED = ("with-gate", "with-skip", "without-convolution", "with-own-windows")
# Five seeds can show differences that two cannot; these rules are the ones that others are compared with.
MAIN = (
    "softmax", "linear", "mamba2", "gla", "deltanet", "gdn", "kda", "pgdn", "palimpsa-d", "gka", "mesa", "rls",
)  # fmt: skip
_LEARNT: dict[str, Plain] = {"stop_at": 0.99, "seed_by_name": True}
_RECALL_SMALL = TaskSize(
    shared={
        **_LEARNT, "vocab_size": 64, "width": 32, "heads": 2, "layers": 2, "steps": 400, "batch_size": 32, "test_examples": 512,
        "validation_examples": 128, "evaluations": 8, "initializer_range": 0.05,
    },
    columns=_blocks(LAYOUTS, (16,), ("matched",)), rates=(1e-3, 3e-3, 1e-2), limits=(1e-4, 0.1), seeds=(0, 1, 2),
    mixed=(2, 4, 8), tokens=512,
)  # fmt: skip
_RECALL_FULL = TaskSize(
    shared={
        **_LEARNT, "vocab_size": 1024, "width": 128, "heads": 2, "layers": 2, "steps": 8000, "batch_size": 64,
        "test_examples": 512, "validation_examples": 64, "evaluations": 32, "initializer_range": 0.05,
    },
    columns=_blocks(LAYOUTS, (8, 16, 32, 64), ("matched",)), rates=(3e-4, 1e-3, 3e-3, 1e-2, 3e-2), limits=(3e-5, 0.3),
    seeds=(0, 1, 2, 3, 4), mixed=(16, 32, 64, 128, 256), tokens=4096, main=MAIN,
)  # fmt: skip


def _recall_parts(size: TaskSize, heads: tuple[int, ...], middle: int) -> dict[str, TaskSize]:
    """The parts of recall: the matched block, the published ones, and what each part of a block adds at the middle state."""
    return {
        "recall": size,
        "recall-published": replace(size, columns=_blocks(LAYOUTS, heads, ("published",))),
        "recall-blocks": replace(size, columns=_blocks(LAYOUTS[1:], (middle,), ADDED)),
    }


def _one_block(size: TaskSize, tasks: Mapping[str, int], inputs: int, examples: int, head: int) -> dict[str, TaskSize]:
    """The parts beside recall that train every rule in the matched block, by the recipe of its parts: tasks with an accuracy, by
    their name and tokens, and regression, which has no accuracy to end at."""
    shared = {name: value for name, value in size.shared.items() if name != "stop_at"}
    size = replace(size, mixed=())
    shape: dict[str, Plain] = {"head_dim": head, "block": "matched"}
    columns: tuple[dict[str, Plain], ...] = tuple(
        {"task": task, "pairs": pairs, **shape} for task, pairs in tasks.items()
    )
    regression: tuple[dict[str, Plain], ...] = tuple(
        {"task": "regression", "inputs": inputs, "pairs": examples, "noise": noise, **shape} for noise in (0.0, 0.5)
    )
    return {
        "tasks": replace(size, columns=columns),
        "regression-matched": replace(size, shared=shared, columns=regression),
    }


_SMALL: dict[str, Plain] = {
    "vocab_size": 64, "width": 32, "heads": 2, "layers": 2, "steps": 200, "batch_size": 32, "test_examples": 512,
    "evaluations": 1, "initializer_range": 0.05,
}  # fmt: skip
_FULL: dict[str, Plain] = {
    "vocab_size": 512, "width": 128, "heads": 2, "layers": 2, "steps": 2000, "batch_size": 64, "test_examples": 2048,
    "evaluations": 1, "initializer_range": 0.02,
}  # fmt: skip

SIZES = {
    "small": Size(
        device="cpu",
        tasks={
            **_recall_parts(_RECALL_SMALL, (16,), 16),
            **_one_block(_RECALL_SMALL, {"s3": 16, "copy": 8}, 8, 16, 16),
            "mqar": TaskSize(
                shared=_SMALL, columns=_recall(("shuffled", "ordered"), (4,), (16,)), rates=(3e-3, 1e-2), seeds=(0, 1),
            ),
            "regression": TaskSize(
                shared=_SMALL,
                columns=({"task": "regression", "inputs": 8, "pairs": 16, "noise": 0.25, "head_dim": 16},),
                rates=(3e-3, 1e-2), seeds=(0, 1),
            ),
            "tracking": TaskSize(
                shared=_SMALL, columns=({"task": "s3", "pairs": 16, "head_dim": 16},), rates=(3e-3, 1e-2), seeds=(0, 1),
            ),
        },
        own=TaskSize(shared=_SMALL, columns=({"pairs": 4, "head_dim": 16},), rates=(3e-3, 1e-2), seeds=(0, 1)),
        language=LanguageSize(
            model={"hidden_size": 64, "num_hidden_layers": 2, "num_heads": 2, "tie_word_embeddings": True},
            training={
                "length": 256, "batch_size": 8, "max_steps": 150, "evaluation_rows": 32, "checkpoint_every": 50,
                "context_lengths": (128, 256, 512, 1024), "context_texts": 8,
            },
            vocabulary=2048, head_dim=32, rates=(3e-3, 1e-2), seeds=(0, 1, 2), needles=(256, 512), examples=4,
            corpus={"max_megabytes": 8},
        ),
        cost={
            "recall": "3 hours of one core", "recall-published": "3 hours of one core", "recall-blocks": "6 hours of one core",
            "mqar": "25 minutes of one core", "regression": "13 minutes of one core", "tracking": "10 minutes of one core",
            "language": "40 minutes of one core", "needle": "10 minutes of one core",
        },
    ),
    "full": Size(
        device="cuda",
        tasks={
            **_recall_parts(_RECALL_FULL, (8, 16, 32, 64), 32),
            **_one_block(
                _RECALL_FULL,
                {"parity": 32, "s3": 32, "s5": 32, "copy": 64, "selective-copy": 64, "palindrome": 64}, 16, 64, 32,
            ),
            "mqar": TaskSize(
                # Few enough words that softmax attention learns 8 pairs of them in these steps.
                shared={**_FULL, "vocab_size": 128, "initializer_range": 0.05},
                columns=(*_recall(("shuffled",), (8, 32), (16, 32)), *_recall(("ordered",), (32,), (16, 32))),
                rates=(1e-3, 3e-3),
                seeds=(0, 1),
            ),
            "regression": TaskSize(
                shared=_FULL,
                columns=tuple(
                    {"task": "regression", "inputs": 16, "pairs": 64, "noise": noise, "head_dim": 32} for noise in (0.0, 0.5)
                ),
                rates=(1e-3, 3e-3), seeds=(0, 1, 2),
            ),
            "tracking": TaskSize(
                shared=_FULL,
                columns=tuple({"task": task, "pairs": 32, "head_dim": 32} for task in ("parity", "s3", "s5")),
                rates=(1e-3, 3e-3), seeds=(0, 1, 2),
            ),
        },
        own=TaskSize(
            shared=_FULL, columns=({"pairs": 8, "head_dim": 16}, {"pairs": 32, "head_dim": 16}), rates=(1e-3, 3e-3),
            seeds=(0, 1),
        ),
        language=LanguageSize(
            model={"hidden_size": 512, "num_hidden_layers": 5, "num_heads": 8, "tie_word_embeddings": True},
            training={
                "length": 1024, "batch_size": 32, "max_steps": 500, "checkpoint_every": 250, "precision": "bf16",
                "compile": False,  # several trainings share a GPU, and compiling them takes longer than it saves
                "context_lengths": (256, 512, 1024, 2048, 4096), "context_texts": 64,
            },
            vocabulary=8192, head_dim=64, rates=(1e-3, 3e-3), seeds=(0, 1, 2), needles=(1024, 2048, 4096),
            examples=20, source="pytorch", corpus={"max_megabytes": 60},
        ),
        cost={
            **dict.fromkeys(
                ("recall", "recall-published", "recall-blocks", "tasks", "regression-matched"), "see --dry-run"
            ),
            "mqar": "90 minutes of one GPU", "regression": "30 minutes of one GPU", "tracking": "45 minutes of one GPU",
            "language": "150 minutes of one GPU", "needle": "20 minutes of one GPU",
        },
    ),
}  # fmt: skip
