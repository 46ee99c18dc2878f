"""States out of a pool and into it on a GPU: the kernel has the bits of PyTorch's form, and nothing waits for the device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

from fastweights.kernels.availability import HAS_TRITON
from fastweights.ops.framework.in_place import read_rows, write_rows
from fastweights.ops.framework.pool_rows import gather_rows, gather_rows_in_torch, scatter_rows_in_torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available() or not HAS_TRITON, reason="needs an NVIDIA GPU and triton"),
]
# By name: the shape of what a pool is a view of, the view, its dtype, and that of the states beside it.
POOLS = {
    "states": ((64, 16, 128, 128), lambda x: x, torch.float32, torch.float32),
    "states in 16 bits": ((65, 16, 128, 128), lambda x: x[1:].mT, torch.bfloat16, torch.float32),
    "values first": ((65, 2, 16, 128, 96), lambda x: x[1:, 0].mT, torch.float32, torch.float32),
    "half": ((64, 4, 40, 24), lambda x: x, torch.float16, torch.float32),
    "windows": ((65, 2, 3, 8192), lambda x: x[1:, 0], torch.bfloat16, torch.bfloat16),
    "turned windows": ((65, 8192, 3), lambda x: x[1:].mT, torch.bfloat16, torch.bfloat16),
    "counts": ((64,), lambda x: x, torch.int64, torch.int64),
}
# Halfway between two numbers of bfloat16, rounded up and down, beyond its largest one, and none.
ROUNDED = [1.01171875, 1.00390625, 3.3961e38, -3.3961e38, float("inf"), float("nan")]


@contextmanager
def no_waits() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def draw(*shape: int, dtype: torch.dtype) -> Tensor:
    return (100 * torch.randn(shape, device="cuda")).to(dtype)


def rows_of(count: int, pool: int) -> Tensor:
    """Each fourth sequence has no row."""
    rows = torch.randperm(pool, device="cuda")[:count].int()
    return rows.where(torch.arange(count, device="cuda") % 4 != 1, -1)


def same(a: Tensor, b: Tensor) -> bool:
    numbers = [x.nan_to_num(7.0) for x in (a, b)]
    return a.dtype == b.dtype and torch.equal(*numbers) and torch.equal(a.isnan(), b.isnan())


@pytest.mark.parametrize("count", [1, 64])
@pytest.mark.parametrize("name", POOLS)
def test_bits(name: str, count: int) -> None:
    shape, view, dtype, other = POOLS[name]
    memory = draw(*shape, dtype=dtype)
    pool, rows, wanted = view(memory), rows_of(count, 64), memory.clone()
    with no_waits():
        read = gather_rows(pool, rows, other)
    exact = gather_rows_in_torch(pool, rows, other)
    new = draw(count, *pool.shape[1:], dtype=other)
    if dtype == torch.bfloat16:
        new[0].view(-1)[: len(ROUNDED)] = torch.tensor(ROUNDED, device="cuda").to(other)
    with no_waits():
        write_rows(pool, new, rows)
    scatter_rows_in_torch(view(wanted), new, rows)
    assert same(read, exact) and same(memory, wanted)


def test_a_pool_of_more_than_32_bits_can_count() -> None:
    """Rows that lie far apart, and heads that do: the states of all sequences, head after head."""
    memory = torch.zeros(2**31 + 2**20, dtype=torch.bfloat16, device="cuda")
    for pool in (memory.view(-1, 16, 128, 32), memory.view(2, -1, 128, 32).transpose(0, 1)):
        last = len(pool) - 1
        rows, new = torch.tensor([last, -1], device="cuda"), draw(2, *pool.shape[1:], dtype=torch.float32)
        write_rows(pool, new, rows)
        read = read_rows(pool, rows)
        assert same(read[0], new[0].bfloat16()) and same(pool[last], read[0])
        assert not read[1].any() and not pool[:last].any()
        memory.zero_()


def test_a_graph_replays() -> None:
    memory, rows, new = (
        draw(9, 2, 3, 64, dtype=torch.bfloat16),
        torch.tensor([2, -1], device="cuda"),
        draw(2, 3, 64, dtype=torch.float32),
    )
    pool = memory[:, 0]

    def step() -> Tensor:
        write_rows(pool, read_rows(pool, rows).float() + new, rows)
        return read_rows(pool, rows)

    before = memory.clone()
    step()
    memory.copy_(before)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        read = step()
    for places in ([2, -1], [-1, 7], [-1, -1], [8, 0]):
        memory.copy_(before)
        rows.copy_(torch.tensor(places))
        graph.replay()
        replayed, after = read.clone(), memory.clone()
        memory.copy_(before)
        assert same(replayed, step()) and same(after, memory)


def test_a_compiled_graph_is_whole() -> None:
    def step(pool: Tensor, new: Tensor, rows: Tensor) -> Tensor:
        states = read_rows(pool, rows)
        write_rows(pool, new, rows)
        return states

    memory, rows = draw(9, 2, 3, 64, dtype=torch.bfloat16), torch.tensor([2, -1], device="cuda")
    other, new = memory.clone(), draw(2, 3, 64, dtype=torch.float32)
    read = torch.compile(step, fullgraph=True)(memory[:, 0], new, rows)
    assert same(read, step(other[:, 0], new, rows)) and same(memory, other)
