"""Output-normalised TTT's launches on Hopper GPUs: what they compute, which calls take them, and their machine code."""

from __future__ import annotations

import types
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from fastweights.ops import output_normalized_ttt
from tests.ops.kernel_launches import Compilation, recorded

from .described_gpu import on_hopper_in
from .gluon_by_tensors import Pointer, Programs, Shared, load, nothing
from .scoreboards import register_hazards

GLUON, PLAIN = "token_gradients_in_turn", "pass_gradients"


def multiply(a: Any, b: Any, sums: Tensor, **how: bool) -> Tensor:
    left, right = (x.tensor if isinstance(x, Shared) else x for x in (a, b))
    return sums + left @ right


def copy_live_rows(buffer: Shared, x: Pointer, live: Any, stride: int, masked: bool) -> None:
    row = torch.arange(buffer.shape[0])[:, None]
    buffer.store(load(x + (row * stride + torch.arange(buffer.shape[1])), row < live))


def in_pairs(x: Tensor) -> Tensor:
    """Columns in the order of `as_left`."""
    return x.reshape(len(x), -1, 4, 2).transpose(2, 3).reshape(x.shape)


def programs(warps: int) -> Programs:
    found = Programs(warps)
    found.language.int32 = torch.int32
    found.language.NVMMASharedLayout = types.SimpleNamespace(get_default_for=nothing)
    found.known |= {
        "warpgroup_mma": multiply, "warpgroup_mma_wait": lambda count, deps: deps[0] if len(deps) == 1 else deps,
        "copy_rows": copy_live_rows, "as_left": in_pairs, "show_to_products": nothing, "nearest_tf32": lambda x: x,
        "to_float_or_nan": lambda x: x, "tokens_of_sequence": lambda edges, n, T: (torch.tensor(0), torch.tensor(T)),
        "pieces_of_sequence": lambda edges, n, T, length, least: (torch.tensor(0), torch.tensor(-(-T // length))),
    }  # fmt: skip
    return found


class Case:
    """A sequence of two chunks and a head of two, in float64; z, r, p and what depends on them are any numbers."""

    def __init__(self, time: int, width: int) -> None:
        torch.manual_seed(0)
        self.time, self.width = time, width
        self.q, self.k, self.v, self.do, self.du, self.z = (
            torch.randn(time, 2, width, dtype=torch.float64) / width**0.5 for _ in range(6)
        )
        self.gamma, self.kept = (torch.rand(time, 2, *more, dtype=torch.float64) for more in ((), (4,)))
        self.d_end = torch.randn(2, width, width, dtype=torch.float64)

    def systems(self, head: int, first: int) -> tuple[Tensor, Tensor, Tensor]:
        """Of the 16 tokens from `first` on: M, N and (I - L)^-1."""
        some = slice(first, min(first + 16, self.time))
        pad = [16 - (some.stop - some.start)]
        k, v, z = (torch.nn.functional.pad(x[some, head], (0, 0, 0, *pad)) for x in (self.k, self.v, self.z))
        gain = torch.nn.functional.pad(self.gamma[some, head], (0, *pad))
        _r, p, cubed, turn = torch.nn.functional.pad(self.kept[some, head], (0, 0, 0, *pad)).unbind(-1)
        A = (k @ k.T).triu(1)
        M = torch.linalg.inv(torch.eye(16, dtype=torch.float64) + A * gain * p)
        N = M @ A
        both = torch.stack([z, v], 1).reshape(32, -1)
        with_z, with_v, N2 = both @ z.T, both @ v.T, N.repeat_interleave(2, 0)
        of_a = N2 * (with_z * (gain * turn) - with_v * (gain * cubed))
        L = torch.stack([of_a, -N2 * with_z * (gain * cubed)], 2).reshape(32, 32)
        return M, N, torch.linalg.inv(torch.eye(32, dtype=torch.float64) - L)

    def by_tokens(self, head: int) -> tuple[Tensor, ...]:
        """-dz, dv, dgamma, the state's gradient at the chunks' ends and at the start, token by token."""
        L, dz, dv = self.d_end[head].clone(), torch.zeros_like(self.z[:, 0]), torch.zeros_like(self.z[:, 0])
        dgamma, ends = torch.zeros(self.time, dtype=torch.float64), []
        for first in reversed(range(0, self.time, 64)):
            chunk = range(first, min(first + 64, self.time))
            ends.append(L.clone())
            for t in reversed(chunk):
                z, v, (r, p, cubed, turn) = self.z[t, head], self.v[t, head], self.kept[t, head]
                du = self.du[t, head] + self.k[t, head] @ L
                a, b, dh = z @ du, v @ du, self.gamma[t, head] * du
                dz[t] = (turn * (z @ dh) - cubed * (v @ dh)) * z - cubed * (z @ dh) * v - p * dh
                dv[t] = r * dh - cubed * (z @ dh) * z
                dgamma[t] = r * b - p * a
                L += torch.outer(self.k[t, head], dz[t])
            L += self.q[chunk, head].T @ self.do[chunk, head]
        return -dz, dv, dgamma, torch.stack(ends[::-1]), L


@pytest.mark.parametrize(("time", "width"), [(100, 64), (64, 128), (7, 64)])
def test_gradients_are_those_of_the_tokens(time: int, width: int) -> None:
    from fastweights.kernels.output_normalized_ttt.gradients_on_hopper import token_gradients_in_turn

    case, chunks = Case(time, width), -(-time // 64)
    systems = [[case.systems(head, first) for head in range(2)] for first in range(0, chunks * 64, 16) if first < time]
    through, turned, solved = (torch.stack([torch.stack([x[i] for x in row]) for row in systems]) for i in range(3))
    dz, dv, dgamma = torch.empty(time, 2, width), torch.empty(time, 2, width), torch.empty(time, 2)
    states, start = torch.empty(chunks, 2, width, width), torch.empty(1, 2, width, width)
    programs(width // 16).run(
        token_gradients_in_turn, (1, 2), *(x.float() for x in (case.q, case.k, case.v, case.gamma, case.do, case.d_end)),
        case.z.float(), case.kept.float(), case.du.float(), through.float(), turned.float(), solved.float(), dz, dv, dgamma,
        states, start, None, time, 2, width, width, 1, 1,
    )  # fmt: skip
    for head in range(2):
        got = (dz[:, head], dv[:, head], dgamma[:, head], states[:, head], start[0, head])
        for found, wanted in zip(got, case.by_tokens(head)):
            torch.testing.assert_close(found, wanted.float(), rtol=1e-4, atol=1e-4 * wanted.abs().max().item())


@pytest.fixture
def on_hopper() -> Iterator[None]:
    with on_hopper_in("output_normalized_ttt.rule"):
        yield


def launched(key: int, value: int, dtype: torch.dtype = torch.bfloat16) -> dict[str, Compilation]:
    """The kernels of a forward and a backward from a first state, by name."""

    def step() -> None:
        q, k = (torch.zeros(1, 100, 2, key, dtype=dtype, requires_grad=True) for _ in range(2))
        v = torch.zeros(1, 100, 4, value, dtype=dtype, requires_grad=True)
        gamma = torch.zeros(1, 100, 4, dtype=dtype, requires_grad=True)
        state = torch.zeros(1, 4, key, value, requires_grad=True)
        o, end = output_normalized_ttt(
            q, k, v, gamma, initial_state=state, output_final_state=True, backend="triton"
        )  # fmt: skip
        torch.autograd.backward([o, end], [torch.zeros_like(o), torch.zeros_like(end)])

    return {one.kernel.__name__: one for one in recorded(step)}


@pytest.mark.parametrize("width", [64, 128])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_square_states_are_in_gluon(on_hopper: None, width: int, dtype: torch.dtype) -> None:
    found = set(launched(width, width, dtype))
    assert GLUON in found and PLAIN not in found


@pytest.mark.parametrize(
    ("key", "value", "dtype"), [(64, 128, torch.bfloat16), (48, 48, torch.bfloat16), (64, 64, torch.float32)]
)
def test_others_are_in_plain_triton(on_hopper: None, key: int, value: int, dtype: torch.dtype) -> None:
    found = set(launched(key, value, dtype))
    assert PLAIN in found and GLUON not in found


@pytest.mark.slow
@pytest.mark.compiler
@pytest.mark.parametrize("width", [64, 128])
def test_machine_code(on_hopper: None, width: int) -> None:
    """Nothing is spilled, products are waited for at four places and after a chunk, and every load is waited for."""
    compiled = launched(width, width)[GLUON].compile(90)
    assert compiled.shared <= 64 * 1024 and not compiled.stack
    assert sum("WARPGROUP.DEPBAR" in line for line in compiled.sass.splitlines()) <= 5
    assert not register_hazards(compiled.sass)
