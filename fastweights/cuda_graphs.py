"""What may become part of a CUDA graph: work that does not make the host wait for the GPU."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from threading import RLock
from typing import Any, TypeVar

import torch

__all__ = ["Waits", "captured", "capturing_stream", "is_capturing", "padded_prompt", "refusing_waits"]

SHORTEST = 64  # tokens of a prompt with its padding

Result = TypeVar("Result")
_alone = RLock()  # held by the thread that tries or captures: both change settings of all threads


def captured(work: Callable[[], Result], device: torch.device, pool: Any = None) -> tuple[torch.cuda.CUDAGraph, Result]:
    """The graph of `work` on a GPU, and what `work` returned: tensors that every replay overwrites. The capture does not run
    the work. Other threads may call the GPU in the meantime, but not draw random numbers there. A capture that fails leaves the
    current stream and the random numbers as they were, which torch alone does not.

    Args:
        pool: of memory, from `torch.cuda.graph_pool_handle()`, for graphs that are replayed one after another.
    """
    graph = torch.cuda.CUDAGraph()
    with _alone, torch.cuda.device(device):
        index = torch.cuda.current_device()
        random = torch.cuda.get_rng_state(index)
        try:
            with (
                torch.cuda.stream(torch.cuda.current_stream(index)),
                torch.cuda.graph(graph, pool, _stream(index), capture_error_mode="thread_local"),
            ):
                result = work()
        except BaseException:
            _replace_generator(index, random)
            raise
    return graph, result


def is_capturing() -> bool:
    """Whether the current stream is being captured into a CUDA graph."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def padded_prompt(tokens: int) -> int:
    """Tokens of the graph that reads a prompt of so many: a power of two, so that few graphs serve all lengths."""
    return max(SHORTEST, 1 << (tokens - 1).bit_length())


def _replace_generator(index: int, state: torch.Tensor) -> None:
    """The random numbers of a GPU from this state on: a failed capture leaves a generator that takes itself to be captured."""
    fresh = torch.Generator(f"cuda:{index}")
    fresh.set_state(state)
    torch.cuda.default_generators[index].graphsafe_set_state(fresh.graphsafe_get_state())


@cache
def _stream(device: int) -> torch.cuda.Stream:
    """For all captures: matrix products keep a workspace for every stream that they ran on."""
    return torch.cuda.Stream(device)


@contextmanager
def capturing_stream(device: torch.device) -> Iterator[None]:
    """The current stream is that of the captures. torch cannot capture gradients that are added up on another one."""
    outside = torch.cuda.current_stream(device)
    inside = _stream(outside.device_index)
    inside.wait_stream(outside)
    try:
        with torch.cuda.stream(inside):
            yield
    finally:
        outside.wait_stream(inside)


class Waits(RuntimeError):
    """Something makes the host wait for the GPU."""


def warm_up(work: Callable[[], object], device: torch.device) -> None:
    """Do the work twice on a stream of its own, which compiles its kernels and chooses those of matrix products. Raises `Waits`
    where it makes the host wait for the GPU then."""
    aside = torch.cuda.Stream(device)
    aside.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(aside):
        work()
        with refusing_waits():
            work()
    torch.cuda.current_stream(device).wait_stream(aside)


@contextmanager
def refusing_waits() -> Iterator[None]:
    """`Waits` in place of an operation by which the host would wait for the GPU. Tried before a capture, whose errors say
    less about the cause. torch has one setting for all threads: another one that waits in the meantime gets torch's error."""
    with _alone:
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
