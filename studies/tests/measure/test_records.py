"""A result file grows row by row, and the next run continues it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from fastweights_studies.measure import environment
from fastweights_studies.measure.judge import records
from fastweights_studies.measure.judge.records import Record


@pytest.mark.parametrize(
    "source, head, kept",
    [
        ("abc", {}, True),
        ("other", {}, False),
        ("abc", {"dtype": "float16"}, False),
        ("abc", {"ceilings": 2}, True),
    ],
)
def test_rows_of_the_same_files_are_kept(
    source: str, head: dict[str, object], kept: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = {"device": "x", "dtype": "bfloat16", "ceilings": 1}
    monkeypatch.setattr(records, "describe", lambda: {"source": "abc"})
    Record(tmp_path, "r.json", plain).add_row("a", {"n": 1})
    monkeypatch.setattr(records, "describe", lambda: {"source": source})
    second = Record(tmp_path, "r.json", {**plain, **head})
    second.add_row("b", {"n": 2})
    rows = json.loads((tmp_path / "r.json").read_text())["rows"]
    assert rows == ({"a": {"n": 1}} if kept else {}) | {"b": {"n": 2}}


def test_rows_of_older_files_say_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They stay until they are measured again, through as many runs as it takes."""
    for source, key in (("abc", "a"), ("abc", "b"), ("other", "b"), ("third", "c")):
        monkeypatch.setattr(records, "describe", lambda source=source: {"source": source, "time": 1, "commit": 2})
        Record(tmp_path, "r.json", {"device": "x"}, keep_older=True).add_row(key, {"n": source})
    rows = json.loads((tmp_path / "r.json").read_text())["rows"]
    of = {source: {"time": 1, "commit": 2, "source": source} for source in ("abc", "other")}
    assert rows == {
        "a": {"measured": of["abc"], "n": "abc"}, "b": {"measured": of["other"], "n": "other"}, "c": {"n": "third"},
    }  # fmt: skip


def test_the_source_changes_with_any_file(tmp_path: Path) -> None:
    found = [environment.source(tmp_path)]
    for name, text in (("a.py", ""), ("b.py", ""), ("b.py", "x"), ("b/a.py", "x")):
        path = tmp_path / "fastweights" / "ops" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        found.append(environment.source(tmp_path))
    (tmp_path / "fastweights" / "ops" / "notes.md").write_text("other")
    (tmp_path / "fastweights" / "cli.py").write_text("other")
    assert len(set(found)) == 5 and environment.source(tmp_path) == found[-1]
