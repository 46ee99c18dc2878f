"""Parts that train small models on generated tasks: recall, regression, state tracking, and tasks of a user's own.
`fastweights recall` trains them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from fastweights.files import file_name
from fastweights.layers import MixerChoice, in_block
from fastweights.results import RecallResult
from fastweights.training import RecallExperiment
from fastweights.training.recall.objectives import make_objective

from ..origin import find_origin
from ..rate_search import RateSearch, search_rates
from ..record import Plain, Row
from .board import Board
from .entries import EXACT, Entry
from .matching import Matched, Matching
from .part import BoardPart, Column
from .request import Request
from .sizes import SIZES, TaskSize

__all__ = ["RecallPart", "TaskPart", "match_mixer"]

FEWEST_TESTED = 512  # sequences
STEPS, LEARNT = "steps_to_90", 0.9  # the measure of rows with the steps to this accuracy


@dataclass(frozen=True, kw_only=True)
class TaskPart(BoardPart):
    """A part whose columns are tasks at one difficulty and one size of state.

    Attributes:
        columns: how the title of a column is made of its parameters.
    """

    columns: str = "{pairs} pairs, heads of {head_dim}"

    trained = True
    marks_learning = True

    def setting(self, size: str) -> list[Column]:
        task = SIZES[size].task(self.name)
        return [Column(parameters=column, setting=task.setting()) for column in task.columns]

    def name_column(self, parameters: Mapping[str, Plain]) -> str:
        return self.columns.format(**parameters)

    def cost(self, size: str) -> str:
        return SIZES[size].cost.get(self.name, "not estimated")

    def check_columns(self, request: Request) -> None:
        self._columns(request)

    def _columns(self, request: Request) -> list[Column]:
        """The columns that a request runs."""
        columns = self.setting(request.size)
        titles = [self.name_column(column.parameters) for column in columns]
        for text in request.columns or ():
            if not any(text in title for title in titles):
                raise ValueError(
                    f"columns must be texts in titles of {self.name}, got {text!r}; it has {'; '.join(titles)}"
                )
        if request.columns is None:
            return columns
        return [column for column, title in zip(columns, titles) if any(text in title for text in request.columns)]

    def trainings(self, request: Request) -> int:
        task = SIZES[request.size].task(self.name)
        return len(self._columns(request)) * task.trainings(request.seeds or task.seeds)

    def planned_steps(self, request: Request) -> dict[str, int]:
        task, columns = SIZES[request.size].task(self.name), self._columns(request)
        there = {(entry.column, entry.label): entry for entry in self._counted(request)}
        steps = {}
        for choice in request.mixers:
            seeds = request.seeds or task.seeds_of(choice.name)
            entries = [there.get((self.name_column(column.parameters), choice.label)) for column in columns]
            missing = sum(entry is None or entry.seeds != seeds for entry in entries)
            steps[choice.label] = missing * task.trainings(seeds) * int(task.shared["steps"])  # type: ignore[arg-type]
        return steps

    def _counted(self, request: Request) -> list[Entry]:
        """What the board of a request has."""
        return self.entries(self.counted(self.board(request).rows, request.size))

    def run(self, request: Request) -> Path:
        """Train every mixer of the request in the columns that it asks for: the first seed at all learning rates, the others at
        its best one.

        A run that has ended is never trained again, nor a mixer of whose seeds the board has rows in a column. The board has the
        mixers whose seeds have all ended.
        """
        size, board = SIZES[request.size].task(self.name), self.board(request)
        there = {(entry.column, entry.label): entry for entry in self._counted(request)}
        entries = {}
        for column in self._columns(request):
            title = self.name_column(column.parameters)
            for choice in request.mixers:
                entry, seeds = there.get((title, choice.label)), request.seeds or size.seeds_of(choice.name)
                if entry is None or entry.seeds != seeds:
                    name = f"{file_name(title)}/{file_name(choice.label)}"
                    entries[name] = (column, match_mixer(size, column.parameters, choice), seeds, entry)
        experiments = {
            name: RecallExperiment(
                **size.experiment(column.parameters), mixers=(mixer.choice,), intermediate_size=mixer.intermediate_size,
                learning_rates=size.rates, seeds=seeds, device=request.device,
            )
            for name, (column, mixer, seeds, _) in entries.items()
        }  # fmt: skip
        folders = {name: request.trainings / f"{self.name}-{request.size}" / name for name in entries}
        searches, failure = search_rates(
            experiments, folders, limits=size.limits, workers=request.processes(), reporter=request.reporter,
            imports=request.imports,
        )  # fmt: skip
        for name, (column, mixer, seeds, entry) in entries.items():
            search = searches.get(name)
            if search is not None and len(search.chosen) == len(seeds):
                self._add(board, entry, self._rows(column, mixer, seeds, search, request))
        if failure is not None:
            raise failure
        return board.path

    def _add(self, board: Board, before: Entry | None, rows: Sequence[Row]) -> None:
        """Put the rows of a mixer in a column on the board. First seeds that were there, with the same numbers, stay as they
        are, with when and where they were measured."""
        if before is None:
            board.add(rows)
            return
        values = [(row.seed, row.value) for row in rows if row.measure == self.value]
        same = values[: len(before.seeds)] == list(zip(before.seeds, before.values))
        kept, old = (before.rows, before.seeds) if same else ((), ())
        board.add([*kept, *(row for row in rows if row.seed not in old)], instead_of=before.rows)

    def _rows(
        self, column: Column, mixer: Matched, seeds: Sequence[int], search: RateSearch, request: Request
    ) -> list[Row]:
        origin = find_origin(request.device)
        rows = []
        for seed, chosen in zip(seeds, search.chosen, strict=True):
            trained = search.grid if seed == seeds[0] else [chosen]
            found = {
                self.value: chosen.counted_value, EXACT: chosen.best_error, **_by_pairs(self.value, chosen)
            }  # fmt: skip
            rows += [
                Row(
                    task=self.name, measure=measure, unit="1", column=column.parameters, mixer=mixer.choice.name,
                    options=mixer.given, run={**column.setting, **_facts(mixer, chosen, trained)}, seed=seed, value=value,
                    origin=origin,
                )
                for measure, value in found.items()
                if value is not None or measure.startswith(STEPS)
            ]  # fmt: skip
        return rows

    def guesses(self, entry: Entry) -> bool:
        """Within three standard errors of guessing over the sequences of a test, or within 2% of the error of predicting zero."""
        chance = entry.run["chance"]
        assert isinstance(chance, float)
        if self.better == "lower":
            return entry.mean >= 0.98 * chance
        return entry.mean <= chance + 3 * math.sqrt(chance * (1 - chance) / FEWEST_TESTED)


@dataclass(frozen=True, kw_only=True)
class RecallPart(TaskPart):
    """A part that trains from first weights that are paired by the seed until a model has learnt, most on mixed numbers of pairs.

    A column is a task or layout, a size of state and a block. Its number is the accuracy, the mean over the numbers of pairs;
    rows have that of each, and the steps to an accuracy of 90%, as other measures.
    """

    beside = {STEPS: "steps to 90%"}


def _by_pairs(value: str, chosen: RecallResult) -> dict[str, float | None]:
    """The measures of a training until it has learnt: of mixed pairs its value on the tested sequences and the steps until it was
    good enough on the validation sequences, of each number of pairs; and the steps of all together. None where it never was."""
    counts = [int(pairs) for pairs in chosen.tested]
    if len(counts) < 2:
        return {} if chosen.run.get("stop_at") is None else {STEPS: chosen.steps_to(LEARNT)}
    return {
        **{f"{value}_{pairs}": chosen.tested[str(pairs)] for pairs in counts},
        **{f"{STEPS}_{pairs}": chosen.steps_to(LEARNT, pairs) for pairs in counts},
        STEPS: chosen.steps_to(LEARNT),
    }


def _facts(mixer: Matched, chosen: RecallResult, trained: Iterable[RecallResult]) -> dict[str, Plain]:
    """What a row says of the model and its training. trained: every training of the seed."""
    trained = list(trained)
    return {
        **mixer.facts(),
        "learning_rate": chosen.run["learning_rate"],
        "parameters": chosen.parameters,
        "state": chosen.state_size,
        "chance": chosen.chance_level,
        "undertrained": chosen.undertrained,
        "trainings": len(trained),
        "diverged": sum(one.diverged for one in trained),
    }


def match_mixer(size: TaskSize, column: Mapping[str, Plain], choice: MixerChoice) -> Matched:
    """The mixer in the block and the size in which it takes part in a column."""
    chosen, heads = choice.options, int(size.shared["heads"])  # type: ignore[arg-type]
    if "block" in column:
        choice = in_block(choice, str(column["block"]), heads)
    (run,) = RecallExperiment(**size.experiment(column), mixers=(choice,), learning_rates=size.rates[:1]).runs()
    config = run.model_config()
    model = {
        "vocab_size": config.vocab_size, "hidden_size": config.hidden_size, "num_hidden_layers": config.num_hidden_layers,
        "num_heads": config.num_heads, "tie_word_embeddings": config.tie_word_embeddings,
    }  # fmt: skip
    matching = Matching(model, int(column["head_dim"]), make_objective(run.make_task()).build)  # type: ignore[arg-type]
    return replace(matching.of(choice), given=chosen)
