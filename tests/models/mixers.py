"""The mixers that every test of whole models takes. In the fast set each layer has one of its mixers, or two with different
states; what a model does around a mixer does not depend on its other options, which tests/layers has in full."""

from __future__ import annotations

from typing import Any

import pytest

from fastweights.layers import MIXERS

__all__ = ["every_mixer"]

FAST = {
    "softmax", "linear", "pgla", "mamba2", "gdn", "kda", "pgdn", "longhorn-elementwise", "palimpsa-d", "gka", "mesa", "lattice",
    "ttt", "vla", "vla-deltanet", "rls",
}  # fmt: skip


def every_mixer(*others: Any) -> pytest.MarkDecorator:
    """Each mixer of the registry as the argument `mixer`, and these others."""
    known = [pytest.param(name, marks=() if name in FAST else pytest.mark.slow) for name in MIXERS]
    return pytest.mark.parametrize("mixer", [*known, *others], ids=str)


assert {MIXERS[name].layer for name in FAST} == {spec.layer for spec in MIXERS.values()}, "a layer is missing in FAST"
