"""Language models whose memories differ in the rule alone: one block for all, identical order of data, several budgets of tokens.

A model reads source code, and synthetic documents that ask for what stands in them: language models of the leaderboard that were
trained without these found no needle, so that their answers said nothing about memories. The learning rate of a mixer is that of
the best of smaller models, the proxies, by validation text. The proxies of memories alone are a part of their own, whose first
seed takes every rate. Numbers are of test text.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fastweights.data.text import TextCorpus, TextSource, TextTokenizer
from fastweights.files import file_name
from fastweights.layers import MIXERS, MixerChoice, in_block, parse_mixers
from fastweights.models import FastWeightsForCausalLM
from fastweights.results import LanguageResult
from fastweights.training.pool import WorkerError, usual_workers

from ..measure.code_text import check_pieces, known_hash, text_in, write_text
from ..measure.environment import digest
from ..measure.linearization_text import write_recall
from ..origin import find_origin
from ..record import Plain, Row
from .board import Board, board_path, load_board
from .entries import Entry
from .language import check_device, load_model_result
from .matched_measures import measure_losses, measure_speed
from .matching import Matched, Matching
from .part import BoardPart, Column
from .processes import call_each, has_ended, train_models
from .request import Request
from .sizes import SIZES, MatchedLanguageSize

__all__ = ["MatchedLanguagePart"]

BLOCK = "matched"
TEXT = "code-text"
RARELY = 1e-6  # the held-out part of the synthetic documents, of which one is left: held-out text is code
SPEED, STATE, FOUND = "tokens_per_second", "state_bytes", "found"
UNITS = {SPEED: "tokens/s", STATE: "bytes", FOUND: "1"}
BILLION, MILLION, THOUSAND = 10**9, 10**6, 10**3


@dataclass(frozen=True, kw_only=True, eq=False)
class Variant:
    """A mixer in all layers, or with softmax attention in every n-th of them.

    Attributes:
        every: n; 0 for no softmax attention beside the mixer.
    """

    choice: MixerChoice
    every: int

    def match(self, size: MatchedLanguageSize) -> tuple[Matched, dict[str, Any]]:
        """The mixer in its block and size, and the fields of its model but mixer and intermediate_size."""
        heads = size.model["num_heads"]
        fields: dict[str, Any] = {**size.model, "vocab_size": size.vocabulary}
        choice = in_block(self.choice, BLOCK, heads)
        matched = _matching(fields, size).of(choice)
        if self.every:
            softmax = in_block(MixerChoice("softmax"), BLOCK, heads)
            layers = list(range(self.every - 1, size.model["num_hidden_layers"], self.every))
            fields |= {"softmax_layers": layers, "softmax_options": dict(softmax.options)}
            # With the head size that the mixer has in all layers: the states of layers are what is equal.
            matched = _matching(fields, size).of(matched.choice)
        return dataclasses.replace(matched, given=self.choice.options), fields


@dataclass(frozen=True)
class Training:
    """The training of a variant with a budget and a seed: what rows of the board are of."""

    variant: Variant
    tokens: int
    seed: int

    @property
    def name(self) -> str:
        """What notes and failures call it."""
        return f"{file_name(self.variant.choice.label)}/softmax{self.variant.every}-tokens{self.tokens}-seed{self.seed}"

    def column(self, parameters: Mapping[str, Plain]) -> bool:
        """Whether its numbers stand in the column with these parameters."""
        return parameters["tokens"] == self.tokens and parameters["softmax_every"] == self.variant.every


@dataclass(frozen=True, kw_only=True)
class MatchedLanguagePart(BoardPart):
    """A part whose columns are losses of test text: of all of it, by position, of identifiers at first sight and again, by
    context length, and of numbers hidden in text; for every budget of tokens, and every share of softmax attention.

    Attributes:
        mixers: as `parse_mixers` reads them, those that take part where all of the registry are asked for.
        proxies: the part of the models that find the learning rates; None in that part.
    """

    mixers: tuple[str, ...]
    proxies: MatchedLanguagePart | None = None

    trained = True
    beside = {SPEED: "decoded tokens per second", STATE: "bytes of state", FOUND: "numbers found"}

    def size(self, name: str) -> MatchedLanguageSize:
        """What is declared for the part at a size."""
        return SIZES[name].matched_language[self.name]

    def search_size(self, name: str) -> MatchedLanguageSize:
        """What is declared at a size for the trainings that find the rates."""
        return (self.proxies or self).size(name)

    def setting(self, size: str) -> list[Column]:
        declared = self.size(size)
        # All that a rate depends on, so that rows no longer count when it changes.
        search = {} if self.proxies is None else {"proxies": digest(self.search_size(size).setting())[:16]}
        kinds: list[tuple[str, Plain]] = [
            ("test", None),
            *(("position", list(ends)) for ends in itertools.pairwise(declared.positions)),
            ("identifiers", "first"),
            ("identifiers", "again"),
            *(("context", length) for length in declared.contexts),
            *(("needle", length) for length in declared.needles),
        ]
        return [
            Column(
                parameters={"tokens": tokens, "softmax_every": every, "what": what, "at": at},
                setting={**declared.setting(), **search, "text": self._text_hash(declared)},
            )
            for every, tokens, (what, at) in itertools.product(declared.softmax_every, declared.budgets, kinds)
        ]

    def _text_hash(self, size: MatchedLanguageSize) -> str:
        """Of the recorded text; that of the Python installation has none, as each machine has its own."""
        return known_hash()[:16] if size.source == "debian" else size.source

    def name_column(self, parameters: Mapping[str, Plain]) -> str:
        what, at = parameters["what"], parameters["at"]
        title = {
            "test": "test text",
            "position": f"positions {at[0]} to {at[1]}" if isinstance(at, list) else "",
            "identifiers": f"identifiers {'at first' if at == 'first' else 'again'}",
            "context": f"context {at}",
            "needle": f"needle in {at}",
        }[str(what)]
        every = f"softmax in 1 of {parameters['softmax_every']}, " if parameters["softmax_every"] else ""
        return f"{every}{_short(parameters['tokens'])}: {title}"

    def cost(self, size: str) -> str:
        return SIZES[size].cost[self.name]

    def guesses(self, entry: Entry) -> bool:
        """Whether no model says a hidden number, in the columns that ask for them."""
        found = entry.of(FOUND)
        return bool(found) and not any(found)

    def participants(self, mixers: Sequence[MixerChoice]) -> list[str]:
        return [choice.label for choice in self._choices(mixers)]

    def listed(self, mixers: Sequence[str]) -> Sequence[str]:
        return [choice.label for choice in self._declared()] if set(mixers) >= set(MIXERS) else mixers

    def _choices(self, mixers: Sequence[MixerChoice]) -> list[MixerChoice]:
        """Those that take part: the declared ones where all of the registry are asked for."""
        return self._declared() if {choice.name for choice in mixers} >= set(MIXERS) else list(mixers)

    def _declared(self) -> list[MixerChoice]:
        return [choice for text in self.mixers for choice in parse_mixers(text)]

    def check_columns(self, request: Request) -> None:
        titles = [self.name_column(column.parameters) for column in self.setting(request.size)]
        for text in request.columns or ():
            if not any(text in title for title in titles):
                raise ValueError(
                    f"columns must be texts in titles of {self.name}, got {text!r}; it has {'; '.join(titles)}"
                )

    def trainings(self, request: Request) -> int:
        size = self.size(request.size)
        seeds = sum(len(request.seeds or budget.seeds) for budget in size.budgets.values())
        searched = (request.seeds or next(iter(size.budgets.values())).seeds) if self.proxies is None else ()
        repeated = size.first_training[1] in searched  # a training that finds the rate is one of those that count
        return len(size.softmax_every) * (len(size.rates) + seeds - repeated)

    def files(self, request: Request) -> list[Path]:
        return [*super().files(request), self._curves_path(request)]

    def _curves_path(self, request: Request) -> Path:
        return board_path(request.output, f"{self.name}-curves", request.size)

    def forget(self, request: Request) -> None:
        super().forget(dataclasses.replace(request, mixers=tuple(self._choices(request.mixers))))
        path = self._curves_path(request)
        if path.exists():
            names = self.participants(request.mixers)
            load_board(path).drop(lambda row: self.label(row) in names)

    def run(self, request: Request) -> Path:
        """Find the rate of every mixer that has none, train the models whose numbers the board lacks, and measure them.

        A training that has ended is never begun again, and a mixer that the board has keeps its rate. The board has a model as
        soon as it is measured. A model whose loss was not finite has rows without values.

        Raises:
            ValueError: the output folder has no text, or another one than the recorded; or it has models of other sizes.
            WorkerError: trainings or measurements failed, and the others are on the board.
        """
        check_device(request.device)
        size, board = self.size(request.size), self.board(request)
        text = self._text(request)
        variants = [
            Variant(choice=choice, every=every)
            for choice, every in itertools.product(self._choices(request.mixers), size.softmax_every)
        ]
        entries = self.entries(self.counted(board.rows, request.size))
        wanted = self._lacking(variants, entries, request)
        self._check_sizes(wanted, board.rows, request)
        for_search = _sharing(request, self.search_size(request.size))
        rates = self._rates({one.variant: None for one in wanted}, entries, text, for_search)
        request = _sharing(request, size)
        failure = None
        runs = {
            one: self._plan(one, size, rate, text, request)
            for one in wanted
            if (rate := rates.get(one.variant)) is not None
        }
        try:
            train_models(list(runs.values()), request)
        except WorkerError as error:
            failure = error
        ended = {one: run for one, run in runs.items() if has_ended(run)}
        self._measure(ended, board, request)
        if failure is not None:
            raise failure
        return board.path

    def _text(self, request: Request) -> Path:
        """The folder of the text, which is made here where it is that of the Python installation."""
        size, folder = self.size(request.size), request.output / TEXT
        if size.source == "debian":
            text_in(folder, "test")
            if known_hash(folder) != known_hash():
                raise ValueError(
                    f"output must hold the recorded text in its folder {TEXT}, and that one is of other packages or versions; "
                    "pass another --output"
                )
        elif not (folder / "text.json").exists():
            write_text(folder, _own_documents(size))
        check_pieces(folder, size.train_pieces)
        write_recall(folder / "recall.jsonl", size.recall_documents)
        return folder

    def _lacking(self, variants: Sequence[Variant], entries: Sequence[Entry], request: Request) -> list[Training]:
        """The trainings whose numbers the board lacks in a column; where the request names columns, those that have one of them.
        A model is measured in all its columns."""
        size = self.size(request.size)
        there = {(entry.column, entry.label, row.seed) for entry in entries for row in entry.rows}
        found = []
        for variant, (tokens, budget) in itertools.product(variants, size.budgets.items()):
            if budget.mixers is None or variant.choice.name in budget.mixers:
                for seed in request.seeds or budget.seeds:
                    one = Training(variant, tokens, seed)
                    titles = {self.name_column(column.parameters) for column in self._columns(one, request)}
                    asked = request.columns is None or any(
                        text in title for text in request.columns for title in titles
                    )
                    if asked and any((title, variant.choice.label, seed) not in there for title in titles):
                        found.append(one)
        return found

    def _columns(self, training: Training, request: Request) -> list[Column]:
        return [column for column in self.setting(request.size) if training.column(column.parameters)]

    def _rates(
        self, variants: Iterable[Variant], entries: Sequence[Entry], text: Path, request: Request
    ) -> dict[Variant, float]:
        """The rate of each variant: that of its rows on the board of the part or of its proxies, that of its loss curves, which
        are there as soon as its models are trained, or that of the proxy with the lowest loss of validation text. One whose
        proxies all diverge has none."""
        size = self.search_size(request.size)
        rows = [row for entry in entries for row in entry.rows]
        if self.proxies is not None:
            rows += self.proxies.found(request)
        for part in (self, self.proxies):
            rows += part._curves(request).rows if part is not None else []
        tokens, seed = size.first_training
        known: dict[Variant, float] = {}
        searches: dict[Variant, dict[float, Any]] = {}
        for variant in variants:
            rate = next((row.run["learning_rate"] for row in self._rows_of(variant, rows)), None)
            if isinstance(rate, float):
                known[variant] = rate
            else:
                one = Training(variant, tokens, seed)
                searches[variant] = {rate: self._plan(one, size, rate, text, request) for rate in size.rates}
        train_models([run for runs in searches.values() for run in runs.values()], request)
        for variant, runs in searches.items():
            results = {rate: load_model_result(run) for rate, run in runs.items()}
            losses = {rate: found.held_out_loss for rate, found in results.items() if found is not None}
            if losses:
                known[variant] = min(losses, key=losses.__getitem__)
            else:
                request.reporter.note(f"{variant.choice.label}: diverged at every rate")
        return known

    def _rows_of(self, variant: Variant, rows: Iterable[Row]) -> list[Row]:
        return [
            row
            for row in rows
            if (self.label(row), row.column["softmax_every"]) == (variant.choice.label, variant.every)
        ]

    def _curves(self, request: Request) -> Board:
        """The loss curves in the output folder, of models at the setting of the part; others go when curves are added."""
        setting, path = self.setting(request.size)[0].setting.items(), self._curves_path(request)
        rows = load_board(path).rows if path.exists() else []
        return Board(path, [row for row in rows if all(row.run.get(name) == value for name, value in setting)])

    def _check_sizes(self, wanted: Sequence[Training], rows: Sequence[Row], request: Request) -> None:
        """Refuse further seeds of a mixer whose rows are of models of other sizes: widths were matched in another way then.

        Raises:
            ValueError: there are such rows on the board.
        """
        size = self.size(request.size)
        for variant in {one.variant: None for one in wanted}:
            facts = variant.match(size)[0].facts()
            for row in self._rows_of(variant, rows):
                other = [name for name in ("head_dim", "intermediate_size") if row.run.get(name) != facts.get(name)]
                if other:
                    raise ValueError(
                        f"output holds models of {variant.choice.label} with another {' and '.join(other)}, and further seeds "
                        "must be of the same; pass another --output, or --overwrite to measure the mixer again"
                    )

    def found(self, request: Request) -> list[Row]:
        """The rows in the output folder of a request, and the library's own of mixers without any."""
        rows = self.rows(request.size, request.output, request.output)
        return [*rows, *self.library(request.size, rows)]

    def _plan(self, training: Training, size: MatchedLanguageSize, rate: float, text: Path, request: Request) -> Any:
        """The `LanguageRun` of a model of the part, in its folder."""
        from fastweights.training.language import LanguageRun

        matched, fields = training.variant.match(size)
        code = text_in(text, "validation", size.train_pieces)
        recall = TextSource(paths=(str(text / "recall.jsonl"),), held_out_fraction=RARELY, weight=size.recall_part)
        return LanguageRun(
            **size.training,
            max_tokens=training.tokens,
            context_lengths=(),
            model={**fields, "mixer": matched.choice.entry, "intermediate_size": matched.intermediate_size},
            tokenizer=TextTokenizer(vocab_size=size.vocabulary),
            corpus=TextCorpus(
                sources=(
                    TextSource(paths=code.paths, held_out=code.held_out, weight=1 - size.recall_part),
                    recall,
                )
            ),
            learning_rate=rate,
            seed=training.seed,
            seed_by_name=True,
            output=str(request.trainings / f"{self.name}-{request.size}" / f"{training.name}-lr{rate!r}"),
            cache=str(request.trainings / "tokens"),
        )

    def _measure(self, runs: Mapping[Training, Any], board: Board, request: Request) -> None:
        """Put the rows of trainings that have ended on the board: of diverged ones, then of the others as they are measured."""
        size, text, curves = self.size(request.size), str(request.output / TEXT), self._curves(request)
        facts = {one.name: self._facts(one, run, request) for one, run in runs.items()}
        by_name = {one.name: one for one in runs}

        def keep(name: str, found: Mapping[str, Mapping[str, float]]) -> None:
            board.add_missing(self._rows(by_name[name], facts[name], found, request))
            request.reporter.note(f"{name}: measured")

        jobs = {}
        for one, run in runs.items():
            result = load_model_result(run)
            if result is None:
                board.add_missing(self._rows(one, facts[one.name], {}, request))
            else:
                curves.add_missing(self._curve(one, facts[one.name], result, request))
                jobs[one.name] = (size, run.output, text, request.device)
        # Speed is that of a model alone on the machine, and of one seed: it does not depend on the weights. It goes first,
        # because a model with a loss in every column is not measured again.
        first = {(one.variant, one.tokens): one for one in reversed([*runs]) if one.name in jobs and size.decoded}
        timed = {one.name: (size, runs[one].output, request.device) for one in first.values()}
        failures = []
        for work, arguments, asked in (
            (measure_speed, timed, dataclasses.replace(request, workers=1)),
            (measure_losses, jobs, request),
        ):
            try:
                call_each(work, arguments, asked, keep)
            except WorkerError as error:
                failures.append(error)
        if failures:
            raise failures[0]

    def _facts(self, training: Training, run: Any, request: Request) -> dict[str, Any]:
        """The fields that all rows of a training have in common; `run` without the setting of a column."""
        size = self.size(request.size)
        matched, _ = training.variant.match(size)
        facts = {
            **matched.facts(),
            "learning_rate": run.learning_rate,
            "trainings": 1,
            "diverged": int(load_model_result(run) is None),
        }
        return {
            "task": self.name,
            "mixer": matched.choice.name,
            "options": matched.given,
            "run": facts,
            "seed": training.seed,
            "origin": find_origin(request.device),
        }

    def _rows(
        self, training: Training, facts: Mapping[str, Any], found: Mapping[str, Mapping[str, float]], request: Request
    ) -> list[Row]:
        """found: by measure, the numbers by the key of their column. Without any, the training diverged."""
        rows = []
        for column in self._columns(training, request):
            key = _key(column.parameters)
            values: dict[str, float | None] = {name: one[key] for name, one in found.items() if key in one}
            run = {**column.setting, **facts["run"]}
            for measure, value in (values if found else {self.value: None}).items():
                unit = UNITS.get(measure, "nats")
                rows.append(
                    Row(**{**facts, "run": run}, measure=measure, unit=unit, column=column.parameters, value=value)
                )
        return rows

    def _curve(
        self, training: Training, facts: Mapping[str, Any], result: LanguageResult, request: Request
    ) -> list[Row]:
        """The loss of train text and of validation text by the tokens read."""
        column = {"tokens": training.tokens, "softmax_every": training.variant.every}
        run = {**self._columns(training, request)[0].setting, **facts["run"]}
        curves = {
            "training_loss": zip(result.loss_tokens, result.losses),
            "validation_loss": zip(result.held_out_tokens, result.held_out_losses),
        }
        return [
            Row(**{**facts, "run": run}, measure=measure, unit="nats", column={**column, "read": read}, value=loss)
            for measure, points in curves.items()
            for read, loss in points
        ]


def _matching(fields: Mapping[str, Any], size: MatchedLanguageSize) -> Matching:
    return Matching(fields, size.head_dim, FastWeightsForCausalLM, excess=size.excess, multiple=size.multiple)


def _sharing(request: Request, size: MatchedLanguageSize) -> Request:
    """The request with as many workers as share a GPU, where nobody says how many."""
    return dataclasses.replace(request, workers=request.workers or usual_workers(request.device, size.at_once))


def _own_documents(size: MatchedLanguageSize) -> Iterable[tuple[str, str, str]]:
    """The documents of the default corpus; of the held-out ones every other is test text."""
    sides = itertools.cycle(("validation", "test"))
    for number, document in enumerate(size.own_text().documents()):
        yield next(sides) if document.held_out else "train", f"document-{number}", document.text


def _key(parameters: Mapping[str, Plain]) -> str:
    """What a number measured of a model is called: its column without budget and share of softmax attention."""
    what, at = parameters["what"], parameters["at"]
    return str(what) if at is None else f"{what} {'-'.join(map(str, at)) if isinstance(at, list) else at}"


def _short(tokens: Plain) -> str:
    """A number of tokens as 300M or 4K, where that is exact."""
    assert isinstance(tokens, int)
    for unit, letter in ((BILLION, "B"), (MILLION, "M"), (THOUSAND, "K")):
        if tokens >= unit and tokens % unit == 0:
            return f"{tokens // unit}{letter}"
    return str(tokens)
