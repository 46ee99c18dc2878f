"""The results of a part: one file of rows, written whole whenever rows join it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from fastweights.kinds import checked
from fastweights.outputs import check_file, has_keys
from fastweights.results.records import ResultsError, read_object

from ..places import RESULTS
from ..record import Plain, Row, read_rows, write_rows
from .entries import label_of

__all__ = ["Board", "board_path", "is_board", "library_rows", "load_board"]

COMMITTED = RESULTS / "leaderboard"
Key = tuple[object, ...]


@checked
class Board:
    """The rows of a part at a size, in a file. A row that is added replaces the one of the same column, mixer, seed and measure.

    Attributes:
        path: the file. It need not exist.
        rows: in the order in which they came.
    """

    def __init__(self, path: Path, rows: Sequence[Row] = ()) -> None:
        self.path = path
        self._rows = {_key(row): row for row in rows}

    @property
    def rows(self) -> list[Row]:
        return list(self._rows.values())

    def add(self, rows: Iterable[Row], instead_of: Iterable[Row] = ()) -> None:
        """Keep rows in the place of others, on the disk too. The file has all of them or, where writing is interrupted, none."""
        new = {_key(row): row for row in rows}
        gone = set(map(_key, instead_of)) - new.keys()
        self._rows = {key: row for key, row in self._rows.items() if key not in gone} | new
        if new or gone:
            self._save()

    def add_missing(self, rows: Iterable[Row]) -> None:
        """Keep those of the rows whose column, mixer, seed and measure are not there."""
        self.add([row for row in rows if _key(row) not in self._rows])

    def drop(self, unwanted: Callable[[Row], bool]) -> None:
        """Delete rows, on the disk too."""
        self._rows = {key: row for key, row in self._rows.items() if not unwanted(row)}
        self._save()

    def _save(self) -> None:
        check_file("output", self.path, is_board, "result")
        self.path.parent.mkdir(parents=True, exist_ok=True)
        write_rows(self.path, self.rows)


def _key(row: Row) -> Key:
    return row.task, row.measure, _frozen(row.column), label_of(row), row.seed


def _frozen(values: Mapping[str, Plain]) -> Key:
    return tuple(sorted((name, str(value)) for name, value in values.items()))


@checked
def board_path(folder: Path, part: str, size: str) -> Path:
    return folder / f"{part}-{size}.json"


def is_board(path: Path) -> bool:
    """Whether a file holds the results of a part, of any version."""
    return has_keys(path, "format", "origins", "rows") or _has_sentences(path)


def _has_sentences(path: Path) -> bool:
    """Whether a file is a board of the versions that had sentences as the keys of rows."""
    return has_keys(path, "format", "part", "size", "setting", "rows")


@checked
def load_board(path: Path) -> Board:
    """Raises:
    ResultsError: the file is damaged or of another version.
    """
    if "setting" in read_object(path):
        raise ResultsError(
            f"result {path} is of an earlier version; delete that file: the same command then writes it again from the "
            "trainings that are beside it"
        )
    return Board(path, read_rows(path))


def library_rows(part: str, size: str) -> list[Row]:
    """The rows of a part at a size that the library comes with."""
    path = board_path(COMMITTED, part, size)
    return load_board(path).rows if path.exists() else []
