"""The backends that golden values are compared on, and what of the contract the library's own ops leave to the slow set."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from fastweights.testing import OpCase
from fastweights.testing.contract import backend

__all__ = ["backend"]

# A test of the contract, and which of its parameters are in the fast set on every form of an op; the others are there on the
# last form only, which has the most inputs.
ON_EVERY_FORM: dict[str, Callable[[dict[str, Any]], bool]] = {
    "test_bad_numbers_reach_what_depends_on_them_and_nothing_else": lambda given: given["packed"],
    "test_chunked_is_sequential": lambda given: given["sizes"]["time"] not in (63, 150),
    "test_chunked_is_sequential_for_any_sizes": lambda given: False,
    "test_dtypes": lambda given: given["dtype"] in (torch.float32, torch.bfloat16),
    "test_extremes_are_finite_and_agree": lambda given: False,  # all of them mixed are there on every form
}
WITH_ROWS = ("delta_rule", "lattice", "linear_attention")  # the graphs of the others are compiled for packed rows only


def is_last_form(case: OpCase) -> bool:
    return case.case is list(case.spec.cases.values())[-1]


def is_left_out(name: str, given: dict[str, Any]) -> bool:
    case = given.get("case")
    if not isinstance(case, OpCase):
        return False
    if name == "test_fullgraph":
        return not given["packed"] and case.spec.name not in WITH_ROWS
    return name in ON_EVERY_FORM and not ON_EVERY_FORM[name](given) and not is_last_form(case)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        given = item.callspec.params if hasattr(item, "callspec") else {}
        if item.path == Path(__file__).with_name("test_ops.py") and is_left_out(item.originalname, given):
            item.add_marker(pytest.mark.slow)
