"""C30: metaplasticity helps recall, more at later stages of a curriculum."""

from __future__ import annotations

import statistics
from collections.abc import Container
from typing import Any

from fastweights.layers import MixerChoice
from fastweights.training import Stage

from ..claim import Claim
from ..measurement import Measurement
from ..trained import RECALL_NUMBERS, ZOOLOGY_SETTINGS, Part, recall_experiment, train_best_rates
from ..verdict import INTERVALS, Verdict, compare_seeds
from ..words import Words

STAGES = ((128, 32), (256, 64), (512, 128))
LAST = STAGES[-1][1]
STEPS = 1000  # of a stage
RAMPS = ("paper", "release")  # of first decays
LABELS = ("D", "D without", "M", "mamba2", "gdn")
# A mixer with metaplasticity, and what it is compared with.
COMPARISONS = (("D", "D without"), ("M", "mamba2"), ("D", "gdn"))


def make_mixers(ramp: str) -> dict[str, MixerChoice]:
    """The mixers by their labels."""
    options = {"expand_v": 2, "long_memory": ramp, "conv_init": "normal"}
    choices = (
        MixerChoice("palimpsa-d", options, "D"),
        MixerChoice("palimpsa-d", {**options, "metaplasticity": False}, "D without"),
        MixerChoice("palimpsa-m", options, "M"),
        MixerChoice("mamba2", options, "mamba2"),
        MixerChoice("gdn", {**options, "output_gate": "silu"}, "gdn"),
    )
    return {choice.label: choice for choice in choices}


def make_settings(ramp: str, labels: Container[str]) -> dict[str, Any]:
    """The experiment with one ramp of first decays, and of its mixers those of these labels."""
    return {
        **ZOOLOGY_SETTINGS,
        "heads": 8,
        "intermediate_size": 0,
        "scale_residuals": False,
        "initializer_range": 128**-0.5,
        "schedule": "constant",
        "warmup_fraction": 0.0,
        "steps": STEPS * len(STAGES),
        "pairs": (LAST,),
        "curriculum": tuple(Stage(pairs=pairs, steps=STEPS, length=length) for length, pairs in STAGES),
        "mixers": tuple(choice for label, choice in make_mixers(ramp).items() if label in labels),
    }


def decide(found: Measurement) -> Verdict:
    compared = {(ramp, *names): [make_mixers(ramp)[name] for name in names] for ramp in RAMPS for names in COMPARISONS}

    def accuracies(stage: int) -> dict[tuple[str, str, str], tuple[dict[int, float], dict[int, float]]]:
        def of(choice: MixerChoice) -> dict[int, float]:
            return found.by_seed("stage_accuracy", choice, stage=stage)

        return {which: (of(ours), of(base)) for which, (ours, base) in compared.items()}

    gains = compare_seeds(accuracies(len(STAGES)))
    rows, holds, signs = [], [], [gain.sign for gain in gains.values()]
    for (ramp, ours, base), (left, right) in accuracies(1).items():
        last, first = gains[ramp, ours, base], statistics.fmean(left.values()) - statistics.fmean(right.values())
        holds.append(last.sign > 0 and (base == "gdn" or last.mean > first))
        rows.append(f"{ours} over {base} ({ramp}) {first:+.3f} to {last}")
    half = len(holds) // 2
    if all(holds[:half]) or all(holds[half:]):
        return Verdict("holds", rows)
    if any(holds):
        return Verdict("holds weakly", rows)
    return Verdict("does not hold" if any(signs) else "not resolved", rows)


CLAIM = Claim(
    name="C30",
    paper="palimpsa",
    source="figure 2",
    says=(
        "Palimpsa-D is better than itself without metaplasticity and than GDN, Palimpsa-M than Mamba-2, more with "
        "longer sequences."
    ),
    printed="the curves of figure 2, (128, 32) to (1024, 256)",
    setting=(
        "MQAR with constant filler, 2 layers of width 128, 8 heads, E_v = 2, no MLP, first weights of 128^-1/2, "
        "8192 tokens; (T, n) = (128, 32), (256, 64), (512, 128), 1000 steps of 64 each; first decays of the "
        "paper and of the released code; rates 3e-4 to 1e-2, of which the first seed chooses."
    ),
    expected="not resolved",
    forecast="none",
    rule=(
        "holds for one of the ramps if each gain at the last stage is clear and, beside its own plain form, above that of the "
        f"first stage; weakly if some do; not resolved if all differences at the last stage are ties. {INTERVALS}"
    ),
    note=(
        "no comparison is clear; after the first stage D has learned nothing, with 0.01 and less where the same without "
        "metaplasticity has 0.94 and 0.83, so that its gain grows from far below zero"
    ),
    measure=recall_experiment(
        "C30", {ramp: Part(make_settings(ramp, LABELS), {"ramp": ramp}) for ramp in RAMPS}, train_best_rates
    ),
    decide=decide,
    to_decide=("10,000 steps a stage, eight seeds"),
    numbers=RECALL_NUMBERS,
    words=Words(
        subject="{mixer}, {pairs} pairs, {ramp}",
        choices=tuple(choice for ramp in RAMPS for choice in make_mixers(ramp).values()),
    ),
    seeds=(1, 2, 3),
    device="cuda",
    cost="20 minutes of one GPU",
)
