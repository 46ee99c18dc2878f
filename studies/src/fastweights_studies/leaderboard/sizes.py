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
from fastweights.layers import MIXERS
from fastweights.training import Stage

from ..record import Plain

__all__ = ["SIZES", "Budget", "LanguageSize", "MatchedLanguageSize", "Size", "TaskSize", "own_mixers"]


def own_mixers() -> list[str]:
    """The mixers of the library, without those that a user registers."""
    return [name for name, spec in MIXERS.items() if spec.layer.__module__.startswith("fastweights.")]


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
        main: mixers of the library that take all seeds, where its others take the first `few`; None for all. A mixer from
            elsewhere takes all of them: its comparisons are what it was trained for.
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
        if self.main is None or mixer in self.main:
            return self.seeds
        return self.seeds[: self.few] if mixer in own_mixers() else self.seeds

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
    """Language models of layers as published.

    Attributes:
        model: fields of `FastWeightsConfig`. training: fields of `LanguageRun`.
        vocabulary: of the tokenizer, trained on the corpus.
        source: "python" for the default corpus; "pytorch", the source text of PyTorch, where training would read that too often.
        corpus: other fields of `TextCorpus`.
        head_dim: of the reference.
        rates, seeds: as for `TaskSize`; seeds after the first only where it is close.
        close: nats; mixers nearer than this to another one after the first seed take all seeds.
    """

    model: Mapping[str, Any]
    training: Mapping[str, Any]
    vocabulary: int
    head_dim: int
    rates: tuple[float, ...]
    seeds: tuple[int, ...]
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
class Budget:
    """Trainings of one length.

    Attributes:
        seeds: of first weights and order of data.
        mixers: names of those that are trained so long; None for all.
    """

    seeds: tuple[int, ...]
    mixers: tuple[str, ...] | None = None


@dataclass(frozen=True, kw_only=True)
class MatchedLanguageSize:
    """Language models in one block.

    Attributes:
        model: fields of `FastWeightsConfig`. training: fields of `LanguageRun`.
        rates: the grid of learning rates.
        budgets: by the tokens that a model reads. Where no smaller models find the rate, the first seed of the first budget takes
            every rate.
        train_pieces: how many files of train text are read, from the first on; None for all.
        vocabulary: of the tokenizer, trained on the text. head_dim: of the reference. excess, multiple: of `Matching`. The
            setting of a row leaves out these two: the row has the sizes of its model.
        source: "debian" for the text of `code_text`; "python" for the default corpus, with the fields `corpus`.
        recall_part: of the rows of training, those of the documents that ask for recall. recall_documents: how many there are.
        softmax_every: of the variants of a mixer, which layers have softmax attention in its place: every n-th, 0 for none.
        rows: of test text, each as long as in training. positions: ends of the ranges whose loss is a column.
        contexts: lengths in tokens. context_texts: how many texts are read up to the longest.
        needles: lengths in tokens. examples: needles at each length and depth. depths: their places, 0 the beginning of the text.
        decoded: tokens of a timed generation, 0 for none. decodings: how many are timed.
        at_once: trainings that share a GPU of 140 GB where nobody says how many.
    """

    model: Mapping[str, Any]
    training: Mapping[str, Any]
    rates: tuple[float, ...]
    budgets: Mapping[int, Budget]
    vocabulary: int
    head_dim: int
    source: Literal["debian", "python"]
    recall_documents: int
    rows: int
    positions: tuple[int, ...]
    contexts: tuple[int, ...]
    context_texts: int
    needles: tuple[int, ...]
    examples: int
    depths: tuple[float, ...] = (0.0, 0.25, 0.5, 0.75, 1.0)
    corpus: Mapping[str, Any] = field(default_factory=dict)
    recall_part: float = 0.05
    softmax_every: tuple[int, ...] = (0,)
    decoded: int = 256
    decodings: int = 3
    train_pieces: int | None = None
    at_once: int = 1
    excess: float = 0.0
    multiple: int = 1

    def own_text(self) -> TextCorpus:
        """The default corpus, where that is the text."""
        return TextCorpus(**self.corpus)

    @property
    def first_training(self) -> tuple[int, int]:
        """The first budget and its first seed, with which a search takes every rate."""
        tokens, budget = next(iter(self.budgets.items()))
        return tokens, budget.seeds[0]

    def setting(self) -> dict[str, Any]:
        """What the numbers of every column depend on, beside the text."""
        return {
            **self.model,
            **self.training,
            **({} if self.train_pieces is None else {"train_pieces": self.train_pieces}),
            **self.corpus,
            "vocabulary": self.vocabulary,
            "reference_head_dim": self.head_dim,
            "learning_rates": self.rates,
            "recall_part": self.recall_part,
            "recall_documents": self.recall_documents,
            "rows": self.rows,
            "context_texts": self.context_texts,
            "examples": self.examples,
            "depths": self.depths,
            "block": "matched",
        }


@dataclass(frozen=True, kw_only=True)
class Size:
    """One size of every trained part.

    Attributes:
        tasks: the trainings of each part that trains on tasks of the library.
        own: those of a task of a user's own, whose columns do not name it.
        matched_language: the trainings of each part with language models in one block.
        cost: time of each part with every mixer of the library, an estimate.
    """

    device: str
    tasks: Mapping[str, TaskSize]
    own: TaskSize
    language: LanguageSize
    matched_language: Mapping[str, MatchedLanguageSize]
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
    "validation_examples": 512, "evaluations": 1, "initializer_range": 0.05,
}  # fmt: skip
_FULL: dict[str, Plain] = {
    "vocab_size": 512, "width": 128, "heads": 2, "layers": 2, "steps": 2000, "batch_size": 64, "test_examples": 2048,
    "evaluations": 1, "initializer_range": 0.02,
}  # fmt: skip

# Those that read the longer budget: what others are compared with, and a rule of each kind.
MAIN_LANGUAGE = ("softmax", "linear", "mamba2", "deltanet", "gdn", "kda", "gka", "palimpsa-d")
_LANGUAGE_SMALL = MatchedLanguageSize(
    model={"hidden_size": 64, "num_hidden_layers": 4, "num_heads": 2, "tie_word_embeddings": True},
    training={
        "length": 256, "batch_size": 8, "evaluation_rows": 32, "evaluate_every": 50, "checkpoint_every": 50, "log_every": 10,
    },
    rates=(1e-3, 3e-3, 1e-2), budgets={400_000: Budget(seeds=(0, 1, 2))}, vocabulary=2048, head_dim=32,
    source="python", corpus={"max_megabytes": 8}, recall_documents=500, rows=64, positions=(0, 64, 256), contexts=(256, 1024),
    context_texts=8, needles=(256, 512), examples=4, decoded=32,
)  # fmt: skip
_LANGUAGE_FULL = MatchedLanguageSize(
    # 98M parameters.
    model={"hidden_size": 768, "num_hidden_layers": 12, "num_heads": 12, "tie_word_embeddings": True},
    training={
        "length": 2048, "batch_size": 32, "accumulation": 2, "precision": "bf16", "evaluate_every": 100, "checkpoint_every": 200,
        "log_every": 20,
    },
    rates=(3e-4, 1e-3, 3e-3, 1e-2),
    budgets={
        100_000_000: Budget(seeds=(0, 1, 2)),
        300_000_000: Budget(seeds=(0, 1, 2, 3, 4), mixers=MAIN_LANGUAGE),
    },
    vocabulary=16384, head_dim=64, source="debian",
    recall_documents=56_000,  # 16M tokens: none is read twice
    rows=512, positions=(0, 64, 256, 1024, 2048), contexts=(2048, 8192, 65536), context_texts=16, needles=(2048, 8192),
    examples=20,
    excess=0.02,  # 64 channels with a preconditioner: kernels of 63 are several times slower
    multiple=8,  # rows of matrices in 16 bits then begin at multiples of 16 bytes: products of others take several times as long
)  # fmt: skip


def _language_parts(
    size: MatchedLanguageSize, proxy: Mapping[str, Any], proxy_tokens: int, every: tuple[int, ...], tokens: int
) -> dict[str, MatchedLanguageSize]:
    """The parts of the smaller models, of memories alone, and of hybrids, which read one budget. All have as many seeds."""
    seeds = next(iter(size.budgets.values())).seeds
    proxies = replace(
        size,
        model=proxy,
        # Many of them share a GPU, and compiling takes longer than it saves in so short a training.
        training={**size.training, "compile": False},
        budgets={proxy_tokens: Budget(seeds=seeds)},
        train_pieces=1,
        decoded=0,
        at_once=5,  # about 20 GB each, with its graph
    )
    hybrids = replace(size, softmax_every=every, budgets={tokens: Budget(seeds=seeds)})
    return {"language-proxies": proxies, "language-matched": size, "hybrids": hybrids}


# 34M parameters, and in the small size 0.1M.
_PROXY_FULL = {"hidden_size": 512, "num_hidden_layers": 8, "num_heads": 8, "tie_word_embeddings": True}
_PROXY_SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_heads": 1, "tie_word_embeddings": True}
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
            vocabulary=2048, head_dim=32, rates=(3e-3, 1e-2), seeds=(0, 1, 2),
            corpus={"max_megabytes": 8},
        ),
        matched_language=_language_parts(_LANGUAGE_SMALL, _PROXY_SMALL, 200_000, (4,), 400_000),
        cost={
            "recall": "3 hours of one core", "recall-published": "3 hours of one core", "recall-blocks": "6 hours of one core",
            "mqar": "25 minutes of one core", "regression": "13 minutes of one core", "tracking": "10 minutes of one core",
            "language": "40 minutes of one core",
            **dict.fromkeys(("language-proxies", "language-matched", "hybrids"), "not estimated"),
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
            vocabulary=8192, head_dim=64, rates=(1e-3, 3e-3), seeds=(0, 1, 2),
            source="pytorch", corpus={"max_megabytes": 60},
        ),
        matched_language=_language_parts(_LANGUAGE_FULL, _PROXY_FULL, 30_000_000, (4, 8), 300_000_000),
        cost={
            **dict.fromkeys(
                ("recall", "recall-published", "recall-blocks", "tasks", "regression-matched"), "see --dry-run"
            ),
            "mqar": "90 minutes of one GPU", "regression": "30 minutes of one GPU", "tracking": "45 minutes of one GPU",
            "language": "150 minutes of one GPU",
            "language-proxies": "60 minutes of one H200",
            **dict.fromkeys(("language-matched", "hybrids"), "not estimated"),
        },
    ),
}  # fmt: skip
