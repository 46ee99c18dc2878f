"""S4: solving in 32 of 128 dimensions makes Gated KalmaNet faster."""

from __future__ import annotations

from dataclasses import replace

from ..claim import Claim
from ..conditions import Conditions, Unmeasured
from ..measured import Benchmark, divide
from ..measurement import Measurement
from ..verdict import Verdict, decided
from ..words import Quantity

FILE = "training-steps-nvidia-h200.json"
COMMAND = "python -m fastweights_studies.measure.training_steps --only 'gka-1b with sketch 32'"
SKETCH = 32


def measure(conditions: Conditions) -> Measurement:
    steps = Benchmark(conditions.measurements, FILE, COMMAND)
    plain, sketched = steps.preset_step_ms("gka-1b"), steps.preset_step_ms("gka-1b", sketch=SKETCH)
    if plain is None or sketched is None:
        raise Unmeasured(
            f"needs training steps of a 1B model with and without sketch={SKETCH} in {FILE}: `{COMMAND}` on one GPU"
        )
    ratio = divide("throughput_ratio", plain, sketched, {}, mixer="gka", options={"sketch": SKETCH})
    return Measurement((replace(ratio, origin=sketched.origin),))


def decide(found: Measurement) -> Verdict:
    ratio = found.mean("throughput_ratio")
    return decided(ratio >= 1.05, f"{ratio - 1:+.1%} throughput")


CLAIM = Claim(
    name="S4",
    paper="gka",
    source="table 8",
    says="A sketch of 32 dimensions trains 9.4% faster and costs 1.3 points.",
    printed="+9.4% throughput",
    setting=(
        "Training steps of the preset of 1B with and without sketch=32, bfloat16, one H200. The loss of quality "
        "is not measured."
    ),
    expected="holds",
    forecast="at least 5% faster at the layer's share of a 1B block",
    rule="holds if it is at least 5% faster.",
    measure=measure,
    decide=decide,
    to_decide=("the authors' kernels on the same GPU; these are ours, whose time says nothing of theirs"),
    until_then="not testable here",
    numbers={"throughput_ratio": Quantity(f"throughput with a sketch of {SKETCH} over that without")},
    device="files",
)
