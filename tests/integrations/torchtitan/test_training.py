"""Trainings by torchtitan on one, two and four processes: however a model is divided, losses and gradients are those of one."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

from fastweights.testing.processes import processes

from .jobs import train

TENSOR, CONTEXT = "parallelism.tensor_parallel_degree", "parallelism.context_parallel_degree"
CLOSE = 2e-5  # float32, relative


@cache
def alone(**model: Any) -> dict[str, Any]:
    return processes(1).run(train, {}, 4, True, *model.items())[0]
