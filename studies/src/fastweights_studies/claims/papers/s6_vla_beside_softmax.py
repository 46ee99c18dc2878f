"""S6: from which length variational linear attention is faster than softmax attention."""

from __future__ import annotations

import math
from itertools import pairwise

from ..claim import Claim
from ..conditions import Conditions, Unmeasured
from ..measured import Benchmark, divide
from ..measurement import Measurement
from ..verdict import Verdict
from ..words import Quantity

FILE, COMMAND = "vla-nvidia-h200.json", "python -m fastweights_studies.measure.vla"
SOFTMAX = ("flash", "cudnn", "efficient")
REFRESHED, PLAIN = "attention_ratio", "unrefreshed_attention_ratio"
EARLIEST, LATEST = 20_000, 90_000  # tokens at the crossing


def measure(conditions: Conditions) -> Measurement:
    times, found = Benchmark(conditions.measurements, FILE, COMMAND), []
    for length in times.attention_lengths():
        kernels = [reading for name in SOFTMAX if (reading := times.attention_ms(name, length)) is not None]
        softmax = min(kernels, key=lambda reading: reading.ms)
        for ratio, rule in ((REFRESHED, "vla_refreshed"), (PLAIN, "vla")):
            reading = times.attention_ms(rule, length)
            if reading is not None:
                found.append(divide(ratio, reading, softmax, {"length": length}, mixer="vla"))
    loop, ours = times.loop_ms("loop"), times.loop_ms("vla_refreshed")
    if loop is None or ours is None:
        raise Unmeasured(f"needs the loop over tokens in {FILE}, which `{COMMAND}` measures")
    found.append(divide("loop_ratio", loop, ours, {"length": 4096}, mixer="vla"))
    return Measurement(tuple(found))


def list_ratios(found: Measurement, measure: str) -> list[tuple[int, float]]:
    """Lengths, and VLA's time over softmax attention's there."""
    return sorted((int(number.column["length"]), number.value) for number in found.select(measure))  # type: ignore[arg-type]


def find_crossing(points: list[tuple[int, float]]) -> float:
    """The length at which both take the same time, by a straight line in logarithms; infinite if there is none."""
    if points[0][1] < 1:
        return points[0][0]
    for (left, above), (right, below) in pairwise(points):
        if above >= 1 > below:
            share = math.log(above) / math.log(above / below)
            return left * (right / left) ** share
    return math.inf


def describe_crossing(points: list[tuple[int, float]]) -> str:
    """The crossing in words, or how far the longest length is from one."""
    length = find_crossing(points)
    if math.isfinite(length):
        return f"at {length:,.0f} tokens"
    longest, ratio = points[-1]
    return f"at no length up to {longest:,} tokens, where it takes {ratio:.2f} times as long"


def decide(found: Measurement) -> Verdict:
    points, unrefreshed = list_ratios(found, REFRESHED), list_ratios(found, PLAIN)
    length, loop = find_crossing(points), found.mean("loop_ratio")
    crossings = f"as fast as the fastest softmax attention {describe_crossing(points)}"
    if unrefreshed:
        crossings += f"; without its refresh {describe_crossing(unrefreshed)}"
    statements = [
        crossings,
        f"a loop over 4096 takes {loop:.0f} times as long",
        "measured at 8 heads of 64 where the paper has 4 of 32",
    ]
    longest, ratio = points[-1]
    if length == math.inf and ratio * longest / LATEST < 1:  # the ratio falls at most as fast as the length grows
        return Verdict("not resolved", [*statements, "longer sequences are needed"])
    return Verdict("holds" if EARLIEST <= length <= LATEST and loop >= 14 else "does not hold", statements)


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
    to_decide=("4 heads of 32, as in the paper"),
    numbers={
        REFRESHED: Quantity("VLA over softmax at {length} tokens"),
        PLAIN: Quantity("without refresh: VLA over softmax at {length} tokens"),
        "loop_ratio": Quantity("loop over VLA at {length} tokens"),
    },
    device="files",
)
