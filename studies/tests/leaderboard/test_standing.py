"""Places: ties inside the spread of seeds, single seeds, both directions."""

import pytest
from fastweights_studies.leaderboard import PARTS, places
from fastweights_studies.leaderboard.tables import LEARNING, NOT_RUN, UNMARKED, explanation, part_table


def rows(**values):
    return [{"mixer": name, "column": "c", "values": list(seeds)} for name, seeds in values.items()]


def shown(found):
    return {one.row["mixer"]: (one.place, one.tied) for one in found}


def test_a_difference_inside_the_spread_is_a_tie():
    found = places(rows(a=(0.90, 0.94), b=(0.91, 0.92), c=(0.50, 0.51), d=(0.525, 0.54)), "higher")
    assert [one.row["mixer"] for one in found] == ["a", "b", "d", "c"]
    assert shown(found) == {"a": (1, True), "b": (1, True), "d": (3, False), "c": (4, False)}


def test_ranges_nearer_than_the_smaller_one_are_tied():
    assert shown(places(rows(a=(0.60, 0.62), b=(0.63, 0.65)), "higher")) == {"b": (1, True), "a": (1, True)}
    assert shown(places(rows(a=(0.60, 0.62), b=(0.65, 0.67)), "higher")) == {"b": (1, False), "a": (2, False)}


def test_a_wild_mixer_is_not_tied_with_the_best():
    assert shown(places(rows(good=(0.0, 0.0), wild=(0.9, 1600.0)), "lower")) == {"good": (1, False), "wild": (2, False)}


def test_lower_is_better_where_the_part_says_so():
    assert [one.row["mixer"] for one in places(rows(a=(2.0, 2.1), b=(1.0, 1.1)), "lower")] == ["b", "a"]


def test_a_single_seed_tells_nothing_without_a_resolution():
    assert shown(places(rows(a=(0.9,), b=(0.1, 0.2)), "higher")) == {"a": (None, False), "b": (None, False)}


@pytest.mark.parametrize(("difference", "place"), [(0.019, 1), (0.021, 2)])
def test_single_seeds_tie_within_the_resolution(difference, place):
    found = places(rows(a=(3.0,), b=(3.0 + difference,)), "lower", 0.02)
    assert shown(found) == {"a": (1, place == 1), "b": (place, place == 1)}


def row(mixer, values, column="one", **more):
    return {
        "mixer": mixer, "column": column, "values": values, "state": 8, "parameters": 100, "grows": mixer == "softmax",
        "undertrained": False, "diverged": 0, "exact": None, **more,
    }  # fmt: skip


def test_the_table_marks_ties_undertrained_and_diverged_runs_and_what_was_not_run():
    found = [
        row("gdn", [0.9, 0.94], undertrained=True), row("softmax", [0.91, 0.93]), row("kda", [0.1, 0.1], diverged=2),
        row("gdn", [0.5, 0.5], "two", state=1024),
    ]  # fmt: skip
    head, lines = part_table(PARTS["mqar"], found, ["softmax", "gdn", "kda", "vla"])
    assert head == ["mixer", "state", "parameters", "one", "two"]
    assert {line[0]: line[3:] for line in lines} == {
        "gdn": ["0.920 ±0.020 (1=)*", "0.500 ±0.000 (1)"],
        "softmax (keeps every token)": ["0.920 ±0.010 (1=)", NOT_RUN],
        "kda": ["0.100 ±0.000 (3)!", NOT_RUN],
        "vla": [NOT_RUN, NOT_RUN],
    }
    assert {line[0]: line[1:3] for line in lines}["gdn"] == ["8 to 1,024", "100"]


def test_the_table_has_the_exact_regression_and_perplexities():
    _, lines = part_table(PARTS["regression"], [row("gdn", [0.5, 0.6], exact=0.25)], [])
    assert lines[0] == ["*exact ridge regression*", "", "", "0.250"]
    _, lines = part_table(PARTS["language"], [row("gdn", [2.0])], [], 0.02)
    assert lines[0][-1] == "7.389 (1)"


def test_language_models_are_not_marked_as_still_learning():
    """Rows of earlier versions say of each whether it was, by a rule that the order of the text decided."""
    found = [row("gdn", [2.0], undertrained=True), row("kda", [3.0], undertrained=True, diverged=1)]
    for part, best in (("language", "7.389 (1)"), ("needle", "2.000")):
        _, lines = part_table(PARTS[part], found, [], 0.02 if part == "language" else None)
        assert lines[0][-1] == best and lines[1][-1].endswith("!") and "*" not in lines[1][-1]
        assert UNMARKED in explanation(PARTS[part]) and LEARNING not in explanation(PARTS[part])
    assert LEARNING in explanation(PARTS["mqar"]) and UNMARKED not in explanation(PARTS["mqar"])


def test_the_best_mean_of_all_columns_stands_first_and_lacking_columns_last():
    found = [
        row(mixer, [value], column)
        for column, values in {"one": {"a": 0.9, "b": 0.8, "c": 1.0}, "two": {"a": 0.1, "b": 0.3}}.items()
        for mixer, value in values.items()
    ]
    for part, order in (("mqar", "bac"), ("regression", "abc")):
        _, lines = part_table(PARTS[part], found, [])
        assert "".join(line[0] for line in lines) == order
