"""Whether ours is as exact as it must be: values and gradients, with initial and final states, against float64 and the twin."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .accuracy import cotangents, errors, in_float64, over_budget, over_twin, pooled, results
from .cases import CASES, Sizes
from .twin import HAS_TWIN, twin_results

DRAWS = 16  # where the first one exceeds twice the twin


class Drawn(NamedTuple):
    inputs: Mapping[str, Tensor]
    states: Mapping[str, Tensor]
    given: Mapping[str, Tensor]

    @classmethod
    def around(cls, op: str, inputs: Mapping[str, Tensor], sizes: Sizes, count: int, seed: int) -> Drawn:
        """Inputs that were drawn with this seed, and with the next two the states of `count` sequences and the cotangents."""
        states = CASES[op].draw_states(sizes, count, str(inputs["v"].device), seed + 1)
        return cls(inputs, states, cotangents(CASES[op], inputs, states, seed + 2))

    def exact(self) -> Drawn:
        return Drawn(*(in_float64(x) for x in self))


def verdict(
    op: str, draw: Callable[[int], Drawn], seed: int, dtype: torch.dtype, backend: str, **more: Any
) -> dict[str, Any]:
    """errors, twin, the number of draws that these are pooled over, and failures. Budgets hold for the first draw by
    itself: no other draws make up for it."""
    case, has_twin = CASES[op], dtype != torch.float32 and op in HAS_TWIN

    def compare(seed: int) -> tuple[dict[str, float], dict[str, float]]:
        drawn = draw(seed)
        found = results(case, *drawn, backend=backend, **more)
        wanted = results(case, *drawn.exact(), backend="torch", **more)
        twin = errors(twin_results(case, *drawn, **more), wanted) if has_twin else {}
        return errors(found, wanted), twin

    draws = [compare(seed)]
    if has_twin and over_twin(*draws[0], dtype):
        draws += [compare(seed + 10 * i) for i in range(1, DRAWS)]
    found, twin = (pooled(which) for which in zip(*draws))
    failures = over_budget(draws[0][0], dtype)
    row: dict[str, Any] = {"errors": found, "draws": len(draws)}
    if has_twin:
        row["twin"] = twin
        failures = {**over_twin(found, twin, dtype), **failures}
    return {**row, "failures": list(failures.values())}
