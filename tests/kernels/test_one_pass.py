"""The forward in one pass over the chunks: its algebra, step by step in float64, and which calls take it."""

from __future__ import annotations

from collections.abc import Iterator
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fastweights.ops import delta_rule
from tests.ops.kernel_launches import Compilation, recorded

SCALE = 0.3


def solve_chunk(q: Tensor, k: Tensor, beta: Tensor, g: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """T diag(beta), P, and what remains at each token of the chunk's start, and at its end of each token."""
    G = g.cumsum(0)
    pairs = (G[:, None] - G[None, :]).tril().exp().tril()
    A = (beta[:, None] * (k @ k.T) * pairs).tril(-1)
    P = SCALE * (q @ k.T) * pairs
    return inverse_by_blocks(A) * beta[None, :], P, G.exp(), (G[-1] - G).exp()


def inverse_by_blocks(A: Tensor) -> Tensor:
    """(I + A)^-1 as `inverse_transposed` and `blocks_inverse` compute it."""
    size = A.shape[0]
    block = torch.arange(size) // 16
    own = block[:, None] == block[None, :]
    X = torch.eye(size, dtype=A.dtype)
    for row in range(size):  # a row is solved once those before it in its block are taken from it
        X = X - (A * own)[:, row, None] * X[None, row]
    N = X @ (A * ~own)
    Y = X
    for _ in range(3):
        Y = X - N @ Y
    return Y


def pass_chunk(S: Tensor, k: Tensor, v: Tensor, T: Tensor, since: Tensor, until: Tensor) -> tuple[Tensor, Tensor]:
    """S [V, K], as the kernels hold it: u^T, and S after the chunk."""
    x = v.T - since * (S @ k.T)
    u = x @ T.T
    return u, since[-1] * S + (u * until) @ k


def forward(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, g: Tensor, S: Tensor, segment: int) -> tuple[Tensor, Tensor]:
    """One head; S [V, K]. Segments of so many chunks."""
    chunks = list(zip(*(x.split(64) for x in (q, k, v, beta, g))))
    made = [solve_chunk(q, k, beta, g) for q, k, _, beta, g in chunks]
    parts = [range(i, min(i + segment, len(chunks))) for i in range(0, len(chunks), segment)]
    starts = [S]
    for part in parts[:-1]:
        R, through = torch.zeros_like(S), torch.eye(S.shape[1], dtype=S.dtype)
        for i in part:
            (_, key, value, *_), (T, _, since, until) = chunks[i], made[i]
            _, R = pass_chunk(R, key, value, T, since, until)
            _, through = pass_chunk(through, key, torch.zeros_like(key), T, since, until)
        starts.append(starts[-1] @ through + R)
    o = []
    for part, S in zip(parts, starts):
        for i in part:
            (query, key, value, *_), (T, P, since, until) = chunks[i], made[i]
            read = S @ query.T
            u, S = pass_chunk(S, key, value, T, since, until)
            o.append((read * (since * SCALE) + u @ P.T).T)
    return torch.cat(o), S


def draw(time: int, heads: int = 1, value_heads: int = 1) -> tuple[Tensor, ...]:
    torch.manual_seed(time)
    q, k = (F.normalize(torch.randn(1, time, heads, 128, dtype=torch.float64), dim=-1) for _ in range(2))
    v = torch.randn(1, time, value_heads, 128, dtype=torch.float64)
    beta, g = (torch.rand(1, time, value_heads, dtype=torch.float64) for _ in range(2))
    return q, k, v, beta, -g


@pytest.mark.parametrize("time", [1, 64, 100, 500])
def test_the_algebra(time: int) -> None:
    q, k, v, beta, g = draw(time)
    S = torch.randn(1, 1, 128, 128, dtype=torch.float64)
    wanted, end = delta_rule(
        q, k, v, beta, g=g, scale=SCALE, initial_state=S, output_final_state=True, backend="reference"
    )
    o, found = forward(*(x[0, :, 0] for x in (q, k, v, beta, g)), S[0, 0].T, segment=3)
    assert (o - wanted[0, :, 0]).abs().max() < 1e-10
    assert (found.T - end[0, 0]).abs().max() < 1e-10


@pytest.fixture
def on_hopper() -> Iterator[None]:
    """Tensors of the CPU take the kernels as those of a Hopper GPU do."""
    with (
        mock.patch("fastweights.kernels.chunk.one_pass.launches.runs_gluon", lambda device: True),
        mock.patch("fastweights.kernels.availability.INTERPRETED", True),
    ):
        yield


def launched(time: int, dtype: torch.dtype = torch.bfloat16, width: int = 128, **given: object) -> list[Compilation]:
    q, v = torch.zeros(1, time, 8, width, dtype=dtype), torch.zeros(1, time, 16, width, dtype=dtype)
    gate = torch.zeros(1, time, 16)
    arguments = {"q": q, "k": q, "v": v, "beta": gate, "g": gate, **given}
    return list(recorded(lambda: delta_rule(**arguments, backend="triton")))  # type: ignore[arg-type]


def names(kernels: list[Compilation]) -> list[str]:
    return [one.kernel.__name__ for one in kernels]


def test_a_forward_without_gradients_takes_one_pass(on_hopper: None) -> None:
    assert names(launched(8192)) == ["solve_chunks", "summarize_chunks", "read_chunks"]
    assert names(launched(300)) == ["solve_chunks", "read_chunks"]
    assert names(launched(300, g=None)) == ["solve_chunks", "read_chunks"]
    assert names(launched(300, torch.float16)) == ["solve_chunks", "read_chunks"]
    packed = torch.tensor([0, 100, 300], dtype=torch.int32)
    assert names(launched(300, cu_seqlens=packed)) == ["write_tables", "solve_chunks", "read_chunks"]


def test_every_other_call_takes_the_kernels_in_plain_triton(on_hopper: None) -> None:
    plain = ["wy_transform", "chunk_state", "chunk_output"]
    v = torch.zeros(1, 300, 16, 128, dtype=torch.bfloat16, requires_grad=True)
    assert names(launched(300, v=v)) == plain
    assert names(launched(300, torch.float32)) == plain
    assert names(launched(300, width=64)) == plain
    assert names(launched(300, write_key=torch.zeros(1, 300, 8, 128, dtype=torch.bfloat16))) == plain
    assert "solve_chunks" not in names(launched(300, g=torch.zeros(1, 300, 16, 128)))


def test_other_devices_take_the_kernels_in_plain_triton() -> None:
    with mock.patch("fastweights.kernels.availability.INTERPRETED", True):
        assert "solve_chunks" not in names(launched(300))


@pytest.mark.compiler
def test_machine_code(on_hopper: None) -> None:
    """Every kernel fits, and products run on while others are issued: where the assembler orders them one by one, it waits for
    each."""
    for one in launched(8192):
        compiled = one.compile(90)
        products = sum(x.startswith("HGMMA") for x in compiled.instructions)
        waits = sum(x.startswith("WARPGROUP.DEPBAR") for x in compiled.instructions)
        assert compiled.shared <= 227 * 1024
        assert compiled.stack <= (640 if one.kernel.__name__ == "read_chunks" else 0)
        assert products >= 16 and waits <= products / 4
