"""Control characters in a result that a stranger wrote: on a terminal `reproduce` writes them out."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fastweights_studies.claims import committed_records, save_record

from fastweights.cli import main
from tests.cli.hostile import ESCAPE, check_harmless, on_a_terminal


def write_claim(place: Path, **values: Any) -> None:
    """A result of C1 that says these."""
    (place / "out").mkdir()
    path = save_record(place / "out", committed_records()["C1"])
    content = json.loads(path.read_text())
    path.write_text(json.dumps({**content, "about": {**content["about"], **values}}))


CALLS: dict[str, tuple[Callable[[Path], Any], list[str]]] = {
    "the result of a claim": (
        lambda place: write_claim(place, statements=[ESCAPE]),
        ["reproduce", "--list", "C1", "--output", "out"],
    ),
    "a result of another status": (
        lambda place: write_claim(place, status=ESCAPE),
        ["reproduce", "--list", "C1", "--output", "out"],
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_commands(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    prepare, command = CALLS[name]
    prepare(tmp_path)
    shown = on_a_terminal(lambda: main(command), monkeypatch)
    assert shown
    check_harmless(shown)
