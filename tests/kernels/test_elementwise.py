"""Elementwise Longhorn's kernels against the reference, in little time; the slow set has them in all other files too."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from fastweights.ops import elementwise_longhorn
from tests.fast_set import fast_where
from tests.ops.kernel_launches import plans_anew

from .cases import KERNEL_CASES, check_against_reference, draw_states, small

pytestmark = pytest.mark.kernels
CASE = KERNEL_CASES["elementwise_longhorn"]
CLOSE = 1e-6


@pytest.fixture(autouse=True, params=[False, True], ids=["tokens", "products"])
def form(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Both forms, in float32: token after token, and by products as in 16 bits."""
    monkeypatch.setattr("fastweights.kernels.elementwise.rule.takes_products", lambda _: request.param)
    with plans_anew():
        yield


@pytest.mark.parametrize(
    ("value", "started"),
    [
        pytest.param(5, False, id="one tile of columns-False", marks=pytest.mark.slow),
        pytest.param(18, True, id="two tiles-True"),
        pytest.param(5, True, id="one tile of columns-True", marks=pytest.mark.slow),
        pytest.param(18, False, id="two tiles-False", marks=pytest.mark.slow),
    ],
)
def test_values_and_gradients(value: int, started: bool) -> None:
    """Two value heads per key head, channels and columns that fill no tile."""
    inputs = small(CASE, 7, heads=1, value_heads=2, key=20, value=value)
    states = draw_states(CASE, inputs, 1) if started else None
    check_against_reference(CASE, inputs, states, CLOSE)


@fast_where(lambda given: given["form"] is False)
def test_several_chunks_and_sequences() -> None:
    """The states at the chunks' starts, from which the way back begins; an empty sequence passes its gradient on."""
    edges = torch.tensor([0, 66, 66, 69, 69])
    inputs = small(CASE, 69, key=4, value=4)
    states = draw_states(CASE, inputs, 4)
    check_against_reference(CASE, inputs, states, CLOSE, cu_seqlens=edges)


@fast_where(lambda given: given["form"] is False and given["longest"] == 5)
@pytest.mark.parametrize("longest", [5, pytest.param(65, id="several chunks")])
def test_few_programs_take_all_tiles(longest: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three programs of the backward share twelve work items: tiles of columns, heads and sequences, one without tokens."""
    monkeypatch.setattr("fastweights.kernels.elementwise.rule.WARPS", 3)
    edges = torch.tensor([0, longest, longest, longest + 3])
    inputs = small(CASE, longest + 3, heads=1, value_heads=2, key=4, value=17)
    states = draw_states(CASE, inputs, 3)
    check_against_reference(CASE, inputs, states, CLOSE, cu_seqlens=edges)


def test_decays_near_zero() -> None:
    """Keys with one channel and large gains leave elements a millionth of what they held: the states before are not divided out
    of those after. float32 keeps the decay, which 1 - k^2 e would lose."""
    inputs = small(CASE, 12, key=4, value=3)
    with torch.no_grad():
        inputs.tokens["k"].copy_(torch.eye(4).repeat(3, 1)[None, :, None])
        inputs.tokens["beta"].fill_(1e6)
    states = draw_states(CASE, inputs, 1)
    check_against_reference(CASE, inputs, states, CLOSE)


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
def test_a_bad_number_spoils_what_reads_it() -> None:
    """A value its own column, a key its head, from their token on."""
    tokens = small(CASE, 9, key=4, value=3).tokens
    with torch.no_grad():
        tokens["v"][0, 2, 0, 1] = float("inf")
        tokens["k"][0, 5, 0, 2] = float("nan")
    tokens["q"].requires_grad_()  # the kernel of a few tokens is another
    o, _ = elementwise_longhorn(**tokens, backend="triton")
    assert o[0, :2].isfinite().all() and o[0, 2:, 0, 1].isnan().all()
    assert o[0, 2:5, 0, ::2].isfinite().all() and o[0, 5:].isnan().all()
