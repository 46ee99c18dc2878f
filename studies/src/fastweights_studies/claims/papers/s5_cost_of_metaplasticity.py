"""S5: what metaplasticity costs in training and in decoding."""

from __future__ import annotations

from ..claim import Claim
from ..conditions import Conditions, Unmeasured
from ..measured import Benchmark, divide
from ..measurement import Measurement
from ..verdict import Verdict
from ..words import Quantity

STEPS, DECODING = "training-steps-nvidia-h200.json", "decode-layers-nvidia-h200.json"
PRINTED = {"170m": 1.5, "760m": 3.0}
OURS = "palimpsa-d"


def measure(conditions: Conditions) -> Measurement:
    steps = Benchmark(conditions.measurements, STEPS, "python -m fastweights_studies.measure.training_steps")
    decoding = Benchmark(conditions.measurements, DECODING, "python -m fastweights_studies.measure.decode_layers")
    found = []
    for size in PRINTED:
        ours, base = (steps.preset_step_ms(f"{name}-{size}") for name in ("palimpsa-d", "palimpsa-d-plain"))
        if ours is None or base is None:
            raise Unmeasured(f"needs training steps of palimpsa-d-{size} in {STEPS}")
        found.append(divide("step_ratio", ours, base, {"size": size}, mixer=OURS))
    for width in decoding.layer_widths():
        ours, base = decoding.layer_ms(OURS, width), decoding.layer_ms(OURS, width, metaplasticity=False)
        if ours is not None and base is not None:
            found.append(divide("decoding_ratio", ours, base, {"width": width}, mixer=OURS))
    return Measurement(tuple(found))


def decide(found: Measurement) -> Verdict:
    decoding = found.largest("decoding_ratio")
    training = {size: found.mean("step_ratio", size=size) for size in PRINTED}
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
    to_decide=("the authors' kernels on the same GPU; these are ours, whose time says nothing of theirs"),
    until_then="not testable here",
    numbers={
        "step_ratio": Quantity("training step, {size}"),
        "decoding_ratio": Quantity("decoding of a layer, width {width}"),
    },
    device="files",
    seen="the decoding that decides was measured before the claim was declared",
)
