"""Runs a claim: measure, decide, record."""

from __future__ import annotations

import time
from contextlib import nullcontext

from fastweights.kinds import checked
from fastweights.results.records import reading_fields
from fastweights.training.calling_script import work_begins

from ..origin import find_origin
from .claim import Claim
from .conditions import Conditions, Unmeasured
from .measurement import Measurement
from .record import ClaimRecord
from .verdict import Verdict

__all__ = ["run_claim"]


@checked
def run_claim(claim: Claim, conditions: Conditions) -> ClaimRecord:
    """Measure and decide. What cannot be measured on this machine is recorded with the reason."""
    work_begins("run_claim")
    start = time.perf_counter()
    found, verdict = _measured(claim, conditions)
    seeds = list(conditions.seeds)
    options = "" if conditions.device == "cpu" else f" --device {conditions.device}"
    if tuple(seeds) != claim.seeds:
        options += f" --seeds {','.join(map(str, seeds))}"
    seconds = round(time.perf_counter() - start, 3)
    origin = find_origin(conditions.device)
    return ClaimRecord(
        claim=claim.name,
        declaration=claim.declaration(conditions.device),
        status=verdict.status,
        statements=list(verdict.statements),
        rows=[number.as_row(claim.name, claim.numbers[number.measure].unit, origin) for number in found.numbers],
        seeds=seeds,
        command=f"fastweights reproduce {claim.name}{options}",
        device=conditions.device,
        seconds=seconds,
        origin=origin,
    )


def _measured(claim: Claim, conditions: Conditions) -> tuple[Measurement, Verdict]:
    if claim.measure is None or claim.decide is None:
        return Measurement(), Verdict("not resolved", f"needs {claim.needs}")
    try:
        with reading_fields(f"in {conditions.measurements}") if claim.device == "files" else nullcontext():
            found = claim.measure(conditions)
    except Unmeasured as missing:
        return Measurement(), Verdict("not testable here", str(missing))
    return found, claim.verdict(found)
