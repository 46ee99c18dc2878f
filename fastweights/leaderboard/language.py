"""Language models of equal state and parameters, trained as `fastweights train` does, and the needles they are asked for."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from ..data.text import TextTokenizer
from ..files import file_name
from ..models import FastWeightsForCausalLM
from ..results import LanguageResult
from ..results.language import load_result
from ..training.optimization import still_learning
from .matching import Matched, Matching
from .processes import has_ended, train_models
from .record import Board, measured_here
from .request import Request
from .sizes import LanguageSize

__all__ = ["NEEDLE", "close_mixers", "run_language", "run_needle"]

NEEDLE = "s-niah-1"


def run_language(size: LanguageSize, request: Request) -> Board:
    """Train every mixer of the request: the first seed at all learning rates, and where it is close the others at its best.

    Where the trainings are stopped, the board has the mixers whose whole grid has ended.
    """
    check_device(request.device)
    board = Board.opened(request.output, "language", request.size, size.setting())
    model = {**size.model, "vocab_size": size.vocabulary}
    matching = Matching(model, size.head_dim, FastWeightsForCausalLM)
    mixers = {choice.label: matching.of(choice) for choice in request.mixers}
    first, *others = request.seeds or size.seeds
    runs = {
        (label, rate, first): _run(size, request, mixer, rate, first)
        for label, mixer in mixers.items()
        for rate in size.rates
    }
    try:
        train_models(list(runs.values()), request)
        best = _best(runs)
        close = close_mixers({**_first_losses(board), **{label: loss for label, (loss, _) in best.items()}}, size.close)
        later = {
            (label, rate, seed): _run(size, request, mixers[label], rate, seed)
            for label, (_, rate) in best.items()
            if label in close
            for seed in others
        }
        runs |= later
        train_models(list(later.values()), request)
    finally:
        best = _best(runs)
        for label in _ended(runs):
            rate = best[label][1] if label in best else None
            own = {key[1:]: run for key, run in runs.items() if key[0] == label}
            _add_rows(board, size, mixers[label], rate, own, request)
    return board


def _of_first_seed(runs: Mapping[tuple[str, float, int], Any]) -> dict[tuple[str, float], Any]:
    first = next(iter(runs))[2]
    return {(label, rate): run for (label, rate, seed), run in runs.items() if seed == first}


def _ended(runs: Mapping[tuple[str, float, int], Any]) -> list[str]:
    """The labels whose trainings with the first seed have all ended."""
    grid = _of_first_seed(runs)
    waiting = {label for (label, _), run in grid.items() if not has_ended(run)}
    return [label for label in dict.fromkeys(label for label, _ in grid) if label not in waiting]


def _best(runs: Mapping[tuple[str, float, int], Any]) -> dict[str, tuple[float, float]]:
    """By label the lowest held-out loss and its rate, of those that have ended. One whose trainings all diverged has none."""
    ended = _ended(runs)
    found: dict[str, list[tuple[float, float]]] = {}
    for (label, rate), run in _of_first_seed(runs).items():
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
) -> None:
    """The rows of one mixer, of its seeds at this rate that have ended; without values where all its trainings diverged.

    rate: None where they did. runs: its trainings by rate and seed.
    """
    ended = {key: run for key, run in runs.items() if has_ended(run)}
    results = {key: found for key, run in ended.items() if (found := _result(run)) is not None}
    of_rate = {seed: found for (one, seed), found in results.items() if one == rate}
    for column, losses in _losses(size, list(of_rate.values())).items():
        board.add(
            f"{column}, {mixer.choice.label}",
            {
                **_row(mixer, list(of_rate.values()), request.device), "column": column, "seeds": list(of_rate),
                "values": losses, "learning rate": rate, "diverged": len(ended) - len(results), "runs": len(ended),
            },
        )  # fmt: skip


def run_needle(size: LanguageSize, request: Request) -> Board:
    """Ask the models of `run_language`, which are trained where they are not there, for numbers hidden in repeated sentences."""
    from ..evaluation import load_language_model, needle_recall

    trained = run_language(size, request)
    setting = {
        **size.setting(),
        "task": NEEDLE,
        "lengths": size.needles,
        "examples": size.examples,
        "depths": size.depths,
    }
    board = Board.opened(request.output, "needle", request.size, setting)
    for choice in request.mixers:
        row = next((row for row in trained.rows.values() if row["mixer"] == choice.label), None)
        if row is None or not row["seeds"]:  # all its trainings diverged
            continue
        models = [
            load_language_model(
                _folder(request, choice.label, row["learning rate"], seed) / "model", device=request.device
            )
            for seed in row["seeds"]
        ]
        for length in size.needles:
            key = f"{length} tokens, {choice.label}"
            if key in board.rows and board.rows[key]["seeds"] == row["seeds"]:
                continue
            answers = [
                [
                    needle_recall(model, tokenizer, NEEDLE, length=length, depth=depth, examples=size.examples)
                    for depth in size.depths
                ]
                for model, tokenizer in models
            ]
            board.add(
                key,
                {
                    **row, "column": f"{length} tokens",
                    "values": [statistics.fmean(one.answer_loss for one in found) for found in answers],
                    "found": [statistics.fmean(one.found for one in found) for found in answers],
                    "measured": measured_here(request.device),
                },
            )  # fmt: skip
    return board


def check_device(device: str) -> None:
    """ValueError where the trainer, which takes the GPU if there is one, would take another device."""
    if (torch.device(device).type == "cuda") != torch.cuda.is_available():
        wanted = "cuda" if torch.cuda.is_available() else "cpu"
        raise ValueError(
            f"device must be {wanted} for language models on this machine, got {device!r}: their trainer takes the GPU where "
            "there is one"
        )


def _folder(request: Request, label: str, rate: float, seed: int) -> Path:
    return request.trainings / f"language-{request.size}" / file_name(label) / f"lr{rate!r}-seed{seed}"


def _run(size: LanguageSize, request: Request, mixer: Matched, rate: float, seed: int) -> Any:
    from ..training.language import LanguageRun

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


def _first_losses(board: Board) -> dict[str, float]:
    """Of the mixers that the board has, the loss of the first seed."""
    held_out = [row for row in board.rows.values() if row["column"] == "held out"]
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
        "undertrained": any(map(still_learning, runs)), "chance": None, "exact": None,
        "seconds": round(sum(run.seconds for run in runs), 1), "measured": measured_here(device),
    }  # fmt: skip
