"""S2: what preconditioning costs a training step of a 340M model."""

from __future__ import annotations

from ..claim import Claim, Conditions, Measurement, Unmeasured, Verdict
from ..measured import device_ms, origin, read_results, steps

FILE, COMMAND = "training-steps-nvidia-h200.json", "python benchmarks/training_steps.py --only pgdn-340m pkda-340m"
OPS, SIZE = "kernels-nvidia-h200.json", "1,32768,8,128,128"
OP_PAIRS = {"PGDN / GDN": ("pgdn", "gdn"), "PKDA / KDA": ("pkda", "kda"), "Mesa / PGDN": ("mesa", "pgdn")}
PAIRS = {"PGDN / GDN": ("pgdn-340m", "gdn-340m"), "PKDA / KDA": ("pkda-340m", "kda-340m")}


def measure(conditions: Conditions) -> Measurement:
    content = read_results(conditions.measurements, FILE, COMMAND)
    models = {name: row for part in content["comparisons"].values() for name, row in part["models"].items()}
    found = {
        f"step of {label}": [steps(models[one]) / steps(models[other])]
        for label, (one, other) in PAIRS.items()
        if one in models and other in models
    }
    ops = read_results(conditions.measurements, OPS, "python benchmarks/kernels.py")
    for label, (one, other) in OP_PAIRS.items():
        times = [ops["rows"].get(f"{name} {SIZE}", {}) for name in (one, other)]
        if all("forward_backward" in row for row in times):
            found[f"op alone, {label}"] = [
                device_ms(times[0], "forward_backward") / device_ms(times[1], "forward_backward")
            ]
    if not found:
        raise Unmeasured(f"needs steps of {', '.join(sum(PAIRS.values(), ()))} in {FILE}, which `{COMMAND}` measures")
    part = content["comparisons"].get(PAIRS["PGDN / GDN"][0], {})
    return Measurement(found, f"{origin(FILE, content, part.get('measured'))}; {origin(OPS, ops)}")


def decide(found: Measurement) -> Verdict:
    shown = ", ".join(f"{name} {found.mean(name):.2f}" for name in found.values)
    shown += "; over 20% faster than MesaNet: not measured here"
    ratios = [found.mean(f"step of {label}") for label in PAIRS if f"step of {label}" in found.values]
    if len(ratios) < len(PAIRS):
        return Verdict(
            "not resolved", f"needs training steps of the 340M presets of GDN, PGDN, KDA and PKDA on one GPU; {shown}"
        )
    if max(ratios) <= 1.2 and min(ratios) >= 1.05:
        return Verdict("holds", shown)
    return Verdict("holds weakly" if max(ratios) < 1.05 else "does not hold", shown)


CLAIM = Claim(
    name="S2",
    paper="pdn",
    source="figure 3",
    says="PGDN and PKDA train about 10% slower than GDN and KDA, and over 20% faster than MesaNet.",
    printed="about 10%; more than 20%",
    setting=(
        "Training steps of the presets of 340M at 32,768 tokens per step, bfloat16, one H200; beside it the ops alone."
    ),
    expected="holds",
    forecast="5% to 20% per step; the op alone 1.37 times",
    rule=(
        "holds if both steps take 1.05 to 1.20 times; weakly if they take less; not if one takes more. (It leaves out MesaNet, "
        "of which no training step is measured. These words were added after the run.)"
    ),
    measure=measure,
    decide=decide,
    device="files",
)
