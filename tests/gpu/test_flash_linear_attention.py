"""Our kernels as a backend of flash-linear-attention, beside its own kernels."""

from __future__ import annotations

import importlib
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from fastweights.integrations.flash_linear_attention import register, unregister
from fastweights.kernels.availability import HAS_TRITON
from tests.integrations.fla_calls import ALL, CASES, PACKAGES, plain, results, tensors, wanted

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available() or not HAS_TRITON, reason="needs an NVIDIA GPU and triton"),
]
pytest.importorskip("fla", reason="flash-linear-attention is not installed")
DEVICE = "cuda"


@pytest.fixture(autouse=True)
def theirs_return() -> Iterator[None]:
    yield
    unregister()


def errors(got: dict[str, Tensor], exact: dict[str, Tensor]) -> dict[str, float]:
    return {name: float((x.double() - exact[name]).norm() / exact[name].norm()) for name, x in got.items()}


@pytest.mark.parametrize("name, case", ALL)
def test_bfloat16(name: str, case: str) -> None:
    """At most twice as far from the recurrence in float64 as its own kernels, whose backward some GPUs and versions of Triton
    lack; our gradients are compared with the recurrence alone."""
    options = CASES[case]
    rest = {
        key: x.to(DEVICE) if isinstance(x, Tensor) and key == "cu_seqlens" else x for key, x in plain(options).items()
    }
    small = ("q", "k", "v", "g", "beta")
    x = {
        key: y.to(DEVICE, torch.bfloat16 if key in small else torch.float32)
        for key, y in tensors(name, options).items()
    }
    call = getattr(importlib.import_module(PACKAGES[name]), name)
    exact = results(lambda y: wanted(y, options), {key: y.double() for key, y in x.items()})
    with torch.no_grad():
        theirs = errors(dict(zip(("o", "final state"), call(**x, **rest, output_final_state=True))), exact)
    register()
    ours = errors(results(lambda y: call(**y, **rest, output_final_state=True), x), exact)
    assert all(ours[key] <= 2 * error + 1e-3 for key, error in theirs.items()), (ours, theirs)
    assert max(ours.values()) < 0.03, ours
