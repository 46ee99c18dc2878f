"""The rules of trained claims on made numbers: ties, one seed, trainings that learnt nothing or were lost."""

import dataclasses
import math
import re
import statistics

import pytest
from fastweights_studies.claims import Measurement, committed_records, find_claim
from fastweights_studies.claims.measurement import mark_undertrained
from fastweights_studies.claims.papers import c32_preconditioners_in_language as preconditioners
from fastweights_studies.claims.papers import c33_parts_of_lattice as lattice
from fastweights_studies.claims.papers import c35_parts_of_gka as gka
from fastweights_studies.claims.papers.c23_fixed_penalty import FIXED, FULL
from fastweights_studies.claims.papers.c28_gka_in_small_models import CELLS, OTHERS
from fastweights_studies.claims.papers.c30_metaplasticity_in_a_curriculum import RAMPS, make_mixers
from fastweights_studies.claims.papers.c34_lattice_by_context import CHOICES, GDN, OBJECTIVES
from fastweights_studies.claims.readings import FIRST_WEIGHTS, SECOND_WEIGHTS
from fastweights_studies.claims.verdict import compare_seeds, settle

from .made import change_values, make_numbers, take_first_seed

READINGS = (FIRST_WEIGHTS, SECOND_WEIGHTS)


def verdict(claim, numbers):
    return find_claim(claim).decide(numbers if isinstance(numbers, Measurement) else Measurement(tuple(numbers)))


def status(claim, numbers):
    return verdict(claim, numbers).status


def reason(claim, numbers):
    return verdict(claim, numbers).reason


def accuracies(mixer, values, readings=READINGS, **column):
    """In these readings."""
    return [
        number
        for weights in readings
        for number in make_numbers("accuracy", values, mixer, **column, initializer_range=weights)
    ]


def fixed_and_full(full, fixed, readings=READINGS):
    """C23, with values by seed."""
    return accuracies(FULL, full, readings, pairs=16) + accuracies(FIXED, fixed, readings, pairs=16)


@pytest.mark.parametrize(
    ("full", "fixed", "expected"),
    [(1.0, 0.1, "holds"), (1.0, 0.9, "does not hold"), (0.5, 0.4, "does not hold"), (0.02, 0.02, "not resolved")],
)
def test_a_collapse_needs_a_memory_that_recalls(full, fixed, expected):
    assert status("C23", fixed_and_full([full], [fixed])) == expected


@pytest.mark.parametrize(
    ("first", "later", "expected"),
    [
        ((0.02, 0.02), (1.0, 0.1), "holds"),
        ((1.0, 0.1), (1.0, 0.9), "holds"),
        ((0.02, 0.02), (1.0, 0.9), "does not hold"),
    ],
)
def test_the_better_reading_counts(first, later, expected):
    numbers = []
    for weights, (full, fixed) in zip(READINGS, (first, later)):
        numbers += fixed_and_full([full], [fixed], [weights])
    assert status("C23", numbers) == expected


@pytest.mark.parametrize(
    ("vla", "expected", "said"),
    [
        ((0.04, 1.0, 1.0), "not resolved", "does not hold, holds, holds (seeds do not agree)"),
        ((0.97, 1.0, 1.0), "holds", None),  # on both sides of 0.98, but not far apart
        ((0.04, 0.9, 0.5), "does not hold", "does not hold, does not hold, does not hold (does not hold)"),
        ((1.0, 1.0, 1.0), "holds", None),
    ],
)
def test_a_mean_does_not_decide_over_seeds_that_do_not_agree(vla, expected, said):
    """The other reading does not hold."""
    numbers = []
    for name in ("vla-conv", "softmax", "linear", "deltanet"):
        numbers += accuracies(name, [0.5] * 3, [FIRST_WEIGHTS], pairs=24, setting="convolutions")
    for name in ("vla", "vla-softmax", "vla-linear", "vla-deltanet"):
        for weights in READINGS:
            values = list(vla) if (name, weights) == ("vla", SECOND_WEIGHTS) else [0.04] * 3
            numbers += accuracies(name, values, [weights], pairs=24, setting="paper")
    found = verdict("C22", numbers)
    assert found.status == expected and ("seeds by themselves" in found.reason) == bool(said)
    assert said is None or f"; seeds by themselves: {said}" in found.reason


def test_one_seed_and_diverged_trainings_are_said():
    record = committed_records()["C26"]
    assert record.seeds == [42] and record.reason.count("; one seed") == 2
    numbers = [number for number in record.measurement.numbers if number.measure != "diverged_trainings"]
    lost = {"pairs": 8, "length": 64, "initializer_range": SECOND_WEIGHTS}
    assert (
        reason("C26", numbers + make_numbers("diverged_trainings", [1], "vla-deltanet", **lost)).count(
            "diverged trainings: 1 of vla-deltanet, 8 pairs, length 64;"
        )
        == 1
    )
    assert record.reason.count("1 of vla-deltanet, 8 pairs, length 64;") == 2


def test_what_the_rules_of_c30_and_c31_leave_open_is_said():
    records = committed_records()
    said = records["C31"].statements[0]
    assert said.startswith("by its rule alone: ")

    def means(measure):
        return [records["C31"].measurement.mean(measure, ramp=ramp) for ramp in RAMPS]

    early, last = means("early_ratio"), means("last_ratio")
    assert f"reaches {early[0]:.1f} and {early[1]:.1f} in the first 200 steps where it has 2" in said
    assert f"the ratio ends at {last[0]:.0f} and {last[1]:.0f} where the paper has 40" in said
    paper, release = (f"{x:,.0f}" for x in means("fall_window"))
    assert f"windows are {paper} and {release} times the length when the loss falls" in said
    note = find_claim("C30").note
    assert (
        all("a tie (visible from" in row for row in records["C30"].statements) and len(records["C30"].statements) == 6
    )
    assert note.startswith("no comparison is clear; ")
    first = {
        (label, ramp): records["C30"].measurement.mean("stage_accuracy", make_mixers(ramp)[label], stage=1)
        for label in ("D", "D without")
        for ramp in RAMPS
    }
    assert max(first["D", "paper"], first["D", "release"]) < 0.01 and "with 0.01 and less" in note
    assert f"metaplasticity has {first['D without', 'paper']:.2f} and {first['D without', 'release']:.2f}" in note


def test_a_seed_without_wrong_answers_leaves_their_ranking_open():
    found = committed_records()["own-2-cuda"].measurement
    assert reason("own-2", found).count("AUROC of wrong answers unknown") == 1
    known = verdict("own-2", change_values(found, [0.6] * 3, "wrong_auroc", "rls", score="variance"))
    assert known.status == "does not hold" and "unknown" not in known.reason


def test_seeds_that_lie_far_apart_are_shown():
    said = reason("C23", fixed_and_full([0.06, 1.0], [0.98, 1.0]))
    assert said.count("by seed: vla, 16 pairs: 0.060, 1.000") == 2 and "A fixed, 16 pairs" not in said


@pytest.mark.parametrize(
    ("seen", "drops", "expected"),
    [(1.0, (5, 20, 30), "holds"), (1.0, (0, 0, 0), "does not hold"), (0.02, (0, 0, 0), "not resolved")],
)
def test_points_are_lost_by_what_recalls(seen, drops, expected):
    numbers = []
    for pairs, drop in zip((8, 16, 24), drops):
        numbers += accuracies("vla", [seen], pairs=pairs, keys="seen")
        numbers += accuracies("vla", [seen - drop / 100], pairs=pairs, keys="unseen")
    assert status("C25", numbers) == expected


def cells(gka, others, spread=0.01):
    """C28 with three seeds; a mixer that is far behind has a large spread."""
    numbers = []
    for width, length, pairs in CELLS:
        column = {"pairs": pairs, "width": width, "length": length}
        for name, mean in {"gka": gka, **dict.fromkeys(OTHERS, others)}.items():
            values = [0.0, 0.1, 0.9] if name == "gla" else [mean - spread, mean, mean + spread]
            numbers += make_numbers("accuracy", values, name, **column)
    return Measurement(tuple(numbers))


def test_the_spread_of_a_third_mixer_decides_nothing():
    assert status("C28", cells(0.9, 0.5)) == "holds"
    assert status("C28", cells(0.8, 0.9)) == "does not hold"
    assert status("C28", cells(0.9, 0.9)) == "not resolved"  # a tie
    assert status("C28", take_first_seed(cells(0.9, 0.5))) == "not resolved"  # one seed


def test_cells_that_show_little_are_marked():
    values = cells(0.999, 0.995, spread=0.0)
    assert reason("C28", values).count("both at the ceiling") == len(CELLS) and "guess" not in reason("C28", values)
    values = change_values(values, [0.001, 0.002, 0.03], "accuracy", "gla", width=64, length=128)
    learning = mark_undertrained({"pairs": 32, "width": 64, "length": 128}, mixer="gdn")
    row = verdict("C28", [*values.numbers, learning]).statements[0]
    assert row.endswith("both at the ceiling, gla guesses") and "gdn 0.995 (still learning)" in row


def chain(choices, losses):
    """Language models with three seeds."""
    return [
        number
        for choice, loss in zip(choices, losses)
        for number in make_numbers("loss", [loss, loss + 0.001, loss + 0.002], choice)
    ]


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
    assert status("C33", chain(lattice.CHOICES, losses)) == expected


def test_a_part_of_lattice_has_an_outcome_of_its_own():
    shown = reason("C33", chain(lattice.CHOICES, (3.0, 3.1, 3.07, 3.07, 3.0)))
    outcomes = ["higher loss", "lower loss", "a tie (visible from 0", "lower loss)"]
    assert all(row.endswith(outcome) for row, outcome in zip(shown.split("), "), outcomes, strict=True))


@pytest.mark.parametrize(("last", "said"), [(3.02, "within 0.03 as forecast"), (3.045, "not within 0.03 as forecast")])
def test_a_misprint_is_what_is_near(last, said):
    shown = reason("C32", chain(preconditioners.CHOICES, (3.0, 3.0, 3.0, 3.0, 3.1, last)))
    assert shown.endswith(f", {said}") and "1 of 4 are clear" in shown


@pytest.mark.parametrize(("norms", "limited"), [((1386, 1319, 1457), True), ((1500, 1490, 1510), False)])
def test_a_number_at_its_limit_is_marked(norms, limited):
    numbers = []
    for mean in (0, 1):
        numbers += make_numbers("norm", norms, mean_value=mean) + make_numbers("slope", [0.5] * 3, mean_value=mean)
    assert ("at the limit of 1385.5" in reason("C18", numbers)) == limited and status("C18", numbers) == "holds weakly"


@pytest.mark.parametrize(
    ("last", "said"), [(0.5, "half of the claim holds here"), (1.2, "half of the claim does not hold")]
)
def test_both_halves_of_a_jacobian_of_norm_1(last, said):
    measures = {"largest_norm": 1.0, "largest_gradient_ratio": 1.3, "gradient_ratio": last}
    numbers = [number for measure, value in measures.items() for number in make_numbers(measure, [value])]
    shown = reason("C16", numbers)
    assert status("C16", numbers) == "holds" and said in shown and "reaches 1.30" in shown


@pytest.mark.parametrize(
    ("neutral", "share", "expected"),
    [(1e-7, 0.05, "holds"), (1e-7, 0.2, "holds weakly"), (1e-3, 0.05, "does not hold")],
)
def test_a_first_value_is_held_against_what_the_memory_adds(neutral, share, expected):
    numbers = make_numbers("neutral_difference", [neutral]) + make_numbers("difference", [0.01], b_scale=0.1)
    numbers += make_numbers("difference_over_memory", [0.01, share], b_scale=0.1)
    numbers += make_numbers("difference_over_memory", [0.001], b_scale=-4.0)
    numbers += make_numbers("source_accuracy", [1.0, 0.97]) + make_numbers("accuracy", [1.0, 0.9], b_scale=0.1)
    assert status("C12", numbers) == expected
    assert "recalls 0.970 or more" in reason("C12", numbers) and "recalls 0.900 or more" in reason("C12", numbers)


@pytest.mark.parametrize(
    ("gains", "encode", "expected"),
    [
        ((0.01, 0.02, 0.03), 2.9, "holds"),
        ((0.01, 0.02, 0.03), 3.0, "holds weakly"),
        ((0.03, 0.02, 0.01), 2.9, "holds weakly"),
        ((0.02, 0.02, 0.02), 2.9, "holds weakly"),  # the objectives are equal
        ((0.02, 0.02, 0.02), 3.0, "not resolved"),  # the gains may rise
        ((-0.03, -0.02, -0.01), 2.9, "holds weakly"),  # the objectives are equal
        ((-0.03, -0.02, -0.01), 3.0, "does not hold"),
    ],
)
def test_gain_of_lattice_by_context(gains, encode, expected):
    numbers = chain(CHOICES, (3.0, 2.9, encode, 2.9))
    for length, gain in zip((256, 1024, 4096), gains):
        numbers += make_numbers("context_loss", [3.0, 3.1, 3.2], GDN, context=length)
        for objective in OBJECTIVES:
            numbers += make_numbers("context_loss", [3.0 - gain, 3.1 - gain, 3.2 - gain], objective, context=length)
    found = Measurement(tuple(numbers))
    assert status("C34", found) == expected
    similarity = OBJECTIVES[-1]  # one objective that does not gain more
    shorter = found.values("context_loss", similarity, context=1024)
    found = change_values(found, shorter, "context_loss", similarity, context=4096)
    assert status("C34", found) != "holds" and "gain over GDN of similarity" in reason("C34", found)


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
    values = chain(gka.CHOICES, (3.0, 3.0 + gating, 3.0 + alpha, 3.0))
    for choice, times in ((gka.WHOLE, 3.0), (gka.CONSTANT_RIDGE, 3.0 * spike)):
        values += make_numbers("gradient_spike", [times] * 3, choice, share=0.999)
    assert status("C35", values) == expected
    if not math.isnan(gating):
        parts = re.findall(r"(holds|fails|open): (?:gating|alpha|the ridge)", reason("C35", values))
        assert parts == ["holds" if part else "fails" for part in (gating >= 0.02, alpha < 0.01, spike >= 2)]


def test_differences_of_c34_and_c35_are_those_of_their_seeds():
    """Of the values by seed, as a reader would compute them from the numbers of the page."""
    records = committed_records()
    found = records["C35"].measurement
    for choice in gka.CHOICES[1:]:
        differences = [x - y for x, y in zip(found.values("loss", choice), found.values("loss", gka.WHOLE))]
        assert f"{choice.label} {statistics.mean(differences):+.3g} [" in records["C35"].reason
    assert "(open: alpha hardly matters)" in records["C35"].reason
    found = records["C34"].measurement
    for objective in OBJECTIVES:
        losses = (found.values("context_loss", choice, context=4096) for choice in (GDN, objective))
        gains = [x - y for x, y in zip(*losses)]
        assert f"{math.expm1(statistics.mean(gains)):+.1%} at 4096" in records["C34"].reason


def test_windows_of_a_training_that_learnt_nothing_decide_nothing():
    measures = {"last_ratio": 40.0, "fall_step": math.inf, "fall_window": math.nan, "rank_correlation": math.nan}
    numbers = [
        number for ramp in RAMPS for measure, x in measures.items() for number in make_numbers(measure, [x], ramp=ramp)
    ]
    assert status("C31", numbers) == "not resolved"


def test_a_family_of_a_claim_has_one_error_and_one_seed_tells_nothing():
    """By Holm: t of three seeds at a confidence of 1 - 0.05 / 2 for the first of two, 1 - 0.05 for the second."""
    zero, left, close = dict.fromkeys(range(3), 0.0), {0: 0.9, 1: 1.0, 2: 1.1}, {0: 0.3, 1: 0.0, 2: -0.2}
    found = compare_seeds(
        {"left": (left, zero), "close": (close, zero), "one": ({7: 1.0}, {7: 0.5}), "lost": ({0: math.nan}, zero)}
    )
    error = 0.1 / 3**0.5
    assert found["left"].low == pytest.approx(1 - 6.2053 * error, rel=1e-4) and found["left"].sign == 1
    assert found["close"].sign == 0 and "a tie (visible from" in str(found["close"])
    assert (found["one"].sign, str(found["one"])) == (0, "+0.5 (one seed)") and found["one"].visible == math.inf
    assert found["lost"].sign == 0 and math.isnan(found["lost"].mean)
    assert [found[name].within(1.0) for name in ("left", "one")] == [0, 0]
    assert (found["left"].within(0.5), found["left"].within(2.0)) == (-1, 1)


def test_a_claim_of_parts_is_open_where_an_open_part_matters():
    def outcome(first, second):
        return "holds" if first and second else "does not hold"

    assert [settle(outcome, 1, x) for x in (1, 0, -1)] == ["holds", "not resolved", "does not hold"]
    assert settle(outcome, -1, 0) == "does not hold"
    assert settle(lambda part: "holds" if part else "holds weakly", 0) == "holds weakly"


def test_a_setting_that_cannot_decide_leaves_a_claim_open():
    claim = find_claim("S6")
    record = committed_records()["S6"]
    assert claim.decide(record.measurement).status == "does not hold" and claim.to_decide
    open_one = claim.verdict(record.measurement)
    assert open_one.status == "not resolved" and open_one.statements[-1] == "outcome of the rule: does not hold"
    decided = dataclasses.replace(claim, to_decide="").verdict(record.measurement)
    assert decided == claim.decide(record.measurement)


def test_an_error_with_a_value_that_is_not_finite_is_none():
    assert math.isnan(Measurement(tuple(make_numbers("x", [1.0, math.nan]))).error("x"))
