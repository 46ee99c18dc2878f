"""S6: from which length variational linear attention is faster than softmax attention."""

from __future__ import annotations

import math
from itertools import pairwise

from ..claim import Claim, Conditions, Measurement, Verdict
from ..measured import origin, read_results

FILE, COMMAND = "vla-nvidia-h200.json", "python benchmarks/vla.py"
SOFTMAX = ("flash", "cudnn", "efficient")


def measure(conditions: Conditions) -> Measurement:
    content = read_results(conditions.measurements, FILE, COMMAND)
    found = {}
    for length, row in content["rows"].items():
        softmax = min(row[name]["median"] for name in SOFTMAX if name in row)
        found[f"VLA over softmax at {length} tokens"] = [row["vla refreshed"]["median"] / softmax]
    loop = content["loop"]
    found["loop over VLA at 4096 tokens"] = [loop["loop"]["median"] / loop["vla refreshed"]["median"]]
    return Measurement(found, origin(FILE, content))


def crossing(found: Measurement) -> float:
    """The length at which both take the same time, by a straight line in logarithms; infinite if there is none."""
    points = sorted(
        (int(name.split()[-2]), found.mean(name)) for name in found.values if name.startswith("VLA over softmax")
    )
    if points[0][1] < 1:
        return points[0][0]
    for (left, above), (right, below) in pairwise(points):
        if above >= 1 > below:
            share = math.log(above) / math.log(above / below)
            return left * (right / left) ** share
    return math.inf


def decide(found: Measurement) -> Verdict:
    length, loop = crossing(found), found.mean("loop over VLA at 4096 tokens")
    reason = f"as fast as the fastest softmax attention at {length:,.0f} tokens; a loop over 4096 takes {loop:.0f} times as long"
    return Verdict("holds" if 20_000 <= length <= 90_000 and loop >= 14 else "does not hold", reason)


CLAIM = Claim(
    name="S6",
    paper="vla",
    source="section 6.1",
    says="Fused VLA is 14 times as fast as Python at T = 4096 and faster than softmax attention from 43k tokens on.",
    printed="14 times; 43k tokens",
    setting=(
        "Forward, one sequence, 8 heads of 64 (4 of 32 in the paper), bfloat16, one H200, with a refresh every 20 "
        "tokens."
    ),
    expected="holds",
    forecast="a crossing between 20k and 90k tokens",
    rule=(
        "holds if the crossing with the fastest softmax attention is at 20k to 90k tokens and the loop takes 14 "
        "times as long or more."
    ),
    measure=measure,
    decide=decide,
    device="files",
)
