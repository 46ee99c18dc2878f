"""Where the kernels cannot serve, asking for them is refused by a message that says what is missing."""

from __future__ import annotations

import pytest
import torch

from fastweights.ops._fused import HAS_TRITON, INTERPRETED
from fastweights.testing import OpCase


def call(case: OpCase, dtype: torch.dtype, backend: str = "triton") -> torch.Tensor:
    return case(case.draw(time=2, dtype=dtype), backend=backend)[0]


def test_without_triton(case: OpCase, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fastweights.ops._fused.HAS_TRITON", False)
    with pytest.raises(ValueError, match="needs the package triton, which is not installed"):
        call(case, torch.float32)
    call(case, torch.float32, "auto")


@pytest.mark.skipif(not HAS_TRITON or INTERPRETED, reason="needs triton's compiler")
def test_on_the_cpu(case: OpCase) -> None:
    with pytest.raises(ValueError, match="'triton' needs tensors on a CUDA device, got cpu"):
        call(case, torch.float32)
    call(case, torch.float32, "auto")


@pytest.mark.kernels
def test_in_float64(case: OpCase, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fastweights.ops._fused.INTERPRETED", True)  # CPU tensors serve the check of their dtype
    with pytest.raises(ValueError, match="computes in float32, got float64"):
        call(case, torch.float64)
