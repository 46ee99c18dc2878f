"""Gated KalmaNet's kernels on a CUDA device: how far from a dense solution, alone and through five layers."""

from __future__ import annotations

import pytest
import torch

from tests.kernels import ridge_accuracy
from tests.layers.five_layers import differences

from .judging import Record

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]


@pytest.mark.parametrize("width", [64, 128])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("half_life", ridge_accuracy.HALF_LIVES)
def test_accuracy_against_a_dense_solution(
    half_life: float, dtype: torch.dtype, width: int, record_property: Record
) -> None:
    found = ridge_accuracy.errors(half_life, dtype, "cuda", time=512, heads=4, width=width)
    record_property("errors", found._asdict())
    ridge_accuracy.check(found)


def test_the_iteration_is_stable_through_five_layers(record_property: Record) -> None:
    """The paper's figure 1e, in bfloat16: the error in the gradients does not grow from the last layer to the first."""
    found = differences("cuda", torch.bfloat16, head_dim=64, batch=4, length=256)
    record_property("differences", found)
    assert max(found) <= 5e-2 and max(found) <= 2 * found[-1], found
