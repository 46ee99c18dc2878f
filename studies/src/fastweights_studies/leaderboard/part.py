"""What every part of the leaderboard is: a measurement of all mixers in columns, which its class declares, runs and reads."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

from fastweights.files import file_name
from fastweights.layers import MixerChoice
from fastweights.training.folder import as_stored

from ..record import Plain, Row
from ..trained_folders import remove_trainings
from .board import Board, board_path, library_rows, load_board
from .cells import LEARNING, MARKS, UNMARKED, format_number
from .entries import Entry, label_of
from .request import Request
from .standing import Standing

__all__ = ["BoardPart", "Column", "Part"]


@dataclass(frozen=True, kw_only=True)
class Column:
    """A column of a part, as it is declared.

    Attributes:
        parameters: which one it is, as `Row.column` says it: {"task": "s3", "pairs": 32, "head_dim": 32}.
        setting: all else that its numbers depend on. `Row.run` has it, and a row counts as long as it is the declared one.
    """

    parameters: Mapping[str, Plain]
    setting: Mapping[str, Plain]

    def __post_init__(self) -> None:
        for name in ("parameters", "setting"):
            object.__setattr__(self, name, as_stored(dict(getattr(self, name))))  # lists, as rows from a file have them


@dataclass(frozen=True, kw_only=True)
class Part(ABC):
    """One part.

    Attributes:
        says: what is measured, in a line.
        measure: the number, in words. better: "higher" or "lower".
    """

    name: str
    says: str
    measure: str
    better: Literal["higher", "lower"]

    # Whether models of equal state are trained for it, and whether tables mark those that were still learning.
    trained: ClassVar[bool] = False
    marks_learning: ClassVar[bool] = False
    # Other measures of its rows that have columns of their own, and what their titles say.
    beside: ClassVar[Mapping[str, str]] = {}

    @abstractmethod
    def setting(self, size: str) -> list[Column]:
        """The declared columns at a size; none where the numbers are only read."""

    @abstractmethod
    def run(self, request: Request) -> Path | None:
        """Measure what the output folder of a request lacks of its mixers; the file of the results, None where they are read."""

    @abstractmethod
    def rows(self, size: str, folder: Path, measurements: Path) -> list[Row]:
        """The rows that count at a size: of the boards in `folder`, or of what scripts have measured, in `measurements`."""

    @abstractmethod
    def title(self, row: Row) -> str:
        """The title of the column of a row."""

    @abstractmethod
    def number(self, row: Row) -> float | None:
        """The value of a row in the unit of the table; None where it is not finite, or is no number of the table."""

    @abstractmethod
    def cost(self, size: str) -> str:
        """Time with every mixer of the library, or the command that measures what is read."""

    def board_size(self, size: str) -> str:
        """What the name of a board and plans call a size."""
        return size

    def library(self, size: str, beside: Sequence[Row]) -> list[Row]:
        """The library's own rows at a size, of mixers that have none among `beside`."""
        return []

    def files(self, request: Request) -> list[Path]:
        """The files of results that `run` writes."""
        return []

    def forget(self, request: Request) -> None:  # noqa: B027  # what is only read is not forgotten
        """Delete what the output folder of a request has of its mixers, rows and trainings; the whole file where another setting
        was measured."""

    def check_columns(self, request: Request) -> None:
        """Refuse columns that the part does not have.

        Raises:
            ValueError: the request chooses columns, and the part measures all of its own together or has none with such a title.
        """
        if request.columns is not None:
            raise ValueError(f"columns must be left out for {self.name}, which measures all its columns together")

    def participants(self, mixers: Sequence[MixerChoice]) -> list[str]:
        """The labels of what is measured where these mixers take part.

        Raises:
            ValueError: none of them can be measured.
        """
        return [choice.label for choice in mixers]

    def listed(self, mixers: Sequence[str]) -> Sequence[str]:
        """The labels that have a line in the table for these mixers."""
        return mixers

    def trainings(self, request: Request) -> int:
        """How many models `run` trains per mixer, at most."""
        return 0

    def planned_steps(self, request: Request) -> dict[str, int]:
        """Steps that `run` would train at most, by mixer, where it trains by steps."""
        return {}

    def how_to_measure(
        self, mixers: Sequence[str], rows: Sequence[Row], imports: Sequence[str], measurements: Path
    ) -> str:
        """Lines for a terminal: what measures those of `mixers` that the rows lack; "" where `run` does, or none is missing."""
        return ""

    def explanation(self) -> str:
        """How the table is read, in a line or two."""
        return f"{self.measure[0].upper()}{self.measure[1:]}, {self.better} is better. {self.how_to_read()}"

    def how_to_read(self) -> str:
        """What numbers and marks of the table mean."""
        other = {} if self.marks_learning else {LEARNING: UNMARKED}
        return " ".join(other.get(mark, mark) for mark in MARKS)

    def entries(self, rows: Iterable[Row]) -> list[Entry]:
        """The rows by column and mixer, in the order in which these appear."""
        groups: dict[tuple[str, str, str], list[Row]] = {}
        for row in rows:
            if row.mixer is not None:
                groups.setdefault((self.title(row), self.label(row), self.detail(row)), []).append(row)
        return [self._entry(*group, own) for group, own in groups.items()]

    def _entry(self, column: str, label: str, detail: str, rows: Sequence[Row]) -> Entry:
        found = [(row.seed, x) for row in rows if (x := self.number(row)) is not None]
        seeds, values = tuple(seed for seed, _ in found), tuple(x for _, x in found)
        return Entry(
            column=column, mixer=str(rows[0].mixer), label=label, detail=detail, seeds=seeds, values=values, rows=tuple(rows)
        )  # fmt: skip

    def label(self, row: Row) -> str:
        """What tables call the mixer of a row."""
        return label_of(row)

    def detail(self, row: Row) -> str:
        """What the table says of the mixer of a row behind its label."""
        return ""

    def format(self, standing: Standing) -> str:
        """The number of a cell, without marks."""
        mean, spread = self.shown(standing)
        text = format_number(mean)
        if spread is not None:
            text += f" ±{format_number(spread, like=mean)}"
        return text if standing.place is None else f"{text} ({standing.place}{'=' * standing.tied})"

    def shown(self, standing: Standing) -> tuple[float, float | None]:
        """Mean and half the spread as the table has them."""
        return standing.mean, None if standing.spread is None else standing.spread / 2

    def guesses(self, entry: Entry) -> bool:
        """Whether a trained model is no better than guessing."""
        return False


@dataclass(frozen=True, kw_only=True)
class BoardPart(Part):
    """A part that is measured here: its rows are on a board, one file per size.

    Attributes:
        value: what rows call the number of the table, their `measure`.
    """

    value: str

    @abstractmethod
    def name_column(self, parameters: Mapping[str, Plain]) -> str:
        """The title of a column."""

    def title(self, row: Row) -> str:
        return self.name_column(row.column)

    def number(self, row: Row) -> float | None:
        return row.value if row.measure == self.value else None

    def board(self, request: Request) -> Board:
        """The board in the output folder of a request.

        Raises:
            ValueError: it has rows of declared columns that were measured at another setting.
        """
        path = self.files(request)[0]
        board = load_board(path) if path.exists() else Board(path)
        columns = self.setting(request.size)
        changed = sorted({name for row in board.rows for name in self.differing(row, columns) or ()})
        if changed:
            raise ValueError(
                f"output holds {board.path.name}, measured at another setting ({', '.join(changed)}); pass another --output, "
                "or --overwrite to delete those results"
            )
        return board

    def counted(self, rows: Iterable[Row], size: str) -> list[Row]:
        """The rows of columns that are still declared, with their setting."""
        columns = self.setting(size)
        return [row for row in rows if self.differing(row, columns) == []]

    def differing(self, row: Row, columns: Sequence[Column]) -> list[str] | None:
        """What was another setting when a row was measured; None where its column is none of the declared ones."""
        column = next((one for one in columns if one.parameters == row.column), None)
        if column is None:
            return None
        return [name for name, value in column.setting.items() if row.run.get(name) != value]

    def rows(self, size: str, folder: Path, measurements: Path) -> list[Row]:
        path = board_path(folder, self.name, self.board_size(size))
        return self.counted(load_board(path).rows, size) if path.exists() else []

    def library(self, size: str, beside: Sequence[Row]) -> list[Row]:
        there = set(map(self.label, beside))
        found = self.counted(library_rows(self.name, self.board_size(size)), size)
        return [row for row in found if self.label(row) not in there]

    def files(self, request: Request) -> list[Path]:
        return [board_path(request.output, self.name, self.board_size(request.size))]

    def forget(self, request: Request) -> None:
        path = self.files(request)[0]
        if path.exists():
            try:
                board = self.board(request)
            except ValueError:  # of another version or setting
                path.unlink()
            else:
                names = self.participants(request.mixers)
                board.drop(lambda row: self.label(row) in names)
        trainings = request.trainings / f"{self.name}-{request.size}"
        for place in (trainings, *trainings.glob("*")):  # a column of a task has a folder
            for choice in request.mixers:
                remove_trainings(place / file_name(choice.label))
