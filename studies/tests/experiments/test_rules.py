"""The rules of trained claims on made numbers: ties, one seed, trainings that learnt nothing or were lost."""

import math
import re
import statistics

import pytest
from fastweights_studies.experiments import Measurement, committed_records, find_claim
from fastweights_studies.experiments.claim import clear_sign, paired
from fastweights_studies.experiments.claims.c28_gka_in_small_models import CELLS, OTHERS, part
from fastweights_studies.experiments.claims.c34_lattice_by_context import OBJECTIVES
from fastweights_studies.experiments.readings import SECOND
from fastweights_studies.experiments.trained import accuracy, diverged_trainings, gradient_spike


def status(claim, values):
    return find_claim(claim).decide(Measurement(values)).status


def reason(claim, values):
    return find_claim(claim).decide(Measurement(values)).reason


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
    values = {accuracy(name, 24, "convolutions"): [0.5] * 3 for name in ("vla-conv", "softmax", "linear", "deltanet")}
    for name in ("vla", "vla-softmax", "vla-linear", "vla-deltanet"):
        values |= {accuracy(name, 24, f"paper{reading}"): [0.04] * 3 for reading in ("", f", {SECOND}")}
    values[accuracy("vla", 24, f"paper, {SECOND}")] = list(vla)
    verdict = find_claim("C22").decide(Measurement(values))
    assert verdict.status == expected and ("seeds by themselves" in verdict.reason) == bool(said)
    assert said is None or f"; seeds by themselves: {said}" in verdict.reason


def test_one_seed_and_diverged_trainings_are_said():
    record = committed_records()["C26"]
    assert record.seeds == [42] and record.reason.count("; one seed") == 2
    values = {name: row for name, row in record.measurement.values.items() if not name.startswith("diverged")}
    values[diverged_trainings(accuracy("vla-deltanet", 8, f"length 64, {SECOND}"))] = [1]
    reason = find_claim("C26").decide(Measurement(values)).reason
    assert reason.count("diverged trainings: 1 of vla-deltanet, 8 pairs, length 64;") == 1
    assert record.reason.count("1 of vla-deltanet, 8 pairs, length 64;") == 2


def test_what_the_rules_of_c30_and_c31_leave_open_is_said():
    records = committed_records()
    values = records["C31"].measurement.values
    said = records["C31"].reason.split("; ")[0]
    assert said.startswith("by its rule alone: ")

    def means(name):
        return [sum(row) / len(row) for ramp in ("paper", "release") if (row := values[f"{ramp}: {name}"])]

    early, last = means("largest ratio in the first 200 steps"), means("last ratio")
    assert f"reaches {early[0]:.1f} and {early[1]:.1f} in the first 200 steps where it has 2" in said
    assert f"the ratio ends at {last[0]:.0f} and {last[1]:.0f} where the paper has 40" in said
    paper, release = (f"{x:,.0f}" for x in means("window when the loss falls over the length"))
    assert f"windows are {paper} and {release} times the length when the loss falls" in said
    values, note = records["C30"].measurement.values, find_claim("C30").note
    clear = [row for row in records["C30"].reason.split("; ") if (x := re.search(r" to (\S+) \+- (\S+)$", row)) and
             abs(float(x[1])) > 2 * float(x[2])]  # fmt: skip
    assert [row.partition(") ")[0] for row in clear] == ["D over gdn (release"]
    assert note.startswith("the one clear comparison is with gdn (release ramp); no gain over the same layer without")
    first = {
        (mixer, ramp): sum(values[accuracy(mixer, 128, ramp) + ", stage 1"]) / 3
        for mixer in ("D", "D without")
        for ramp in ("paper", "release")
    }
    assert max(first["D", "paper"], first["D", "release"]) < 0.01 and "with 0.01 and less" in note
    assert f"metaplasticity has {first['D without', 'paper']:.2f} and {first['D without', 'release']:.2f}" in note


def test_a_seed_without_wrong_answers_leaves_their_ranking_open():
    values = dict(committed_records()["own-2-cuda"].measurement.values)
    assert find_claim("own-2").decide(Measurement(values)).reason.count("AUROC of wrong answers unknown") == 1
    known = {**values, "rls: AUROC of wrong answers by variance": [0.6, 0.6, 0.6]}
    verdict = find_claim("own-2").decide(Measurement(known))
    assert verdict.status == "does not hold" and "unknown" not in verdict.reason


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


def test_cells_that_show_little_are_marked():
    values = cells(0.999, 0.995, spread=0.0)
    assert reason("C28", values).count("both at the ceiling") == len(CELLS) and "guess" not in reason("C28", values)
    values[accuracy("gla", 32, part(64, 128))] = [0.001, 0.002, 0.03]
    learning = (accuracy("gdn", 32, part(64, 128)),)
    row = find_claim("C28").decide(Measurement(values, undertrained=learning)).reason.split("; ")[0]
    assert row.endswith("both at the ceiling, gla guesses") and "gdn 0.995 (still learning)" in row


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


def test_a_part_of_lattice_has_an_outcome_of_its_own():
    shown = reason("C33", chain(LATTICE, (3.0, 3.1, 3.07, 3.07, 3.0)))
    assert [row.rsplit("(")[-1] for row in shown.split("), ")] == ["higher loss", "lower loss", "a tie", "lower loss)"]


@pytest.mark.parametrize(("last", "said"), [(3.02, "within 0.03 as forecast"), (3.045, "not within 0.03 as forecast")])
def test_a_misprint_is_what_is_near(last, said):
    names = ("PGDN", "tied", "GDN", "unstable", "P-Mamba-2", "GDN[-1,1]")
    shown = reason("C32", chain(names, (3.0, 3.0, 3.0, 3.0, 3.1, last)))
    assert shown.endswith(f", {said}") and "1 of 4 are clear" in shown


@pytest.mark.parametrize(("norms", "limited"), [((1386, 1319, 1457), True), ((1500, 1490, 1510), False)])
def test_a_number_at_its_limit_is_marked(norms, limited):
    lines = ("|S| after 1000 tokens", "slope of log |S| over log T")
    values = {
        f"{line}, values of mean {mean}": list(norms) if line[0] == "|" else [0.5] for line in lines for mean in (0, 1)
    }
    assert ("at the limit of 1385.5" in reason("C18", values)) == limited and status("C18", values) == "holds weakly"


@pytest.mark.parametrize(
    ("last", "said"), [(0.5, "half of the claim holds here"), (1.2, "half of the claim does not hold")]
)
def test_both_halves_of_a_jacobian_of_norm_1(last, said):
    values = {"largest norm": [1.0], "largest |dL/dS_t| / |dL/dS_T|": [1.3], "|dL/dS_0| / |dL/dS_T|": [last]}
    assert (
        status("C16", values) == "holds" and said in reason("C16", values) and "reaches 1.30" in reason("C16", values)
    )


@pytest.mark.parametrize(
    ("neutral", "share", "expected"),
    [(1e-7, 0.05, "holds"), (1e-7, 0.2, "holds weakly"), (1e-3, 0.05, "does not hold")],
)
def test_a_first_value_is_held_against_what_the_memory_adds(neutral, share, expected):
    values = {
        "at b_scale -inf": [neutral],
        "at b_scale 0.1": [0.01],
        "at b_scale 0.1, of the memory's part": [0.01, share],
    }
    values["at b_scale -4.0, of the memory's part"] = [0.001]
    assert status("C12", values) == expected


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
            **{f"{name}, context {length}": [3.0 - gain, 3.1 - gain, 3.2 - gain] for name in OBJECTIVES},
        }
    assert status("C34", values) == expected
    values["similarity, context 4096"] = values["similarity, context 1024"]  # one objective that does not gain more
    assert status("C34", values) != "holds" and "gain over GDN of similarity" in reason("C34", values)


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
    if not math.isnan(gating):
        parts = re.findall(r"(holds|fails): (?:gating|alpha|the ridge)", reason("C35", values))
        assert parts == ["holds" if part else "fails" for part in (gating >= 0.02, alpha < 0.01, spike >= 2)]


def test_differences_of_c34_and_c35_have_their_errors():
    """Of the values by seed, as a reader would compute them from the numbers of the page."""
    records = committed_records()
    found = records["C35"].measurement.values
    for name in ("without gating", "without alpha", "constant ridge"):
        differences = [x - y for x, y in zip(found[name], found["GKA"])]
        shown = f"{statistics.mean(differences):+.4f} +- {statistics.stdev(differences) / 3**0.5:.4f}"
        assert f"{name} {shown}" in records["C35"].reason
    assert "(fails: alpha hardly matters)" in records["C35"].reason
    found = records["C34"].measurement.values
    for name in OBJECTIVES:
        gains = [x - y for x, y in zip(found["gdn, context 4096"], found[f"{name}, context 4096"])]
        error = math.exp(statistics.mean(gains)) * statistics.stdev(gains) / 3**0.5
        assert f"{math.expm1(statistics.mean(gains)):+.1%} +- {error:.1%} at 4096" in records["C34"].reason


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
