"""S4: solving in 32 of 128 dimensions makes Gated KalmaNet faster."""

from __future__ import annotations

from ..claim import Claim, Conditions, Measurement, Unmeasured, Verdict, decided
from ..measured import Benchmark

FILE = "training-steps-nvidia-h200.json"
COMMAND = "python -m fastweights_studies.measure.training_steps --only 'gka-1b with sketch 32'"


def measure(conditions: Conditions) -> Measurement:
    whole = Benchmark(conditions.measurements, FILE, COMMAND)
    plain, sketched = whole.preset_step_ms("gka-1b"), whole.preset_step_ms("gka-1b", sketch=32)
    if plain is None or sketched is None:
        raise Unmeasured(
            f"needs training steps of a 1B model with and without sketch=32 in {FILE}: `{COMMAND}` on one GPU"
        )
    found = {"throughput with a sketch of 32 over that without": [plain.ms / sketched.ms]}
    return Measurement(found, sketched.describe())


def decide(found: Measurement) -> Verdict:
    (name,) = found.values
    return decided(found.mean(name) >= 1.05, f"{found.mean(name) - 1:+.1%} throughput")


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
    device="files",
)
