"""From some tokens of all heads to all tokens of some heads, and back: each way one all-to-all for all tensors of a call."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from .collectives import LinearMap, all_gather, send_parts, transpose
from .group import ContextParallel

__all__ = ["deal", "gather_heads", "take_heads", "to_heads", "to_tokens"]

Tensors = Sequence[Tensor]


def deal(units: int, size: int) -> list[int]:
    """How many of the units each rank gets: the first ranks one more where they do not divide."""
    return [units // size + (rank < units % size) for rank in range(size)]


def _blocks(units: int, size: int) -> Iterator[tuple[int, int, int]]:
    """(first unit, ranks, units of each) of the ranks that get equally many."""
    each, more = divmod(units, size)
    if more:
        yield 0, more, each + 1
    yield more * (each + 1), size - more, each


def _flatten(tensors: Tensors) -> list[Tensor]:
    """[B, T, heads, ...] -> [B, T, numbers] of each, all read as the narrowest of their dtypes: their bits travel together."""
    narrowest = min((x.dtype for x in tensors), key=lambda dtype: dtype.itemsize)
    return [x.flatten(2) if x.dtype == narrowest else _read_as(narrowest, x.flatten(2)) for x in tensors]


def _unflatten(flat: Tensor, like: Tensor, heads: int) -> Tensor:
    """The tensor of `heads` heads whose other dimensions and dtype are those of `like`."""
    return _read_as(like.dtype, flat).view(*flat.shape[:2], heads, *like.shape[3:])


def _read_as(dtype: torch.dtype, x: Tensor) -> Tensor:
    """The bits of x [B, T, numbers] as contiguous numbers of that dtype."""
    shape = *x.shape[:2], x.shape[2] * x.dtype.itemsize // dtype.itemsize
    if not x.numel():
        return x.new_empty(shape, dtype=dtype)
    return x.contiguous().view(-1).view(dtype).view(shape)  # in one dimension no stride is left that means nothing


def _join(parts: Tensors, dim: int) -> Tensor:
    return torch.cat(list(parts), dim) if len(parts) > 1 else parts[0]


def _run_to_heads(tensors: Tensors, units: int, size: int, rank: int, name: str) -> Tensors:
    (batch, time), counts = tensors[0].shape[:2], deal(units, size)
    flat = _flatten(tensors)
    widths = [x.shape[2] // units for x in flat]
    blocks = []
    for first, ranks, each in _blocks(units, size):
        of_block = [x.narrow(2, first * w, ranks * each * w) for x, w in zip(flat, widths)]
        per_rank = [x.unflatten(2, (ranks, each * w)).permute(2, 0, 1, 3) for x, w in zip(of_block, widths)]
        blocks.append(_join(per_rank, 3).flatten())
    numbers = batch * time * sum(widths)
    sent, received = [numbers * count for count in counts], [numbers * counts[rank]] * size
    arrived = send_parts(_join(blocks, 0), received, sent, name).view(size, batch, time, sum(widths) * counts[rank])
    parts = arrived.permute(1, 0, 2, 3).split([w * counts[rank] for w in widths], 3)
    return [_unflatten(part.flatten(1, 2), x, _share(x, units, counts[rank])) for part, x in zip(parts, tensors)]


def _run_to_tokens(tensors: Tensors, units: int, size: int, rank: int, name: str) -> Tensors:
    (batch, whole), counts = tensors[0].shape[:2], deal(units, size)
    time, mine = whole // size, counts[rank]
    flat = _flatten(tensors)
    widths = [x.shape[2] // mine for x in flat]
    message = _join([x.unflatten(1, (size, time)).transpose(0, 1) for x in flat], 3).flatten()
    numbers = batch * time * sum(widths)
    received = [numbers * count for count in counts]
    arrived = send_parts(message, received, [numbers * mine] * size, name)
    columns: list[list[Tensor]] = [[] for _ in flat]
    for first, ranks, each in _blocks(units, size):
        block = arrived.narrow(0, numbers * first, numbers * ranks * each).view(ranks, batch, time, sum(widths) * each)
        for column, part in zip(columns, block.permute(1, 2, 0, 3).split([w * each for w in widths], 3)):
            column.append(part.flatten(2))
    return [_unflatten(_join(parts, 2), x, _share(x, mine, units)) for parts, x in zip(columns, tensors)]


def _share(x: Tensor, units: int, wanted: int) -> int:
    """The heads of `wanted` units where x [B, T, heads, ...] has those of `units`."""
    return x.shape[2] // units * wanted


_TO_HEADS = LinearMap(
    "to_heads",
    "int units, int size, int rank, str group",
    run=_run_to_heads,
    fake=lambda tensors, units, size, rank, name: [
        x.new_empty((x.shape[0], x.shape[1] * size, _share(x, units, deal(units, size)[rank]), *x.shape[3:]))
        for x in tensors
    ],
)
_TO_TOKENS = LinearMap(
    "to_tokens",
    "int units, int size, int rank, str group",
    run=_run_to_tokens,
    fake=lambda tensors, units, size, rank, name: [
        x.new_empty((x.shape[0], x.shape[1] // size, _share(x, deal(units, size)[rank], units), *x.shape[3:]))
        for x in tensors
    ],
)
transpose(_TO_HEADS, _TO_TOKENS)


def to_heads(tensors: Tensors, units: int, cp: ContextParallel) -> Tensors:
    """[B, T / size, heads, ...] -> [B, T, heads of this rank, ...] of each tensor.

    Args:
        units: what is dealt to the ranks, see `deal`. The heads of each tensor are a multiple of it, and a unit consecutive
            heads.
    """
    return _TO_HEADS(tensors, units, cp.size, cp.rank, cp.name)


def to_tokens(tensors: Tensors, units: int, cp: ContextParallel) -> Tensors:
    """[B, T, heads of this rank, ...] -> [B, T / size, heads, ...] of each tensor: the inverse of `to_heads`."""
    return _TO_TOKENS(tensors, units, cp.size, cp.rank, cp.name)


def take_heads(x: Tensor, dim: int, units: int, cp: ContextParallel) -> Tensor:
    """The heads of this rank of a tensor that every rank holds whole; the gradient of the others is 0 here.

    Args:
        x: its heads stand in dimension `dim`. If they are fewer than the units, each serves several in a row.
    """
    heads, counts = x.shape[dim], deal(units, cp.size)
    if heads < units:
        x, heads = x.repeat_interleave(units // heads, dim), units
    each = heads // units
    return x.narrow(dim, each * sum(counts[: cp.rank]), each * counts[cp.rank])


def gather_heads(states: Tensors, units: int, cp: ContextParallel) -> list[Tensor]:
    """[N, heads of this rank, ...] -> [N, heads, ...] of each state, on every rank; all have one dtype."""
    counts = deal(units, cp.size)
    mine = counts[cp.rank]
    flat = _join([x.transpose(0, 1).reshape(mine, -1) for x in states], 1)  # [units, numbers of a unit]
    found = all_gather(F.pad(flat, (0, 0, 0, counts[0] - mine)), cp)
    whole = _join([part[:count] for part, count in zip(found, counts)], 0)
    shapes = [(x.shape[1] // mine * units, x.shape[0], *x.shape[2:]) for x in states]
    parts = whole.split([math.prod(shape) // units for shape in shapes], 1)
    return [part.reshape(shape).transpose(0, 1).contiguous() for part, shape in zip(parts, shapes)]
