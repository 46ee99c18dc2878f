"""One op at one size: its errors and those of the peers, then the times of all in one run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from functools import partial
from multiprocessing import get_context
from typing import Any

import torch
from torch import Tensor

from .accuracy import Failure, errors, in_float64, over_budget, token_results
from .cases import CASES, Case, Sizes
from .peers import UNCAPTURED, peers
from .timing import Ceilings, Work, as_graph, interleaved, kernel_times, peak_bytes
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
) -> tuple[dict[str, dict[str, float]], dict[str, Failure]]:
    """Errors of every call without states. A peer that does not run is taken out of the calls, and why is said."""
    wanted = token_results(lambda x: case.ours(x, backend="torch")[0], in_float64(inputs), do.double())
    found, failed = {}, {}
    for who in list(calls):
        try:
            got = token_results(calls[who], inputs, do)
        except Exception as error:  # theirs: the rest is worth measuring
            if who == "ours":
                raise
            failed[who] = Failure.of_error(error, 200)
            del calls[who]
            continue
        if who not in OTHERS:
            found[who] = errors(got, wanted)
    return found, failed


def calls_of(name: str, backend: str, with_peers: bool) -> dict[str, Call]:
    case = CASES[name]
    calls: dict[str, Call] = {"ours": lambda x: case.ours(x, backend=backend)[0]}
    if "write_key" in case.inputs:
        calls["tied"] = lambda x: case.ours({n: y for n, y in x.items() if n != "write_key"}, backend=backend)[0]
    return calls | (peers(name) if with_peers else {})


def check(name: str, sizes: Sizes, dtype: torch.dtype, backend: str, with_peers: bool) -> dict[str, Any]:
    """The errors of all; "refused" says why ours gets no time. "failed": the peers that do not run."""
    case, seed = CASES[name], torch.seed() % 2**31
    inputs = case.draw(sizes, dtype, "cuda", seed)
    stateful = check_states(name, sizes, dtype, backend, seed)
    found, failed = check_calls(case, calls_of(name, backend, with_peers), inputs, torch.randn_like(inputs["v"]))
    refused = [*stateful.pop("failures"), *over_budget(found["ours"], dtype).values()]
    row = {"errors": found, "stateful_errors": stateful, "failed": failed}
    return {**row, "refused": refused} if refused else row


def measure(
    name: str, sizes: Sizes, dtype: torch.dtype, backend: str, repeats: int, ceilings: Ceilings, with_peers: bool,
    checked: Mapping[str, Any] | None = None,
) -> dict[str, Any]:  # fmt: skip
    """The errors, or those found before, and the times."""
    row = dict(checked or check(name, sizes, dtype, backend, with_peers))
    if "refused" in row:
        return row
    case = CASES[name]
    inputs = case.draw(sizes, dtype, "cuda", torch.seed() % 2**31)
    do = torch.randn_like(inputs["v"])
    calls = {who: call for who, call in calls_of(name, backend, with_peers).items() if who not in row["failed"]}
    for stage in ("forward", "forward_backward"):
        backward = stage == "forward_backward"
        works: dict[str, Work] = {
            who: partial(forward_backward, call, inputs, do) if backward else partial(forward, call, inputs)
            for who, call in calls.items()
        }
        row[stage] = {
            **floors(case.bytes(inputs, backward) / ceilings.bandwidth, case.seconds(sizes, backward, ceilings)),
            **times(works, repeats),
            "peak_bytes": {who: peak_bytes(work) for who, work in works.items()},
        }
    return row


def check_several(
    asked: Sequence[tuple[str, Sizes]], dtype: torch.dtype, backend: str, processes: int
) -> Iterator[tuple[str, Sizes, dict[str, Any]]]:
    """`check` of several ops and sizes at the same time, without peers, as they come."""
    with ProcessPoolExecutor(processes, get_context("spawn")) as pool:
        started = {pool.submit(_check_and_tidy, name, sizes, dtype, backend): (name, sizes) for name, sizes in asked}
        for done in as_completed(started):
            error = done.exception()
            yield *started[done], refusal(error) if error else done.result()


def refusal(error: BaseException) -> dict[str, Any]:
    """The row of an op that raises."""
    return {"refused": [Failure.of_error(error)]}


def _check_and_tidy(name: str, sizes: Sizes, dtype: torch.dtype, backend: str) -> dict[str, Any]:
    torch.set_num_threads(1)
    try:
        return check(name, sizes, dtype, backend, with_peers=False)
    finally:
        torch.cuda.empty_cache()  # the processes share one device


def floors(traffic: float, operations: float) -> dict[str, Any]:
    """From seconds: no implementation is faster than the larger of the two."""
    return {"floor_ms": 1e3 * max(traffic, operations), "bound": "memory" if traffic > operations else "arithmetic"}


def times(works: Mapping[str, Work], repeats: int) -> dict[str, Any]:
    """By kind. Beside a peer that no graph can hold, the kernels' times of all."""
    captured = {who: as_graph(work) for who, work in works.items() if who not in UNCAPTURED}
    found = {"eager": interleaved(works, repeats), "graph": interleaved(captured, repeats)}
    return found if len(captured) == len(works) else {**found, "kernels": kernel_times(works, repeats)}
