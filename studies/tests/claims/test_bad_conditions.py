"""Conditions of a claim and gates of a rule are refused when they are made, not where a measurement meets them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from fastweights_studies.claims.conditions import Conditions
from fastweights_studies.leaderboard.rules import Gates

from tests.bad_calls import check_refused

CONDITIONS: dict[str, tuple[Any, ...]] = {
    "seeds": (3, None, "01", (), (0, 0), (-1,), (1.5,), ("0",), (True,)),
    "device": (None, 3, "", "gpu", ["cpu"]),
    "folder": (None, 3, "", b"x", "a\0b"),
    "measurements": (None, 3, ""),
    "workers": (0, -1, 1.5, "2", True),
}
GATES: dict[str, tuple[Any, ...]] = {
    "decay": (0.0, -0.5, 1.5, float("nan"), "1", None, True, [1.0], 10**400),
    "gain": (-0.1, float("inf"), "1", None),
    "ridge": (0.0, -1.0, float("nan"), "1", None),
}


@pytest.mark.parametrize("name", CONDITIONS)
def test_conditions(name: str, tmp_path: Path) -> None:
    Conditions(seeds=(0, 1), folder=tmp_path, workers=2)
    for value in CONDITIONS[name]:
        check_refused(name, lambda value=value: Conditions(**{"seeds": (0,), name: value}), tmp_path)  # type: ignore[misc]


@pytest.mark.parametrize("name", GATES)
def test_gates(name: str, tmp_path: Path) -> None:
    for value in GATES[name]:
        check_refused(name, lambda value=value: Gates(**{name: value}), tmp_path)  # type: ignore[misc]
