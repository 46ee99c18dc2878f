"""Tests that need a GPU, run on a machine without one, where the kernels that they launch are compiled and not run.

Tensors of the CPU stand for those of the GPU, and say that they are on one. All sizes are the full ones, because a kernel may be
compiled for them. An operation on more than LARGEST numbers is left out: its result is memory that nobody touches, of which the
machine needs none. So a test compares numbers without meaning, and ends where a comparison fails.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Generator, Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

from fastweights_studies.places import ROOT

__all__ = ["run_tests"]

LARGEST = 2**18
NORESERVE = 0x4000  # Linux: memory that nobody touches is not counted
GPU = torch.device("cuda", 0)
SAID = {Tensor.device.__get__: GPU, Tensor.is_cuda.__get__: True, Tensor.is_cpu.__get__: False}  # type: ignore[attr-defined]
PROPERTIES = SimpleNamespace(shared_memory_per_block_optin=227 * 1024)
DESCRIBED = {
    "is_available": True, "device_count": 1, "current_device": 0, "get_device_name": "NVIDIA H200",
    "get_device_capability": (9, 0), "get_device_properties": PROPERTIES, "mem_get_info": (10**12, 10**12),
}  # fmt: skip
# Of torch.cuda, what does nothing here.
IDLE = (
    "CUDAGraph", "Stream", "_sleep", "current_stream", "device", "empty_cache", "get_sync_debug_mode", "graph",
    "set_sync_debug_mode", "stream", "synchronize",
)  # fmt: skip


def untouched(like: Tensor) -> Tensor:
    """Memory for a tensor in the layout of `like`."""
    numbers = 1 + sum((n - 1) * stride for n, stride in zip(like.shape, like.stride()))
    memory = mmap.mmap(-1, numbers * like.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NORESERVE)
    return torch.frombuffer(memory, dtype=like.dtype).as_strided(like.shape, like.stride())


class LargeLeftOut(TorchDispatchMode):
    """Operations on more than LARGEST numbers give memory that nobody touches. Tensors are equal, and draws give the first."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        if name == "equal":
            return True
        if name == "multinomial":  # refuses numbers without meaning
            return torch.zeros(*args[0].shape[:-1], args[1], dtype=torch.long)
        if func.is_view or name == "_local_scalar_dense":
            return func(*args, **kwargs)
        given: dict[int, Tensor] = {}  # by the placeholder's id

        def placeholder(x: Any) -> Any:
            if isinstance(x, Generator):
                return None
            if isinstance(x, torch.device):
                return torch.device("meta")
            if not isinstance(x, Tensor):
                return x
            meta = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")
            given[id(meta)] = x
            return meta

        placed = tree_map(placeholder, (args, kwargs))
        if not given:
            placed[1]["device"] = torch.device("meta")
        try:
            found = func(*placed[0], **placed[1])
        except (RuntimeError, NotImplementedError):  # what it gives depends on the numbers
            return func(*args, **kwargs)
        tensors = [x for x in tree_flatten((placed, found))[0] if isinstance(x, Tensor)]
        if all(x.numel() <= LARGEST for x in tensors):
            return func(*args, **kwargs)

        def real(x: Any) -> Any:
            if not isinstance(x, Tensor):
                return x
            if id(x) in given:
                return given[id(x)]
            return untouched(x) if x.numel() > LARGEST else torch.ones_like(x, device="cpu")

        return tree_map(real, found)


class OnGpu(TorchFunctionMode):
    """Tensors say that they are on a GPU, and what is put there is a tensor of the CPU, contiguous and aligned as a new one."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in SAID:
            return SAID[func]
        if func is Tensor.cuda:
            return as_new(args[0])
        if func is Tensor.pin_memory:
            return args[0]
        given = args, {name: x for name, x in (kwargs or {}).items() if name != "pin_memory"}  # which needs a GPU
        args, kwargs = tree_map(on_cpu, given)
        found = func(*args, **kwargs)
        return as_new(found) if func is Tensor.to and (args, kwargs) != given else found


def is_gpu(x: Any) -> bool:
    return isinstance(x, torch.device) and x.type == "cuda" or isinstance(x, str) and x.split(":")[0] == "cuda"


def on_cpu(x: Any) -> Any:
    return type(x)("cpu") if is_gpu(x) else x


def as_new(x: Tensor) -> Tensor:
    return x if x.is_contiguous() and x.data_ptr() % 16 == 0 else x.clone()


@contextmanager
def described_tensors() -> Iterator[None]:
    """Inside, what a test says to a GPU is answered."""
    cuda: dict[str, Any] = {name: lambda *given, answer=answer, **rest: answer for name, answer in DESCRIBED.items()}
    cuda |= {name: mock.MagicMock() for name in IDLE}
    changed: list[tuple[Any, str, Callable[..., Any]]] = []
    for owner, name in (
        (torch, "Generator"), (torch, "is_autocast_enabled"), (torch, "get_autocast_dtype"), (torch.autocast, "__init__"),
    ):  # fmt: skip
        changed.append((owner, name, of_cpu(getattr(owner, name))))
    # These would leave the modes for all of a backward.
    changed += [(torch.autograd, "has_torch_function", never), (torch._tensor, "has_torch_function_unary", never)]
    with ExitStack() as changes:
        changes.enter_context(mock.patch.multiple(torch.cuda, **cuda))
        for change in changed:
            changes.enter_context(mock.patch.object(*change))
        yield


def never(*given: Any) -> bool:
    return False


def of_cpu(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function asked about the CPU where it is asked about a GPU."""
    return lambda *given, **named: function(*map(on_cpu, given), **{name: on_cpu(x) for name, x in named.items()})


class Ahead:
    """A plugin of pytest: the tests run as above, inside a context that compiles, and what ended one before its comparisons is
    printed."""

    def __init__(self, compiling: Callable[[], AbstractContextManager[None]]) -> None:
        self.compiling, self.ran = compiling, 0

    @pytest.hookimpl(wrapper=True)
    def pytest_runtestloop(self) -> Any:
        with self.compiling(), LargeLeftOut(), OnGpu():
            return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo[None]) -> Any:
        self.ran += call.when == "call"
        if call.excinfo is not None and not call.excinfo.errisinstance((AssertionError, pytest.fail.Exception)):
            print(f"{item.nodeid} ended with {call.excinfo.exconly()}", flush=True)
        return (yield)


def run_tests(path: str, compiling: Callable[[], AbstractContextManager[None]]) -> None:
    """path: a file or a test, as pytest takes it; compiling: the context in which kernels are compiled and not run."""
    import fastweights.models  # noqa: F401  # what asks for a GPU while it is imported finds none

    ahead = Ahead(compiling)
    with described_tensors():
        pytest.main(
            ["-p", "no:terminal", "-p", "no:cacheprovider", "-o", "addopts=", f"--rootdir={ROOT}", path], [ahead]
        )
    if not ahead.ran:
        raise ValueError(f"--tests must name tests that pytest runs, got none in {path}")
