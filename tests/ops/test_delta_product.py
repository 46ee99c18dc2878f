"""DeltaProduct: a token is several steps of the delta rule after one decay."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from fastweights.ops import delta_product, delta_rule
from fastweights.testing import CASES

backends = pytest.mark.parametrize("backend", ["reference", "torch"])


def numbers(*rows: object) -> Tensor:
    """One sequence and one head: [1, T, 1, ...]."""
    return torch.tensor(rows, dtype=torch.float64)[None, :, None]


@backends
def test_one_token_by_hand(backend: str) -> None:
    """(4, 8) halved is (2, 4). The first step finds 2 under key 1 and writes half of 4 to it, the second 4 under key 2 and
    writes a quarter of -3 times 2. The query reads after both."""
    o, S = delta_product(
        numbers([1.0, 10.0]), numbers([[1.0, 0.0], [0.0, 1.0]]), numbers([[6.0], [1.0]]), numbers([0.5, 0.25]),
        numbers(math.log(0.5)), scale=1.0, initial_state=torch.tensor([[[[4.0], [8.0]]]], dtype=torch.float64),
        output_final_state=True, backend=backend,
    )  # fmt: skip
    torch.testing.assert_close(S.flatten(), torch.tensor([4.0, 3.25], dtype=torch.float64))
    torch.testing.assert_close(o.item(), 4.0 + 32.5)


@backends
def test_one_step_is_the_delta_rule(backend: str) -> None:
    x = CASES["delta_product-channel-write"].draw(steps=1).tokens
    plain = {name: y.squeeze(3) if name in ("k", "v", "beta", "write_key") else y for name, y in x.items()}
    got, wanted = (
        op(**given, output_final_state=True, backend=backend) for op, given in ((delta_product, x), (delta_rule, plain))
    )
    torch.testing.assert_close(got, wanted, rtol=1e-12, atol=1e-12)


@backends
def test_two_reflections_rotate_the_memory(backend: str) -> None:
    """Across the lines at angles 0 and angle / 2: a rotation by angle, which one symmetric step cannot be."""
    angle, time = 0.3, 70
    lines = torch.tensor([[0.0, 1.0], [-math.sin(angle / 2), math.cos(angle / 2)]], dtype=torch.float64)
    k = lines.expand(1, time, 1, 2, 2)
    start = torch.tensor([[[[1.0], [0.0]]]], dtype=torch.float64)
    gain = torch.full((1, time, 1, 2), 2.0, dtype=torch.float64)
    q = torch.tensor([1.0, 0.0], dtype=torch.float64).expand(1, time, 1, 2)
    o, _ = delta_product(q, k, 0 * k[..., :1], gain, scale=1.0, initial_state=start, backend=backend)
    turned = angle * torch.arange(1, time + 1, dtype=torch.float64)
    torch.testing.assert_close(o.flatten(), turned.cos(), rtol=1e-10, atol=1e-10)


def test_steps_that_do_not_agree_are_refused() -> None:
    x = dict(CASES["delta_product-head"].draw(time=4).tokens)
    with pytest.raises(ValueError, match=r"beta must have shape \[2, 4, 2, 3\]"):
        delta_product(**{**x, "beta": x["beta"][..., :2]})
    with pytest.raises(ValueError, match=r"k must have 5 dimensions \[B, T, heads, steps, channels\]"):
        delta_product(**{**x, "k": x["k"][..., 0, :]})
    with pytest.raises(ValueError, match="v must have at least one head and step"):
        delta_product(**{**x, "v": x["v"][:, :, :, :0]})
