"""Every name of Gluon that fastweights uses, and where kernels in it may run.

Gluon is Triton's language of explicit layouts: kernels name the layout of every tile, copy tiles while others are used, and wait
for products where they say so. It is experimental, so kernels in it run with the versions of Triton that were tested, on Hopper
GPUs. Elsewhere `HAS_GLUON` or `runs_gluon` is false and kernels in plain Triton run.
"""

from __future__ import annotations

from functools import lru_cache

import torch

from ...environment import installed_version, is_version

TESTED = "3.6"
HOPPER = (9, 0)

try:
    from triton.experimental import gluon
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.language.nvidia.hopper import (
        async_copy,
        fence_async_shared,
        mma_v2,
        warpgroup_mma,
        warpgroup_mma_wait,
    )

    HAS_GLUON = True
except ImportError:
    HAS_GLUON = False

__all__ = [
    "HAS_GLUON", "async_copy", "fence_async_shared", "gl", "gluon", "mma_v2", "runs_gluon", "warpgroup_mma",
    "warpgroup_mma_wait",
]  # fmt: skip


@lru_cache
def runs_gluon(device: torch.device) -> bool:
    """Whether kernels in Gluon run on a device."""
    from .private_api import is_interpreted

    if not HAS_GLUON or is_interpreted() or device.type != "cuda":
        return False
    tested = is_version(installed_version("triton"), TESTED)
    return tested and torch.cuda.get_device_capability(device) == HOPPER
