"""The two sizes of the leaderboard, declared in one place: small for two cores of a CPU, full for a GPU.

A column is a task at one difficulty and one size of state. Learning rates are one grid for all mixers.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from fastweights.data.text import TextCorpus, pytorch_source

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
    """

    shared: Mapping[str, Plain]
    columns: tuple[Mapping[str, Plain], ...]
    rates: tuple[float, ...]
    seeds: tuple[int, ...]

    def setting(self) -> dict[str, Any]:
        """What the numbers of a column depend on beside its parameters."""
        return {**self.shared, "learning_rates": self.rates}

    def experiment(self, column: Mapping[str, Plain]) -> dict[str, Any]:
        """The fields of `RecallExperiment` for a column, without those that say which mixers train where."""
        options = {name: value for name, value in column.items() if name not in ("task", "pairs", "head_dim")}
        return {**self.shared, "task": column["task"], "pairs": (column["pairs"],), "task_options": options}


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
            "mqar": "25 minutes of one core", "regression": "13 minutes of one core", "tracking": "10 minutes of one core",
            "language": "40 minutes of one core", "needle": "10 minutes of one core",
        },
    ),
    "full": Size(
        device="cuda",
        tasks={
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
            "mqar": "90 minutes of one GPU", "regression": "30 minutes of one GPU", "tracking": "45 minutes of one GPU",
            "language": "150 minutes of one GPU", "needle": "20 minutes of one GPU",
        },
    ),
}  # fmt: skip
