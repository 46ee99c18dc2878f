"""The mixers that every test of whole models takes. In the fast set each layer has one of its mixers, or two with different
states; what a model does around a mixer does not depend on its other options, which tests/layers has in full."""

from __future__ import annotations

from typing import Any

import pytest

from fastweights.layers import MIXERS
from fastweights.layers.registry import ORDER

__all__ = ["every_mixer", "few_mixers", "is_fast", "some_mixers"]

FAST = {
    "softmax", "linear", "pgla", "mamba2", "gdn", "kda", "pgdn", "longhorn-elementwise", "palimpsa-d", "gka", "mesa", "lattice",
    "ttt", "vla", "vla-deltanet", "rls", "gated-deltaproduct", "rwkv7",
}  # fmt: skip
FEW = {"softmax", "mamba2", "gdn", "lattice"}
SOME = FEW | {"palimpsa-d", "gka", "vla"}


def is_fast(mixer: Any, fast: set[str] = FAST) -> bool:
    """Mixers of users, and those that are given with options or one per layer, are in the fast set."""
    return not isinstance(mixer, str) or mixer not in ORDER or mixer in fast


def every_mixer(*others: Any, fast: set[str] = FAST) -> pytest.MarkDecorator:
    """Each mixer of the registry as the argument `mixer`, and these others."""
    known = [pytest.param(name, marks=() if is_fast(name, fast) else pytest.mark.slow) for name in MIXERS]
    return pytest.mark.parametrize("mixer", [*known, *others], ids=str)


def few_mixers(*others: Any) -> pytest.MarkDecorator:
    """As every_mixer, with a few of different families in the fast set, for tests of what is alike around all of them."""
    return every_mixer(*others, fast=FEW)


def some_mixers(*others: Any) -> pytest.MarkDecorator:
    """As few_mixers, with one more of each family whose states or steps are of a kind of their own."""
    return every_mixer(*others, fast=SOME)


assert {MIXERS[name].layer for name in FAST} == {MIXERS[name].layer for name in ORDER}, "a layer is missing in FAST"
