"""Which forms of an op a test of the contract runs on."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import pytest

from ..cases import OpCase, cases_of

__all__ = ["contract_of", "first_form_is_fast", "last_form_only"]

Test = TypeVar("Test", bound=Callable[..., Any])
CHOICE = "chosen_forms"  # attribute of a test that does not run on every form


def first_form_is_fast(test: Test) -> Test:
    """For a test that takes long: it runs on the first form of every op, and on the others in the slow set."""
    setattr(test, CHOICE, lambda forms: [(name, place > 0) for place, name in enumerate(forms)])
    return test


def last_form_only(test: Test) -> Test:
    """For a test of what does not depend on the form: it runs on the one with the most inputs, which declarations have last."""
    setattr(test, CHOICE, lambda forms: [(name, False) for name in list(forms)[-1:]])
    return test


def every_form(forms: Mapping[str, OpCase]) -> Sequence[tuple[str, bool]]:
    return [(name, False) for name in forms]


def contract_of(*ops: Callable[..., Any]) -> Callable[[pytest.Metafunc], None]:
    """The hook `pytest_generate_tests` of a module that imports the tests of the contract: they run on these ops.

    Args:
        ops: functions that call their `OpSpec`, which stands in the module of the function and has its name.
    """
    by_op = [cases_of(op) for op in ops]

    def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
        if "case" not in metafunc.fixturenames:
            return
        choose = getattr(metafunc.function, CHOICE, every_form)
        chosen = [
            pytest.param(forms[name], id=name, marks=pytest.mark.slow if is_slow else ())
            for forms in by_op
            for name, is_slow in choose(forms)
        ]
        metafunc.parametrize("case", chosen)

    return pytest_generate_tests
