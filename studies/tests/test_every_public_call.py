"""Every public function and class of the studies, called with kinds of wrong values, as those of the library are."""

from __future__ import annotations

from pathlib import Path

import fastweights_studies
import pytest

from tests.public_calls import public
from tests.wrong_calls import SOME, check_call
from tests.wrong_values import VALUES

from .public_calls import CALLS, INSIDE, NAMED, TAKEN, WITHOUT

PUBLIC = public(fastweights_studies, INSIDE)


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_every_public_name_has_a_call_or_a_reason() -> None:
    assert set(PUBLIC) == set(CALLS) | set(WITHOUT)


@pytest.mark.parametrize("name", CALLS)
def test_some_kinds(name: str, tmp_path: Path) -> None:
    check_call(name, PUBLIC[name], CALLS[name](), SOME, tmp_path, named=NAMED)


@pytest.mark.slow
@pytest.mark.parametrize("name", CALLS)
def test_all_kinds(name: str, tmp_path: Path) -> None:
    check_call(name, PUBLIC[name], CALLS[name](), VALUES, tmp_path, named=NAMED, taken=TAKEN)
