"""S1: a write key of its own costs the delta rule next to nothing."""

from __future__ import annotations

import re

from ..claim import Claim, Conditions, Measurement, Unmeasured, Verdict, decided
from ..measured import device_ms, origin, read_results

FILE, COMMAND = "kernels-nvidia-h200.json", "python -m fastweights_studies.measure.kernels --ops gdn-write"


def measure(conditions: Conditions) -> Measurement:
    content = read_results(conditions.measurements, FILE, COMMAND)
    rows = {size: row for size, row in content["rows"].items() if re.match(r"gdn-write \d", size)}
    if not rows:
        raise Unmeasured(f"needs rows of gdn-write in {FILE}, which `{COMMAND}` measures")
    found = {
        f"{stage}, {size.split()[1]}": [device_ms(row, stage) / device_ms(row, stage, "tied") - 1]
        for size, row in rows.items()
        for stage in ("forward", "forward_backward")
    }
    return Measurement(found, origin(FILE, content, next(iter(rows.values())).get("measured")))


def decide(found: Measurement) -> Verdict:
    costs = [found.mean(name) for name in found.values]
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
    device="files",
    seen="the numbers were measured before the claim was declared",
)
