"""Memory that runs out, of a GPU or of the machine, as one error that names what needs less."""

from __future__ import annotations

import errno
import re
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["OutOfMemory", "within_memory"]

# Python and libraries have kinds of error of their own; torch and CUDA have words.
WORDS = (
    *("DefaultCPUAllocator: ", "you tried to allocate", "bad_alloc", "Storage size calculation overflowed"),
    *("out of memory", "STATUS_ALLOC_FAILED"),
)


class OutOfMemory(OSError):
    """The memory of the device is full. The message says what needs less."""


@contextmanager
def within_memory(remedy: str) -> Iterator[None]:
    """Replaces the error for a full memory by an OutOfMemory that names `remedy`, which needs less."""
    try:
        yield
    except (MemoryError, RuntimeError, OSError) as error:
        what = _what_failed(error)
        if what is None:
            raise
        raise OutOfMemory(f"the device's memory is full; {remedy} needs less{what and f'. {what}'}") from None


def _what_failed(error: Exception) -> str | None:
    """What the error of a full memory says, without advice on allocators; None for another error."""
    text = " ".join(str(error).split())
    if isinstance(error, OSError):
        return "" if error.errno == errno.ENOMEM else None
    if isinstance(error, RuntimeError) and not any(words in text for words in WORDS):
        return None
    asked = re.search(r"tried to allocate (\d+) bytes", text)
    return f"Tried to allocate {int(asked[1]):,} bytes" if asked else ". ".join(text.split(". ")[:2])
