"""Parts that train small models on generated tasks: recall, regression, state tracking. `fastweights recall` trains
them."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from fastweights.files import file_name
from fastweights.layers import MixerChoice
from fastweights.training import RecallExperiment
from fastweights.training.recall.objectives import objective_of

from ..rate_search import RateSearch, search_rates
from .matching import Matched, Matching
from .record import Board, joined_origins, measured_here, row_key
from .request import Request
from .sizes import TaskSize

__all__ = ["matched", "run_tasks"]


def run_tasks(part: str, size: TaskSize, request: Request) -> Board:
    """Train every mixer of the request in every column: the first seed at all learning rates, the others at its best one.

    A run that has ended is never trained again, nor a mixer whose row on the board has these seeds; the board has the rows whose
    seeds have all ended.
    """
    board = Board.opened(request.output, part, request.size, size.setting())
    seeds = request.seeds or size.seeds
    entries = {
        (column, choice.label): matched(size, column, choice)
        for column in size.columns
        for choice in request.mixers
        if board.rows.get(row_key(column, choice.label), {}).get("seeds") != list(seeds)
    }
    experiments, folders = {}, {}
    for (column, label), mixer in entries.items():
        name = f"{column}/{label}"
        experiments[name] = RecallExperiment(
            **size.shared, **size.columns[column][1], mixers=(mixer.choice,), intermediate_size=mixer.intermediate_size,
            learning_rates=size.rates, seeds=seeds, device=request.device,
        )  # fmt: skip
        folders[name] = request.trainings / f"{part}-{request.size}" / file_name(column) / file_name(label)
    searches, failure = search_rates(
        experiments, folders, workers=request.processes(), reporter=request.reporter, imports=request.imports
    )
    for (column, label), mixer in entries.items():
        search = searches.get(f"{column}/{label}")
        if search is not None and len(search.chosen) == len(seeds):
            key = row_key(column, label)
            board.add(key, _with_origins(board.rows.get(key), _row(column, mixer, seeds, search, request.device)))
    if failure is not None:
        raise failure
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


def _row(column: str, mixer: Matched, seeds: Sequence[int], search: RateSearch, device: str) -> dict[str, Any]:
    grid, runs = search
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


def _with_origins(before: Mapping[str, Any] | None, row: Mapping[str, Any]) -> Mapping[str, Any]:
    """The row; its first seeds keep when and where they were measured if the board had them."""
    if before is None or any(row[name][: len(before["seeds"])] != before[name] for name in ("seeds", "values")):
        return row
    return {**row, **joined_origins(before, row["measured"])}
