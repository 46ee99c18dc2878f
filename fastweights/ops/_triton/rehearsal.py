"""The first time that a call of some kind comes, its launches are gone through once without memory, which compiles their kernels
side by side: it waits for the slowest kernel, not for one after the other."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor
from triton.runtime._async_compile import active_mode

from .plan import Plan

__all__ = ["is_new", "outline"]

_seen: set[tuple[Any, ...]] = set()


def is_new(plan: Plan, *what: Any) -> bool:
    """Whether launches of this kind (`what`: the tensors that may be missing, and flags) have not been seen on this GPU: to be
    asked once. Kernels of a kind may still differ, such as by heads that gates share; those are compiled when launched."""
    if plan.device.type != "cuda":
        return False
    sizes = plan.H, plan.HV, plan.K, plan.V, plan.segment is None
    rule = plan.delta, plan.decay, plan.writes, plan.precond
    kind = (plan.device, plan.dtype, *sizes, *rule, *what)
    if kind in _seen or active_mode.get() is not None:
        return False
    _seen.add(kind)
    return True


def outline(tensors: Iterable[Tensor | None]) -> list[Any]:
    """Shapes and dtypes without memory."""
    return [None if t is None else t.detach().to("meta") for t in tensors]
