"""The tests of the rule: the contract of ops, inherited whole, and that of layers."""

import pytest
import torch
from two_speed import two_speed_attention

from fastweights.layers import build_mixer
from fastweights.ops import linear_attention
from fastweights.testing import check_mixer
from fastweights.testing.contract import *  # noqa: F403
from fastweights.testing.contract import contract_of

pytest_generate_tests = contract_of(two_speed_attention)


@pytest.mark.parametrize("mix", [0.0, 1.0])
def test_one_memory_alone_is_linear_attention(mix: float) -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 100, 2, 8, generator=generator) for _ in range(3))
    fast, slow = -torch.rand(1, 100, 2, generator=generator), -0.01 * torch.rand(1, 100, 2, generator=generator)
    o, _ = two_speed_attention(q, k, v, fast, slow, torch.full_like(fast, mix))
    torch.testing.assert_close(o, linear_attention(q, k, v, fast if mix else slow)[0])


def test_the_layer_keeps_the_contract() -> None:
    torch.manual_seed(0)
    check_mixer(build_mixer("two-speed", hidden_size=16, num_heads=2).double())
