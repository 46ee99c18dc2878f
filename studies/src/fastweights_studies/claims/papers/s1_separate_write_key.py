"""S1: a write key of its own costs the delta rule next to nothing."""

from __future__ import annotations

from dataclasses import replace

from ..claim import Claim
from ..conditions import Conditions, Unmeasured
from ..measured import Benchmark, divide
from ..measurement import Measurement
from ..verdict import Verdict, decided
from ..words import Quantity

FILE, COMMAND = "kernels-nvidia-h200.json", "python -m fastweights_studies.measure.kernels --ops gdn-write"
OP = "gdn-write"
STAGES = ("forward", "forward_backward")


def measure(conditions: Conditions) -> Measurement:
    kernels, found = Benchmark(conditions.measurements, FILE, COMMAND), []
    for size in kernels.kernel_sizes(OP):
        for stage in STAGES:
            own, tied = (kernels.kernel_ms(OP, size, stage, peer) for peer in (None, "tied"))
            if own is not None and tied is not None:
                ratio = divide(f"{stage}_cost", own, tied, size, mixer="gdn")
                found.append(replace(ratio, value=ratio.value - 1))
    if not found:
        raise Unmeasured(f"needs rows of {OP} in {FILE}, which `{COMMAND}` measures")
    return Measurement(tuple(found))


def decide(found: Measurement) -> Verdict:
    costs = [number.value for number in found.numbers]
    return decided(max(costs) < 0.05, f"{min(costs):.1%} to {max(costs):.1%} more device time")


CLAIM = Claim(
    name="S1",
    paper="pdn",
    source="figure 4",
    says="Keys to write with that differ from the keys to read with are nearly free.",
    printed="nearly no difference",
    setting=(
        "The gated delta rule, 8 and 16 heads of 128, bfloat16, device time with a write key of its own over that "
        "with tied keys."
    ),
    expected="holds",
    forecast="2.0% to 2.9% forward and backward",
    rule="holds if it costs less than 5% at every size.",
    measure=measure,
    decide=decide,
    numbers={f"{stage}_cost": Quantity(f"{stage}, {{B}},{{T}},{{H}},{{K}},{{V}}") for stage in STAGES},
    device="files",
    seen="the numbers were measured before the claim was declared",
)
