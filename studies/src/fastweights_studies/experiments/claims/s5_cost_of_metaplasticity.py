"""S5: what metaplasticity costs in training and in decoding."""

from __future__ import annotations

from ..claim import Claim, Conditions, Measurement, Unmeasured, Verdict
from ..measured import Benchmark, describe_readings

STEPS, DECODING = "training-steps-nvidia-h200.json", "decode-layers-nvidia-h200.json"
PRINTED = {"170m": 1.5, "760m": 3.0}


def measure(conditions: Conditions) -> Measurement:
    whole = Benchmark(conditions.measurements, STEPS, "python -m fastweights_studies.measure.training_steps")
    decoding = Benchmark(conditions.measurements, DECODING, "python -m fastweights_studies.measure.decode_layers")
    found, read = {}, []
    for size in PRINTED:
        ours, base = (whole.preset_step_ms(f"{name}-{size}") for name in ("palimpsa-d", "palimpsa-d-plain"))
        if ours is None or base is None:
            raise Unmeasured(f"needs training steps of palimpsa-d-{size} in {STEPS}")
        found[f"training step, {size}"] = [ours.ms / base.ms]
        read.append(ours)
    for width in decoding.layer_widths():
        ours = decoding.layer_ms("palimpsa-d", width)
        base = decoding.layer_ms("palimpsa-d", width, metaplasticity=False)
        if ours and base:
            found[f"decoding of a layer, width {width}"] = [ours.ms / base.ms]
            read.append(ours)
    return Measurement(found, describe_readings(*read))


def decide(found: Measurement) -> Verdict:
    decoding = max(found.mean(name) for name in found.values if name.startswith("decoding"))
    training = {size: found.mean(f"training step, {size}") for size in PRINTED}
    reason = (
        ", ".join(f"training {x:.2f} at {size} (paper {PRINTED[size]})" for size, x in training.items())
        + f", decoding at most {decoding:.2f} (paper 4)"
    )
    return Verdict("does not hold" if decoding < 2.5 else "holds", reason)


CLAIM = Claim(
    name="S5",
    paper="palimpsa",
    source="appendix (training and decoding speed)",
    says=(
        "Palimpsa trains 1.5 (170M) to 3 times (760M) as long as simple gated linear attention, and decodes 4 "
        "times as long."
    ),
    printed="1.5, 3, 4",
    setting=(
        "Training steps of the presets of 170M and 760M and decoding of a layer for 64 sequences, with and "
        "without metaplasticity, bfloat16, one H200."
    ),
    expected="does not hold",
    forecast="the state is twice as large, so that decoding, bound by bandwidth, takes twice as long",
    rule="The factor of 4 in decoding is not inherent, and the claim does not hold, if ours is below 2.5.",
    measure=measure,
    decide=decide,
    device="files",
    seen="the decoding that decides was measured before the claim was declared",
)
