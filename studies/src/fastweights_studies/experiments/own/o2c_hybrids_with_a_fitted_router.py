"""own-2c: hybrids of own-2b whose router is fitted in the test, because the variance itself ranked answers the wrong way."""

from __future__ import annotations

import statistics
from typing import Any

import torch

from fastweights.data.task import IGNORE_INDEX
from fastweights.evaluation.reading import evaluating

from ..claim import OWN, Claim, Conditions, Measurement, Verdict
from ..confidence import auroc, fitted_probability
from .o2_confidence_of_memories import LOADS, MIXERS, ROUTED
from .o2b_hybrids_trained_as_one import (
    SHARE,
    TRAINED,
    Queries,
    accuracies,
    compared,
    highest,
    measure_kinds,
    sharpness_of,
    train_hybrid,
)

SETTINGS: dict[str, Any] = {**TRAINED, "heads": 2, "steps": 1500}
TRAININGS = ("memory alone", "random queries")
ORDERS = ("fitted variance", "chance")


def train(job: tuple[str, str, int, str]) -> tuple[dict[str, float], bool]:
    """One training: the names of its mixer and of its kind, its seed and device. Whether it was still learning comes second."""
    trained = train_hybrid(*job, SETTINGS)
    model, run = trained.model, trained.run
    with evaluating(model):
        sharpness = sharpness_of(model, run, job[1])
        fits, queries = Queries(run, 1), Queries(run, 0)
        known, features = fits.log_variances(model), queries.log_variances(model)
        right, tested = (
            x.right(model, torch.zeros_like(y[:, 0], dtype=torch.bool), sharpness)
            for x, y in ((fits, known), (queries, features))
        )
        doubt = -fitted_probability(known.cpu(), right.cpu(), features.cpu())
        chance = torch.rand(len(doubt), generator=torch.Generator().manual_seed(run.seed))
        wrong = tested.cpu() == 0
        raw = features.cpu().mean(-1)
        found = {
            "sharpness": sharpness,
            "AUROC of wrong answers by the fitted variance": auroc(doubt, wrong),
            "AUROC of wrong answers by the mean log variance": auroc(raw, wrong),
        }
        sizes = [int((labels != IGNORE_INDEX).sum()) for _, labels in queries.batches]
        for load, scores, errors in zip(LOADS, raw.split(sizes), wrong.split(sizes), strict=True):
            found[f"AUROC of wrong answers by the mean log variance, {int(load * run.pairs)} pairs"] = auroc(
                scores, errors
            )
        for name, order in zip(ORDERS, (doubt, chance), strict=True):
            for share in ROUTED:
                routed = highest(order, share).to(run.device)
                found[f"accuracy with {share:.0%} routed by {name}"] = (
                    queries.right(model, routed, sharpness).mean().item()
                )
    return found, trained.result().undertrained


def measure(conditions: Conditions) -> Measurement:
    return measure_kinds(train, TRAININGS, conditions)


def decide(found: Measurement) -> Verdict:
    rows, better, good = [], [], []
    for mixer in MIXERS:
        hybrid = accuracies(found, mixer, "random queries", SHARE, ORDERS[0])
        others = {
            "by chance": accuracies(found, mixer, "random queries", SHARE, ORDERS[1]),
            "memory alone": accuracies(found, mixer, "memory alone", 0.0, ORDERS[0]),
            "routed in the test alone": accuracies(found, mixer, "memory alone", SHARE, ORDERS[0]),
        }
        clear, shown = compared(hybrid, others)
        better.append(clear["by chance"] and clear["memory alone"])
        good.append(all(clear.values()))
        rows.append(f"{mixer}: the hybrid {statistics.fmean(hybrid):.3f}, {', '.join(shown)}")
    reason = "accuracy with 20% of the queries answered by attention; " + "; ".join(rows)
    if all(good):
        return Verdict("holds", reason)
    return Verdict("holds weakly" if any(better) else "does not hold", reason)


CLAIM = Claim(
    name="own-2c",
    paper=OWN,
    source="own-2b, where the mean log variance ranked wrong answers below right ones (AUROC 0.23 to 0.35)",
    says=(
        "A memory that is trained with attention in place of it at a random fifth of the queries, and whose most uncertain fifth "
        "by a fitted regression on its variances is routed in the test, recalls more than with a random fifth, than the memory "
        "alone and than one that was routed in the test alone."
    ),
    printed="none; hybrids of the papers choose layers and not queries",
    setting=(
        "As own-2b, with 2 heads of 16 channels as in own-2, and two kinds of training: nothing or a random fifth of the queries "
        "answered by attention. The router is own-2's logistic regression on the log variances of all heads, fitted to the "
        "memory's right and wrong answers on 128 other sequences of each load. Declared after own-2b was measured. A first run, "
        "of 600 steps, did not hold: its seeds recalled from 5% to 92%. This one has 1500 steps; forecast and rule are unchanged."
    ),
    expected="holds weakly",
    forecast=(
        "rls: memory alone 0.75, routed in the test alone 0.82, the hybrid 0.83 and by chance 0.80: training with attention adds "
        "less than its spread over three seeds; palimpsa-d: the same order, not clear against any"
    ),
    rule=(
        "Of differences paired by seed: holds if for both mixers the hybrid with the fitted router is better by two standard "
        "errors than the same models routed by chance, than the memory alone and than the memory alone routed in the test by its "
        "own fitted router; weakly if for one mixer it is better than by chance and than the memory alone."
    ),
    measure=measure,
    decide=decide,
    seeds=(0, 1, 2),
    cost="15 minutes of two cores",
)
