"""own-1: how much of the gap between the delta rule and the exact regression do its approximations close, trained?"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from typing import Any

import torch

from fastweights.layers import MixerChoice
from fastweights.results.experiment import best_results

from ..claim import OWN, Claim, Conditions, Measurement, Status, Verdict, clear_sign, paired
from ..trained import RATES, train_size

CONTRASTS = {"equal variances": 1.0, "unequal variances": 3.0}
BASE, EXACT = "deltanet", "rls"
CHEAP, ITERATIVE = ("pdn", "palimpsa-d"), "gka"
MIXERS = ("linear", BASE, *CHEAP, ITERATIVE, EXACT, "vla-conv")
# Key channels of memories that hold one matrix, and of those that hold two in as many numbers.
SIZES: Mapping[str, dict[str, Any]] = {
    "cpu": {"width": 32, "heads": 1, "layers": 1, "inputs": 8, "pairs": 24, "steps": 400, "batch_size": 32,
            "learning_rates": (1e-2, 3e-2), "channels": (23, 16)},
    "cuda": {"width": 128, "heads": 2, "layers": 2, "inputs": 32, "pairs": 128, "steps": 3000, "batch_size": 64,
             "learning_rates": RATES, "channels": (48, 32)},
}  # fmt: skip
PLACES = 6  # of the curve of errors by example
# The mixers, from the key channels of memories with one matrix and of those with two.
Choices = Callable[[int, int], tuple[MixerChoice, ...]]


def choices(one: int, two: int) -> tuple[MixerChoice, ...]:
    """The mixers at equal state, without decay (Palimpsa-D: long windows) and without output gates."""
    plain = {"output_gate": "none"}
    options: dict[str, dict[str, Any]] = {
        **dict.fromkeys(("linear", BASE, "pdn"), {"head_dim": one}),
        "palimpsa-d": {"head_dim": two, **plain, "long_memory": "paper"},
        ITERATIVE: {"head_dim": two, **plain, "decay": "none"},
        EXACT: {"head_dim": two},
        "vla-conv": {"head_dim": two},
    }
    return tuple(MixerChoice(name, options[name], name) for name in MIXERS)


def parts(device: str, choose: Choices = choices) -> dict[str, dict[str, Any]]:
    """The experiments by setting, in the size of the device."""
    size = dict(SIZES[torch.device(device).type])
    inputs, pairs, channels = size.pop("inputs"), size.pop("pairs"), size.pop("channels")
    return {
        setting: {
            "task": "regression",
            "task_options": {"inputs": inputs, "noise": 0.2, "contrast": contrast},
            "pairs": (pairs,),
            "mixers": choose(*channels),
            "test_examples": 1024,
            "evaluations": 2,
            **size,
        }
        for setting, contrast in CONTRASTS.items()
    }


def measure(conditions: Conditions) -> Measurement:
    return measure_gaps(CLAIM, choices, conditions)


def measure_gaps(claim: Claim, choose: Choices, conditions: Conditions) -> Measurement:
    """Of every mixer the error, and the share of the gap between `BASE`, one of them, and exact regression that it closes."""
    values: dict[str, list[float]] = {}
    undertrained = []
    for setting, results in train_size(claim, parts(conditions.device, choose), conditions).items():
        names = dict.fromkeys(run.mixer for run in results)
        best = {mixer: best_results([run for run in results if run.mixer == mixer]) for mixer in names}
        exact = [float(run.best_error or 0.0) for run in best[BASE]]
        gap = [run.counted_value - lowest for run, lowest in zip(best[BASE], exact)]
        values[f"exact regression, {setting}"] = exact
        for mixer, runs in best.items():
            name = f"{mixer}, {setting}"
            values[name] = [run.counted_value for run in runs]
            values[share_closed(mixer, setting)] = [
                (base.counted_value - run.counted_value) / room for base, run, room in zip(best[BASE], runs, gap)
            ]
            values[f"learning rate of {name}"] = [runs[0].run["learning_rate"]]
            values[f"numbers of state of {name}"] = [float(runs[0].state_size)]
            for example in places(runs[0].run["pairs"]):
                values[f"{name}, example {example}"] = at(runs, "error", example)
            if any(run.undertrained for run in runs):
                undertrained.append(name)
        for example in places(best[BASE][0].run["pairs"]):
            values[f"exact regression, {setting}, example {example}"] = at(best[BASE], "ridge", example)
    return Measurement(values, undertrained=tuple(undertrained))


def places(pairs: int) -> list[int]:
    """The examples that the curve shows, counted from 1."""
    return [pairs * place // PLACES for place in range(1, PLACES + 1)]


def at(runs: Any, column: str, example: int) -> list[float]:
    """A column of `by_token` at an example and the one before, which smooths the draws; NaN for a run that diverged."""
    return [statistics.fmean(run.by_token.get(column, [float("nan")] * example)[example - 2 : example]) for run in runs]


def share_closed(mixer: str, setting: str) -> str:
    """The name of a number of `measure_gaps`."""
    return f"share of the gap closed by {mixer}, {setting}"


def share(found: Measurement, mixer: str, setting: str) -> float:
    return found.mean(share_closed(mixer, setting))


def as_good(found: Measurement, setting: str) -> tuple[Status, str]:
    """Whether the iterations do as well as the exact recursion, by differences per seed. A tie that reaches down to the delta
    rule shows nothing."""
    shares = {mixer: found.values[share_closed(mixer, setting)] for mixer in (ITERATIVE, EXACT)}
    difference, error = paired(shares[ITERATIVE], shares[EXACT])
    sign = clear_sign(difference, error)
    by_seed = ", ".join(f"{ours - exact:+.0%}" for ours, exact in zip(*shares.values()))
    shown = f"{ITERATIVE} - {EXACT} {difference:+.0%} +- {error:.0%} ({by_seed} by seed)"
    if sign == 0 and not difference - 2 * error >= -share(found, EXACT, setting):
        return "not resolved", f"{shown}, not resolved"
    return ("does not hold", f"{shown}, worse") if sign < 0 else ("holds", shown)


def below_half(found: Measurement, mixer: str, setting: str) -> bool:
    """Whether a mixer closes less than half of what the exact recursion closes with every pair of seeds."""
    half = found.smallest(share_closed(EXACT, setting)) / 2
    return found.largest(share_closed(mixer, setting)) < half


def decide(found: Measurement) -> Verdict:
    rows, iterative, cheap = [], [], []
    for setting in CONTRASTS:
        shares = {mixer: share(found, mixer, setting) for mixer in (*CHEAP, ITERATIVE, "vla-conv", EXACT)}
        error = found.error(share_closed(EXACT, setting))
        outcome, difference = as_good(found, setting)
        iterative.append(outcome)
        cheap.append(shares[EXACT] > 0 and all(below_half(found, mixer, setting) for mixer in CHEAP))
        rows.append(
            f"{setting}: " + ", ".join(f"{mixer} {x:.0%}" for mixer, x in shares.items()) + f" +- {error:.0%}"
            + f" (not clearly twice that of {' and '.join(CHEAP)})" * (not cheap[-1]) + f", {difference}"
        )  # fmt: skip
    reason = "share of the gap between the delta rule and the best predictor; " + "; ".join(rows)
    first = max(iterative, key=("holds", "not resolved", "does not hold").index)
    if first == "holds" or all(cheap):
        return Verdict("holds" if first == "holds" and all(cheap) else "holds weakly", reason)
    return Verdict(first, reason)


CLAIM = Claim(
    name="own-1",
    paper=OWN,
    source="the exact chunkwise recursion of C5 as a trained layer",
    says=(
        "At equal state a trained layer of thirty iterations predicts as well as one of exact recursive least squares, and "
        "diagonal preconditioning (pdn) and diagonal Bayes (palimpsa-d) close less than half of what the exact recursion does."
    ),
    printed="none; no paper compares them at equal state",
    setting=(
        "In-context linear regression with noise 0.2, squared error; inputs of equal variances, and with a random half of the "
        "channels three times smaller in every sequence. No decay, no output gates. On a CPU: 24 examples of 8 inputs, "
        "one layer of width 32, one head, about 530 numbers of state (23 key channels, or 16 where the memory has two "
        "matrices), 400 steps of 32, rates 1e-2 and 3e-2 (a first run had seeds 0 and 1, and 1e-2 alone with unequal "
        "variances). On a GPU: 128 examples of 32 inputs, 2 layers of width 128, 2 heads of 48 or 32 channels, 3000 steps of 64, "
        "rates 3e-4 to 1e-2."
    ),
    expected="holds",
    forecast=(
        "shares of the gap with equal variances: rls 50%, gka 50%, vla 20%, pdn 10%, palimpsa-d below 0; with unequal ones "
        "rls 60%, gka 60%, pdn 25%, because its preconditioner sees the axes"
    ),
    rule=(
        "holds if in both settings gka is at most two standard errors below rls, and pdn and palimpsa-d close less than half "
        "of what rls closes (added after the first run: ranges over seeds must not overlap, which is a tie); "
        "weakly if one of the two is true in both settings. (Added after the second run: the standard error is that of gka - rls "
        "per seed, before it was that of rls alone; gka beside rls is not resolved where the difference is a tie but two "
        "standard errors reach down to the delta rule.)"
    ),
    measure=measure,
    decide=decide,
    seeds=(0, 1, 2),
    cost="12 minutes of two cores; the larger size, 84 trainings, about 20 minutes of one GPU (an estimate)",
    larger="The first seed takes all four rates, the other seeds its best one.",
)
