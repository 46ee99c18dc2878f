"""Evaluation suites by name: tasks of lm-evaluation-harness, their averages, and what papers print of them.

`suites.toml` declares the suites and the printed tables.
"""

from __future__ import annotations

import math
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from ..checks import check_choice, check_texts
from ..results import HarnessScore, SuiteScores

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

__all__ = ["SUITES", "Suite", "check_suites", "compare_with_papers", "evaluate_suites"]

_DECLARED = Path(__file__).with_name("suites.toml")
_THIS_MODEL = "this model"


@dataclass(frozen=True, kw_only=True)
class Suite:
    """A suite of tasks.

    Attributes:
        columns: "task/metric" of the numbers that stand for it; the metric * of a task that is made for a context length stands
            for all lengths.
    """

    columns: tuple[str, ...]

    @property
    def tasks(self) -> tuple[str, ...]:
        """Names of its tasks in lm-evaluation-harness, or in the folder tasks/."""
        return tuple(dict.fromkeys(column.partition("/")[0] for column in self.columns))

    @property
    def has_lengths(self) -> bool:
        """Whether its prompts are made for a context length."""
        return self.columns[0].endswith("/*")


@cache
def _declared() -> dict[str, Any]:
    return tomllib.loads(_DECLARED.read_text("utf-8"))


SUITES: Mapping[str, Suite] = {
    name: Suite(columns=tuple(suite["columns"].split())) for name, suite in _declared()["suites"].items()
}


def check_suites(suites: Sequence[str]) -> Sequence[str]:
    """The names of suites. ValueError, TypeError: one that is none."""
    for suite in check_texts("suites", suites, what="names of suites"):
        check_choice("a suite", suite, SUITES)
    return suites


def evaluate_suites(
    model: Any, tokenizer: Any, suites: Sequence[str], *, ruler_lengths: Sequence[int] | None = None, **options: Any
) -> tuple[list[HarnessScore], list[SuiteScores]]:
    """Scores of a loaded model on suites: those of the harness, and the suites' own with the papers' beside them.

    Args:
        suites: names of `SUITES`.
        ruler_lengths: context lengths of the tasks that are made for one, in tokens; 4096 when None.
        options: of `evaluate_with_harness`.

    Raises:
        ValueError: an unknown suite, and as `evaluate_with_harness`.
    """
    if not check_suites(suites):
        raise ValueError("suites must hold at least one name of a suite, got none")
    from .harness import evaluate_with_harness  # needs the extra `eval`

    scores: list[HarnessScore] = []
    for lengths in (None, [4096] if ruler_lengths is None else ruler_lengths):
        chosen = [SUITES[suite].tasks for suite in suites if SUITES[suite].has_lengths == (lengths is not None)]
        if tasks := tuple(dict.fromkeys(task for tasks in chosen for task in tasks)):
            scores += evaluate_with_harness(model, tokenizer, tasks, ruler_lengths=lengths, **options)
    return scores, compare_with_papers(scores, suites, model.num_parameters())


def compare_with_papers(scores: Sequence[HarnessScore], suites: Sequence[str], parameters: int) -> list[SuiteScores]:
    """The numbers of each suite, and each printed table of its tasks, with the model in its first row.

    Accuracies are in percent, as papers print them. Of a paper, the rows are those of the size nearest to `parameters`.
    """
    found = {(score.task, score.metric): score.value for score in scores}
    rows = []
    for suite in suites:
        columns = [wide for column in SUITES[suite].columns for wide in _widen(column, found)]
        rows.append(_measured(suite, columns, found))
    tasks = {task for suite in suites for task in SUITES[suite].tasks}
    for table in _declared()["tables"]:
        columns = table["columns"].split()
        if tasks.intersection(column.partition("/")[0] for column in columns):
            size = min(table["sizes"], key=lambda size: abs(math.log(size["parameters"] / parameters)))
            source = f"{table['paper']}, {table['place']}"
            rows.append(_measured(source, columns, found, has_average=table.get("average", True)))
            rows += _printed(source, _describe(size), columns, size["rows"])
    return rows


def _widen(column: str, found: Mapping[tuple[str, str], float]) -> list[str]:
    """A column for each measured length where the column stands for all."""
    task, _, metric = column.partition("/")
    if metric != "*":
        return [column]
    lengths = sorted(int(name) for other, name in found if other == task and name.isdigit())
    return [f"{task}/{length}" for length in lengths]


def _measured(
    source: str, columns: Sequence[str], found: Mapping[tuple[str, str], float], *, has_average: bool = True
) -> SuiteScores:
    """The row of the model. Its average is None where a column is missing."""
    values: dict[str, float | None] = {}
    for column in columns:
        task, _, metric = column.partition("/")
        value = found.get((task, metric))
        values[column] = value if value is None or _is_perplexity(column) else 100 * value
    averaged = [value for column, value in values.items() if not _is_perplexity(column)]
    known = [value for value in averaged if value is not None]
    is_complete = has_average and known and len(known) == len(averaged)
    return SuiteScores(
        source=source,
        size="",
        model=_THIS_MODEL,
        values=values,
        average=statistics.fmean(known) if is_complete else None,
    )


def _printed(source: str, size: str, columns: Sequence[str], rows: str) -> Iterator[SuiteScores]:
    """The rows of a paper's table; a number beyond the columns is the average."""
    for row in rows.strip().splitlines():
        model, *numbers = row.split()
        values = [float(number) for number in numbers]
        average = values[len(columns)] if len(values) > len(columns) else None
        yield SuiteScores(
            source=source, size=size, model=model, values=dict(zip(columns, values, strict=False)), average=average
        )


def _is_perplexity(column: str) -> bool:
    return column.endswith("perplexity")


def _describe(size: Mapping[str, Any]) -> str:
    millions = size["parameters"] / 1e6
    number = f"{millions / 1000:g}B" if millions >= 1000 else f"{millions:g}M"
    return f"{number} parameters, {size['training']}"
