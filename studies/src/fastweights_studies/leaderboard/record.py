"""The results of a part: one JSON file with a line per row, written whole after every row."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Collection, Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from fastweights.environment import machine, versions
from fastweights.files import write_bytes
from fastweights.kinds import checked
from fastweights.outputs import check_file, has_keys
from fastweights.results.records import ResultsError, from_record, read_object

from ..places import RESULTS

__all__ = [
    "LATER",
    "Board",
    "board_path",
    "is_board",
    "joined_origins",
    "library_rows",
    "load_board",
    "measured_here",
    "origins",
    "row_key",
]

FORMAT = 1
COMMITTED = RESULTS / "leaderboard"
LATER = "measured later"  # when and where the seeds were that joined a row, in the order in which they joined


@checked
class Board:
    """The rows of a part at a size. Rows that are added replace those of the same keys, and the file on the disk has them.

    Attributes:
        part, size: what was measured, and which of the declared sizes.
        setting: as it was declared, plain values.
        rows: by a key that names the run.
    """

    def __init__(
        self, path: Path, part: str, size: str, setting: Mapping[str, Any], rows: Mapping[str, Any] = {}
    ) -> None:
        self.path, self.part, self.size = path, part, size
        self.setting = json.loads(json.dumps(setting))  # as it comes back from a file
        self.rows: dict[str, dict[str, Any]] = dict(rows)

    @classmethod
    def opened(cls, folder: Path, part: str, size: str, setting: Mapping[str, Any]) -> Board:
        """The board of a folder, with the rows that it has.

        Raises:
            ValueError: its rows were measured at another setting.
        """
        new = cls(board_path(folder, part, size), part, size, setting)
        if new.path.exists():
            there = load_board(new.path)
            if there.setting != new.setting:
                changed = sorted(
                    key for key in {*there.setting, *new.setting} if there.setting.get(key) != new.setting.get(key)
                )
                raise ValueError(
                    f"output holds {new.path.name}, measured at another setting ({', '.join(changed)}); pass another "
                    "--output, or --overwrite to delete those results"
                )
            new.rows = there.rows
        return new

    def add(self, key: str, row: Mapping[str, Any]) -> None:
        """Keep a row, on the disk too."""
        self.add_together({key: row})

    def add_together(self, rows: Mapping[str, Mapping[str, Any]]) -> None:
        """Keep rows by their keys. The file has all of them or, where writing is interrupted, none."""
        self.rows |= {key: dict(row) for key, row in rows.items()}
        self._save()

    def drop(self, names: Collection[str]) -> None:
        """Delete the rows of these mixers or rules, on the disk too."""
        self.rows = {key: row for key, row in self.rows.items() if row.get("mixer", row.get("rule")) not in names}
        self._save()

    def _save(self) -> None:
        check_file("output", self.path, is_board, "result")
        self.path.parent.mkdir(parents=True, exist_ok=True)
        head = {"format": FORMAT, "part": self.part, "size": self.size, "setting": self.setting}
        lines = [f"{json.dumps(key)}: {json.dumps(row, allow_nan=False)}" for key, row in self.rows.items()]
        text = json.dumps(head, indent=1)[:-2] + ',\n "rows": {\n  ' + ",\n  ".join(lines) + "\n }\n}\n"
        write_bytes(self.path, text.encode())


@checked
def board_path(folder: Path, part: str, size: str) -> Path:
    return folder / f"{part}-{size}.json"


def is_board(path: Path) -> bool:
    """Whether a file holds the results of a part, of any setting and version."""
    return has_keys(path, "format", "part", "size", "setting", "rows")


@dataclasses.dataclass(frozen=True)
class _Content:
    """What the file of a board holds."""

    format: int
    part: str
    size: str
    setting: dict[str, Any]
    rows: dict[str, dict[str, Any]]


@checked
def load_board(path: Path) -> Board:
    """Raises:
    ResultsError: the file is damaged or of another version.
    """
    content = from_record(_Content, read_object(path), path)
    if content.format != FORMAT:
        raise ResultsError(f"result {path} is not of format {FORMAT}; delete that file to have it made again")
    return Board(path, content.part, content.size, content.setting, content.rows)


def measured_here(device: str) -> dict[str, str]:
    """When and where a row was measured."""
    place, found = machine(device), versions()
    return {
        "time": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "machine": place.get("gpu") or place["cpu"],
        "torch": found["torch"],
        "fastweights": found["fastweights"],
    }


def row_key(column: str, label: str) -> str:
    """The key of a mixer's row."""
    return f"{column}, {label}"


def joined_origins(row: Mapping[str, Any], later: Mapping[str, Any]) -> dict[str, Any]:
    """The fields that say when and where a row was measured, after seeds have joined it that were measured later."""
    return {"measured": row["measured"], LATER: [*row.get(LATER, ()), later]}


def origins(row: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """When and where the seeds of a row were measured: the first ones, and those that joined later."""
    return [row["measured"], *row.get(LATER, ())]


def library_rows(part: str, size: str, setting: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The rows of a part and size that the library comes with; none where they were measured at another setting."""
    path = board_path(COMMITTED, part, size)
    if not path.exists():
        return []
    board = load_board(path)
    return list(board.rows.values()) if board.setting == json.loads(json.dumps(setting)) else []
