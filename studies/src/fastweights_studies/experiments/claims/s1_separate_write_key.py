"""S1: a write key of its own costs the delta rule next to nothing."""

from __future__ import annotations

from ..claim import Claim, Conditions, Measurement, Unmeasured, Verdict, decided
from ..measured import Benchmark

FILE, COMMAND = "kernels-nvidia-h200.json", "python -m fastweights_studies.measure.kernels --ops gdn-write"


def measure(conditions: Conditions) -> Measurement:
    kernels = Benchmark(conditions.measurements, FILE, COMMAND)
    sizes = list(kernels.kernel_sizes("gdn-write"))
    if not sizes:
        raise Unmeasured(f"needs rows of gdn-write in {FILE}, which `{COMMAND}` measures")
    found, first = {}, None
    for size in sizes:
        for stage in ("forward", "forward_backward"):
            own, tied = (kernels.kernel_ms("gdn-write", size, stage, peer) for peer in (None, "tied"))
            assert own is not None and tied is not None
            found[f"{stage}, {','.join(map(str, size.values()))}"] = [own.ms / tied.ms - 1]
            first = first or own
    assert first is not None
    return Measurement(found, first.describe())


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
