"""One op at one size: its errors and those of the peers, then the times of all in one run."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from .accuracy import errors, in_float64, over_budget, token_results
from .cases import CASES, Case, Sizes
from .peers import peers
from .timing import Ceilings, Work, as_graph, interleaved, peak_megabytes
from .verdict import Drawn, verdict

Call = Callable[[Mapping[str, Tensor]], Tensor]
OTHERS = {"sdpa", "tied"}  # compute something else, beside which the time is of interest


def forward(call: Call, inputs: Mapping[str, Tensor]) -> None:
    with torch.no_grad():
        call(inputs)


def forward_backward(call: Call, inputs: Mapping[str, Tensor], do: Tensor) -> None:
    torch.autograd.grad(call(inputs), list(inputs.values()), do, allow_unused=True)


def check_states(name: str, sizes: Sizes, dtype: torch.dtype, backend: str, seed: int) -> dict[str, Any]:
    """Ours with initial and final states, and the twin."""

    def draw(seed: int) -> Drawn:
        return Drawn.around(name, CASES[name].draw(sizes, dtype, "cuda", seed), sizes, sizes.B, seed)

    found = verdict(name, draw, seed, dtype, backend)
    return {"ours": found.pop("errors"), **found}


def check_calls(
    case: Case, calls: dict[str, Call], inputs: Mapping[str, Tensor], do: Tensor
) -> tuple[dict[str, dict[str, float]], dict[str, str]]:
    """Errors of every call without states. A peer that does not run is taken out of the calls, and why is said."""
    wanted = token_results(lambda x: case.ours(x, backend="torch")[0], in_float64(inputs), do.double())
    found, failed = {}, {}
    for who in list(calls):
        try:
            got = token_results(calls[who], inputs, do)
        except Exception as error:  # theirs: the rest is worth measuring
            if who == "ours":
                raise
            failed[who] = f"{type(error).__name__}: {str(error).splitlines()[0][:200] if str(error) else ''}"
            del calls[who]
            continue
        if who not in OTHERS:
            found[who] = errors(got, wanted)
    return found, failed


def judge(
    name: str, sizes: Sizes, dtype: torch.dtype, backend: str, repeats: int, ceilings: Ceilings, with_peers: bool
) -> dict[str, Any]:
    case = CASES[name]
    calls: dict[str, Call] = {"ours": lambda x: case.ours(x, backend=backend)[0]}
    if "write_key" in case.inputs:
        calls["tied"] = lambda x: case.ours({n: y for n, y in x.items() if n != "write_key"}, backend=backend)[0]
    if with_peers:
        calls |= peers(name)
    seed = torch.seed() % 2**31
    inputs = case.draw(sizes, dtype, "cuda", seed)
    do = torch.randn_like(inputs["v"])
    moments = [time.perf_counter()]
    stateful = check_states(name, sizes, dtype, backend, seed)
    moments.append(time.perf_counter())
    found, failed = check_calls(case, calls, inputs, do)
    moments.append(time.perf_counter())
    row: dict[str, Any] = {"errors": found, "stateful_errors": stateful, "failed": failed}
    refused = [*stateful.pop("failures"), *over_budget(found["ours"], dtype).values()]
    if refused:
        return {**row, "refused": refused}
    for stage in ("forward", "forward_backward"):
        backward = stage == "forward_backward"
        works: dict[str, Work] = {
            who: partial(forward_backward, call, inputs, do) if backward else partial(forward, call, inputs)
            for who, call in calls.items()
        }
        row[stage] = {
            **floors(case.bytes(inputs, backward) / ceilings.bandwidth, case.seconds(sizes, backward, ceilings)),
            **times(works, repeats),
            "peak_mb": {who: peak_megabytes(work) for who, work in works.items()},
        }
    moments.append(time.perf_counter())
    spent = [round(end - start, 1) for start, end in zip(moments, moments[1:])]
    return {**row, "seconds": dict(zip(("states", "errors_and_tuning", "times"), spent))}


def floors(traffic: float, operations: float) -> dict[str, Any]:
    """From seconds: no implementation is faster than the larger of the two."""
    return {"floor_ms": 1e3 * max(traffic, operations), "bound": "memory" if traffic > operations else "arithmetic"}


def times(works: Mapping[str, Work], repeats: int) -> dict[str, Any]:
    return {
        "eager": interleaved(works, repeats),
        "graph": interleaved({who: as_graph(work) for who, work in works.items()}, repeats),
    }
