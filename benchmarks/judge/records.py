"""One result file: written after every row, so that nothing is lost when a run stops, and continued by the next run of the
same Python files."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from environment import describe, write_json

RESULTS = Path(__file__).parents[1] / "results"


class Record:
    """Rows by key beside what `describe` and `head` say. Rows of an existing file, in `folder` or else among the results,
    are kept when it has the same `source` and the same `head` but for `ceilings`, which are measured anew."""

    def __init__(self, folder: Path, name: str, head: Mapping[str, Any]) -> None:
        self.path = folder / name
        self.content: dict[str, Any] = {**describe(), **head, "rows": {}}
        before = next((path for path in (self.path, RESULTS / name) if path.exists()), None)
        if before is not None:
            old = json.loads(before.read_text())
            same = {"source": self.content["source"], **{key: x for key, x in head.items() if key != "ceilings"}}
            if all(old.get(key) == value for key, value in same.items()):
                self.content["rows"] = old["rows"]

    @property
    def rows(self) -> dict[str, Any]:
        return self.content["rows"]

    def add(self, **fields: Any) -> None:
        self.content.update(fields)
        write_json(self.path, self.content)

    def add_row(self, key: str, row: Mapping[str, Any]) -> None:
        """A new row, or more of one."""
        self.rows[key] = {**self.rows.get(key, {}), **row}
        self.add()
