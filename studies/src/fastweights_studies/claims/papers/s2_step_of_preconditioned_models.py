"""S2: what preconditioning costs a training step of a 340M model."""

from __future__ import annotations

from ..claim import Claim
from ..conditions import Conditions, Unmeasured
from ..measured import Benchmark, divide
from ..measurement import Measurement, Number
from ..verdict import Verdict
from ..words import Quantity, Words

FILE, COMMAND = (
    "training-steps-nvidia-h200.json",
    "python -m fastweights_studies.measure.training_steps --only pgdn-340m pkda-340m",
)
OPS = "kernels-nvidia-h200.json"
OPS_SIZE = {"B": 1, "T": 32768, "H": 8, "K": 128, "V": 128}
# One mixer's time over another's.
PRESET_PAIRS = (("pgdn", "gdn"), ("pkda", "kda"))
OP_PAIRS = (*PRESET_PAIRS, ("mesa", "pgdn"))
MESA_PAIRS = (("mesa", "pgdn"), ("mesa", "pkda"))
# No preset of 340M has MesaNet's memory. Each of these was measured in turn with 24 layers of gdn.
LAYERS = "training-steps-nvidia-h100-80gb-hbm3.json"
LAYERS_COMMAND = (
    "python -m fastweights_studies.measure.training_steps --mixers mesa,pgdn,pkda --compile blocks --replay"
)
SLOWER = (1.05, 1.2)  # a step over that without preconditioning
CLAIMED = 1.2  # of MesaNet's step over theirs
NAMES = {"pgdn": "PGDN", "gdn": "GDN", "pkda": "PKDA", "kda": "KDA", "mesa": "Mesa"}


def compare_presets(steps: Benchmark) -> list[Number]:
    found = []
    for one, other in PRESET_PAIRS:
        times = [steps.preset_step_ms(f"{name}-340m") for name in (one, other)]
        if times[0] is not None and times[1] is not None:
            found.append(divide("step_ratio", times[0], times[1], {"over": other}, mixer=one))
    return found


def compare_ops(kernels: Benchmark) -> list[Number]:
    found = []
    for one, other in OP_PAIRS:
        times = [kernels.kernel_ms(name, OPS_SIZE, "forward_backward") for name in (one, other)]
        if times[0] is not None and times[1] is not None:
            found.append(divide("op_ratio", times[0], times[1], {"over": other}, mixer=one))
    return found


def compare_layers(steps: Benchmark) -> list[Number]:
    """MesaNet's step over those of PGDN and PKDA: of the medians, and where each is divided by the GDN of its own run first."""
    found = []
    for one, other in MESA_PAIRS:
        ours, theirs = (steps.layers_step_ms(name) for name in (one, other))
        our_base, their_base = (steps.layers_step_ms("gdn", beside=name) for name in (one, other))
        if ours is not None and theirs is not None and our_base is not None and their_base is not None:
            both = ours._replace(ms=ours.ms / our_base.ms), theirs._replace(ms=theirs.ms / their_base.ms)
            found.append(divide("layers_ratio", ours, theirs, {"over": other}, mixer=one))
            found.append(divide("layers_ratio_over_gdn", *both, {"over": other}, mixer=one))
    return found


def measure(conditions: Conditions) -> Measurement:
    folder = conditions.measurements
    found = [
        *compare_presets(Benchmark(folder, FILE, COMMAND)),
        *compare_ops(Benchmark(folder, OPS, "python -m fastweights_studies.measure.kernels")),
        *compare_layers(Benchmark(folder, LAYERS, LAYERS_COMMAND)),
    ]
    if not found:
        presets = ", ".join(f"{name}-340m" for pair in PRESET_PAIRS for name in pair)
        raise Unmeasured(f"needs steps of {presets} in {FILE}, which `{COMMAND}` measures")
    return Measurement(tuple(found))


def name_pair(number: Number) -> str:
    return f"{NAMES[str(number.mixer)]} / {NAMES[str(number.column['over'])]}"


def decide(found: Measurement) -> Verdict:
    steps, ops = found.select("step_ratio"), found.select("op_ratio")
    statements = [
        ", ".join(
            f"{what} {name_pair(number)} {number.value:.2f}"
            for what, numbers in (("step of", steps), ("op alone,", ops))
            for number in numbers
        )
    ]
    faster = []
    for number in found.select("layers_ratio"):
        over_gdn = found.mean("layers_ratio_over_gdn", over=number.column["over"])
        faster.append(min(number.value, over_gdn) > CLAIMED)
        statements.append(
            f"step of 24 layers, {name_pair(number)} {number.value:.2f} ({over_gdn:.2f} with each over its GDN), "
            f"{'' if faster[-1] else 'not '}over 20% faster than MesaNet"
        )
    ratios = [number.value for number in steps]
    if len(ratios) < len(PRESET_PAIRS) or len(faster) < len(MESA_PAIRS):
        missing = (
            "needs training steps of the 340M presets of GDN, PGDN, KDA and PKDA on one GPU, and of 24 layers of MesaNet, PGDN "
            "and PKDA"
        )
        return Verdict("not resolved", [missing, *statements])
    if max(ratios) > SLOWER[1]:
        return Verdict("does not hold", statements)
    return Verdict("holds" if min(ratios) >= SLOWER[0] and all(faster) else "holds weakly", statements)


CLAIM = Claim(
    name="S2",
    paper="pdn",
    source="figure 3",
    says="PGDN and PKDA train about 10% slower than GDN and KDA, and over 20% faster than MesaNet.",
    printed="about 10%; more than 20%",
    setting=(
        "Training steps of the presets of 340M at 32,768 tokens per step, bfloat16, one H200; beside it the ops alone. (Added "
        "after the run: for MesaNet, which no preset has, 24 layers of width 1024 with 8 heads of 128, 16,384 tokens per step, "
        "compiled by blocks and replayed, one H100.)"
    ),
    expected="holds",
    forecast="5% to 20% per step; the op alone 1.37 times",
    rule=(
        "holds if both steps take 1.05 to 1.20 times; weakly if they take less; not if one takes more. (Added after the run, "
        "which left out MesaNet and came to holds: it holds only if the step of MesaNet also takes more than 1.20 times that of "
        "PGDN and of PKDA, of the medians and where each is divided by the GDN of its own run; weakly if it does not.)"
    ),
    measure=measure,
    decide=decide,
    numbers={
        "step_ratio": Quantity("step of {mixer} / {over}"),
        "op_ratio": Quantity("op alone, {mixer} / {over}"),
        "layers_ratio": Quantity("step of 24 layers, {mixer} / {over}"),
        "layers_ratio_over_gdn": Quantity("step of 24 layers, {mixer} / {over}, each over its GDN"),
    },
    words=Words(terms={"mixer": NAMES, "over": NAMES}),
    device="files",
)
