"""Softmax attention over packed sequences on a GPU: by torch's kernel for them, compiled and not, as one sequence at a time."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fastweights.layers import SoftmaxAttention, attention

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
LENGTHS = (70, 1, 300, 29)
CLOSE = {"rtol": 3e-2, "atol": 3e-2}


def run(layer: SoftmaxAttention, x: Tensor, cu_seqlens: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The output and the gradient of the input."""
    x = x.detach().requires_grad_()
    y = layer(x, cu_seqlens=cu_seqlens)
    y.float().square().sum().backward()
    assert x.grad is not None
    return y.detach(), x.grad


@pytest.mark.parametrize("compiled", [False, True], ids=["called", "compiled"])
@pytest.mark.parametrize("options", [{}, {"window": 16}, {"num_kv_heads": 1}, {"window": 1}], ids=str)
def test_packed_equals_separate(monkeypatch: pytest.MonkeyPatch, options: dict[str, int], compiled: bool) -> None:
    torch.manual_seed(0)
    layer = SoftmaxAttention(hidden_size=256, num_heads=4, **options).to("cuda", torch.bfloat16)
    x = torch.randn(1, sum(LENGTHS), 256, device="cuda", dtype=torch.bfloat16)
    alone = [run(layer, part) for part in x.split(LENGTHS, 1)]
    assert attention.takes_packed(x[..., None, :64], x[..., None, :64])
    monkeypatch.setattr(attention, "_attend_masked", None)  # which a call would fail with
    monkeypatch.setattr(attention, "group_by_length", None)
    if compiled:
        torch._dynamo.reset()
        layer.compile(fullgraph=True)
    cu_seqlens = torch.tensor([0, *LENGTHS], device="cuda", dtype=torch.int32).cumsum(0, dtype=torch.int32)
    for got, parts in zip(run(layer, x, cu_seqlens), zip(*alone, strict=True), strict=True):
        torch.testing.assert_close(got, torch.cat(parts, 1), **CLOSE)
