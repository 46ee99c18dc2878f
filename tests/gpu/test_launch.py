"""Both launch modes on a CUDA device: Triton's own launch and the fast one give the same bits."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fastweights.kernels.availability import HAS_TRITON
from fastweights.testing.contract.compare import values_and_gradients
from tests.kernels.cases import KERNEL_CASES
from tests.ops.kernel_launches import plans_anew

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available() or not HAS_TRITON, reason="needs an NVIDIA GPU and triton"),
]


@pytest.mark.parametrize("packed", [False, True], ids=["rows", "packed"])
@pytest.mark.parametrize("name", KERNEL_CASES)
def test_plain_is_fast(name: str, packed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    from fastweights.kernels.runtime import private_api

    case = KERNEL_CASES[name]
    inputs = case.draw(batch=1, time=1500, heads=2, key=64, value=64, dtype=torch.bfloat16).map(Tensor.cuda)
    lengths = {"cu_seqlens": torch.tensor([0, 100, 100, 1500]).cuda()} if packed else {}
    assert private_api.fast_launch()
    fast = values_and_gradients(case, inputs, backend="triton", **lengths)
    monkeypatch.setenv("FASTWEIGHTS_LAUNCH", "plain")
    private_api.fast_launch.cache_clear()
    try:
        with plans_anew():
            assert not private_api.fast_launch()
            plain = values_and_gradients(case, inputs, backend="triton", **lengths)
    finally:
        monkeypatch.undo()
        private_api.fast_launch.cache_clear()
    for xs, ys in zip(fast, plain, strict=True):
        assert all(torch.equal(x, y) for x, y in zip(xs, ys, strict=True))
