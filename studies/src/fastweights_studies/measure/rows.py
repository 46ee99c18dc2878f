"""The rows that a script measures: how they are made, and how they take the place of older ones in a result file."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Mapping
from pathlib import Path
from typing import Any

from fastweights_studies.record import Origin, Row, read_rows, write_rows

from .judge.timing import Milliseconds

__all__ = ["Value", "find_rows", "make_rows", "name_device", "name_file", "replace_rows", "same_subject"]

Value = float | int | bool | Milliseconds | None
# Of a measure, by the end of its name: the longest that fits.
UNITS = {
    "_ms": "ms",
    "_us": "us",
    "_s": "s",
    "_bytes": "bytes",
    "_nats": "nats",
    "tokens_per_second": "tokens/s",
    "bytes_per_second": "bytes/s",
    "operations_per_second": "1/s",
}


def find_unit(measure: str) -> str:
    """The unit that the name of a measure ends with; "1" for counts, shares and errors."""
    fitting = [end for end in UNITS if measure.endswith(end)]
    return UNITS[max(fitting, key=len)] if fitting else "1"


def make_rows(task: str, origin: Origin, values: Mapping[str, Value], **fields: Any) -> list[Row]:
    """One row per measure of `values`. fields: the other fields of the rows, which they share."""
    rows = []
    for measure, value in values.items():
        spread = None
        if isinstance(value, Milliseconds):
            value, *spread = value
        rows.append(
            Row(
                task=task,
                measure=measure,
                unit=find_unit(measure),
                value=None if value is None or not math.isfinite(value) else float(value),
                spread=spread,
                origin=origin,
                **fields,
            )
        )
    return rows


def name_file(folder: Path, name: str, device: str) -> Path:
    """The result file of a script and a device."""
    return folder / f"{name}-{name_device(device)}.json"


def name_device(device: str) -> str:
    """A device as names of files have it."""
    return device.replace(" ", "-").lower()


def find_rows(path: Path) -> list[Row]:
    """What a result file holds at this moment, nothing where there is none; other processes may write it too."""
    return read_rows(path) if path.exists() else []


def same_subject(row: Row) -> Hashable:
    """Equal for rows of one task, mixer with its options, and column."""
    return row.task, row.mixer, *(tuple(sorted(map(repr, x.items()))) for x in (row.options, row.column))


def replace_rows(path: Path, rows: Iterable[Row], measured_together: Callable[[Row], Hashable] = same_subject) -> None:
    """Write the rows into a result file, whole or not at all, in the place of those that they measure again.

    Args:
        measured_together: equal for rows that one run measures together. Old ones that are equal to a new one go, those that
            the new run did not measure too; all others stay as they are.
    """
    groups: dict[Hashable, list[Row]] = {}
    for row in find_rows(path):
        groups.setdefault(measured_together(row), []).append(row)
    new: dict[Hashable, list[Row]] = {}
    for row in rows:
        new.setdefault(measured_together(row), []).append(row)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_rows(path, [row for group in {**groups, **new}.values() for row in group])
