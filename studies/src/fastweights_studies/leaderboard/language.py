"""Language models of equal state and parameters, trained as `fastweights train` does, and the needles they are asked for."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from fastweights.data.text import TextTokenizer
from fastweights.files import file_name
from fastweights.layers import MixerChoice
from fastweights.models import FastWeightsForCausalLM
from fastweights.results import LanguageResult
from fastweights.results.language import load_result

from .matching import Matched, Matching
from .processes import call_each, has_ended, train_models
from .record import LATER, Board, joined_origins, library_rows, measured_here, row_key
from .request import Request
from .sizes import LanguageSize

__all__ = ["NEEDLE", "close_mixers", "needle_setting", "run_language", "run_needle"]

NEEDLE = "s-niah-1"


def run_language(size: LanguageSize, request: Request) -> Board:
    """Train every mixer of the request: the first seed at all learning rates, the other seeds at its best one where another mixer
    is close to it.

    The other mixers are those of the request, of the board and of the library's own results. A mixer that the board has trains
    only seeds that are missing, at its rate. Where the trainings are stopped, the board has the mixers whose whole grid is done.
    """
    check_device(request.device)
    board = Board.opened(request.output, "language", request.size, size.setting())
    matching = _matching(size)
    mixers = {choice.label: matching.of(choice) for choice in request.mixers}
    seeds = request.seeds or size.seeds
    first = seeds[0]
    known = {label: row for label in mixers if (row := board.rows.get(row_key("held out", label)))}
    grid = {
        (label, rate, first): _run(size, request, mixer, rate, first)
        for label, mixer in mixers.items()
        if label not in known
        for rate in size.rates
    }
    later: dict[tuple[str, float, int], Any] = {}
    try:
        train_models(list(grid.values()), request)
        best = {label: (row["values"][0], row["learning rate"]) for label, row in known.items() if row["values"]}
        best |= _best(grid)
        others = [*library_rows("language", request.size, size.setting()), *board.rows.values()]
        close = close_mixers(
            {**_first_losses(others), **{label: loss for label, (loss, _) in best.items()}}, size.close
        )
        later |= {
            (label, rate, seed): _run(size, request, mixers[label], rate, seed)
            for label, (_, rate) in best.items()
            if label in close
            for seed in seeds
            if seed not in (_seeds_of(known[label]) if label in known else (first,))
        }
        train_models(list(later.values()), request)
    finally:
        best = _best(grid)
        rates = {label: best[label][1] if label in best else None for label in _ended(grid)}
        rates |= {label: row["learning rate"] for label, row in known.items()}
        for label, rate in rates.items():
            own = {key[1:]: run for key, run in {**grid, **later}.items() if key[0] == label}
            _add_rows(board, size, mixers[label], rate, own, request, joined=label in known)
    return board


def _seeds_of(row: Mapping[str, Any]) -> list[int]:
    """The seeds that were trained at a row's rate. Rows of earlier versions do not name those that diverged."""
    return [*row["seeds"], *row.get("diverged seeds", ())]


def _ended(grid: Mapping[tuple[str, float, int], Any]) -> list[str]:
    """The labels whose trainings with the first seed have all ended."""
    waiting = {label for (label, *_), run in grid.items() if not has_ended(run)}
    return [label for label in dict.fromkeys(label for label, *_ in grid) if label not in waiting]


def _best(grid: Mapping[tuple[str, float, int], Any]) -> dict[str, tuple[float, float]]:
    """By label the lowest held-out loss and its rate, of those that have ended. One whose trainings all diverged has none."""
    ended = _ended(grid)
    found: dict[str, list[tuple[float, float]]] = {}
    for (label, rate, _), run in grid.items():
        if label in ended and (result := _result(run)) is not None:
            found.setdefault(label, []).append((result.held_out_loss, rate))
    return {label: min(losses) for label, losses in found.items()}


def _add_rows(
    board: Board,
    size: LanguageSize,
    mixer: Matched,
    rate: float | None,
    runs: Mapping[tuple[float, int], Any],
    request: Request,
    joined: bool,
) -> None:
    """The rows of one mixer, of its seeds at this rate that have ended; without values where all its trainings diverged.

    rate: None where they did. runs: its trainings by rate and seed. joined: whether the seeds that the board has stay.
    """
    ended = {key: run for key, run in runs.items() if has_ended(run)}
    if not ended:
        return
    results = {key: found for key, run in ended.items() if (found := _result(run)) is not None}
    of_rate = {seed: found for (one, seed), found in results.items() if one == rate}
    lost = [seed for one, seed in ended if one == rate and seed not in of_rate]
    rows = {}
    for column, losses in _losses(size, list(of_rate.values())).items():
        key = row_key(column, mixer.choice.label)
        row = {
            **_row(mixer, list(of_rate.values()), request.device), "column": column, "seeds": list(of_rate),
            "values": losses, "learning rate": rate, "diverged": len(ended) - len(results), "runs": len(ended),
            **({"diverged seeds": lost} if lost else {}),
        }  # fmt: skip
        rows[key] = _with_seeds(board.rows[key], row) if joined else row
    board.add_together(rows)  # or an interruption would leave columns with different seeds


def _with_seeds(row: Mapping[str, Any], more: Mapping[str, Any]) -> dict[str, Any]:
    """A row with the seeds of another one of the same mixer behind its own, and with where both were measured."""
    added = ("seeds", "values", "diverged", "diverged seeds", "runs", "seconds")
    return {
        **row, **{name: row.get(name, []) + more[name] for name in added if name in more},
        **joined_origins(row, more["measured"]),
    }  # fmt: skip


def needle_setting(size: LanguageSize) -> dict[str, Any]:
    """As a result repeats it."""
    return {
        **size.setting(),
        "task": NEEDLE,
        "lengths": size.needles,
        "examples": size.examples,
        "depths": size.depths,
    }


def run_needle(size: LanguageSize, request: Request) -> Board:
    """Ask language models for numbers hidden in repeated sentences; the board has a mixer as soon as its models have answered.

    Where the language board has a mixer, its models are those of that row's learning rate and seeds, whatever seeds the request
    has, and only those that are not there are trained. The other mixers are trained by `run_language`. One that diverges where it
    is trained again is not asked.

    Raises:
        WorkerError: trainings failed, and no model has been asked; or the models of some mixers could not be asked, and the
            others have been.
    """
    check_device(request.device)
    trained = Board.opened(request.output, "language", request.size, size.setting())
    known = {row["mixer"] for row in trained.rows.values()}
    new = tuple(choice for choice in request.mixers if choice.label not in known)
    if new:
        trained = run_language(size, replace(request, mixers=new))
    board = Board.opened(request.output, "needle", request.size, needle_setting(size))
    row_of = {row["mixer"]: row for row in trained.rows.values()}
    asked = [
        choice for choice in request.mixers if _lengths_left(board, size, choice.label, row_of[choice.label]["seeds"])
    ]
    runs = _train_again(size, request, asked, row_of)
    rows = {
        label: {name: value for name, value in {**row_of[label], "seeds": list(of_seed)}.items() if name != LATER}
        for label, of_seed in runs.items()
    }
    jobs = {}
    for label, of_seed in runs.items():
        lengths = _lengths_left(board, size, label, rows[label]["seeds"])
        if lengths:
            jobs[label] = (size, [run.output for run in of_seed.values()], request.device, lengths)

    def ended(label: str, answers: dict[int, list[tuple[float, float]]]) -> None:
        for length, found in answers.items():
            board.add(
                row_key(_column(length), label),
                {
                    **rows[label], "column": _column(length),
                    "values": [loss for loss, _ in found], "found": [part for _, part in found],
                    "measured": measured_here(request.device),
                },
            )  # fmt: skip
        request.reporter.note(f"{label}: asked for needles")

    call_each(_ask, jobs, request, ended)
    return board


def _column(length: int) -> str:
    return f"{length} tokens"


def _lengths_left(board: Board, size: LanguageSize, label: str, seeds: Sequence[int]) -> list[int]:
    """The lengths at which a mixer's models of these seeds have not been asked."""
    keys = {length: row_key(_column(length), label) for length in size.needles}
    return [length for length, key in keys.items() if board.rows.get(key, {}).get("seeds") != seeds]


def _train_again(
    size: LanguageSize, request: Request, choices: Sequence[MixerChoice], row_of: Mapping[str, Mapping[str, Any]]
) -> dict[str, dict[int, Any]]:
    """By label and seed, the runs of these mixers' rows, trained where they are not there; without those that diverged."""
    matching = _matching(size)
    runs = {
        (choice.label, seed): _run(size, request, mixer, row_of[choice.label]["learning rate"], seed)
        for choice, mixer in zip(choices, map(matching.of, choices))
        for seed in row_of[choice.label]["seeds"]
    }
    train_models(list(runs.values()), request)
    there: dict[str, dict[int, Any]] = {}
    for (label, seed), run in runs.items():
        if _result(run) is None:
            request.reporter.note(
                f"{label}: seed {seed} diverged when it was trained again, and is not asked for needles"
            )
        else:
            there.setdefault(label, {})[seed] = run
    return there


def _ask(
    size: LanguageSize, folders: Sequence[str], device: str, lengths: Sequence[int]
) -> dict[int, list[tuple[float, float]]]:
    """By length, for the model in each folder, the mean loss of the answers and the part of them that is found."""
    from fastweights.evaluation import load_language_model, needle_recall

    answers: dict[int, list[tuple[float, float]]] = {length: [] for length in lengths}
    for folder in folders:
        model, tokenizer = load_language_model(Path(folder) / "model", device=device)
        for length, found in answers.items():
            asked = [
                needle_recall(
                    model,
                    tokenizer,
                    NEEDLE,
                    length=length,
                    depth=depth,
                    examples=size.examples,
                    batch_size=size.examples,
                )
                for depth in size.depths
            ]
            found.append(
                (statistics.fmean(one.answer_loss for one in asked), statistics.fmean(one.found for one in asked))
            )
    return answers


def check_device(device: str) -> None:
    """ValueError where the trainer, which takes the GPU if there is one, would take another device."""
    if (torch.device(device).type == "cuda") != torch.cuda.is_available():
        wanted = "cuda" if torch.cuda.is_available() else "cpu"
        raise ValueError(
            f"device must be {wanted} for language models on this machine, got {device!r}: their trainer takes the GPU where "
            "there is one"
        )


def _matching(size: LanguageSize) -> Matching:
    return Matching({**size.model, "vocab_size": size.vocabulary}, size.head_dim, FastWeightsForCausalLM)


def _folder(request: Request, label: str, rate: float, seed: int) -> Path:
    return request.trainings / f"language-{request.size}" / file_name(label) / f"lr{rate!r}-seed{seed}"


def _run(size: LanguageSize, request: Request, mixer: Matched, rate: float, seed: int) -> Any:
    from fastweights.training.language import LanguageRun

    return LanguageRun(
        **size.training,
        model={**size.model, "mixer": mixer.choice.entry, "intermediate_size": mixer.intermediate_size},
        tokenizer=TextTokenizer(vocab_size=size.vocabulary),
        corpus=size.text(),
        learning_rate=rate,
        seed=seed,
        output=str(_folder(request, mixer.choice.label, rate, seed)),
        cache=str(request.trainings / "tokens"),
    )


def _result(run: Any) -> LanguageResult | None:
    """None where the training diverged."""
    path = Path(run.output) / "result.json"
    return load_result(path) if path.exists() else None


def _first_losses(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """By mixer the loss of the first seed; of a mixer with several rows that of the last one."""
    held_out = [row for row in rows if row["column"] == "held out"]
    return {row["mixer"]: row["values"][0] for row in held_out if row["values"]}


def close_mixers(losses: Mapping[str, float], close: float) -> set[str]:
    """The mixers that are nearer than `close` to another one."""
    ordered = sorted(losses.items(), key=lambda one: one[1])
    return {
        name
        for (one, first), (other, second) in zip(ordered, ordered[1:])
        if second - first < close
        for name in (one, other)
    }


def _losses(size: LanguageSize, runs: Sequence[LanguageResult]) -> dict[str, list[float]]:
    """By column, nats per token of each run."""
    columns = {"held out": [run.held_out_loss for run in runs]}
    for place, length in enumerate(size.training["context_lengths"]):
        columns[f"context {length}"] = [run.perplexities[place]["loss"] for run in runs]
    return columns


def _row(mixer: Matched, runs: Sequence[LanguageResult], device: str) -> dict[str, Any]:
    run = runs[0] if runs else None
    return {
        "mixer": mixer.choice.label, "options": dict(mixer.choice.options),
        "parameters": run.parameters if run else mixer.parameters, "state": run.state_size if run else mixer.state,
        "grows": mixer.grows, "intermediate size": mixer.intermediate_size, "tokens": run.tokens if run else None,
        "chance": None, "exact": None,
        "seconds": round(sum(run.seconds for run in runs), 1), "measured": measured_here(device),
    }  # fmt: skip
