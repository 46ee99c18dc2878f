"""A whole recall experiment: one row per mixer and difficulty, one line that describes it, and the file results.json."""

import dataclasses
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..files import write_json
from ..kinds import checked
from .marks import Standing, compared_with_chance
from .recall import RecallResult
from .records import ResultsError, from_record, read_object

__all__ = [
    "RecallSummary",
    "best_results",
    "describe_experiment",
    "load_results",
    "save_results",
    "summarize",
]

FORMAT = 1  # of results.json


@checked
@dataclasses.dataclass(frozen=True, kw_only=True)
class RecallSummary:
    """The best learning rate's results for one mixer and number of pairs.

    Attributes:
        mixer, pairs: the label of the mixer and the number of pairs of the row.
        measure: "accuracy", or "error" for tasks measured by the squared error; the other one is None.
        chance: accuracy of guessing, as the task defines it; or the error of predicting 0.
        standing: whether the accuracy of the runs that finished is below, at or above chance (`compared_with_chance`), or the
            error at or above that of predicting 0 ("at chance"); None if all runs diverged.
        accuracy: mean over the seeds at the best learning rate (a diverged run counts 0); None if all runs diverged.
        accuracy_std: standard deviation over the seeds; None with a single seed.
        error, error_std: likewise (a diverged run counts as predicting 0).
        best_error: what the best predictor has on the same sequences.
        learning_rate: the best one of the grid: the one with the highest accuracy or lowest error; None if all runs diverged.
        undertrained: whether the loss of a run at that learning rate was still falling, or its curve is too short to tell.
        diverged, runs: diverged runs, and all runs, of the grid.
        parameters, state_size: of the model (the state after a whole sequence).
    """

    mixer: str
    pairs: int
    chance: float
    accuracy: float | None
    accuracy_std: float | None
    learning_rate: float | None
    undertrained: bool
    diverged: int
    runs: int
    parameters: int
    state_size: int
    measure: str = "accuracy"
    error: float | None = None
    error_std: float | None = None
    best_error: float | None = None
    standing: Standing | None = None

    @property
    def value(self) -> float | None:
        """Of the measure; None if all runs diverged."""
        return self.error if self.measure == "error" else self.accuracy

    @property
    def value_std(self) -> float | None:
        """Its standard deviation over the seeds; None with a single seed."""
        return self.error_std if self.measure == "error" else self.accuracy_std

    @property
    def rank(self) -> tuple[bool, float]:
        """To sort by: the best row is the smallest."""
        value = self.value or 0.0
        return self.value is None, value if self.measure == "error" else -value


def best_results(results: Sequence[RecallResult]) -> list[RecallResult]:
    """The runs at the best learning rate, out of runs that differ in learning rate and seed only.

    Highest mean accuracy (lowest mean error) first, on validation sequences where the runs have some. Equal ones are decided by
    the fewer steps of runs that end at `stop_at`, then by the lower loss, then by the lower learning rate.
    """
    by_rate: dict[float, list[RecallResult]] = {}
    for result in results:
        by_rate.setdefault(result.run["learning_rate"], []).append(result)

    def merit(rate: float) -> tuple[float, ...]:
        runs = by_rate[rate]
        loss = statistics.fmean(run.losses[-1] if run.losses else float("inf") for run in runs)
        value = statistics.fmean(run.chosen_by for run in runs)
        steps = statistics.fmean(run.stopped_at for run in runs) if runs[0].run.get("stop_at") is not None else 0
        return -value if runs[0].measure == "error" else value, -steps, -loss, -rate

    return by_rate[max(by_rate, key=merit)]


@checked
def summarize(results: Sequence[RecallResult]) -> list[RecallSummary]:
    """One row for each mixer and number of pairs, in the order in which they first appear."""
    groups: dict[tuple[str, int], list[RecallResult]] = {}
    for result in results:
        groups.setdefault((result.mixer, result.run["pairs"]), []).append(result)
    return [_summarize_group(mixer, pairs, runs) for (mixer, pairs), runs in groups.items()]


def _summarize_group(mixer: str, pairs: int, runs: list[RecallResult]) -> RecallSummary:
    best = best_results(runs)
    values = [run.counted_value for run in best]
    all_diverged = all(run.diverged for run in runs)
    value = None if all_diverged else statistics.fmean(values)
    spread = statistics.stdev(values) if len(best) > 1 and not all_diverged else None
    is_error = runs[0].measure == "error"
    bests = [run.best_error for run in best if run.best_error is not None]
    return RecallSummary(
        mixer=mixer,
        pairs=pairs,
        measure=runs[0].measure,
        chance=runs[0].chance_level,
        standing=_compare_with_chance(best),
        accuracy=None if is_error else value,
        accuracy_std=None if is_error else spread,
        error=value if is_error else None,
        error_std=spread if is_error else None,
        best_error=statistics.fmean(bests) if bests else None,
        learning_rate=None if all_diverged else best[0].run["learning_rate"],
        undertrained=any(run.undertrained for run in best),
        diverged=sum(run.diverged for run in runs),
        runs=len(runs),
        parameters=runs[0].parameters,
        state_size=runs[0].state_size,
    )


def _compare_with_chance(runs: list[RecallResult]) -> Standing | None:
    """Of the runs that finished: of all their test queries together, or of their mean error."""
    finished = [run for run in runs if run.value is not None]
    if not finished:
        return None
    chance = runs[0].chance_level
    if runs[0].measure == "error":
        return "at chance" if statistics.fmean(run.counted_value for run in finished) >= chance else "above chance"
    queries = sum(run.test_queries for run in finished)
    right = sum(run.counted_value * run.test_queries for run in finished)
    return compared_with_chance(right / queries, chance, queries)


def describe_experiment(results: Sequence[RecallResult]) -> str:
    """Task, model, training and grid in one line, from runs that differ in mixer, pairs, learning rate and seed only."""
    run = results[0].run
    options = ", ".join(f"{name}={value}" for name, value in run.get("task_options", {}).items())
    task = f"{run['task']} ({options})" if options else run["task"]
    length = "" if run["length"] is None else f", length {run['length']}"
    rates, seeds, block = _values(results, "learning_rate"), _values(results, "seed"), run.get("block", "published")
    tokens = "" if results[0].measure == "error" else f", {run['vocab_size']:,} tokens"
    return (
        f"{task}{length}{tokens}; {_count_noun(run['layers'], 'layer')} of width {run['width']}, "
        f"{_count_noun(run['heads'], 'head')}, {block} block; {run['steps']:,} steps of {run['batch_size']}, "
        f"lr {', '.join(f'{rate:g}' for rate in rates)}; {_count_noun(len(seeds), 'seed')}"
    )


def _values(results: Sequence[RecallResult], field: str) -> list[Any]:
    return sorted({result.run[field] for result in results})


def _count_noun(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


@checked
def save_results(path: Path, *, experiment: dict[str, Any], results: Sequence[RecallResult]) -> None:
    """Write the experiment's configuration, the summary (see `RecallSummary`) and all runs (see `RecallResult`)."""
    write_json(
        path,
        {
            "format": FORMAT,
            "experiment": experiment,
            "summary": [dataclasses.asdict(row) for row in summarize(results)],
            "runs": [dataclasses.asdict(result) for result in results],
        },
    )


@checked
def load_results(path: Path) -> list[RecallResult]:
    """All runs of a results.json.

    Raises:
        ResultsError: the file is damaged or has another format.
    """
    record = read_object(path)
    if record.get("format") != FORMAT or not isinstance(record.get("runs"), list):
        raise ResultsError(f"result {path} is not of format {FORMAT}; delete that file to have it made again")
    return [from_record(RecallResult, run, path) for run in record["runs"]]
