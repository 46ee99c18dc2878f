"""The rows of what the judge has found: errors, times, memory and why an op has no times."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Mapping
from typing import Any

from fastweights_studies.measure.rows import make_rows
from fastweights_studies.record import Origin, Plain, Row

from .accuracy import Failure
from .cases import Sizes
from .checks import Combination
from .timing import Ceilings

__all__ = [
    "CHECKS",
    "TIMES",
    "describe_failure",
    "make_ceiling_rows",
    "make_check_rows",
    "make_cold_rows",
    "make_time_rows",
    "measured_with_an_op",
    "sizes_column",
    "sizes_in",
    "worst_errors",
]

TIMES, CHECKS = "kernels", "kernel_checks"  # tasks
STAGES = ("forward", "forward_backward", "decode")
OURS = None  # as `peer`
# How a time was taken, as a column has it.
KINDS = {"graph": {"replayed": True}, "eager": {"replayed": False}, "kernels": {"profiled": True}}
# Fields of a column that one run of the judge measures together.
PARTS = ("peer", "replayed", "profiled", "result", "states", "stage", "cached", "in_place")


def sizes_column(sizes: Sizes) -> dict[str, Plain]:
    """The sizes of an op as parts of a column; HV only where it differs from H."""
    return {name: size for name, size in sizes._asdict().items() if name != "HV" or size}


def sizes_in(column: Mapping[str, Plain]) -> Sizes:
    """The sizes that a column has."""
    return Sizes(*(int(column.get(name, 0)) for name in Sizes._fields))  # type: ignore[arg-type]


def measured_with_an_op(row: Row) -> Hashable:
    """Equal for what one run of the judge finds of an op at one size: its errors, times and memory, and those of its peers.

    A first call from an empty cache and a decoded token are apart: their rows have `cached` and `in_place`.
    """
    kept = {name: value for name, value in row.column.items() if name not in PARTS}
    return (
        row.task,
        "cached" in row.column,
        "in_place" in row.column,
        *sorted((name, repr(value)) for name, value in kept.items()),
    )


def make_time_rows(
    op: str, sizes: Sizes, dtype: str, backend: str, found: Mapping[str, Any], origin: Origin
) -> list[Row]:
    """What `measuring.measure` or `decoding.judge_decoding` found of an op."""
    shared: dict[str, Plain] = {"op": op, **sizes_column(sizes), "dtype": dtype, "backend": backend}
    if "in_place" in found:
        shared["in_place"] = found["in_place"]
    stateful = dict(found.get("stateful_errors", {}))
    run = {"draws": stateful.pop("draws")} if stateful else {}
    rows = [
        row
        for states, errors in ((False, found.get("errors", {})), (True, stateful))
        for who, of_results in errors.items()
        for result, error in of_results.items()
        for row in make_rows(
            TIMES,
            origin,
            {"error": error},
            column={**shared, "peer": OURS if who == "ours" else who, "states": states, "result": result},
            run=run if states else {},
        )
    ]
    rows += _failure_rows(TIMES, found.get("refused", ()), shared, origin)
    for stage in STAGES:
        if stage in found:
            rows += _stage_rows(stage, found[stage], shared, origin)
    return rows


def _stage_rows(stage: str, part: Mapping[str, Any], shared: Mapping[str, Plain], origin: Origin) -> list[Row]:
    rows = make_rows(
        TIMES, origin, {f"{stage}_floor_ms": part["floor_ms"]}, column=shared, run={"bound": part["bound"]}
    )
    for kind, how in KINDS.items():
        for who, spread in part.get(kind, {}).items():
            column = {**shared, "peer": OURS if who == "ours" else who, **how}
            rows += make_rows(TIMES, origin, {f"{stage}_ms": spread}, column=column)
    for who, peak in part.get("peak_bytes", {}).items():
        column = {**shared, "peer": OURS if who == "ours" else who}
        rows += make_rows(TIMES, origin, {f"{stage}_peak_bytes": peak}, column=column)
    return rows


def _failure_rows(task: str, failures: Iterable[Failure], shared: Mapping[str, Plain], origin: Origin) -> list[Row]:
    """One row per failure: the error that is too large, None for an exception."""
    return [
        row
        for failure in failures
        for row in make_rows(
            task,
            origin,
            {"failure": failure.error},
            column={**shared, "result": failure.result or None},
            run={"reason": failure.reason, "limit": failure.limit},
        )
    ]


def describe_failure(row: Row) -> str:
    """A row of a failure in a few words: "dg 3.0e-02 (budget 2e-02)"."""
    reason, limit, result = row.run["reason"], row.run["limit"], row.column["result"]
    if row.value is not None and limit is not None:
        return f"{result} {row.value:.1e} ({reason} {limit:.0e})"
    return f"{result} ({reason})" if result else str(reason)


def worst_errors(rows: Iterable[Row]) -> dict[tuple[str, str], dict[str, float]]:
    """By op and precision, the largest error of every result in rows of checks; NaN where one is no number."""
    found: dict[tuple[str, str], dict[str, float]] = {}
    for row in rows:
        if row.measure == "error":
            precision = "fp32" if row.column["dtype"] == "float32" else "half"
            largest = found.setdefault((str(row.column["op"]), precision), {})
            error, result = math.nan if row.value is None else row.value, str(row.column["result"])
            if not error <= largest.get(result, 0.0):
                largest[result] = error
    return found


def make_cold_rows(
    op: str, sizes: Sizes, dtype: str, backend: str, found: Mapping[str, Any], processes: int, origin: Origin
) -> list[Row]:
    """What `cold_start` found: seconds of the first call, of all its stages and of each. processes: that began at once."""
    shared: dict[str, Plain] = {"op": op, **sizes_column(sizes), "dtype": dtype, "backend": backend}
    run: dict[str, Plain] = {"processes": processes}
    rows: list[Row] = []
    for cached, cache in ((False, "empty_cache"), (True, "warm_cache")):
        column = {**shared, "cached": cached}
        rows += make_rows(TIMES, origin, {"first_call_s": found[f"{cache}_s"]}, column=column, run=run)
        for stage, seconds in found[f"{cache}_stages_s"].items():
            values = {"stage_of_first_call_s": seconds}
            rows += make_rows(TIMES, origin, values, column={**column, "stage": stage}, run=run)
    return rows


def make_ceiling_rows(ceilings: Ceilings, origin: Origin) -> list[Row]:
    """What the device reaches."""
    values = {
        "copy_bytes_per_second": ceilings.bandwidth,
        "product_operations_per_second": ceilings.rate,
        "float32_operations_per_second": ceilings.float32,
    }
    return make_rows("ceilings", origin, values)


def make_check_rows(
    op: str, what: Combination, backend: str, seed: int, found: Mapping[str, Any], origin: Origin
) -> list[Row]:
    """The verdict on a combination: whether it passes, its errors, and its failures."""
    shared: dict[str, Plain] = {
        "op": op,
        **sizes_column(what.sizes),
        "dtype": what.dtype,
        "backend": backend,
        "decay": what.decay,
        "packed": what.packed,
    }
    rows = make_rows(CHECKS, origin, {"passes": not found["failures"]}, column=shared, seed=seed)
    for result, error in found.get("errors", {}).items():
        rows += make_rows(
            CHECKS,
            origin,
            {"error": error},
            column={**shared, "result": result},
            run={"draws": found["draws"]},
            seed=seed,
        )
    return rows + _failure_rows(CHECKS, found["failures"], shared, origin)
