"""Softmax attention of one token over a ring of slots: the kernels (on a GPU or in Triton's interpreter) against PyTorch's form,
which the layer takes elsewhere."""

from __future__ import annotations

import pytest
import torch

from fastweights.layers import attention
from fastweights.ops.framework.few_tokens import overwriting_states
from fastweights.ops.ring_attention import ring_attention, takes_ring
from tests.kernels.cases import DEVICE


def draw(batch: int, heads: int, of_keys: int, width: int, slots: int) -> list[torch.Tensor]:
    torch.manual_seed(0)
    q = torch.randn(batch, 1, heads, width, device=DEVICE)
    k, v = (torch.randn(batch, 1, of_keys, width, device=DEVICE) for _ in range(2))
    return [q, k, v, *(torch.randn(batch, slots, of_keys, width, device=DEVICE) for _ in range(2))]


def by_torch(q, k, v, keys, values, seen, place, padding, theta):
    if theta is not None:
        cos, sin = attention.rotation(seen[:, None], q.shape[3], theta, q.dtype)
        q, k = attention.rotate(q, cos, sin), attention.rotate(k, cos, sin)
    slot = place[:1] % keys.shape[1]
    keys.index_copy_(1, slot, k)
    values.index_copy_(1, slot, v)
    return attention.ring_attention(q, keys, values, place, padding)


@pytest.mark.kernels
@pytest.mark.parametrize("theta", [None, 10000.0])
@pytest.mark.parametrize(
    "batch, heads, of_keys, width, slots, place",
    [(2, 2, 2, 16, 5, 0), (1, 4, 2, 20, 300, 170), (3, 2, 1, 16, 70, 69), (2, 2, 2, 32, 70, 200)],
    ids=str,
)
def test_kernels(batch, heads, of_keys, width, slots, place, theta):
    """At the first token, within the slots, at the last of them and once around, with rows that began later."""
    given = draw(batch, heads, of_keys, width, slots)
    place_N = torch.full((batch,), place, device=DEVICE)
    padding = (place - 3 * torch.arange(batch, device=DEVICE) - 2).clamp_min(0)
    for first in (None, padding):
        seen = place_N if first is None else place_N - first
        wanted_ring, got_ring = ([x.clone() for x in given[3:]] for _ in range(2))
        wanted = by_torch(*given[:3], *wanted_ring, seen, place_N, first, theta)
        got, more, next_place = ring_attention(*given[:3], *got_ring, seen, place_N, first, theta)
        torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(got_ring, wanted_ring, rtol=1e-5, atol=1e-5)
        assert torch.equal(more, seen + 1) and torch.equal(next_place, place_N + 1)


@pytest.mark.kernels
def test_counters_are_written_where_they_lie_where_that_is_allowed():
    given = draw(2, 2, 2, 16, 9)
    seen, place = torch.tensor([3, 4], device=DEVICE), torch.tensor([4, 4], device=DEVICE)
    ring_attention(*given, seen, place, None, None)
    assert seen.tolist() == [3, 4] and place.tolist() == [4, 4]
    with overwriting_states():
        _, more, after = ring_attention(*given, seen, place, None, None)
    assert more is seen and after is place and seen.tolist() == [4, 5] and place.tolist() == [5, 5]


@pytest.mark.kernels
def test_what_the_kernels_serve():
    given = draw(1, 2, 1, 16, 4)
    assert takes_ring(*given, backend="triton")
    assert not takes_ring(*(x[..., :15] for x in given), backend="triton")
    assert not takes_ring(given[0].requires_grad_(), *given[1:], backend="triton")
    assert not takes_ring(*given, backend="torch")
