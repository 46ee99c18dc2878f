"""Launch plans: recorded once for all calls of the same sizes, whatever the lengths, and replayed on a call's own memory."""

from __future__ import annotations

import shutil
import sysconfig
from collections.abc import Iterator
from itertools import combinations
from pathlib import Path
from threading import current_thread, main_thread
from time import sleep
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fastweights.kernels.runtime import private_api
from fastweights.kernels.runtime.workspace import TensorSpec
from fastweights.testing import OpCase
from fastweights.testing.contract.compare import values_and_gradients
from tests.ops.kernel_launches import plans_anew

from .cases import KERNEL_CASES, draw_states
from .described_gpu import DriverLaunch, described_gpu

pytestmark = pytest.mark.compiler


@pytest.fixture
def driver_launches() -> Iterator[list[DriverLaunch]]:
    with described_gpu() as launches:
        yield launches


class Uncompiled:
    """Stands for a compiled kernel where compiling would take long and only the launches matter."""

    function, packed_metadata, _run = 7, (1,), None

    def __init__(self, kernel: Any, launches: list[tuple[Any, ...]]) -> None:
        self.kernel, self.launches = kernel, launches

    def run(self, *arguments: Any) -> None:
        self.launches.append((self.kernel.__name__, *arguments))


@pytest.fixture
def launches(driver_launches: list[DriverLaunch]) -> Iterator[list[tuple[Any, ...]]]:
    """Name and arguments of every launch; nothing is compiled."""
    from triton.runtime.jit import JITFunction

    found: list[tuple[Any, ...]] = []
    with mock.patch.object(JITFunction, "run", lambda kernel, *given, **rest: Uncompiled(kernel, found)):
        yield found


def call(case: OpCase, time: int, lengths: list[int] | None = None) -> None:
    """Forward and backward, with states and their gradients."""
    batch = 2 if lengths is None else 1
    inputs = case.draw(time=time, batch=batch, heads=1, value_heads=2, dtype=torch.bfloat16)
    states = draw_states(case, inputs, 2 if lengths is None else len(lengths))
    packed = {} if lengths is None else {"cu_seqlens": torch.tensor([0, *lengths]).cumsum(0)}
    values_and_gradients(
        case, inputs, tuple(s.requires_grad_(s.is_floating_point()) for s in states), backend="triton", **packed
    )


def without_pointers(launch: tuple[Any, ...]) -> list[Any]:
    return ["pointer" if type(x) is int and x >= 2**20 else x for x in launch]


@pytest.mark.parametrize("time", [200, 70])
@pytest.mark.parametrize("name", KERNEL_CASES)
def test_a_replay_launches_what_was_recorded(
    name: str, time: int, launches: list[tuple[Any, ...]], short_segments: None
) -> None:
    call(KERNEL_CASES[name], time)
    first, launches[:] = list(launches), []
    call(KERNEL_CASES[name], time)
    assert first and list(map(without_pointers, first)) == list(map(without_pointers, launches))


@pytest.mark.parametrize("name", KERNEL_CASES)
def test_other_lengths_need_no_other_plan(
    name: str, launches: list[tuple[Any, ...]], short_segments: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is recorded or compiled anew when only the lengths change, and cu_seqlens is not read."""
    from fastweights.kernels.runtime import launch_plan

    call(KERNEL_CASES[name], 200, [120, 80])
    plans = launch_plan._plans.cache_info().currsize
    first, compiled, launches[:] = list(launches), dict(launch_plan._compiled), []
    call(KERNEL_CASES[name], 200, [3, 197])
    assert launch_plan._plans.cache_info().currsize == plans and launch_plan._compiled == compiled
    assert first and list(map(without_pointers, first)) == list(map(without_pointers, launches))


@pytest.mark.parametrize("name", KERNEL_CASES)
def test_sizes_are_not_compiled_in(name: str, launches: list[tuple[Any, ...]]) -> None:
    """Rows of other lengths, more of them, and more packed sequences take the kernels that were compiled, as long as their tiles
    and the cut into segments stay."""
    from fastweights.kernels.runtime import launch_plan

    steps = (
        4 if name.startswith(("delta_product", "dplr")) else 1
    )  # of theirs each is a token of the kernels: shorter rows
    call(KERNEL_CASES[name], 200 // steps)
    compiled = dict(launch_plan._compiled)
    for time in (199, 130, 17):
        call(KERNEL_CASES[name], time // steps)
    assert launch_plan._compiled == compiled
    call(KERNEL_CASES[name], 200 // steps, [120 // steps, 80 // steps])
    packed = dict(launch_plan._compiled)
    for lengths in ([148], [100, 52, 48, 50]):
        lengths = [length // steps for length in lengths]
        call(KERNEL_CASES[name], sum(lengths), lengths)
    assert launch_plan._compiled == packed


def test_launches_get_the_memory_of_the_call(launches: list[tuple[Any, ...]]) -> None:
    """A launch gets the pointers of the call's own tensors, and temporaries that live at the same time lie apart."""
    from fastweights.kernels.common.delta_rule.wy import chunk_cumsum
    from fastweights.kernels.runtime.launch_plan import LaunchPlan, Recorder

    g, first, second, out, missing = (*(TensorSpec((64, 8), torch.float32) for _ in range(4)), None)
    recorder = Recorder()
    for n, (x, y) in enumerate([(g, first), (first, second), (second, out)], 1):
        recorder.launch(chunk_cumsum, (n, 1), x, y, None, 64, 8, PH=8, HEADS_G=1)
    recorder.launch(chunk_cumsum, (0, 1), g, first, None, 64, 8, PH=8, HEADS_G=1)
    plan = LaunchPlan(recorder.launches, (missing, g), (out, missing), torch.device("cpu"))
    for _ in range(2):
        launches[:] = []
        given = torch.zeros(64, 8)
        o, none = plan.run((None, given))
        assert none is None and o is not None and o.shape == (64, 8) and o.dtype == torch.float32
        assert [launch[:4] for launch in launches] == [("chunk_cumsum", n, 1, 1) for n in (1, 2, 3)]
        (a, b, *rest), (b_again, c, *_), (c_again, d, *_) = (launch[10:] for launch in launches)
        assert (a, d, b, c, rest) == (given.data_ptr(), o.data_ptr(), b_again, c_again, [None, 64, 8, 8, 1])
        assert abs(b - c) >= 64 * 8 * 4


def test_a_plan_is_known_by_all_that_its_launches_depend_on() -> None:
    from fastweights.kernels.chunk.memory import MEMORY, KernelInputs
    from fastweights.kernels.runtime.launch_plan import plans_for

    x, edges = torch.zeros(1, 70, 2, 16), torch.tensor([0, 30, 70])
    known = {"rule": MEMORY, "inputs": KernelInputs(x, x, x), "options": (1.0,), "final": True, "keep_saved": True}
    packed = KernelInputs(x, x, x, cu_seqlens=edges)
    others = [
        {"inputs": KernelInputs(x, x, x, beta=x[..., 0])}, {"inputs": KernelInputs(x, x, x, g=x[..., 0])},
        {"inputs": KernelInputs(x, x, x, g=x)}, {"inputs": KernelInputs(*[x.bfloat16()] * 3)},
        {"inputs": KernelInputs(x, x, x.repeat(1, 1, 2, 1))}, {"options": (2.0,)}, {"final": False}, {"keep_saved": False},
        {"inputs": packed}, {"inputs": packed._replace(cu_seqlens=edges[1:])},
        {"inputs": packed._replace(cu_seqlens=edges.int())},
    ]  # fmt: skip
    with plans_anew():
        assert plans_for(**known) is plans_for(**{**known, "inputs": KernelInputs(*[torch.ones(1, 70, 2, 16)] * 3)})
        assert len({plans_for(**{**known, **other}) for other in ({}, *others)}) == 1 + len(others)
        lengths = packed._replace(cu_seqlens=torch.tensor([0, 1, 70]))
        assert plans_for(**{**known, "inputs": packed}) is plans_for(**{**known, "inputs": lengths})


def test_a_plan_compiles_all_its_kernels_once(driver_launches: list[DriverLaunch]) -> None:
    from triton.runtime.jit import JITFunction

    from fastweights.kernels.runtime import launch_plan

    call(KERNEL_CASES["linear_attention-none"], 70)
    assert len(launch_plan._compiled) >= 5 and all(kernel.asm["cubin"] for kernel in launch_plan._compiled.values())
    known = dict(launch_plan._compiled)
    launch_plan._plans.cache_clear()
    with mock.patch.object(JITFunction, "_do_compile", side_effect=AssertionError("compiles again")):
        call(KERNEL_CASES["linear_attention-none"], 70)
    assert launch_plan._compiled == known


@pytest.mark.parametrize("with_states", [False, True])
@pytest.mark.parametrize("name", KERNEL_CASES)
def test_a_forward_compiles_what_its_backward_launches(
    name: str, with_states: bool, launches: list[tuple[Any, ...]]
) -> None:
    from fastweights.kernels.runtime import launch_plan

    case, run, compiled = KERNEL_CASES[name], launch_plan.CallPlans.backward, []

    def backward(plans: Any, *given: Any) -> Any:
        compiled.append(len(launch_plan._compiled))
        return run(plans, *given)

    inputs = case.draw(time=70, batch=1, heads=1, value_heads=2, dtype=torch.bfloat16)
    states = draw_states(case, inputs, 1) if with_states else None
    with mock.patch.object(launch_plan.CallPlans, "backward", backward), plans_anew():
        values_and_gradients(case, inputs, states, backend="triton", output_final_state=with_states)
        assert compiled and compiled[-1] == len(launch_plan._compiled)


def cumsum_launch(PH: int = 32, HEADS_G: int = 4) -> private_api.Launch:
    """A launch of a small kernel."""
    from fastweights.kernels.common.delta_rule.wy import chunk_cumsum

    x = TensorSpec((8,), torch.float32)
    return private_api.Launch(chunk_cumsum, (1, 1), (x, x, None, 64, 8), {"PH": PH, "HEADS_G": HEADS_G})


def compiled_anew(*launches: private_api.Launch) -> list[Any]:
    """The compiled kernels of launches of one kernel, which Triton does not know yet in this process."""
    kernel = launches[0].kernel
    with mock.patch.object(kernel, "device_caches", type(kernel.device_caches)(kernel.device_caches.default_factory)):
        return private_api.compile_all(launches)


def test_a_compile_that_fails_in_a_thread_is_repeated(
    driver_launches: list[DriverLaunch], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One kernel does not compile beside others; alone it does."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    from triton.runtime.jit import JITFunction

    parse = JITFunction.parse
    fails = [SystemError("AST constructor recursion depth mismatch")]

    def parsed(kernel: JITFunction) -> Any:
        if fails and current_thread() is not main_thread():
            raise fails.pop()
        return parse(kernel)

    with mock.patch.object(JITFunction, "parse", parsed):
        (found,) = compiled_anew(cumsum_launch())
    assert not fails and found.asm["cubin"]


def test_this_thread_parses_before_others_do(
    driver_launches: list[DriverLaunch], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kernel and a function that it calls, of which a cache key has the source. Python 3.11's parser is not safe in threads."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    from triton.runtime.jit import JITCallable

    order, parse, begin = [], JITCallable.parse, private_api._compile
    launch = cumsum_launch()
    monkeypatch.setattr(launch.kernel, "hash", None)

    def parsed(kernel: JITCallable) -> Any:
        order.append(current_thread())
        return parse(kernel)

    def begun_compile(one: private_api.Launch) -> Any:
        order.append("begun")
        return begin(one)

    with mock.patch.object(JITCallable, "parse", parsed), mock.patch.object(private_api, "_compile", begun_compile):
        compiled_anew(launch)
    begun = order.index("begun")
    assert main_thread() in order[:begun]
    assert main_thread() not in order[begun:]


class FullGpu:
    """A compiled kernel of Triton that finds no memory on the GPU when it is first put there."""

    function, _run = None, None

    @property
    def run(self) -> object:
        if self._run is None:
            self._init_handles()
        return self._run

    def _init_handles(self) -> None:
        if self._run is None:
            self._run = "the C function"
            raise torch.OutOfMemoryError
        self.function = 7


def test_a_kernel_that_found_no_memory_is_put_on_the_gpu_later() -> None:
    kernel = FullGpu()
    with pytest.raises(torch.OutOfMemoryError):
        private_api._load(kernel)
    private_api._load(kernel)
    assert kernel.function == 7


C_FUNCTION = """
#include <Python.h>
static PyObject* launch(PyObject* self, PyObject* none) {{ return PyUnicode_FromString("{hash}"); }}
static PyMethodDef methods[] = {{{{"launch", launch, METH_NOARGS, ""}}, {{NULL, NULL, 0, NULL}}}};
static struct PyModuleDef module = {{PyModuleDef_HEAD_INIT, "__triton_launcher", NULL, -1, methods}};
PyMODINIT_FUNC PyInit___triton_launcher(void) {{ return PyModule_Create(&module); }}
"""


class LauncherOfItsHash:
    """What Triton 3.6's CudaLauncher does, for a C function that says of which kernel it is."""

    def __init__(self, src: Any, metadata: Any) -> None:
        from triton.runtime.build import compile_module_from_src

        module = compile_module_from_src(C_FUNCTION.format(hash=metadata.hash), "__triton_launcher")
        sleep(0.05)  # other threads load theirs
        self.launch = module.launch


@pytest.mark.skipif(
    not (shutil.which("gcc") or shutil.which("clang"))
    or not Path(sysconfig.get_paths()["include"], "Python.h").exists(),
    reason="needs a C compiler and Python's headers",
)
def test_every_kernel_has_its_own_launcher(
    driver_launches: list[DriverLaunch], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Threads that load launchers for the second time share one module."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    from triton.runtime.driver import driver

    monkeypatch.setattr(driver.active, "launcher_cls", LauncherOfItsHash)
    monkeypatch.setattr("os.cpu_count", lambda: 4)
    for _ in range(2):
        found = compiled_anew(*(cumsum_launch(PH) for PH in (4, 8, 16, 32)))
    assert [kernel.run.launch() for kernel in found] == [kernel.metadata.hash for kernel in found]


def test_a_kernel_of_too_many_threads_says_so(
    driver_launches: list[DriverLaunch], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Triton puts it on the GPU before it looks."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    from triton.runtime.driver import driver
    from triton.runtime.errors import OutOfResources

    monkeypatch.setattr(driver.active.utils.load_binary, "side_effect", lambda name, *rest: (name, 7, 0, 0, 1))
    (found,) = compiled_anew(cumsum_launch())
    with pytest.raises(OutOfResources, match="threads"):
        found.run(1, 1, 1, 0)


def test_what_does_not_compile_says_why(driver_launches: list[DriverLaunch]) -> None:
    from triton import CompilationError

    with pytest.raises(CompilationError):
        private_api.compile_all([cumsum_launch(PH=3, HEADS_G=1)])  # no power of two


def test_gradients_come_in_the_shape_and_dtype_of_their_inputs() -> None:
    from fastweights.kernels.runtime.launch_plan import reduce_to_input

    x, gradient = torch.zeros(1, 5, 2, 3, dtype=torch.bfloat16), torch.arange(120.0).view(1, 5, 8, 3)
    reduced = reduce_to_input(x, gradient)
    assert torch.equal(reduced, torch.stack([gradient[:, :, :4].sum(2), gradient[:, :, 4:].sum(2)], 2).bfloat16())
    same = Tensor.float(x)
    assert reduce_to_input(same, same) is same and reduce_to_input(None, None) is None


@given(st.lists(st.tuples(st.integers(0, 4000), st.integers(0, 9), st.integers(0, 9)), max_size=12))
def test_temporaries_share_memory_one_after_another(drawn: list[tuple[int, int, int]]) -> None:
    from fastweights.kernels.runtime.workspace import ALIGNMENT, assign_offsets

    lifetimes = [(size, min(one, other), max(one, other)) for size, one, other in drawn]
    offsets, total = assign_offsets(lifetimes)
    rounded = [-(-size // ALIGNMENT) * ALIGNMENT for size, *_ in lifetimes]
    assert all(offset % ALIGNMENT == 0 and offset + size <= total for offset, size in zip(offsets, rounded))
    pieces = [
        (offset, offset + size, first, last)
        for offset, size, (_, first, last) in zip(offsets, rounded, lifetimes)
        if size
    ]
    for (a, b, first, last), (c, d, one, other) in combinations(pieces, 2):
        assert b <= c or d <= a or last < one or other < first
    most = max((sum(s for s, (_, a, b) in zip(rounded, lifetimes) if a <= now <= b) for now in range(10)), default=0)
    assert most <= total <= sum(rounded)


def test_a_temporary_takes_the_place_of_one_that_is_no_longer_read() -> None:
    from fastweights.kernels.runtime.workspace import assign_offsets

    assert assign_offsets([(1024, 0, 1), (512, 2, 3), (512, 2, 4), (256, 1, 2)]) == ([0, 0, 512, 1024], 1280)
