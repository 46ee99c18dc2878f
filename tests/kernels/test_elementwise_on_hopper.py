"""Elementwise Longhorn's launches on Hopper GPUs: what they compute, which calls take them, and their machine code."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from fastweights.kernels.elementwise.chunks_on_hopper import (
    differentiate_square_tile,
    read_square_tile,
    summarize_square_tile,
)
from fastweights.ops import elementwise_longhorn
from tests.ops.kernel_launches import Compilation, recorded

from .described_gpu import on_hopper_in
from .gluon_by_tensors import Programs
from .scoreboards import register_hazards

GLUON, PLAIN = (
    {"summarize_square_tile", "read_square_tile", "differentiate_square_tile"},
    {"summarize_elements", "read_chunk", "differentiate_chunk"},
)
C = 64  # of a tile
CLOSE = 1e-6


class Case:
    """One chunk, two value heads per key head, channels and columns that fill no tile, a first state, and the gradients of the
    outputs and of the last state."""

    def __init__(self, time: int, key: int, value: int) -> None:
        torch.manual_seed(0)
        self.time, self.scale = time, key**-0.5
        q, k = (torch.nn.functional.normalize(torch.randn(1, time, 1, key), dim=-1) for _ in range(2))
        v, do = (torch.randn(1, time, 2, value) for _ in range(2))
        self.inputs = [q, 2 * k * torch.rand(1, time, 1, 1), v, 2 * torch.rand(1, time, 2, value)]
        self.begin, self.d_end = (torch.randn(1, 2, key, value) for _ in range(2))
        self.do, self.tiles, self.programs = do, -(-value // C), Programs(warps=C // 16)
        self.sizes = (key, C, value, C, 2, 1)

    def as_tiles(self, state: torch.Tensor) -> torch.Tensor:
        """A state [1, 2, K, V] as programs hold it, [2, tiles, columns, channels]."""
        out = torch.zeros(2, C, self.tiles * C)
        out[:, : state.shape[2], : state.shape[3]] = state[0]
        return out.view(2, C, self.tiles, C).permute(0, 2, 3, 1).contiguous()

    def states_after(self, state: torch.Tensor, back: bool) -> torch.Tensor:
        """What `summarize_square_tile` makes of a state, as programs hold it."""
        added, kept = torch.full((2, 2, self.tiles, C, C), torch.nan)
        self.programs.run(
            summarize_square_tile,
            (self.tiles, 2),
            *self.inputs,
            self.do if back else None,
            added,
            kept,
            None,
            self.time,
            self.scale,
            2,
            *self.sizes,
            back,
            "ieee",
        )
        return added + kept * self.as_tiles(state)

    def outputs(self) -> torch.Tensor:
        o = torch.full(self.do.shape, torch.nan)
        self.programs.run(
            read_square_tile,
            (self.tiles, 2),
            *self.inputs,
            self.as_tiles(self.begin),
            o,
            None,
            self.time,
            self.scale,
            2,
            *self.sizes,
            "ieee",
        )
        return o

    def gradients(self) -> list[torch.Tensor]:
        key, value = self.sizes[0], self.sizes[2]
        parts = [torch.full((self.tiles, self.time, 2, key), torch.nan) for _ in range(2)]
        grads = [torch.full((self.time, 2, value), torch.nan) for _ in range(2)]
        scratch = torch.full((16, C, C), torch.nan)
        self.programs.run(
            differentiate_square_tile,
            (1, 1),
            *self.inputs,
            self.as_tiles(self.begin),
            self.as_tiles(self.d_end),
            self.do,
            scratch,
            *parts,
            *grads,
            None,
            self.time,
            self.time,
            2 * self.tiles,
            self.scale,
            2,
            *self.sizes,
            "ieee",
        )
        return [x.sum((0, 2))[None, :, None] for x in parts] + [x[None] for x in grads]


def close(found: torch.Tensor, wanted: torch.Tensor) -> bool:
    return bool((found - wanted).norm() <= CLOSE * wanted.norm())


@pytest.mark.parametrize(("time", "key", "value"), [(64, 64, 64), (13, 40, 100)], ids=["a whole chunk", "two tiles"])
def test_values_and_gradients(time: int, key: int, value: int) -> None:
    """The kernels' own source in float32, against the op in float64."""
    case = Case(time, key, value)
    inputs = [x.double().requires_grad_() for x in (*case.inputs, case.begin)]
    o, end = elementwise_longhorn(
        *inputs[:4], scale=case.scale, initial_state=inputs[4], output_final_state=True, backend="torch"
    )
    assert end is not None
    *grads, d_begin = torch.autograd.grad([o, end], inputs, [case.do.double(), case.d_end.double()])
    assert close(case.outputs(), o)
    assert close(case.states_after(case.begin, back=False), case.as_tiles(end))
    assert close(case.states_after(case.d_end, back=True), case.as_tiles(d_begin))
    assert all(close(found, wanted) for found, wanted in zip(case.gradients(), grads, strict=True))


def test_a_bad_number_spoils_what_reads_it() -> None:
    """A value its own column, a key its head, from their token on."""
    case = Case(9, 4, 3)
    case.inputs[2][0, 2, 0, 1] = float("inf")
    case.inputs[1][0, 5, 0, 2] = float("nan")
    o = case.outputs()
    assert o[0, :2].isfinite().all() and o[0, 2:, 0, 1].isnan().all()
    assert o[0, 2:5, 0, ::2].isfinite().all() and o[0, 5:].isnan().all()


@pytest.fixture
def on_hopper() -> Iterator[None]:
    with on_hopper_in("elementwise.rule"):
        yield


def launched(key: int, value: int, dtype: torch.dtype = torch.bfloat16) -> list[Compilation]:
    def step() -> None:
        q, k, v, beta = (
            torch.zeros(1, 100, heads, width, dtype=dtype, requires_grad=True)
            for heads, width in ((2, key), (2, key), (4, value), (4, value))
        )
        o, _ = elementwise_longhorn(q, k, v, beta, backend="triton")
        o.backward(torch.zeros_like(o))

    return list(recorded(step))


def names(kernels: list[Compilation]) -> set[str]:
    return {one.kernel.__name__ for one in kernels}


@pytest.mark.parametrize(("key", "value"), [(64, 64), (40, 60), (128, 128), (100, 200)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_square_tiles_are_in_gluon(on_hopper: None, key: int, value: int, dtype: torch.dtype) -> None:
    found = names(launched(key, value, dtype))
    assert found >= GLUON and not found & PLAIN


@pytest.mark.parametrize(("key", "value"), [(32, 32), (64, 100), (256, 128)])
def test_other_tiles_are_in_plain_triton(on_hopper: None, key: int, value: int) -> None:
    found = names(launched(key, value))
    assert found >= PLAIN and not found & GLUON


def test_float32_goes_token_by_token(on_hopper: None) -> None:
    assert not names(launched(64, 64, torch.float32)) & (GLUON | PLAIN)


@pytest.mark.slow
@pytest.mark.compiler
@pytest.mark.parametrize("width", [64, 128])
def test_machine_code(on_hopper: None, width: int) -> None:
    """Little is spilled, as many programs as planned fit a multiprocessor, every load is waited for."""
    for one in launched(width, width):
        name = one.kernel.__name__
        if name in GLUON:
            compiled = one.compile(90)
            fitting = 1 if name == "differentiate_square_tile" and width == 128 else 2
            assert compiled.shared <= 227 * 1024 // fitting - 1024 and compiled.stack <= 64
            assert not register_hazards(compiled.sass)
