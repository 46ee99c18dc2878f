"""Kernels as a launch would compile them, without a GPU: launches are recorded in place of being run, then compiled."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch

POINTERS = {
    torch.float64: "*fp64", torch.float32: "*fp32", torch.float16: "*fp16", torch.bfloat16: "*bf16", torch.int32: "*i32",
    torch.int64: "*i64",
}  # fmt: skip


class Compilation(NamedTuple):
    """A kernel and what makes one compilation of it differ from the next."""

    kernel: Any
    signature: dict[str, str]
    constexprs: dict[tuple[int, ...], Any]
    options: dict[str, Any]
    attrs: dict[tuple[int, ...], list[list[object]]]

    @property
    def key(self) -> str:
        return f"{self.kernel.__name__} {self[1:]}"

    @property
    def choices(self) -> dict[str, Any]:
        """What is compiled in, by name."""
        return {
            self.kernel.arg_names[index]: x for (index,), x in self.constexprs.items() if x is not None
        } | self.options

    def compile(self, capability: int) -> Compiled:
        """For an NVIDIA GPU of a compute capability, such as 90."""
        import triton
        from triton.backends.compiler import GPUTarget

        from fastweights.kernels.runtime.private_api import newest_ptxas

        source_type = triton.compiler.ASTSource
        if self.kernel.is_gluon():
            from triton.experimental.gluon._runtime import GluonASTSource as source_type
        source = source_type(self.kernel, self.signature, self.constexprs, self.attrs)
        with newest_ptxas():
            compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=self.options)
        return Compiled(compiled.metadata.shared, compiled.asm["cubin"], compiled.asm["ttgir"])


class Compiled(NamedTuple):
    """Bytes of shared memory a program, and the machine code."""

    shared: int
    cubin: bytes
    ttgir: str

    @property
    def stack(self) -> int:
        """Bytes a thread, where the compiler puts what registers cannot hold."""
        return sum(int(size) for size in re.findall(r"(?:STACK|LOCAL):(\d+)", self._dump("-res-usage")))

    @property
    def registers(self) -> int:
        """Of a thread."""
        return max(int(count) for count in re.findall(r"REG:(\d+)", self._dump("-res-usage")))

    @property
    def sass(self) -> str:
        """The machine code as NVIDIA's tool prints it, with the bits of every instruction."""
        return self._dump("-sass")

    @property
    def instructions(self) -> list[str]:
        """Without predicates."""
        found = re.findall(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z].*?)\s*;", self.sass)
        return [re.sub(r"\s+", " ", x) for x in found]

    def _dump(self, what: str) -> str:
        import triton

        tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(self.cubin)
            file.flush()
            return subprocess.run([tool, what, file.name], capture_output=True, text=True, check=True).stdout


def recorded(call: Callable[[], object]) -> Iterator[Compilation]:
    """The kernels that `call` launches, each form once."""
    launches: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = []

    def run(kernel: Any, *args: Any, grid: object, warmup: bool, **kwargs: Any) -> Any:
        launches.append((kernel, args, kwargs))
        return mock.Mock()

    with compiling_nothing(run):
        call()
    found = [_compilation(*launch) for launch in launches]
    yield from {one.key: one for one in found}.values()


@contextmanager
def compiling_nothing(run: Callable[..., Any]) -> Iterator[None]:
    """Inside, `run` is called in the place of Triton's compiler, and what it gives is not loaded."""
    from triton.runtime.jit import JITFunction

    from fastweights.kernels.runtime import private_api

    with (
        plans_anew(),
        mock.patch.object(JITFunction, "run", run),
        mock.patch.object(private_api, "_load_launcher"),
    ):
        yield


@contextmanager
def plans_anew() -> Iterator[None]:
    """Inside, no launch plan and no compiled kernel is known, and none is kept afterwards."""
    from fastweights.kernels.runtime import launch_plan

    plans = lru_cache(launch_plan.CallPlans)
    with mock.patch.object(launch_plan, "_plans", plans), mock.patch.object(launch_plan, "_compiled", {}):
        yield


def _compilation(kernel: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Compilation:
    options = {name: kwargs.pop(name) for name in ("num_warps", "num_ctas", "num_stages", "maxnreg") if name in kwargs}
    values = {**dict(zip(kernel.arg_names, args)), **kwargs}
    signature, constexprs, attrs = {}, {}, {}
    for index, parameter in enumerate(kernel.params):
        x = values[parameter.name]
        specialized = isinstance(x, int) and not parameter.do_not_specialize
        if parameter.is_constexpr or x is None or (specialized and x == 1):
            signature[parameter.name], constexprs[(index,)] = "constexpr", x
        elif hasattr(x, "data_ptr"):
            signature[parameter.name] = POINTERS[x.dtype]
            attrs[(index,)] = [["tt.divisibility", 16]]
        elif isinstance(x, float):
            signature[parameter.name] = "fp32"
        else:
            signature[parameter.name] = "i32"
            if specialized and x % 16 == 0:
                attrs[(index,)] = [["tt.divisibility", 16]]
    return Compilation(kernel, signature, constexprs, options, attrs)
