"""`jit` for the kernels: Triton's own, assembled by the newest ptxas that Triton brings along, and launched with less work.

The assembler of CUDA 12.8, which Triton 3.5 to 3.7 take for Hopper, computes wrong addresses of operands in shared memory for
some products of small tiles: the results are wrong, or the GPU reports an illegal access (Triton's issue 11366). The assembler
of CUDA 12.9 or later, which the same packages hold for Blackwell, does not.

A launch by Triton finds the compiled kernel anew each time, through the environment and a description of all arguments: some
30 microseconds, as long as a kernel runs. Here a compiled kernel is found by what Triton compiles for.

Triton compiles a kernel when it is launched, one after the other; `side_by_side` those of many launches at once.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any

import torch
import triton
from torch import Tensor
from triton import knobs
from triton.runtime.jit import JITFunction

__all__ = ["jit", "newest_assembler", "side_by_side"]

# Without a GPU kernels are only described, for tests. (What is launched has tensors on CUDA, which need no initialization.)
current_device = torch._C._cuda_getDevice if torch.cuda.is_available() else lambda: -1


@contextmanager
def newest_assembler() -> Iterator[None]:
    """Kernels compiled inside are assembled by the newer of Triton's two, unless TRITON_PTXAS_PATH names one."""
    tools = [knobs.nvidia.ptxas, getattr(knobs.nvidia, "ptxas_blackwell", knobs.nvidia.ptxas)]
    newest = max(tools, key=lambda tool: [int(part) for part in tool.version.split(".")])
    with knobs.nvidia.scope():
        if "TRITON_PTXAS_PATH" not in os.environ:
            knobs.nvidia.ptxas = newest.path
        yield


# Of the launches inside `side_by_side`, in the place of being run.
compiling: ContextVar[list[Any] | None] = ContextVar("compiling", default=None)


class Compilers(ThreadPoolExecutor):
    """What does not compile is None here: it is compiled again, and says why, when it is launched."""

    def submit(self, call: Callable[..., Any], /, *arguments: Any, **options: Any) -> Future[Any]:
        def attempt() -> Any:
            try:
                return call(*arguments, **options)
            except Exception:
                return None

        return super().submit(attempt)


@contextmanager
def side_by_side() -> Iterator[None]:
    """Kernels launched inside (also with tensors on `meta`) are only compiled, in as many threads as there are cores: most of
    the time Triton spends outside of Python. Afterwards they are ready."""
    kernels: list[Any] = []
    device = current_device()

    def begin() -> None:
        if torch.cuda.is_available():
            torch.cuda.set_device(device)

    with newest_assembler(), Compilers(os.cpu_count(), initializer=begin) as pool:
        token = compiling.set(kernels)
        try:
            with triton.AsyncCompileMode(pool):
                yield
        finally:
            compiling.reset(token)
        wait([pool.submit(make_ready, kernel) for kernel in kernels])


def make_ready(kernel: Any) -> None:
    """Load it, and compile the C function that launches it, which takes as long as a small kernel."""
    compiled = kernel.result() if isinstance(kernel, triton.FutureKernel) else kernel
    _ = compiled.run


def compiled_for(argument: Any) -> Any:
    """What of an argument that is no tensor a compiled kernel depends on: at least what Triton tells apart."""
    if isinstance(argument, int):
        return argument == 1, argument % 16 == 0, -(2**31) <= argument < 2**31
    return argument.__class__


def is_watched() -> bool:
    """Whether a profiler asked to be told of launches; to describe each takes 2 microseconds."""
    enter, leave = knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook
    return bool(getattr(enter, "calls", enter) or getattr(leave, "calls", leave))


class Kernel(JITFunction):
    def __init__(self, function: Callable[..., Any], aligned: bool, **options: Any) -> None:
        super().__init__(function, **options)
        self.aligned = aligned
        self.is_fixed = [parameter.is_constexpr for parameter in self.params]
        self.compiled: dict[Any, Any] = {}

    def __getitem__(self, grid: Sequence[int]) -> Callable[..., None]:
        return partial(self.launch, grid)

    def launch(self, grid: Sequence[int], *places: Any, **choices: Any) -> None:
        """places: arguments by place; choices: by name, which all are compiled in. A grid without programs does nothing."""
        if not all(grid):
            return
        device = current_device()
        aligned = self.aligned
        given = [
            (x.dtype if aligned else (x.dtype, x.data_ptr() % 16))
            if x.__class__ is Tensor
            else x
            if fixed
            else compiled_for(x)
            for fixed, x in zip(self.is_fixed, places)
        ]
        key = (device, *given, *choices.items())
        compiled = self.compiled.get(key)
        pending = compiling.get()
        if pending is not None:
            if compiled is None:
                pending.append(self.run(*places, grid=grid, warmup=True, **choices))
        elif compiled is None:
            self.compiled[key] = self.run(*places, grid=grid, warmup=False, **choices)
        else:
            rest = [choices[name] for name in self.arg_names[len(places) :]]
            stream, sizes = torch._C._cuda_getCurrentRawStream(device), (*grid, 1, 1)[:3]
            if is_watched():
                compiled[sizes](*places, *rest, stream=stream)
            else:
                compiled.run(
                    *sizes, stream, compiled.function, compiled.packed_metadata, None, None, None, *places, *rest
                )

    def _do_compile(self, *args: Any, **kwargs: Any) -> Any:
        with newest_assembler():
            return super()._do_compile(*args, **kwargs)


def jit(function: Callable[..., Any] | None = None, *, aligned: bool = False, **options: Any) -> Any:
    """A decorator, with Triton's options or without. aligned: all its tensors begin at multiples of 16 bytes (see `aligned` in
    backends), so that nothing needs to tell them apart."""
    if function is None:
        return partial(jit, aligned=aligned, **options)
    return triton.jit(function, **options) if knobs.runtime.interpret else Kernel(function, aligned, **options)
