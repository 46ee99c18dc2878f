"""Language models of equal state and parameters, trained as `fastweights train` does."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fastweights.data.text import TextTokenizer
from fastweights.files import file_name
from fastweights.layers import in_block
from fastweights.models import FastWeightsForCausalLM
from fastweights.results import LanguageResult
from fastweights.results.language import load_result

from ..origin import find_origin
from ..record import Plain, Row
from .entries import Entry
from .matching import Matched, Matching
from .part import BoardPart, Column
from .processes import has_ended, train_models
from .request import Request
from .sizes import SIZES, LanguageSize
from .standing import Standing

__all__ = ["LanguagePart", "check_device", "find_close", "load_model_result", "match_models", "plan_run"]

HELD_OUT = "held out"
Key = tuple[float, int]  # learning rate and seed of a training


@dataclass(frozen=True, kw_only=True)
class LanguagePart(BoardPart):
    """A part whose columns are the held-out loss, and the loss by context length."""

    trained = True

    def setting(self, size: str) -> list[Column]:
        language = SIZES[size].language
        contexts = (None, *language.training["context_lengths"])
        return [Column(parameters={"context": context}, setting=language.setting()) for context in contexts]

    def name_column(self, parameters: Mapping[str, Plain]) -> str:
        context = parameters["context"]
        return HELD_OUT if context is None else f"context {context}"

    def cost(self, size: str) -> str:
        return SIZES[size].cost[self.name]

    def trainings(self, request: Request) -> int:
        language = SIZES[request.size].language
        return len(language.rates) + len(request.seeds or language.seeds) - 1

    def shown(self, standing: Standing) -> tuple[float, float | None]:
        """As perplexities."""
        mean, half = math.exp(standing.mean), super().shown(standing)[1]
        return mean, None if half is None else mean * math.expm1(half)

    def run(self, request: Request) -> Path:
        """Train every mixer of the request: the first seed at all learning rates, the other seeds at its best one where another
        mixer is close to it.

        The other mixers are those of the request, of the board and of the library's own results. A mixer that the board has
        trains only seeds that are missing, at its rate; for columns that are missing its models are measured again. Where the
        trainings are stopped, the board has the mixers whose whole grid is done.
        """
        check_device(request.device)
        size, board = SIZES[request.size].language, self.board(request)
        entries = self.entries(self.counted(board.rows, request.size))
        seeds = request.seeds or size.seeds
        known = {entry.label: entry for entry in entries if entry.column == HELD_OUT}
        matching = match_models(size)
        mixers = {
            choice.label: _Trainings(size, request, matching.of(choice), seeds[0], known.get(choice.label))
            for choice in request.mixers
        }

        def train() -> None:
            train_models([run for mixer in mixers.values() for run in mixer.runs.values()], request)

        try:
            train()
            others = [*self.entries(self.library(request.size, ())), *entries]
            losses = {one.label: one.values[0] for one in others if one.column == HELD_OUT and one.values}
            losses |= {label: loss for label, mixer in mixers.items() if (loss := mixer.first_loss()) is not None}
            close = find_close(losses, size.close)
            for label, mixer in mixers.items():
                lacking = self._lacking_columns([entry for entry in entries if entry.label == label], request.size)
                mixer.plan([*lacking, *(seeds if label in close else ())], again=lacking)
            train()
        finally:
            for mixer in mixers.values():
                if mixer.has_chosen():
                    board.add_missing(self._rows(mixer, request))
        return board.path

    def _lacking_columns(self, entries: Sequence[Entry], size: str) -> list[int | None]:
        """The seeds that a mixer has in some columns and not in others."""
        seeds = [{row.seed for row in entry.rows} for entry in entries]
        lacking = len(entries) < len(self.setting(size))
        return [
            seed
            for seed in dict.fromkeys(s for one in seeds for s in one)
            if lacking or any(seed not in one for one in seeds)
        ]

    def _rows(self, mixer: _Trainings, request: Request) -> list[Row]:
        """The rows of the trainings of a mixer that have ended: of each seed the loss at the chosen rate, without a value where
        it diverged."""
        origin, rate = find_origin(request.device), mixer.rate()
        rows = []
        for seed in dict.fromkeys(seed for _, seed in mixer.runs):
            trained = {key: run for key, run in mixer.runs.items() if key[1] == seed and has_ended(run)}
            results = {key: load_model_result(run) for key, run in trained.items()}
            if not trained:
                continue
            chosen = results.get((rate or 0.0, seed))
            facts = {
                **mixer.matched.facts(),
                **({} if chosen is None else {"parameters": chosen.parameters, "state": chosen.state_size}),
                "learning_rate": rate,
                "trainings": len(trained),
                "diverged": sum(one is None for one in results.values()),
            }
            for column in self.setting(request.size):
                loss = None if chosen is None else _loss(chosen, column.parameters["context"])
                if chosen is None or loss is not None:
                    rows.append(
                        Row(
                            task=self.name,
                            measure=self.value,
                            unit="nats",
                            column=column.parameters,
                            mixer=mixer.matched.choice.name,
                            options=mixer.matched.given,
                            run={**column.setting, **facts},
                            seed=seed,
                            value=loss,
                            origin=origin,
                        )
                    )
        return rows


class _Trainings:
    """The trainings of a mixer: with the first seed at every rate, or, where the board knows it, none at first.

    Attributes:
        matched: the mixer in the size in which it takes part.
        runs: by learning rate and seed.
    """

    def __init__(self, size: LanguageSize, request: Request, matched: Matched, first: int, known: Entry | None) -> None:
        self.matched, self._size, self._request, self._known = matched, size, request, known
        self.runs: dict[Key, Any] = {}
        self._grid: list[Key] = [] if known else [(rate, first) for rate in size.rates]
        self._add(self._grid)

    def _add(self, keys: Iterable[Key]) -> None:
        self.runs |= {key: plan_run(self._size, self._request, self.matched, *key) for key in keys}

    def plan(self, seeds: Iterable[int | None], again: Sequence[int | None]) -> None:
        """Add those with these seeds at the chosen rate, unless they were there before. again: seeds that are measured again."""
        rate = self.rate() if self.has_chosen() else None
        there = {row.seed for row in self._known.rows} if self._known else {seed for _, seed in self._grid}
        if rate is not None:
            self._add((rate, seed) for seed in seeds if seed is not None and (seed not in there or seed in again))

    def has_chosen(self) -> bool:
        """Whether it is known which learning rate is the best."""
        return all(has_ended(self.runs[key]) for key in self._grid)

    def rate(self) -> float | None:
        """The best learning rate; None where all trainings diverged."""
        if self._known:
            return self._known.learning_rate
        return self._best()[1]

    def first_loss(self) -> float | None:
        """The held-out loss of the first seed; None where it diverged, or is not known yet."""
        if self._known:
            return self._known.values[0] if self._known.values else None
        return self._best()[0] if self.has_chosen() else None

    def _best(self) -> tuple[float | None, float | None]:
        """The lowest loss of the grid, and its rate."""
        results = [(load_model_result(self.runs[key]), key[0]) for key in self._grid]
        return min(((found.held_out_loss, rate) for found, rate in results if found is not None), default=(None, None))


def _loss(result: LanguageResult, context: object) -> float | None:
    """Nats per token; of a context that the held-out text is too short for None."""
    if context is None:
        return result.held_out_loss
    return next((one["loss"] for one in result.perplexities if one["length"] == context), None)


def check_device(device: str) -> None:
    """ValueError where the trainer, which takes the GPU if there is one, would take another device."""
    if (torch.device(device).type == "cuda") != torch.cuda.is_available():
        wanted = "cuda" if torch.cuda.is_available() else "cpu"
        raise ValueError(
            f"device must be {wanted} for language models on this machine, got {device!r}: their trainer takes the GPU where "
            "there is one"
        )


def match_models(size: LanguageSize) -> Matching:
    """What is equal for the language models of a size."""
    return Matching({**size.model, "vocab_size": size.vocabulary}, size.head_dim, FastWeightsForCausalLM)


def plan_run(size: LanguageSize, request: Request, mixer: Matched, rate: float, seed: int) -> Any:
    """The `LanguageRun` of a mixer, in its folder."""
    from fastweights.training.language import LanguageRun

    name = f"lr{rate!r}-seed{seed}"
    published = in_block(mixer.choice, "published", size.model["num_heads"])  # like the tasks without a block
    return LanguageRun(
        **size.training,
        model={**size.model, "mixer": published.entry, "intermediate_size": mixer.intermediate_size},
        tokenizer=TextTokenizer(vocab_size=size.vocabulary),
        corpus=size.text(),
        learning_rate=rate,
        seed=seed,
        output=str(request.trainings / f"language-{request.size}" / file_name(mixer.choice.label) / name),
        cache=str(request.trainings / "tokens"),
    )


def load_model_result(run: Any) -> LanguageResult | None:
    """The result of a training that has ended; None where it diverged."""
    path = Path(run.output) / "result.json"
    return load_result(path) if path.exists() else None


def find_close(losses: Mapping[str, float], close: float) -> set[str]:
    """The mixers that are nearer than `close` to another one."""
    ordered = sorted(losses.items(), key=lambda one: one[1])
    return {
        name
        for (one, first), (other, second) in zip(ordered, ordered[1:])
        if second - first < close
        for name in (one, other)
    }
