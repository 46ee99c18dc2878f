"""The rules of trained claims on made numbers: ties, one seed, trainings that learnt nothing or were lost."""

import math

import pytest

from fastweights.experiments import Measurement, find_claim
from fastweights.experiments.claim import clear_sign, paired
from fastweights.experiments.claims.c28_gka_in_small_models import CELLS, OTHERS, part
from fastweights.experiments.readings import SECOND
from fastweights.experiments.trained import accuracy, gradient_spike


def status(claim, values):
    return find_claim(claim).decide(Measurement(values)).status


def in_both_readings(values):
    return values | {f"{name}, {SECOND}": x for name, x in values.items()}


@pytest.mark.parametrize(
    ("full", "fixed", "expected"),
    [(1.0, 0.1, "holds"), (1.0, 0.9, "does not hold"), (0.5, 0.4, "does not hold"), (0.02, 0.02, "not resolved")],
)
def test_a_collapse_needs_a_memory_that_recalls(full, fixed, expected):
    values = {accuracy("vla", 16): [full], accuracy("A fixed", 16): [fixed]}
    assert status("C23", in_both_readings(values)) == expected


@pytest.mark.parametrize(
    ("first", "later", "expected"),
    [
        ((0.02, 0.02), (1.0, 0.1), "holds"),
        ((1.0, 0.1), (1.0, 0.9), "holds"),
        ((0.02, 0.02), (1.0, 0.9), "does not hold"),
    ],
)
def test_the_better_reading_counts(first, later, expected):
    values = {}
    for reading, numbers in (("", first), (SECOND, later)):
        values |= {accuracy(name, 16, reading): [x] for name, x in zip(("vla", "A fixed"), numbers)}
    assert status("C23", values) == expected


def test_seeds_that_lie_far_apart_are_shown():
    values = {accuracy("vla", 16): [0.06, 1.0], accuracy("A fixed", 16): [0.98, 1.0]}
    reason = find_claim("C23").decide(Measurement(in_both_readings(values))).reason
    assert reason.count("by seed: vla, 16 pairs: 0.060, 1.000") == 2 and "A fixed, 16 pairs" not in reason


@pytest.mark.parametrize(
    ("seen", "drops", "expected"),
    [(1.0, (5, 20, 30), "holds"), (1.0, (0, 0, 0), "does not hold"), (0.02, (0, 0, 0), "not resolved")],
)
def test_points_are_lost_by_what_recalls(seen, drops, expected):
    values = {}
    for pairs, drop in zip((8, 16, 24), drops):
        values |= {accuracy("vla", pairs, "seen"): [seen], accuracy("vla", pairs, "unseen"): [seen - drop / 100]}
    assert status("C25", in_both_readings(values)) == expected


def cells(gka, others, spread=0.01):
    """C28 with three seeds; a mixer that is far behind has a large spread."""
    values = {}
    for width, length, pairs in CELLS:
        for name, mean in {"gka": gka, **dict.fromkeys(OTHERS, others)}.items():
            values[accuracy(name, pairs, part(width, length))] = [mean - spread, mean, mean + spread]
        values[accuracy("gla", pairs, part(width, length))] = [0.0, 0.1, 0.9]
    return values


def test_the_spread_of_a_third_mixer_decides_nothing():
    assert status("C28", cells(0.9, 0.5)) == "holds"
    assert status("C28", cells(0.8, 0.9)) == "does not hold"
    assert status("C28", cells(0.9, 0.9)) == "not resolved"  # a tie
    assert status("C28", {name: row[:1] for name, row in cells(0.9, 0.5).items()}) == "not resolved"  # one seed


def chain(names, losses, seeds=3):
    return {name: [loss + 0.001 * seed for seed in range(seeds)] for name, loss in zip(names, losses)}


LATTICE = ("DeltaNet", "TTT", "orthogonal", "normalised", "forget gate")


@pytest.mark.parametrize(
    ("losses", "expected"),
    [
        ((3.0, 3.0, 2.97, 2.94, 2.94), "holds"),
        ((3.0, 3.0, 2.97, 2.94, 2.90), "holds weakly"),  # the gate lowers the loss too
        ((3.0, 3.0, 2.97, 2.97, 2.97), "holds weakly"),
        ((3.0, 3.1, 3.07, 3.04, 3.04), "does not hold"),  # TTT loses to the delta rule
        ((3.0, 3.0, 3.0, 3.0, 3.0), "not resolved"),
        ((3.0, 3.0, 2.97, math.nan, 2.94), "not resolved"),
    ],
)
def test_parts_of_lattice(losses, expected):
    assert status("C33", chain(LATTICE, losses)) == expected


@pytest.mark.parametrize(
    ("gains", "encode", "expected"),
    [
        ((0.01, 0.02, 0.03), 2.9, "holds"),
        ((0.01, 0.02, 0.03), 3.0, "holds weakly"),
        ((0.03, 0.02, 0.01), 2.9, "holds weakly"),
        ((0.02, 0.02, 0.02), 2.9, "not resolved"),
        ((0.02, 0.02, 0.02), 3.0, "does not hold"),
        ((-0.03, -0.02, -0.01), 2.9, "holds weakly"),  # the objectives are equal
        ((-0.03, -0.02, -0.01), 3.0, "does not hold"),
    ],
)
def test_gain_of_lattice_by_context(gains, encode, expected):
    values = chain(("gdn", "decode", "encode", "similarity"), (3.0, 2.9, encode, 2.9))
    for length, gain in zip((256, 1024, 4096), gains):
        values |= {
            f"gdn, context {length}": [3.0, 3.1, 3.2],
            f"decode, context {length}": [3.0 - gain, 3.1 - gain, 3.2 - gain],
        }
    assert status("C34", values) == expected


@pytest.mark.parametrize(
    ("gating", "alpha", "spike", "expected"),
    [
        (0.05, 0.0, 9.0, "holds"),
        (0.05, 0.02, 9.0, "holds weakly"),
        (0.05, 0.0, 1.0, "holds weakly"),
        (0.0, 0.0, 1.0, "does not hold"),  # that alpha hardly matters is not half of the claim
        (math.nan, 0.0, 9.0, "not resolved"),
    ],
)
def test_parts_of_gka(gating, alpha, spike, expected):
    values = chain(("GKA", "without gating", "without alpha", "constant ridge"), (3.0, 3.0 + gating, 3.0 + alpha, 3.0))
    values |= {gradient_spike("GKA", 0.999): [3.0] * 3, gradient_spike("constant ridge", 0.999): [3.0 * spike] * 3}
    assert status("C35", values) == expected


def test_windows_of_a_training_that_learnt_nothing_decide_nothing():
    values = {}
    for ramp in ("paper", "release"):
        values[f"{ramp}: last ratio"] = [40.0]
        values[f"{ramp}: step at which the loss falls"] = [math.inf]
        for name in ("window when the loss falls over the length", "rank correlation of window and step before"):
            values[f"{ramp}: {name}"] = [math.nan]
    assert status("C31", values) == "not resolved"


def test_signs_beyond_the_error():
    assert (clear_sign(0.3, 0.1), clear_sign(-0.3, 0.1), clear_sign(0.1, 0.1), clear_sign(9.0, math.nan)) == (
        1,
        -1,
        0,
        0,
    )
    assert paired([3.0, 4.0, 5.0], [2.0, 3.0, 4.0]) == (1.0, 0.0)
    assert math.isnan(paired([3.0], [2.0])[1]) and math.isnan(Measurement({"x": [1.0, math.nan]}).error("x"))
