"""C31: memory windows grow before the loss falls."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator
from dataclasses import replace

import torch

from fastweights.results import RecallResult
from fastweights.results.experiment import best_results

from ..claim import Claim
from ..conditions import Conditions
from ..measurement import UNDERTRAINED, Measurement, Number, mark_undertrained
from ..trained import mixer_fields, rate_field, train_parts
from ..verdict import Verdict
from ..words import Quantity, Words
from .c30_metaplasticity_in_a_curriculum import RAMPS, make_settings

RATES = (1e-3, 3e-3)
EVERY, EARLY = 50, 200  # steps between two looks at the memory; the steps in which the paper finds a low ratio
FALLEN = 0.9  # of the loss of guessing among the values
LAST, FIRST = 40, 2  # the paper's ratio at the end, and the most that it has in the first steps


def read_watch(run: RecallResult) -> Iterator[Number]:
    """Windows and ratios of a training that was watched, beside its loss."""
    steps, windows, ratios = (run.watched[name] for name in ("step", "window", "metaplasticity ratio"))
    guess = math.log(run.run["vocab_size"] / 2)
    fall = next((step for step, loss in zip(run.loss_steps, run.losses) if loss < FALLEN * guess), math.inf)
    before = [window for step, window in zip(steps, windows) if step <= fall] if fall < math.inf else []
    length = run.run["curriculum"][0]["length"]
    yield Number("last_ratio", ratios[-1])
    yield Number("early_ratio", max(x for step, x in zip(steps, ratios) if step <= EARLY))
    yield Number("fall_step", fall)
    yield Number("fall_window", before[-1] / length if before else math.nan)
    yield Number("rank_correlation", correlate_ranks(before))


def correlate_ranks(series: list[float]) -> float:
    """Spearman's rank correlation of a series with its order; NaN for fewer than three."""
    if len(series) < 3:
        return math.nan
    ranks = torch.tensor(series).argsort().argsort().double()
    return torch.corrcoef(torch.stack([ranks, torch.arange(len(series)).double()]))[0, 1].item()


def measure(conditions: Conditions) -> Measurement:
    parts = {ramp: {**make_settings(ramp, ("D",)), "learning_rates": RATES, "watch_every": EVERY} for ramp in RAMPS}
    found: list[Number] = []
    for ramp, results in train_parts("C31", parts, conditions).items():
        best = [run for run in best_results(results) if not run.diverged]
        for run in best:
            fields = {**mixer_fields(run), "run": rate_field(run), "seed": run.run["seed"]}
            found += [replace(number, column={"ramp": ramp}, **fields) for number in read_watch(run)]
        if any(run.undertrained for run in best):
            found.append(mark_undertrained({"ramp": ramp}, **mixer_fields(best[0])))
    return Measurement(tuple(found))


def decide(found: Measurement) -> Verdict:
    rows, ratio, rising, fell = [], [], [], False
    for ramp in RAMPS:
        if not found.select("last_ratio", ramp=ramp):
            rows.append(f"{ramp}: no training stayed finite")
            continue
        last, window = found.mean("last_ratio", ramp=ramp), found.mean("fall_window", ramp=ramp)
        known = [x for x in found.values("rank_correlation", ramp=ramp) if not math.isnan(x)]
        correlation = statistics.fmean(known) if known else math.nan
        fell = fell or any(map(math.isfinite, found.values("fall_step", ramp=ramp)))
        ratio.append(20 <= last <= 80)
        rising.append(correlation > 0.9)
        rows.append(
            f"{ramp}: last ratio {last:.1f}, rank correlation of window and step before the loss falls {correlation:.2f}, window "
            f"then {window:.1f} times the length"
        )
    if not fell:
        return Verdict("not resolved", [*rows, "the loss fell in no training"])
    if any(a and b for a, b in zip(ratio, rising)):
        return Verdict("holds", [compare_with_paper(found), *rows])
    return Verdict("holds weakly" if any([*ratio, *rising]) else "does not hold", rows)


def compare_with_paper(found: Measurement) -> str:
    """What the paper says and the rule does not ask for, for claims that hold."""

    def list_means(measure: str, digits: int = 0) -> str:
        ramps = [ramp for ramp in RAMPS if found.select(measure, ramp=ramp)]
        return " and ".join(f"{found.mean(measure, ramp=ramp):,.{digits}f}" for ramp in ramps)

    return (
        f"by its rule alone: the ratio ends at {list_means('last_ratio')} where the paper has {LAST}, reaches "
        f"{list_means('early_ratio', 1)} in the first {EARLY} steps where it has {FIRST}, and windows are "
        f"{list_means('fall_window')} times the length when the loss falls, where it has 1"
    )


CLAIM = Claim(
    name="C31",
    paper="palimpsa",
    source="figure 3",
    says=(
        "The metaplasticity ratio settles near 40; memory windows grow exponentially early, and the loss falls "
        "once they reach T."
    ),
    printed="ratio to about 40, below 2 in the first 200 steps",
    setting=(
        "The run of C30 with D, with either ramp of first decays and rates of 1e-3 and 3e-3; every 50 steps on 4 held-out "
        "sequences the ratio (Imax - Imin) / Imin after the sequence and the windows N_t = 1 / (1 - a_t) over it, means over "
        "layers and heads. The loss falls where it is below 0.9 of that of guessing among the values."
    ),
    expected="not resolved",
    forecast="none",
    rule=(
        "holds if for one of the ramps the last ratio is 20 to 80 and log N_t ranks with the step above 0.9 before the loss "
        "falls; weakly if one of the two is so; not resolved if the loss falls in no training. (Added after the run: where it "
        "holds, the outcome begins with what the paper says and the rule does not ask for. The rule is the same.)"
    ),
    note=(
        "it holds by a rule that asks for less than the paper says: the ratio may end at 20 to 80, and windows may have any "
        "length when the loss falls; they are longer than the sequence from the first look, at step 50, on"
    ),
    measure=measure,
    decide=decide,
    to_decide=("10,000 steps a stage, eight seeds"),
    numbers={
        "last_ratio": Quantity("{subject}: last ratio"),
        "early_ratio": Quantity(f"{{subject}}: largest ratio in the first {EARLY} steps"),
        "fall_step": Quantity("{subject}: step at which the loss falls"),
        "fall_window": Quantity("{subject}: window when the loss falls over the length"),
        "rank_correlation": Quantity("{subject}: rank correlation of window and step before"),
        UNDERTRAINED: Quantity("{subject}"),
    },
    words=Words(subject="{ramp}"),
    seeds=(1, 2, 3),
    device="cuda",
    cost="5 minutes of one GPU",
)
