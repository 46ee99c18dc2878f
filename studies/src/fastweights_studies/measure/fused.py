"""Times of what surrounds every memory layer: the short convolution with SiLU and L2 norm, and the gated RMSNorm.

    python -m fastweights_studies.measure.fused    both ops in bfloat16
    python -m fastweights_studies.measure.fused --only convolution --dtype float32

Beside our kernels stand the PyTorch forms and, where they are installed, the same by flash-linear-attention (its convolution
followed by its L2 norm). Kernels that exceed the error budget against float64 get no time; the errors of others are reported.
`eager` is as called, `graph` a replayed CUDA graph (device time alone); the floor is every tensor read or written once at the
measured speed of a copy. Writes studies/results/fused-<device>.json.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Hashable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fastweights.ops.gated_norm import gated_rms_norm
from fastweights.ops.short_convolution import short_convolution
from fastweights_studies.measure.environment import describe, find_gpu
from fastweights_studies.measure.judge.timing import Ceilings, as_graph, interleaved
from fastweights_studies.measure.rows import make_rows, name_file, replace_rows
from fastweights_studies.places import RESULTS
from fastweights_studies.record import Origin, Plain, Row

SIZES = {op: ((4, 2048), (1, 32768), (64, 1)) for op in ("convolution", "norm")}
TASK = "fused"
RESULTS_OF = {"convolution": ("y", "dx", "dweight"), "norm": ("y", "dx", "dgate", "dweight")}  # that have errors
CHANNELS, HEAD, WIDTH = 1024, 128, 4
# RMS of the difference over RMS of the result.
BUDGET = {torch.bfloat16: 5e-3, torch.float16: 1e-3, torch.float32: 1e-5}
Call = Callable[..., Tensor]


def convolution(x: Tensor, weight: Tensor, backend: str = "auto") -> Tensor:
    return short_convolution(x, weight, activation="silu", normalize=HEAD, backend=backend)[0]


def norm(x: Tensor, gate: Tensor, weight: Tensor, backend: str = "auto") -> Tensor:
    return gated_rms_norm(x, weight, gate, backend=backend)


def peers(op: str) -> dict[str, Call]:
    """The same by flash-linear-attention's public functions, if it is installed."""
    try:
        from fla.modules.convolution import causal_conv1d
        from fla.modules.fused_norm_gate import rms_norm_gated
        from fla.modules.l2norm import l2norm
    except ImportError:
        return {}

    def their_convolution(x: Tensor, weight: Tensor) -> Tensor:
        y, _ = causal_conv1d(x, weight, activation="silu")
        return l2norm(y.unflatten(2, (-1, HEAD))).flatten(2)

    def their_norm(x: Tensor, gate: Tensor, weight: Tensor) -> Tensor:
        return rms_norm_gated(x, gate, weight, None, "swish", eps=1e-6)

    return {"fla": their_convolution if op == "convolution" else their_norm}


def draw(op: str, batch: int, length: int, dtype: torch.dtype) -> tuple[list[Tensor], Tensor]:
    """Inputs, and a gradient of the output."""
    shape = (batch, length, CHANNELS) if op == "convolution" else (batch, length, CHANNELS // HEAD, HEAD)
    x, gate, dy = (torch.randn(shape, device="cuda").to(dtype) for _ in range(3))
    if op == "convolution":
        return [x.requires_grad_(), torch.randn(CHANNELS, WIDTH, device="cuda").requires_grad_()], dy
    return [x.requires_grad_(), gate.requires_grad_(), torch.randn(HEAD, device="cuda").requires_grad_()], dy


def forward(call: Call, inputs: list[Tensor]) -> None:
    with torch.no_grad():
        call(*inputs)


def forward_backward(call: Call, inputs: list[Tensor], dy: Tensor) -> None:
    torch.autograd.grad(call(*inputs), inputs, dy)


def errors(call: Call, exact: Call, inputs: list[Tensor], dy: Tensor) -> list[float]:
    """Of the output and of the gradient in every input."""

    def results(f: Call, given: list[Tensor], towards: Tensor) -> list[Tensor]:
        y = f(*given)
        return [y, *torch.autograd.grad(y, given, towards)]

    wanted = results(exact, [x.detach().double().requires_grad_() for x in inputs], dy.double())
    return [
        float((x.double() - y).square().mean().sqrt() / y.square().mean().sqrt())
        for x, y in zip(results(call, inputs, dy), wanted)
    ]


def floor(op: str, inputs: list[Tensor], backward: bool, bandwidth: float) -> float:
    """Milliseconds: the forward reads its inputs and writes y; the backward reads them and dy and writes their gradients."""
    numbers = sum(x.numel() * x.element_size() for x in inputs)
    y = inputs[0].numel() * inputs[0].element_size()
    return 1e3 * (numbers + y + (2 * numbers + y if backward else 0)) / bandwidth


def measure(op: str, batch: int, length: int, dtype: torch.dtype, repeats: int, bandwidth: float) -> dict[str, Any]:
    ours: Call = convolution if op == "convolution" else norm
    calls: dict[str, Call] = {"ours": ours, "torch": partial(ours, backend="torch"), **peers(op)}
    inputs, dy = draw(op, batch, length, dtype)
    found = {
        who: errors(call, partial(ours, backend="torch"), inputs, dy) for who, call in calls.items() if who != "torch"
    }
    row: dict[str, Any] = {"errors": found}
    refused = [who for who, e in found.items() if not max(e) <= BUDGET[dtype]]
    if "ours" in refused:
        return {**row, "refused": f"errors {found['ours']} exceed {BUDGET[dtype]:.0e}"}
    for stage in ("forward", "forward_backward"):
        works = {
            who: partial(forward_backward, call, inputs, dy) if stage != "forward" else partial(forward, call, inputs)
            for who, call in calls.items()
        }
        row[stage] = {
            "floor_ms": floor(op, inputs, stage != "forward", bandwidth),
            "eager": interleaved(works, repeats),
            "graph": interleaved({who: as_graph(work) for who, work in works.items()}, repeats),
        }
    return row


def make_fused_rows(
    op: str, batch: int, length: int, dtype: str, found: Mapping[str, Any], origin: Origin
) -> list[Row]:
    """Errors, floors and times, by who computes: None is ours."""
    shared: dict[str, Plain] = {"op": op, "batch": batch, "length": length, "channels": CHANNELS, "dtype": dtype}
    rows = []
    for who, of_results in found["errors"].items():
        for result, error in zip(RESULTS_OF[op], of_results, strict=True):
            column = {**shared, "peer": None if who == "ours" else who, "result": result}
            rows += make_rows(TASK, origin, {"error": error}, column=column)
    for stage in ("forward", "forward_backward"):
        if stage in found:
            part = found[stage]
            rows += make_rows(TASK, origin, {f"{stage}_floor_ms": part["floor_ms"]}, column=shared)
            for replayed, kind in ((True, "graph"), (False, "eager")):
                for who, spread in part[kind].items():
                    column = {**shared, "peer": None if who == "ours" else who, "replayed": replayed}
                    rows += make_rows(TASK, origin, {f"{stage}_ms": spread}, column=column)
    return rows


def measured_at_one_size(row: Row) -> Hashable:
    return row.task, *(row.column.get(name) for name in ("op", "batch", "length", "dtype"))


def show(name: str, row: Mapping[str, Any]) -> None:
    if "refused" in row:
        print(f"{name:24s} no time: {row['refused']}", flush=True)
        return
    for stage in ("forward", "forward_backward"):
        part = row[stage]
        cells = [
            f"{who} {1e3 * t.median:.1f} (eager {1e3 * part['eager'][who].median:.0f})"
            for who, t in part["graph"].items()
        ]
        times = part["graph"]["ours"].median / part["floor_ms"]
        print(
            f"{name:24s} {stage:16s} floor {1e3 * part['floor_ms']:.1f} us ({times:.2f} x)  {'  '.join(cells)}",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=tuple(SIZES))
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32"))
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--output", type=Path, default=None)
    arguments = parser.parse_args()
    device = find_gpu()
    dtype, bandwidth = getattr(torch, arguments.dtype), Ceilings.measure().bandwidth
    print(f"{device}: copy {bandwidth / 1e12:.2f} TB/s, {CHANNELS} channels, heads of {HEAD}, {arguments.dtype}")
    started, origin = time.time(), describe(device)
    output = arguments.output or name_file(RESULTS, "fused", device)
    replace_rows(output, make_rows("ceilings", origin, {"copy_bytes_per_second": bandwidth}))
    for op in [arguments.only] if arguments.only else SIZES:
        for batch, length in SIZES[op]:
            found = measure(op, batch, length, dtype, arguments.repeats, bandwidth)
            show(f"{op} {batch}x{length}", found)
            rows = make_fused_rows(op, batch, length, arguments.dtype, found, origin)
            replace_rows(output, rows, measured_at_one_size)
    print(f"written to {output} after {time.time() - started:.0f} s")


if __name__ == "__main__":
    main()
