"""S4: solving in 32 of 128 dimensions makes Gated KalmaNet faster."""

from __future__ import annotations

from ..claim import Claim, Conditions, Measurement, Unmeasured, Verdict, decided
from ..measured import origin, read_results, steps

FILE = "training-steps-nvidia-h200.json"
COMMAND = "python -m fastweights_studies.measure.training_steps --only 'gka-1b with sketch 32'"
SKETCHED = "gka-1b with sketch 32"


def measure(conditions: Conditions) -> Measurement:
    content = read_results(conditions.measurements, FILE, COMMAND)
    models = {name: row for part in content["comparisons"].values() for name, row in part["models"].items()}
    if not {"gka-1b", SKETCHED} <= set(models):
        raise Unmeasured(
            f"needs training steps of a 1B model with and without sketch=32 in {FILE}: `{COMMAND}` on one GPU"
        )
    measured = content["comparisons"][SKETCHED].get("measured")
    ratio = steps(models["gka-1b"]) / steps(models[SKETCHED])
    return Measurement({"throughput with a sketch of 32 over that without": [ratio]}, origin(FILE, content, measured))


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
