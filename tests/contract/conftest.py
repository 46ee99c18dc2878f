"""The backends that golden values are compared on, and what of the contract the library's own ops leave to the slow set."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from fastweights.testing import OpCase
from fastweights.testing.contract import backend

__all__ = ["backend"]

Chosen = dict[str, Callable[[dict[str, Any]], bool]]
# A test of the contract, and which of its parameters are in the fast set on every form of an op; the others are there on the
# last form only, which has the most inputs.
ON_EVERY_FORM: Chosen = {
    "test_a_bad_initial_state_reaches_its_own_head_and_row": lambda given: math.isnan(given["bad"]),
    "test_bad_numbers_reach_what_depends_on_them_and_nothing_else": lambda given: False,
    "test_chunked_is_sequential_for_any_sizes": lambda given: False,
    "test_chunked_is_sequential": lambda given: given["sizes"]["time"] in (2, 65),
    "test_dtypes": lambda given: given["dtype"] == torch.bfloat16,
    "test_extremes_are_finite_and_agree": lambda given: False,  # all of them mixed are there on every form
    "test_gradcheck": lambda given: given["packed"],
    "test_packed_gradients_are_those_of_the_sequence": lambda given: False,
    "test_packed_is_separate": lambda given: given["with_state"],
    "test_segments_are_the_whole": lambda given: len(given["cuts"]) == 3,
}
# And which are there on every op; the others on a few.
ON_EVERY_OP: Chosen = {
    "test_chunked_is_sequential_for_any_sizes": lambda given: False,
    "test_dtypes": lambda given: given["dtype"] in (torch.float32, torch.bfloat16),
    "test_divided_packed_is_whole": lambda given: False,
    "test_extremes_are_finite_and_agree": lambda given: False,
    "test_fullgraph": lambda given: False,
    "test_opcheck": lambda given: False,
    "test_positive_decay_is_refused_in_a_graph_too": lambda given: False,
}
FEW_OPS = ("delta_rule", "gated_kalmanet", "lattice", "linear_attention")


def is_last_form(case: OpCase) -> bool:
    return case.case is list(case.spec.cases.values())[-1]


def is_left_out(name: str, given: dict[str, Any]) -> bool:
    case = given.get("case")
    if not isinstance(case, OpCase):
        return False
    if name in ON_EVERY_OP and not ON_EVERY_OP[name](given) and case.spec.name not in FEW_OPS:
        return True
    return name in ON_EVERY_FORM and not ON_EVERY_FORM[name](given) and not is_last_form(case)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        given = item.callspec.params if hasattr(item, "callspec") else {}
        if item.path == Path(__file__).with_name("test_ops.py") and is_left_out(item.originalname, given):
            item.add_marker(pytest.mark.slow)
