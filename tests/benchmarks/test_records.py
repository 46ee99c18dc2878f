"""A result file grows row by row, and the next run of the same commit continues it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from judge import records
from judge.records import Record


@pytest.mark.parametrize(
    "commit, head, kept",
    [
        ("abc with uncommitted changes", {}, True),
        ("other", {}, False),
        ("unknown", {}, False),
        ("abc", {"dtype": "float16"}, False),
        ("abc", {"ceilings": 2}, True),
    ],
)
def test_rows_of_the_same_commit_are_kept(
    commit: str, head: dict[str, object], kept: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = {"device": "x", "dtype": "bfloat16", "ceilings": 1}
    monkeypatch.setattr(records, "describe", lambda: {"commit": "unknown" if commit == "unknown" else "abc"})
    Record(tmp_path, "r.json", plain).add_row("a", {"n": 1})
    monkeypatch.setattr(records, "describe", lambda: {"commit": commit})
    second = Record(tmp_path, "r.json", {**plain, **head})
    second.add_row("b", {"n": 2})
    rows = json.loads((tmp_path / "r.json").read_text())["rows"]
    assert rows == ({"a": {"n": 1}} if kept else {}) | {"b": {"n": 2}}
