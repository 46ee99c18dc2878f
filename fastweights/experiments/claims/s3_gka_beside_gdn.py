"""S3: is Gated KalmaNet's layer as fast as Gated DeltaNet's?"""

from __future__ import annotations

from ..claim import Claim, Conditions, Measurement, Unmeasured, Verdict
from ..measured import device_ms, origin, read_results, steps

OPS, STEPS = "kernels-nvidia-h200.json", "training-steps-nvidia-h200.json"
COMMAND = "python benchmarks/kernels.py --ops gka,gdn"


def measure(conditions: Conditions) -> Measurement:
    ops = read_results(conditions.measurements, OPS, COMMAND)
    whole = read_results(conditions.measurements, STEPS, "python benchmarks/training_steps.py")
    found = {}
    for size in ("4,2048,8,128,128", "4,4096,8,128,128", "4,8192,8,128,128", "4,16384,8,128,128"):
        rows = [ops["rows"].get(f"{op} {size}", {}) for op in ("gka", "gdn")]
        if all("forward_backward" in row for row in rows):
            found[f"op, {size}"] = [device_ms(rows[0], "forward_backward") / device_ms(rows[1], "forward_backward")]
    models = whole["comparisons"].get("gka-440m", {}).get("models", {})
    if "gka-440m" in models:
        found["step of a 440M model"] = [steps(models["gka-440m"]) / steps(models["gdn-440m-gka"])]
    if not found:
        raise Unmeasured(f"needs rows of gka and gdn in {OPS}, which `{COMMAND}` measures")
    measured = whole["comparisons"].get("gka-440m", {}).get("measured")
    return Measurement(found, f"{origin(OPS, ops)}; {origin(STEPS, whole, measured)}")


def decide(found: Measurement) -> Verdict:
    shown = ", ".join(f"{name} {found.mean(name):.2f}" for name in found.values)
    ratios = [found.mean(name) for name in found.values if name.startswith("op")]
    if not ratios:
        return Verdict("not resolved", f"needs the op's time beside gdn's (`{COMMAND}`); gka over gdn: {shown}")
    return Verdict("holds" if max(ratios) <= 2 else "does not hold", f"gka over gdn: {shown}")


CLAIM = Claim(
    name="S3",
    paper="gka",
    source="figure 3b",
    says="Forward and backward of Gated KalmaNet take a time comparable to Gated DeltaNet's.",
    printed="comparable, B = 4, 8 heads of 128, T = 2k to 16k",
    setting=(
        "Device time of the ops, forward and backward, bfloat16, one H200; beside it training steps of models of 440M."
    ),
    expected="does not hold",
    forecast="far above 2 times for the op in PyTorch (mesa 31.6 ms to .39 at T = 2048)",
    rule="holds if the op takes at most twice gdn's time at every measured length.",
    measure=measure,
    decide=decide,
    device="files",
)
