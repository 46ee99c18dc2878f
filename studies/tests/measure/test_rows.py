"""Rows of a script: how they are made, and how a result file grows row by row."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest
from fastweights_studies import places
from fastweights_studies.measure import environment
from fastweights_studies.measure.judge.timing import Milliseconds
from fastweights_studies.measure.rows import find_rows, find_unit, make_rows, name_file, replace_rows
from fastweights_studies.record import Origin, Row, read_rows, write_rows

OLD = Origin(device="x", versions={"files": "abc"}, commit="1", date="2026-01-01T00:00:00")
NEW = dataclasses.replace(OLD, commit="2", date="2026-01-02T00:00:00")


def rows(origin: Origin, **values: Any) -> list[Row]:
    """One row per value, whose name is its column."""
    return [
        row for name, value in values.items() for row in make_rows("t", origin, {"step_ms": value}, column={"at": name})
    ]


def test_units_are_said_by_the_names_of_measures() -> None:
    measures = (
        "step_ms",
        "forward_us",
        "start_s",
        "peak_bytes",
        "tokens_per_second",
        "copy_bytes_per_second",
        "errors",
    )
    assert [find_unit(name) for name in measures] == ["ms", "us", "s", "bytes", "tokens/s", "bytes/s", "1"]


def test_a_spread_and_what_is_no_number() -> None:
    spread, nothing, infinite, flag = make_rows(
        "t", OLD, {"step_ms": Milliseconds(2.0, 1.0, 3.0), "loss": None, "error": math.inf, "passes": True}
    )
    assert (spread.value, spread.spread, spread.unit) == (2.0, [1.0, 3.0], "ms")
    assert nothing.value is None and infinite.value is None and nothing.spread is None
    assert flag.value == 1.0


def test_new_rows_take_the_place_of_those_that_they_measure_again(tmp_path: Path) -> None:
    """And leave all others, those of other files too, through as many runs as it takes."""
    path = tmp_path / "below" / "r.json"
    replace_rows(path, rows(OLD, a=1.0, b=2.0, c=3.0))
    replace_rows(path, rows(NEW, b=4.0, d=5.0))
    found = [(row.column["at"], row.value, row.origin.commit) for row in read_rows(path)]
    assert found == [("a", 1.0, "1"), ("b", 4.0, "2"), ("c", 3.0, "1"), ("d", 5.0, "2")]


def test_origins_and_runs_are_written_once(tmp_path: Path) -> None:
    """By format 2; a file of format 1, where each row has its own, is read as well."""
    path, short, long = tmp_path / "r.json", {"steps": 1, "rates": [0.1]}, {"steps": 2}
    made = [dataclasses.replace(rows(OLD, a=1.0)[0], run=run) for run in (long, short, {}, long)]
    made[2] = dataclasses.replace(made[2], origin=NEW)
    write_rows(path, made)
    content = json.loads(path.read_text())
    assert content["runs"] == [long, short] and len(content["origins"]) == 2
    assert [row.get("run") for row in content["rows"]] == [0, 1, None, 0]
    assert read_rows(path) == made
    for row in content["rows"]:
        row["run"] = content["runs"][row["run"]] if "run" in row else {}
    path.write_text(json.dumps({**content, "format": 1, "runs": None}))
    assert read_rows(path) == made


def test_what_is_measured_together_goes_together(tmp_path: Path) -> None:
    """A peer that the new run did not measure does not stay beside the new number."""
    path = tmp_path / "r.json"

    def of_two(origin: Origin, *peers: str | None) -> list[Row]:
        return [
            row
            for op in ("gdn", "kda")
            for peer in peers
            for row in make_rows("t", origin, {"a_ms": 1.0}, column={"op": op, "peer": peer})
        ]

    replace_rows(path, of_two(OLD, None, "fla"))
    replace_rows(path, of_two(NEW, None)[:1], lambda row: row.column["op"])
    found = [(row.column["op"], row.column["peer"], row.origin.commit) for row in find_rows(path)]
    assert found == [("gdn", None, "2"), ("kda", None, "1"), ("kda", "fla", "1")]


def test_a_failed_write_leaves_the_file_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    replace_rows(path, rows(OLD, a=1.0))
    before = path.read_bytes()
    with pytest.raises(ValueError, match="must be a name without spaces"):
        replace_rows(path, rows(NEW, b=1.0) + make_rows("t", NEW, {"step_ms": 1.0}, column={"at": "a sentence"}))
    assert path.read_bytes() == before


def test_names_of_files() -> None:
    assert name_file(Path("r"), "kernels", "NVIDIA H100 80GB").name == "kernels-nvidia-h100-80gb.json"


# Counts by file of tests, and names of tests (measure/gpu_tests.py); packages and hashes of a text (measure/code_text.py).
OWN_FORMAT = ("gpu_tests.json", "code-text.json")


@pytest.mark.parametrize("path", sorted(places.RESULTS.glob("*.json")), ids=lambda path: path.name)
def test_committed_results_are_rows(path: Path) -> None:
    if path.name in OWN_FORMAT:
        assert json.loads(path.read_text())["format"] == 1
        return
    found = read_rows(path)
    assert found and all(row.unit == find_unit(row.measure) for row in found)
    assert all(row.origin.device and row.origin.commit and row.origin.date for row in found)


def test_the_hash_changes_with_any_file(tmp_path: Path) -> None:
    found = [environment.hash_files(tmp_path)]
    for name, text in (("a.py", ""), ("b.py", ""), ("b.py", "x"), ("b/a.py", "x")):
        path = tmp_path / "fastweights" / "ops" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        found.append(environment.hash_files(tmp_path))
    (tmp_path / "fastweights" / "ops" / "notes.md").write_text("other")
    (tmp_path / "fastweights" / "cli.py").write_text("other")
    assert len(set(found)) == 5 and environment.hash_files(tmp_path) == found[-1]
    assert environment.describe_checkout(tmp_path).commit == "unknown"


def test_an_origin_says_versions_and_files() -> None:
    origin = environment.describe("a GPU", vllm="1")
    assert origin.device == "a GPU" and origin.versions["vllm"] == "1"
    assert origin.versions["files"] == environment.hash_files() and {"torch", "fastweights"} <= origin.versions.keys()
