"""Every private name of triton that fastweights uses, and the versions it is tested with; those of torch stand in private_torch.

A kernel is launched in one of two modes that give the same bits:
- plain: Triton's own `kernel[grid](*tensors)`. It finds the compiled kernel anew for every launch, which takes some 30
  microseconds, as long as a small kernel runs.
- fast: kernels are compiled before their first launch, in parallel, and Triton's compiled launcher is then called with pointers.

The plain mode serves the interpreter, versions that were not tested, and FASTWEIGHTS_LAUNCH=plain.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, nullcontext
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from itertools import takewhile
from threading import Lock
from typing import Any, NamedTuple

import torch

from ... import private_torch
from ...private_torch import current_device

TESTED = {"triton": ((3, 5), (3, 9)), "torch": private_torch.TESTED}  # first and last minor version
SAFE_PTXAS = (12, 9)
_COMPILING = Lock()


class Launch(NamedTuple):
    """A kernel, its grid, its arguments by position, and by name its constants and compile options."""

    kernel: Any
    grid: tuple[int, ...]
    arguments: Sequence[Any]
    constants: Mapping[str, Any]


@lru_cache
def _knobs() -> Any:
    from triton import knobs

    return knobs


def is_interpreted() -> bool:
    """Whether TRITON_INTERPRET=1 was set when triton was imported."""
    return _knobs().runtime.interpret


@lru_cache
def fast_launch() -> bool:
    """Whether this process launches kernels in the fast mode; see the head of this file."""
    return not is_interpreted() and os.environ.get("FASTWEIGHTS_LAUNCH") != "plain" and versions_are_tested()


@lru_cache
def versions_are_tested() -> bool:
    """Whether triton and torch are in the tested range; warns once where they are not."""
    for package, (first, last) in TESTED.items():
        try:
            found = version(package)
        except PackageNotFoundError:  # built from source, say
            found = "0.0"
        if not first <= _numbers(found)[:2] <= last:
            warnings.warn(
                f"fastweights launches its kernels in the plain mode, which takes more host time: {package} {found} was not "
                f"tested, {first[0]}.{first[1]} to {last[0]}.{last[1]} were",
                stacklevel=2,
            )
            return False
    return True


def _numbers(text: str) -> tuple[int, ...]:
    """The leading numbers of a version such as 2.13.0+cpu."""
    return tuple(map(int, takewhile(str.isdigit, text.split("+")[0].split("."))))


@contextmanager
def newest_ptxas() -> Iterator[None]:
    """Kernels compiled inside are assembled by the newest ptxas that Triton ships, unless TRITON_PTXAS_PATH names another.

    The ptxas of CUDA 12.8, which Triton 3.5 to 3.7 use for Hopper, computes wrong addresses of operands in shared memory for
    some products of small tiles: results are wrong, or the GPU reports an illegal access (Triton's issue 11366). The one of
    CUDA 12.9, which the same packages ship for Blackwell, does not.
    """
    newest = None if "TRITON_PTXAS_PATH" in os.environ else _newest_ptxas()
    if newest is None:
        yield
        return
    nvidia = _knobs().nvidia
    with nvidia.scope():
        nvidia.ptxas = newest.path
        yield


@lru_cache
def _newest_ptxas() -> Any:
    """None where this Triton does not say which ones it ships."""
    try:
        nvidia = _knobs().nvidia
        tools = [nvidia.ptxas, getattr(nvidia, "ptxas_blackwell", nvidia.ptxas)]
        return max(tools, key=lambda tool: _numbers(tool.version))
    except (AttributeError, RuntimeError):
        return None


@lru_cache
def ptxas_is_safe() -> bool:
    """Whether kernels are assembled by a ptxas without the fault that `newest_ptxas` describes."""
    try:
        with newest_ptxas():
            return _numbers(_knobs().nvidia.ptxas.version) >= SAFE_PTXAS
    except (AttributeError, RuntimeError):
        return False


def keep_cache_key() -> None:
    """Make Triton compute its cache key with its own ptxas. It does so once per process, with the ptxas of that moment: with
    ours, kernels of other libraries in the cache on disk would not be found again."""
    from triton.compiler import make_backend
    from triton.runtime import driver

    make_backend(driver.active.get_current_target()).hash()


class CompilePool(ThreadPoolExecutor):
    """Threads in which a compile that fails returns None. It is then repeated alone, and raises its error there: Python 3.11's
    parser now and then fails where another thread parses as well."""

    def submit(self, call: Callable[..., Any], /, *arguments: Any, **options: Any) -> Future[Any]:
        def attempt() -> Any:
            try:
                return call(*arguments, **options)
            except Exception:
                return None

        return super().submit(attempt)


def compile_all(launches: Sequence[Launch]) -> list[Any]:
    """The compiled kernel of every launch, compiled in parallel, in as many threads as there are cores: most of the time Triton
    spends outside of Python. A second caller waits for the first: threads that load launchers disturb each other, as
    `_load_launcher` says."""
    import triton
    from triton.runtime._async_compile import active_mode

    with _COMPILING:
        if torch.cuda.is_available():
            keep_cache_key()
        for launch in launches:
            _ = launch.kernel.cache_key  # parses the kernel and what it calls, which may fail while threads parse
        with newest_ptxas():
            with CompilePool(os.cpu_count(), initializer=torch.cuda.set_device, initargs=(current_device(),)) as pool:
                with nullcontext() if active_mode.get() else triton.AsyncCompileMode(pool):
                    begun = [_compile(launch) for launch in launches]
                wait([pool.submit(_load, kernel) for kernel in begun])
            found = []
            for launch, kernel in zip(launches, begun):
                try:
                    compiled = _finished(kernel)
                except AttributeError:  # Triton 3.9 looks for an attribute of None
                    compiled = None
                found.append(compiled or _compile(launch))
                _load(found[-1])  # raises what a thread may have hidden
                _load_launcher(found[-1])
    return found


def _compile(launch: Launch) -> Any:
    """The compiled kernel, or Triton's future of it."""
    return launch.kernel.run(*launch.arguments, grid=launch.grid, warmup=True, **launch.constants)


def _finished(kernel: Any) -> Any:
    import triton

    return kernel.result() if isinstance(kernel, triton.FutureKernel) else kernel


def _load(kernel: Any) -> None:
    """Put a kernel on the GPU, and compile the C function that launches it, which takes as long as a small kernel.

    A kernel that found no memory on the GPU has the C function already, and `run` would not try again."""
    kernel = _finished(kernel)
    _ = kernel.run
    if kernel.function is None:
        kernel._init_handles()


def _load_launcher(kernel: Any) -> None:
    """Load the C function that launches a kernel once more, while no other thread loads one. Triton 3.5 and 3.6 name all their
    modules alike, and Python writes a file that it loads for the second time into the module of this name: threads may take
    each other's functions, which have other arguments."""
    from triton.runtime.driver import driver

    if isinstance(kernel._run, driver.active.launcher_cls):  # and not what raises the error of a kernel that cannot run
        kernel._run = driver.active.launcher_cls(kernel.src, kernel.metadata)


def specialized_on(kernel: Any) -> tuple[tuple[bool, bool], ...]:
    """Of every parameter of a kernel whether it is a tl.constexpr, and whether Triton compiles for its value being 1 or a
    multiple of 16."""
    return tuple([(parameter.is_constexpr, not parameter.do_not_specialize) for parameter in kernel.params])


def front_arguments(compiled: Any, grid: Sequence[int], stream: Any) -> tuple[Any, ...]:
    """What a compiled kernel's launcher takes before the kernel's own arguments: the grid, the stream, the kernel, no hooks."""
    return *(*grid, 1, 1)[:3], stream, compiled.function, compiled.packed_metadata, None, None, None


def launcher() -> Callable[[Any, Sequence[Any]], None]:
    """Runs a compiled kernel with `front_arguments` followed by the kernel's own arguments, tensors as pointers. A profiler's
    hooks are called only where there are any: to describe a launch to them takes 2 microseconds."""
    runtime = _knobs().runtime
    enter, leave = runtime.launch_enter_hook, runtime.launch_exit_hook
    return _run_with_hooks if getattr(enter, "calls", enter) or getattr(leave, "calls", leave) else _run


def _run(compiled: Any, arguments: Sequence[Any]) -> None:
    compiled.run(*arguments)


def _run_with_hooks(compiled: Any, arguments: Sequence[Any]) -> None:
    compiled[arguments[:3]](*arguments[9:], stream=arguments[3])


def plain_launch(kernel: Any, grid: tuple[int, ...], arguments: Sequence[Any], constants: Mapping[str, Any]) -> None:
    """Triton's own launch, with tensors."""
    with nullcontext() if is_interpreted() else newest_ptxas():
        kernel[grid](*arguments, **constants)
