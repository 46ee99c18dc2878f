"""What may become part of a CUDA graph: work that does not make the host wait for the GPU."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import TypeVar

import torch

__all__ = ["Waits", "captured", "refusing_waits"]

Result = TypeVar("Result")


def captured(work: Callable[[], Result], device: torch.device) -> tuple[torch.cuda.CUDAGraph, Result]:
    """The graph of some work on a GPU, which does not run by this, and what it returned: every replay overwrites these tensors.
    Other threads may call the GPU in the meantime."""
    graph = torch.cuda.CUDAGraph()
    with (
        torch.cuda.device(device),
        torch.cuda.graph(graph, stream=_stream(torch.cuda.current_device()), capture_error_mode="thread_local"),
    ):
        result = work()
    return graph, result


@cache
def _stream(device: int) -> torch.cuda.Stream:
    """For all captures: matrix products keep a workspace for every stream that they ran on."""
    return torch.cuda.Stream(device)


class Waits(RuntimeError):
    """Something makes the host wait for the GPU."""


@contextmanager
def refusing_waits() -> Iterator[None]:
    """`Waits` in place of an operation by which the host would wait for the GPU. Tried before a capture: one that fails of it
    leaves torch's random numbers in a state that no call can use."""
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says that it does not yet see every wait
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    except RuntimeError as error:
        if "synchronizing CUDA operation" not in str(error):
            raise
        raise Waits(str(error)) from error
    finally:
        torch.cuda.set_sync_debug_mode(before)
