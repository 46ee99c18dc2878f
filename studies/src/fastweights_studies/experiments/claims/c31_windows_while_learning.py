"""C31: memory windows grow before the loss falls."""

from __future__ import annotations

import math
import statistics

import torch

from fastweights.results import RecallResult
from fastweights.results.experiment import best_results

from ..claim import Claim, Conditions, Measurement, Verdict
from ..trained import train_parts
from .c30_metaplasticity_in_a_curriculum import settings

RAMPS, RATES = ("paper", "release"), (1e-3, 3e-3)
EVERY, EARLY = 50, 200  # steps between two looks at the memory; the steps in which the paper finds a low ratio
FALLEN = 0.9  # of the loss of guessing among the values
LAST, FIRST = 40, 2  # the paper's ratio at the end, and the most that it has in the first steps


def of_run(run: RecallResult) -> dict[str, float]:
    """Windows and ratios of a training that was watched, beside its loss."""
    steps, windows, ratios = (run.watched[name] for name in ("step", "window", "metaplasticity ratio"))
    guess = math.log(run.run["vocab_size"] / 2)
    fall = next((step for step, loss in zip(run.loss_steps, run.losses) if loss < FALLEN * guess), math.inf)
    before = [window for step, window in zip(steps, windows) if step <= fall] if fall < math.inf else []
    return {
        "last ratio": ratios[-1],
        f"largest ratio in the first {EARLY} steps": max(x for step, x in zip(steps, ratios) if step <= EARLY),
        "step at which the loss falls": fall,
        "window when the loss falls over the length": before[-1] / run.run["curriculum"][0]["length"]
        if before
        else math.nan,
        "rank correlation of window and step before": _rank_correlation(before),
    }


def _rank_correlation(series: list[float]) -> float:
    """Spearman's, of a series with its order; NaN for fewer than three."""
    if len(series) < 3:
        return math.nan
    ranks = torch.tensor(series).argsort().argsort().double()
    return torch.corrcoef(torch.stack([ranks, torch.arange(len(series)).double()]))[0, 1].item()


def measure(conditions: Conditions) -> Measurement:
    parts = {ramp: {**settings(ramp, ("D",)), "learning_rates": RATES, "watch_every": EVERY} for ramp in RAMPS}
    values: dict[str, list[float]] = {}
    undertrained = []
    for ramp, results in train_parts("C31", parts, conditions).items():
        best = [run for run in best_results(results) if not run.diverged]
        for run in best:
            for name, value in of_run(run).items():
                values.setdefault(f"{ramp}: {name}", []).append(value)
        values[f"{ramp}: learning rate"] = [best[0].run["learning_rate"]] if best else [math.nan]
        if any(run.undertrained for run in best):
            undertrained.append(ramp)
    return Measurement(values, undertrained=tuple(undertrained))


def decide(found: Measurement) -> Verdict:
    rows, ratio, rising, fell = [], [], [], False
    for ramp in RAMPS:
        if f"{ramp}: last ratio" not in found.values:
            rows.append(f"{ramp}: no training stayed finite")
            continue
        last, ranks = (
            found.mean(f"{ramp}: last ratio"),
            found.values[f"{ramp}: rank correlation of window and step before"],
        )
        known = [x for x in ranks if not math.isnan(x)]
        correlation = statistics.fmean(known) if known else math.nan
        fell = fell or any(map(math.isfinite, found.values[f"{ramp}: step at which the loss falls"]))
        ratio.append(20 <= last <= 80)
        rising.append(correlation > 0.9)
        rows.append(
            f"{ramp}: last ratio {last:.1f}, rank correlation of window and step before the loss falls {correlation:.2f}, window "
            f"then {found.mean(f'{ramp}: window when the loss falls over the length'):.1f} times the length"
        )
    reason = "; ".join(rows)
    if not fell:
        return Verdict("not resolved", f"{reason}; the loss fell in no training")
    if any(a and b for a, b in zip(ratio, rising)):
        return Verdict("holds", f"{beside_the_paper(found)}; {reason}")
    return Verdict("holds weakly" if any([*ratio, *rising]) else "does not hold", reason)


def beside_the_paper(found: Measurement) -> str:
    """What the paper says and the rule does not ask for, for claims that hold."""

    def means(name: str, digits: int = 0) -> str:
        names = [f"{ramp}: {name}" for ramp in RAMPS]
        return " and ".join(f"{found.mean(one):,.{digits}f}" for one in names if one in found.values)

    return (
        f"by its rule alone: the ratio ends at {means('last ratio')} where the paper has {LAST}, reaches "
        f"{means(f'largest ratio in the first {EARLY} steps', 1)} in the first {EARLY} steps where it has {FIRST}, and windows "
        f"are {means('window when the loss falls over the length')} times the length when the loss falls, where it has 1"
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
    seeds=(1, 2, 3),
    device="cuda",
    cost="5 minutes of one GPU",
)
