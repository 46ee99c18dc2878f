"""Control characters in a result that a stranger wrote: on a terminal `reproduce` writes them out."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fastweights_studies.experiments import committed_records, save_record

from fastweights.cli import main
from tests.cli.hostile import ESCAPE, check_harmless, on_a_terminal, set_keys

CALLS: dict[str, tuple[Callable[[Path], Any], list[str]]] = {
    "the result of a claim": (
        lambda place: (
            (place / "out").mkdir(),
            set_keys(save_record(place / "out", committed_records()["C1"]).name, reason=ESCAPE)(place / "out"),
        ),
        ["reproduce", "--list", "C1", "--output", "out"],
    ),
    "a result of another status": (
        lambda place: (
            (place / "out").mkdir(),
            set_keys(save_record(place / "out", committed_records()["C1"]).name, status=ESCAPE)(place / "out"),
        ),
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
