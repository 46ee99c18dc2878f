"""S6: from which length variational linear attention is faster than softmax attention."""

from __future__ import annotations

import math
from itertools import pairwise

from ..claim import Claim, Conditions, Measurement, Verdict
from ..measured import Benchmark

FILE, COMMAND = "vla-nvidia-h200.json", "python -m fastweights_studies.measure.vla"
SOFTMAX = ("flash", "cudnn", "efficient")
EARLIEST, LATEST = 20_000, 90_000  # tokens at the crossing


def measure(conditions: Conditions) -> Measurement:
    timed = Benchmark(conditions.measurements, FILE, COMMAND)
    found = {}
    for length in timed.attention_lengths():
        softmax = min(one.ms for name in SOFTMAX if (one := timed.attention_ms(name, length)))
        refreshed, plain = (timed.attention_ms(name, length) for name in ("vla_refreshed", "vla"))
        assert refreshed is not None
        found[f"VLA over softmax at {length} tokens"] = [refreshed.ms / softmax]
        if plain:
            found[f"without refresh: VLA over softmax at {length} tokens"] = [plain.ms / softmax]
    loop, ours = timed.loop_ms("loop"), timed.loop_ms("vla_refreshed")
    assert loop is not None and ours is not None
    found["loop over VLA at 4096 tokens"] = [loop.ms / ours.ms]
    return Measurement(found, loop.describe())


def ratios(found: Measurement, kind: str) -> list[tuple[int, float]]:
    """Lengths, and VLA's time over softmax attention's there."""
    return sorted(
        (int(name.split()[-2]), found.mean(name)) for name in found.values if name.startswith(f"{kind}VLA over softmax")
    )


def crossing(points: list[tuple[int, float]]) -> float:
    """The length at which both take the same time, by a straight line in logarithms; infinite if there is none."""
    if points[0][1] < 1:
        return points[0][0]
    for (left, above), (right, below) in pairwise(points):
        if above >= 1 > below:
            share = math.log(above) / math.log(above / below)
            return left * (right / left) ** share
    return math.inf


def where(points: list[tuple[int, float]]) -> str:
    """The crossing in words, or how far the longest length is from one."""
    length = crossing(points)
    if math.isfinite(length):
        return f"at {length:,.0f} tokens"
    longest, ratio = points[-1]
    return f"at no length up to {longest:,} tokens, where it takes {ratio:.2f} times as long"


def decide(found: Measurement) -> Verdict:
    length, loop = crossing(ratios(found, "")), found.mean("loop over VLA at 4096 tokens")
    parts = [
        f"{label} {where(points)}"
        for label, kind in (
            ("as fast as the fastest softmax attention", ""),
            ("without its refresh", "without refresh: "),
        )
        if (points := ratios(found, kind))
    ]
    loops = f"a loop over 4096 takes {loop:.0f} times as long"
    reason = "; ".join([*parts, loops, "measured at 8 heads of 64 where the paper has 4 of 32"])
    longest, ratio = ratios(found, "")[-1]
    if length == math.inf and ratio * longest / LATEST < 1:  # the ratio falls at most as fast as the length grows
        return Verdict("not resolved", f"{reason}; longer sequences are needed")
    return Verdict("holds" if EARLIEST <= length <= LATEST and loop >= 14 else "does not hold", reason)


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
