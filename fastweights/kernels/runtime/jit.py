"""`jit` for the kernels: Triton's own, compiled as in `compiling` and launched with less work.

A launch by Triton finds the compiled kernel anew each time, through the environment and a description of all arguments: some
30 microseconds, as long as a kernel runs. Here a compiled kernel is found by what Triton compiles for, and tensors are passed as
the places of their memory: Triton would ask each for its place, and the driver whether it lies on the GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import triton
from torch import Tensor
from triton import knobs
from triton.runtime.jit import JITFunction

from .compiling import Launch, current_device, make_ready
from .workspace import Buffer

__all__ = ["current_stream", "jit", "numbers_in_front", "runner"]

current_stream = torch._C._cuda_getCurrentRawStream if torch.cuda.is_available() else lambda device: 0


def compiled_for(argument: Any, aligned: bool) -> Any:
    """What of an argument a compiled kernel depends on: at least what Triton tells apart."""
    if isinstance(argument, (Tensor, Buffer)):
        return argument.dtype if aligned else (argument.dtype, argument.data_ptr() % 16)
    if isinstance(argument, int):
        return argument == 1, argument % 16 == 0, -(2**31) <= argument < 2**31
    return argument.__class__


def is_watched() -> bool:
    """Whether a profiler asked to be told of launches; to describe each takes 2 microseconds."""
    enter, leave = knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook
    return bool(getattr(enter, "calls", enter) or getattr(leave, "calls", leave))


def numbers_in_front(compiled: Any, grid: Sequence[int], stream: Any) -> tuple[Any, ...]:
    """What `compiled.run` takes before the kernel's own arguments: three sizes, the stream, the kernel, and no hooks."""
    return *(*grid, 1, 1)[:3], stream, compiled.function, compiled.packed_metadata, None, None, None


def run_plainly(compiled: Any, arguments: Sequence[Any]) -> None:
    """arguments: `numbers_in_front`, then the kernel's own."""
    compiled.run(*arguments)


def run_watched(compiled: Any, arguments: Sequence[Any]) -> None:
    """The same with the hooks."""
    compiled[arguments[:3]](*arguments[9:], stream=arguments[3])


def runner() -> Callable[[Any, Sequence[Any]], None]:
    return run_watched if is_watched() else run_plainly


class Kernel(JITFunction):
    def __init__(self, function: Callable[..., Any], aligned: bool, **options: Any) -> None:
        super().__init__(function, **options)
        self.aligned = aligned
        self.is_fixed = [parameter.is_constexpr for parameter in self.params]
        self.compiled: dict[Any, Any] = {}

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return partial(self.launch, grid)

    def key(self, device: int, places: Sequence[Any], choices: Mapping[str, Any]) -> tuple[Any, ...]:
        """What the compiled kernel depends on."""
        given = [x if fixed else compiled_for(x, self.aligned) for fixed, x in zip(self.is_fixed, places)]
        return device, *given, *choices.items()

    def all_arguments(self, places: Sequence[Any], choices: Mapping[str, Any]) -> list[Any]:
        return [*places, *(choices[name] for name in self.arg_names[len(places) :])]

    def launch(self, grid: tuple[int, ...], *places: Any, **choices: Any) -> None:
        """places: arguments by place; choices: by name, which all are compiled in. A grid without programs does nothing."""
        if not all(grid):
            return
        device = current_device()
        compiled = self.compiled.get(self.key(device, places, choices))
        if compiled is None:
            (compiled,) = make_ready([Launch(self, grid, places, choices)])
        numbers = [x.data_ptr() if isinstance(x, Tensor) else x for x in places]
        front = numbers_in_front(compiled, grid, current_stream(device))
        runner()(compiled, (*front, *self.all_arguments(numbers, choices)))


def jit(function: Callable[..., Any] | None = None, *, aligned: bool = False, **options: Any) -> Any:
    """A decorator, with Triton's options or without. aligned: all its tensors begin at multiples of 16 bytes (see `aligned` in
    backends), so that nothing needs to tell them apart."""
    if function is None:
        return partial(jit, aligned=aligned, **options)
    return triton.jit(function, **options) if knobs.runtime.interpret else Kernel(function, aligned, **options)
