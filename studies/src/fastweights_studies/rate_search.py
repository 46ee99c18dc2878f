"""Chooses the learning rate with the first seed alone: the other seeds train at the best rate only. A grid whose best rate is its
lowest or highest one is widened."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from fastweights.results import RecallResult, load_results
from fastweights.results.experiment import best_results
from fastweights.training import RecallExperiment, WorkerError
from fastweights.training.folder import as_stored
from fastweights.training.recall.run import run_recall_parts

__all__ = ["RateSearch", "search_rates"]


class RateSearch(NamedTuple):
    """The results of one experiment.

    Attributes:
        grid: those of the first seed, one per learning rate, with those by which it was widened.
        chosen: those at the best rate of the grid, one per seed. A seed whose training failed has none.
    """

    grid: list[RecallResult]
    chosen: list[RecallResult]


def search_rates(
    experiments: Mapping[str, RecallExperiment],
    outputs: Mapping[str, Path],
    *,
    limits: tuple[float, float] | None = None,
    **options: Any,
) -> tuple[dict[str, RateSearch], WorkerError | KeyboardInterrupt | None]:
    """Train every experiment: its first seed at all learning rates, its other seeds at the best of these.

    An interruption is returned, as a failure is. The same call then continues; a run that has ended is never trained again.

    Args:
        experiments: by name, each with one mixer and one number of pairs.
        outputs: by name, the folder of the experiment; every seed has a folder in it.
        limits: the lowest and the highest rate that a grid is widened to; None to leave grids as they are. While the best rate is
            at an end of the grid, the next one beyond it is trained too.
        options: keyword arguments of `run_recall_parts`.

    Returns:
        The results by name, without the experiments whose grid failed or did not end, and the first failure or the
        interruption.

    Raises:
        WorkerError: no file can be written.
    """
    first = {(name, f"seed{one.seeds[0]}"): replace(one, seeds=one.seeds[:1]) for name, one in experiments.items()}
    found, failure = _train(first, outputs, options)
    grids = {name: list(results) for (name, _), results in found.items()}
    if limits is not None and not isinstance(failure, KeyboardInterrupt):
        widening_failure = _widen(grids, limits, experiments, outputs, options)
        failure = widening_failure if isinstance(widening_failure, KeyboardInterrupt) else failure or widening_failure
    searches = {name: RateSearch(grid, best_results(grid)) for name, grid in grids.items()}
    if isinstance(failure, KeyboardInterrupt):
        return searches, failure
    later = {
        (name, f"seed{seed}"): replace(
            experiments[name], learning_rates=(chosen[0].run["learning_rate"],), seeds=(seed,)
        )
        for name, (_, chosen) in searches.items()
        for seed in experiments[name].seeds[1:]
    }
    trained, later_failure = _train(later, outputs, options)
    for (name, _), results in trained.items():
        searches[name].chosen.extend(results)
    return searches, later_failure if isinstance(later_failure, KeyboardInterrupt) else failure or later_failure


def _widen(
    grids: dict[str, list[RecallResult]],
    limits: tuple[float, float],
    experiments: Mapping[str, RecallExperiment],
    outputs: Mapping[str, Path],
    options: Mapping[str, Any],
) -> WorkerError | KeyboardInterrupt | None:
    """Add rates to grids until the best of each lies inside. Grids that stay open, because trainings have failed or were
    interrupted, are left out. Returns the first failure or the interruption."""
    failure: WorkerError | KeyboardInterrupt | None = None
    while beyond := {name: rate for name, grid in grids.items() if (rate := _next_rate(grid, limits)) is not None}:
        if isinstance(failure, KeyboardInterrupt):
            for name in beyond:
                del grids[name]
            break
        wanted = {}
        for name, rate in beyond.items():
            first = experiments[name].seeds[0]
            wider = replace(experiments[name], learning_rates=(rate,), seeds=(first,))
            wanted[name, f"seed{first}-lr{rate!r}"] = wider
        added, failed = _train(wanted, outputs, options)
        failure = failed if isinstance(failed, KeyboardInterrupt) else failure or failed
        for name, folder in wanted:
            if (name, folder) in added:
                grids[name] += added[name, folder]
            else:
                del grids[name]
    return failure


def _next_rate(grid: Sequence[RecallResult], limits: tuple[float, float]) -> float | None:
    """The rate beyond the end of a grid at which its best one is, as far from it as its neighbour, rounded to one digit; None
    where the best one lies inside, or the next beyond the limits."""
    rates = sorted(result.run["learning_rate"] for result in grid)
    best = best_results(grid)[0].run["learning_rate"]
    if len(rates) < 2 or best not in (rates[0], rates[-1]):
        return None
    neighbour = rates[1] if best == rates[0] else rates[-2]
    rate = float(f"{best * best / neighbour:.0e}")
    return rate if limits[0] <= rate <= limits[1] else None


def _find_ended(experiment: RecallExperiment, folder: Path) -> list[RecallResult]:
    """The results in the folder that are those of the experiment's runs."""
    file, runs = folder / "results.json", [as_stored(run.record()) for run in experiment.runs()]
    return [result for result in load_results(file) if result.run in runs] if file.exists() else []


def _train(
    wanted: Mapping[tuple[str, str], RecallExperiment],
    outputs: Mapping[str, Path],
    options: Mapping[str, Any],
) -> tuple[dict[tuple[str, str], list[RecallResult]], WorkerError | KeyboardInterrupt | None]:
    """The results of experiments by name and the folder in that of the name, of those that have ended, and why others have not.
    All runs wait in one queue."""
    parts = {f"{name}/{folder}": one for (name, folder), one in wanted.items()}
    folders = {f"{name}/{folder}": outputs[name] / folder for name, folder in wanted}
    failure: WorkerError | KeyboardInterrupt | None = None
    try:
        done = run_recall_parts(parts, folders, **options)
    except KeyboardInterrupt as interruption:
        failure = interruption
    except WorkerError as error:
        if error.ends_all:
            raise
        failure = error
    if failure is not None:
        done = {part: _find_ended(one, folders[part]) for part, one in parts.items()}
    ended = {key: done[part] for key, part in zip(wanted, parts) if len(done.get(part, ())) == len(parts[part].runs())}
    return ended, failure
