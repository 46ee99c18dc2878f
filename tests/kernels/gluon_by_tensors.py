"""Kernels in Gluon run with PyTorch tensors in the place of tiles, as Triton's interpreter knows none. Layouts count for nothing
here, and a program runs alone, as if its threads met before every load."""

from __future__ import annotations

import types
from collections.abc import Callable
from itertools import product
from typing import Any

import torch
from triton.language.core import constexpr


class Pointer:
    """Numbers of a tensor. offsets: an integer, or a tile of them."""

    def __init__(self, tensor: torch.Tensor, offsets: Any = 0) -> None:
        self.tensor, self.offsets = tensor, offsets
        self.dtype = types.SimpleNamespace(element_ty=tensor.dtype)

    def __add__(self, more: Any) -> Pointer:
        return Pointer(self.tensor, self.offsets + more)

    def places(self, mask: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        offsets = torch.as_tensor(self.offsets).long()
        chosen = torch.as_tensor(True if mask is None else mask).expand(offsets.shape)
        return self.tensor.view(-1), offsets, chosen


class ChosenPointer:
    """Pointers of a tile, some into one tensor and some into another."""

    def __init__(self, condition: torch.Tensor, chosen: Pointer, other: Pointer) -> None:
        self.parts = (condition, chosen, other)

    def __add__(self, more: Any) -> ChosenPointer:
        condition, chosen, other = self.parts
        return ChosenPointer(condition, chosen + more, other + more)


class Shared:
    """A tile in shared memory."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor, self.shape, self.dtype = tensor, tensor.shape, tensor.dtype

    def load(self, layout: Any = None) -> torch.Tensor:
        return self.tensor.clone()

    def store(self, x: torch.Tensor) -> None:
        assert x.shape == self.shape
        self.tensor.copy_(x)

    def index(self, i: int) -> Shared:
        return Shared(self.tensor[i])

    def slice(self, start: int, length: int, dim: int = 0) -> Shared:
        return Shared(self.tensor.narrow(dim, start, length))

    def permute(self, order: Any) -> Shared:
        return Shared(self.tensor.permute(order))

    def _reinterpret(self, dtype: Any, shape: Any, layout: Any) -> Shared:
        return Shared(self.tensor.view(shape))


def load(pointer: Any, mask: Any = None, other: Any = 0.0) -> torch.Tensor:
    if isinstance(pointer, ChosenPointer):
        condition, chosen, rest = pointer.parts
        return torch.where(condition, load(chosen, mask & condition, other), load(rest, mask & ~condition, other))
    numbers, offsets, wanted = pointer.places(mask)
    out = torch.full(offsets.shape, other, dtype=numbers.dtype)
    out[wanted] = numbers[offsets[wanted]]
    return out


def store(pointer: Pointer, x: torch.Tensor, mask: Any = None) -> None:
    numbers, offsets, wanted = pointer.places(mask)
    numbers[offsets[wanted]] = x.to(numbers.dtype).expand(offsets.shape)[wanted]


def where(condition: Any, chosen: Any, other: Any) -> Any:
    if isinstance(chosen, Pointer):
        return ChosenPointer(condition, chosen, other)
    if isinstance(condition, torch.Tensor):
        kind = torch.float32 if isinstance(chosen, float) and isinstance(other, float) else None
        return torch.where(condition, chosen, other).to(kind) if kind else torch.where(condition, chosen, other)
    return chosen if condition else other


def allocate(dtype: torch.dtype, shape: list[int], layout: Any) -> Shared:
    return Shared(torch.full(shape, torch.nan, dtype=dtype))


def row_places(stride: int, height: int, width: int, numbers: int = 8) -> tuple[torch.Tensor, torch.Tensor]:
    row = torch.arange(height)
    return row, row[:, None] * stride + torch.arange(width)


def copy_rows(buffer: Shared, x: Pointer, live: Any, stride: int, masked: bool) -> None:
    buffer.store(load(x + row_places(stride, *buffer.shape)[1]))


def nothing(*args: Any, **options: Any) -> None:
    pass


class Programs:
    """Runs a kernel's programs one after the other. warps: of a program."""

    def __init__(self, warps: int) -> None:
        self.place, self.grid = (0, 0, 0), (1, 1, 1)
        own = {
            "where": where, "load": load, "store": store, "allocate_shared_memory": allocate, "thread_barrier": nothing,
            "arange": lambda low, high, layout=None: torch.arange(low, high),
            "zeros": lambda shape, dtype=torch.float32, layout=None: torch.zeros(shape, dtype=dtype),
            "full": lambda shape, x, dtype, layout=None: torch.full(shape, x, dtype=dtype),
            "convert_layout": lambda x, layout, assert_trivial=False: x,
            "join": lambda a, b: torch.stack(torch.broadcast_tensors(a, b), -1),
            "split": lambda x: (x[..., 0], x[..., 1]), "reshape": lambda x, shape: x.reshape(shape),
            "sum": lambda x, axis: x.sum(axis), "abs": torch.abs, "static_range": range,
            "reduce": lambda tiles, axis, combine: tuple(x.sum(axis) for x in tiles),
            "cdiv": lambda a, b: -(-int(a) // int(b)), "minimum": min, "maximum": max,
            "inline_asm_elementwise": lambda code, constraints, args, **options: args[0] * args[1],
            "program_id": lambda axis: torch.tensor(self.place[axis]), "num_programs": lambda axis: self.grid[axis],
            "num_warps": lambda: warps, "float32": torch.float32, "int64": torch.int64, "bfloat16": torch.bfloat16,
            "constexpr": lambda x: x,
            **dict.fromkeys(("DotOperandLayout", "SliceLayout", "BlockedLayout"), nothing),
        }  # fmt: skip
        self.language = types.SimpleNamespace(**own)
        copies = types.SimpleNamespace(commit_group=nothing, wait_group=nothing)
        self.known: dict[str, Any] = {
            "tl": self.language, "gl": self.language, "async_copy": copies, "row_places": row_places, "copy_rows": copy_rows,
            "mma_v2": lambda a, b, sums: a.float() @ b.float() + sums, "reciprocal": lambda x, precision: 1 / x,
        }  # fmt: skip

    def translated(self, function: Any) -> Callable[..., Any]:
        """A kernel's or device function's own source, with the names above in the place of Triton's."""
        names: dict[str, Any] = {"__builtins__": __builtins__}
        for name in function.fn.__code__.co_names:
            x = function.fn.__globals__.get(name)
            if name in self.known:
                x = self.known[name]
            elif name.endswith("_layout"):
                x = nothing
            elif hasattr(x, "fn"):
                x = self.translated(x)
            elif isinstance(x, constexpr):
                x = x.value
            if x is not None:
                names[name] = x
        return types.FunctionType(function.fn.__code__, names, argdefs=function.fn.__defaults__)

    def run(self, kernel: Any, grid: tuple[int, ...], *args: Any) -> None:
        """args: with tensors for pointers."""
        call, self.grid = self.translated(kernel), (*grid, 1)[:3]
        given = [Pointer(x) if isinstance(x, torch.Tensor) else x for x in args]
        for place in product(*map(range, self.grid)):
            self.place = place
            call(*given)
