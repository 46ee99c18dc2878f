"""A GPU that is described and not there: Triton compiles for it, and what would reach its driver is kept."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple
from unittest import mock

import pytest

from fastweights.environment import installed_version, is_version
from tests.ops.kernel_launches import plans_anew


@contextmanager
def on_hopper_in(module: str) -> Iterator[None]:
    """Tensors of the CPU take the kernels of a module of fastweights.kernels as those of a Hopper GPU do. The test is skipped
    where no GPU would take them, because this version of Triton is not the one that they are for."""
    from fastweights.kernels.runtime.gluon import TESTED

    if not is_version(installed_version("triton"), TESTED):
        pytest.skip(f"kernels in Gluon run with triton {TESTED} alone")
    with (
        mock.patch(f"fastweights.kernels.{module}.runs_gluon", lambda device: True),
        mock.patch("fastweights.kernels.availability.INTERPRETED", True),
    ):
        yield


class DriverLaunch(NamedTuple):
    """What the driver is given for one launch, without the hooks of profilers."""

    kernel: str
    grid: tuple[int, ...]
    stream: int
    function: Any
    packed_metadata: Any
    arguments: tuple[Any, ...]


@contextmanager
def described_gpu() -> Iterator[list[DriverLaunch]]:
    """Launches inside go to the list this gives, in the place of the lowest layer of Triton's driver."""
    from triton.backends.compiler import GPUTarget
    from triton.runtime.driver import driver

    launches: list[DriverLaunch] = []

    class Launcher:
        """In the place of triton.backends.nvidia.driver.CudaLauncher."""

        def __init__(self, src: Any, metadata: Any) -> None:
            self.name = metadata.name

        def __call__(
            self, x: int, y: int, z: int, stream: int, function: Any, packed_metadata: Any, *rest: Any
        ) -> None:
            _launch_metadata, _enter_hook, _exit_hook, *arguments = rest
            launches.append(DriverLaunch(self.name, (x, y, z), stream, function, packed_metadata, tuple(arguments)))

    described = mock.Mock()
    described.get_current_device.return_value = described.get_current_stream.return_value = 0
    described.get_current_target.return_value = GPUTarget("cuda", 90, 32)
    described.launcher_cls = Launcher
    described.utils.get_device_properties.return_value = {"max_shared_mem": 227 * 1024}
    described.utils.load_binary.side_effect = lambda name, *rest: (name, f"function of {name}", 0, 0, 1024)
    before = driver._active
    driver.set_active(described)
    try:
        with plans_anew(), mock.patch("fastweights.kernels.availability.INTERPRETED", True):
            yield launches
    finally:
        driver._active = before
