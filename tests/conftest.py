"""Marks that say what a test needs: where it is missing, the test is skipped."""

from __future__ import annotations

import gc

import pytest
import torch

from fastweights.kernels.availability import HAS_TRITON, INTERPRETED

NEEDS = {
    "kernels": (
        HAS_TRITON and (INTERPRETED or torch.cuda.is_available()),
        "needs triton and a GPU or TRITON_INTERPRET=1",
    ),
    "compiler": (HAS_TRITON and not INTERPRETED, "needs triton's compiler"),
}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--every-form", action="store_true", help="compile every form of the kernels, not a selection")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        for name, (there, reason) in NEEDS.items():
            if not there and item.get_closest_marker(name):
                item.add_marker(pytest.mark.skip(reason=reason))


def pytest_collection_finish() -> None:
    """Modules and tests stay to the end. Frozen, they are not walked again by every full garbage collection, of which
    transformers' Trainer alone starts one per training."""
    gc.collect()
    gc.freeze()
