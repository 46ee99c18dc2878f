"""Documents of any lengths in one packed row: each as alone, at about the cost of its tokens."""

from __future__ import annotations

import pytest
import torch

from fastweights.ops.framework import sequences
from fastweights.testing import CASES
from fastweights.testing.contract.compare import assert_close, random_states, values_and_gradients

MANY = (1,) * 9 + (70, 2, 0, 40, 1, 5, 1)
FAST = {  # one or two of each family
    *("delta_rule-head", "elementwise_longhorn", "gated_kalmanet-chebyshev", "lattice-decode", "linear_attention-none"),
    *("linear_attention-channel", "mesa", "output_normalized_ttt", "palimpsa", "precondition_keys"),
    *("precondition_queries", "preconditioned_delta_rule-channel", "recursive_least_squares-head"),
    "variational_linear_attention-refresh",
}
NAMES = [pytest.param(name, marks=() if name in FAST else pytest.mark.slow) for name in CASES]


@pytest.mark.parametrize(
    "with_state", [pytest.param(False, id="fresh", marks=pytest.mark.slow), pytest.param(True, id="continued")]
)
@pytest.mark.parametrize("name", NAMES)
def test_many_documents_are_each_as_alone(name: str, with_state: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Values, final states and gradients, also where short documents are read a few at a time."""
    monkeypatch.setattr(sequences, "CACHED_NUMBERS", 4 * 500)
    case = CASES[name]
    inputs = case.draw(batch=1, time=sum(MANY), heads=1, value_heads=1, key=8, value=8)
    states = random_states(
        case, case.draw(batch=len(MANY), time=9, heads=1, value_heads=1, key=8, value=8), backend="torch"
    )
    given = states if with_state else None
    edges = torch.tensor([0, *MANY]).cumsum(0)
    got = values_and_gradients(case, inputs, given, cu_seqlens=edges, backend="torch")
    wanted = values_and_gradients(case, inputs, given, cu_seqlens=edges, backend="reference")
    for g, w in zip(got, wanted, strict=True):
        assert_close(g, w, 1e-10)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    "lengths",
    [
        (500, *[1] * 400),
        *(pytest.param(lengths, marks=pytest.mark.slow) for lengths in ((65, *range(1, 65)), (1000, *[3, 9] * 50))),
    ],
    ids=lambda x: str(x[:3]),
)
def test_padding_is_no_more_than_the_tokens(
    name: str, lengths: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Places in chunks, over all that an op is made of. One chunk as long as the longest document needs for each of them would be
    up to 30 times as many."""
    places: list[int] = []
    scan = sequences.Chunks.scan
    monkeypatch.setattr(
        sequences.Chunks, "scan", lambda self, *a: places.append(sum(self.active) * self.size) or scan(self, *a)
    )
    case, edges = CASES[name], torch.tensor([0, *lengths]).cumsum(0)
    inputs = case.draw(batch=1, time=sum(lengths), heads=1, value_heads=1, key=4, value=4, dtype=torch.float32)

    def placed(cu_seqlens: torch.Tensor | None) -> int:
        places.clear()
        case(inputs, cu_seqlens=cu_seqlens, backend="torch")
        return sum(places)

    row = placed(None)
    assert row and placed(edges) <= 2 * row
