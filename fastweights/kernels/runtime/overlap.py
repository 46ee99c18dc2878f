"""Launches that overlap: a kernel comes onto the GPU while the one before it runs, and waits there for its results (programmatic
dependent launch, from Hopper on). In a chain of small kernels this hides what a launch takes. Weights may be fetched before."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch

__all__ = ["can_overlap", "overlap_constants", "overlapping_launches"]

_overlaps: ContextVar[bool] = ContextVar("overlaps", default=False)


def can_overlap(device: torch.device) -> bool:
    return device.type == "cuda" and torch.version.hip is None and torch.cuda.get_device_capability(device) >= (9, 0)


@contextmanager
def overlapping_launches(overlaps: bool = True) -> Iterator[None]:
    """In the body, kernels with a parameter OVERLAP are launched so."""
    token = _overlaps.set(overlaps)
    try:
        yield
    finally:
        _overlaps.reset(token)


def overlap_constants(kernel: Any) -> dict[str, bool]:
    """Constants and options of a launch of this kernel."""
    if "OVERLAP" not in kernel.arg_names:
        return {}
    return {"OVERLAP": True, "launch_pdl": True} if _overlaps.get() else {"OVERLAP": False}
