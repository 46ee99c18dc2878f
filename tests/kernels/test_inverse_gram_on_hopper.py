"""The launches of the inverse Gram matrix on Hopper GPUs: which calls take them, and their machine code."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from fastweights.kernels.inverse_gram.rule import GramInputs, InverseGram
from fastweights.kernels.runtime.workspace import TensorSpec
from fastweights.ops.shared.inverse_gram import apply_inverse_gram
from tests.ops.kernel_launches import Compilation, recorded

from .described_gpu import on_hopper_in
from .scoreboards import register_hazards

SUMMED, REFRESHED = (
    {"solve_in_turn", "answer_tokens", "gradients_in_turn"},
    {"carry_in_turn", "factor_tokens", "answer_tokens", "adjoint_of_chunk", "gradients_of_chunk"},
)
# Of a kernel, how often it waits for products.
WAITS = {
    "solve_in_turn": 4, "gradients_in_turn": 3, "carry_in_turn": 10, "factor_tokens": 1, "answer_tokens": 2,
    "adjoint_of_chunk": 8, "gradients_of_chunk": 10,
}  # fmt: skip
PLAIN = {
    "solve_segment", "solve_tokens", "segment_gradients", "carry_inverse", "eliminate_tokens", "chunk_adjoint",
    "finish_gradients",
}  # fmt: skip


@pytest.fixture
def on_hopper() -> Iterator[None]:
    with on_hopper_in("inverse_gram.rule"):
        yield


def launched(width: int, refreshed: bool, dtype: torch.dtype = torch.bfloat16) -> dict[str, Compilation]:
    """The kernels of a forward and a backward from a first state, by name."""

    def step() -> None:
        u, k = (torch.zeros(1, 100, 2, width, dtype=dtype, requires_grad=True) for _ in range(2))
        state = torch.zeros(1, 2, width, width, dtype=torch.float32 if refreshed else torch.float64, requires_grad=True)
        shared = {
            "ridge": 1.0, "initial_state": state, "heads": 2, "dtype": torch.float32, "final": True, "cu_seqlens": None,
            "backend": "triton",
        }  # fmt: skip
        if refreshed:
            y, end = apply_inverse_gram(u, k, refresh=torch.zeros(1, 100, 1), **shared)
        else:
            y, end = apply_inverse_gram(u, gain=torch.zeros(1, 100, 2, dtype=dtype, requires_grad=True), **shared)
        torch.autograd.backward([y, end], [torch.zeros_like(y), torch.zeros_like(end)])

    return {one.kernel.__name__: one for one in recorded(step)}


@pytest.mark.parametrize("width", [64, 128])
@pytest.mark.parametrize(("refreshed", "gluon"), [(False, SUMMED), (True, REFRESHED)], ids=["summed", "refreshed"])
def test_chunks_are_solved_in_gluon(on_hopper: None, width: int, refreshed: bool, gluon: set[str]) -> None:
    found = set(launched(width, refreshed))
    assert found >= gluon and not found & PLAIN


@pytest.mark.parametrize("refreshed", [False, True], ids=["summed", "refreshed"])
def test_every_other_call_takes_the_kernels_in_plain_triton(
    on_hopper: None, monkeypatch: pytest.MonkeyPatch, refreshed: bool
) -> None:
    def takes_plain(*call: object) -> bool:
        found = set(launched(*call))  # type: ignore[arg-type]
        return bool(found & PLAIN) and not found & (SUMMED | REFRESHED)

    for call in ((48, refreshed), (64, refreshed, torch.float16), (64, refreshed, torch.float32)):
        assert takes_plain(*call)
    monkeypatch.setattr("fastweights.kernels.inverse_gram.rule.runs_gluon", lambda device: False)
    assert takes_plain(64, refreshed)


@pytest.mark.parametrize(
    ("rows", "heads", "width", "chunks"),
    [(4, 8, 128, 8), (8, 8, 128, 16), (8, 12, 128, 8), (16, 8, 128, 16), (8, 8, 64, 4)],
)
def test_long_segments_take_no_more_rounds_of_programs(
    on_hopper: None, rows: int, heads: int, width: int, chunks: int
) -> None:
    u = TensorSpec((rows, 2048, heads, width), torch.bfloat16)
    G = TensorSpec((rows, heads, width, width), torch.float64)
    assert InverseGram(GramInputs(u, None, None, G), torch.device("cpu"), (1.0,)).length == 64 * chunks


@pytest.mark.slow
@pytest.mark.compiler
@pytest.mark.parametrize("width", [64, 128])
@pytest.mark.parametrize(
    ("refreshed", "gluon"),
    [pytest.param(False, SUMMED, id="summed"), pytest.param(True, REFRESHED, id="refreshed")],
)
def test_machine_code(on_hopper: None, width: int, refreshed: bool, gluon: set[str]) -> None:
    """Programs of 64 channels share a multiprocessor, little is spilled, products run on while others are issued, and every load
    is waited for."""
    spilled = {
        "solve_in_turn": 672, "gradients_in_turn": 176, "carry_in_turn": 456, "answer_tokens": 96, "adjoint_of_chunk": 184,
        "gradients_of_chunk": 96,
    }  # fmt: skip
    for name, one in launched(width, refreshed).items():
        if name in gluon:
            compiled = one.compile(90)
            assert compiled.shared <= (227 if width == 128 else 113) * 1024 and compiled.stack <= spilled.get(name, 0)
            assert not register_hazards(compiled.sass)
            waits = sum("WARPGROUP.DEPBAR" in line for line in compiled.sass.splitlines())
            assert waits <= WAITS[name], f"{name} waits for products one by one: {waits}"
