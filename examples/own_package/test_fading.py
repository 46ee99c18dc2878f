"""The rule keeps the contract of the library's ops, by kernels too; what padding would change stays right."""

import torch
from fading import fading_attention

from fastweights.layers import build_mixer
from fastweights.testing import check_mixer
from fastweights.testing.contract import *  # noqa: F403
from fastweights.testing.contract import contract_of
from fastweights.testing.contract.by_kernels import *  # noqa: F403

pytest_generate_tests = contract_of(fading_attention)


def test_padding_forgets_nothing():
    """The only sequence of a chunk that is not full ends with the state after its last token."""
    q, k, v = (torch.randn(1, 65, 1, 4, dtype=torch.float64) for _ in range(3))
    keywords = {"keep": 0.5, "output_final_state": True}
    _, wanted = fading_attention(q, k, v, torch.ones(1, 65, 1), **keywords, backend="reference")
    _, final = fading_attention(q, k, v, torch.ones(1, 65, 1), **keywords)
    torch.testing.assert_close(final, wanted)


def test_the_layer_keeps_the_contract():
    torch.manual_seed(0)
    check_mixer(build_mixer("fading", hidden_size=16, num_heads=2).double())
