"""Parts that train small models on generated tasks: recall, regression, state tracking. `fastweights recall` trains
them."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from ..files import file_name
from ..layers import MixerChoice
from ..results import RecallResult, load_results
from ..results.experiment import best_results
from ..training import RecallExperiment, WorkerError, run_recall_parts
from ..training.objectives import objective_of
from .matching import Matched, Matching
from .record import Board, measured_here
from .request import Request
from .sizes import TaskSize

__all__ = ["matched", "run_tasks"]


def run_tasks(part: str, size: TaskSize, request: Request) -> Board:
    """Train every mixer of the request in every column: the first seed at all learning rates, the others at its best one.

    A run that has ended is never trained again; the board has the rows whose seeds have all ended.
    """
    board = Board.opened(request.output, part, request.size, size.setting())
    seeds = request.seeds or size.seeds
    entries = {
        (column, choice.label): matched(size, column, choice) for column in size.columns for choice in request.mixers
    }
    failures: list[WorkerError] = []
    first = {(column, label, seeds[0]): (mixer, size.rates) for (column, label), mixer in entries.items()}
    grids = _trained(part, size, request, first, failures)
    best = {(column, label): best_results(grid)[0] for (column, label, _), grid in grids.items()}
    later = {
        (column, label, seed): (entries[column, label], (result.run["learning_rate"],))
        for (column, label), result in best.items()
        for seed in seeds[1:]
    }
    others = _trained(part, size, request, later, failures)
    for (column, label), result in best.items():
        more = [others[column, label, seed][0] for seed in seeds[1:] if (column, label, seed) in others]
        if len(more) == len(seeds) - 1:
            grid = grids[column, label, seeds[0]]
            row = _row(column, entries[column, label], seeds, [result, *more], grid, request.device)
            board.add(f"{column}, {label}", row)
    if failures:
        raise failures[0]
    return board


def matched(size: TaskSize, column: str, choice: MixerChoice) -> Matched:
    """The mixer in the size in which it takes part in a column."""
    head, fields = size.columns[column]
    (run,) = RecallExperiment(**size.shared, **fields, mixers=(choice,), learning_rates=size.rates[:1]).runs()
    config = run.model_config()
    model = {
        "vocab_size": config.vocab_size, "hidden_size": config.hidden_size, "num_hidden_layers": config.num_hidden_layers,
        "num_heads": config.num_heads, "tie_word_embeddings": config.tie_word_embeddings,
    }  # fmt: skip
    return Matching(model, head, objective_of(run.make_task()).build).of(choice)


def _trained(
    part: str,
    size: TaskSize,
    request: Request,
    wanted: Mapping[tuple[str, str, int], tuple[Matched, Sequence[float]]],
    failures: list[WorkerError],
) -> dict[tuple[str, str, int], list[RecallResult]]:
    """The results by column, label and seed; all wait in one queue. Where runs failed, those of the others, and the failure."""
    experiments, folders = {}, {}
    for (column, label, seed), (mixer, rates) in wanted.items():
        name = f"{column}/{label}/{seed}"
        experiments[name] = RecallExperiment(
            **size.shared, **size.columns[column][1], mixers=(mixer.choice,), intermediate_size=mixer.intermediate_size,
            learning_rates=tuple(rates), seeds=(seed,), device=request.device,
        )  # fmt: skip
        folders[name] = (
            request.trainings / f"{part}-{request.size}" / file_name(column) / file_name(label) / f"seed{seed}"
        )
    for folder in folders.values():
        folder.mkdir(parents=True, exist_ok=True)
    try:
        done = run_recall_parts(
            experiments, folders, workers=request.processes(), reporter=request.reporter, imports=request.imports
        )
    except WorkerError as error:
        if error.ends_all:
            raise
        failures.append(error)
        files = {name: folder / "results.json" for name, folder in folders.items()}
        done = {name: load_results(file) for name, file in files.items() if file.exists()}
    names = {key: "/".join(map(str, key)) for key in wanted}
    return {key: done[name] for key, name in names.items() if len(done.get(name, ())) == len(experiments[name].runs())}


def _row(
    column: str,
    mixer: Matched,
    seeds: Sequence[int],
    runs: Sequence[RecallResult],
    grid: Sequence[RecallResult],
    device: str,
) -> dict[str, Any]:
    exact = [run.best_error for run in runs if run.best_error is not None]
    return {
        "column": column, "mixer": mixer.choice.label, "options": dict(mixer.choice.options), "seeds": list(seeds),
        "values": [run.counted_value for run in runs], "learning rate": runs[0].run["learning_rate"],
        "undertrained": any(run.undertrained for run in runs), "diverged": sum(run.diverged for run in (*grid, *runs[1:])),
        "runs": len(grid) + len(runs) - 1, "chance": runs[0].chance_level,
        "exact": statistics.fmean(exact) if exact else None, "parameters": runs[0].parameters,
        "state": runs[0].state_size, "grows": mixer.grows, "intermediate size": mixer.intermediate_size,
        "seconds": round(sum(run.wall_seconds for run in (*grid, *runs[1:])), 1), "measured": measured_here(device),
    }  # fmt: skip
