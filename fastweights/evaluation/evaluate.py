"""All measurements of a trained text model, one after another. `fastweights evaluate` runs them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ..checks import check_choice, check_list, check_number, check_size, check_texts, check_whole_number
from ..kinds import checked
from .divided import is_divided
from .perplexity import perplexity_by_length
from .reading import MOST_EXAMPLES, check_lengths, check_model, check_tokenizer
from .ruler import DEPTHS, NEEDLE_TASKS, RULER_TASKS, check_fit, needle_recall, ruler_recall
from .word_recall import task_in_words, word_recall, word_tasks

__all__ = ["MEASURES", "EvaluationSettings", "evaluate"]


class Measures(Sequence[str]):
    """The names of all measures. Tasks that are registered later join them."""

    def _names(self) -> tuple[str, ...]:
        return "perplexity", *word_tasks(), *NEEDLE_TASKS, *RULER_TASKS

    def __getitem__(self, index: Any) -> Any:
        return self._names()[index]

    def __len__(self) -> int:
        return len(self._names())


MEASURES = Measures()


@dataclass(frozen=True, kw_only=True)
class EvaluationSettings:
    """The measures of an evaluation and their settings.

    Attributes:
        measures: names of `MEASURES`.
        lengths: tokens of context.
        texts, stretch: of `perplexity_by_length`.
        batch_size: texts read at a time, for perplexity, needles and RULER tasks.
        pairs, symbols: of `word_recall`, the same at every length.
        recall_examples: sequences of a recall task at a length.
        needle_examples: texts with a needle at each length and depth.
        ruler_examples: texts of each RULER task at each length.
        depths: where in the text the needle is, from 0 to 1.
        seed: of recall tasks, needles and RULER tasks.
        block: tokens read at a time.

    Raises:
        ValueError: an unknown measure or one twice, or a number out of its range.
        TypeError: a setting of a wrong kind.
    """

    measures: Sequence[str] = ("perplexity",)
    lengths: Sequence[int] = (512, 1024, 2048, 4096, 8192, 16384)
    texts: int = 16
    stretch: int = 256
    batch_size: int = 1
    pairs: int = 8
    symbols: int = 64
    recall_examples: int = 64
    needle_examples: int = 4
    ruler_examples: int = 16
    depths: Sequence[float] = DEPTHS
    seed: int = 0
    block: int = 512

    def __post_init__(self) -> None:
        for measure in check_texts("measures", self.measures, what="names of measures"):
            check_choice("a measure", measure, MEASURES)
        check_lengths(check_list("lengths", self.lengths, "whole numbers"), 2)
        for name in (
            "texts",
            "stretch",
            "batch_size",
            "pairs",
            "symbols",
            "recall_examples",
            "needle_examples",
            "ruler_examples",
            "block",
        ):
            check_size(name, getattr(self, name), high=MOST_EXAMPLES)
        check_whole_number("seed", self.seed)
        if len(set(self.measures)) < len(self.measures):
            raise ValueError(f"measures must be different from each other, got {', '.join(self.measures)}")
        for depth in check_list("depths", self.depths, "numbers"):
            check_number("depths", depth, low=0, high=1)


@checked
def evaluate(
    model: Any,
    tokenizer: Any,
    settings: EvaluationSettings,
    *,
    documents: Iterable[Sequence[int]] = (),
    text: str | None = None,
) -> Iterator[tuple[str, list[Any]]]:
    """Measure a model; yields the name of a measure and rows of its results as soon as they are there.

    "perplexity" gives its rows (`LengthPerplexity`) for all lengths at once, a recall task one row (`WordRecall`) per length, a
    needle task one row (`NeedleRecall`) for each depth of a length, a RULER task one row (`RulerRecall`) per length.

    Args:
        documents: token ids for "perplexity", a document each, as the tokenizer gives them.
        text: what needles are hidden in and words taken from; Python's language reference when None.

    Raises:
        ValueError: lengths, pairs, symbols or text that do not fit a recall, needle or RULER task, or a recall task with a model
            under context parallelism, at once, before anything is measured; for other errors, each measure's own function raises
            when it runs.
    """
    check_tokenizer(tokenizer)
    lengths = check_lengths(settings.lengths, 2)
    _check_fit(tokenizer, settings, lengths[0], text)
    check_model(model)
    if is_divided(model):
        for measure in settings.measures:
            check_choice("a measure under context parallelism", measure, ("perplexity", *NEEDLE_TASKS, *RULER_TASKS))
    return _measurements(model, tokenizer, settings, lengths, documents, text)


def _measurements(
    model: Any,
    tokenizer: Any,
    settings: EvaluationSettings,
    lengths: Sequence[int],
    documents: Iterable[Sequence[int]],
    text: str | None,
) -> Iterator[tuple[str, list[Any]]]:
    """`evaluate` of settings that fit."""
    block, batch_size, seed = settings.block, settings.batch_size, settings.seed
    asked: dict[str, Any] = {"seed": seed, "text": text, "block": block, "batch_size": batch_size}
    for measure in settings.measures:
        if measure == "perplexity":
            rows = perplexity_by_length(
                model,
                documents,
                lengths,
                texts=settings.texts,
                separator=tokenizer.eos_token_id,
                stretch=settings.stretch,
                block=block,
                batch_size=batch_size,
            )
            yield measure, rows
            continue
        for length in lengths:
            about = (model, tokenizer, measure)
            if measure in NEEDLE_TASKS:
                needles = {"length": length, "examples": settings.needle_examples, **asked}
                yield measure, [needle_recall(*about, depth=depth, **needles) for depth in settings.depths]
            elif measure in RULER_TASKS:
                yield measure, [ruler_recall(*about, length=length, examples=settings.ruler_examples, **asked)]
            else:
                row = word_recall(
                    *about,
                    length=length,
                    pairs=settings.pairs,
                    symbols=settings.symbols,
                    examples=settings.recall_examples,
                    seed=seed,
                    block=block,
                )
                yield measure, [row]


def _check_fit(tokenizer: Any, settings: EvaluationSettings, shortest: int, text: str | None) -> None:
    """ValueError unless all recall, needle and RULER tasks fit into the shortest length."""
    for measure in settings.measures:
        if measure in NEEDLE_TASKS or measure in RULER_TASKS:
            examples = settings.needle_examples if measure in NEEDLE_TASKS else settings.ruler_examples
            check_fit(tokenizer, measure, length=shortest, examples=examples, seed=settings.seed, text=text)
        elif measure != "perplexity":
            try:
                task_in_words(tokenizer, measure, length=shortest, pairs=settings.pairs, symbols=settings.symbols)
            except ValueError as error:  # the task says length, the settings say lengths
                raise ValueError(re.sub(r"\blength\b", "lengths", str(error))) from None
