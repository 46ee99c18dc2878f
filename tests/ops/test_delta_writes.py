"""Gains of writes and keys that are read: the kernels (on a GPU or in Triton's interpreter) against the layers in PyTorch."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from fastweights.layers import delta_net, vla
from fastweights.layers.delta_net import GAINS, ClosedLoop
from fastweights.ops.authoring import expand_heads
from fastweights.ops.delta_writes import read_keys, takes_delta_writes, write_gain
from tests.kernels.cases import DEVICE

pytestmark = pytest.mark.kernels
EXACT = {"rtol": 2e-5, "atol": 1e-7}


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


@pytest.mark.parametrize("form", [form for form in GAINS if form != "beta"])
@pytest.mark.parametrize("groups", [1, 3])
def test_gains(form: str, groups: int) -> None:
    """One key is 0, one short, one long; a NaN stays one."""
    k, w = draw(2, 3, 2, 20), draw(2, 3, 2 * groups, 20, seed=1)
    k[0, 0, 0], k[0, 1], k[0, 2] = 0, 1e-2 * k[0, 1], 30 * k[0, 2]
    w = expand_heads(k, 2 * groups) + 0.01 * w
    beta, g = draw(2, 3, 2 * groups, seed=2).sigmoid(), -draw(2, 3, 2 * groups, seed=3).exp()
    beta[1, 2, 1] = math.nan
    assert takes_delta_writes(k, w, beta, g, backend="triton")
    got = write_gain(beta, k, w, g, form)
    m = (expand_heads(k, 2 * groups).double() * w.double()).sum(-1)
    wanted = GAINS[form](beta.double(), m, g.double().exp())
    near = (m.abs() > 1e-2) | (m == 0)  # else the sum has few digits
    torch.testing.assert_close(got.double()[near], wanted[near], rtol=1e-4, atol=1e-6, equal_nan=True)


@pytest.mark.parametrize("share", [True, False])
@pytest.mark.parametrize("correction", [0.3, None])
@pytest.mark.parametrize("decays", [True, False])
def test_closed_loop(monkeypatch: pytest.MonkeyPatch, share: bool, correction: float | None, decays: bool) -> None:
    if not share and correction is None:
        return
    loop = ClosedLoop(2, 4, share, correction).to(DEVICE)
    q, k, g = draw(3, 1, 2, 20), draw(3, 1, 2, 20, seed=1), None
    if decays:
        g = -draw(3, 1, 4, seed=2).exp()
        g[1, 0, 2] = -50.0
    wanted = loop(q, k, g)  # gradients are on

    def takes(*given: Any) -> bool:
        return takes_delta_writes(*given, backend="triton")

    monkeypatch.setattr(delta_net, "takes_delta_writes", takes)
    with torch.no_grad():
        got = loop(q, k, g)
    torch.testing.assert_close(got, wanted, **EXACT)


def test_printed_delta_net(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = vla.PrintedDeltaNet(hidden_size=24, num_heads=2).to(DEVICE)
    x = draw(2, 3, 24)
    wanted, called = layer(x), []  # gradients are on
    monkeypatch.setattr(vla, "takes_delta_writes", lambda *given, backend: takes_delta_writes(*given, backend="triton"))
    monkeypatch.setattr(vla, "read_keys", lambda *given, **more: called.append(1) or read_keys(*given, **more))
    with torch.no_grad():
        got = layer(x)
    assert called
    torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-5)


def test_what_the_kernels_serve() -> None:
    k = torch.zeros(1, 1, 2, 8, device=DEVICE)
    assert not takes_delta_writes(k, k.clone().requires_grad_(), backend="triton")
    assert not takes_delta_writes(k, k.double(), backend="triton")
    assert not takes_delta_writes(k, backend="torch")
