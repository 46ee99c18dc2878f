"""Errors on a CUDA device: recorded for the report of the GPU tests and judged."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from fastweights.testing.contract.compare import relative_error

TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.bfloat16: 2e-2, torch.float16: 3e-3}
Record = Callable[[str, object], None]


def judge(
    name: str,
    backend: str,
    dtype: torch.dtype,
    got: tuple[list[Tensor], ...],
    wanted: tuple[list[Tensor], ...],
    record: Record,
) -> None:
    """The worst relative error of the values and of the gradients, into the report of the GPU tests and judged."""
    errors = [max(relative_error(g.cpu(), w.cpu()) for g, w in zip(*pair, strict=True)) for pair in zip(got, wanted)]
    record("op", name)
    record("backend", backend)
    record("dtype", str(dtype).removeprefix("torch."))
    for what, error in zip(("values", "gradients"), errors):
        record(what, float(error))
    tolerance = TOLERANCE[dtype]
    assert errors[0] <= tolerance and errors[1] <= 5 * tolerance
