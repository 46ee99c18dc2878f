"""From all runs of a grid to one row for each mixer and difficulty."""

import dataclasses
import statistics
from collections.abc import Sequence

from .results import RecallResult

__all__ = ["RecallSummary", "best_results", "chance_level", "summarize"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class RecallSummary:
    """The best learning rate's results for one mixer and number of pairs.

    Attributes:
        mixer, pairs: what the row is about.
        chance: accuracy of a memory that knows the values but not their keys.
        accuracy: mean over the seeds at the best learning rate (a diverged run counts 0); None if all runs diverged.
        accuracy_std: standard deviation over the seeds; None with a single seed.
        learning_rate: the best one of the grid: the one with the highest accuracy; None if all runs diverged.
        undertrained: whether the loss of a run at that learning rate was still falling.
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


def chance_level(pairs: int) -> float:
    """Accuracy of guessing one of the values that the sequence shows: 1 / pairs."""
    return 1 / pairs


def best_results(results: Sequence[RecallResult]) -> list[RecallResult]:
    """The runs at the best learning rate, out of runs that differ in learning rate and seed only.

    Highest mean accuracy first; equal accuracies are decided by the lower loss, then by the lower learning rate.
    """
    by_rate: dict[float, list[RecallResult]] = {}
    for result in results:
        by_rate.setdefault(result.run["learning_rate"], []).append(result)

    def merit(rate: float) -> tuple[float, float, float]:
        runs = by_rate[rate]
        loss = statistics.fmean(run.losses[-1] if run.losses else float("inf") for run in runs)
        return statistics.fmean(run.accuracy or 0.0 for run in runs), -loss, -rate

    return by_rate[max(by_rate, key=merit)]


def summarize(results: Sequence[RecallResult]) -> list[RecallSummary]:
    """One row for each mixer and number of pairs, in the order in which they first appear."""
    groups: dict[tuple[str, int], list[RecallResult]] = {}
    for result in results:
        groups.setdefault((result.run["mixer"], result.run["pairs"]), []).append(result)
    return [_summary(mixer, pairs, runs) for (mixer, pairs), runs in groups.items()]


def _summary(mixer: str, pairs: int, runs: list[RecallResult]) -> RecallSummary:
    best = best_results(runs)
    accuracies = [run.accuracy or 0.0 for run in best]
    all_diverged = all(run.diverged for run in runs)
    return RecallSummary(
        mixer=mixer,
        pairs=pairs,
        chance=chance_level(pairs),
        accuracy=None if all_diverged else statistics.fmean(accuracies),
        accuracy_std=statistics.stdev(accuracies) if len(best) > 1 and not all_diverged else None,
        learning_rate=None if all_diverged else best[0].run["learning_rate"],
        undertrained=any(run.undertrained for run in best),
        diverged=sum(run.diverged for run in runs),
        runs=len(runs),
        parameters=runs[0].parameters,
        state_size=runs[0].state_size,
    )
