"""Chooses the learning rate with the first seed alone: the other seeds train at the best rate only."""

from __future__ import annotations

from collections.abc import Mapping
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
        grid: those of the first seed, one per learning rate.
        chosen: those at the best rate of the grid, one per seed. A seed whose training failed has none.
    """

    grid: list[RecallResult]
    chosen: list[RecallResult]


def search_rates(
    experiments: Mapping[str, RecallExperiment], outputs: Mapping[str, Path], **options: Any
) -> tuple[dict[str, RateSearch], WorkerError | KeyboardInterrupt | None]:
    """Train every experiment: its first seed at all learning rates, its other seeds at the best of these.

    An interruption is returned, as a failure is. The same call then continues; a run that has ended is never trained again.

    Args:
        experiments: by name, each with one mixer and one number of pairs.
        outputs: by name, the folder of the experiment; every seed has a folder in it.
        options: keyword arguments of `run_recall_parts`.

    Returns:
        The results by name, without the experiments whose grid failed or did not end, and the first failure or the
        interruption.

    Raises:
        WorkerError: no file can be written.
    """
    first = {(name, one.seeds[0]): one for name, one in experiments.items()}
    grids, failure = _train(first, outputs, options)
    searches = {name: RateSearch(grid, best_results(grid)) for (name, _), grid in grids.items()}
    if isinstance(failure, KeyboardInterrupt):
        return searches, failure
    later = {
        (name, seed): replace(experiments[name], learning_rates=(chosen[0].run["learning_rate"],))
        for name, (_, chosen) in searches.items()
        for seed in experiments[name].seeds[1:]
    }
    trained, later_failure = _train(later, outputs, options)
    for (name, _), results in trained.items():
        searches[name].chosen.extend(results)
    return searches, later_failure if isinstance(later_failure, KeyboardInterrupt) else failure or later_failure


def _find_ended(experiment: RecallExperiment, folder: Path) -> list[RecallResult]:
    """The results in the folder that are those of the experiment's runs."""
    file, runs = folder / "results.json", [as_stored(run.record()) for run in experiment.runs()]
    return [result for result in load_results(file) if result.run in runs] if file.exists() else []


def _train(
    wanted: Mapping[tuple[str, int], RecallExperiment],
    outputs: Mapping[str, Path],
    options: Mapping[str, Any],
) -> tuple[dict[tuple[str, int], list[RecallResult]], WorkerError | KeyboardInterrupt | None]:
    """The results of experiments by name and the seed to train, of those that have ended, and why others have not. All runs wait
    in one queue."""
    parts = {f"{name}/{seed}": replace(one, seeds=(seed,)) for (name, seed), one in wanted.items()}
    folders = {f"{name}/{seed}": outputs[name] / f"seed{seed}" for name, seed in wanted}
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
