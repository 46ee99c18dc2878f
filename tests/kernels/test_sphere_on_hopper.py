"""Lattice's launches on Hopper GPUs, encode and similarity: what they compute, which calls take them, and their machine code."""

from __future__ import annotations

import re
import types
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from fastweights.ops import lattice
from tests.fast_set import fast_where
from tests.ops.kernel_launches import Compilation, recorded

from .described_gpu import on_hopper_in
from .gluon_by_tensors import Pointer, Programs, Shared, load, nothing
from .scoreboards import register_hazards

GLUON, GLUON_BACK = "slots_in_turn", "slots_back_in_turn"
PLAIN, PLAIN_BACK = "turn_slots", "turn_slots_back"
OBJECTIVES = ["encode", "similarity"]


def copy_tile(buffer: Shared, x: Pointer, mask: Any = None) -> None:
    buffer.store(load(x, mask))


def of_tensors(function: Any, a: Any, b: Any, propagate_nan: Any = None) -> Tensor:
    return function(torch.as_tensor(a), torch.as_tensor(b))


def split_in_two(x: Tensor, dtype: Any) -> tuple[Tensor, Tensor]:
    high = x.bfloat16().float()
    return high, high - x


def programs(warps: int) -> Programs:
    found = Programs(warps)
    found.language.int32, found.language.SwizzledSharedLayout = torch.int32, nothing
    for name in ("minimum", "maximum"):
        setattr(found.language, name, partial(of_tensors, getattr(torch, name)))
    found.language.max, found.language.rsqrt = torch.amax, torch.rsqrt
    found.language.PropagateNan = types.SimpleNamespace(ALL=0)
    found.language.broadcast = torch.broadcast_tensors
    found.language.max_contiguous = found.language.multiple_of = lambda x, count: x
    found.known |= {
        "async_copy": types.SimpleNamespace(
            commit_group=nothing, wait_group=nothing, async_copy_global_to_shared=copy_tile
        ),
        "share": lambda x, lane: x[:, lane : lane + 1].expand_as(x),
        "lanes_before": lambda x, by: torch.cat([x[:, :by], x[:, :-by]], 1),
        "widen": lambda x: x, "split_in_two": split_in_two, "to_float_or_nan": lambda x: x,
        "inverse_root": lambda x, dtype: x.rsqrt(), "find_edges": lambda edges, n, T: (
            torch.tensor(0), torch.tensor(T), torch.tensor(0)
        ),
    }  # fmt: skip
    return found


class Case:
    """A sequence and a head of two, in float64. b, states and the gradient at the end are any numbers."""

    def __init__(self, time: int, K: int, V: int, objective: str) -> None:
        torch.manual_seed(0)
        self.time, self.objective, self.chunks = time, objective, -(-time // 16)
        self.q, self.k = (torch.randn(time, 2, K, dtype=torch.float64) / 4 for _ in range(2))
        self.v, self.do = (torch.randn(time, 2, V, dtype=torch.float64) / V**0.5 for _ in range(2))
        self.gamma = torch.rand(time, 2, dtype=torch.float64)
        self.decay = 1 - torch.rand(time, 2, dtype=torch.float64) / 8
        self.b = torch.rand(self.chunks, 2, K, 16, dtype=torch.float64) - 0.5
        self.first = torch.rand(1, 2, K, dtype=torch.float64) + 0.5
        self.states = torch.randn(self.chunks, 2, K, V, dtype=torch.float64) / V**0.5
        self.d_end = torch.randn(2, K, V, dtype=torch.float64)

    def steps(self, head: int, t: int) -> tuple[Tensor, ...]:
        """f, w and what the gradient of b takes of A and of D."""
        b = self.b[t // 16, head, :, t % 16]
        gain = self.gamma[t, head] * (self.first[0, head] if t == 0 else 1)
        d, error = self.decay[t, head], self.k[t, head] - (b if self.objective == "encode" else 0)
        a, across = gain * error, ((self.v[t, head] ** 2).sum() - b * b).clamp(min=0)
        inverse = (d * d + a * a * across).rsqrt()
        f, w = (d - a * b) * inverse, a * inverse
        of_A, of_D = w * (w * b * f - 1), w**3 * b
        if self.objective == "encode":
            of_A = of_A + gain * (inverse * b + across * w * inverse * f)
            of_D = of_D - gain * (inverse - across * w * inverse * w)
        return f, w, of_A, of_D

    def by_tokens(self, head: int, of_outputs: bool) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """A, D, the gradient at every chunk's end, its product with the slots at the start, and the gradient at the start, token
        by token; of the outputs of every chunk alone or of all."""
        K = self.states.shape[2]
        A, D = (torch.zeros(self.chunks, K, 16, dtype=torch.float64) for _ in range(2))
        L, ends, starts = self.d_end[head].clone(), [], []
        for chunk in reversed(range(self.chunks)):
            L = torch.zeros_like(L) if of_outputs else L
            tokens, s = range(16 * chunk, min(16 * chunk + 16, self.time)), [self.states[chunk, head]]
            ends.append(L.clone())
            for t in tokens:
                f, w, _, _ = self.steps(head, t)
                s.append(f[:, None] * s[-1] + torch.outer(w, self.v[t, head]))
            for t in reversed(tokens):
                f, _, of_A, of_D = self.steps(head, t)
                L = L + torch.outer(self.q[t, head], self.do[t, head])
                A[chunk, :, t % 16], D[chunk, :, t % 16] = (L * s[t % 16]).sum(1), L @ self.v[t, head]
                x = 0 * f if of_outputs else of_A * A[chunk, :, t % 16] + of_D * D[chunk, :, t % 16]
                L = f[:, None] * L + torch.outer(x, self.v[t, head])
            starts.append((L * s[0]).sum(1))
            L = L - starts[-1][:, None] * s[0]
        return A, D, torch.stack(ends[::-1]), torch.stack(starts[::-1]), L

    def pairs(self) -> Tensor:
        """As `prepare_turns_back` has them."""
        h = torch.nn.functional.pad(self.v, (0, 0, 0, 0, 0, -self.time % 16)).unflatten(0, (-1, 16)).transpose(1, 2)
        inner = h @ h.mT
        inner[:, :, 0] = inner.diagonal(dim1=2, dim2=3)
        return torch.cat([h @ self.states.mT, inner], -1)


@fast_where(lambda given: given["time"] != 55)
@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize(("time", "K", "V", "warps"), [(55, 64, 64, 2), (32, 64, 128, 4), (7, 32, 64, 4)])
def test_gradients_in_slots_are_those_of_the_tokens(objective: str, time: int, K: int, V: int, warps: int) -> None:
    from fastweights.kernels.sphere.turns_back_on_hopper import slots_back_in_turn

    case = Case(time, K, V, objective)
    own = [case.by_tokens(head, True) for head in range(2)]
    A, D, at_start = (torch.stack([one[i] for one in own], 1).float() for i in (0, 1, 3))
    adjoints, start = torch.empty(case.chunks, 2, K, V), torch.empty(1, 2, K, V)
    given = (case.q, case.k, case.v, case.gamma, case.decay, case.do, case.d_end, case.b, case.first)
    programs(warps).run(
        slots_back_in_turn, (1, 2, K // (8 * warps)), *(x.float() for x in given), A, D, case.pairs().float(), at_start,
        case.states.float(), adjoints, start, None, time, 2, K, V, objective, 1, 1, 1,
    )  # fmt: skip
    for head in range(2):
        wanted_A, wanted_D, ends, _, wanted_start = case.by_tokens(head, False)
        A[-1, head, :, (time - 1) % 16 + 1 :] = D[-1, head, :, (time - 1) % 16 + 1 :] = 0  # nobody reads them
        got = (A[:, head], D[:, head], adjoints[:, head], start[0, head])
        for found, wanted in zip(got, (wanted_A, wanted_D, ends, wanted_start)):
            torch.testing.assert_close(found, wanted.float(), rtol=1e-4, atol=1e-4 * wanted.abs().max().item())


def slots_by_tokens(case: Case, start: Tensor, head: int) -> tuple[Tensor, ...]:
    """f, w, b, the slots at every chunk's start and at the end, token by token."""
    S, f, w, along, states = start[0, head], [], [], [], []
    length = S.norm(dim=1)
    S = S / length[:, None]
    for t in range(case.time):
        if t % 16 == 0:
            states.append(S)
        h, gain = case.v[t, head], case.gamma[t, head] * (1 / length**2 if t == 0 else 1)
        b, d = S @ h, case.decay[t, head]
        a = gain * (case.k[t, head] - (b if case.objective == "encode" else 0))
        inverse = (d * d + a * a * (h @ h - b * b)).rsqrt()
        f.append((d - a * b) * inverse)
        w.append(a * inverse)
        along.append(b)
        S = f[-1][:, None] * S + torch.outer(w[-1], h)
    pad = (0, -case.time % 16)
    steps = [
        torch.nn.functional.pad(torch.stack(x, 1), pad).unflatten(1, (-1, 16)).transpose(0, 1) for x in (f, w, along)
    ]
    steps[0][-1, :, 16 - pad[1] :] = 1
    return *steps, torch.stack(states), S


@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize(("time", "K", "V", "warps"), [(55, 64, 64, 2), (32, 64, 128, 4), (7, 128, 128, 4)])
def test_slots_are_those_of_the_tokens(objective: str, time: int, K: int, V: int, warps: int) -> None:
    from fastweights.kernels.sphere.turns_on_hopper import slots_in_turn

    case = Case(time, K, V, objective)
    h = torch.nn.functional.pad(case.v, (0, 0, 0, 0, 0, 32 + -time % 16)).transpose(0, 1)
    gram = torch.stack([h[:, t : t + 16] @ h[:, t : t + 32].mT for t in range(0, case.chunks * 16, 16)])
    gram = gram.unflatten(3, (4, 8)).mT.contiguous()
    kept, turned, along = (torch.empty(case.chunks, 2, K, 16) for _ in range(3))
    states, start = torch.empty(case.chunks, 2, K, V), torch.randn(1, 2, K, V, dtype=torch.float64)
    first, end = torch.empty(1, 2, K), torch.empty(1, 2, K, V)
    grown = torch.full((1, 2, K // (16 if K == 64 else 32)), -1.0)
    given = (case.k, case.v, case.gamma, case.decay, start, gram)
    programs(warps).run(
        slots_in_turn, (1, 2, K // (8 * warps)), *(x.float() for x in given), kept, turned, along, states, first, end, grown,
        None, time, 2, K, V, objective, 1, 1, 1,
    )  # fmt: skip
    torch.testing.assert_close(first.double(), 1 / start.norm(dim=3) ** 2, rtol=1e-5, atol=0)
    assert (grown >= 1).all() and (grown < 16).all()
    for head in range(2):
        got = (kept[:, head], turned[:, head], along[:, head], states[:, head], end[0, head])
        for found, wanted in zip(got, slots_by_tokens(case, start, head)):
            torch.testing.assert_close(found, wanted.float(), rtol=1e-4, atol=1e-4 * wanted.abs().max().item())


@pytest.fixture
def on_hopper() -> Iterator[None]:
    with on_hopper_in("sphere.rule"):
        yield


def launched(
    key: int,
    value: int,
    objective: str = "encode",
    dtype: torch.dtype = torch.bfloat16,
    normalize: bool = True,
    decay: bool = True,
) -> dict[str, Compilation]:
    """The kernels of a forward and a backward from a first state, by name."""

    def step() -> None:
        q, k = (torch.zeros(1, 100, 2, key, dtype=dtype, requires_grad=True) for _ in range(2))
        v = torch.zeros(1, 100, 4, value, dtype=dtype, requires_grad=True)
        gamma, kept = (torch.zeros(1, 100, 4, dtype=dtype, requires_grad=True) for _ in range(2))
        state = torch.zeros(1, 4, key, value, requires_grad=True)
        o, end = lattice(
            q, k, v, gamma, objective=objective, decay=kept if decay else None, normalize=normalize, initial_state=state,
            output_final_state=True, backend="triton",
        )  # fmt: skip
        torch.autograd.backward([o, end], [torch.zeros_like(o), torch.zeros_like(end)])

    return {one.kernel.__name__: one for one in recorded(step)}


@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_square_states_are_in_gluon(on_hopper: None, objective: str, dtype: torch.dtype) -> None:
    """With 64 channels forward only: backward the kernel in plain Triton is as fast or faster."""
    found = launched(128, 128, objective, dtype)
    assert {GLUON, GLUON_BACK} <= set(found) and not {PLAIN, PLAIN_BACK} & set(found)
    assert found["prepare_turns_back"].signature["at_start"] == "*fp32"
    found = launched(64, 64, objective, dtype)
    assert {GLUON, PLAIN_BACK} <= set(found) and not {PLAIN, GLUON_BACK} & set(found)
    assert found["prepare_turns_back"].signature["at_start"] == "constexpr"  # None: nobody reads it


@pytest.mark.parametrize(
    ("key", "value", "dtype"),
    [(64, 128, torch.bfloat16), (128, 64, torch.bfloat16), (48, 48, torch.bfloat16), (128, 128, torch.float32)],
)
def test_others_are_in_plain_triton(on_hopper: None, key: int, value: int, dtype: torch.dtype) -> None:
    found = set(launched(key, value, dtype=dtype))
    assert {PLAIN, PLAIN_BACK} <= found and not {GLUON, GLUON_BACK} & found


@pytest.mark.parametrize("options", [{"objective": "decode"}, {"normalize": False}], ids=str)
def test_what_goes_token_after_token_takes_no_chunks(on_hopper: None, options: dict[str, Any]) -> None:
    assert not {GLUON, GLUON_BACK, PLAIN, PLAIN_BACK} & set(launched(128, 128, **options))


def longest_loop(sass: str) -> list[str]:
    """Its instructions, of machine code with its addresses."""
    code = [(int(at, 16), text) for at, text in re.findall(r"/\*([0-9a-f]{4,})\*/\s+(.*?)\s*;", sass)]
    jumps = [(int(jump[1], 16), at) for at, text in code if (jump := re.search(r"\bBRA\b.* 0x([0-9a-f]+)", text))]
    begin, end = max(jumps, key=lambda jump: jump[1] - jump[0])
    return [text for at, text in code if begin <= at <= end]


@pytest.mark.compiler
@pytest.mark.parametrize(
    ("name", "width", "objective", "decay", "registers", "spilled"),
    [
        (GLUON, 64, "encode", True, 168, 0),
        pytest.param(GLUON, 128, "encode", True, 232, 0, marks=pytest.mark.slow),
        pytest.param(GLUON, 128, "similarity", False, 232, 0, marks=pytest.mark.slow),
        pytest.param(GLUON_BACK, 128, "encode", True, 255, 0, marks=pytest.mark.slow),
        pytest.param(GLUON_BACK, 128, "encode", False, 255, 8, marks=pytest.mark.slow),
        pytest.param(GLUON_BACK, 128, "similarity", True, 255, 0, marks=pytest.mark.slow),
    ],
)
def test_machine_code(
    on_hopper: None, name: str, width: int, objective: str, decay: bool, registers: int, spilled: int
) -> None:
    """A chunk is read between two barriers, nothing is spilled, and every load is waited for."""
    compiled = launched(width, width, objective, decay=decay)[name].compile(90)
    assert compiled.shared <= 64 * 1024 and compiled.stack <= spilled and compiled.registers <= registers
    assert sum("BAR.SYNC" in line for line in longest_loop(compiled.sass)) == 2
    assert not register_hazards(compiled.sass)
