"""Whether the backend that a mixer names can run on a device, before anything is computed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ..kernels.availability import why_unavailable
from .registry import MIXERS

__all__ = ["check_backend"]


def check_backend(name: str, options: Mapping[str, Any], device: str) -> None:
    """ValueError where the mixer `name` with these options has kernels for its backend that cannot run on the device."""
    backend = {**MIXERS[name].options, **options}.get("backend")
    reason = why_unavailable(torch.float32, torch.device(device)) if backend == "triton" else None
    if reason is not None:
        raise ValueError(f"mixer {name!r}: backend 'triton' {reason}; use 'torch' or 'auto'")
