"""The measured rows that pages read."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from fastweights_studies.record import Plain, Row, read_rows, select

__all__ = ["read_measured", "value_of"]


@cache
def read_measured(name: str, task: str, results: Path) -> tuple[Row, ...]:
    """The rows of a task in the files that a script wrote: NAME.json, or NAME-<device>.json of every device."""
    paths = (
        [results / f"{name}.json"] if (results / f"{name}.json").exists() else sorted(results.glob(f"{name}-*.json"))
    )
    return tuple(row for path in paths for row in read_rows(path) if row.task == task)


def value_of(rows: Iterable[Row], measure: str, *, column: Mapping[str, Plain] = {}, **fields: Any) -> float | None:
    """The value of the first row with these fields; None where there is none."""
    found = select(rows, measure=measure, column=column, **fields)
    return found[0].value if found else None
