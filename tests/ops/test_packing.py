"""Around the memories a document has the same bits whichever documents are packed into its row, and wherever it starts in it."""

from __future__ import annotations

import pytest

from fastweights.kernels.availability import HAS_TRITON, INTERPRETED
from tests.kernels.cases import DEVICE

from .packed_documents import AROUND_MEMORIES, PACKS, around_memories, assert_same_bits, with_gradients

# Channels in whole groups of 16: a CPU computes these at a time, and the rest of a row in another way.
LENGTHS, CHANNELS, HEAD = (33, 70, 1, 9, 39, 5), 64, 32
FAST_BY_KERNELS = ("gated norm", "residual norm", "SwiGLU")


def marks(name: str, backend: str) -> list[pytest.MarkDecorator]:
    """By kernels most are in the slow set: in the interpreter they take seconds."""
    if backend == "torch":
        return []
    return [pytest.mark.kernels] + [pytest.mark.slow] * (name not in FAST_BY_KERNELS)


@pytest.mark.parametrize(
    ("name", "backend"),
    [
        pytest.param(name, backend, id=f"{name}-{backend}", marks=marks(name, backend))
        for name in AROUND_MEMORIES
        for backend in ("torch", "triton")
    ],
)
def test_neighbours_and_places_change_no_bit(name: str, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of outputs and gradients. tests/gpu/test_batch_invariance.py has larger sizes, in bfloat16."""
    if HAS_TRITON and INTERPRETED:
        from fastweights.kernels.pointwise import short_convolution

        monkeypatch.setattr(short_convolution, "ENOUGH_PROGRAMS", 1)  # tiles of several rows, as long inputs have them
    device = "cpu" if backend == "torch" else DEVICE
    call = around_memories(name, CHANNELS, HEAD, device, backend)
    for one in (call, with_gradients(call)):
        assert_same_bits(one, LENGTHS, [(CHANNELS,)] * 2, PACKS, device=device)
