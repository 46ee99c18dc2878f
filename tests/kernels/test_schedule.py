"""A kind of call is gone through once: its kernels are compiled side by side, its launches kept, its memory arranged."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations
from pathlib import Path
from threading import current_thread, main_thread
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fastweights.testing import OpCase
from tests.contract.compare import values_and_gradients
from tests.ops.kernel_launches import kinds_anew

from .cases import KERNEL_CASES, draw_states

pytestmark = pytest.mark.compiler


@pytest.fixture
def described_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A GPU that is described and not there, and no kind of call known."""
    from triton.backends.compiler import GPUTarget
    from triton.runtime.driver import driver

    monkeypatch.setattr("fastweights.kernels.availability.INTERPRETED", True)
    described = mock.Mock()
    described.get_current_device.return_value = described.get_current_stream.return_value = 0
    described.get_current_target.return_value = GPUTarget("cuda", 90, 32)
    before = driver._active
    driver.set_active(described)
    with kinds_anew():
        yield
    driver._active = before


class Compiled:
    """In place of a compiled kernel."""

    function, packed_metadata = 7, (1,)

    def __init__(self, kernel: Any, launches: list[tuple[Any, ...]]) -> None:
        self.kernel, self.launches = kernel, launches

    def run(self, *arguments: Any) -> None:
        self.launches.append((self.kernel.__name__, *arguments))

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *arguments, stream: self.run(*grid, stream, 7, (1,), None, None, None, *arguments)


@pytest.fixture
def launches(described_gpu: None) -> Iterator[list[tuple[Any, ...]]]:
    """Name and arguments of what is launched; nothing is compiled."""
    from triton.runtime.jit import JITFunction

    from fastweights.kernels.runtime.jit import Kernel

    found: list[tuple[Any, ...]] = []
    with (
        mock.patch.object(JITFunction, "run", lambda kernel, *places, **rest: Compiled(kernel, found)),
        mock.patch.object(Kernel, "key", lambda *given: object()),
    ):
        yield found


def call(case: OpCase, time: int) -> None:
    """Forward and backward, with states and their gradients."""
    inputs = case.draw(time=time, batch=2, heads=1, value_heads=2, dtype=torch.bfloat16)
    states = tuple(s.clone().requires_grad_() for s in draw_states(case, inputs, 2))
    values_and_gradients(case, inputs, states, backend="triton")


@pytest.mark.parametrize("time", [200, 70])
@pytest.mark.parametrize("name", KERNEL_CASES)
def test_the_same_again(name: str, time: int, launches: list[tuple[Any, ...]], short_segments: None) -> None:
    """What is kept launches what was recorded, elsewhere in memory."""
    from triton import knobs

    def without_places(launch: tuple[Any, ...]) -> list[Any]:
        return [
            x if isinstance(x, (str, bool)) or x is None or not isinstance(x, int) or x < 2**20 else "place"
            for x in launch
        ]

    call(KERNEL_CASES[name], time)
    first, launches[:] = list(launches), []
    call(KERNEL_CASES[name], time)
    assert first and list(map(without_places, first)) == list(map(without_places, launches))
    launches[:] = []
    knobs.runtime.launch_enter_hook.add(print)  # a profiler
    try:
        call(KERNEL_CASES[name], time)
    finally:
        knobs.runtime.launch_enter_hook.remove(print)
    assert list(map(without_places, first)) == list(map(without_places, launches))


def test_places_in_memory(launches: list[tuple[Any, ...]]) -> None:
    """A launch is given the memory of the call's own tensors, and what lives side by side lies apart."""
    from fastweights.kernels.chunk.cumsum import cumulate
    from fastweights.kernels.runtime.compiling import Launch
    from fastweights.kernels.runtime.launch_plan import Schedule
    from fastweights.kernels.runtime.workspace import Buffer

    table = torch.zeros(2, dtype=torch.int32)
    g, first, second, out, missing = (*(Buffer((64, 8), torch.float32) for _ in range(4)), None)
    chain = [(g, first), (first, second), (second, out)]
    steps = [Launch(cumulate, (n, 1), (x, y, table, 8), {"PH": 8, "HEADS_G": 1}) for n, (x, y) in enumerate(chain, 1)]
    nothing = Launch(cumulate, (0, 1), (g, first, table, 8), {"PH": 8, "HEADS_G": 1})
    schedule = Schedule([*steps, nothing], (missing, g), (out, missing), torch.device("cpu"))
    for _ in range(2):
        launches[:] = []
        given = torch.zeros(64, 8)
        o, none = schedule.play((None, given))
        assert none is None and o is not None and o.shape == (64, 8) and o.dtype == torch.float32
        front = [(n, 1, 1, 0, 7, (1,), None, None, None) for n in (1, 2, 3)]
        assert [launch[:10] for launch in launches] == [("cumulate", *f) for f in front]
        (a, b, *rest), (b_again, c, *_), (c_again, d, *_) = (launch[10:] for launch in launches)
        assert (a, d, b, c, rest) == (given.data_ptr(), o.data_ptr(), b_again, c_again, [table.data_ptr(), 8, 8, 1])
        assert abs(b - c) >= 64 * 8 * 4


def test_kinds() -> None:
    """A call is known again by all that its launches depend on."""
    from fastweights.kernels.chunk.node import MEMORY
    from fastweights.kernels.chunk.sizes import Inputs
    from fastweights.kernels.runtime.call import call_of
    from fastweights.ops.framework.sequences import Sequences

    x, row = torch.zeros(1, 70, 2, 16), Sequences(1, 70)
    known = {"rule": MEMORY, "x": Inputs(x, x, x), "sequences": row, "numbers": (1.0,), "final": True, "learns": True}
    others = [
        {"x": Inputs(x, x, x, beta=x[..., 0])}, {"x": Inputs(x, x, x, g=x[..., 0])}, {"x": Inputs(x, x, x, g=x)},
        {"x": Inputs(*[x.bfloat16()] * 3)}, {"x": Inputs(x, x, x.repeat(1, 1, 2, 1))}, {"numbers": (2.0,)}, {"final": False},
        {"learns": False}, {"sequences": Sequences(1, 70, (30, 40))}, {"sequences": Sequences(1, 70, (40, 30))},
    ]  # fmt: skip
    with kinds_anew():
        assert call_of(**known) is call_of(**{**known, "x": Inputs(*[torch.ones(1, 70, 2, 16)] * 3)})
        assert len({call_of(**{**known, **other}) for other in ({}, *others)}) == 1 + len(others)


def test_nothing_is_left_to_compile(described_gpu: None) -> None:
    from fastweights.kernels.runtime import compiling
    from fastweights.kernels.runtime.jit import Kernel

    made: list[Any] = []
    make_ready, loaded = compiling.make_ready, []

    def kept(found: Any) -> None:
        loaded.append(compiling.finished(found))

    def ready(launches: list[Any]) -> list[Any]:
        """Twice, the second time without a compiler."""
        first = make_ready(launches)
        with mock.patch.object(Kernel, "_do_compile", side_effect=AssertionError("compiles again")):
            assert make_ready(launches) == first
        made.extend(first)
        return [Compiled(launch.kernel, []) for launch in launches]

    with (
        mock.patch.object(compiling, "load", kept),
        mock.patch("fastweights.kernels.runtime.launch_plan.make_ready", ready),
    ):
        call(KERNEL_CASES["linear_attention-none"], 70)
    assert len(made) >= 5 and all(kernel.asm["cubin"] for kernel in made)
    assert {id(kernel) for kernel in loaded if kernel is not None} <= {id(kernel) for kernel in made}


def test_a_thread_that_fails_costs_time_alone(
    described_gpu: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One kernel does not compile beside others; by itself it does."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    from fastweights.kernels.chunk.cumsum import cumulate
    from fastweights.kernels.runtime import compiling
    from fastweights.kernels.runtime.jit import Kernel
    from fastweights.kernels.runtime.workspace import Buffer

    x, parse = Buffer((8,), torch.float32), Kernel.parse
    launch = compiling.Launch(cumulate, (1, 1), (x, x, x, 8), {"PH": 32, "HEADS_G": 4})
    fails = [SystemError("AST constructor recursion depth mismatch")]

    def parsed(kernel: Kernel) -> Any:
        if fails and current_thread() is not main_thread():
            raise fails.pop()
        return parse(kernel)

    with (
        mock.patch.object(Kernel, "parse", parsed),
        mock.patch.object(compiling, "load", compiling.finished),
        mock.patch.object(cumulate, "compiled", {}),
    ):
        (found,) = compiling.make_ready([launch])
    assert not fails and found.asm["cubin"]


def test_what_does_not_compile_says_why(described_gpu: None) -> None:
    from triton import CompilationError

    from fastweights.kernels.chunk.cumsum import cumulate
    from fastweights.kernels.runtime.compiling import Launch, make_ready
    from fastweights.kernels.runtime.workspace import Buffer

    x = Buffer((8,), torch.float32)
    with pytest.raises(CompilationError):
        make_ready([Launch(cumulate, (1, 1), (x, x, x, 8), {"PH": 3, "HEADS_G": 1})])  # no power of two


@given(st.lists(st.tuples(st.integers(0, 4000), st.integers(0, 9), st.integers(0, 9)), max_size=12))
def test_memory_is_shared_by_turns(drawn: list[tuple[int, int, int]]) -> None:
    from fastweights.kernels.runtime.workspace import ALIGNMENT, arranged

    needs = [(size, min(one, other), max(one, other)) for size, one, other in drawn]
    starts, total = arranged(needs)
    rounded = [-(-size // ALIGNMENT) * ALIGNMENT for size, *_ in needs]
    assert all(start % ALIGNMENT == 0 and start + size <= total for start, size in zip(starts, rounded))
    pieces = [
        (start, start + size, first, last) for start, size, (_, first, last) in zip(starts, rounded, needs) if size
    ]
    for (a, b, first, last), (c, d, one, other) in combinations(pieces, 2):
        assert b <= c or d <= a or last < one or other < first
    most = max((sum(s for s, (_, a, b) in zip(rounded, needs) if a <= now <= b) for now in range(10)), default=0)
    assert most <= total <= sum(rounded)


def test_one_after_the_other_share_memory() -> None:
    from fastweights.kernels.runtime.workspace import arranged

    assert arranged([(1024, 0, 1), (512, 2, 3), (512, 2, 4), (256, 1, 2)]) == ([0, 0, 512, 1024], 1280)
