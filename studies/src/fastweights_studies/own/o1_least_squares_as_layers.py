"""own-1: how much of the gap between the delta rule and the exact regression do its approximations close, trained?"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from fastweights.layers import MixerChoice
from fastweights.results import RecallResult
from fastweights.results.experiment import best_results

from ..claims.claim import OWN, Claim
from ..claims.conditions import Conditions
from ..claims.measurement import UNDERTRAINED, Measurement, Number, mark_undertrained
from ..claims.trained import RATES, mixer_fields, rate_field, train_size
from ..claims.verdict import INTERVALS, Status, Verdict, compare_seeds
from ..claims.words import Quantity, Words
from ..paired import Difference

CONTRASTS = {"equal": 1.0, "unequal": 3.0}  # of the inputs, by whether their variances are equal
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
GAP_NUMBERS = {
    "best_error": Quantity("exact regression, {variances}"),
    "error": Quantity("{subject}"),
    "share_closed": Quantity("share of the gap closed by {subject}"),
    "state_size": Quantity("numbers of state of {subject}"),
    "error_at_example": Quantity("{subject}, example {example}"),
    "best_error_at_example": Quantity("exact regression, {variances}, example {example}"),
    UNDERTRAINED: Quantity("{subject}"),
}
GAP = "share of the gap between the delta rule and the best predictor"
GAP_SUBJECT = "{mixer}, {variances}"
GAP_TERMS = {"variances": {variances: f"{variances} variances" for variances in CONTRASTS}}


def make_choices(one: int, two: int) -> tuple[MixerChoice, ...]:
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


def make_parts(device: str, choose: Choices = make_choices) -> dict[str, dict[str, Any]]:
    """The experiments by `CONTRASTS`, in the size of the device."""
    size = dict(SIZES[torch.device(device).type])
    inputs, pairs, channels = size.pop("inputs"), size.pop("pairs"), size.pop("channels")
    return {
        variances: {
            "task": "regression",
            "task_options": {"inputs": inputs, "noise": 0.2, "contrast": contrast},
            "pairs": (pairs,),
            "mixers": choose(*channels),
            "test_examples": 1024,
            "evaluations": 2,
            **size,
        }
        for variances, contrast in CONTRASTS.items()
    }


def measure(conditions: Conditions) -> Measurement:
    return measure_gaps(CLAIM, make_choices, conditions)


def measure_gaps(claim: Claim, choose: Choices, conditions: Conditions) -> Measurement:
    """Of every mixer the error, and the share of the gap between `BASE`, one of them, and exact regression that it closes."""
    folders = {f"{variances} variances": part for variances, part in make_parts(conditions.device, choose).items()}
    results = train_size(claim, folders, conditions)
    found: list[Number] = []
    for variances, runs in zip(CONTRASTS, results.values(), strict=True):
        mixers = dict.fromkeys(run.mixer for run in runs)
        best = {mixer: best_results([run for run in runs if run.mixer == mixer]) for mixer in mixers}
        column = {"variances": variances}
        base = best[BASE]
        found += [Number("best_error", float(run.best_error or 0.0), column, seed=run.run["seed"]) for run in base]
        for of_mixer in best.values():
            found += count_gaps(of_mixer, base, variances)
        for example in list_examples(base[0].run["pairs"]):
            found += smooth_curve("best_error_at_example", base, "ridge", {**column, "example": example})
    return Measurement(tuple(found))


def count_gaps(results: Sequence[RecallResult], base: Sequence[RecallResult], variances: str) -> Iterator[Number]:
    """`GAP_NUMBERS` of one mixer, beside the delta rule of the same seeds."""
    column, fields = {"variances": variances}, mixer_fields(results[0])
    for run in results:
        yield Number("error", run.counted_value, column, **fields, run=rate_field(run), seed=run.run["seed"])
    for run, plain in zip(results, base, strict=True):
        gap = plain.counted_value - float(plain.best_error or 0.0)
        share = (plain.counted_value - run.counted_value) / gap
        yield Number("share_closed", share, column, **fields, seed=run.run["seed"])
    yield Number("state_size", float(results[0].state_size), column, **fields)
    for example in list_examples(results[0].run["pairs"]):
        yield from smooth_curve("error_at_example", results, "error", {**column, "example": example}, **fields)
    if any(run.undertrained for run in results):
        yield mark_undertrained(column, **fields)


def list_examples(pairs: int) -> list[int]:
    """The examples that the curve shows, counted from 1."""
    return [pairs * place // PLACES for place in range(1, PLACES + 1)]


def smooth_curve(
    measure: str, results: Sequence[RecallResult], series: str, column: Mapping[str, Any], **fields: Any
) -> Iterator[Number]:
    """A series of `by_token` at the example of the column and the one before, which smooths the draws; NaN for a run that
    diverged."""
    example = column["example"]
    for run in results:
        values = run.by_token.get(series, [float("nan")] * example)
        value = statistics.fmean(values[example - 2 : example])
        yield Number(measure, value, column, **fields, seed=run.run["seed"])


def mean_share(found: Measurement, mixer: str, variances: str) -> float:
    return found.mean("share_closed", mixer, variances=variances)


def shares_of(found: Measurement, mixer: str | MixerChoice, variances: str) -> dict[int, float]:
    """The share of the gap that a mixer closes, by seed."""
    return found.by_seed("share_closed", mixer, variances=variances)


def compare_iterations(found: Measurement) -> dict[str, tuple[Status, str]]:
    """Whether the iterations do as well as the exact recursion, by the variances of the inputs. A tie that reaches down to the
    delta rule shows nothing."""
    gains = compare_seeds({one: (shares_of(found, ITERATIVE, one), shares_of(found, EXACT, one)) for one in CONTRASTS})
    return {one: _judge(gain, mean_share(found, EXACT, one)) for one, gain in gains.items()}


def _judge(gain: Difference, exact: float) -> tuple[Status, str]:
    shown = f"{ITERATIVE} - {EXACT} {gain}"
    if gain.sign == 0 and not gain.low >= -exact:
        return "not resolved", f"{shown}, not resolved"
    return ("does not hold", f"{shown}, worse") if gain.sign < 0 else ("holds", shown)


def is_below_half(found: Measurement, mixer: str, variances: str) -> bool:
    """Whether a mixer closes less than half of what the exact recursion closes with every pair of seeds."""
    half = found.smallest("share_closed", EXACT, variances=variances) / 2
    return found.largest("share_closed", mixer, variances=variances) < half


def decide(found: Measurement) -> Verdict:
    rows, iterative, cheap = [], [], []
    for variances, (outcome, difference) in compare_iterations(found).items():
        shares = {mixer: mean_share(found, mixer, variances) for mixer in (*CHEAP, ITERATIVE, "vla-conv", EXACT)}
        iterative.append(outcome)
        cheap.append(shares[EXACT] > 0 and all(is_below_half(found, mixer, variances) for mixer in CHEAP))
        shown = ", ".join(f"{mixer} {x:.0%}" for mixer, x in shares.items())
        unclear = f" (not clearly twice that of {' and '.join(CHEAP)})" * (not cheap[-1])
        rows.append(f"{variances} variances: {shown}{unclear}, {difference}")
    statements = [GAP, *rows]
    first = max(iterative, key=("holds", "not resolved", "does not hold").index)
    if first == "holds" or all(cheap):
        return Verdict("holds" if first == "holds" and all(cheap) else "holds weakly", statements)
    return Verdict(first, statements)


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
        "holds if in both settings gka is not clearly below rls, and pdn and palimpsa-d close less than half "
        "of what rls closes (added after the first run: ranges over seeds must not overlap, which is a tie); "
        "weakly if one of the two is true in both settings. (Added after the second run: gka beside rls is not resolved where "
        f"the difference is a tie but its interval reaches down to the delta rule.) {INTERVALS}"
    ),
    measure=measure,
    decide=decide,
    numbers=GAP_NUMBERS,
    words=Words(subject=GAP_SUBJECT, terms=GAP_TERMS),
    seeds=(0, 1, 2),
    cost="12 minutes of two cores; the larger size, 84 trainings, about 20 minutes of one GPU (an estimate)",
    larger="The first seed takes all four rates, the other seeds its best one.",
)
