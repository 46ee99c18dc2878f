"""A limit of time for a block of code."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

__all__ = ["calling_after"]


@contextmanager
def calling_after(seconds: float, function: Callable[..., Any], *arguments: Any) -> Iterator[None]:
    """A thread calls the function after so many seconds, unless the body has ended before."""
    timer = threading.Timer(seconds, function, arguments)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
