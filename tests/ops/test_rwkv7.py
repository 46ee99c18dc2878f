"""One token of RWKV-7 by its kernels (on a GPU or in Triton's interpreter) against the layer in PyTorch."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fastweights.layers import LayerCache, build_mixer, rwkv7
from fastweights.ops.framework.few_tokens import overwriting_states
from fastweights.ops.rwkv7 import takes_rwkv7, token_mix
from tests.kernels.cases import DEVICE

pytestmark = pytest.mark.kernels


def layer(backend: str, **options: Any) -> rwkv7.RWKV7:
    torch.manual_seed(0)
    mixer = build_mixer("rwkv7", hidden_size=64, num_heads=2, backend=backend, **options)
    with torch.no_grad():
        for parameter in mixer.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return mixer.to(DEVICE)


@pytest.mark.parametrize(
    ("batch", "value_residual"),
    [
        pytest.param(1, True, marks=pytest.mark.slow),
        (3, False),
        pytest.param(1, False, marks=pytest.mark.slow),
        pytest.param(3, True, marks=pytest.mark.slow),
    ],
)
@torch.no_grad()
def test_steps(monkeypatch: pytest.MonkeyPatch, batch: int, value_residual: bool) -> None:
    """From the first token on, with the cache after them."""
    plain, fast = (layer(backend, value_residual=value_residual) for backend in ("torch", "triton"))
    steps, step = [], rwkv7.RWKV7._step
    monkeypatch.setattr(rwkv7.RWKV7, "_step", lambda *given: steps.append(1) or step(*given))
    caches = LayerCache(), LayerCache()
    for _ in range(3):
        x = torch.randn(batch, 1, 64, device=DEVICE)
        given = {"first_values": torch.randn_like(x)} if value_residual else {}
        torch.testing.assert_close(fast(x, caches[1], **given), plain(x, caches[0], **given), rtol=1e-4, atol=1e-5)
        for name in ("memory", "context"):
            torch.testing.assert_close(getattr(caches[1], name), getattr(caches[0], name), rtol=1e-4, atol=1e-5)
    assert len(steps) == 3


def test_the_token_before_is_overwritten_where_it_may_be() -> None:
    x, before, mix = torch.randn(2, 1, 300), torch.randn(2, 1, 300), torch.randn(3, 300)
    x, before, mix = x.to(DEVICE), before.to(DEVICE), mix.to(DEVICE)
    wanted = x + mix[:, None, None] * (before - x)
    streams, last = token_mix(x, before, mix, True)
    torch.testing.assert_close(streams, wanted)
    assert last is not before and torch.equal(last, x)
    with overwriting_states():
        streams, last = token_mix(x, before, mix, True)
    torch.testing.assert_close(streams, wanted)
    assert last is before and torch.equal(before, x)


def test_what_the_kernels_serve() -> None:
    x, mix = torch.zeros(2, 1, 8, device=DEVICE), torch.zeros(6, 8, device=DEVICE)
    assert takes_rwkv7(x, mix, backend="triton")
    assert not takes_rwkv7(x, mix.clone().requires_grad_(), backend="triton")
    assert not takes_rwkv7(x.view(1, 2, 8), mix, backend="triton")
    assert not takes_rwkv7(x, mix.double(), backend="triton")
    assert not takes_rwkv7(x, mix, backend="torch")
