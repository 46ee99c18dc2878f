"""Launches in the fast mode give the driver what Triton's own launch gives it, and versions nobody tested get Triton's own."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from tests.ops.kernel_launches import plans_anew

from . import forms
from .cases import KERNEL_CASES, draw_states
from .described_gpu import DriverLaunch, described_gpu

pytestmark = pytest.mark.compiler


@pytest.fixture
def driver_launches() -> Iterator[list[DriverLaunch]]:
    with described_gpu() as launches:
        yield launches


def without_pointers(launch: DriverLaunch) -> DriverLaunch:
    """Tensors (Triton's own launch) and their addresses (the fast mode) look the same here."""
    arguments = tuple(
        "tensor" if isinstance(x, Tensor) or (isinstance(x, int) and x >= 2**20) else x for x in launch.arguments
    )
    return launch._replace(arguments=arguments)


def forward_and_backward() -> None:
    """Packed rows, states and their gradients, so that every kind of argument is there."""
    case = KERNEL_CASES["linear_attention-head"]
    inputs = case.draw(batch=1, time=70, key=16, value=16, heads=1, dtype=torch.bfloat16).map(Tensor.requires_grad_)
    states = case.initial_state(tuple(s.requires_grad_() for s in draw_states(case, inputs, 2)))
    o, final = case.op(
        **inputs.arguments(), initial_state=states, output_final_state=True, backend="triton",
        cu_seqlens=torch.tensor([0, 30, 70]),
    )  # fmt: skip
    (o.sum() + final.sum()).backward()


def in_a_pool() -> None:
    """Kernels of a decoding step with rows of a pool, one of them with a number for the ridge."""
    *_, shared = forms.token_convolution()
    queries, *_ = forms.key_energies()
    shared()
    queries()


@pytest.mark.parametrize(("work", "launches"), [(forward_and_backward, 6), (in_a_pool, 2)])
def test_the_driver_is_given_what_triton_gives_it(
    work: Callable[[], None], launches: int, driver_launches: list[DriverLaunch], monkeypatch: pytest.MonkeyPatch
) -> None:
    from fastweights.kernels.runtime import private_api

    work()
    fast, driver_launches[:] = list(driver_launches), []
    monkeypatch.setenv("FASTWEIGHTS_LAUNCH", "plain")
    private_api.fast_launch.cache_clear()
    try:
        with plans_anew():
            work()
    finally:
        private_api.fast_launch.cache_clear()
    assert len(fast) >= launches
    assert any(isinstance(x, Tensor) for launch in driver_launches for x in launch.arguments)
    assert list(map(without_pointers, fast)) == list(map(without_pointers, driver_launches))


def test_the_real_launcher_takes_these_arguments() -> None:
    """The stand-in of `described_gpu` has the signature of Triton's."""
    from triton.backends.nvidia.driver import CudaLauncher

    names = list(inspect.signature(CudaLauncher.__call__).parameters)
    assert names[:6] == ["self", "gridX", "gridY", "gridZ", "stream", "function"]


def test_a_profilers_hooks_change_nothing(driver_launches: list[DriverLaunch]) -> None:
    from triton import knobs

    described: list[Any] = []
    forward_and_backward()
    first, driver_launches[:] = list(driver_launches), []
    knobs.runtime.launch_enter_hook.add(described.append)
    try:
        forward_and_backward()
    finally:
        knobs.runtime.launch_enter_hook.remove(described.append)
    assert list(map(without_pointers, driver_launches)) == list(map(without_pointers, first))


def test_compiled_once_for_what_is_alike(driver_launches: list[DriverLaunch]) -> None:
    """Direct launches: a kernel is compiled once for all arguments that Triton would compile alike."""
    from fastweights.kernels.common.delta_rule.wy import chunk_cumsum
    from fastweights.kernels.runtime import launch_plan
    from fastweights.kernels.runtime.launch_plan import launch

    numbers = torch.zeros(9)
    x, G = numbers[:8], torch.zeros(8)
    options = {"PH": 16, "HEADS_G": 1}
    launch(chunk_cumsum, (2, 1), x, G, None, 70, 8, **options)
    launch(chunk_cumsum, (3, 1), x, G, None, 200, 24, **options)
    assert len(launch_plan._compiled) == 1
    assert driver_launches[0].grid == (2, 1, 1) and driver_launches[1].grid == (3, 1, 1)
    assert driver_launches[1].arguments == (x.data_ptr(), G.data_ptr(), None, 200, 24, 16, 1)
    launch(chunk_cumsum, (0, 1), x, G, None, 70, 8, PH=32, HEADS_G=1)
    assert len(launch_plan._compiled) == 1 and len(driver_launches) == 2  # an empty grid
    for number, (arguments, constants) in enumerate(
        (
            ((numbers[1:], G, None, 70, 8), options),
            ((x.bfloat16(), G, None, 70, 8), options),
            ((torch.nn.Parameter(x.half()), G, None, 70, 8), options),
            ((x, G, torch.zeros(4, dtype=torch.int32), 70, 8), options),
            ((x, G, None, 70, 1), options),
            ((x, G, None, 70, 16), options),
            ((x, G, None, 2**40 + 1, 8), options),
            ((x, G, None, 70, 8), {**options, "PH": 32}),
            ((x, G, None, 70, 8), {**options, "num_warps": 8}),
        ),
        start=2,
    ):
        for _ in range(2):
            launch(chunk_cumsum, (2, 1), *arguments, **constants)
            assert len(launch_plan._compiled) == number, (arguments, constants)


@pytest.fixture
def modes_anew() -> Iterator[None]:
    from fastweights.kernels.runtime import private_api

    def forget() -> None:
        private_api.fast_launch.cache_clear()
        private_api.versions_are_tested.cache_clear()

    forget()
    yield
    forget()


@pytest.mark.parametrize("package", ["triton", "torch"])
@pytest.mark.parametrize("found", ["99.0.1", "0.1", "main"])
def test_untested_versions_launch_plainly_and_warn_once(
    package: str, found: str, monkeypatch: pytest.MonkeyPatch, modes_anew: None
) -> None:
    from fastweights.kernels.runtime import private_api

    real = private_api.version
    monkeypatch.setattr(private_api, "version", lambda name: found if name == package else real(name))
    with pytest.warns(UserWarning, match=f"{package} .*was not tested") as caught:
        assert not private_api.fast_launch()
        assert not private_api.fast_launch()
        private_api.fast_launch.cache_clear()
        assert not private_api.fast_launch()
    assert len(caught) == 1


@pytest.mark.parametrize("found", ["3.5.1", "3.6.0", "3.9.0+git1234"])
def test_tested_versions_launch_fast(found: str, monkeypatch: pytest.MonkeyPatch, modes_anew: None) -> None:
    from fastweights.kernels.runtime import private_api

    monkeypatch.setattr(private_api, "TESTED", {"triton": ((3, 5), (3, 9))})
    monkeypatch.setattr(private_api, "version", lambda name: found)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert private_api.fast_launch()


def test_the_environment_asks_for_plain_launches(monkeypatch: pytest.MonkeyPatch, modes_anew: None) -> None:
    from fastweights.kernels.runtime import private_api

    monkeypatch.setenv("FASTWEIGHTS_LAUNCH", "plain")
    assert not private_api.fast_launch()


def test_the_newest_ptxas_serves() -> None:
    from triton import knobs

    from fastweights.kernels.runtime.private_api import newest_ptxas, ptxas_is_safe

    tools = [getattr(knobs.nvidia, name, None) for name in ("ptxas", "ptxas_blackwell")]
    versions = {tool.version for tool in tools if tool is not None}
    before = knobs.nvidia.ptxas.path
    with newest_ptxas():
        assert knobs.nvidia.ptxas.version == max(versions, key=lambda v: [int(part) for part in v.split(".")])
    assert knobs.nvidia.ptxas.path == before
    newest = max([int(part) for part in version.split(".")] for version in versions)
    assert ptxas_is_safe() is (newest >= [12, 9])


def test_the_users_ptxas_stands(monkeypatch: pytest.MonkeyPatch) -> None:
    from triton import knobs

    from fastweights.kernels.runtime.private_api import newest_ptxas

    before = knobs.nvidia.ptxas.path
    monkeypatch.setenv("TRITON_PTXAS_PATH", before)
    with newest_ptxas():
        assert knobs.nvidia.ptxas.path == before


@pytest.mark.parametrize(("version", "safe"), [("12.8", False), ("12.9", True), ("13.0", True)])
def test_hopper_needs_a_ptxas_that_computes_right(version: str, safe: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    from fastweights.kernels import availability
    from fastweights.kernels.runtime import private_api

    monkeypatch.setenv("TRITON_PTXAS_PATH", "the user's own")
    knobs = mock.Mock()
    knobs.nvidia.ptxas.version = version
    monkeypatch.setattr(private_api, "_knobs", lambda: knobs)
    private_api.ptxas_is_safe.cache_clear()
    try:
        assert private_api.ptxas_is_safe() is safe
        for capability, runs in (((9, 0), safe), ((8, 0), True), ((10, 0), True)):
            monkeypatch.setattr(availability, "_capability", lambda device, found=capability: found)
            reason = availability.why_unavailable(torch.bfloat16, torch.device("cuda", 0))
            assert reason is None if runs else "needs ptxas of CUDA 12.9" in (reason or "")
    finally:
        private_api.ptxas_is_safe.cache_clear()


def test_kernels_of_others_keep_their_cache_key(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton names what it compiles by the first ptxas it asks, once per process."""
    from triton.backends.compiler import GPUTarget
    from triton.backends.nvidia.compiler import get_ptxas_version
    from triton.compiler import make_backend
    from triton.runtime.driver import driver

    from fastweights.kernels.runtime.private_api import keep_cache_key, newest_ptxas

    def cache_key() -> str:
        return make_backend(GPUTarget("cuda", 90, 32)).hash()

    get_ptxas_version.cache_clear()
    make_backend(GPUTarget("cuda", 90, 32)).hash.cache_clear()
    theirs = cache_key()
    get_ptxas_version.cache_clear()
    make_backend(GPUTarget("cuda", 90, 32)).hash.cache_clear()
    described = mock.Mock()
    described.get_current_target.return_value = GPUTarget("cuda", 90, 32)
    monkeypatch.setattr(driver, "_active", described)
    keep_cache_key()
    with newest_ptxas():
        assert cache_key() == theirs


def test_tensors_are_aligned() -> None:
    from fastweights.kernels.runtime.launch_plan import align

    numbers = torch.arange(12.0)
    assert align(None) is None and align(numbers) is numbers and align(numbers[4:]).data_ptr() == numbers[4:].data_ptr()
    for view in (numbers[1:], numbers[1:].view(11, 1)[::2], numbers.view(3, 4).mT):
        copy = align(view)
        assert copy.is_contiguous() and copy.data_ptr() % 16 == 0 and torch.equal(copy, view)
