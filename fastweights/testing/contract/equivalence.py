"""One answer however it is computed: chunked or in sequence, whole or in segments, packed or apart, alone or in a batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ..cases import OpCase
from .compare import assert_close, random_states, values_and_gradients

EXACT = 1e-10  # float64, several hundred additions


SIZES = [
    {"time": 1},
    {"time": 2, "key": 1, "value": 1},
    {"time": 63},
    {"time": 64},
    {"time": 65, "heads": 1, "key": 5, "value": 17},
    {"time": 150, "batch": 1, "key": 16, "value": 4},
]
# The fast set has every size, with an initial state or without; the slow set has the other of the two for the long ones.
FRESH, CONTINUED = (1, 2, 64), (1, 2, 63, 65, 150)


@pytest.mark.parametrize(
    ("with_state", "sizes"),
    [
        pytest.param(
            with_state,
            sizes,
            id=",".join(["continued" if with_state else "fresh", *(f"{k}={v}" for k, v in sizes.items())]),
            marks=() if sizes["time"] in (CONTINUED if with_state else FRESH) else pytest.mark.slow,
        )
        for with_state in (False, True)
        for sizes in SIZES
    ],
)
def test_chunked_is_sequential(case: OpCase, with_state: bool, sizes: dict) -> None:
    inputs = case.draw(**sizes, seed=sizes["time"])
    states = random_states(case, inputs, backend="reference") if with_state else None
    wanted = values_and_gradients(case, inputs, states, backend="reference")
    got = values_and_gradients(case, inputs, states, backend="torch")
    for g, w in zip(got, wanted):
        assert_close(g, w, EXACT)


@pytest.mark.parametrize("cuts", [[1], [37], [3, 64, 65]], ids=str)
def test_segments_are_the_whole(case: OpCase, backend: str, cuts: list[int]) -> None:
    inputs = case.draw(time=70)
    whole, final = case(inputs, backend=backend)
    outputs: list[torch.Tensor] = []
    states: tuple[torch.Tensor, ...] = ()
    for start, stop in zip([0, *cuts], [*cuts, 70]):
        keywords = {"initial_state": case.initial_state(states)} if start else {}
        o, states = case(inputs.at((slice(None), slice(start, stop))), backend=backend, **keywords)
        outputs.append(o)
    assert_close([torch.cat(outputs, 1), *states], [whole, *final], EXACT)


@pytest.mark.parametrize("lengths", [[5, 70, 1, 30], [0, 64, 0, 3], [40]], ids=str)
@pytest.mark.parametrize("with_state", [False, True], ids=["fresh", "continued"])
def test_packed_is_separate(case: OpCase, backend: str, lengths: list[int], with_state: bool) -> None:
    inputs = case.draw(batch=1, time=sum(lengths))
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0)
    states = None
    if with_state:
        states = random_states(case, case.draw(batch=len(lengths), time=9, seed=3), backend="reference")
    keywords = {} if states is None else {"initial_state": case.initial_state(states)}
    packed, packed_finals = case(inputs, cu_seqlens=cu_seqlens, backend=backend, **keywords)
    outputs, finals = [], []
    for n, (start, stop) in enumerate(zip(cu_seqlens[:-1].tolist(), cu_seqlens[1:].tolist())):
        keywords = {} if states is None else {"initial_state": case.initial_state(tuple(s[n : n + 1] for s in states))}
        o, final = case(inputs.at((slice(None), slice(start, stop))), backend=backend, **keywords)
        outputs.append(o)
        finals.append(final)
    separate = [torch.cat(outputs, 1), *(torch.cat(f) for f in zip(*finals))]
    assert_close([packed, *packed_finals], separate, EXACT)


def test_packed_gradients_are_those_of_the_sequence(case: OpCase) -> None:
    lengths = [33, 2, 65]
    inputs = case.draw(batch=1, time=100)
    cu_seqlens = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    wanted = values_and_gradients(case, inputs, cu_seqlens=cu_seqlens, backend="reference")
    got = values_and_gradients(case, inputs, cu_seqlens=cu_seqlens, backend="torch")
    for g, w in zip(got, wanted):
        assert_close(g, w, EXACT)


def test_alone_is_in_a_batch(case: OpCase, backend: str) -> None:
    inputs = case.draw(batch=3, time=20)
    o, states = case(inputs, backend=backend)
    for n in range(3):
        alone, final = case(inputs.at(slice(n, n + 1)), backend=backend)
        assert_close([alone, *final], [o[n : n + 1], *(s[n : n + 1] for s in states)], EXACT)


def test_fewer_key_heads_are_repeated_ones(case: OpCase, backend: str) -> None:
    inputs = case.draw(time=20, heads=2, value_heads=6)
    repeated = inputs.map(lambda x: x.repeat_interleave(3, 2) if x.ndim > 2 and x.shape[2] == 2 else x)
    got, wanted = case(inputs, backend=backend), case(repeated, backend=backend)
    assert_close([got[0], *got[1]], [wanted[0], *wanted[1]], EXACT)


def test_no_state_unless_asked(case: OpCase, backend: str) -> None:
    inputs = case.draw(time=5)
    o, state = case.op(**inputs.arguments(), backend=backend)
    assert state is None
    assert torch.equal(o, case(inputs, backend=backend)[0])


@pytest.mark.parametrize("sizes", [{"batch": 0}, {"time": 0}, {"batch": 0, "time": 0}], ids=str)
def test_empty(case: OpCase, backend: str, sizes: dict) -> None:
    inputs = case.draw(**sizes)
    full = case(case.draw(batch=1, time=1), backend=backend)
    (o, *states), gradients = values_and_gradients(case, inputs, backend=backend)
    assert o.shape == (*next(iter(inputs.tokens.values())).shape[:2], *full[0].shape[2:])
    assert [s.shape[1:] for s in states] == [s.shape[1:] for s in full[1]]
    assert [s.shape[0] for s in states] == [sizes.get("batch", 2)] * len(states)
    assert all(g.isfinite().all() for g in gradients)


def draw_sizes(examples: int, sequences: int, longest: int) -> Callable[[Callable[..., None]], Callable[..., None]]:
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


@draw_sizes(examples=5, sequences=3, longest=90)
def test_chunked_is_sequential_for_any_sizes(case: OpCase, **drawn: Any) -> None:
    assert_chunked_is_sequential(case, **drawn)


@pytest.mark.slow
@draw_sizes(examples=6, sequences=5, longest=140)
def test_chunked_is_sequential_for_long_sequences(case: OpCase, **drawn: Any) -> None:
    assert_chunked_is_sequential(case, **drawn)
