"""Kernels compiled before they are launched: by the newest ptxas that Triton brings along, and side by side.

The assembler of CUDA 12.8, which Triton 3.5 to 3.7 take for Hopper, computes wrong addresses of operands in shared memory for
some products of small tiles: the results are wrong, or the GPU reports an illegal access (Triton's issue 11366). The assembler
of CUDA 12.9 or later, which the same packages hold for Blackwell, does not.

Triton compiles a kernel when it is launched, one after the other; `make_ready` those of many launches at once.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
import triton
from triton import knobs
from triton.compiler import make_backend
from triton.runtime import driver
from triton.runtime._async_compile import active_mode

__all__ = ["Launch", "current_device", "make_ready", "newest_assembler"]

# Without a GPU kernels are only described, for tests. (What is launched has tensors on CUDA, which need no initialization.)
current_device = torch._C._cuda_getDevice if torch.cuda.is_available() else lambda: -1


class Launch(NamedTuple):
    """A kernel (see `jit`), its grid, arguments by place, and by name what is compiled in."""

    kernel: Any
    grid: tuple[int, ...]
    places: Sequence[Any]
    choices: Mapping[str, Any]


@contextmanager
def newest_assembler() -> Iterator[None]:
    """Kernels compiled inside are assembled by the newer of Triton's two, unless TRITON_PTXAS_PATH names one."""
    tools = [knobs.nvidia.ptxas, getattr(knobs.nvidia, "ptxas_blackwell", knobs.nvidia.ptxas)]
    newest = max(tools, key=lambda tool: [int(part) for part in tool.version.split(".")])
    with knobs.nvidia.scope():
        if "TRITON_PTXAS_PATH" not in os.environ:
            knobs.nvidia.ptxas = newest.path
        yield


def name_as_before() -> None:
    """Triton names all compiled kernels of a process by the assembler that it meets first. Let that be its own, not ours: else
    kernels of others, compiled before, are not found again."""
    make_backend(driver.active.get_current_target()).hash()


class Compilers(ThreadPoolExecutor):
    """What does not compile is None here: it is compiled again by itself, and says why. (Python 3.11's parser now and then
    fails where another thread parses as well.)"""

    def submit(self, call: Callable[..., Any], /, *arguments: Any, **options: Any) -> Future[Any]:
        def attempt() -> Any:
            try:
                return call(*arguments, **options)
            except Exception:
                return None

        return super().submit(attempt)


def make_ready(launches: Sequence[Launch]) -> list[Any]:
    """The compiled kernel of every launch."""
    device = current_device()
    keys = [launch.kernel.key(device, launch.places, launch.choices) for launch in launches]
    new = {(launch.kernel, key): launch for launch, key in zip(launches, keys) if key not in launch.kernel.compiled}
    if new:
        compile_side_by_side(new, device)
    return [launch.kernel.compiled[key] for launch, key in zip(launches, keys)]


def compile_side_by_side(new: Mapping[tuple[Any, Any], Launch], device: int) -> None:
    """In as many threads as there are cores: most of the time Triton spends outside of Python."""
    if torch.cuda.is_available():
        name_as_before()
    with newest_assembler():
        with Compilers(os.cpu_count(), initializer=torch.cuda.set_device, initargs=(device,)) as pool:
            with nullcontext() if active_mode.get() else triton.AsyncCompileMode(pool):
                begun = {which: compiled(launch) for which, launch in new.items()}
            wait([pool.submit(load, kernel) for kernel in begun.values()])
        for (kernel, key), found in begun.items():
            try:
                done = finished(found)
            except AttributeError:  # of None, in Triton 3.9
                done = None
            kernel.compiled[key] = done or compiled(new[kernel, key])


def compiled(launch: Launch) -> Any:
    """Or a promise of it."""
    return launch.kernel.run(*launch.places, grid=launch.grid, warmup=True, **launch.choices)


def finished(found: Any) -> Any:
    return found.result() if isinstance(found, triton.FutureKernel) else found


def load(found: Any) -> None:
    """Put a kernel on the GPU, and compile the C function that launches it, which takes as long as a small kernel."""
    _ = finished(found).run
