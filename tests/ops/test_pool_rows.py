"""States out of a pool and into it: the kernel (on a GPU or in Triton's interpreter) has the bits of PyTorch's form."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fastweights.ops.framework import pool_rows
from fastweights.ops.framework.pool_rows import (
    read_rows,
    read_rows_in_torch,
    takes_kernel,
    write_rows,
    write_rows_in_torch,
)
from tests.kernels.cases import DEVICE

ROWS = [[-1, 2, -1, 0], [1], [-1], [-3, -2, 3], []]
# Of the pool and of the states beside it.
DTYPES = [
    (torch.float32, torch.float32), (torch.bfloat16, torch.float32), (torch.float16, torch.float32),
    (torch.bfloat16, torch.bfloat16), (torch.int64, torch.int64), (torch.int32, torch.int32),
]  # fmt: skip
# By its layout: the shape of what a pool is a view of, and the view.
POOLS = {
    "dense": ((5, 3, 5, 7), lambda x: x),
    "without its first row": ((6, 3, 5, 7), lambda x: x[1:]),
    "in padded pages": ((5, 2, 3, 5, 7), lambda x: x[:, 0]),
    "values first": ((5, 2, 70, 67), lambda x: x.mT),
    "head after head": ((3, 5, 5, 7), lambda x: x.transpose(0, 1)),
    "a part of each head": ((5, 4, 6, 9), lambda x: x[:, :3, :5, :7]),
    "windows": ((5, 2, 3, 200), lambda x: x[:, 0]),
    "turned windows": ((5, 2, 200, 3), lambda x: x[:, 0].mT),
    "numbers": ((5,), lambda x: x),
    "longer than a program": ((5, 9000), lambda x: x),
}
# In the fast set all layouts in one pair of dtypes, and all pairs in one layout.
FAST_LAYOUT, FAST_DTYPES = "in padded pages", DTYPES[1]
layouts_and_dtypes = pytest.mark.parametrize(
    ("layout", "dtype", "other"),
    [
        pytest.param(
            layout, *pair, id=f"{pair[0]}-{pair[1]}-{layout}",
            marks=() if layout == FAST_LAYOUT or pair == FAST_DTYPES else pytest.mark.slow,
        )
        for pair in DTYPES
        for layout in POOLS
    ],
)  # fmt: skip


def draw(*shape: int, dtype: torch.dtype) -> Tensor:
    """Numbers that bfloat16 holds exactly: Triton's interpreter does not round to the nearest."""
    return torch.randn(shape, device=DEVICE).mul(9).bfloat16().to(dtype)


def as_rows(rows: list[int], dtype: torch.dtype = torch.int32) -> Tensor:
    """A column of a table, as vLLM gives them."""
    return torch.tensor([[row, 99] for row in rows], dtype=dtype, device=DEVICE).view(-1, 2)[:, 0]


def beside(pool: Tensor, count: int, dtype: torch.dtype) -> list[Tensor]:
    """New states: dense, and with their first dimension last in memory."""
    last = draw(*pool.shape[1:], count, dtype=dtype)
    return [draw(count, *pool.shape[1:], dtype=dtype), last.permute(-1, *range(pool.ndim - 1))]


@pytest.mark.kernels
@layouts_and_dtypes
def test_states_are_read_and_written_bit_for_bit(layout, dtype, other):
    shape, view = POOLS[layout]
    for rows in ROWS:
        memory = draw(*shape, dtype=dtype)
        pool, before, places = view(memory), memory.clone(), as_rows(rows)
        read = read_rows(pool, places, other, "triton")
        assert read.dtype == other and read.is_contiguous()
        assert torch.equal(read, read_rows_in_torch(pool, places, other))
        first = draw(*pool.shape[1:], 1, dtype=other).movedim(-1, 0)
        read = read_rows(pool, places, other, "triton", first)
        assert torch.equal(read, read_rows_in_torch(pool, places, other, first))
        for new in beside(pool, len(rows), other):
            wanted = before.clone()
            write_rows_in_torch(view(wanted), new, places)
            write_rows(pool, new, places, "triton")
            assert torch.equal(memory, wanted)  # also what lies between the states
            memory.copy_(before)


@pytest.mark.kernels
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_rows_beyond_the_pool_touch_nothing(dtype):
    memory = draw(8, 300, dtype=torch.float32)
    before, rows = memory.clone(), as_rows([2, -1, 4, 2**31 - 1], dtype)
    read = read_rows(memory[2:6], rows, backend="triton")
    assert torch.equal(read[0], memory[4]) and not read[1:].any()
    write_rows(memory[2:6], read + 1, rows, "triton")
    before[4] += 1
    assert torch.equal(memory, before)


@pytest.mark.kernels
def test_a_layout_that_the_kernel_does_not_serve():
    memory = draw(5, 3, 3, 3, 4, 3, 5, 3, 7, dtype=torch.float32)
    before, pool, rows = memory.clone(), memory[:, :, 0, :, 0, :, 0, :, 0], as_rows([-1, 3])
    assert torch.equal(read_rows(pool, rows, backend="triton"), read_rows_in_torch(pool, rows, pool.dtype))
    write_rows(pool, torch.ones(2, *pool.shape[1:], device=DEVICE), rows, "triton")
    assert (pool[3] == 1).all()
    memory[3] = before[3]
    assert torch.equal(memory, before)


@pytest.mark.kernels
def test_what_the_kernel_serves(monkeypatch):
    pool = draw(5, 3, dtype=torch.float32)
    assert takes_kernel("triton", pool, torch.bfloat16)
    assert not takes_kernel("torch", pool, pool.dtype) and not takes_kernel("reference", pool, pool.dtype)
    assert not takes_kernel("auto", pool.cpu(), pool.dtype)
    for dtype in (torch.float64, torch.bool):
        assert not takes_kernel("triton", pool.to(dtype), dtype) and not takes_kernel("triton", pool, dtype)
    assert not takes_kernel("triton", pool, pool.dtype, draw(1, 3, dtype=torch.float32).requires_grad_())
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert not takes_kernel("triton", pool, pool.dtype)


@pytest.mark.kernels
def test_the_public_calls_take_the_kernel(monkeypatch):
    """As on a GPU, where the backend is "auto"."""
    memory, rows, original = draw(5, 2, 3, dtype=torch.float32), as_rows([3, -1]), pool_rows.takes_kernels
    monkeypatch.setattr(pool_rows, "takes_kernels", lambda asked, x: original("triton", x))
    for form in ("read_rows_in_torch", "write_rows_in_torch"):
        monkeypatch.setattr(pool_rows, form, None)
    read = read_rows(memory, rows)
    assert torch.equal(read[0], memory[3]) and not read[1].any()
    write_rows(memory, read + 1, rows)
    assert torch.equal(memory[3], read[0] + 1)


def test_gradients_reach_a_pool():
    pool, rows = torch.randn(5, 2, 3, requires_grad=True), torch.tensor([3, -1, 0])
    read_rows(pool, rows).sum().backward()
    assert torch.equal(pool.grad.sum((1, 2)), torch.tensor([6.0, 0, 0, 6, 0]))


@pytest.mark.parametrize("rows", [[-1, 3, 0], [-1]], ids=str)
def test_a_compiled_graph_is_whole(rows):
    def move(pool: Tensor, rows: Tensor) -> Tensor:
        states = read_rows(pool, rows)
        write_rows(pool, states.double() + 1, rows)
        return states

    pool = torch.randn(5, 2, 3)
    other, places = pool.clone(), torch.tensor(rows)
    read = torch.compile(move, fullgraph=True, backend="eager")(pool, places)
    assert torch.equal(read, move(other, places)) and torch.equal(pool, other)
