"""Code for a GPU that runs on a machine without one: tensors of the CPU take the paths of those on a GPU."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch

from fastweights.kernels import availability
from fastweights.kernels.runtime import gluon
from fastweights.layers import shared_input
from fastweights.ops.framework import checks

__all__ = ["tensors_as_on_gpu"]


@contextmanager
def tensors_as_on_gpu() -> Iterator[None]:
    """Inside, backend "auto" takes the kernels, and no check reads the numbers of a tensor. Kernels must not be run."""
    taken, looked = (availability.takes_kernels, availability.takes_rows), checks.values_can_be_read

    def as_on_gpu(takes: Any) -> Any:
        return lambda asked, x: not x.is_meta and takes("triton" if asked == "auto" else asked, x)

    changed: dict[Any, Any] = {takes: as_on_gpu(takes) for takes in taken} | {looked: lambda x: False}
    changed[shared_input.trains_on_gpu] = lambda x: x.requires_grad and torch.is_grad_enabled()
    with ExitStack() as changes:
        for module in [x for name, x in sys.modules.items() if name.startswith("fastweights.") and x is not None]:
            for name, x in list(vars(module).items()):
                if module is not availability and callable(x) and x.__hash__ is not None and x in changed:
                    changes.enter_context(mock.patch.object(module, name, changed[x]))
        changes.enter_context(mock.patch.object(availability, "INTERPRETED", True))
        loaded = [x for x in sys.modules.values() if vars(x).get("runs_gluon") is gluon.runs_gluon]
        for module in loaded:
            changes.enter_context(mock.patch.object(module, "runs_gluon", lambda device: gluon.HAS_GLUON))
        yield
