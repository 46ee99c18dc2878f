"""Runs a claim: measure, decide, record."""

from __future__ import annotations

import math
import time
from contextlib import nullcontext
from datetime import datetime, timezone

from fastweights.environment import machine, versions
from fastweights.kinds import checked
from fastweights.results.records import reading_fields
from fastweights.training.calling_script import work_begins

from .claim import Claim, Conditions, Measurement, Unmeasured, Verdict
from .record import ClaimRecord

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
    return ClaimRecord(
        claim=claim.name,
        declaration=claim.declaration(conditions.device),
        status=verdict.status,
        reason=verdict.reason,
        numbers={name: [x if math.isfinite(x) else None for x in row] for name, row in found.values.items()},
        seeds=seeds,
        command=f"fastweights reproduce {claim.name}{options}",
        origin=found.origin,
        undertrained=list(found.undertrained),
        seconds=round(time.perf_counter() - start, 3),
        time=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        versions=versions(),
        machine=machine(conditions.device),
    )


def _measured(claim: Claim, conditions: Conditions) -> tuple[Measurement, Verdict]:
    if claim.measure is None or claim.decide is None:
        return Measurement({}), Verdict("not resolved", f"needs {claim.needs}")
    try:
        with reading_fields(f"in {conditions.measurements}") if claim.device == "files" else nullcontext():
            found = claim.measure(conditions)
    except Unmeasured as missing:
        return Measurement({}), Verdict("not testable here", str(missing))
    return found, claim.decide(found)
