"""Every public function and class, called with each kind of wrong value for each of its arguments in turn.

A value of another kind than the annotation names is refused; one that may fit is taken, or refused in the same words. The names
are found here, not listed: a new one fails until tests/public_calls.py has a valid call of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from fastweights.integrations.transformers import restore

from .public_calls import CALLS, COSTLY, NAMED, TAKEN, UNTRIED, WITHOUT, public
from .wrong_calls import SOME, check_call
from .wrong_values import VALUES

PUBLIC = public()


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    yield
    restore()


def test_every_public_name_has_a_call_or_a_reason() -> None:
    assert set(PUBLIC) == set(CALLS) | set(WITHOUT)
    assert not set(CALLS) & set(WITHOUT)


def check(name: str, kinds: Iterable[str], folder: Path) -> None:
    costly = name in COSTLY
    check_call(
        name, PUBLIC[name], CALLS[name](), kinds, folder, costly=costly, named=NAMED, untried=UNTRIED, taken=TAKEN
    )


@pytest.mark.parametrize("name", CALLS)
def test_some_kinds(name: str, tmp_path: Path) -> None:
    check(name, SOME, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", CALLS)
def test_all_kinds(name: str, tmp_path: Path) -> None:
    check(name, VALUES, tmp_path)
