"""A kernel is compiled once for all arguments that Triton would compile alike, and launched with all of them."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch

pytestmark = pytest.mark.compiler


class Compiled:
    """In place of a compiled kernel: keeps what it is launched with, by itself or by way of a description for profilers."""

    function, packed_metadata = 7, (1,)

    def __init__(self) -> None:
        self.launches: list[tuple[Any, ...]] = []
        self.described = 0

    def run(self, x: int, y: int, z: int, stream: int, function: int, metadata: Any, *rest: Any) -> None:
        assert (stream, function, metadata, rest[:3]) == (0, self.function, self.packed_metadata, (None, None, None))
        self.launches.append(((x, y, z), *rest[3:]))

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        self.described += 1
        return lambda *arguments, stream: self.launches.append((grid, *arguments))


@pytest.mark.parametrize("aligned", [True, False])
def test_compiled_once_for_what_is_alike(aligned: bool) -> None:
    from triton import knobs
    from triton.runtime.jit import JITFunction

    from fastweights.kernels.chunk.cumsum import cumulate as known
    from fastweights.kernels.runtime import jit

    cumulate = jit.Kernel(known.fn, aligned)

    made: list[Compiled] = []

    def run(kernel: Any, *arguments: Any, grid: Any, warmup: bool, **choices: Any) -> Compiled:
        made.append(Compiled())
        return made[-1]

    numbers = torch.zeros(9)
    x, G, chunks = numbers[:8], torch.zeros(8), torch.zeros(2, dtype=torch.int32)
    with mock.patch.object(JITFunction, "run", run):
        cumulate[2, 1](x, G, chunks, 8, PH=16, HEADS_G=1)
        assert len(made) == 1 and made[0].launches.pop()[0] == (2, 1, 1)
        cumulate[3, 1](x, G, chunks, 24, PH=16, HEADS_G=1)
        assert len(made) == 1
        (launched,) = made[0].launches
        assert launched[0] == (3, 1, 1) and launched[4:] == (24, 16, 1)
        assert launched[1:4] == (x.data_ptr(), G.data_ptr(), chunks.data_ptr())
        knobs.runtime.launch_enter_hook.add(print)
        try:
            cumulate[3, 1](x, G, chunks, 24, PH=16, HEADS_G=1)
        finally:
            knobs.runtime.launch_enter_hook.remove(print)
        told, again = made[0].launches[0], made[0].launches[-1]
        assert told[0] == again[0] and told[4:] == again[4:] and made[0].described == 1
        cumulate[0, 1](x, G, chunks, 8, PH=32, HEADS_G=1)
        assert len(made) == 1  # nothing to do
        for different in (
            *([] if aligned else [((numbers[1:], G, chunks, 8), {"PH": 16, "HEADS_G": 1})]),
            ((x.bfloat16(), G, chunks, 8), {"PH": 16, "HEADS_G": 1}),
            ((torch.nn.Parameter(x.half()), G, chunks, 8), {"PH": 16, "HEADS_G": 1}),
            ((None, G, chunks, 8), {"PH": 16, "HEADS_G": 1}),
            ((x, G, chunks, 1), {"PH": 16, "HEADS_G": 1}),
            ((x, G, chunks, 16), {"PH": 16, "HEADS_G": 1}),
            ((x, G, chunks, 2**40 + 1), {"PH": 16, "HEADS_G": 1}),
            ((x, G, chunks, 8), {"PH": 32, "HEADS_G": 1}),
            ((x, G, chunks, 8), {"PH": 16, "HEADS_G": 1, "num_warps": 8}),
        ):
            before = len(made)
            cumulate[2, 1](*different[0], **different[1])
            assert len(made) == before + 1, different
            cumulate[2, 1](*different[0], **different[1])
            assert len(made) == before + 1 and len(made[-1].launches) == 2, different


def test_the_newest_assembler_serves() -> None:
    from triton import knobs

    from fastweights.kernels.runtime.compiling import newest_assembler

    tools = [getattr(knobs.nvidia, name, None) for name in ("ptxas", "ptxas_blackwell")]
    versions = {tool.version for tool in tools if tool is not None}
    before = knobs.nvidia.ptxas.path
    with newest_assembler():
        assert knobs.nvidia.ptxas.version == max(versions, key=lambda v: [int(part) for part in v.split(".")])
    assert knobs.nvidia.ptxas.path == before


def test_the_users_assembler_stands(monkeypatch: pytest.MonkeyPatch) -> None:
    from triton import knobs

    from fastweights.kernels.runtime.compiling import newest_assembler

    before = knobs.nvidia.ptxas.path
    monkeypatch.setenv("TRITON_PTXAS_PATH", before)
    with newest_assembler():
        assert knobs.nvidia.ptxas.path == before


def test_kernels_of_others_keep_their_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton names what it compiles by the first assembler it asks, once a process."""
    from triton.backends.compiler import GPUTarget
    from triton.backends.nvidia.compiler import get_ptxas_version
    from triton.compiler import make_backend
    from triton.runtime.driver import driver

    from fastweights.kernels.runtime.compiling import name_as_before, newest_assembler

    def named() -> str:
        return make_backend(GPUTarget("cuda", 90, 32)).hash()

    get_ptxas_version.cache_clear()
    make_backend(GPUTarget("cuda", 90, 32)).hash.cache_clear()
    theirs = named()
    get_ptxas_version.cache_clear()
    make_backend(GPUTarget("cuda", 90, 32)).hash.cache_clear()
    described = mock.Mock()
    described.get_current_target.return_value = GPUTarget("cuda", 90, 32)
    monkeypatch.setattr(driver, "_active", described)
    name_as_before()
    with newest_assembler():
        assert named() == theirs


def test_tensors_are_aligned() -> None:
    from fastweights.kernels.availability import aligned

    numbers = torch.arange(12.0)
    assert (
        aligned(None) is None
        and aligned(numbers) is numbers
        and aligned(numbers[4:]).data_ptr() == numbers[4:].data_ptr()
    )
    for view in (numbers[1:], numbers[1:].view(11, 1)[::2], numbers.view(3, 4).mT):
        copy = aligned(view)
        assert copy.is_contiguous() and copy.data_ptr() % 16 == 0 and torch.equal(copy, view)
