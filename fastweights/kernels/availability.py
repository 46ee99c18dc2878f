"""Whether the kernels can run on a tensor."""

from __future__ import annotations

import os
from functools import lru_cache
from importlib.util import find_spec

import torch
from torch import Tensor

from ..private_torch import constant_when_traced
from .runtime.private_api import ptxas_is_safe

KERNEL_BACKENDS = ("auto", "torch", "triton")
WIDEST_ROW = 4096
HAS_TRITON = find_spec("triton") is not None
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


def takes_kernels(backend: str, x: Tensor) -> bool:
    """Whether the kernels run for x; with backend "auto" wherever they can on CUDA."""
    if backend not in KERNEL_BACKENDS:
        raise ValueError(f"backend must be one of {', '.join(KERNEL_BACKENDS)}, got {backend!r}")
    if backend == "torch" or (backend == "auto" and not x.is_cuda):
        return False
    reason = why_unavailable(x.dtype, x.device)
    if reason is not None and backend == "triton":
        raise ValueError(f"backend 'triton' {reason}; use 'torch' or 'auto'")
    return reason is None


def takes_rows(backend: str, x: Tensor) -> bool:
    """Whether the kernels that hold a row in registers run for x [..., V]; ValueError where backend "triton" cannot."""
    if not takes_kernels(backend, x):
        return False
    width = x.shape[-1]
    if backend == "triton" and width > WIDEST_ROW:
        raise ValueError(f"backend 'triton' takes rows up to {WIDEST_ROW} wide, got {width}; use 'torch' or 'auto'")
    return width <= WIDEST_ROW


@constant_when_traced
def why_unavailable(dtype: torch.dtype, device: torch.device) -> str | None:
    """Why the kernels cannot run on tensors of this dtype and device, None where they can."""
    if dtype == torch.float64:
        return "computes in float32, got float64 inputs"
    if not HAS_TRITON:
        return "needs the package triton, which is not installed"
    if INTERPRETED:
        return None
    if device.type != "cuda" or torch.version.hip is not None:
        return f"needs tensors on an NVIDIA GPU, got {device}{'' if torch.version.hip is None else ' under ROCm'}"
    capability = _capability(device)
    if capability < (8, 0):
        return f"needs compute capability 8.0 or later (an A100, say), got {capability[0]}.{capability[1]}"
    if capability[0] == 9 and not ptxas_is_safe():
        return (
            "needs ptxas of CUDA 12.9 or later on Hopper, as older ones compute wrong results there; install triton 3.6 or "
            "later, or name a newer ptxas in TRITON_PTXAS_PATH"
        )
    return None


@lru_cache
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)
