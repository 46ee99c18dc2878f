"""Calls in processes of their own: vLLM takes the GPU's memory until its process ends, and a kernel may hang."""

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


def ends_within(seconds: float, work: Callable[..., object], *given: object) -> bool:
    """Whether `work` ends there without an error in so many seconds. Its process is killed otherwise."""
    process = get_context("spawn").Process(target=work, args=given)
    process.start()
    process.join(seconds)
    process.kill()
    process.join()
    return process.exitcode == 0
