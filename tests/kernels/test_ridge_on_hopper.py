"""Gated KalmaNet's launches on Hopper GPUs: what they prepare, which calls take them, and their machine code."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch

from fastweights.kernels.ridge.rule import PREPARE
from fastweights.kernels.ridge.solve import prepare_systems
from fastweights.ops import gated_kalmanet
from tests.ops.kernel_launches import Compilation, recorded

from .cases import DEVICE
from .described_gpu import on_hopper_in
from .scoreboards import register_hazards


@pytest.mark.kernels
@pytest.mark.parametrize("decay", [-0.1, -3.0])
def test_the_systems_of_a_chunk(decay: float) -> None:
    """Keys, weights and what is kept give every H_t over its norm, also beside keys of zero; NaN follows a bad key only."""
    time, K = 50, 64
    torch.manual_seed(0)
    k = torch.randn(1, time, 1, K, device=DEVICE) / K**0.5
    k[:, 7] = 0
    H = torch.randn(K, 4, device=DEVICE)
    H = H @ H.T / 8
    G = decay * torch.arange(1, time + 1, device=DEVICE).float()
    units, keys, weights, factors = (
        torch.full((1, 1, *shape), math.nan, dtype=dtype, device=DEVICE)
        for shape, dtype in (
            ((K, K), torch.float16), ((64, K), torch.float16), ((64, 64), torch.float16), ((2, 64), torch.float32)
        )
    )  # fmt: skip
    squares = (H * H).reshape(32, -1).sum(1)
    outsides, norms = torch.empty(1, 1, device=DEVICE), torch.empty(1, time, 1, device=DEVICE)

    def prepare(k: torch.Tensor) -> None:
        prepare_systems[(1, 1)](
            k, None, G, H, squares, units, outsides, norms, keys, weights, factors, None, time, 1, K=K, PK=K, HEADS_K=1,
            HEADS_BETA=1, PRECISION="tf32", SQUARES=32, BK=PREPARE["BK"],
        )  # fmt: skip

    prepare(k)
    pairs = torch.exp2(G[:, None] - G[None, :]).tril()
    wanted = torch.exp2(G)[:, None, None] * H + torch.einsum("ij,jk,jl->ikl", pairs, k[0, :, 0], k[0, :, 0])
    found = torch.einsum("ij,jk,jl->ikl", weights[0, 0].float(), keys[0, 0].float(), keys[0, 0].float())
    found += factors[0, 0, 0, :, None, None] * units[0, 0].float()
    found = (found * factors[0, 0, 1, :, None, None])[:time]
    size = wanted.flatten(1).norm(dim=1)
    assert ((found - wanted).flatten(1).norm(dim=1) <= 2e-3 * size).all()
    assert torch.allclose(norms[0, :, 0], size, rtol=2e-3) and torch.equal(norms[0, :, 0], factors[0, 0, 1, :time])
    k[:, 30, :, 5] = math.nan
    prepare(k)
    assert torch.equal(factors[0, 0, 1].isnan().cpu(), torch.arange(64) >= 30) and keys.isfinite().all()


@pytest.fixture
def on_hopper() -> Iterator[None]:
    with on_hopper_in("ridge.rule"):
        yield


def launched(width: int, dtype: torch.dtype = torch.bfloat16, heads: int = 2, **options: Any) -> list[Compilation]:
    def step() -> None:
        tokens = (torch.zeros(1, 100, n, width, dtype=dtype, requires_grad=True) for n in (heads, heads, 2 * heads))
        q, k, v = tokens
        g, mix = (torch.zeros(1, 100, 2 * heads, requires_grad=True) for _ in range(2))
        o, _ = gated_kalmanet(q, k, v, g, mix=mix, backend="triton", **options)
        o.backward(torch.zeros_like(o))

    return list(recorded(step))


def names(kernels: list[Compilation]) -> set[str]:
    return {one.kernel.__name__ for one in kernels}


GLUON, PLAIN = (
    {"prepare_systems", "solve_systems", "systems_back", "memory_back"},
    {"solve_chunk", "gram_sums_back", "system_gradients", "value_grads", "chunk_gradients"},
)


@pytest.mark.parametrize("width", [64, 128])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("solver", ["chebyshev", "conjugate_gradient"])
def test_solves_are_in_gluon(on_hopper: None, width: int, dtype: torch.dtype, solver: str) -> None:
    found = names(launched(width, dtype, solver=solver))
    assert found >= GLUON and not found & PLAIN


def test_every_other_call_takes_the_kernels_in_plain_triton(on_hopper: None) -> None:
    for kernels in (launched(48), launched(64, torch.float32)):
        found = names(kernels)
        assert found >= PLAIN and not found & GLUON


def test_other_devices_take_the_kernels_in_plain_triton() -> None:
    with mock.patch("fastweights.kernels.availability.INTERPRETED", True):
        assert names(launched(64)) >= PLAIN


@pytest.mark.slow
@pytest.mark.compiler
@pytest.mark.parametrize("width", [64, 128])
@pytest.mark.parametrize("solver", ["chebyshev", "conjugate_gradient"])
def test_machine_code(on_hopper: None, width: int, solver: str) -> None:
    """Two programs fit a multiprocessor, little is spilled, products run on while others are issued, every load is waited for."""
    iterations = 96 if solver == "chebyshev" else 376
    spilled = {"prepare_systems": 112, "solve_systems": iterations, "systems_back": 224, "memory_back": 112}
    for one in launched(width, solver=solver):
        name = one.kernel.__name__
        if name in GLUON:
            compiled = one.compile(90)
            assert compiled.shared <= 113 * 1024 and compiled.stack <= spilled[name]
            assert not one.kernel.is_gluon() or not register_hazards(compiled.sass)
