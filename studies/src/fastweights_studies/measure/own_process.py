"""A call in a process of its own, as vLLM takes the GPU's memory until its process ends."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from types import MappingProxyType
from typing import TypeVar

T = TypeVar("T")
NONE: Mapping[str, str] = MappingProxyType({})


def in_own_process(work: Callable[..., T], *given: object, environment: Mapping[str, str] = NONE) -> T:
    """What `work` returns there. It begins with these variables in its environment, beside those of this process."""
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        return pool.submit(_begin, dict(environment), work, *given).result()


def _begin(environment: Mapping[str, str], work: Callable[..., T], *given: object) -> T:
    os.environ.update(environment)
    return work(*given)
