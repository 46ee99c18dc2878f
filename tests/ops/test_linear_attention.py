"""Linear attention: the decayed sum of key-value outer products, against sums that are written out here."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from fastweights.ops import linear_attention
from fastweights.testing import CASES

backends = pytest.mark.parametrize("backend", ["reference", "torch"])
EXACT = {"rtol": 1e-11, "atol": 1e-11}


def draw(decay: str = "none", **sizes: int) -> dict[str, Tensor]:
    return dict(CASES[f"linear_attention-{decay}"].draw(**sizes).tokens)


def numbers(*rows: object) -> Tensor:
    """One sequence and one head: [1, T, 1, ...]."""
    return torch.tensor(rows, dtype=torch.float64)[None, :, None]


@backends
def test_two_tokens_by_hand(backend: str) -> None:
    q, k, v = numbers([1.0, 1.0], [1.0, 1.0]), numbers([1.0, 2.0], [0.0, 1.0]), numbers([3.0], [5.0])
    g = numbers(math.log(0.25), math.log(0.5))
    start = torch.tensor([[[[4.0], [8.0]]]], dtype=torch.float64)
    options = {"output_final_state": True, "backend": backend}
    # S1 = (1 + 3, 2 + 6), S2 = (2 + 0, 4 + 5)
    o, S = linear_attention(q, k, v, g, scale=1.0, initial_state=start, **options)
    torch.testing.assert_close((o, S), (numbers([12.0], [11.0]), torch.tensor([[[[2.0], [9.0]]]]).double()))
    # The decay of a key channel: channel 1 keeps 0.25 and 0.5, channel 2 keeps 1 and 0
    o, S = linear_attention(q, k, v, numbers([math.log(0.25), 0.0], [math.log(0.5), -math.inf]), scale=1.0,
                            initial_state=start, **options)  # fmt: skip
    torch.testing.assert_close((o, S), (numbers([18.0], [7.0]), torch.tensor([[[[2.0], [5.0]]]]).double()))


@backends
def test_without_decay_it_is_a_cumulative_sum(backend: str) -> None:
    x = draw(time=130)
    written = torch.einsum("bthk,bthv->bthkv", x["k"], x["v"]).cumsum(1)
    o, S = linear_attention(**x, output_final_state=True, backend=backend)
    torch.testing.assert_close(o, torch.einsum("bthk,bthkv->bthv", x["q"] / 8**0.5, written), **EXACT)
    torch.testing.assert_close(S, written[:, -1], **EXACT)
    torch.testing.assert_close(linear_attention(**x, g=torch.zeros(2, 130, 2), backend=backend)[0], o, **EXACT)
    torch.testing.assert_close(linear_attention(**x, g=torch.zeros(2, 130, 2, 8), backend=backend)[0], o, **EXACT)


@backends
@pytest.mark.parametrize("decay", ["head", "channel"])
def test_a_token_is_kept_by_the_product_of_the_decays_after_it(decay: str, backend: str) -> None:
    x = draw(decay, time=70)
    g = x["g"] if decay == "channel" else x["g"][..., None]
    after = (g.sum(1, keepdim=True) - g.cumsum(1)).exp()
    _, S = linear_attention(**x, output_final_state=True, backend=backend)
    torch.testing.assert_close(S, torch.einsum("bthk,bthv->bhkv", after * x["k"], x["v"]), **EXACT)
    start = torch.randn(2, 2, 8, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    _, kept = linear_attention(**{**x, "v": 0 * x["v"]}, initial_state=start, output_final_state=True, backend=backend)
    torch.testing.assert_close(kept, g.sum(1).exp()[..., None] * start, **EXACT)


@backends
def test_equal_decays_of_all_channels_are_one_decay_per_head(backend: str) -> None:
    x = draw("head", time=70)
    per_channel = {**x, "g": x["g"][..., None].expand(2, 70, 2, 8)}
    results = [linear_attention(**y, output_final_state=True, backend=backend) for y in (x, per_channel)]
    torch.testing.assert_close(*results, **EXACT)


@backends
@pytest.mark.parametrize("shape", [(2, 70, 2), (2, 70, 2, 8)], ids=len)
def test_decay_0_leaves_the_current_token(shape: tuple[int, ...], backend: str) -> None:
    x, start = draw(time=70), torch.ones(2, 2, 8, 6, dtype=torch.float64)
    o, S = linear_attention(
        **x, g=torch.full(shape, -math.inf), scale=1.0, initial_state=start, output_final_state=True, backend=backend
    )
    torch.testing.assert_close(o, (x["q"] * x["k"]).sum(-1, keepdim=True) * x["v"], **EXACT)
    torch.testing.assert_close(S, x["k"][:, -1, :, :, None] * x["v"][:, -1, :, None], **EXACT)


@backends
def test_a_key_head_serves_the_value_heads_beside_each_other(backend: str) -> None:
    x = draw("head", time=20, heads=2, value_heads=6)
    o, S = linear_attention(**x, output_final_state=True, backend=backend)
    assert o.shape == (2, 20, 6, 6) and S.shape == (2, 6, 8, 6)
    for head, key_head in enumerate([0, 0, 0, 1, 1, 1]):
        own = {name: x[name][:, :, [key_head if name in "qk" else head]] for name in x}
        alone, state = linear_attention(**own, output_final_state=True, backend=backend)
        torch.testing.assert_close((o[:, :, [head]], S[:, [head]]), (alone, state), **EXACT)


@backends
def test_scale_is_on_the_query_and_the_memory_is_linear_in_the_values(backend: str) -> None:
    x = draw("channel", time=20)
    o, S = linear_attention(**x, output_final_state=True, backend=backend)
    scaled, same = linear_attention(**x, scale=2.0, output_final_state=True, backend=backend)
    torch.testing.assert_close((scaled, same), (o * 2 * 8**0.5, S), **EXACT)
    twice = linear_attention(**{**x, "v": 2 * x["v"]}, output_final_state=True, backend=backend)
    torch.testing.assert_close(twice, (2 * o, 2 * S), **EXACT)
