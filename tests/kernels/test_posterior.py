"""Palimpsa's kernels against the reference, in little time; the slow set has them in all that the other files test."""

from __future__ import annotations

import pytest
import torch

from fastweights import ops
from fastweights.testing.contract.compare import assert_close, relative_error, values_and_gradients
from tests.ops.kernel_launches import plans_anew

from .cases import KERNEL_CASES, check_against_reference, draw_states, exact, small

pytestmark = pytest.mark.kernels
CLOSE = 1e-5


@pytest.mark.parametrize(
    ("name", "started"), [pytest.param("palimpsa", False, marks=pytest.mark.slow), ("palimpsa_posterior", True)]
)
def test_values_and_gradients(name: str, started: bool) -> None:
    """Two value heads per key head, two parts of key channels, columns that fill no tile, an odd number of tokens."""
    case = KERNEL_CASES[name]
    inputs = small(case, 7, heads=1, value_heads=2, key=20, value=18)
    states = draw_states(case, inputs, 1) if started else None
    check_against_reference(case, inputs, states, CLOSE)


@pytest.mark.slow
def test_several_chunks_and_sequences() -> None:
    case, edges = KERNEL_CASES["palimpsa"], torch.tensor([0, 66, 66, 69, 69])
    inputs = small(case, 69, key=4, value=4)
    states = draw_states(case, inputs, 4)
    check_against_reference(case, inputs, states, CLOSE, cu_seqlens=edges)


@pytest.mark.slow
def test_segments_side_by_side(short_segments: None) -> None:
    """Forwards and backwards, with a gradient of the final state."""
    case = KERNEL_CASES["palimpsa"]
    inputs = small(case, 67, key=4, value=4)
    check_against_reference(case, inputs, None, CLOSE)


@pytest.mark.slow
@pytest.mark.parametrize("started", [False, True])
def test_columns_of_several_blocks(started: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A program of narrow heads reads several blocks of columns: here two programs with two blocks each, the last partly idle."""
    monkeypatch.setattr("fastweights.kernels.posterior.memory.ENOUGH_PROGRAMS", 1)
    monkeypatch.setattr("fastweights.kernels.posterior.memory.MOST_READ", 8)
    case = KERNEL_CASES["palimpsa_posterior"]
    inputs = small(case, 4, heads=1, key=20, value=50)
    states = draw_states(case, inputs, 1) if started else None
    with plans_anew():
        check_against_reference(case, inputs, states, CLOSE)


def test_key_channels_of_several_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wide heads are differentiated by tiles of key channels as well, whose gradients of v and beta are added up."""
    monkeypatch.setattr("fastweights.kernels.posterior.memory.GRAD_KEYS", 16)
    case = KERNEL_CASES["palimpsa"]
    inputs = small(case, 3, key=33, value=5)
    _, got = values_and_gradients(case, inputs, backend="triton")
    assert_close(got, exact(case, inputs)[1], CLOSE)


@pytest.mark.parametrize(
    ("time", "decays", "gain", "started"),
    [
        pytest.param(24, [-0.01], 0.05, False, id="a chunk is one block", marks=pytest.mark.slow),
        pytest.param(24, [-0.4], 0.05, False, id="blocks of several tokens", marks=pytest.mark.slow),
        pytest.param(12, [-1.5, -3.0], 1.0, True, id="blocks of one or two tokens"),
        pytest.param(70, [-0.01] * 40 + [-0.5, -6.0, -0.02] * 10, 0.5, True, id="all of these", marks=pytest.mark.slow),
    ],
)
def test_states_found_backwards(time: int, decays: list[float], gain: float, started: bool) -> None:
    """The states of tokens, found from that at the end of a block as long as the decays allow."""
    case = KERNEL_CASES["palimpsa"]
    inputs = small(case, time, key=4, value=4)
    with torch.no_grad():
        inputs.tokens["g"].copy_(torch.tensor(decays).repeat(time)[None, :time, None])
        inputs.tokens["beta"].mul_(gain)
    states = draw_states(case, inputs, 1) if started else None
    check_against_reference(case, inputs, states, CLOSE)


def test_importance_beside_a_large_prior() -> None:
    """float32 keeps a small importance."""
    tokens = small(KERNEL_CASES["palimpsa"], 5).tokens
    _, state = ops.palimpsa(**tokens, prior=1e3, output_final_state=True, backend="triton")
    wide = {name: x.double() for name, x in tokens.items()}
    _, exact_state = ops.palimpsa(**wide, prior=1e3, output_final_state=True, backend="reference")
    assert state is not None and exact_state is not None
    assert relative_error(state[1], exact_state[1]) < 1e-6


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
def test_an_infinite_key_spoils_the_variance() -> None:
    """Of its channel, which every column reads: an infinite importance would read as a variance of zero."""
    tokens = small(KERNEL_CASES["palimpsa_posterior"], 20, key=4, value=3).tokens
    with torch.no_grad():
        tokens["k"][0, 7, 0, 1] = float("inf")
    o, variance, _ = ops.palimpsa_posterior(**tokens, backend="triton")
    for x in (o, variance):
        assert x[:, :7].isfinite().all() and x[:, 7:].isnan().all()
