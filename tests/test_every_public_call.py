"""Every public function and class, called with each kind of wrong value for each of its arguments in turn.

A value of another kind than the annotation names is refused; one that may fit is taken, or refused in the same words. The names
are found here, not listed: a new one fails until tests/public_calls.py has a valid call of it.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, get_type_hints

import pytest

from fastweights.integrations.transformers import restore

from .bad_calls import check_refused, check_taken_or_refused
from .public_calls import CALLS, COSTLY, NAMED, TAKEN, UNTRIED, WITHOUT, public
from .wrong_values import UNTOLD, VALUES, may_fit

PUBLIC = public()
# Arguments of any type by their annotation, which are models and tokenizers of transformers.
SOME = ("None", "2.5", "bytes", "a list of objects", "an object", "a nested tensor")  # the others are in the slow tests
OF_TRANSFORMERS = ("model", "tokenizer")


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    yield
    restore()


def test_every_public_name_has_a_call_or_a_reason() -> None:
    assert set(PUBLIC) == set(CALLS) | set(WITHOUT)
    assert not set(CALLS) & set(WITHOUT)


def arguments(made: Any) -> Iterator[tuple[str, Any]]:
    """Arguments that are passed by name, with their annotations."""
    hints = get_type_hints(
        made.__init__ if isinstance(made, type) and not hasattr(made, "__dataclass_fields__") else made
    )
    for name, parameter in inspect.signature(made).parameters.items():
        if parameter.kind not in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL):
            hint = hints.get(name, Any)
            yield name, hint | None if parameter.default is None and hint is not Any else hint


def untried(name: str, argument: str, kind: str, fitting: set[str]) -> bool:
    """Whether a value says nothing about the function."""
    costs = kind in fitting and name in COSTLY
    return costs or (name, argument, kind) in UNTRIED or (kind in UNTOLD and "a function" in fitting)


def check_call(name: str, kinds: Iterable[str], folder: Path) -> None:
    made, valid = PUBLIC[name], CALLS[name]()
    if name not in COSTLY:
        made(**valid)
    wrong = []
    for argument, hint in arguments(made):
        fitting = set() if argument in OF_TRANSFORMERS and hint is Any else may_fit(hint)
        fitting = fitting | TAKEN.get((name, argument), set())
        for kind in kinds:
            if untried(name, argument, kind, fitting):
                continue
            check = check_taken_or_refused if kind in fitting else check_refused
            given = {**valid, argument: VALUES[kind]()}
            try:
                check(f"{argument}|{NAMED.get((name, argument), argument)}", partial(made, **given), folder)
            except (AssertionError, pytest.fail.Exception) as error:
                wrong.append(f"{argument} = {kind}: {str(error).splitlines()[0][:300]}")
            except Exception as error:
                wrong.append(f"{argument} = {kind}: raised {type(error).__name__} {str(error)[:300]}")
    assert not wrong, "\n" + "\n".join(wrong)


@pytest.mark.parametrize("name", CALLS)
def test_some_kinds(name: str, tmp_path: Path) -> None:
    check_call(name, SOME, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", CALLS)
def test_all_kinds(name: str, tmp_path: Path) -> None:
    check_call(name, VALUES, tmp_path)
