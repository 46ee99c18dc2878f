"""Where the kernels cannot serve, asking for them is refused by a message that says what is missing."""

from __future__ import annotations

import pytest
import torch

from fastweights.kernels.availability import HAS_TRITON, INTERPRETED, why_unavailable
from fastweights.testing import OpCase


def call(case: OpCase, dtype: torch.dtype, backend: str = "triton") -> torch.Tensor:
    return case(case.draw(time=2, dtype=dtype), backend=backend)[0]


def test_without_triton(case: OpCase, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fastweights.kernels.availability.HAS_TRITON", False)
    with pytest.raises(ValueError, match="needs the package triton, which is not installed"):
        call(case, torch.float32)
    call(case, torch.float32, "auto")


@pytest.mark.skipif(not HAS_TRITON or INTERPRETED, reason="needs triton's compiler")
def test_on_the_cpu(case: OpCase) -> None:
    with pytest.raises(ValueError, match="'triton' needs tensors on an NVIDIA GPU, got cpu"):
        call(case, torch.float32)
    call(case, torch.float32, "auto")


@pytest.mark.kernels
def test_in_float64(case: OpCase, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fastweights.kernels.availability.INTERPRETED", True)
    with pytest.raises(ValueError, match="computes in float32, got float64"):
        call(case, torch.float64)


@pytest.mark.parametrize(("capability", "hip", "message"), [((7, 5), None, "got 7.5"), ((9, 0), "6.4", "under ROCm")])
def test_on_other_gpus(monkeypatch: pytest.MonkeyPatch, capability: object, hip: object, message: str) -> None:
    monkeypatch.setattr("fastweights.kernels.availability.HAS_TRITON", True)
    monkeypatch.setattr("fastweights.kernels.availability.INTERPRETED", False)
    monkeypatch.setattr("torch.version.hip", hip)
    monkeypatch.setattr("fastweights.kernels.availability._capability", lambda device: capability)
    assert message in (why_unavailable(torch.float16, torch.device("cuda", 0)) or "")
    monkeypatch.setattr("torch.version.hip", None)
    monkeypatch.setattr("fastweights.kernels.availability._capability", lambda device: (8, 0))
    assert why_unavailable(torch.float16, torch.device("cuda", 0)) is None
