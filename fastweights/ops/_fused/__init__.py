"""What the ops around the memories share: whether their kernels run, where, and on which rows."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, nullcontext
from importlib.util import find_spec

import torch
from torch import Tensor

FORMS = ("auto", "torch", "triton")
HAS_TRITON = find_spec("triton") is not None
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


def takes_kernels(backend: str, x: Tensor) -> bool:
    """Whether the kernels serve x: under "auto" on CUDA where triton is installed, never in float64."""
    if backend not in FORMS:
        raise ValueError(f"backend must be one of {', '.join(FORMS)}, got {backend!r}")
    if backend != "triton":
        return backend == "auto" and x.is_cuda and HAS_TRITON and x.dtype != torch.float64
    if not HAS_TRITON:
        raise ValueError("backend 'triton' needs the package triton, which is not installed; install it or use 'auto'")
    if not (x.is_cuda or INTERPRETED):
        raise ValueError(f"backend 'triton' needs tensors on a CUDA device, got {x.device}; move them or use 'auto'")
    if x.dtype == torch.float64:
        raise ValueError("backend 'triton' computes in float32, got float64; use 'torch' or 'auto'")
    return True


def on_device_of(x: Tensor) -> AbstractContextManager:
    """Launches go to the device of x."""
    if x.is_cuda and x.device.index != torch.cuda.current_device():
        return torch.cuda.device(x.device)
    return nullcontext()


def rows_together(x: Tensor) -> Tensor:
    """x with its last dimension contiguous, as kernels read it."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def alignment(*numbers: int) -> int:
    """8 where it divides all strides and widths (rows of 16-bit numbers then begin at multiples of 16 bytes), else 1. Triton
    itself looks for 16 only."""
    return 1 if any(n % 8 for n in numbers) else 8
