"""Any sizes, any packing: the chunkwise form equals the loop on what hypothesis comes up with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ..cases import OpCase
from .compare import assert_close, values_and_gradients


def sizes(examples: int, sequences: int, longest: int) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """What hypothesis draws: the number of examples, of sequences in one at most, and of tokens in a sequence at most."""
    drawn = given(
        lengths=st.lists(st.integers(0, longest), min_size=1, max_size=sequences),
        heads=st.integers(1, 3),
        group=st.integers(1, 3),
        key=st.integers(1, 20),
        value=st.integers(1, 20),
        seed=st.integers(0, 1000),
    )
    checks = list(HealthCheck)
    chosen = settings(max_examples=examples, deadline=None, derandomize=True, suppress_health_check=checks)
    return lambda test: chosen(drawn(test))


def assert_chunked_is_sequential(
    case: OpCase, lengths: list[int], heads: int, group: int, key: int, value: int, seed: int
) -> None:
    inputs = case.draw(
        batch=1, time=sum(lengths), heads=heads, value_heads=heads * group, key=key, value=value, seed=seed
    )
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0)
    wanted = values_and_gradients(case, inputs, cu_seqlens=cu_seqlens, backend="reference")
    got = values_and_gradients(case, inputs, cu_seqlens=cu_seqlens, backend="torch")
    for g, w in zip(got, wanted):
        assert_close(g, w, 1e-9)


@sizes(examples=5, sequences=3, longest=90)
def test_chunked_is_sequential_for_any_sizes(case: OpCase, **drawn: Any) -> None:
    assert_chunked_is_sequential(case, **drawn)


@pytest.mark.slow
@sizes(examples=6, sequences=5, longest=140)
def test_chunked_is_sequential_for_long_sequences(case: OpCase, **drawn: Any) -> None:
    assert_chunked_is_sequential(case, **drawn)
