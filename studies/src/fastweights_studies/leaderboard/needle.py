"""Language models of the leaderboard, asked for numbers that are hidden in text."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from fastweights.layers import MixerChoice

from ..origin import find_origin
from ..record import Plain, Row
from .entries import Entry
from .language import LanguagePart, check_device, load_model_result, match_models, plan_run
from .part import BoardPart, Column
from .processes import call_each, train_models
from .request import Request
from .sizes import SIZES, LanguageSize

__all__ = ["NeedlePart"]

NEEDLE = "s-niah-1"
FOUND = "found"  # the measure of rows with the share of the numbers that a model says


@dataclass(frozen=True, kw_only=True)
class NeedlePart(BoardPart):
    """A part that asks the models of another one for numbers hidden in repeated sentences, at several lengths.

    Attributes:
        models: the part that trains them.
    """

    models: LanguagePart

    trained = True

    def setting(self, size: str) -> list[Column]:
        language = SIZES[size].language
        asked = {"needle": NEEDLE, "examples": language.examples, "depths": language.depths}
        setting = {**language.setting(), **asked}
        return [Column(parameters={"tokens": length}, setting=setting) for length in language.needles]

    def name_column(self, parameters: Mapping[str, Plain]) -> str:
        return f"{parameters['tokens']} tokens"

    def cost(self, size: str) -> str:
        return SIZES[size].cost[self.name]

    def files(self, request: Request) -> list[Path]:
        return [*super().files(request), *self.models.files(request)]  # models that are missing are trained for it

    def guesses(self, entry: Entry) -> bool:
        """Whether no model says a hidden number."""
        return not any(entry.of(FOUND))

    def run(self, request: Request) -> Path:
        """Ask language models; the board has a mixer as soon as its models have answered.

        Where the board of the language models has a mixer, its models are those of that board's learning rate and seeds, whatever
        seeds the request has, and only those that are not there are trained. The other mixers are trained as for that board. One
        that diverges where it is trained again is not asked.

        Raises:
            WorkerError: trainings failed, and no model has been asked; or the models of some mixers could not be asked, and the
                others have been.
        """
        check_device(request.device)
        size, board = SIZES[request.size].language, self.board(request)
        known = self._trained(request)
        new = tuple(choice for choice in request.mixers if choice.label not in known)
        if new:
            self.models.run(replace(request, mixers=new))
            known = self._trained(request)
        there = {
            (row.column["tokens"], entry.label, row.seed)
            for entry in self.entries(self.counted(board.rows, request.size))
            for row in entry.rows
        }

        def find_left(label: str, seeds: Sequence[Any]) -> list[int]:
            """The lengths at which models of these seeds have not been asked."""
            return [length for length in size.needles if any((length, label, seed) not in there for seed in seeds)]

        asked = [choice for choice in request.mixers if find_left(choice.label, known[choice.label].seeds)]
        runs = _train_again(size, request, asked, known)
        jobs = {
            label: (size, [run.output for run in of_seed.values()], request.device, lengths)
            for label, of_seed in runs.items()
            if (lengths := find_left(label, [*of_seed]))
        }

        def keep(label: str, answers: dict[int, list[tuple[float, float]]]) -> None:
            board.add_missing(self._rows(known[label], list(runs[label]), answers, request))
            request.reporter.note(f"{label}: asked for needles")

        call_each(_ask, jobs, request, keep)
        return board.path

    def _trained(self, request: Request) -> dict[str, Entry]:
        """The mixers whose models are trained, by label."""
        rows = self.models.counted(self.models.board(request).rows, request.size)
        return {entry.label: entry for entry in reversed(self.models.entries(rows))}

    def _rows(
        self, model: Entry, seeds: Sequence[int], answers: Mapping[int, list[tuple[float, float]]], request: Request
    ) -> list[Row]:
        origin = find_origin(request.device)
        trained = {row.seed: row for row in model.rows}
        make = partial(Row, task=self.name, mixer=model.mixer, options=model.rows[0].options, origin=origin)
        return [
            make(
                measure=measure,
                unit=unit,
                column=column.parameters,
                run={**trained[seed].run, **column.setting},
                seed=seed,
                value=value,
            )
            for column in self.setting(request.size)
            if (length := column.parameters["tokens"]) in answers
            for seed, (loss, found) in zip(seeds, answers[length])  # type: ignore[index]  # it is a number
            for measure, unit, value in ((self.value, "nats", loss), (FOUND, "1", found))
        ]


def _train_again(
    size: LanguageSize, request: Request, choices: Sequence[MixerChoice], trained: Mapping[str, Entry]
) -> dict[str, dict[int, Any]]:
    """By label and seed, the runs of these mixers' entries, trained where they are not there; without those that diverged."""
    matching = match_models(size)
    runs: dict[tuple[str, int], Any] = {}
    for choice in choices:
        entry, mixer = trained[choice.label], matching.of(choice)
        rate = entry.learning_rate
        for seed in entry.seeds:
            if rate is not None and seed is not None:
                runs[choice.label, seed] = plan_run(size, request, mixer, rate, seed)
    train_models(list(runs.values()), request)
    there: dict[str, dict[int, Any]] = {}
    for (label, seed), run in runs.items():
        if load_model_result(run) is None:
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
        ask = partial(needle_recall, model, tokenizer, NEEDLE, examples=size.examples, batch_size=size.examples)
        for length, found in answers.items():
            asked = [ask(length=length, depth=depth) for depth in size.depths]
            found.append(
                (statistics.fmean(one.answer_loss for one in asked), statistics.fmean(one.found for one in asked))
            )
    return answers
