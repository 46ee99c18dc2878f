"""One result file: written after every row, so that nothing is lost when a run stops, and continued by the next run."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fastweights_studies.measure.environment import describe, write_json
from fastweights_studies.places import RESULTS


class Record:
    """Rows by key beside what `describe` and `head` say. Rows of an existing file, in `folder` or else among the results,
    are kept when it has the same `source` and the same `head` but for `ceilings`, which are measured anew. With `keep_older`
    others of the same device, dtype and backend stay too: `measured` in a row says when and of which files and versions."""

    def __init__(self, folder: Path, name: str, head: Mapping[str, Any], keep_older: bool = False) -> None:
        self.path = folder / name
        self.content: dict[str, Any] = {**describe(), **head, "rows": {}}
        before = next((path for path in (self.path, RESULTS / name) if path.exists()), None)
        if before is None:
            return
        old = json.loads(before.read_text())
        differing = {key for key, value in self.content.items() if old.get(key) != value}
        if not differing & {"source", *head} - {"ceilings"}:
            self.content["rows"] = old["rows"]
        elif keep_older and not differing & {"device", "dtype", "backend"}:
            measured = {key: old[key] for key in ("time", "commit", "source", "triton", "fla") if key in old}
            self.content["rows"] = {key: {"measured": measured, **row} for key, row in old["rows"].items()}

    @property
    def rows(self) -> dict[str, Any]:
        return self.content["rows"]

    def add(self, **fields: Any) -> None:
        self.content.update(fields)
        write_json(self.path, self.content)

    def add_row(self, key: str, row: Mapping[str, Any]) -> None:
        """A new row, or more of one that is as new."""
        before = self.rows.get(key, {})
        self.rows[key] = dict(row) if "measured" in before else {**before, **row}
        self.add()
