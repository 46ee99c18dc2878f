"""A measured number and where it comes from: what every result file of the studies is made of.

A result file holds rows. Each says which number of which task it is by identifiers and plain values, never by a sentence, so that
readers select rows by fields. A row stays valid as long as the task still has its column: another column does not touch it.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeAlias

from fastweights.checks import describe_value
from fastweights.files import write_bytes
from fastweights.results.records import ResultsError, from_record, read_object

__all__ = ["Origin", "Plain", "Row", "read_about", "read_rows", "select", "write_rows"]

Plain: TypeAlias = str | int | float | bool | None | list[int] | list[float]

FORMAT = 2  # a file of format 1 has the `run` of every row in the row
NAME = re.compile(r"[A-Za-z][A-Za-z0-9_]*")  # of fields; capitals are the papers' letters, such as T for time
WORD = re.compile(r"\S{1,80}")  # texts among the values are names, such as "shuffled", "gdn" or "NVIDIA-H100"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Origin:
    """Where and when a number was measured.

    Attributes:
        device: the GPU, or the processor, as the machine calls it.
        versions: of the libraries, by name: torch, triton, fastweights.
        commit: of this repository, "unknown" outside a checkout; changed: whether its Python files differed from it.
        date: UTC, ISO 8601 to the second.
    """

    device: str
    versions: Mapping[str, str]
    commit: str
    date: str
    changed: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """One measured number.

    Attributes:
        task: what was done: "mqar", "decode_table", "C12".
        measure: what of it the value is: "accuracy", "step_ms", "state_bytes".
        unit: of the value: "1", "nats", "ms", "bytes", "tokens/s".
        column: the parameters of the task that the number belongs to, by name: {"pairs": 32, "order": "shuffled"}.
        mixer: the memory or op that was measured; None where the task has none. options: those given to it.
        run: what the number depends on beside the column and is not compared: learning rate, repeat.
        seed: of a training or of random inputs; None where there is none.
        value: None where the number was not finite. Of repeated calls the median.
        spread: of repeated calls the first and the third quartile.
        origin: where and when.

    Raises:
        ValueError: a name that is no identifier, or a text with spaces among the values.
    """

    task: str
    measure: str
    unit: str
    column: Mapping[str, Plain] = dataclasses.field(default_factory=dict)
    mixer: str | None = None
    options: Mapping[str, Plain] = dataclasses.field(default_factory=dict)
    run: Mapping[str, Plain] = dataclasses.field(default_factory=dict)
    seed: int | None = None
    value: float | None = None
    spread: list[float] | None = None
    origin: Origin

    def __post_init__(self) -> None:
        if not NAME.fullmatch(self.measure):
            raise ValueError(f"measure must be an identifier such as 'step_ms', got {describe_value(self.measure)}")
        for group in ("column", "options", "run"):
            for name, value in getattr(self, group).items():
                if not NAME.fullmatch(name):
                    raise ValueError(f"names of {group} must be identifiers, got {describe_value(name)}")
                if isinstance(value, str) and not WORD.fullmatch(value):
                    raise ValueError(f"{group}[{name!r}] must be a name without spaces, got {describe_value(value)}")


def select(rows: Iterable[Row], *, column: Mapping[str, Plain] = {}, **fields: Any) -> list[Row]:
    """The rows whose fields are these, in order. Of `column` only the names that are given count."""
    return [
        row
        for row in rows
        if all(getattr(row, name) == value for name, value in fields.items())
        and all(name in row.column and row.column[name] == value for name, value in column.items())
    ]


def write_rows(path: Path, rows: Iterable[Row], about: Mapping[str, Any] | None = None) -> None:
    """Write a result file, whole or not at all: one line per row, and each origin and each `run` once.

    Args:
        about: what the file says beside its rows, which `read_about` reads.

    Raises:
        WriteError: the file cannot be written.
    """
    origins: dict[str, int] = {}  # each with its place in the list
    runs: dict[str, int] = {}
    lines = []
    for row in rows:
        content = {
            field.name: getattr(row, field.name)
            for field in dataclasses.fields(row)
            if field.name == "value" or getattr(row, field.name) not in ({}, None)
        }
        content["origin"] = origins.setdefault(_line(dataclasses.asdict(row.origin)), len(origins))
        if row.run:
            content["run"] = runs.setdefault(_line(row.run), len(runs))
        lines.append(_line(content))
    said = "" if about is None else f' "about": {_indent(json.dumps(about, indent=1, allow_nan=False))},\n'
    lists = {"origins": origins, "runs": runs, "rows": lines}
    listed = ",\n".join(
        f' "{name}": {_list_of_lines(items)}' for name, items in lists.items() if items or name != "runs"
    )
    write_bytes(path, f'{{\n "format": {FORMAT},\n{said}{listed}\n}}\n'.encode())


def _line(content: Mapping[str, Any]) -> str:
    return json.dumps(content, allow_nan=False)


def _indent(text: str) -> str:
    return text.replace("\n", "\n ")


def _list_of_lines(items: Iterable[str]) -> str:
    inside = ",\n  ".join(items)
    return f"[\n  {inside}\n ]" if inside else "[]"


def read_about(path: Path) -> dict[str, Any]:
    """What a result file says beside its rows; empty where it says nothing.

    Raises:
        ResultsError: the file is damaged or of another format.
    """
    about = _read_content(path).get("about", {})
    if not isinstance(about, dict):
        raise ResultsError(f"result {path} is damaged: about must be an object; delete that file to have it made again")
    return about


def _read_content(path: Path) -> dict[str, Any]:
    content = read_object(path)
    if content.get("format") not in (1, FORMAT) or not {"origins", "rows"} <= content.keys():
        raise ResultsError(f"result {path} is not of format {FORMAT}; delete that file to have it made again")
    return content


def read_rows(path: Path) -> list[Row]:
    """The rows of a result file.

    Raises:
        ResultsError: the file is damaged or of another format.
    """
    status = path.stat() if path.is_file() else None
    return [*_rows_of(path, status and (status.st_ino, status.st_mtime_ns, status.st_size))]


@lru_cache(maxsize=128)
def _rows_of(path: Path, version: tuple[int, ...] | None) -> tuple[Row, ...]:
    """Checked once as long as the file stays as it is: pages read the same files many times. A file that is written anew is
    another one on the disk, with a time of its own."""
    content = _read_content(path)
    try:
        origins = [from_record(Origin, origin, path) for origin in content["origins"]]
        runs = content.get("runs", ())
        for row in content["rows"]:
            row["origin"] = origins[row["origin"]]
            if isinstance(row.get("run"), int):
                row["run"] = runs[row["run"]]
        return tuple(from_record(Row, row, path) for row in content["rows"])
    except (TypeError, KeyError, IndexError, ValueError) as error:
        raise ResultsError(f"result {path} is damaged: {error}; delete that file to have it made again") from error
