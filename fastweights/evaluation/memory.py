"""What to say when the memory of a device is full."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

__all__ = ["within_memory"]


@contextmanager
def within_memory(remedy: str) -> Iterator[None]:
    """An OSError with `remedy`, what needs less, in place of torch's own error."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        what = ". ".join(str(error).split(". ")[:2])  # the rest is advice on torch's allocator
        raise OSError(f"the device's memory is full; {remedy} needs less. {what}") from None
